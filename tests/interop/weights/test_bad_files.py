"""Folders with missing, foreign, hostile or corrupt files, and places that cannot be written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import weights
from megalin.data.tokenizers.tokenizer import BytePairTrainer
from megalin.errors import CheckpointError, ConfigError, MegalinError, StorageError
from megalin.interop.weights import exporting, importing
from megalin.interop.weights.exporting import export_hf
from megalin.interop.weights.importing import import_hf
from megalin.train.open_run import open_run
from tests.interop.weights.models import MODELS, model_table, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that LLaMA's class can express."""
    write_run(tmp_path / "run", MODELS["llama"].table)
    return tmp_path / "run"


@pytest.fixture
def sharded(run: Path, tmp_path: Path) -> Path:
    """The run's export in several files."""
    export_hf(run, tmp_path / "out", file_bytes=50_000)
    return tmp_path / "out"


def _fails(kind: type[MegalinError], folder: Path, run: Path, *parts: str) -> None:
    with pytest.raises(kind, match="(?s)" + ".*".join(re.escape(part) for part in parts)):
        import_hf(folder, run)


def _edit_index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_no_folder_and_no_weights(tmp_path: Path):
    _fails(CheckpointError, tmp_path / "none", tmp_path / "back", "not a folder; give one with config.json")
    (tmp_path / "empty").mkdir()
    _fails(CheckpointError, tmp_path / "empty", tmp_path / "back", "has neither model.safetensors nor")


def test_pickles_are_never_read(tmp_path: Path):
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    _fails(CheckpointError, tmp_path / "pickled", tmp_path / "back", "pickles only (pytorch_model.bin)", "safetensors")


def test_a_file_that_the_index_names_is_missing(sharded: Path, tmp_path: Path):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    _fails(CheckpointError, sharded, tmp_path / "back", "these files are missing: model-00002-of-00003")


@pytest.mark.parametrize("name", ["../run/config.toml", "/etc/passwd", "a/b.safetensors", "", ".hidden", 3, "x" * 300])
def test_names_in_the_index_stay_in_the_folder(name: Any, sharded: Path, tmp_path: Path):
    _edit_index(sharded, lambda index: index["weight_map"].update({"lm_head.weight": name}))
    _fails(CheckpointError, sharded, tmp_path / "back", "'lm_head.weight' is mapped to", "not the name of a file")


def test_an_index_without_a_map(sharded: Path, tmp_path: Path):
    _edit_index(sharded, lambda index: index.pop("weight_map"))
    _fails(CheckpointError, sharded, tmp_path / "back", "weight_map must be an object of tensor names and files")


def test_an_index_that_disagrees_with_its_files(sharded: Path, tmp_path: Path):
    _edit_index(sharded, lambda index: index["weight_map"].pop("model.norm.weight"))
    _fails(CheckpointError, sharded, tmp_path / "back", "disagree", "model.norm.weight: stored in ", "lists no file")


def test_a_corrupt_file(sharded: Path, tmp_path: Path):
    (sharded / "model-00001-of-00003.safetensors").write_bytes(b"\xff" * 64)
    _fails(CheckpointError, sharded, tmp_path / "back", "model-00001-of-00003.safetensors: not a safetensors file")


def test_a_directory_in_place_of_a_file(sharded: Path, tmp_path: Path):
    (sharded / "model-00001-of-00003.safetensors").unlink()
    (sharded / "model-00001-of-00003.safetensors").mkdir()
    _fails(CheckpointError, sharded, tmp_path / "back", "not a safetensors file: not a regular file")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[1]", "not a JSON object"), ("[" * 100_000, "not JSON"), (None, "cannot")],
)
def test_a_bad_config_file(text: str | None, message: str, sharded: Path, tmp_path: Path):
    (sharded / "config.json").unlink()
    if text is not None:
        (sharded / "config.json").write_text(text)
    _fails(CheckpointError, sharded, tmp_path / "back", "config.json", message)


def test_existing_folders_are_not_overwritten(run: Path, sharded: Path):
    message = "exists and is not an empty folder; name one that does not exist yet"
    with pytest.raises(ConfigError, match=message):
        export_hf(run, sharded)
    with pytest.raises(ConfigError, match=message):
        import_hf(sharded, run)


def test_an_empty_folder_may_be_filled(run: Path, tmp_path: Path):
    (tmp_path / "there").mkdir()
    export_hf(run, tmp_path / "there")
    assert (tmp_path / "there/config.json").exists()


def test_the_pages_of_imported_tensors_are_reserved(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A write to a mapped page for which a full disk has no block ends the process by SIGBUS."""
    reserved, mapped = [], importing.torch.from_file

    def from_file(path: str, **options: Any) -> Tensor:
        reserved.append((os.stat(path).st_blocks * 512, 4 * options["size"]))
        return mapped(path, **options)

    monkeypatch.setattr(importing.torch, "from_file", from_file)
    import_hf(sharded, tmp_path / "back")
    assert reserved
    assert all(blocks >= size for blocks, size in reserved)
    assert not list((tmp_path / "back").glob(".import"))


def test_places_that_cannot_be_written(run: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        export_hf(run, tmp_path / "file" / "out")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(importing.os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="no space left on device; free space or fix the permissions"):
        import_hf(sharded, tmp_path / "back")
    assert not (tmp_path / "back").exists(), "a failed import leaves nothing"
    BytePairTrainer(260).train(["a word and a word"]).save(sharded / "tokenizer.json")
    monkeypatch.setattr(importing.shutil, "copyfile", full)
    with pytest.raises(StorageError, match="no space left on device; free space or fix the permissions"):
        import_hf(sharded, tmp_path / "back")
    monkeypatch.setattr(exporting, "save_file", full)
    with pytest.raises(StorageError, match="no space left on device; free space or fix the permissions"):
        export_hf(run, tmp_path / "other")
    assert not [path for path in tmp_path.iterdir() if "other" in path.name], "a failed export leaves nothing"


def test_blocks_that_no_external_class_has(tmp_path: Path):
    tnl = {"type": "tnl", "num_heads": 4}
    write_run(tmp_path / "run", model_table(tnl, norm="srmsnorm"))
    with pytest.raises(
        ConfigError, match=r"no external class has blocks of \[tnl\]; supported: \[transnormer, glu\]: "
    ):
        export_hf(tmp_path / "run", tmp_path / "out")


def test_a_format_that_does_not_have_the_model(run: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="this model has no class in this format; use --format transformers"):
        export_hf(run, tmp_path / "out", form="codefuse")


SWIGLU = {"type": "glu", "intermediate_size": 40, "activation": "silu"}
HGRN2 = {"type": "hgrn2", "num_heads": 4, "output_norm": "rmsnorm"}
RODIMUS = {"type": "rodimus", "state_size": 6}
ODD = {"type": "glu", "intermediate_size": 36, "activation": "silu"}
KEY = {"type": "shared_key_attention", "num_heads": 4, "window": 1, "residual": "two_hop"}
INEXPRESSIBLE = {
    "kappa, eps and activation of HGRN2": (
        model_table(HGRN2, SWIGLU | {"activation": "none"}, eps=1e-6),
        None,
        [
            "HGRN2ForCausalLM (fla) cannot express this model",
            "model.layers.0.sublayers.0.output_norm_eps = 1e-06: the class has 1e-05",
            "model.layers.0.sublayers.0.scan_scale = 'one': the class has 'inverse_sqrt'",
            "model.layers.0.sublayers.1.activation = 'none': the class has 'silu'",
        ],
    ),
    "layer norms": (
        model_table({"type": "softmax", "num_heads": 4}, SWIGLU, norm="layernorm"),
        None,
        ["model.norm = 'layernorm': the class has 'rmsnorm'"],
    ),
    "a bias of the last projection alone": (
        model_table({"type": "softmax", "num_heads": 4, "output_bias": True}, SWIGLU),
        None,
        ["LlamaForCausalLM (transformers)", "sublayers.0.qkv_bias = False: the class has True"],
    ),
    "biases of a GLU together with Qwen2's": (
        model_table({"type": "softmax", "num_heads": 4, "qkv_bias": True}, SWIGLU | {"bias": True}),
        None,
        ["Qwen2ForCausalLM (transformers)", "sublayers.1.bias = True: the class has False"],
    ),
    "a scaled embedding": (model_table(RODIMUS, embedding_scale=3.0), "fla", ["model.embedding_scale = 3.0", "1.0"]),
    "another eps in one norm": (
        model_table({"type": "softmax", "num_heads": 4}, SWIGLU) | {"norm_eps": 1e-4},
        None,
        ["model.layers.0.sublayers.0.norm_eps = 1e-05: the class has 0.0001"],
    ),
    "a width that is no multiple of 8": (
        model_table(RODIMUS, KEY | {"window": 4}, ODD),
        "codefuse",
        ["model.layers.0.sublayers.2.intermediate_size = 36: the class has 40"],
    ),
    "a window of one": (
        model_table(RODIMUS, KEY, SWIGLU),
        "codefuse",
        ["window = 1", "at least 2 tokens; use --format"],
    ),
    "the paper's decay": (
        model_table(
            {"type": "transnormer", "num_heads": 4, "decay": "paper"},
            {"type": "glu", "intermediate_size": 40},
            norm="srmsnorm",
            eps=1e-6,
        ),
        None,
        ["decay = 'paper': the class has 'alibi'"],
    ),
}


@pytest.mark.parametrize("name", list(INEXPRESSIBLE))
def test_what_a_class_cannot_express_is_named_field_by_field(name: str, tmp_path: Path):
    table, form, parts = INEXPRESSIBLE[name]
    write_run(tmp_path / "run", table)
    with pytest.raises(ConfigError) as failure:
        export_hf(tmp_path / "run", tmp_path / "out", form=form)
    for part in parts:
        assert part in str(failure.value)
    assert not (tmp_path / "out").exists()


def test_one_block_of_transnormerllm(tmp_path: Path):
    table = MODELS["transnormerllm"].table
    write_run(tmp_path / "run", table | {"layers": table["layers"][:1]})
    with pytest.raises(ConfigError, match="one block, for which the released TransNormerLLM divides by zero"):
        export_hf(tmp_path / "run", tmp_path / "out")


def test_a_checkpoint_with_another_tensor(run: Path, tmp_path: Path):
    config, checkpoint = open_run(run)
    model = write_run(tmp_path / "same", config.model.model_dump())
    tensors = dict(weights(model)) | {"blocks.0.extra": torch.ones(2)}
    save(run / "checkpoints", step=4, tensors=tensors, state=checkpoint.state())
    with pytest.raises(CheckpointError, match=r"tensors that its model does not have: blocks\.0\.extra"):
        export_hf(run, tmp_path / "out")
