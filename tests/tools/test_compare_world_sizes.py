"""The comparison of runs on several numbers of ranks; tests/train/test_reduction.py compares real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_world_sizes
import pytest
from compare_world_sizes import PartOfRun, main

from tests.model_runs import write_config

TREE = ["train.reduction=tree", "train.micro_batch_size=1", "parallel.zero=1"]


class Ranks:
    """`run_ranks` that trains nothing: notes its calls, writes the metrics of the steps, and returns a part a rank."""

    def __init__(self, *, differs_on: int = 0) -> None:
        self.differs_on = differs_on
        self.calls: list[tuple[str, int, int]] = []

    def __call__(
        self, world_size: int, function: Any, config: Path, folder: Path, overrides: list[str], **_: Any
    ) -> list[PartOfRun]:
        last = int(overrides[-1].removeprefix("train.stop_after_steps="))
        self.calls.append((folder.name, world_size, last))
        folder.mkdir(parents=True, exist_ok=True)
        first = 1 + max((stop for name, _, stop in self.calls[:-1] if name == folder.name), default=0)
        digests = {step: {"weight": f"{step} {world_size == self.differs_on}"} for step in range(first, last + 1)}
        with (folder / "metrics.jsonl").open("a") as metrics:
            for step in digests:
                metrics.write(json.dumps({"step": step, "loss": 1.0 / step, "grad_norm": 1.0}) + "\n")
        return [PartOfRun(digests if rank == 0 else {}, 1.5) for rank in range(world_size)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def run(config: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(compare_world_sizes, "run_ranks", ranks)
    return main([str(config), "--folder", str(config.parent / "runs"), *arguments, *TREE])


def test_each_number_of_ranks_trains_as_many_steps(config, monkeypatch, capsys):
    ranks = Ranks()
    assert run(config, ranks, monkeypatch, "--ranks", "1,2,4") == 0
    assert ranks.calls == [
        *(("one", 1, 4), ("one", 1, 8), ("one", 1, 12)),
        *(("several", 1, 4), ("several", 2, 8), ("several", 4, 12)),
    ]
    printed = capsys.readouterr().out
    assert "CPU seconds: 1 rank 4.5; 1 -> 2 -> 4 10.5" in printed
    assert "steps with equal bits, of 12: loss 12, norm 12, all 1 weights 12" in printed


def test_a_difference_is_the_exit_code(config, monkeypatch, capsys):
    assert run(config, Ranks(differs_on=2), monkeypatch, "--ranks", "1,2") == 1
    assert "loss 12, norm 12, all 1 weights 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1,2,4,1,2"], "train.steps = 12 is not divisible by the 5 numbers of --ranks; use 10"),
        (["--ranks", "1,8"], "with 8 ranks, which do not divide the 4 micro-batches"),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_train_nothing(config, monkeypatch, capsys, arguments, message):
    ranks = Ranks()
    assert run(config, ranks, monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
    assert ranks.calls == []


def test_an_old_folder_is_refused(config, monkeypatch, capsys):
    (config.parent / "runs").mkdir()
    assert run(config, Ranks(), monkeypatch) == 2
    assert "exists; give a new one" in capsys.readouterr().err
