"""The multi-process harness itself: results by rank, and failures that name the rank."""

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalin.parallel.mesh import process_group
from megalin.parallel.ranks import naming_silent_ranks
from tests.ranks import RankFailedError, run_ranks


def _sum() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    time.sleep(30)


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def _die_before_an_exchange() -> None:
    _die_on_rank_one() if dist.get_rank() == 1 else _sum()


def _stall_before_an_exchange() -> None:
    time.sleep(60) if dist.get_rank() == 1 else _sum()


def _sleep_on_rank_one() -> None:
    time.sleep(60 if dist.get_rank() == 1 else 0)


def _stall_in_a_launched_group(port: int, met: Path) -> None:
    """As `megalin train` under a launcher meets a rank that stalls."""
    store = dist.FileStore(str(met), 3)
    launch = {
        "RANK": dist.get_rank(),
        "WORLD_SIZE": 3,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    # A rank that leaves the harness's group breaks the connections of one that still joins it.
    store.set(f"met/{dist.get_rank()}", "")
    store.wait([f"met/{rank}" for rank in range(3)])
    dist.destroy_process_group()
    os.environ |= {name: str(value) for name, value in launch.items()}
    with process_group(torch.device("cpu"), timeout=timedelta(seconds=3)):
        _stall_before_an_exchange()


def test_results_come_back_by_rank():
    assert run_ranks(3, _sum) == [6.0, 6.0, 6.0]


def test_exception_of_a_rank_is_shown():
    with pytest.raises(RankFailedError, match=r"(?s)rank 1:.*planted"):
        run_ranks(2, _raise_on_rank_one)


def test_death_of_a_rank_is_noticed():
    with pytest.raises(RankFailedError, match="rank 1 died: -9"):
        run_ranks(2, _die_on_rank_one)


def test_rank_that_dies_in_an_exchange_is_named_beside_the_rank_that_waited():
    with pytest.raises(
        RankFailedError, match=r"(?s)rank 1 died: -9(; then rank 0:.*no word from rank 1|; reported: \[\])"
    ):
        run_ranks(2, _die_before_an_exchange)


def test_rank_that_stalls_in_an_exchange_is_named_within_the_timeout():
    with pytest.raises(
        RankFailedError, match=r"(?s)an exchange failed, no word from rank 1: .*Timed out waiting 1600ms"
    ):
        run_ranks(3, _stall_before_an_exchange, collective_timeout=1.6)


def test_an_exchange_that_fails_with_the_rank_that_keeps_the_store_says_so():
    class Gone:
        def set(self, *_):
            raise dist.DistNetworkError("Broken pipe")

    with (
        pytest.raises(RankFailedError, match=r"rank 1: an exchange failed, rank 0, which keeps .*, has ended: gloo"),
        naming_silent_ranks(Gone(), 1, 2, timedelta(seconds=1)),
    ):
        raise RuntimeError("gloo: connection closed by peer")


def test_a_rank_whose_gpu_waited_too_long_for_another_names_it():
    with (
        pytest.raises(RankFailedError, match=r"rank 0: an exchange failed, no word from rank 1: .*launch failure"),
        naming_silent_ranks(dist.HashStore(), 0, 2, timedelta(seconds=0.2)),
    ):
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_rank_that_stalls_under_a_launcher_is_named_within_the_timeout(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(
        RankFailedError, match=r"(?s)an exchange failed, no word from rank 1: .*Timed out waiting 3000ms"
    ):
        run_ranks(3, _stall_in_a_launched_group, port, tmp_path / "met")


def test_deadline_is_kept_and_names_who_did_not_answer():
    with pytest.raises(RankFailedError, match="timed out: no answer from rank 1"):
        run_ranks(2, _sleep_on_rank_one, timeout=4.0)
