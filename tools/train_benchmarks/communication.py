"""What a profiled step spends in communication, and how much of it no other work hides."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from train_benchmarks.clock import Begun

COMMUNICATION = re.compile(r"nccl|Memcpy PtoP|symmetric_memory")
"""Collectives, copies into another GPU's memory, and the signals beside them."""
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
BY_HOST = frozenset({"cuda_runtime", "cuda_driver"})
_STEP = "benchmark step "

Interval = tuple[float, float]
"""Start and end."""


class Communication(NamedTuple):
    """Milliseconds of one step on this rank's device. A collective's time includes its wait for slower ranks."""

    total: float
    exposed: float
    """Of the total, while nothing else ran on the device."""
    idle: float
    """Between the first and the last kernel, while nothing ran at all."""
    span: float
    """From the first kernel to the last."""
    by_kernel: dict[str, tuple[int, float, float]]
    """Launches, milliseconds, exposed milliseconds."""


def record_communication(start: Callable[[int], Begun], number: int) -> tuple[Communication, Any]:
    """Profiles three steps from `number` on, started as the clock starts them, and gives the communication of the
    second on this rank; also the profile of all three, for tables."""
    with torch.profiler.profile() as profile:
        before: Begun | None = None
        for index in range(3):
            with torch.profiler.record_function(f"{_STEP}{index}"):
                begun = start(number + index)
            if before is not None:
                before.wait()
            before = begun
        begun.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return from_events(of_step(json.loads(path.read_text("utf-8"))["traceEvents"], 1)), profile


def of_step(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """What the device did in the step, whenever it did it: what the host launched while it started the step."""
    (window,) = [e for e in events if (e.get("cat"), e["name"]) == ("user_annotation", f"{_STEP}{index}")]
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in BY_HOST and window["ts"] <= event["ts"] <= window["ts"] + window["dur"]
    }
    return [event for event in events if event.get("cat") in ON_DEVICE and event["args"].get("correlation") in launched]


def from_events(events: Iterable[dict[str, Any]]) -> Communication:
    """The communication among a trace's events, whose `ts` and `dur` are microseconds."""
    sent: dict[str, list[Interval]] = defaultdict(list)
    work: list[Interval] = []
    for event in events:
        if event.get("cat") in ON_DEVICE:
            interval = event["ts"], event["ts"] + event["dur"]
            if COMMUNICATION.search(event["name"]):
                sent[event["name"].split("(")[0].strip()].append(interval)
            else:
                work.append(interval)
    work = merged(work)
    all_sent = merged(interval for intervals in sent.values() for interval in intervals)
    busy = merged([*work, *all_sent])
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    rows = {
        name: (len(intervals), length(intervals) / 1e3, uncovered(merged(intervals), work) / 1e3)
        for name, intervals in sent.items()
    }
    return Communication(
        total=length(all_sent) / 1e3,
        exposed=uncovered(all_sent, work) / 1e3,
        idle=(span - length(busy)) / 1e3,
        span=span / 1e3,
        by_kernel=dict(sorted(rows.items(), key=lambda row: -row[1][1])),
    )


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as intervals that do not touch, in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the intervals' lengths."""
    return sum(end - start for start, end in intervals)


def uncovered(intervals: list[Interval], cover: list[Interval]) -> float:
    """How much of `intervals` lies in none of `cover`; both merged."""
    return length(merged([*intervals, *cover])) - length(cover)
