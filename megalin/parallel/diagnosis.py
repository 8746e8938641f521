"""Diagnosis of a run whose ranks died or make no progress, from their heartbeats: the ranks that are the cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from megalin.errors import RankFailedError, RankStalledError
from megalin.parallel.heartbeats import LaunchedOp, RankSlot
from megalin.parallel.process_state import ProcessState

READING_SECONDS = 2.0
"""A rank whose samples do not come ends the run itself after the limit, and names the file; the others wait for that a
little longer than for other work."""

_MOST_NAMED = 8
"""Ranks that a message describes."""


class RankView(NamedTuple):
    """A rank as the others see it."""

    slot: RankSlot
    idle_seconds: float
    """Time without a change of its slot."""
    process: ProcessState
    last: LaunchedOp | None = None
    """Its last launch."""
    note: str = ""
    """The error with which it left, or the call in which it is blocked."""
    age_seconds: float = 0.0
    """The same by the clock, for messages: it counts suspensions of the host, and time before this watchdog began."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.slot.state in ("waiting", "blocked")


class StallLimits(NamedTuple):
    """Longest times without progress, s."""

    hang: float
    """In a step; also of a stopped process or a silent host, in any phase."""
    phase: float
    """In other phases."""

    def of(self, view: RankView) -> float:
        """The limit of a rank."""
        if view.process.state in ("stopped", "silent"):
            return min(self.hang, self.phase)
        return self.hang if view.slot.phase == "step" else self.phase


class Verdict(NamedTuple):
    """Ranks that ended a run, and the reason."""

    exit_code: int
    """Of `RankFailedError`: they died or left. Of `RankStalledError`: they make no progress."""
    ranks: tuple[int, ...]
    message: str

    def error(self) -> RankFailedError:
        """The error that a rank raises."""
        stalled = self.exit_code == RankStalledError.exit_code
        return RankStalledError(self.message) if stalled else RankFailedError(self.message)


def diagnose(views: Sequence[RankView], limits: StallLimits, ranks_per_stage: int | None = None) -> Verdict | None:
    """The ranks that died or make no progress; None while all do.

    Where several ranks make no progress, the others wait for one of them: a stopped process; else one that waits for no
    other rank; of several, which wait for the device, the one that has launched the fewest ops. If all wait for each
    other, they launched different collectives.

    Args:
        ranks_per_stage: neighbouring ranks of a pipeline stage, whose numbers of launched ops can be compared; None:
            those of all ranks can.
    """
    posted = next((view.slot for view in views if view.slot.verdict), None)
    here = [view for view in views if view.slot.state not in ("absent", "done")]
    if posted is not None:  # the others have decided already
        all_wait = all(view.waits and view.process.state == "running" for view in here)
        known = posted.accused in [view.slot.rank for view in here]
        mismatch = posted.verdict == RankStalledError.exit_code and all_wait and known
        return _verdict(views, posted.verdict, [view.slot.rank for view in here] if mismatch else [posted.accused])
    dead = [view for view in here if view.process.state == "dead"]
    if died := [view.slot.rank for view in dead if view.slot.state != "failed"]:
        return _verdict(views, RankFailedError.exit_code, died)
    if stalled := _stalled([view for view in here if view.process.state != "dead"], limits, ranks_per_stage):
        return _verdict(views, RankStalledError.exit_code, stalled)
    if dead:
        return _verdict(views, RankFailedError.exit_code, [view.slot.rank for view in dead])
    return None


def _stalled(views: Sequence[RankView], limits: StallLimits, ranks_per_stage: int | None) -> list[int]:
    idle = [view for view in views if view.slot.state != "failed"]
    late = [view for view in idle if view.idle_seconds >= limits.of(view) + _grace(view)]
    for state in ("stopped", "silent"):
        if found := [view.slot.rank for view in late if view.process.state == state]:
            return found
    if working := [view for view in late if not view.waits]:
        return [view.slot.rank for view in _behind(working, ranks_per_stage)]
    longest = max((limits.of(view) for view in idle), default=0.0)
    all_wait = idle and all(view.waits and view.idle_seconds >= longest for view in idle)
    return [view.slot.rank for view in idle] if all_wait else []


def _behind(views: Sequence[RankView], ranks_per_stage: int | None) -> list[RankView]:
    """The ranks that have launched fewer ops than others of their pipeline stage; else those in the earliest step."""
    stages: defaultdict[int, list[RankView]] = defaultdict(list)
    for view in views:
        stages[view.slot.rank // ranks_per_stage if ranks_per_stage else 0].append(view)
    behind = []
    for stage in stages.values():
        fewest, most = (choose(view.slot.sequence for view in stage) for choose in (min, max))
        behind += [view for view in stage if view.slot.sequence == fewest < most]
    earliest = min(view.slot.step for view in views)
    return behind or [view for view in views if view.slot.step == earliest]


def _grace(view: RankView) -> float:
    return READING_SECONDS if view.slot.state == "reading" and view.process.state == "running" else 0.0


def _verdict(views: Sequence[RankView], exit_code: int, ranks: Sequence[int]) -> Verdict:
    named = [view for view in views if view.slot.rank in ranks][:_MOST_NAMED]
    others = [view for view in views if view.slot.rank not in ranks and view.waits and (view.last or view.note)]
    if not named:
        text = f"rank {ranks[0]} of another host stalled or died: see the output of its host's ranks"
    elif exit_code == RankFailedError.exit_code:
        text = "; ".join(map(_describe_end, named))
    elif len(named) > 1 and all(view.waits for view in named):
        waits = "; ".join(f"rank {view.slot.rank}: {_describe_op(view)}" for view in named)
        seconds = min(max(view.idle_seconds, view.age_seconds) for view in named)
        text = (
            f"all ranks of this host stalled: they wait in collectives for {seconds:.0f} s: {waits}. Ranks must launch "
            "the same collectives in the same order: these differ, or a rank on another host is missing"
        )
    else:
        text = "; ".join(map(_describe_stall, named))
        if len(named) > 1 and all(view.process.state == "running" for view in named):
            text += ". Which of them the others wait for is not known: see their stacks"
        if others:
            text += ". " + "; ".join(f"rank {view.slot.rank} waits in {_describe_op(view)}" for view in others[:4])
    return Verdict(exit_code, tuple(ranks), text)


def _describe_stall(view: RankView) -> str:
    slot = view.slot
    state = {
        "stopped": "its process is stopped (state T: SIGSTOP, or a suspended job)",
        "silent": "its host does not answer: its processes are stopped, or the host or its network is down",
        "dead": "its process has ended",
        "running": {
            "reading": "it waits for its samples; its own output names the file",
            "waiting": "it waits in a collective",
            "blocked": f"it waits in {view.note}",
        }.get(slot.state, "it computes, or waits for its device"),
    }[view.process.state]
    seconds = max(view.idle_seconds, view.age_seconds)
    return (
        f"rank {slot.rank} stalled: no progress for {seconds:.0f} s in {_describe_place(view)}; {state}; "
        f"its last op: {_describe_op(view)}"
    )


def _describe_end(view: RankView) -> str:
    slot = view.slot
    if slot.state == "failed":
        return f"rank {slot.rank} left in {_describe_place(view)}: {view.note or 'with an error, see its output'}"
    end = view.process.end
    how = "left before the end" if end == "exit code 0" else "died"
    return (
        f"rank {slot.rank} {how}{f' ({end})' if end else ''} in {_describe_place(view)}; its last op: "
        f"{_describe_op(view)}"
    )


def _describe_place(view: RankView) -> str:
    return f"step {view.slot.step} (phase: {view.slot.phase})" if view.slot.step else f"the phase {view.slot.phase}"


def _describe_op(view: RankView) -> str:
    if view.slot.state == "blocked":
        return view.note
    if view.last is None:
        return "none"
    return f"{view.last.op} {list(view.last.shape)} on {view.last.axis}, launch {view.last.sequence}"
