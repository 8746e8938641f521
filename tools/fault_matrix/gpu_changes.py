"""Changes of a rank on a GPU: more work for its GPU or host in each step, a GPU that hangs, and steps without a
measurement of waits."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

_PAIRS = 200
_MATMUL = 8192
_TRIED_CYCLES = 10_000_000
_MINUTES, _CYCLES_A_MINUTE = 5, 120_000_000_000


def slow_blocks(milliseconds: float) -> None:
    """This rank's GPU sleeps so long in the forward of every block; prints the time by the GPU's clock."""
    from megalin.model.block import Block

    forward, cycles = Block.forward, list[int]()

    def changed(block: Block, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            if not cycles:
                _sleep_milliseconds(_TRIED_CYCLES)  # the first one loads the kernel
                cycles.append(int(_TRIED_CYCLES * milliseconds / _sleep_milliseconds(_TRIED_CYCLES)))
                print(f"a sleep takes {_sleep_milliseconds(cycles[0]):.1f} ms", file=sys.stderr, flush=True)
            torch.cuda._sleep(cycles[0])  # type: ignore[no-untyped-call]
        return forward(block, *args, **options)

    Block.forward = changed  # type: ignore[method-assign]


def _sleep_milliseconds(cycles: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def more_matmuls(count: int) -> None:
    """This rank's GPU multiplies two matrices of 8,192 x 8,192 so many times before every step."""
    from megalin.train.engine import FullyShardedEngine

    take, matrices = FullyShardedEngine.step, list[torch.Tensor]()

    def changed(engine: Any, *args: Any, **options: Any) -> Any:
        if not matrices:
            matrices.append(torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16))
        for _ in range(count):
            torch.mm(matrices[0], matrices[0])
        return take(engine, *args, **options)

    FullyShardedEngine.step = changed  # type: ignore[method-assign]


def hang_before_replay(number: int) -> None:
    """This rank's GPU sleeps for minutes before this replay of its CUDA graph."""
    replay, count = torch.cuda.CUDAGraph.replay, [0]

    def changed(graph: torch.cuda.CUDAGraph) -> None:
        count[0] += 1
        if count[0] == number:
            for _ in range(_MINUTES):
                torch.cuda._sleep(_CYCLES_A_MINUTE)  # type: ignore[no-untyped-call]
        replay(graph)

    torch.cuda.CUDAGraph.replay = changed  # type: ignore[method-assign]


def measured_until(step: int) -> None:
    """Waits are not measured in steps after this one; prints the number of waits in a step and their cost."""
    from megalin.parallel.compute_waits import ComputeWaits
    from megalin.train.engine import FullyShardedEngine

    take, end, numbers = FullyShardedEngine.step, ComputeWaits.end_step, list[int]()

    def ended(waits: ComputeWaits) -> Any:
        numbers.append(len(waits._waits))
        return end(waits)

    def changed(engine: Any, *args: Any, **options: Any) -> Any:
        waits = engine.timer.waits
        if options["step"] == step and waits is not None:
            print(f"waits a step: {statistics.median(numbers):g}, {_cost(waits)}", file=sys.stderr, flush=True)
            engine.timer.waits = None
            FullyShardedEngine._compares_own_times = property(lambda _: False)  # type: ignore[assignment]
        return take(engine, *args, **options)

    ComputeWaits.end_step = ended  # type: ignore[method-assign]
    FullyShardedEngine.step = changed  # type: ignore[method-assign]


def _cost(waits: Any) -> str:
    """Host time of a measured wait, and of its reading."""
    waits.enter()
    started = time.perf_counter()
    for _ in range(_PAIRS):
        with waits.measured():
            pass
    recorded = time.perf_counter() - started
    duration = waits.end_step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    duration.seconds()
    read = time.perf_counter() - started
    waits.leave()
    return f"recorded in {recorded / _PAIRS * 1e6:.1f} us each, read in {read / _PAIRS * 1e6:.1f} us each"
