"""Progress of a pass over a corpus: a bar with rates and remaining time on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from megalin.data.corpus.parts import CorpusProgress
from megalin.errors import ConfigError
from megalin.terminal_output import terminal


@contextmanager
def shown_progress(
    title: str, total_bytes: int, *, interval: int, shown: bool = True
) -> Iterator[Callable[[CorpusProgress], None]]:
    """Yields a callback that shows the counts of one pass on stderr; off a terminal every `interval` documents.

    Args:
        shown: False where another process shows its progress on behalf of this one.

    Raises:
        ConfigError: `interval` is less than 1.
    """
    if interval < 1:
        raise ConfigError(f"--log-interval {interval}: must be at least 1")
    if not shown:
        yield lambda _: None
        return
    console = Console(file=terminal(stderr=True))
    rates = Rates()
    if not console.is_terminal:
        lines = 0

        def report(state: CorpusProgress) -> None:
            nonlocal lines
            text = rates.text(state)
            if state.documents // interval > lines:
                lines = state.documents // interval
                console.print(f"{title}: {text}", highlight=False, soft_wrap=True)

        yield report
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda state: bar.update(task, completed=state.read_bytes, description=f"{title}: {rates.text(state)}")


class Rates:
    """Counts and their rates per second; counts before the first call are not part of the rates."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._before: CorpusProgress | None = None

    def text(self, state: CorpusProgress) -> str:
        """Formats the counts and rates as one line."""
        if self._before is None:
            self._before = state
        seconds = max(self._clock() - self._start, 1e-9)
        documents, tokens, read = (
            (now - then) / seconds for now, then in zip(state[:3], self._before[:3], strict=True)
        )
        tokens_text = f", {state.tokens} tokens ({tokens:.0f}/s)" if state.tokens else ""
        return (
            f"{state.documents} documents ({documents:.0f}/s){tokens_text}, {read / 1e6:.1f} MB/s, "
            f"{state.bad_lines} bad lines"
        )
