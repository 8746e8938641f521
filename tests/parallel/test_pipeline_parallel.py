"""The pipeline axis: tensors sent between stages, memory, and the ranks that hold copies of a parameter."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from megalin.config import parse
from megalin.data.batch import Batch
from megalin.model.config import ModelConfig
from megalin.optim.adamw import build_optimizer
from megalin.optim.config import OptimizerConfig
from megalin.parallel.config import ParallelConfig
from megalin.parallel.embedding import VocabParallelEmbedding
from megalin.parallel.heartbeats import LaunchedOp, current
from megalin.parallel.mesh import Mesh
from megalin.train.build import build_model
from megalin.train.step import train_step
from tests.model_runs import CPU, model_table
from tests.ranks import run_ranks

MODEL = parse(ModelConfig, model_table(), "test")
DEEP_MODEL = parse(ModelConfig, model_table() | {"layers": model_table()["layers"] * 3}, "test")
ROWS, LENGTH, MICRO_BATCHES = 2, 24, 3
Sent = list[tuple[tuple[int, ...], str]]


def steps_of(model_config: ModelConfig, mesh: Mesh, num_micro_batches: int = MICRO_BATCHES) -> Callable[[int], None]:
    """A function that runs the training step of a given number, on a new model."""
    model = build_model(model_config, mesh, compute_dtype=torch.bfloat16, recompute=False, compile_blocks=False, seed=0)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3), no_decay=())
    ids = torch.arange(ROWS * (LENGTH + 1)).remainder(250).view(ROWS, -1)
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    batches = [Batch(ids[:, :-1], ids[:, 1:], documents, torch.arange(ROWS))] * num_micro_batches

    def step(number: int) -> None:
        train_step(model, optimizer, batches, mesh, max_grad_norm=1.0, step=number).wait()

    return step


def sent_in_a_step(parallel: ParallelConfig) -> tuple[Sent, list[LaunchedOp]]:
    """Shape and dtype of all tensors that this rank sends to other stages during a second step, and the transfers that
    its heartbeat recorded in both steps."""
    step = steps_of(MODEL, Mesh(parallel, CPU))
    sent: Sent = []
    operation = dist.P2POp

    def spy(kind: Any, tensor: torch.Tensor, *args: Any) -> Any:
        if kind is dist.isend:
            sent.append((tuple(tensor.shape), str(tensor.dtype)))
        return operation(kind, tensor, *args)

    loss_sum = VocabParallelEmbedding.loss_sum
    with pytest.MonkeyPatch.context() as patch:
        # In fp64, as the kernel sums on a GPU; the reference sums in fp32.
        patch.setattr(VocabParallelEmbedding, "loss_sum", lambda *args, **options: loss_sum(*args, **options).double())
        step(1)
        patch.setattr(dist, "P2POp", spy)
        step(2)
    return sent, [op for op in current().recent() if op.axis == "pp" and " rank " in op.op]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_only_hidden_states_and_their_gradients_are_sent(sequence_parallel: bool):
    tp = 2 if sequence_parallel else 1
    parallel = ParallelConfig(pp=2, tp=tp, sequence_parallel=sequence_parallel)
    hidden = ((ROWS, LENGTH // tp, MODEL.hidden_size), "torch.bfloat16")
    for rank, (sent, recorded) in enumerate(run_ranks(2 * tp, sent_in_a_step, parallel)):
        assert sent == [hidden] * MICRO_BATCHES
        other = (rank + tp) % (2 * tp)
        transfers = [(f"{verb} rank {other}", hidden[0]) for verb in ("send to", "receive from")]
        assert Counter((op.op, op.shape) for op in recorded) == dict.fromkeys(transfers, 2 * MICRO_BATCHES)


def most_memory(parallel: ParallelConfig, counts: tuple[int, int]) -> list[int]:
    return [most_memory_in_a_step(parallel, count) for count in counts]


def most_memory_in_a_step(parallel: ParallelConfig, num_micro_batches: int) -> int:
    """The largest number of allocated receive buffers of a stage of this rank while it computes."""
    step = steps_of(DEEP_MODEL, Mesh(parallel, CPU), num_micro_batches)
    most = 0

    def counting(compute: Callable[..., Any]) -> Callable[..., Any]:
        def counted(stage: PipelineStage, *args: Any, **options: Any) -> Any:
            nonlocal most
            infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
            buffers = [info.buffer for each in infos for info in each if getattr(info, "buffer", None) is not None]
            most = max(most, sum(not buffer.is_meta for buffer in buffers))
            return compute(stage, *args, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward_one_chunk", "backward_one_chunk"):
            patch.setattr(PipelineStage, name, counting(getattr(PipelineStage, name)))
        step(1)
        step(2)
    return most


@pytest.mark.parametrize("axes", [{}, {"pp_schedule": "interleaved", "pp_stages_per_rank": 2}])
def test_memory_does_not_grow_with_micro_batches(axes: dict[str, Any]):
    parallel = ParallelConfig(pp=2, **axes)
    for few, many in run_ranks(2, most_memory, parallel, (6, 10)):
        assert few == many < 6


def alive(parallel: ParallelConfig, counts: tuple[int, int]) -> list[int]:
    return [alive_at_the_last_backward(parallel, count) for count in counts]


def alive_at_the_last_backward(parallel: ParallelConfig, num_micro_batches: int) -> int:
    """Number of tensors in memory with the shape of the hidden states, after this rank's last backward of a step."""
    step = steps_of(DEEP_MODEL, Mesh(parallel, CPU), num_micro_batches)
    alive = -1
    backward = PipelineStage.backward_one_chunk

    def counted(stage: PipelineStage, number: int, *args: Any, **options: Any) -> None:
        nonlocal alive
        backward(stage, number, *args, **options)
        if number == num_micro_batches - 1:
            gc.collect()
            tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and not each.is_meta]
            alive = sum(each.shape == (ROWS, LENGTH, DEEP_MODEL.hidden_size) for each in tensors)

    step(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineStage, "backward_one_chunk", counted)
        step(2)
    return alive


def test_a_micro_batch_is_freed_after_its_backward():
    """torch's schedule keeps the losses of a step, whose graphs would keep all their inputs. (With the interleaved
    schedule, gloo keeps the sent tensors as well.)"""
    for few, many in run_ranks(2, alive, ParallelConfig(pp=2), (4, 6)):
        assert few == many


def holders(parallel: ParallelConfig, stages: list[list[int]]) -> list[tuple[int, int]]:
    """Size of the axis of each set of stages, and this rank's index on it."""
    axes = [Mesh(parallel, CPU).pp.axis_of_holders(each) for each in stages]
    return [(axis.size, axis.rank) for axis in axes]


def test_copies_lie_on_the_ranks_that_run_their_stages():
    stages = [[0, 3], [0, 1, 2, 3], [1]]
    assert run_ranks(4, holders, ParallelConfig(pp=4), stages) == [
        [(2, 0), (4, 0), (1, 0)],
        [(1, 0), (4, 1), (1, 0)],
        [(1, 0), (4, 2), (1, 0)],
        [(2, 1), (4, 3), (1, 0)],
    ]


def test_copies_of_one_rank_send_nothing():
    parallel = ParallelConfig(pp=2, pp_schedule="interleaved", pp_stages_per_rank=2)
    assert run_ranks(2, holders, parallel, [[0, 2], [0, 3]]) == [[(1, 0), (2, 0)], [(1, 0), (2, 1)]]


def test_copies_lie_in_their_own_column_of_the_mesh():
    """A rank of the tensor-parallel axis shares with the ranks of the same index on other stages."""
    expected = [(2, 0), (2, 0), (1, 0), (1, 0), (2, 1), (2, 1)]
    assert run_ranks(6, holders, ParallelConfig(pp=3, tp=2), [[0, 2]]) == [[axis] for axis in expected]
