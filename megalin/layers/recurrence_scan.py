"""One interface to the scans without decay, with a fixed, a scalar and a vector decay."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from megalin.layers.choices import DecaySide, RecurrenceDecay
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.driver import ScanOutput
from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_flops
from megalin.ops.scans.fixed_decay_step import decay_step
from megalin.ops.scans.limits import MAX_WIDTH
from megalin.ops.scans.scalar_decay import (
    MAX_VALUE_WIDTH,
    scalar_decay_scan,
    scalar_decay_scan_flops,
    scalar_decay_step,
)
from megalin.ops.scans.two_sided_decay import two_sided_scan, two_sided_step
from megalin.ops.scans.vector_decay import vector_decay_scan
from megalin.ops.scans.vector_decay_step import vector_decay_step

_WIDEST: dict[RecurrenceDecay, int | None] = {
    "none": MAX_WIDTH,
    "fixed": MAX_WIDTH,
    "scalar": MAX_VALUE_WIDTH,
    "vector": None,
}
"""Most values of a head that the scan's kernels take; None for any number."""


class Recurrence(NamedTuple):
    """S_t = A_t S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t, for heads of K keys and V values.

    The columns of a state do not depend on each other. Heads with more values than the kernels take are `slices` heads
    of V / slices values with the same queries, keys and decays, so the state is [B, H slices, K, V / slices].
    """

    decay: RecurrenceDecay
    key_dim: int
    value_dim: int
    scale: float
    chunk_size: int
    """Tokens a chunk; the result does not depend on it."""
    side: DecaySide = "keys"
    """Side of the state along which a vector decay runs; with values, in plain PyTorch (`two_sided_scan`)."""

    @property
    def slices(self) -> int:
        """Slices of a head; 1 where no equal ones fit the kernels."""
        widest = _WIDEST[self.decay]
        count = 1 if widest is None else -(-self.value_dim // widest)
        return 1 if self.value_dim % count else count

    def scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        value_decay: Tensor | None = None,
        *,
        initial_state: Tensor | None,
        shard: SequenceShard | None,
        document_ids: Tensor | None,
    ) -> ScanOutput:
        """All tokens: q, k [B, T, H, K], v [B, T, H, V], decay None, [H] >= 0, [B, T, H] or [B, T, H, K] <= 0 ->
        output [B, T, H, V], and the state, whose gradient no kernel computes. value_decay: [B, T, H, V] <= 0."""
        if value_decay is not None:
            return two_sided_scan(
                q,
                k,
                v,
                decay,
                value_decay,
                scale=self.scale,
                initial_state=initial_state,
                shard=shard,
                document_ids=document_ids,
            )
        q, k, v, decay = self._sliced(q, k, v, decay, dim=2)
        options: dict[str, Any] = {
            "initial_state": initial_state,
            "shard": shard,
            "document_ids": document_ids,
            "state_gradient": False,
            "chunk_size": self.chunk_size,
        }
        if self.decay == "vector":
            assert decay is not None
            scan = vector_decay_scan(q, k, v, decay, scale=self.scale, **options)
        elif self.decay == "scalar":
            assert decay is not None
            scan = scalar_decay_scan(q * self.scale, k, v, decay, **options)
        else:
            scan = decay_scan(q * self.scale, k, v, decay, **options)
        return ScanOutput(self._joined(scan.output), scan.state)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        state: Tensor,
        value_decay: Tensor | None = None,
        *,
        in_place: bool,
    ) -> ScanOutput:
        """One token: tensors as in `scan`, without T."""
        if value_decay is not None:
            return two_sided_step(q, k, v, decay, value_decay, state, scale=self.scale)
        q, k, v, decay = self._sliced(q, k, v, decay, dim=1)
        if self.decay == "vector":
            assert decay is not None
            step = vector_decay_step(q, k, v, decay, state, scale=self.scale, in_place=in_place)
        elif self.decay == "scalar":
            assert decay is not None
            step = scalar_decay_step(q * self.scale, k, v, decay, state, in_place=in_place)
        else:
            step = decay_step(q * self.scale, k, v, decay, state, in_place=in_place)
        return ScanOutput(self._joined(step.output), step.state)

    def flops(self, length: int, num_heads: int) -> int:
        """Forward floating-point operations a token, of all heads."""
        heads, width = num_heads * self.slices, self.value_dim // self.slices
        sizes = {"key_dim": self.key_dim, "value_dim": width, "chunk_size": self.chunk_size}
        if self.decay == "scalar":
            return scalar_decay_scan_flops(length, num_heads=heads, num_key_heads=heads, **sizes)
        return decay_scan_flops(length, num_heads=heads, **sizes)

    def state_shape(self, num_heads: int) -> tuple[int, ...]:
        """Shape of the state of one sequence."""
        return (num_heads * self.slices, self.key_dim, self.value_dim // self.slices)

    def _sliced(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, *, dim: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        count = self.slices
        if count == 1:
            return q, k, v, decay
        q, k = (x.repeat_interleave(count, dim) for x in (q, k))
        if decay is not None:
            decay = decay.repeat_interleave(count, 0 if self.decay == "fixed" else dim)
        return q, k, v.unflatten(-1, (count, -1)).flatten(dim, dim + 1), decay

    def _joined(self, output: Tensor) -> Tensor:
        return output if self.slices == 1 else output.unflatten(-2, (-1, self.slices)).flatten(-2)
