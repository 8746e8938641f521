"""Compares a run on one CPU rank with the same run on a number of ranks that changes on the way, bit by bit.

python tools/compare_world_sizes.py CONFIG --folder FOLDER --ranks 1,2,4,1 train.reduction=tree parallel.zero=1

Trains CONFIG with the overrides twice: in FOLDER/one on one rank, and in FOLDER/several on the given numbers of gloo
ranks one after the other, each for an equal number of steps, from the checkpoint of the one before. Prints in how many
steps loss, gradient norm and every weight (sha256 of each whole tensor after each update) have the same bits, and the
CPU seconds of both runs without those of the hashes. The exit code is 1 if anything differs, which is expected of
train.reduction=collective.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.errors import ConfigError
from megalin.parallel.agreement import rank
from megalin.parallel.ranks import run_ranks
from megalin.parallel.tensor_parallel import full_tensor
from megalin.terminal_output import exit_code
from megalin.train.config import load_run_config
from megalin.train.launch_checks import check_launch
from megalin.train.loop import train

Digests = dict[int, dict[str, str]]
"""sha256 in hex of each weight, by step."""


class WeightDigests:
    """Update hook that computes the sha256 of each whole weight after each step, on the first rank.

    Attributes:
        digests: of the steps so far; empty on other ranks.
        cpu_seconds: CPU time that it took of this rank.
    """

    name = "weight_digests"

    def __init__(self) -> None:
        self.digests: Digests = {}
        self.cpu_seconds = 0.0

    def memory_bytes(self, elements: int) -> int:
        return 0

    def start(self, weights: Mapping[str, Tensor]) -> None:
        pass

    def after_update(self, weights: Mapping[str, Tensor], *, applied: Tensor, step: int) -> None:
        started = time.process_time()
        found = {name: _sha256(full_tensor(weight.detach())) for name, weight in weights.items()}
        if rank() == 0:
            self.digests[step] = found
        self.cpu_seconds += time.process_time() - started

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class PartOfRun(NamedTuple):
    """A part of a run on one rank."""

    digests: Digests
    cpu_seconds: float
    """CPU time of this rank, without that of the digests."""


def train_part(config: Path, folder: Path, overrides: Sequence[str]) -> PartOfRun:
    """Trains in the process group of this process."""
    run, hook = load_run_config(config, list(overrides)), WeightDigests()
    check_launch(run, torch.distributed.get_world_size())
    started = time.process_time()
    train(run, torch.device("cpu"), folder, hooks=[hook])
    return PartOfRun(hook.digests, time.process_time() - started - hook.cpu_seconds)


class TrainedRun(NamedTuple):
    """A run from its first step to its last."""

    lines: dict[int, tuple[float, float]]
    """Loss and gradient norm by step."""
    digests: Digests
    cpu_seconds: float
    """CPU time of all ranks, without that of the digests."""


def check_ranks(config: Path, ranks: Sequence[int], overrides: Sequence[str]) -> None:
    """Raises ConfigError for a run that `megalin train` refuses on one of the numbers of ranks, or whose steps they do
    not divide."""
    run = load_run_config(config, list(overrides))
    for world_size in ranks:
        check_launch(run, world_size)
    steps, rest = divmod(run.train.steps, len(ranks))
    if rest:
        raise ConfigError(
            f"train.steps = {run.train.steps} is not divisible by the {len(ranks)} numbers of --ranks; use "
            f"{max(steps, 1) * len(ranks)}"
        )


def train_on(config: Path, folder: Path, ranks: Sequence[int], overrides: Sequence[str]) -> TrainedRun:
    """Trains on each number of ranks in turn for an equal number of steps, which `check_ranks` found to fit."""
    steps = load_run_config(config, list(overrides)).train.steps // len(ranks)
    digests: Digests = {}
    seconds = 0.0
    for number, world_size in enumerate(ranks, start=1):
        stop = [*overrides, f"train.stop_after_steps={number * steps}"]
        parts: list[PartOfRun] = run_ranks(world_size, train_part, config, folder, stop, timeout=None)
        digests |= parts[0].digests
        seconds += sum(part.cpu_seconds for part in parts)
    return TrainedRun(read_metrics(folder), digests, seconds)


def read_metrics(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step of a run folder."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


class BitComparison(NamedTuple):
    """Steps of two runs with the same bits, of all."""

    steps: int
    losses: int
    norms: int
    weights: int
    """Steps after which every weight is the same."""
    tensors: int
    """Weights of a step."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.steps == self.losses == self.norms == self.weights

    def __str__(self) -> str:
        return (
            f"steps with equal bits, of {self.steps}: loss {self.losses}, norm {self.norms}, all {self.tensors} "
            f"weights {self.weights}"
        )


def compare(first: TrainedRun, second: TrainedRun) -> BitComparison:
    """Compares every step of two runs of the same length."""
    steps = sorted(first.lines)
    assert steps == sorted(second.lines) == sorted(first.digests) == sorted(second.digests), "steps are missing"
    return BitComparison(
        len(steps),
        sum(first.lines[step][0] == second.lines[step][0] for step in steps),
        sum(first.lines[step][1] == second.lines[step][1] for step in steps),
        sum(first.digests[step] == second.digests[step] for step in steps),
        len(first.digests[steps[0]]),
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 for equal runs, 1 for different ones, or the exit code of the printed error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of its keys")
    parser.add_argument("--folder", type=Path, required=True, help="new folder for both runs")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2, 4, 1], help="numbers of ranks (1,2,4,1)")
    args = parser.parse_intermixed_args(arguments)
    return exit_code(lambda: _run(args))


def _numbers(text: str) -> list[int]:
    """The numbers of ranks; argparse reports the ValueError of another text."""
    return [int(number) for number in text.split(",")]


def _run(args: argparse.Namespace) -> int:
    if args.folder.exists():
        raise ConfigError(f"--folder {args.folder} exists; give a new one")
    check_ranks(args.config, args.ranks, args.overrides)
    one = train_on(args.config, args.folder / "one", [1] * len(args.ranks), args.overrides)
    several = train_on(args.config, args.folder / "several", args.ranks, args.overrides)
    found = compare(one, several)
    last = max(one.lines)
    print(f"loss of the last step {one.lines[last][0]!r} and {several.lines[last][0]!r}")
    print(f"CPU seconds: 1 rank {one.cpu_seconds:.1f}; {' -> '.join(map(str, args.ranks))} {several.cpu_seconds:.1f}")
    print(found)
    return 0 if found.equal else 1


if __name__ == "__main__":
    sys.exit(main())
