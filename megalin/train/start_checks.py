"""Checks before a run's first step that all ranks run the same code with the same libraries and settings, and before
its first update that they run the same kernels."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os

import numpy as np
import torch

import megalin
from megalin.config import dumps
from megalin.errors import ConfigError, KernelError
from megalin.ops.dispatch.backend import self_tests
from megalin.parallel.agreement import gather_over_ranks, on_every_rank, world_size
from megalin.train.config import RunConfig
from megalin.train.environment import versions

_SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h", ".toml")
_KERNEL_MODULES = ("triton", "megalin._C", "apex")
_OF_HOSTS = ("MEGALIN_CACHE",)  # a place, which may differ between hosts
_NOT_SET = "not set"


def check_same_start() -> None:
    """Compares versions, settings, the kernels that can run and the code over the ranks. One all-gather of 32 bytes.

    Raises:
        ConfigError: on every rank, if they differ; names the rank, what differs, and both values.
    """
    if world_size() == 1:
        return
    text = json.dumps(_facts(), sort_keys=True)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), "<i8").astype(np.int64)
    digests = gather_over_ranks(torch.from_numpy(digest))
    if bool((digests == digests[0]).all()):
        return
    all_facts = on_every_rank(_facts)
    first = all_facts[0]
    differences = [
        f"rank {rank} has {name} = {facts.get(name, _NOT_SET)}, rank 0 {first.get(name, _NOT_SET)}"
        for rank, facts in enumerate(all_facts)
        for name in sorted({*first, *facts})
        if facts.get(name) != first.get(name)
    ]
    raise ConfigError(
        "ranks were started differently; give all of them the same installation and environment:\n  "
        + "\n  ".join(differences[:8])
        + (f"\n  and {len(differences) - 8} more" if len(differences) > 8 else "")
    )


def check_same_config(config: RunConfig) -> None:
    """Compares the run config over the ranks. One message.

    Raises:
        ConfigError: on every rank, if they differ; names the rank and the first line that differs.
    """
    texts = on_every_rank(lambda: dumps(config))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            pairs = zip(texts[0].splitlines(), text.splitlines(), strict=False)
            line = next(((a, b) for a, b in pairs if a != b), ("", "a different number of lines"))
            raise ConfigError(
                f"rank {rank} has a different config than rank 0: {line[1]!r} against {line[0]!r}; "
                "give every rank the same file and overrides"
            )


def _facts() -> dict[str, str]:
    """Facts about this process that change what it computes, by the name that a message gives them."""
    found = {f"the version of {name}": str(version) for name, version in versions().items()}
    found |= {
        name: value for name, value in os.environ.items() if name.startswith("MEGALIN_") and name not in _OF_HOSTS
    }
    found |= {f"{name} for kernels": "installed" for name in _KERNEL_MODULES if importlib.util.find_spec(name)}
    if torch.cuda.is_available():
        found["the compute capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return {**found, "the sha256 of megalin's code": code_digest()}


def check_same_self_tests() -> None:
    """Compares the results of kernels' self-tests over the ranks: ranks that computed with other kernels would drift
    apart. Called once, after the first gradients and before the first update. One message (two all-gathers).

    Raises:
        KernelError: on every rank, if a kernel passes on some ranks only; names them, the kernel and the error.
    """
    if world_size() == 1:
        return
    results = on_every_rank(self_tests, dict[str, str])
    for kernel in sorted({kernel for tested in results for kernel in tested}):
        errors = {rank: tested[kernel] for rank, tested in enumerate(results) if kernel in tested}
        failed = [rank for rank, error in errors.items() if error]
        if failed and len(failed) < len(errors):
            passed = next(rank for rank, error in errors.items() if not error)
            op = kernel.partition("=")[0]
            raise KernelError(
                f"the kernel {kernel} fails on rank {failed[0]} ({errors[failed[0]]}), {len(failed)} of {len(errors)} "
                f"ranks with this call, but passes on rank {passed}; all ranks must compute with the same kernels: "
                f"replace or restart the failing GPU, or set MEGALIN_KERNELS={op}=reference on all ranks"
            )


@functools.cache
def code_digest() -> str:
    """sha256, in hex, of the names and contents of megalin's source files."""
    root, state = os.path.dirname(megalin.__file__), hashlib.sha256()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(_SOURCES):
                path = os.path.join(folder, name)
                state.update(f"{os.path.relpath(path, root)}\0".encode())
                with open(path, "rb") as file:
                    state.update(hashlib.sha256(file.read()).digest())
    return state.hexdigest()
