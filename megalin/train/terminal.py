"""Progress of a run for people: a live view on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megalin.terminal_output import escape_controls
from megalin.train.events import EventLog
from megalin.train.jsonl import BestEffortWriter

_SHOWN = {
    "loss": "loss {:.4f}",
    "mlm_loss": "MLM {:.4f}",
    "nsp_loss": "NSP {:.4f}",
    "evaluation_loss": "evaluation loss {:.4f}",
    "evaluation_accuracy": "accuracy {:.1%}",
    "evaluation_mlm_accuracy": "MLM accuracy {:.1%}",
    "evaluation_nsp_accuracy": "NSP accuracy {:.1%}",
    "grad_norm": "grad norm {:.3f}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "model_flops_utilization": "MFU {:.1%}",
}
_EVALUATION = [name for name in _SHOWN if name.startswith("evaluation_")]
_LEARNING = ["loss", "mlm_loss", "nsp_loss", "grad_norm", "learning_rate"]
_RECENT_STEPS = 100
"""Steps whose mean duration gives the time left: the first step compiles and is slow."""


class PlainLines:
    """Prints a line every `log_interval` steps, at each evaluation, and at both ends of the run."""

    def __init__(self, console: Console, total_steps: int, resumed_step: int, log_interval: int) -> None:
        self._console = console
        self._writer = BestEffortWriter("the progress output")
        self._total_steps, self._first_step, self._log_interval = total_steps, resumed_step + 1, log_interval
        self._pace = _Pace(total_steps)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Prints the line of `step` if one is due."""
        left = self._pace.update(step)
        edge = step in (self._first_step, self._total_steps)
        if edge or step % self._log_interval == 0 or "evaluation_loss" in values:
            line = f"step {step}/{self._total_steps}  {_shown(values, list(_SHOWN))}  {left}"
            self._writer.attempt(lambda: print_line(self._console, line))

    def close(self) -> None:
        """Does nothing: no resource is open."""


class LiveView:
    """A live view below all other output: steps and time left, losses, rates, the newest event."""

    def __init__(self, console: Console, total_steps: int, resumed_step: int, event_log: EventLog | None) -> None:
        self._console, self._event_log = console, event_log
        self._writer = BestEffortWriter("the terminal")
        self._total_steps, self._step = total_steps, resumed_step
        self._pace = _Pace(total_steps)
        self._left = self._evaluated = ""
        self._values: Mapping[str, float | int] = {}
        # Standard error redirected to a file must not go to the terminal.
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=4, redirect_stderr=sys.stderr.isatty()
        )
        self._writer.attempt(self._live.start)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Shows `step` from the next refresh on; an evaluation leaves a line above the view."""
        self._step, self._values, self._left = step, values, self._pace.update(step)
        if "evaluation_loss" in values:
            self._evaluated = f"{_shown(values, _EVALUATION)} at step {step:,}"
            line = f"step {step}/{self._total_steps}  {_shown(values, list(_SHOWN))}"
            self._writer.attempt(lambda: print_line(self._console, line))

    def close(self) -> None:
        """Stops the view; its last state stays on the screen."""
        self._writer.attempt(self._live.stop)

    def _render(self) -> RenderableType:
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        bar = ProgressBar(total=self._total_steps, completed=self._step)
        head.add_row(f"step {self._step}/{self._total_steps}", bar, self._left)
        learning = [_shown(self._values, _LEARNING), self._evaluated]
        rows = ["  ".join(filter(None, row)) for row in (learning, _rates(self._values))]
        texts = [Text(row, no_wrap=True, overflow="ellipsis") for row in rows]
        if self._event_log is not None and self._event_log.last:
            texts.append(Text(_one_line(self._event_log.last), style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(head, *texts)


class _Pace:
    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._times = deque([self._started], maxlen=_RECENT_STEPS + 1)

    def update(self, step: int) -> str:
        """Records the end of `step`; returns the time left, after the last step the duration of the process."""
        self._times.append(time.monotonic())
        if step >= self._total_steps:
            return f"{_duration(self._times[-1] - self._started)} in all"
        step_seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return f"{_duration(step_seconds * (self._total_steps - step))} left"


def print_line(console: Console, line: str) -> None:
    """Prints `line` verbatim, above a live view."""
    console.print(escape_controls(line), markup=False, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _rates(values: Mapping[str, float | int]) -> list[str]:
    parts = [_shown(values, ["tokens_per_second", "model_flops_utilization"])]
    if "peak_memory_bytes" in values:
        parts.append(f"memory {values['peak_memory_bytes'] / 2**30:.1f} GiB at most")
    if "data_wait_seconds" in values and values.get("step_seconds"):
        parts.append(f"data wait {values['data_wait_seconds'] / values['step_seconds']:.1%}")
    return parts


def _shown(values: Mapping[str, float | int], names: Sequence[str]) -> str:
    return "  ".join(_SHOWN[name].format(values[name]) for name in names if name in values)


def _one_line(text: str) -> str:
    """The first line, with control characters replaced."""
    line = text.partition("\n")[0]
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
