"""Export and import of every architecture: bits, config, and logits against those of the external class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalin.checkpoint.tensors import weights
from megalin.interop.weights.exporting import export_hf
from megalin.interop.weights.importing import import_hf
from megalin.model.language_model import LanguageModel
from megalin.train.open_run import open_run
from tests.cases import build
from tests.interop.weights.models import MODELS, NAMES, make_tokens, read_exported, read_run, write_run

TIES = (True, False)
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name == "mamba2" else name for name in NAMES]
"""Mamba-2 of one group has the tensors of several groups."""


def _logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model(make_tokens()[None]).logits[0]


def _assert_same_weights(model: LanguageModel, other: LanguageModel) -> None:
    ours, theirs = weights(model), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("tied", TIES, ids=["tied", "untied"])
@pytest.mark.parametrize("name", EVERY)
def test_round_trip_keeps_every_bit(name: str, tied: bool, tmp_path: Path):
    external = MODELS[name]
    model = write_run(tmp_path / "run", external.table | {"tie_embeddings": tied})
    layout = export_hf(tmp_path / "run", tmp_path / "out", form=external.format)
    assert (layout.format, layout.architecture) == (external.format, external.architecture)
    imported = import_hf(tmp_path / "out", tmp_path / "back")
    assert imported.layout == layout
    assert imported.num_parameters == model.num_parameters()
    back = read_run(tmp_path / "back")
    _assert_same_weights(model, back)
    assert torch.equal(_logits(model), _logits(back))
    (before, _), (after, _) = open_run(tmp_path / "run"), open_run(tmp_path / "back")
    plain = {"init_std", "output_init", "layers"}
    assert after.model.model_dump(exclude=plain) == before.model.model_dump(exclude=plain)
    blocks = zip(before.model.blocks(), after.model.blocks(), strict=True)
    assert all(block.sublayers == other.sublayers for (_, block), (_, other) in blocks)


def test_dropout_of_the_training_does_not_prevent_an_export(tmp_path: Path):
    model = write_run(tmp_path / "run", MODELS[NAMES[0]].table | {"hidden_dropout": 0.1, "embedding_dropout": 0.1})
    export_hf(tmp_path / "run", tmp_path / "out")
    import_hf(tmp_path / "out", tmp_path / "back")
    back = read_run(tmp_path / "back")
    assert (back.config.hidden_dropout, back.config.embedding_dropout) == (0.0, 0.0)
    _assert_same_weights(model, back)


@pytest.mark.parametrize("tied", TIES, ids=["tied", "untied"])
@pytest.mark.parametrize("name", EVERY)
def test_exported_folder_gives_its_class_the_same_logits(name: str, tied: bool, tmp_path: Path):
    external = MODELS[name]
    model = write_run(tmp_path / "run", external.table | {"tie_embeddings": tied})
    export_hf(tmp_path / "run", tmp_path / "out", form=external.format)
    tensors, config = read_exported(tmp_path / "out")
    assert config["architectures"] == [external.architecture]
    assert ("lm_head.weight" in tensors) != tied
    wide = build(model.config, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    theirs = external.forward({key: value.double() for key, value in tensors.items()}, config, make_tokens())
    ours = _logits(wide)[:, : model.config.vocab_size]
    assert theirs.shape == ours.shape
    assert (ours - theirs).norm() / theirs.norm() < 1e-12


@pytest.mark.parametrize("name", EVERY)
def test_large_models_are_sharded_with_an_index(name: str, tmp_path: Path):
    external = MODELS[name]
    model = write_run(tmp_path / "run", external.table)
    export_hf(tmp_path / "run", tmp_path / "out", form=external.format, file_bytes=50_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    tensors, _ = read_exported(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    import_hf(tmp_path / "out", tmp_path / "back")
    _assert_same_weights(model, read_run(tmp_path / "back"))
