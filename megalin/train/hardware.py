"""Machine figures for the metrics: matrix rate of a device, and memory used."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

BF16_FLOPS_PER_SECOND = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 matrix rates from the vendor's data sheets, by part of the device's name."""

_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Limits of the control group of this process, of version 2 and 1."""


def peak_flops_per_second(device: torch.device) -> float | None:
    """Dense bf16 rate of the device from its data sheet; None if unknown, as for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in BF16_FLOPS_PER_SECOND.items() if part in name), None)


def device_memory_bytes(device: torch.device) -> int:
    """Memory of a GPU; on a CPU that of the host, or of its control group if that is less, over the host's ranks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    memory = min(host_memory_limits().values())
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return memory // max(int(ranks) if ranks.isdecimal() else 1, 1)


def host_memory_limits() -> dict[str, int]:
    """Memory of the host and, if that is less, of this process's control group, in bytes by name."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = {"host": memory}
    for path in _MEMORY_LIMITS:
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="ascii").strip()
            if text.isdecimal() and int(text) < memory:
                limits["control group"] = int(text)
    return limits


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated tensors on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
