"""What test_overlapped_products_gpu.py has ranks do: torchrun -m tests.gpu.async_tp_runs values, delays or stall."""

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
from megalin.parallel.process_group import compute_device, process_group
from tests.numerics import Tensors, relative_error

TOKENS, WIDTH = 256, 512


def opened(device: torch.device, timeout: timedelta) -> tuple[AsyncTPBuffers, Axis]:
    group = dist.group.WORLD
    assert group is not None
    copies = open_async_tp_buffers(device, group=group, timeout=timeout)
    assert isinstance(copies, AsyncTPBuffers), copies
    return copies, Axis("tp", group.size(), group.rank(), group.group_name)


def inputs(batch: int, channels: int, device: torch.device) -> list[Tensor]:
    """This rank's part of the stream, of the weights up and down, and of the gradient of the result."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((batch, TOKENS, WIDTH), (channels, WIDTH), (WIDTH, channels), (batch, TOKENS, WIDTH))
    x, up, down, dy = (torch.randn(s, dtype=torch.float64, device=device, generator=generator) for s in shapes)
    up, down = up / WIDTH**0.5, down / channels**0.5
    dims = (1, 0, 1, 1)
    return [t.chunk(size, dim)[rank].contiguous() for t, dim in zip((x, up, down, dy), dims, strict=True)]


def layer(parts: list[Tensor], axis: Axis, dtype: torch.dtype, *, by_copies: bool) -> Tensors:
    """down(up(x)) and its gradients."""
    x, up, down = (part.to(dtype).requires_grad_() for part in parts[:3])
    if by_copies:
        y = matmul_reduce_scatter(all_gather_matmul(x, up, axis), down, axis)
    else:
        hidden = gather_from_axis(x, axis, dim=1) @ up.t()
        y = reduce_scatter_to_axis(hidden @ down.t(), axis, dim=1)
    y.backward(parts[3].to(dtype))
    found = {"y": y, "dx": x.grad, "dup": up.grad, "ddown": down.grad}
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def compare_values(device: torch.device) -> None:
    """Each dtype against fp64 by collectives, with at most twice the error of the same dtype by collectives."""
    copies, axis = opened(device, timedelta(seconds=20))
    for batch, channels in ((1, 1024), (3, 1024), (2, 2 * SHORT_MATMUL * axis.size)):
        parts = inputs(batch, channels, device)
        truth = layer(parts, axis, torch.float64, by_copies=False)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            reference = layer(parts, axis, dtype, by_copies=False)
            for name, tensor in layer(parts, axis, dtype, by_copies=True).items():
                error = relative_error(tensor, truth[name])
                bound = max(2 * relative_error(reference[name], truth[name]), 1e-14)
                assert error <= bound, (batch, channels, dtype, name, error, bound)
    del copies


def repeat_with_delays(device: torch.device) -> None:
    """Ranks and streams that wait at random, and other work between: the bits of the first time."""
    copies, axis = opened(device, timedelta(seconds=60))
    assert copies.cuda_stream is not None
    parts = inputs(2, 4096, device)
    expected = layer(parts, axis, torch.bfloat16, by_copies=True)
    draw = random.Random(dist.get_rank())
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(300):
        for stream in (torch.cuda.current_stream(), copies.cuda_stream):
            if draw.random() < 0.5:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(draw.randrange(10**6))
        torch.randn(draw.randrange(1, 10**6), device=device)
        found = layer(parts, axis, torch.bfloat16, by_copies=True)
        differing += sum((found[name] != tensor).sum() for name, tensor in expected.items())
    assert differing.item() == 0, differing


def stall(device: torch.device) -> None:
    """Rank 1 takes no part."""
    copies, axis = opened(device, timedelta(seconds=2))
    parts = inputs(2, 1024, device)
    layer(parts, axis, torch.bfloat16, by_copies=True)  # which opens the memory
    if dist.get_rank() == 0:
        layer(parts, axis, torch.bfloat16, by_copies=True)
        torch.cuda.synchronize()
    else:
        time.sleep(60)
    del copies


def main() -> None:
    device = compute_device()
    with process_group(device):
        {"values": compare_values, "delays": repeat_with_delays, "stall": stall}[sys.argv[1]](device)
        torch.cuda.synchronize()
        dist.barrier()


if __name__ == "__main__":
    main()
