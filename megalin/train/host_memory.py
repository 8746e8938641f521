"""Errors of a process that runs out of host memory: its resident memory and its limits."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalin.errors import HostMemoryError
from megalin.parallel.agreement import rank
from megalin.train.hardware import host_memory_limits


@contextmanager
def report_host_memory() -> Iterator[None]:
    """Names the rank, its resident memory and its limits where the body runs out of host memory.

    Raises:
        HostMemoryError: in place of MemoryError, or of torch's RuntimeError.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        limits = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in _limits().items())
        raise HostMemoryError(
            f"rank {rank()} is out of host memory: {_resident_bytes() / 2**30:.2f} GiB resident, limits: {limits} "
            f"({first_line or type(error).__name__}); use more ranks or hosts, a smaller "
            "train.micro_batch_size, or a higher limit"
        ) from error


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _limits() -> dict[str, int]:
    """Limits of this process in bytes, by name; the smallest one applies."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    own = {} if address_space == resource.RLIM_INFINITY else {"address space (ulimit -v)": address_space}
    return own | host_memory_limits()
