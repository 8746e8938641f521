"""Progress of one run of a sweep, read from its metrics while it trains: best values, and whether it should end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from megalin.checkpoint.manifest import MANIFEST_FILE, directory_step
from megalin.sweep.config import SweepConfig, metric_name
from megalin.train.config_file import CHECKPOINTS_NAME
from megalin.train.jsonl import JsonLines, step_lines

_FIELDS = {"step", "tokens", "tokens_per_second"}
"""Fields of every line of a run's metrics."""


class Status(StrEnum):
    """State of a run of a sweep."""

    COMPLETE = "complete"
    """Trained to its last step."""
    REACHED = "reached"
    """Ended at the goal's value `stop.reached`."""
    STALLED = "stalled"
    """Ended after `stop.patience` evaluations without a gain."""
    CUT = "cut"
    """Ended with the sweep; starting the sweep again continues it."""
    FAILED = "failed"
    """Ended by an error; starting the sweep again continues it."""


def remove_unsaved_steps(run: Path) -> None:
    """Removes the lines of a run's metrics after its newest checkpoint, as the run does where it goes on: a run that
    was killed before a save has not reached what they show. Raises StorageError."""
    metrics, checkpoints = run / "metrics.jsonl", run / CHECKPOINTS_NAME
    if metrics.is_file():
        names = (folder.parent.name for folder in checkpoints.glob(f"*/{MANIFEST_FILE}"))
        steps = (step for name in names if (step := directory_step(name)) is not None)
        JsonLines(metrics, resumed_step=max(steps, default=0)).close()


class Progress:
    """Values of one run so far.

    Attributes:
        steps: finished steps.
        tokens: tokens that the run has trained on.
        best: the metrics of the step with the best goal; empty before the first evaluation.
        status: the reason to end the run; None while it should go on.
    """

    def __init__(self, config: SweepConfig, values: Mapping[str, str], metrics: Path) -> None:
        """`values`: the run's value of each axis."""
        self._stop, self._path = config.stop, metrics
        self._sign = 1.0 if config.better == "higher" else -1.0
        self._goal = metric_name(config.goal, values)
        self._loss = None if config.stop.loss is None else metric_name(config.stop.loss, values)
        self._start()

    def _start(self) -> None:
        self._offset = 0
        self._rates: list[float] = []
        self._gained_goal, self._gained_loss, self._without_gain = float("-inf"), float("inf"), 0
        self.steps, self.tokens = 0, 0
        self.best: dict[str, Any] = {}
        self.status: Status | None = None

    def update(self) -> None:
        """Reads the lines that were written since the last call; all lines again after the run, resumed, has removed
        those of unsaved steps."""
        records = self._new_records()
        if records is None:
            self._start()
            records = self._new_records() or []
        for record in records:
            self.steps, self.tokens = record["step"], record["tokens"]
            self._rates.append(record["tokens_per_second"])
            goal = record.get(self._goal)
            if goal is not None and self.status is None:
                self._judge(self._sign * goal, record)

    def tokens_per_second(self) -> float | None:
        """Median over the steps; None before the first."""
        return statistics.median(self._rates) if self._rates else None

    def _judge(self, goal: float, record: dict[str, Any]) -> None:
        """Updates the best values and the status by an evaluation; `goal` is negative where lower is better."""
        stop = self._stop
        if not self.best or goal > self._sign * self.best[self._goal]:
            self.best = record
        found = None if self._loss is None else record.get(self._loss)
        loss = float("inf") if found is None else found  # null: it was not finite
        # Against the values at the last gain, so that small steps add up to one.
        loss_gained = math.isfinite(loss) and loss <= self._gained_loss * (1 - stop.min_loss_gain)
        if loss_gained or goal >= self._gained_goal + stop.min_gain:
            self._gained_goal, self._gained_loss = max(goal, self._gained_goal), min(loss, self._gained_loss)
            self._without_gain = 0
        else:
            self._without_gain += 1
        if stop.reached is not None and goal >= self._sign * stop.reached:
            self.status = Status.REACHED
        elif stop.patience is not None and self._without_gain >= stop.patience:
            self.status = Status.STALLED

    def _new_records(self) -> list[dict[str, Any]] | None:
        """Records after those that were read, of whole lines only: the run may be writing the last one; torn and
        foreign lines are skipped. None where the file was truncated since."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(self._offset - 1, 0))
                data = file.read()
        except FileNotFoundError:
            return []
        if self._offset:
            if not data.startswith(b"\n"):
                return None
            data = data[1:]
        whole = data[: data.rfind(b"\n") + 1]
        steps = step_lines(whole.splitlines(keepends=True))
        records = [record for _, record in steps if record.keys() >= _FIELDS]
        if self._offset and records and records[0]["step"] != self.steps + 1:  # a branch begins after its trunk
            return None
        self._offset += len(whole)
        return records
