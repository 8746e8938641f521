"""Async tensor parallelism: values and gradients of one process on 2 to 4 ranks, runs, and refused settings."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalin.errors import ConfigError
from megalin.parallel import async_tensor_parallel
from megalin.parallel import mesh as meshes
from megalin.parallel.async_tensor_parallel import (
    SHORT_MATMUL,
    AsyncTPBuffers,
    all_gather_matmul,
    matmul_reduce_scatter,
    open_async_tp_buffers,
)
from megalin.parallel.config import ParallelConfig
from megalin.parallel.heartbeats import Heartbeat
from megalin.parallel.launch_order import LaunchOrder
from megalin.parallel.mesh import check_device
from megalin.parallel.symmetric_memory import OpenMemory
from tests.model_runs import checkpoint_tensors, train_here, write_config
from tests.numerics import Tensors, assert_close, errors
from tests.parallel.on_ranks import Arrays, to_arrays, to_tensors
from tests.parallel.shared_memory import SharedMemory, buffers_in_files
from tests.ranks import run_ranks

WIDTH, TOKENS = 6, 12


def sample(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(batch: int, channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weights up [channels, WIDTH] and down [WIDTH, channels], and the gradient of the result."""
    shapes = ((batch, TOKENS, WIDTH), (channels, WIDTH), (WIDTH, channels), (batch, TOKENS, WIDTH))
    x, up, down, dy = (sample(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return x, up, down / channels**0.5, dy


def layer(x: Tensor, up: Tensor, down: Tensor, buffers: AsyncTPBuffers | None) -> Tensor:
    """x + down(up(x)^2), twice, so that an op's memory is written again."""
    for _ in range(2):
        hidden = x @ up.t() if buffers is None else all_gather_matmul(x, up, buffers)
        hidden = hidden.square()
        x = x + (hidden @ down.t() if buffers is None else matmul_reduce_scatter(hidden, down, buffers))
    return x


def open_in_files(folder: Path) -> AsyncTPBuffers:
    """Buffers of all ranks."""
    assert dist.group.WORLD is not None
    return buffers_in_files(folder)(torch.device("cpu"), group=dist.group.WORLD, timeout=None, launches=Heartbeat())


def on_ranks(folder: Path, batch: int, channels: int, compiled: bool, dtype: torch.dtype = torch.float64) -> Arrays:
    buffers = open_in_files(folder)
    size, rank = buffers.size, buffers.rank
    x, up, down, dy = inputs(batch, channels)
    x, dy = (full.chunk(size, 1)[rank] for full in (x, dy))
    up, down = up.chunk(size, 0)[rank], down.chunk(size, 1)[rank]
    leaves = [leaf.detach().to(dtype, copy=True).requires_grad_() for leaf in (x, up, down)]
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    y = run(*leaves, buffers)
    y.backward(dy.to(dtype))
    found = {name: leaf.grad for name, leaf in zip(("dx", "dup", "ddown"), leaves, strict=True)}
    return to_arrays({name: tensor.double() for name, tensor in {"y": y, **found}.items()})


def on_one_process(batch: int, channels: int, dtype: torch.dtype) -> Tensors:
    x, *weights, dy = (tensor.to(dtype) for tensor in inputs(batch, channels))
    leaves = [leaf.requires_grad_() for leaf in (x, *weights)]
    y = layer(*leaves, None)
    y.backward(dy)
    found = {"y": y, **{name: leaf.grad for name, leaf in zip(("dx", "dup", "ddown"), leaves, strict=True)}}
    return {name: tensor.detach().double() for name, tensor in found.items()}


def shard_of(full: Tensors, size: int, rank: int) -> Tensors:
    dims = {"y": 1, "dx": 1, "dup": 0, "ddown": 1}
    return {name: tensor.chunk(size, dims[name])[rank] for name, tensor in full.items()}


@pytest.mark.parametrize(
    ("world_size", "batch", "channels", "compiled"),
    [
        # Compiled on two ranks, the others on three.
        pytest.param(size, *case, marks=[pytest.mark.slow] * (size != (2 if case[-1] else 3)))
        for size in (2, 3, 4)
        for case in ((1, 12, False), (2, 24, False), (3, 12, True), (2, 12 * SHORT_MATMUL, False))
    ],
)
def test_values_and_gradients_are_those_of_one_process(tmp_path, world_size, batch, channels, compiled):
    expected = on_one_process(batch, channels, torch.float64)
    for rank, found in enumerate(run_ranks(world_size, on_ranks, tmp_path, batch, channels, compiled)):
        assert_close(to_tensors(found), shard_of(expected, world_size, rank), 1e-13)


def test_bf16_has_at_most_twice_the_error_of_one_process(tmp_path):
    """bf16 multiplies sequences that are not contiguous as a batch."""
    truth, reference = (on_one_process(3, 256, dtype) for dtype in (torch.float64, torch.bfloat16))
    for rank, found in enumerate(run_ranks(2, on_ranks, tmp_path, 3, 256, False, torch.bfloat16)):
        own = shard_of(truth, 2, rank)
        bounds = errors(shard_of(reference, 2, rank), own)
        for name, error in errors(to_tensors(found), own).items():
            assert error <= 2 * bounds[name], (name, error, bounds[name])


def test_hidden_states_of_all_shapes_share_memory(tmp_path):
    opened: list[int] = []

    def open_memory(numel: int, dtype: torch.dtype) -> OpenMemory:
        opened.append(numel)
        (here := tmp_path / str(numel)).mkdir()
        return OpenMemory(SharedMemory(here, 0, 2, numel, dtype), torch.empty(0))

    order = LaunchOrder(Heartbeat(), "tp")
    buffers = AsyncTPBuffers("alone", 0, 2, open_memory, order, timeout=timedelta(seconds=1))
    for length in (8, 2, 8, 10, 14, 16, 40):
        buffers.op(torch.Size((1, length, 4)), torch.float32)
    assert opened == [64, 128, 320]


def gather_often(folder: Path) -> list[float]:
    """Means of the results of successive all-gathers and matmuls, where rank 1 reads late."""
    buffers = open_in_files(folder)
    matmul = async_tensor_parallel._matmul

    def late(*arguments: Any, **options: Any) -> Tensor:
        time.sleep(0.05 * buffers.rank)
        return matmul(*arguments, **options)

    with patch.object(async_tensor_parallel, "_matmul", late):
        found = [all_gather_matmul(torch.full((1, 2, 3), float(turn)), torch.eye(3), buffers) for turn in range(4)]
    return [turn.mean().item() for turn in found]


def test_tokens_are_not_written_over_while_a_rank_reads_them(tmp_path):
    assert run_ranks(2, gather_often, tmp_path) == [[0.0, 1.0, 2.0, 3.0]] * 2


def train_async(config: Path, folder: Path, *overrides: str) -> None:
    with patch.object(meshes, "open_async_tp_buffers", buffers_in_files(folder / "memory")):
        train_here(config, folder, *overrides)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(4, ["parallel.cp=2", "train.recompute=true"], marks=pytest.mark.slow),
        pytest.param(4, ["parallel.pp=2"], marks=pytest.mark.slow),
        pytest.param(4, ["parallel.shard=2"], marks=pytest.mark.slow),
        (2, []),
    ],
    ids=["cp2", "pp2", "dp2", "tp2"],
)
def test_runs_end_with_the_weights_of_runs_without_overlap(tmp_path, world_size, overrides):
    """tp 2, packed documents, several steps, an evaluation and a checkpoint."""
    config = write_config(tmp_path, train={"steps": 3, "evaluate_every_steps": 2})
    overrides = ["parallel.tp=2", "parallel.sequence_parallel=true", *overrides]
    plain, overlapped = tmp_path / "plain", tmp_path / "overlapped"
    run_ranks(world_size, train_here, config, plain, 'parallel.tp_overlap="none"', *overrides)
    run_ranks(world_size, train_async, config, overlapped, *overrides)
    expected = checkpoint_tensors(plain)
    assert_close(checkpoint_tensors(overlapped), expected, 1e-5)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tp": 2}, 'tp_overlap = "symmetric_memory" without sequence_parallel'),
        (
            {"tp": 2, "sequence_parallel": True, "pp": 2, "pp_schedule": "zero_bubble"},
            'tp_overlap = "symmetric_memory" with pp_schedule = "zero_bubble"',
        ),
    ],
    ids=["no_sequence_parallelism", "zero_bubble"],
)
def test_settings_without_async_tensor_parallelism_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(tp_overlap="symmetric_memory", **axes)
    assert not ParallelConfig(**axes).may_use_async_tp


def test_ranks_without_copy_engines_are_refused_before_they_start():
    config = ParallelConfig(tp=2, sequence_parallel=True, tp_overlap="symmetric_memory")
    with pytest.raises(
        ConfigError, match=r'tp_overlap = "symmetric_memory" needs .* GPUs, but the ranks compute on cpu; use "auto"'
    ):
        check_device(config, "cpu")


def refusal(host: str) -> str:
    """A rank's reason for having no buffers, on CPU ranks whose hosts have these names."""
    group = dist.group.WORLD
    assert group is not None
    with patch.object(socket, "gethostname", lambda: host.format(rank=dist.get_rank())):
        found = open_async_tp_buffers(
            torch.device("cuda"), group=group, timeout=timedelta(seconds=1), launches=Heartbeat()
        )
    assert isinstance(found, str), found
    return found


def test_every_rank_has_the_same_reason_for_no_buffers():
    assert run_ranks(2, refusal, "host{rank}") == ["the ranks of the axis are on 2 hosts"] * 2
    first, second = run_ranks(2, refusal, "host")
    assert first == second
    assert "symmetric memory fails on rank 0" in first
