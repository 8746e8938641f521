"""Metrics of a run: a JSON line and TensorBoard events per step, optionally W&B and Prometheus, and progress."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from megalin.errors import MegalinError
from megalin.parallel.agreement import on_rank_zero
from megalin.terminal_output import terminal
from megalin.train.events import EventLog
from megalin.train.jsonl import AppendedFile, BestEffortWriter, JsonLines
from megalin.train.prometheus import Prometheus
from megalin.train.terminal import LiveView, PlainLines, print_line
from megalin.train.weights_and_biases import WeightsAndBiases


class Metrics:
    """The sink of a run's metrics: `metrics.jsonl`, TensorBoard events and progress. A context manager.

    Steps count finished updates from 1, so the lines up to `resumed_step` belong to the checkpoint of that step; later
    lines of an earlier process are truncated, and no step appears twice. A file that cannot be written (a full disk)
    causes one warning; training continues, and the step that did not fit is missing as a whole.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        total_steps: int,
        resumed_step: int = 0,
        log_interval: int = 10,
        event_log: EventLog | None = None,
        wandb_project: str | None = None,
        wandb_config: Mapping[str, Any] | None = None,
        prometheus: Callable[[], Prometheus] | None = None,
        console: Console | None = None,
    ) -> None:
        """Opens the files under `folder`, which exists, on rank 0. Every rank creates a `Metrics` (one broadcast).

        Args:
            log_interval: steps between two lines of progress if `console` (default: stdout) is not a terminal.
            event_log: receives the step of each write; a terminal shows its newest event.
            wandb_project: Weights & Biases project that also receives the metrics, with `wandb_config` as its config.
            prometheus: opens the destination for Prometheus, on rank 0.

        Raises:
            StorageError: on every rank, when metrics.jsonl cannot be opened or truncated.
            ConfigError: on every rank, when W&B or Prometheus is configured but not installed, or cannot start.
        """
        self._sinks: list[_Sink] = []
        self._files: list[JsonLines | _Events] = []
        self._wandb: WeightsAndBiases | None = None
        self._last_step = resumed_step
        self._event_log = event_log
        self._console: Console | None = None
        self._writer = BestEffortWriter("the terminal")

        def open_sinks() -> None:
            # These two may refuse the run: they are opened before lines of an earlier run are cut.
            if prometheus is not None:
                self._sinks.append(prometheus())
            if wandb_project is not None:
                self._wandb = WeightsAndBiases(
                    Path(folder), wandb_project, wandb_config or {}, resumed=resumed_step > 0
                )
            self._files.append(JsonLines(Path(folder) / "metrics.jsonl", resumed_step=resumed_step))
            events = Path(folder) / "tensorboard"
            BestEffortWriter(str(events)).attempt(lambda: self._files.append(_Events(events, resumed_step)))
            self._sinks += self._files
            self._console = shown_on = console or Console(file=terminal())
            if shown_on.is_terminal and not shown_on.is_dumb_terminal:
                self._sinks.append(LiveView(shown_on, total_steps, resumed_step, event_log))
            else:
                self._sinks.append(PlainLines(shown_on, total_steps, resumed_step, log_interval))

        try:
            on_rank_zero(open_sinks)
        except MegalinError:
            self.close(failed=True)
            raise

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Records `values` (units in their names) of `step`, once per step and in order; on disk when this returns.

        In JSON a value that is not finite is null, with `<name>_nonfinite` = "nan", "inf" or "-inf" added.
        """
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        self._last_step = step
        if self._event_log is not None:
            self._event_log.step = step
        for sink in self._sinks:
            sink.write(step, values)
        if self._wandb is not None:
            self._wandb.write(step, values)

    def rewind(self, step: int) -> None:
        """Removes the lines of steps after `step`, which are undone, so that they can be written again; a collective.

        Raises:
            StorageError: on every rank, if metrics.jsonl cannot be written.
        """
        self._last_step = step
        if self._event_log is not None:
            self._event_log.step = step
        on_rank_zero(lambda: [file.rewind(step) for file in self._files])

    def print_line(self, line: str) -> None:
        """Prints a line above the progress; does nothing on ranks that do not write."""
        console = self._console
        if console is not None:
            self._writer.attempt(lambda: print_line(console, line))

    def close(self, *, failed: bool = False) -> None:
        """Closes the files and restores the terminal; a second call does nothing.

        Args:
            failed: whether the run ends with an error, which W&B shows.
        """
        for sink in self._sinks:
            sink.close()
        self._sinks, self._files = [], []
        if self._wandb is not None:
            self._wandb.close(failed=failed)
            self._wandb = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


class _Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float | int], /) -> object: ...

    def close(self) -> None: ...


class _Events:
    # Written in this thread: SummaryWriter's own thread would die on a full disk with a traceback in the terminal.
    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Raises OSError."""
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(folder / name)
        self._records = RecordWriter(self._file)
        self._record(file_version="brain.Event:2")
        self.rewind(resumed_step)

    def rewind(self, step: int) -> None:
        # TensorBoard drops earlier events from the step of a start on.
        self._record(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._record(step=step, summary=Summary(value=scalars))

    def _record(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def close(self) -> None:
        self._file.close()
