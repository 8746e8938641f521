"""Environment of a run: its command, the commit and versions of its code, device, host and mesh."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
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
    for name in ("numpy", "triton", "deepspeed", "flash-attn", "flash-attn-4", "apex"):
        if (version := _installed_version(name)) is not None:
            found[name] = version
    return found


@functools.cache
def _installed_version(name: str) -> str | None:
    """The version of an installed distribution; reading its metadata takes milliseconds, and every checkpoint
    records it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def command() -> str:
    """The command of this process, for a shell: the program by its name, or `python -m MODULE`, and its arguments."""
    program, *arguments = sys.argv
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is None:
        return shlex.join([Path(program).name, *arguments])
    return shlex.join(["python", "-m", main.name.removesuffix(".__main__"), *arguments])


@functools.cache
def source_commit(root: Path) -> str | None:
    """The commit of the Git checkout at `root`, with `-dirty` if tracked files differ; None of any other folder, such
    as that of an installed package, and without Git."""
    if not (root / ".git").exists():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(describe, env=quiet, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no Git, or a checkout of another user
        return None
    return done.stdout.strip()


def environment(mesh: Mesh) -> dict[str, Any]:
    """Contents of a run folder's `environment.json`: command, commit (of a checkout), versions, device and host of rank
    0, ranks, and axis sizes."""
    axes = {"tp": mesh.tp.size, "cp": mesh.cp.size, "pp": mesh.pp.size, "dp": mesh.samples.size}
    commit = source_commit(Path(megalin.__file__).resolve().parents[1])
    return {
        "command": command(),
        "working_directory": str(Path.cwd()),
        **({} if commit is None else {"commit": commit}),
        "versions": versions(),
        "device": device_name(mesh.device),
        "host": socket.gethostname(),
        "ranks": dist.get_world_size(),
        "mesh": axes | {"zero": mesh.zero},
    }
