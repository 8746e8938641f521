"""Checkpoints that do not fit: refused on every rank, with every mismatch, before any tensor is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors
import torch
import torch.distributed as dist

from megalin.checkpoint.load import load, newest, of_step
from megalin.checkpoint.tensors import training_tensors, weights
from megalin.errors import CheckpointError
from tests.checkpoint.saved import edit_json, tensors, write
from tests.ranks import run_ranks


def _mismatches(root: Path) -> str:
    checkpoint = newest(root)
    assert checkpoint is not None
    targets = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors(1).items()}
    del targets["optim.state.embedding.weight.step"]
    targets["head.weight"] = torch.full((4, 7), 7.0)
    targets["unknown"] = torch.full((3,), 7.0)
    if dist.is_initialized() and dist.get_rank() == 1:
        targets["only_here"] = torch.full((2,), 7.0)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, targets)
    assert all(bool((target == 7.0).all()) for target in targets.values())
    return str(caught.value)


def test_every_misfit_is_named_on_every_rank(tmp_path: Path) -> None:
    write(tmp_path, 1)
    messages = run_ranks(2, _mismatches, tmp_path)
    assert messages[0] == messages[1]
    assert messages[0].splitlines()[1:] == [
        "  head.weight: shape [4, 6] in the checkpoint, [4, 7] in the model",
        "  unknown: missing from the checkpoint; the model has shape [3]",
        "  only_here: missing from the checkpoint; the model has shape [2]",
        "  optim.state.embedding.weight.step: in the checkpoint with shape [], not in the model",
    ]


def test_another_vocabulary_is_called_that(tmp_path: Path) -> None:
    write(tmp_path, 1)
    targets = {**tensors(1), "embedding.weight": torch.zeros(16, 4)}
    with pytest.raises(CheckpointError, match=r"different vocabularies \(12 and 16 ids\); use the tokenizer"):
        load(newest(tmp_path), targets)  # type: ignore[arg-type]


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    targets = {**tensors(1), "head.weight": torch.zeros(4, 6)}
    with pytest.raises(CheckpointError, match=re.escape("dtype BF16 in the checkpoint, torch.float32 in the model")):
        load(newest(tmp_path), targets)  # type: ignore[arg-type]


def test_a_subset_needs_the_callers_word(tmp_path: Path) -> None:
    write(tmp_path, 1)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors(1).items() if "optim" not in name}
    with pytest.raises(CheckpointError, match="not in the model"):
        load(newest(tmp_path), targets)  # type: ignore[arg-type]
    load(newest(tmp_path), targets, ignore=("optim.",))  # type: ignore[arg-type]
    assert torch.equal(targets["embedding.weight"], tensors(1)["embedding.weight"])
    with pytest.raises(CheckpointError, match=r"head\.weight: in the checkpoint"):
        load(newest(tmp_path), {"embedding.weight": torch.zeros(12, 4)}, ignore=("optim.",))  # type: ignore[arg-type]


def _file_vanishes_on_one_rank(root: Path) -> str:
    checkpoint = newest(root)
    assert checkpoint is not None
    if dist.get_rank() == 1:

        def vanished(*args: object, **kwargs: object) -> None:
            raise OSError("stale file handle")

        safetensors.safe_open = vanished
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, tensors(1))
    return str(caught.value)


def test_a_read_that_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    write(tmp_path, 1)
    messages = run_ranks(2, _file_vanishes_on_one_rank, tmp_path)
    assert messages[0] == messages[1]
    assert re.match(r"rank 1: .*safetensors: cannot be read: stale file handle", messages[0])


def test_a_bug_while_reading_is_not_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a bug")

    write(tmp_path, 1)
    monkeypatch.setattr("megalin.checkpoint.storage.SafetensorsReader.read_data", fail)
    with pytest.raises(RuntimeError, match=r"loading .* failed(.|\n)*a bug"):
        load(newest(tmp_path), tensors(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"fused": False, "foreach": False}])
def test_created_optimizer_state_is_what_the_first_step_creates(options: dict[str, bool]) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model, torch.optim.AdamW(model.parameters(), **options)

    def step(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()

    model, optimizer = build()
    other_model, other_optimizer = build()
    created = training_tensors(other_model, other_optimizer)
    assert all(not bool(created[name].any()) for name in created if name.startswith("optim."))
    assert set(weights(model)) == {"0.weight", "0.bias", "1.bias"}
    assert len(created) == 3 * 4
    step(model, optimizer)
    step(other_model, other_optimizer)
    for name, tensor in training_tensors(model, optimizer).items():
        assert tensor.dtype == created[name].dtype, name
        assert torch.equal(tensor, created[name]), f"{name}: not a live reference, or not the state of a step"


@pytest.mark.parametrize(
    ("step", "hint"),
    [(7, "nearest are 5 and 10"), (1, "nearest is 5"), (12, "nearest is 10")],
)
def test_checkpoint_of_a_step_that_was_not_saved_is_refused_with_the_nearest(tmp_path: Path, step, hint) -> None:
    write(tmp_path, 5, 10)
    assert of_step(tmp_path, 5).manifest.step == 5
    with pytest.raises(CheckpointError, match=rf"no checkpoint of step {step}; {hint}$"):
        of_step(tmp_path, step)


def test_checkpoint_of_a_step_must_verify(tmp_path: Path) -> None:
    damaged = write(tmp_path, 5, 10)
    edit_json(damaged / "train_state.json", "step", value=11)
    with pytest.raises(CheckpointError, match=r"step-00000010: .*train_state.json.*; restore it, or choose another"):
        of_step(tmp_path, 10)
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; there is none yet; train the run first"):
        of_step(tmp_path / "none", 5)
