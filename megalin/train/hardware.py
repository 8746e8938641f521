"""What the metrics need to know of the machine: matrix rate of a device, and the memory that was used."""

from __future__ import annotations

import resource

import torch

BF16_FLOPS_PER_SECOND = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 matrix rates by the vendor's data sheets, by a part of the device's name."""


def peak_flops_per_second(device: torch.device) -> float | None:
    """The data sheet's dense bf16 rate of the device; None where it is not known, as for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in BF16_FLOPS_PER_SECOND.items() if part in name), None)


def device_memory_bytes(device: torch.device) -> int | None:
    """The memory of a GPU; None for a CPU, which has the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held at once so far: allocated tensors on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
