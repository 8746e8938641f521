"""What a run ran on: versions of what it is made of, device, host and mesh."""

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
    """Version by name: megalin, Python, CUDA where torch has it, and the libraries that compute, where present."""
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
    """What `environment.json` of a run folder holds: versions, device and host of rank 0, ranks, and sizes of axes."""
    axes = {"tp": mesh.tp.size, "cp": mesh.cp.size, "pp": mesh.pp.size, "dp": mesh.samples.size}
    return {
        "versions": versions(),
        "device": device_name(mesh.device),
        "host": socket.gethostname(),
        "ranks": dist.get_world_size(),
        "mesh": axes | {"zero": mesh.zero},
    }
