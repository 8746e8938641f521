"""Faults of ranks that stall or are slow: F09, F10, F22."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from functools import partial

from fault_matrix import changes
from fault_matrix.lab import Lab, metrics, two_blocks
from fault_matrix.processes import Change, Outcome
from fault_matrix.table import fault

_HANG_SECONDS = 5
_STARTED = 90.0


def signalled_rank(
    lab: Lab, *, victim: int = 1, ranks: int = 2, phase: str = "step", number: int = signal.SIGSTOP, hosts: int = 1
) -> list[Outcome]:
    """A rank of a run gets a signal in a phase; records what the others do, and how long they take. With several hosts,
    each has as many of the ranks, and watches these."""
    lab.shard("held")
    config = lab.config(
        data={"validation": [str(lab.folder / "data" / "held")]},
        train={
            "global_batch_size": 2 * ranks,
            "evaluate_every_steps": 3,
            "hang_timeout_seconds": _HANG_SECONDS,
            "phase_timeout_seconds": 120,
        },
    )
    change: dict[int, Change] = {victim: partial(changes.signal_in, phase, number)}
    if hosts > 1:
        places = [f"host {rank * hosts // ranks}" for rank in range(ranks)]
        change = {rank: partial(changes.on_host, place, change.get(rank)) for rank, place in enumerate(places)}
    running = lab.start_ranks(config, ranks=ranks, change_of=change)
    hit = running[victim]
    assert hit.wait_until(lambda: hit.state in ("T", "Z"), seconds=_STARTED), hit.text
    started = time.monotonic()
    others = [each for each in running if each is not hit]
    outcomes = [each.wait(seconds=_STARTED) for each in others]
    took = time.monotonic() - started
    gone = hit.wait_until(lambda: not hit.is_alive, seconds=5)
    stopped = number == signal.SIGSTOP
    code, longest = (7, _HANG_SECONDS + 5) if stopped else (6, 5)
    verb = "stalled" if stopped else "died"
    codes = [outcome.code for outcome in outcomes]
    lab.check(f"the others exit with {code}", codes == [code] * len(codes), f"exit {codes}: {outcomes[0].last_line}")
    named = [re.search(rf"rank {victim} {verb}.*last op", outcome.text) for outcome in outcomes]
    lab.check("rank named by all", all(named), outcomes[0].last_line)
    place = r"in step 3 \(phase: step\)" if phase == "step" else f"phase:? {phase}"
    lab.check("phase and step named", re.search(place, outcomes[0].text), outcomes[0].last_line)
    lab.check(f"within {longest} s", took <= longest, f"{took:.1f} s")
    lab.check("no process is left", gone)
    lab.check("no traceback", not any("Traceback" in outcome.text for outcome in outcomes), outcomes[0].text[-300:])
    return outcomes


def sleeping_rank(
    lab: Lab, *overrides: str, call: str, place: str = "", after: bool = False, victim: int = 1, ranks: int = 2
) -> None:
    """A rank sleeps in a step (`changes.sleep_in_step`) of a run with these overrides; the others wait for it in
    `call`, a pattern."""
    train = {"global_batch_size": 2 * ranks, "hang_timeout_seconds": _HANG_SECONDS}
    config = lab.config(model=two_blocks(), train=train)
    change: dict[int, Change] = {victim: partial(changes.sleep_in_step, 3, place, after=after)}
    running = lab.start_ranks(config, *overrides, ranks=ranks, change_of=change)
    outcomes = [each.wait(seconds=3 * _STARTED) for each in running]
    codes = [outcome.code for outcome in outcomes]
    lab.check("all ranks exit with 7", codes == [7] * ranks, f"exit {codes}: {outcomes[0].last_line}")
    named = rf"rank {victim} stalled: no progress for \d+ s in step 3 \(phase: step\); it computes.*waits in {call}"
    for rank, outcome in enumerate(outcomes):
        lab.check(f"rank {rank} names the rank and the collective", re.search(named, outcome.text), outcome.last_line)


def _all_leave(lab: Lab, change: Change, *patterns: str, ranks: int, overrides: Sequence[str]) -> None:
    """Rank 1 changes in a step; all ranks leave with 7, and their message has all patterns."""
    train = {"global_batch_size": 4 * ranks, "hang_timeout_seconds": _HANG_SECONDS}
    config = lab.config(model=two_blocks(), train=train)
    outcomes = lab.train_on_ranks(config, *overrides, ranks=ranks, change_of={1: change}, seconds=_STARTED)
    codes = [outcome.code for outcome in outcomes]
    lab.check("all ranks exit with 7", codes == [7] * ranks, f"exit {codes}: {outcomes[0].last_line}")
    for pattern in patterns:
        found = [re.search(pattern, outcome.text) for outcome in outcomes]
        lab.check(pattern, all(found), outcomes[0].last_line)


def other_order(lab: Lab, *overrides: str, ranks: int = 2, waits: str = "all_reduce") -> None:
    """Rank 1 launches a collective of its own, while rank 0 waits in `waits`: the last ops of all ranks are named."""
    ops = [waits, r"all_gather \[1048576\]", *["."] * (ranks - 2)]
    patterns = [f"rank {rank}: {op}" for rank, op in enumerate(ops)]
    _all_leave(lab, partial(changes.other_collective, 3), *patterns, ranks=ranks, overrides=overrides)


def stuck_reader(lab: Lab, *overrides: str, ranks: int = 2) -> None:
    """The data worker of rank 1 never ends a read: rank, worker, file and samples are named."""
    named = r"rank 1: .*data worker 0 reads .*train\.bin for samples \d+"
    _all_leave(lab, partial(changes.stuck_reads, 8), named, ranks=ranks, overrides=overrides)


@fault("F09", "another order of collectives")
def _other_order(lab: Lab) -> None:
    other_order(lab)


@fault("F10", "a data worker is stuck")
def _stuck_reader(lab: Lab) -> None:
    stuck_reader(lab)


@fault("F22", "a rank is twice as slow")
def _slow_rank(lab: Lab) -> None:
    config = lab.config(train={"steps": 45}, checkpoint={"every_steps": 45})
    outcomes = lab.train_on_ranks(config, change_of={1: partial(changes.slow_steps, 0.1)}, seconds=_STARTED)
    text = outcomes[0].text
    warned = re.search(r"step (\d+): rank 1 is slow", text)
    lab.check("the rank is named", warned, outcomes[0].last_line)
    lab.check("within 20 steps", warned is not None and int(warned[1]) <= 23, text[-300:])
    lab.check("the run goes on", [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].last_line)
    ratios = [line.get("slowest_rank") for line in metrics(lab.folder / "run")[20:]]
    lab.check("metrics name the rank", ratios.count(1) > 0.8 * len(ratios), f"{ratios}")
