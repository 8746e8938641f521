"""A disk that fills up under a run: no page that the run writes to is one of a file on a disk."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.model_runs import train_here, write_config
from tests.ranks import run_ranks

_SHARED = re.compile(r"\S+ .w.s ")


class _Mappings:
    """Paths of this process's writable shared mappings, after each update."""

    name = "mappings"

    def __init__(self) -> None:
        self.found: set[str] = set()

    def memory_bytes(self, elements: int) -> int:
        return 0

    def start(self, weights: Mapping[str, Tensor]) -> None:
        pass

    def after_update(self, weights: Mapping[str, Tensor], *, applied: Tensor, step: int) -> None:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if _SHARED.match(line):
                self.found.add(line.split(maxsplit=5)[5])

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


def _mappings(config: Path, folder: Path) -> set[str]:
    hook = _Mappings()
    train_here(config, folder, "train.steps=3", "checkpoint.background=true", hooks=[hook])
    return hook.found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_writes_to_no_mapped_page_of_a_disk(tmp_path, ranks):
    """A full disk ends the process that does so by SIGBUS."""
    for found in run_ranks(ranks, _mappings, write_config(tmp_path), tmp_path / "run"):
        assert any(path.startswith("/memfd:megalin-heartbeats-") for path in found)
        assert not [path for path in found if not path.startswith(("/memfd:", "/dev/shm/", "/dev/zero"))]


def _without_memory(config: Path, folder: Path) -> int:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch("os.posix_fallocate", full):
        return train_here(config, folder, "train.steps=3").step


def test_a_run_without_memory_for_heartbeats_goes_on_without_a_watchdog(tmp_path):
    assert run_ranks(2, _without_memory, write_config(tmp_path), tmp_path / "run") == [3, 3]
    events = (tmp_path / "run" / "incidents.jsonl").read_text()
    assert events.count("no watchdog: cannot reserve 1028 KiB of memory for heartbeats") == 1
