"""What a run tells about itself: a JSON line and TensorBoard events a step, progress for people, the loss curve."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from megalin.errors import StorageError

_SHOWN = {
    "loss": "loss {:.4f}",
    "mlm_loss": "MLM {:.4f}",
    "nsp_loss": "NSP {:.4f}",
    "evaluation_loss": "evaluation loss {:.4f}",
    "evaluation_mlm_accuracy": "MLM accuracy {:.1%}",
    "evaluation_nsp_accuracy": "NSP accuracy {:.1%}",
    "grad_norm": "grad norm {:.3f}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "model_flops_utilization": "MFU {:.1%}",
}


class Metrics:
    """The sink of a run's metrics: `metrics.jsonl`, TensorBoard events and progress. A context manager.

    Steps count finished updates from 1, so the lines up to `resumed_step` belong to the checkpoint of that step; what
    an earlier process wrote beyond it is cut off, and no step appears twice. A file that cannot be written (a full
    disk) is warned about once; training goes on, and the step that did not fit is missing as a whole.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        total_steps: int,
        resumed_step: int = 0,
        log_interval: int = 10,
        enabled: bool = True,
        console: Console | None = None,
    ) -> None:
        """Opens the files under `folder`, which exists.

        Args:
            log_interval: steps between two lines of progress where `console` (default: stdout) is no terminal.
            enabled: whether this rank writes; rank 0 only.

        Raises:
            StorageError: when the files cannot be opened or cut.
        """
        self._sinks: list[_Sink] = []
        self._warned: set[_Sink] = set()
        self._last_step = resumed_step
        self._console: Console | None = None
        if not enabled:
            return
        try:
            self._sinks.append(JsonLines(Path(folder) / "metrics.jsonl", resumed_step))
            self._sinks.append(_Events(Path(folder) / "tensorboard", resumed_step))
        except OSError as error:
            self.close()
            raise StorageError(
                f"{folder}: metrics cannot be written ({error}); free space, or choose another run folder"
            ) from None
        self._console = console = console or Console()
        if console.is_terminal:
            self._sinks.append(_ProgressBar(console, total_steps, resumed_step))
        else:
            self._sinks.append(_PlainLines(console, total_steps, resumed_step, log_interval))

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Records `values` (units in their names) of `step`, once a step and in order; on disk when this returns.

        In JSON a value that is not finite is null, beside `<name>_nonfinite` = "nan", "inf" or "-inf".
        """
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        self._last_step = step
        for sink in self._sinks:
            try:
                sink.write(step, values)
            except OSError as error:
                if sink not in self._warned:
                    self._warned.add(sink)
                    warnings.warn(
                        f"{sink.name} cannot be written ({error.strerror}); training goes on, steps are missing there "
                        "until there is space",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def tell(self, line: str) -> None:
        """Prints a line beside the progress; nothing where this rank does not write."""
        if self._console is not None:
            _print(self._console, line)

    def close(self) -> None:
        """Closes the files and leaves the terminal as it was; a second call does nothing."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Sink(Protocol):
    name: str

    def write(self, step: int, values: Mapping[str, float | int]) -> None: ...

    def close(self) -> None: ...


class _AppendedFile:
    """A file that grows by whole records: one that does not fit is taken back."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if len(rest) < len(record):
                os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        os.close(self._descriptor)


class JsonLines:
    """A file of JSON objects, each with a step, one a line; lines beyond `resumed_step` are cut off when it is opened.

    Every method raises OSError when the file cannot be written; a line that does not fit is taken back whole.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.name = str(path)
        if path.exists():
            _cut(path, resumed_step)
        self._file = _AppendedFile(path)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Adds numbers of a step; one that is not finite is null, beside its name with _nonfinite."""
        line: dict[str, float | int | str | None] = {"step": step}
        for name, value in values.items():
            if math.isfinite(value):
                line[name] = value
            else:
                line[name], line[f"{name}_nonfinite"] = None, repr(float(value))
        self.write_line(line)

    def write_line(self, line: Mapping[str, float | int | str | None]) -> None:
        """Adds an object; on disk when this returns."""
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class _Events:
    # Written in this thread: SummaryWriter's own would die of a full disk with a traceback on the terminal.
    def __init__(self, folder: Path, resumed_step: int) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self.name = str(path)
        self._file = _AppendedFile(path)
        self._records = RecordWriter(self._file)
        self._record(file_version="brain.Event:2")
        # Makes TensorBoard drop what earlier event files hold from this step on.
        self._record(step=resumed_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._record(step=step, summary=Summary(value=scalars))

    def _record(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def close(self) -> None:
        self._file.close()


class _ProgressBar:
    name = "the terminal"

    def __init__(self, console: Console, total_steps: int, resumed_step: int) -> None:
        self._total_steps = total_steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[time_name]}"),
            console=console,
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=resumed_step, shown="", time_name="left")
        self._progress.start()

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        if "evaluation_loss" in values:
            _print(self._progress.console, f"step {step}/{self._total_steps}  {_shown(values, list(_SHOWN))}")
        shown = _shown(values, ["loss", "tokens_per_second"])
        time_name = "left" if step < self._total_steps else "in all"
        self._progress.update(self._task, completed=step, shown=shown, time_name=time_name)

    def close(self) -> None:
        self._progress.stop()


class _PlainLines:
    name = "the progress output"

    def __init__(self, console: Console, total_steps: int, resumed_step: int, log_interval: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._first_step = resumed_step + 1
        self._log_interval = log_interval
        self._started = time.monotonic()

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        edge = step in (self._first_step, self._total_steps)
        if not edge and step % self._log_interval and "evaluation_loss" not in values:
            return
        step_seconds = (time.monotonic() - self._started) / (step - self._first_step + 1)
        minutes, seconds = divmod(round(step_seconds * (self._total_steps - step)), 60)
        left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
        _print(self._console, f"step {step}/{self._total_steps}  {_shown(values, list(_SHOWN))}  {left}")

    def close(self) -> None:
        pass


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _shown(values: Mapping[str, float | int], names: list[str]) -> str:
    return "  ".join(_SHOWN[name].format(values[name]) for name in names if name in values)


def _cut(path: Path, last_step: int) -> None:
    """Rewrites the file at `path` with the lines up to `last_step`; what a crash left unreadable goes too."""
    temporary = path.with_name(path.name + ".tmp")
    with path.open("rb") as source, temporary.open("wb") as file:
        file.writelines(line for line, record in _records(source) if record["step"] <= last_step)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _records(file: BinaryIO) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line that is a JSON object with a step, and that object."""
    for line in file:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def write_loss_curve(metrics_path: str | Path, png_path: str | Path, *, unigram_entropy: float | None = None) -> None:
    """Draws training and evaluation loss (nats per token) over steps from a `metrics.jsonl` into a PNG.

    Args:
        unigram_entropy: nats per token of the evaluation tokens under their own frequencies, drawn as a level line.

    Raises:
        StorageError: when the metrics cannot be read or hold no loss, or the PNG cannot be written.
    """
    training: list[tuple[int, float]] = []
    evaluation: list[tuple[int, float]] = []
    try:
        with Path(metrics_path).open("rb") as file:
            for _, record in _records(file):
                for name, points in (("loss", training), ("evaluation_loss", evaluation)):
                    if record.get(name) is not None:
                        points.append((record["step"], record[name]))
    except OSError as error:
        raise StorageError(f"{metrics_path}: cannot be read ({error.strerror}); give a run's metrics.jsonl") from None
    if not training:
        raise StorageError(f"{metrics_path}: no step with a finite loss; there is nothing to draw")
    figure = _draw(training, evaluation, unigram_entropy)
    try:
        FigureCanvasAgg(figure).print_png(str(png_path))
    except OSError as error:
        raise StorageError(f"{png_path}: cannot be written ({error.strerror}); free space or fix the rights") from None


def _draw(
    training: list[tuple[int, float]], evaluation: list[tuple[int, float]], unigram_entropy: float | None
) -> Figure:
    figure = Figure(figsize=(8.0, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps, losses = np.array(training).T
    window = min(max(1, len(losses) // 50), 100)
    label = "training"
    if window > 1:
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        box = np.ones(window)
        losses = np.convolve(losses, box, "same") / np.convolve(np.ones_like(losses), box, "same")
        label = f"training (mean of {window} steps)"
    axes.plot(steps, losses, color="tab:blue", linewidth=1.6, label=label)
    if evaluation:
        axes.plot(*zip(*evaluation, strict=True), "o-", color="tab:orange", markersize=4, label="evaluation")
    if unigram_entropy is not None:
        level = f"unigram entropy ({unigram_entropy:.2f})"
        axes.axhline(unigram_entropy, color="0.35", linestyle="--", linewidth=1.0, label=level)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.01)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
