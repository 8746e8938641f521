"""The multi-process harness itself: results by rank, and failures that name the rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

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


def test_results_come_back_by_rank():
    assert run_ranks(3, _sum) == [6.0, 6.0, 6.0]


def test_exception_of_a_rank_is_shown():
    with pytest.raises(RankFailedError, match=r"(?s)rank 1:.*planted"):
        run_ranks(2, _raise_on_rank_one)


def test_death_of_a_rank_is_noticed():
    with pytest.raises(RankFailedError, match="rank 1 died: -9"):
        run_ranks(2, _die_on_rank_one)


def test_deadline_is_kept():
    with pytest.raises(RankFailedError, match="timed out"):
        run_ranks(2, time.sleep, 30, timeout=2)
