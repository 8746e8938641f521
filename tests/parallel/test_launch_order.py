"""Launches of overlapped ops: the record of a rank, and errors on all ranks that launch different ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalin.errors import RankStalledError
from megalin.parallel import mesh as meshes
from megalin.parallel.async_tensor_parallel import AsyncTPBuffers, all_gather_matmul, matmul_reduce_scatter
from megalin.parallel.heartbeats import CAPACITY, Heartbeat
from megalin.parallel.launch_order import LaunchOrder
from megalin.parallel.tensor_parallel import TensorParallel
from tests.model_runs import metrics, steps_saved, train_here, write_config
from tests.parallel.shared_memory import buffers_without_waits
from tests.ranks import run_ranks

WIDTH, TOKENS, FAULTY = 4, 6, 1
"""Channels of the hidden states, tokens a rank, and the rank whose launches differ."""
Op = tuple[str, int, int]
"""An op, its tokens a rank, and the channels of its matmul."""
OPS: tuple[Op, ...] = (("gather", TOKENS, 8), ("scatter", TOKENS, 8), ("gather", TOKENS, 12), ("scatter", TOKENS, 12))
FAULTS: dict[str, tuple[Op, ...]] = {
    "two ops swapped": (OPS[0], OPS[2], OPS[1], OPS[3]),
    "another shape": (*OPS[:3], ("scatter", TOKENS, 16)),
    "one op missing": OPS[:3],
    "one op more": (*OPS, OPS[0]),
    "larger tokens": (*OPS[:2], ("gather", 4 * TOKENS, 12), OPS[3]),
}
DIFFERENCES = {
    "two ops swapped": "launch 2: {others}: matmul_reduce_scatter [1, 18, 4, 8] in step 1; "
    "rank 1: all_gather_matmul [1, 18, 4, 12] in step 1",
    "another shape": "launch 4: {others}: matmul_reduce_scatter [1, 18, 4, 12] in step 1; "
    "rank 1: matmul_reduce_scatter [1, 18, 4, 16] in step 1",
    "one op missing": "launch 4: {others}: matmul_reduce_scatter [1, 18, 4, 12] in step 1; rank 1: nothing",
    "one op more": "launch 5: {others}: nothing; rank 1: all_gather_matmul [1, 18, 4, 8] in step 1",
    "larger tokens": "launch 3: {others}: all_gather_matmul [1, 18, 4, 12] in step 1; "
    "rank 1: all_gather_matmul [1, 72, 4, 12] in step 1",
}
"""The first difference. The first op opens memory, which is launch 1."""


def launch(buffers: AsyncTPBuffers, ops: Sequence[Op]) -> None:
    for name, tokens, channels in ops:
        if name == "gather":
            all_gather_matmul(torch.zeros(1, tokens, WIDTH), torch.zeros(channels, WIDTH), buffers)
        else:
            length = tokens * buffers.size
            matmul_reduce_scatter(torch.zeros(1, length, channels), torch.zeros(WIDTH, channels), buffers)


def open_buffers(seconds: float = 60.0, group: dist.ProcessGroup | None = None) -> tuple[AsyncTPBuffers, Heartbeat]:
    launches = Heartbeat()
    launches.step = 1
    group = group or dist.group.WORLD
    assert group is not None
    timeout = timedelta(seconds=seconds)
    return buffers_without_waits(torch.device("cpu"), group=group, timeout=timeout, launches=launches), launches


def run_step(fault: str | None) -> tuple[str | None, int, float]:
    """The error of a rank after a step's launches, the residual of all ranks, and the seconds that the step took."""
    buffers, _ = open_buffers()
    started = time.monotonic()
    try:
        launch(buffers, FAULTS[fault] if fault is not None and dist.get_rank() == FAULTY else OPS)
        buffers.order.compare()
    except RankStalledError as error:
        message = str(error)
    else:
        message = None
    seconds = time.monotonic() - started
    total = torch.tensor(buffers.order.residual())
    dist.all_reduce(total)
    return message, int(total), seconds


def test_ranks_with_the_same_launches_agree():
    assert [found[:2] for found in run_ranks(3, run_step, None)] == [(None, 0)] * 3


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_with_different_launches_all_name_the_first_difference(fault):
    """On the host alone, as on a GPU: an op that another rank did not launch does not block the host here."""
    found = run_ranks(3, run_step, fault)
    messages = {message for message, _, _ in found}
    assert len(messages) == 1
    (message,) = messages
    assert message is not None
    assert "the ranks of axis tp launched different overlapped ops, first at " in message
    assert DIFFERENCES[fault].format(others="ranks 0, 2") in message
    assert 'parallel.tp_overlap = "none"' in message
    assert all(residual != 0 for _, residual, _ in found)
    assert max(seconds for _, _, seconds in found) < 30  # no rank waits for the time limit


def test_a_rank_that_opens_memory_alone_is_named():
    """Before it waits for the others' memory: they compare their launches meanwhile."""
    message = run_ranks(2, run_step, "larger tokens")[0][0]
    assert message is not None
    assert "rank 0: compares its launches; rank 1: opens memory for 384 elements of torch.float32" in message


def wait_alone() -> str | None:
    """The error of rank 0, which compares alone."""
    buffers, _ = open_buffers(seconds=1.0)
    launch(buffers, OPS)
    message = None
    if dist.get_rank() == 0:
        with pytest.raises(RankStalledError) as raised:
            buffers.order.compare()
        message = str(raised.value)
    dist.barrier()
    return message


def test_a_rank_that_does_not_compare_in_time_is_named():
    message = run_ranks(2, wait_alone)[0]
    assert message is not None
    assert message.startswith(
        "rank 0 compares its launches after matmul_reduce_scatter [1, 12, 4, 12] in step 1, but rank 1 did not within "
        "1 s: the ranks of axis tp must launch the same overlapped ops in the same order; "
    )


def compare_later() -> str:
    """The error of a comparison after the third step, whose second one differs."""
    buffers, launches = open_buffers()
    for step in (1, 2, 3):
        launches.step = step
        launch(buffers, OPS[::-1] if step == 2 and dist.get_rank() == FAULTY else OPS)
        if step == 1:
            buffers.order.compare()
    with pytest.raises(RankStalledError) as raised:
        buffers.order.compare()
    return str(raised.value)


def test_all_steps_since_the_last_comparison_are_compared():
    for message in run_ranks(2, compare_later):
        assert "first at launch 5: rank 0: all_gather_matmul [1, 12, 4, 8] in step 2; rank 1: matmul" in message


def overwrite_the_difference() -> str:
    """The error of ranks whose ring no longer holds the launches that differ."""
    buffers, _ = open_buffers()
    buffers.order.record("other" if dist.get_rank() == FAULTY else "op", (1,))
    for _ in range(CAPACITY):
        buffers.order.record("op", (1,))
    with pytest.raises(RankStalledError) as raised:
        buffers.order.compare()
    return str(raised.value)


def test_a_difference_before_the_oldest_launch_in_the_ring_is_an_error_too():
    for message in run_ranks(2, overwrite_the_difference):
        assert "different overlapped ops, before launch 1, the oldest that every rank still records;" in message


def residuals_of_two_axes() -> list[int]:
    """Sums of residuals over two axes of two ranks with other launches each: without a fault, and with one."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = dist.get_rank() // 2
    buffers, _ = open_buffers(group=groups[own])
    found = []
    for faulty in (False, True):
        ops = OPS if own == 0 else OPS[:3]
        launch(buffers, ops[::-1] if faulty and dist.get_rank() == 3 else ops)
        total = torch.tensor(buffers.order.residual())
        dist.all_reduce(total)
        found.append(int(total))
    return found


def test_residuals_add_up_to_zero_where_each_axis_agrees():
    for without, with_fault in run_ranks(4, residuals_of_two_axes):
        assert without == 0
        assert with_fault != 0


def later_buffers() -> list[int]:
    """Launches on the buffers of a group whose later buffers were closed."""
    (first, launches), (second, _) = open_buffers(), open_buffers()
    assert first.name != second.name
    launch(second, OPS)
    del second
    launch(first, OPS)
    first.order.compare()
    return [launch.number for launch in launches.recent()]


def test_buffers_of_one_group_are_independent():
    assert run_ranks(2, later_buffers) == [list(range(len(OPS) + 1))] * 2


def test_ring_keeps_the_last_launches_of_all_axes():
    ring = Heartbeat()
    assert ring.recent() == []
    order = LaunchOrder(ring, "tp")
    for number in range(CAPACITY):
        ring.step = number // 10
        order.record("op", (number,))
    ring.record("send", "pp", (2, 3))
    found = ring.recent()
    assert len(found) == CAPACITY
    assert found[0] == (1, "op", "tp", (1,), 0, "start", 1)
    assert found[-2:] == [
        (CAPACITY - 1, "op", "tp", (CAPACITY - 1,), (CAPACITY - 1) // 10, "start", CAPACITY - 1),
        (CAPACITY, "send", "pp", (2, 3), ring.step, "start", 0),
    ]
    assert (ring.count("tp"), ring.count("pp")) == (CAPACITY, 1)
    order.compare()  # alone: nothing to compare
    assert order.residual() == 0


def train_with_fault(config: Path, folder: Path, engine: str, faulty_step: int) -> str:
    """The error of a rank in a run in which one rank launches one op more in a step."""
    launches: list[Heartbeat] = []

    def open_(*arguments: Any, **options: Any) -> AsyncTPBuffers:
        launches.append(options["launches"])
        return buffers_without_waits(*arguments, **options)

    plain = TensorParallel.all_gather_linear

    def all_gather_linear(tp: TensorParallel, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if launches[0].step == faulty_step and dist.get_rank() == FAULTY and tp.buffers is not None:
            all_gather_matmul(x.detach(), weight.detach(), tp.buffers)
        return plain(tp, x, weight, bias)

    with (
        patch.object(meshes, "open_async_tp_buffers", open_),
        patch.object(TensorParallel, "all_gather_linear", all_gather_linear),
        pytest.raises(RankStalledError) as raised,
    ):
        train_here(config, folder, "parallel.tp=2", "parallel.sequence_parallel=true", f"train.engine={engine}")
    return str(raised.value)


@pytest.mark.parametrize(
    ("engine", "faulty_step", "saved"),
    [("fsdp2", 1, []), ("fsdp2", 3, []), ("fsdp2", 4, [3]), ("deepspeed", 1, [])],
)
def test_run_ends_on_every_rank_before_it_saves_a_step_with_different_launches(tmp_path, engine, faulty_step, saved):
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    config = write_config(tmp_path, checkpoint={"every_steps": 3})
    (message, other) = run_ranks(2, train_with_fault, config, tmp_path / "run", engine, faulty_step)
    assert message == other
    assert f"in step {faulty_step}; rank 1: all_gather_matmul [2, 36, 32, " in message
    assert steps_saved(tmp_path / "run") == saved
    # In the first step and before a checkpoint, launches are compared before the results are read, else before the
    # next step.
    assert len(metrics(tmp_path / "run")) == (4 if faulty_step == 4 else faulty_step - 1)
