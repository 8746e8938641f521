"""Weights of every mixer, saved on one mesh and loaded on others, equal to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import weights
from megalin.model.language_model import LanguageModel
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.tensor_parallel import full_tensor
from tests.cases import CASES, NAMES, Case
from tests.parallel.on_ranks import make_mesh, materialise
from tests.ranks import run_ranks


def _model(case: Case, tp: int) -> LanguageModel:
    mesh = make_mesh(tp)
    model = LanguageModel(case.model, mesh.tp)
    shard_model(model, model.block_list(), model.full_precision_modules(), mesh, compute_dtype=torch.float32)
    materialise(model)
    return model


def _save(folder: str, tp: int) -> None:
    for case in CASES:
        save(Path(folder) / case.name, step=1, tensors=weights(_model(case, tp)), state={})


def _load(folder: str, tp: int) -> list[str]:
    """Names of tensors that differ after loading."""
    different = []
    for case in CASES:
        model = _model(case, tp)
        expected = {name: full_tensor(tensor.detach()).clone() for name, tensor in weights(model).items()}
        for tensor in weights(model).values():
            torch.nn.init.constant_(tensor.to_local(), float("nan"))
        checkpoint = newest(Path(folder) / case.name)
        assert checkpoint is not None
        load(checkpoint, weights(model))
        for name, tensor in weights(model).items():
            if not torch.equal(full_tensor(tensor.detach()), expected[name]):
                different.append(f"{case.name}: {name}")
    return different


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, _save, str(folder), 2)
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    return folder


@pytest.mark.parametrize(
    ("world_size", "tp"), [(1, 1), (4, 4), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (2, 3))]
)
def test_saved_on_one_mesh_loads_on_another(saved: Path, world_size: int, tp: int):
    assert run_ranks(world_size, _load, str(saved), tp) == [[]] * world_size
