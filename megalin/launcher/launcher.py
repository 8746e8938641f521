"""The launcher of one host's ranks: it starts them as its children, and starts them again where they fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megalin.errors import PreemptedError, RankFailedError, RankStalledError
from megalin.launcher.outcome import NOT_RESTARTED
from megalin.launcher.rank_group import RankGroup
from megalin.launcher.run_files import RunFiles
from megalin.parallel.diagnosis import StallLimits

NO_LIMITS = StallLimits(float("inf"), float("inf"))
_RESUME = "the same command resumes from the newest valid checkpoint"


def launch(
    run: Callable[[], int],
    world_size: int,
    folder: Path,
    *,
    signals: Sequence[str],
    limits: StallLimits = NO_LIMITS,
    max_restarts: int = 0,
) -> int:
    """Runs the ranks of a run to their end; returns the exit code.

    Args:
        run: the command of a rank; its result is the exit code.
        world_size: number of ranks.
        folder: the run folder.
        signals: names of the signals that this process has received, which grow (`RecordedSignals`).
        limits: longest times without progress of a rank.
        max_restarts: starts after the first one, unless the exit code would come back (`NOT_RESTARTED`).

    Raises:
        RankFailedError: a rank died or left, in the last start; RankStalledError: one stalled.
        PreemptedError: SIGTERM or Ctrl-C before a rank had something to save.
    """
    restarts = 0
    while True:
        files = RunFiles(folder, world_size)
        failed = True
        try:
            with RankGroup(run, world_size, files, limits) as ranks:
                end = ranks.wait(signals)
            failed = end.code not in (0, PreemptedError.exit_code)
        finally:
            files.close(keep=failed)
        if end.code in NOT_RESTARTED or signals or restarts == max_restarts:
            break
        restarts += 1
        reason = end.message or f"the ranks ended with exit code {end.code}"
        print(f"{reason}; restart {restarts} of {max_restarts}", file=sys.stderr)
    for error in (RankFailedError, RankStalledError, PreemptedError):
        if end.message and end.code == error.exit_code:
            raise error(f"{end.message}; {_RESUME}")
    if end.message:
        print(f"{end.message}; {_RESUME}", file=sys.stderr)
    return end.code
