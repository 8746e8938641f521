"""Communication time of a profiled step, total and exposed."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from train_benchmarks.clock import StartedStep

COMMUNICATION = re.compile(r"nccl|Memcpy PtoP|symmetric_memory")
"""Names of collectives, of copies into another GPU's memory and of their signals."""
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
BY_HOST = frozenset({"cuda_runtime", "cuda_driver"})
_STEP = "benchmark step "

Interval = tuple[float, float]
"""Start and end."""


class Communication(NamedTuple):
    """Milliseconds of one step on this rank's device. A collective's time includes its wait for slower ranks."""

    total: float
    exposed: float
    """Part of the total during which nothing else ran on the device."""
    idle: float
    """Between the first and the last kernel, with nothing running."""
    span: float
    """From the first kernel to the last."""
    by_kernel: dict[str, tuple[int, float, float]]
    """Launches, milliseconds, exposed milliseconds."""


def record_communication(start: Callable[[int], StartedStep], number: int) -> tuple[Communication, Any]:
    """Profiles three steps from `number` on, launched as `time_steps` does; returns this rank's communication in the
    second step and the profile of all three."""
    with torch.profiler.profile() as profile:
        previous: StartedStep | None = None
        for index in range(3):
            with torch.profiler.record_function(f"{_STEP}{index}"):
                step = start(number + index)
            if previous is not None:
                previous.wait()
            previous = step
        step.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return from_events(of_step(json.loads(path.read_text("utf-8"))["traceEvents"], 1)), profile


def of_step(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """Device events of a step, at any time: those that the host launched within the step's window."""
    (window,) = [e for e in events if (e.get("cat"), e["name"]) == ("user_annotation", f"{_STEP}{index}")]
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in BY_HOST and window["ts"] <= event["ts"] <= window["ts"] + window["dur"]
    }
    return [event for event in events if event.get("cat") in ON_DEVICE and event["args"].get("correlation") in launched]


def from_events(events: Iterable[dict[str, Any]]) -> Communication:
    """Sums the communication among the events of a trace, whose `ts` and `dur` are microseconds."""
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
    """Union of the intervals as disjoint intervals, in order."""
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
    """Length of the part of `intervals` outside `cover`; both merged."""
    return length(merged([*intervals, *cover])) - length(cover)
