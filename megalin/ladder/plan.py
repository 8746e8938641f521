"""The plan of a ladder: its rungs, their runs as configs, and their price in FLOPs, hours and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.evaluation.in_loop import check_run
from megalin.ladder.config import Ladder
from megalin.ladder.shapes import Shape, find_shape
from megalin.model.config import ModelConfig
from megalin.planner.estimate import Estimator
from megalin.planner.hardware import Hardware
from megalin.planner.workload import layout_of, workload_of
from megalin.train.config import RunConfig
from megalin.train.config_file import own_mixers

SEARCH = "search"
"""Folder of the runs that search the rates."""
START_SECONDS = 20.0
"""Seconds of a process outside its steps: start, kernels' compilation, evaluation; chosen, not measured."""
_CHECKPOINTS = 10
"""Checkpoints of a run to resume from, where the config does not say how many steps lie between them."""


class LadderRun(NamedTuple):
    """One run: a trunk, a branch of it, or a trial of a rate."""

    name: str
    steps: int
    """Of its schedule, those of its trunk included."""
    decay_steps: int
    first_step: int
    """Steps of its trunk before it branches; 0 without one."""
    tokens_per_parameter: float
    factor: float | None = None
    """Factor on the rate of the rule, of a trial."""

    @property
    def own_steps(self) -> int:
        """Steps that it trains itself."""
        return self.steps - self.first_step


class Rung(NamedTuple):
    """The runs of a mixer at one size, or the trials of its rate."""

    number: int
    """From 1 in the plan's order; 0 of trials, which belong to all rungs of their mixer."""
    mixer: str
    name: str
    """Its folder in that of the ladder."""
    difference: float
    """Of the shape from the parameters or FLOPs a token that it is matched to, relative."""
    shape: Shape
    samples: int
    """Of a step."""
    tokens_per_step: int
    learning_rate: float
    """By the rule."""
    warmup_steps: int
    runs: list[LadderRun]
    """The trunk first."""

    @property
    def trained_tokens(self) -> int:
        """Tokens of all steps that its runs train."""
        return sum(run.own_steps for run in self.runs) * self.tokens_per_step

    @property
    def flops(self) -> float:
        """FLOPs of these tokens, forward and backward."""
        return float(self.trained_tokens * self.shape.counts.flops_per_token)

    @property
    def is_search(self) -> bool:
        """True for the trials of a rate."""
        return self.number == 0


class Price(NamedTuple):
    """Estimates of the planner for a rung on one GPU."""

    hours: float
    memory_bytes: int


def make_rungs(ladder: Ladder) -> list[Rung]:
    """The rungs of every mixer by size, after the trials of its rate where the ladder searches it.

    Raises:
        ConfigError: a size that no shape has, runs without a held-out split, steps that are too few for the schedule,
            or any other problem of a run's config.
    """
    config, rungs = ladder.config, list[Rung]()
    first: dict[float, float] = {}
    by_flops = config.match == "flops"
    number = 0
    for mixer in config.mixers:
        values = ladder.values(mixer)
        base = _base(ladder, mixer, values)
        length = base.data.sequence_length
        assert isinstance(base.model, ModelConfig)
        for size in config.sizes:
            name = f"{mixer}-{_short(size)}"
            matched = by_flops and size in first
            target = first[size] if matched else size
            shape = find_shape(base.model, target, config.shape, length=length, by_flops=matched, name=name)
            first.setdefault(size, shape.counts.flops_per_token)
            number += 1
            matched_size = shape.counts.flops_per_token if matched else shape.counts.non_embedding_parameters
            rung = _rung(ladder, mixer, name, number, matched_size / target - 1, shape, length)
            if size == config.sizes[0] and config.rate_search is not None:
                trials = rung._replace(number=0, name=f"{SEARCH}/{mixer}", runs=_trials(ladder, rung))
                rungs.append(trials)
            rungs.append(rung)
    for rung in rungs:
        for run in rung.runs:
            check_run(run_config(ladder, rung, run, Path(), factor=1.0), 1)
    return rungs


def _base(ladder: Ladder, mixer: str, values: dict[str, Any]) -> RunConfig:
    """The config of a mixer's runs with placeholders for the keys that the ladder sets."""
    base = _with(values, train={"steps": 1, "global_batch_size": 1, "micro_batch_size": 1}, optimizer={"lr": 1.0})
    if isinstance(model := values.get("model"), dict) and model.get("kind") == "encoder":
        raise ConfigError(f'{ladder.path}: model.kind = "encoder" in the config of {mixer}; a ladder trains decoders')
    config = parse(RunConfig, base, f"{ladder.run_config} of {mixer}", context=own_mixers(ladder.run_config, base))
    if not config.data.has("validation"):
        raise ConfigError(
            f"{ladder.path}: no held-out split in the config of {mixer}, whose loss a ladder compares; give it "
            "data.validation or data.validation_fraction"
        )
    return config


def _rung(ladder: Ladder, mixer: str, name: str, number: int, difference: float, shape: Shape, length: int) -> Rung:
    config, parameters = ladder.config, shape.counts.non_embedding_parameters
    samples = rounded(config.batch.at(parameters) / length)
    tokens = samples * length
    rung = Rung(
        *(number, mixer, name, difference, shape, samples, tokens, config.rate.at(parameters)),
        warmup_steps=round(config.warmup * parameters / tokens),
        runs=[],
    )
    runs = [_run(ladder, rung, ratio, f"{ratio:g}x") for ratio in reversed(config.tokens)]
    trunk = runs[0]
    branches = [run._replace(first_step=run.steps - run.decay_steps) for run in runs[1:]]
    for run in branches:
        if run.first_step >= trunk.steps - trunk.decay_steps or run.first_step <= rung.warmup_steps:
            raise ConfigError(
                f"{name}: its run {run.name} of {run.steps} steps leaves its trunk after {run.first_step}, which must "
                f"be after the {rung.warmup_steps} steps of warmup and before the {trunk.steps - trunk.decay_steps} at "
                "which the trunk decays; use a smaller batch, or token counts that differ more"
            )
    return rung._replace(runs=[trunk, *branches])


def _run(ladder: Ladder, rung: Rung, ratio: float, name: str) -> LadderRun:
    steps = round(ratio * rung.shape.counts.non_embedding_parameters / rung.tokens_per_step)
    decay = round(ladder.config.decay * steps)
    if decay < 1 or rung.warmup_steps + decay > steps:
        raise ConfigError(
            f"{rung.name}: {ratio:g} tokens a parameter are {steps} steps of {rung.tokens_per_step:,} tokens, too few "
            f"for {rung.warmup_steps} steps of warmup and a decay over {ladder.config.decay:.0%}; lower batch.value"
        )
    return LadderRun(name, steps, decay, 0, ratio)


def _trials(ladder: Ladder, rung: Rung) -> list[LadderRun]:
    search = ladder.config.rate_search
    assert search is not None
    one = _run(ladder, rung, search.tokens, "")
    return [one._replace(name=f"{factor:g}", factor=factor) for factor in search.factors]


def rounded(samples: float) -> int:
    """The nearest of 1 to 8, or 4, 5, 6 and 7 times powers of two, whose micro-batches divide them."""
    unit = 2 ** max(0, math.floor(math.log2(max(samples, 1))) - 2)
    return max(1, round(samples / unit) * unit)


def run_config(ladder: Ladder, rung: Rung, run: LadderRun, folder: Path, *, factor: float) -> RunConfig:
    """The config of a run in the ladder's folder.

    Args:
        factor: on the rate of the rule; of trials their own replaces it.

    Raises:
        ConfigError: the config is invalid.
    """
    values = ladder.values(rung.mixer)
    most = values.get("train", {}).get("micro_batch_size", rung.samples)
    micro = max(size for size in range(1, min(most, rung.samples) + 1) if rung.samples % size == 0)
    keep = [branch.first_step for branch in rung.runs if branch.first_step and branch is not run]
    train: dict[str, Any] = {"steps": run.steps, "global_batch_size": rung.samples, "micro_batch_size": micro}
    checkpoint = {"every_steps": -(-run.own_steps // _CHECKPOINTS), "keep_latest": 1} | values.get("checkpoint", {})
    if run.first_step:
        train["branch_from"] = f"{folder / rung.name / rung.runs[0].name}@{run.first_step}"
    elif keep:
        checkpoint["keep_steps"] = sorted(keep)
    made = _with(
        values,
        train=train,
        optimizer={"lr": rung.learning_rate * (run.factor or factor)},
        schedule={"type": "wsd", "warmup_steps": rung.warmup_steps, "decay_steps": run.decay_steps},
        checkpoint=checkpoint,
        model=rung.shape.model.model_dump(mode="json", exclude_none=True),
    )
    return parse(RunConfig, made, f"{rung.name}/{run.name}")


def _with(values: dict[str, Any], **tables: dict[str, Any]) -> dict[str, Any]:
    return values | {name: {**values.get(name, {}), **table} for name, table in tables.items()}


def price(ladder: Ladder, rung: Rung, hardware: Hardware) -> Price:
    """Hours and memory of a rung on one GPU by the planner, with START_SECONDS for each run."""
    config = run_config(ladder, rung, rung.runs[0], Path(), factor=1.0)
    assert isinstance(config.model, ModelConfig)
    estimator = Estimator(workload_of(config, config.model), hardware)
    estimate = estimator.estimate(layout_of(config, 1), refined=False)
    seconds = sum(run.own_steps for run in rung.runs) * estimate.time.total + START_SECONDS * len(rung.runs)
    return Price(seconds / 3600, estimate.memory.total)


class Selection(NamedTuple):
    """The rungs that fit a budget, and those left out."""

    kept: list[Rung]
    left_out: list[Rung]


def within(rungs: Sequence[Rung], costs: Sequence[float], budget: float, *, unit: str) -> Selection:
    """Keeps sizes from the smallest up, each with all mixers, while their costs add up to at most the budget.

    Raises:
        ConfigError: the smallest size costs more.
    """
    groups: dict[int, list[int]] = {}
    for index, level in enumerate(_levels(rungs)):
        groups.setdefault(level, []).append(index)
    total, kept = 0.0, list[int]()
    for level in sorted(groups):
        total += sum(costs[index] for index in groups[level])
        if total > budget:
            break
        kept += groups[level]
    if not kept:
        smallest = sum(costs[index] for index in groups[0])
        names = ", ".join(rungs[index].name for index in groups[0])
        raise ConfigError(
            f"a budget of {budget:.3g} {unit} is below the smallest size's {smallest:.3g} ({names}); raise it, or use "
            "smaller sizes or fewer mixers"
        )
    chosen = set(kept)
    return Selection(
        [rung for index, rung in enumerate(rungs) if index in chosen],
        [rung for index, rung in enumerate(rungs) if index not in chosen],
    )


def _levels(rungs: Sequence[Rung]) -> Iterator[int]:
    """The place of each rung's size among those of its mixer; trials belong to the smallest."""
    mixer, level = "", -1
    for rung in rungs:
        if rung.mixer != mixer:
            mixer, level = rung.mixer, -1
        level += not rung.is_search
        yield max(level, 0)


def _short(size: float) -> str:
    """A size for names: 20k, 1M, 2.5M."""
    for unit, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{size / unit:.6g}{sign}"
    return f"{size:g}"
