"""Branches of a run: equal to an uninterrupted run of their schedule bit for bit, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megalin.errors import ConfigError, MegalinError
from megalin.train.config import load_run_config
from tests.model_runs import DROPOUT, checkpoint_tensors, ledger, metrics, steps_saved, train_here, write_config
from tests.ranks import run_ranks

TRUNK = ["schedule.type=wsd", "schedule.decay_steps=2", "checkpoint.keep_steps=[5]", "checkpoint.keep_latest=1"]
BRANCH = ["schedule.type=wsd", "schedule.decay_steps=4", "train.steps=9"]
"""Decays from the rate of the trunk's step 5, where the trunk has eight steps of a constant rate."""


def _runs(config: Path, calls: Sequence[tuple[Path, Sequence[str]]]) -> list[str]:
    """Trains runs one after the other; returns the errors of those that fail."""
    messages = []
    for folder, overrides in calls:
        try:
            train_here(config, folder, *overrides)
        except MegalinError as error:
            messages.append(str(error))
    return messages


def test_branch_equals_an_uninterrupted_run_of_its_schedule(tmp_path):
    """Weights, moments, metrics and samples, also where the branch itself is stopped and resumed without its trunk."""
    config = write_config(tmp_path, model=DROPOUT)
    trunk, branch, whole, late = (tmp_path / name for name in ("trunk", "branch", "whole", "late"))
    start = [*BRANCH, f"train.branch_from={trunk}@5"]
    calls = [(trunk, TRUNK), (whole, BRANCH), (branch, [*start, "train.stop_after_steps=7"])]
    assert run_ranks(1, _runs, config, calls) == [[]]
    assert steps_saved(trunk) == [5, 12]
    trunk.rename(moved := tmp_path / "moved")
    calls = [(branch, start), (late, start), (late, [*BRANCH, f"train.branch_from={moved}"])]
    errors = run_ranks(1, _runs, config, calls)[0]
    assert metrics(branch)[-1] == metrics(whole)[-1]
    assert [line["step"] for line in metrics(branch)] == [6, 7, 8, 9]
    keys = ("loss", "learning_rate", "tokens", "flops", "grad_norm")
    assert [[line[key] for key in keys] for line in metrics(branch)] == [
        [line[key] for key in keys] for line in metrics(whole)[5:]
    ]
    assert ledger(branch) == ledger(whole)[5:]
    actual, wanted = checkpoint_tensors(branch), checkpoint_tensors(whole)
    assert actual.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(actual[name], wanted[name])] == []
    assert "train.branch_from = " in errors[0]
    assert "no such folder; give a run folder, or RUN@STEP" in errors[0]
    assert "has 12 finished steps, which leaves none of train.steps = 9; name an earlier one" in errors[1]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.branch_from=a", "train.initial_weights=b"], "train.branch_from = 'a' continues a run with its optim"),
        (["checkpoint.keep_steps=[13]"], r"checkpoint.keep_steps = \[13\]: 13 is no step of a run of 12; remove it"),
    ],
)
def test_keys_that_contradict_each_other(overrides, expected, tmp_path):
    with pytest.raises(ConfigError, match=expected):
        load_run_config(write_config(tmp_path), overrides)
