"""Tables of a ladder: its plan with prices, and the state of its runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megalin.data.missing_files import check_files
from megalin.data.sources import open_training
from megalin.ladder.lock import STALE_SECONDS, live_owner
from megalin.ladder.plan import LadderRun, Price, Rung
from megalin.ladder.state import chosen_factor, read_result
from megalin.ladder.worker import LOCK, last_record
from megalin.train.config import RunConfig

PLAN_HEAD = (
    *("rung", "name", "width x blocks", "parameters", "from target", "FLOPs/token", "tokens/step", "rate"),
    *("runs (steps)", "tokens", "FLOPs", "hours", "GiB"),
)
STATUS_HEAD = ("rung", "name", "run", "tokens", "steps", "state", "loss")


def plan_rows(rungs: Sequence[Rung], prices: Sequence[Price]) -> list[list[str]]:
    """A row for each rung, and one for their sums. Tokens and FLOPs are those trained; a trunk's count once."""
    rows = []
    for rung, price in zip(rungs, prices, strict=True):
        model, counts = rung.shape.model, rung.shape.counts
        runs = ", ".join(f"{run.name} ({run.own_steps:,})" for run in rung.runs)
        rows.append(
            [
                *("" if rung.is_search else str(rung.number), rung.name),
                *(f"{model.hidden_size} x {model.num_layers}", f"{counts.non_embedding_parameters:,}"),
                *(f"{rung.difference:+.1%}", f"{counts.flops_per_token:.4g}", f"{rung.tokens_per_step:,}"),
                *(f"{rung.learning_rate:.3g}", runs, f"{rung.trained_tokens:.4g}"),
                *(f"{rung.flops:.3g}", f"{price.hours:.2f}", f"{price.memory_bytes / 2**30:.1f}"),
            ]
        )
    sums = [sum(rung.trained_tokens for rung in rungs), sum(rung.flops for rung in rungs)]
    hours = sum(price.hours for price in prices)
    rows.append(["", "all", *[""] * 7, f"{sums[0]:.4g}", f"{sums[1]:.3g}", f"{hours:.2f}", ""])
    return rows


def status_rows(folder: Path, rungs: Sequence[Rung], *, stale_seconds: float = STALE_SECONDS) -> list[list[str]]:
    """A row for each run: its finished steps, its state and its held-out loss."""
    rows = []
    for rung in rungs:
        owner = live_owner(folder / rung.name / LOCK, stale_seconds=stale_seconds)
        running = "" if owner is None else f"running, {owner}"
        for run in rung.runs:
            result, tokens = read_result(folder, rung, run), run.steps * rung.tokens_per_step
            done = _finished_steps(folder, rung, run)
            if result is not None and result.loss is not None:
                state, loss = "done", f"{result.loss:.4f}"
            else:
                state, loss = ("failed" if result is not None else "started" if done else "waiting"), ""
                state, running = running or state, ""  # the first run that is not done
            number = "" if rung.is_search else str(rung.number)
            rows.append([number, rung.name, run.name, f"{tokens:,}", f"{done:,} of {run.steps:,}", state, loss])
    return rows


def status_notes(folder: Path, rungs: Sequence[Rung]) -> Iterator[str]:
    """Lines below the table: the rates' factors, and the runs that failed."""
    for rung in rungs:
        if rung.is_search and (factor := chosen_factor(folder, rung)) is not None:
            yield f"{rung.mixer}: rates times {factor:g}"
        for run in rung.runs:
            result = read_result(folder, rung, run)
            if result is not None and not result.is_done:
                yield f"{rung.name}/{run.name} failed: {result.error}"


def epoch_line(config: RunConfig, folder: Path) -> str:
    """The most epochs of a run's data, of its longest source.

    Raises:
        DataError, ConfigError: the data cannot be opened.
    """
    check_files(config.data)
    train = config.train
    training = open_training(
        config.data,
        config.model.vocab_size,
        seed=train.seed,
        steps=train.steps,
        global_batch_size=train.global_batch_size,
        folder=folder,
    )
    most = max(training.uses, key=lambda use: use.epochs)
    tokens = sum(use.tokens for use in training.uses)
    return f"data: {tokens:,} tokens; the longest run reads {most.name} {most.epochs:.2f} times"


def _finished_steps(folder: Path, rung: Rung, run: LadderRun) -> int:
    return int(last_record(folder / rung.name / run.name / "metrics.jsonl").get("step", 0))
