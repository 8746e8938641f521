"""Time in which a device computes during training steps, and the rest of it, in which it is idle."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from train_benchmarks.clock import StartedStep
from train_benchmarks.communication import ON_DEVICE, length, merged

STEPS = 4
"""Profiled steps."""


class DeviceTime(NamedTuple):
    """Kernels and copies on this rank's device, a step."""

    busy_seconds: float
    """Time in which at least one runs."""
    kernels: float
    """Number of kernels, copies and memsets."""

    def describe(self, step_seconds: float) -> dict[str, float]:
        """Fields of the JSON line, for steps that take `step_seconds` without a profiler, which slows the host."""
        return {
            "device_busy_milliseconds": self.busy_seconds * 1e3,
            "device_idle_fraction": 1.0 - self.busy_seconds / step_seconds,
            "device_kernels": self.kernels,
        }


def record_device_time(start: Callable[[int], StartedStep], number: int) -> DeviceTime:
    """Profiles the device in steps from `number` on, launched as `time_steps` does."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        started = [start(number + index) for index in range(STEPS)]
        for step in started:
            step.wait()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return device_time(json.loads(path.read_text("utf-8"))["traceEvents"], STEPS)


def device_time(events: Iterable[dict[str, Any]], steps: int) -> DeviceTime:
    """Mean over the steps of a trace, whose `ts` and `dur` are microseconds."""
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in ON_DEVICE]
    return DeviceTime(length(merged(spans)) / 1e6 / steps, len(spans) / steps)
