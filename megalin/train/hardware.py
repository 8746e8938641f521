"""Machine figures for the metrics: matrix rate of a device, and memory used."""

from __future__ import annotations

import resource

import torch

BF16_FLOPS_PER_SECOND = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 matrix rates from the vendor's data sheets, by part of the device's name."""


def peak_flops_per_second(device: torch.device) -> float | None:
    """Dense bf16 rate of the device from its data sheet; None if unknown, as for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in BF16_FLOPS_PER_SECOND.items() if part in name), None)


def device_memory_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None for a CPU, which uses the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated tensors on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
