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
from tests.cases import CASES, Case
from tests.parallel.on_ranks import make_mesh, materialise
from tests.ranks import run_ranks
from tests.verify.meshes import every_mixer

SETS = {"every mixer": [every_mixer()], "every case": list(CASES)}


def _model(case: Case, tp: int) -> LanguageModel:
    mesh = make_mesh(tp)
    model = LanguageModel(case.model, mesh.tp)
    shard_model(model, model.block_list(), model.full_precision_modules(), mesh, compute_dtype=torch.float32)
    materialise(model)
    return model


def _save(folder: str, tp: int, which: str) -> None:
    for case in SETS[which]:
        save(Path(folder) / case.name, step=1, tensors=weights(_model(case, tp)), state={})


def _load(folder: str, tp: int, which: str) -> list[str]:
    """Names of tensors that differ after loading."""
    different = []
    for case in SETS[which]:
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


@pytest.mark.parametrize("which", ["every mixer", pytest.param("every case", marks=pytest.mark.slow)])
def test_saved_on_one_mesh_loads_on_another(tmp_path: Path, which: str):
    run_ranks(2, _save, str(tmp_path), 2, which)
    assert len(list(tmp_path.iterdir())) == len(SETS[which])
    for world_size, tp in [(1, 1), (4, 4), *([(2, 1), (3, 1)] if which == "every case" else [])]:
        assert run_ranks(world_size, _load, str(tmp_path), tp, which) == [[]] * world_size, (world_size, tp)
