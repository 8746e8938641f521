"""The exit code of a launch from the ends of its ranks, and the rank that caused it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

from megalin.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    KernelError,
    NumericError,
    PreemptedError,
    RankFailedError,
    RankStalledError,
)
from megalin.launcher.rank_process import Ending
from megalin.parallel.heartbeats import RankSlot

NOT_RESTARTED = frozenset(
    (
        0,
        ConfigError.exit_code,
        DataError.exit_code,
        CheckpointError.exit_code,
        NumericError.exit_code,
        KernelError.exit_code,
        PreemptedError.exit_code,
    )
)
"""Exit codes after which a new start would end in the same way, or is not wanted."""
_CONSEQUENCES = (RankFailedError.exit_code, RankStalledError.exit_code)
"""Exit codes of ranks that miss another one."""


class GroupEnd(NamedTuple):
    """End of all ranks."""

    code: int
    culprit: Ending | None
    """The rank that ended the others; None where all agreed."""


def _is_preempted(ending: Ending) -> bool:
    """Whether SIGTERM ended the rank: with all steps saved, or before it had any."""
    return ending.code in (PreemptedError.exit_code, -signal.SIGTERM)


def outcome(endings: Sequence[Ending]) -> GroupEnd:
    """The outcome of ranks, in the order of their ends, without those that the launcher killed."""
    failed = [ending for ending in endings if not (ending.code == 0 and ending.finished)]
    if not failed:
        return GroupEnd(0, None)
    wrong = [ending for ending in failed if not _is_preempted(ending)]
    if not wrong:
        return GroupEnd(PreemptedError.exit_code, None)
    stalled = next((ending for ending in wrong if ending.code == RankStalledError.exit_code), None)
    if stalled is not None and all(ending.code <= 0 or ending.code in _CONSEQUENCES for ending in wrong):
        return GroupEnd(stalled.code, stalled)  # the watchdogs have killed the rank that stalled
    culprit = next((ending for ending in wrong if ending.code not in _CONSEQUENCES), wrong[0])
    return GroupEnd(culprit.code if culprit.code > 0 else RankFailedError.exit_code, culprit)


def grace_seconds(ending: Ending, *, accused: bool) -> float:
    """Time that the other ranks have after this end of a rank to end by themselves.

    Args:
        accused: watchdogs end the run because of a rank, which they name.
    """
    if ending.code == 0 and ending.finished:
        return float("inf")  # rank 0 draws the loss curve
    if _is_preempted(ending):
        return 10.0
    return 3.0 if ending.code > 0 or accused else 0.0


def describe_end(ending: Ending) -> str:
    """The end of a rank that ended the others, as "was killed by SIGKILL"."""
    if ending.code < 0:
        hint = " (the kernel does so when memory runs out: see dmesg)" if ending.code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-ending.code).name}{hint}"
    return "left before its end, with exit code 0" if ending.code == 0 else f"ended with exit code {ending.code}"


def describe_place(slot: RankSlot) -> str:
    """The place of a rank in its run, as "in step 7, save"."""
    if slot.phase in ("none", "start"):
        return "at its start"
    return f"in step {slot.step}" + ("" if slot.phase == "step" else f", {slot.phase}")
