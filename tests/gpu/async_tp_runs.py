"""Rank program of test_async_tensor_parallel_gpu.py: torchrun -m tests.gpu.async_tp_runs values, delays or stall."""

import random
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.parallel.async_tensor_parallel import (
    SHORT_MATMUL,
    AsyncTPBuffers,
    all_gather_matmul,
    matmul_reduce_scatter,
    open_async_tp_buffers,
)
from megalin.parallel.collectives import Axis, gather_from_axis, reduce_scatter_to_axis
from megalin.parallel.heartbeats import Heartbeat
from megalin.parallel.process_group import compute_device, process_group
from tests.numerics import Tensors, relative_error

TOKENS, WIDTH = 256, 512


def open_buffers(device: torch.device, timeout: timedelta) -> AsyncTPBuffers:
    assert dist.group.WORLD is not None
    buffers = open_async_tp_buffers(device, group=dist.group.WORLD, timeout=timeout, launches=Heartbeat())
    assert isinstance(buffers, AsyncTPBuffers), buffers
    return buffers


def inputs(batch: int, channels: int, device: torch.device) -> list[Tensor]:
    """This rank's shards of the hidden states, of the weights up and down, and of the gradient of the result."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((batch, TOKENS, WIDTH), (channels, WIDTH), (WIDTH, channels), (batch, TOKENS, WIDTH))
    x, up, down, dy = (torch.randn(s, dtype=torch.float64, device=device, generator=generator) for s in shapes)
    up, down = up / WIDTH**0.5, down / channels**0.5
    dims = (1, 0, 1, 1)
    return [t.chunk(size, dim)[rank].contiguous() for t, dim in zip((x, up, down, dy), dims, strict=True)]


def layer(shards: list[Tensor], buffers: AsyncTPBuffers, dtype: torch.dtype, *, overlapped: bool = True) -> Tensors:
    """The result down(up(x)) and its gradients, with overlapped communication or by plain collectives."""
    assert dist.group.WORLD is not None
    axis = Axis("tp", buffers.size, buffers.rank, dist.group.WORLD.group_name)
    x, up, down = (shard.to(dtype).requires_grad_() for shard in shards[:3])
    if overlapped:
        y = matmul_reduce_scatter(all_gather_matmul(x, up, buffers), down, buffers)
    else:
        hidden = gather_from_axis(x, axis, dim=1) @ up.t()
        y = reduce_scatter_to_axis(hidden @ down.t(), axis, dim=1)
    y.backward(shards[3].to(dtype))
    found = {"y": y, "dx": x.grad, "dup": up.grad, "ddown": down.grad}
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def compare_values(device: torch.device) -> None:
    """Asserts that the error against fp64 is at most twice that of plain collectives in the same dtype."""
    buffers = open_buffers(device, timedelta(seconds=20))
    for batch, channels in ((1, 1024), (3, 1024), (2, 2 * SHORT_MATMUL * buffers.size)):
        shards = inputs(batch, channels, device)
        truth = layer(shards, buffers, torch.float64, overlapped=False)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            reference = layer(shards, buffers, dtype, overlapped=False)
            for name, tensor in layer(shards, buffers, dtype).items():
                error = relative_error(tensor, truth[name])
                bound = max(2 * relative_error(reference[name], truth[name]), 1e-14)
                assert error <= bound, (batch, channels, dtype, name, error, bound)


def repeat_with_delays(device: torch.device) -> None:
    """Asserts equal bits in every repetition, with random delays of ranks and CUDA streams and other work between."""
    buffers = open_buffers(device, timedelta(seconds=60))
    assert buffers.cuda_stream is not None
    shards = inputs(2, 4096, device)
    expected = layer(shards, buffers, torch.bfloat16)
    draw = random.Random(dist.get_rank())
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(300):
        for stream in (torch.cuda.current_stream(), buffers.cuda_stream):
            if draw.random() < 0.5:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(draw.randrange(10**6))
        torch.randn(draw.randrange(1, 10**6), device=device)
        found = layer(shards, buffers, torch.bfloat16)
        differing += sum((found[name] != tensor).sum() for name, tensor in expected.items())
    assert differing.item() == 0, differing


def stall(device: torch.device) -> None:
    """Stalls rank 1 while rank 0 waits for it."""
    buffers = open_buffers(device, timedelta(seconds=2))
    shards = inputs(2, 1024, device)
    layer(shards, buffers, torch.bfloat16)  # opens the symmetric memory
    if dist.get_rank() == 0:
        layer(shards, buffers, torch.bfloat16)
        torch.cuda.synchronize()
    else:
        time.sleep(60)


def main() -> None:
    device = compute_device()
    with process_group(device):
        {"values": compare_values, "delays": repeat_with_delays, "stall": stall}[sys.argv[1]](device)
        torch.cuda.synchronize()
        dist.barrier()


if __name__ == "__main__":
    main()
