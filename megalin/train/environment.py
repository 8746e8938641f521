"""Environment of a run: versions of its libraries, device, host and mesh."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import socket
from typing import Any

import torch
import torch.distributed as dist

import megalin
from megalin.parallel.mesh import Mesh


def versions() -> dict[str, str]:
    """Versions by name: megalin, Python, CUDA if torch has it, and the compute libraries that are installed."""
    found = {
        "megalin": megalin.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for name in ("numpy", "triton", "deepspeed", "flash-attn", "apex"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment(mesh: Mesh) -> dict[str, Any]:
    """Contents of a run folder's `environment.json`: versions, device and host of rank 0, ranks, and axis sizes."""
    axes = {"tp": mesh.tp.size, "cp": mesh.cp.size, "pp": mesh.pp.size, "dp": mesh.samples.size}
    return {
        "versions": versions(),
        "device": device_name(mesh.device),
        "host": socket.gethostname(),
        "ranks": dist.get_world_size(),
        "mesh": axes | {"zero": mesh.zero},
    }
