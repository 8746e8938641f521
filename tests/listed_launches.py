"""Check that a test launches no Triton kernel in a form that the committed list does not have."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tools.kernel_launches.launch import KernelLaunch
from tools.kernel_launches.launch_list import LaunchList
from tools.kernel_launches.recorder import Seen, write_recorded

VARIABLE = "MEGALIN_RECORD_LAUNCHES"
"""File that launches are appended to, for tools/record_launches.py; the list is then not checked."""


@functools.cache
def _known_forms() -> frozenset[KernelLaunch]:
    return frozenset(launch.form() for launch in LaunchList.read().entries)


@contextmanager
def listed_launches(watch: Callable[[Seen], AbstractContextManager[None]]) -> Iterator[None]:
    """Fails the test where `watch` sees a launch of an unknown form during the body."""
    seen: set[KernelLaunch] = set()
    with watch(seen.add):
        yield
    if path := os.environ.get(VARIABLE):
        write_recorded(Path(path), seen)
        return
    unknown = sorted(launch for launch in seen if launch.form() not in _known_forms())
    if unknown:
        pytest.fail(
            f"launches of {len(unknown)} forms that tools/kernel_launches/launches.txt does not have; record them with "
            f"{VARIABLE}=FILE and tools/record_launches.py:\n" + "\n".join(map(" ".join, unknown))
        )
