"""CUDA graphs of meshes, by a simulated rank on one GPU: bits, the collective that hangs, and the rank's own time."""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional

from megalin.model.block import Block
from megalin.parallel.heartbeats import current
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import local
from megalin.train.cuda_graphs import WARM_UP_STEPS
from megalin.train.engine import FullyShardedEngine
from tools.train_benchmarks.batches import random_batches
from tools.train_benchmarks.engine import run_config
from tools.train_benchmarks.simulated_ranks import SimulatedProcessGroup, simulated_ranks, with_own_vocabulary

SIZES = ["data.sequence_length=256", "train.micro_batch_size=2", "model.layers.0.repeat=2"]
STEPS = WARM_UP_STEPS + 4
SECOND = 2_000_000_000
"""Cycles of a sleep of about one second, somewhat more than that on most GPUs."""


class SimulatedRun:
    """Steps of one simulated rank in packed documents."""

    def __init__(self, ranks: int, *overrides: str, graphs: bool = True, micro_batches: int = 1) -> None:
        run = run_config("hgrn2-70m", [*SIZES, *overrides], ranks)
        size = run.train.global_batch_size * micro_batches
        train = run.train.model_copy(update={"global_batch_size": size, "cuda_graphs": graphs})
        self.config = run.model_copy(update={"train": train})
        self.mesh = Mesh(run.parallel, torch.device("cuda", torch.cuda.current_device()))
        self.engine = FullyShardedEngine(self.config, self.mesh)

    def step(self, step: int) -> Any:
        """Launches a step."""
        batches = random_batches(with_own_vocabulary(self.config), self.mesh, step=step, document_length=97)
        return self.engine.step(batches, learning_rate=1e-3, step=step)


@contextmanager
def simulated_run(ranks: int, *overrides: str, **options: Any) -> Iterator[SimulatedRun]:
    """A run whose graph was captured and replayed once, unless it is eager."""
    with simulated_ranks(ranks, torch.device("cuda", torch.cuda.current_device())):
        run = SimulatedRun(ranks, *overrides, **options)
        try:
            yield run
        finally:
            run.engine.close()
            del run
            gc.collect()
            torch.cuda.empty_cache()


def results(*arguments: Any, **options: Any) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], bool]:
    """Losses and norms, weights and moments after the last step, and whether that was a replay."""
    with simulated_run(*arguments, **options) as run:
        steps = [run.step(step).wait() for step in range(STEPS)]
        print(run.engine.report_lines())
        tensors = {name: local(tensor).detach().clone() for name, tensor in run.engine.tensors().items()}
        assert current().pending() == ""
        return [(step.loss, step.grad_norm) for step in steps], tensors, run.engine.replays


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        *((2, [f"parallel.zero={zero}"]) for zero in range(4)),
        (4, ["parallel.shard=2", "parallel.zero=2"]),
        (2, ["parallel.cp=2"]),
        (2, ["parallel.tp=2"]),
        (2, ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.tp_overlap=none"]),
        (8, ["parallel.tp=2", "parallel.cp=2"]),
    ],
    ids=str,
)
def test_graphs_of_meshes_change_no_bit(ranks, axes, micro_batches):
    losses, tensors, replays = results(ranks, *axes, micro_batches=micro_batches)
    assert replays
    eager_losses, eager, eager_replays = results(ranks, *axes, graphs=False, micro_batches=micro_batches)
    assert not eager_replays
    assert losses == eager_losses
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, eager[name])] == []


def sleep_in(monkeypatch: pytest.MonkeyPatch, method: str, cycles: Any) -> None:
    """Makes a collective of captured steps sleep on another CUDA stream. The current one waits for it at once, as in
    FSDP's collectives, or where a pending result is waited for."""
    collective, side = getattr(SimulatedProcessGroup, method), torch.cuda.Stream()
    trigger_wait = functional.AsyncCollectiveTensor.trigger_wait

    def slow(*arguments: Any, **options: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(cycles())
            if any(frame.filename.endswith("_fsdp_collectives.py") for frame in traceback.extract_stack()):
                torch.cuda.current_stream().wait_stream(side)
        return collective(*arguments, **options)

    def wait(result: Any) -> torch.Tensor:
        with torch.cuda.stream(side):
            is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured:
            torch.cuda.current_stream().wait_stream(side)
        return trigger_wait(result)

    for name in {method, method.replace("_base", "_single").lstrip("_").replace("allgather", "all_gather")}:
        if hasattr(SimulatedProcessGroup, name):
            monkeypatch.setattr(SimulatedProcessGroup, name, slow)
    monkeypatch.setattr(functional.AsyncCollectiveTensor, "trigger_wait", wait)


@pytest.mark.parametrize(
    ("axes", "method", "expected"),
    [
        ([], "_reduce_scatter_base", r"reduce_scatter of gradients \[\d+\] on shard"),
        ([], "_allgather_base", r"all_gather of weights \[\d+\] on shard"),
        (["parallel.zero=0"], "allreduce", r"all_reduce of gradients \[\] on replicate"),
        (["parallel.tp=2"], "allreduce", r"all_reduce \[.*\] on tp"),
        (["parallel.cp=2"], "_allgather_base", r"all_gather \[.*\] on cp"),
    ],
    ids=str,
)
def test_the_collective_in_which_a_replay_hangs_is_named(monkeypatch, axes, method, expected):
    """Each captured collective of a kind sleeps; the host reads which one runs."""
    sleep_in(monkeypatch, method, lambda: SECOND // 20)
    with simulated_run(2, *axes) as run:
        for step in range(WARM_UP_STEPS + 1):
            run.step(step).wait()
        assert current().pending() == ""
        pending, launched = run.step(STEPS), time.monotonic()
        seen = []
        while time.monotonic() < launched + 0.3:
            seen.append(current().pending())
        pending.wait()
        assert current().pending() == ""
    named = Counter(seen)
    print(named)
    found = sum(count for text, count in named.items() if re.match(f"{expected}, collective .* in the CUDA", text))
    assert found > len(seen) / 10, named  # all-gathers of weights sleep too


@pytest.mark.parametrize(("axes", "method"), [([], "_reduce_scatter_base"), (["parallel.tp=2"], "allreduce")], ids=str)
def test_time_in_collectives_of_a_replay_is_no_own_time(monkeypatch, axes, method):
    """A sleep in a collective is a wait for other ranks, one in a block is not."""
    forward, cycles = Block.forward, {"collective": 0, "block": 0}

    def slow_forward(*arguments: Any, **options: Any) -> Any:
        torch.cuda._sleep(cycles["block"])
        return forward(*arguments, **options)

    monkeypatch.setattr(Block, "forward", slow_forward)
    sleep_in(monkeypatch, method, lambda: cycles["collective"])
    found = {}
    for place in ("none", "collective", "block"):
        cycles.update(collective=0, block=0)
        cycles[place] = SECOND // 20
        with simulated_run(2, *axes) as run:
            for step in range(STEPS):
                result = run.step(step).wait()
            assert run.engine.replays
        found[place] = result.seconds, result.own_seconds
    print(found)
    (_, own), (seconds, waiting), (_, slow) = found["none"], found["collective"], found["block"]
    assert own > 0
    assert seconds > own + 0.08  # the sleeps of the last collectives cannot overlap with work
    assert waiting < own + 0.02
    assert slow > own + 0.08
