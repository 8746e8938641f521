"""Peak memory of a rank during a step, by purpose."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from megalin.parallel.p2p_copies import SLOTS
from megalin.planner.block_traces import Trace
from megalin.planner.parameters import Elements, StageParameters
from megalin.planner.workload import ParallelLayout

_FP32 = 4


class Memory(NamedTuple):
    """Bytes of a rank at its peak."""

    weights: int
    """fp32 shards, their copies in the compute dtype where they are sharded, and buffers."""
    gradients: int
    """fp32 shards, or unsharded between micro-batches under ZeRO 0 and 1, in the compute dtype where they stay in it;
    and those of embedding and head before their reduction."""
    optimizer: int
    """Both moments, fp32 shards, and the state of update hooks."""
    gathered: int
    """All-gathered weights in the compute dtype."""
    activations: int
    """Tensors saved for the backward, recurrent states included."""
    working: int
    """Temporaries of one block's backward or of the loss, gradients in reduction and pipeline buffers."""
    symmetric_memory: int
    """Buffers that other ranks' copy engines write, outside the caching allocator (docs/adr/0014 and 0015)."""

    @property
    def total(self) -> int:
        """Sum of all purposes."""
        return sum(self)


def stage_memory(
    parameters: StageParameters,
    trace: Trace,
    kinds: list[int],
    layout: ParallelLayout,
    *,
    rank: int,
    itemsize: int,
    hook_bytes: int,
) -> Memory:
    """Peak memory of a rank that runs the stage.

    Args:
        kinds: for each block of the stage, its index in the trace's blocks.
        rank: on the pipeline axis.
        itemsize: bytes of the compute dtype.
        hook_bytes: memory of the update hooks.
    """
    saved, backward = _block_costs(trace, kinds, layout)
    moments = _StepMemory(parameters, trace, layout, itemsize, hook_bytes)
    before = (layout.in_flight(rank) - 1) * sum(saved) // layout.parallel.pp_stages_per_rank
    before += layout.in_flight(rank) * trace.entry.saved_bytes if rank == 0 else 0
    last = len(saved) - 1
    peaks = [
        moments.at(b, before + sum(saved[: b + 1]), backward[b] - saved[b]) for b in _ends_of_equal_runs(tuple(kinds))
    ]
    if parameters.table:
        loss = max(trace.loss.forward_bytes, trace.loss.backward_bytes)
        kept = before + sum(saved) + trace.exit.saved_bytes
        peaks.append(moments.at(last, kept, loss, after_loss=False))
    peaks.append(moments.update())
    return max(peaks, key=lambda memory: memory.total)


@cache
def _ends_of_equal_runs(kinds: tuple[int, ...]) -> list[int]:
    """Blocks at the ends of runs of equal ones: within a run the memory changes evenly, so the peak is at an end."""
    last = len(kinds) - 1
    return [b for b in range(last + 1) if b in (0, last) or len({*kinds[b - 1 : b + 2]}) > 1]


def _block_costs(trace: Trace, kinds: list[int], layout: ParallelLayout) -> tuple[list[int], list[int]]:
    """Per block: saved bytes, and the peak of its backward, saved bytes included."""
    costs = [trace.blocks[kind] for kind in kinds]
    if not layout.recompute:
        return [cost.saved_bytes for cost in costs], [cost.backward_bytes for cost in costs]
    return [trace.hidden_bytes] * len(costs), [trace.hidden_bytes + cost.backward_bytes for cost in costs]


def _symmetric_memory_bytes(trace: Trace, layout: ParallelLayout) -> int:
    """Async tensor parallelism: hidden states of all tokens and partial sums of the same size. Pipeline: per stage the
    slots of two channels, for activations and for gradients."""
    slots = 2 * SLOTS * layout.parallel.pp_stages_per_rank * trace.hidden_bytes if layout.copies_between_stages else 0
    return 2 * trace.copied_bytes + slots


class _StepMemory:
    """Memory of a rank while the last backward of a step passes its blocks."""

    def __init__(
        self, parameters: StageParameters, trace: Trace, layout: ParallelLayout, itemsize: int, hook_bytes: int
    ) -> None:
        self.parameters, self.trace, self.layout, self.itemsize = parameters, trace, layout, itemsize
        # On one shard rank the gathered weights are the copies, so they stay gathered.
        self.copies = itemsize if itemsize < _FP32 else 0
        self.gradient = layout.gradient_itemsize(itemsize)
        sharded = self.copies if layout.shard > 1 else 0
        self.weights = (_FP32 + sharded) * parameters.shard + parameters.buffer_bytes
        self.optimizer = 2 * _FP32 * parameters.shard + hook_bytes
        self.symmetric_memory = _symmetric_memory_bytes(trace, layout)
        self.zero = layout.zero

    def at(self, block: int, activations: int, working: int, *, after_loss: bool = True) -> Memory:
        """Memory during the backward of `block`; with `after_loss` False, before the backward of the last block."""
        layout, parameters, blocks = self.layout, self.parameters, self.parameters.blocks
        left = block + 1 if after_loss else len(blocks)  # blocks whose backward has not ended
        done_shards = parameters.first_shards[-1] - parameters.first_shards[left]
        gradients = self.gradient * done_shards
        if layout.num_micro_batches > 1:
            gradients += _FP32 * (
                parameters.shard - done_shards
                if self.zero >= 2
                else parameters.first_wholes[left] + parameters.rest.whole + parameters.precise.whole
            )
        if after_loss and self.parameters.table:
            gradients += self.itemsize * self.parameters.table
        # A finished unit is reduced in fp32, in addition to its own gradients, while the next one runs.
        reducing = self._reduced(blocks[left]) if left < len(blocks) else 0
        if layout.parallel.pp > 1:
            reducing += 4 * self.trace.hidden_bytes
        gathered = self._gathered(len(blocks) if self.copies and layout.shard == 1 else left)
        return Memory(
            self.weights,
            gradients,
            self.optimizer,
            gathered,
            activations,
            working + reducing,
            self.symmetric_memory,
        )

    def update(self) -> Memory:
        """Memory after the last backward: all gradients, and the reduction of the parameters outside blocks."""
        rest, is_copied = self.parameters.rest, self.copies and self.layout.shard == 1
        kept = self.parameters.first_wholes[-1] if is_copied else 0
        return Memory(
            self.weights,
            self.gradient * self.parameters.shard,
            self.optimizer,
            self.itemsize * (rest.whole + kept) + _FP32 * self.parameters.precise.whole,
            0,
            self._reduced(rest) + self.itemsize * self.parameters.table,
            self.symmetric_memory,
        )

    def _reduced(self, unit: Elements) -> int:
        return (self.itemsize + _FP32) * unit.whole

    def _gathered(self, left: int) -> int:
        """Gathered weights while the first `left` blocks are needed."""
        always = self.itemsize * self.parameters.rest.whole + _FP32 * self.parameters.precise.whole
        whole = self.parameters.first_wholes[left]
        if self.zero < 3:
            return always + self.itemsize * whole
        # The running block, the next one, and the all-gather output of the next one.
        return always + self.itemsize * min(3 * self.parameters.largest_wholes[left], whole)
