"""Two-phase scans of a sharded sequence in one process: the batch dimension stands for the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.scans.context_parallel import SingleProcessExchange
from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_reference
from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_scan_reference
from megalin.ops.scans.vector_decay import vector_decay_scan, vector_decay_scan_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

HEADS = 2


class Case(NamedTuple):
    """A sequence of ranks * length tokens and the sizes of its heads."""

    ranks: int
    length: int
    key: int
    value: int
    decay: float = 0.03
    """Strength of the decay, in nats a token."""
    dtype: torch.dtype = torch.float32
    shared_keys: bool = False


class Op(NamedTuple):
    """A scan, its reference, and its decays: inputs with a gradient, or options."""

    scan: Callable[..., Any]
    reference: Callable[..., Any]
    decays: Callable[[Case], dict[str, Tensor]]
    options: Callable[[Case], dict[str, Any]] = lambda case: {}


def _slopes(case: Case) -> dict[str, Any]:
    return {"slopes": case.decay * torch.arange(HEADS) if case.decay else None}


def _key_decays(case: Case) -> dict[str, Tensor]:
    shape = (1, case.ranks * case.length, HEADS, case.key)
    return {"log_decay": -case.decay * torch.randn(shape).exp()}


def _head_decays(case: Case) -> dict[str, Tensor]:
    return {"log_decay": -case.decay * torch.randn(1, case.ranks * case.length, HEADS).exp()}


OPS = {
    "decay_scan": Op(decay_scan, decay_scan_reference, lambda case: {}, _slopes),
    "vector_decay_scan": Op(vector_decay_scan, vector_decay_scan_reference, _key_decays, lambda case: {"scale": 0.3}),
    "scalar_decay_scan": Op(scalar_decay_scan, scalar_decay_scan_reference, _head_decays),
}


def make_shards(name: str, case: Case, starts: tuple[float, ...]) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Inputs [ranks, length, ...], document ids [ranks, length] and options of a scan.

    `starts` count in shards: at 1.5 a document starts in the middle of the second.
    """
    keys, tokens = 1 if case.shared_keys else HEADS, case.ranks * case.length
    widths = {"q": (keys, case.key), "k": (keys, case.key), "v": (HEADS, case.value)}
    inputs = {kind: torch.randn(1, tokens, *width).to(case.dtype) for kind, width in widths.items()}
    inputs |= OPS[name].decays(case)
    begun = torch.zeros(tokens, dtype=torch.int32)
    begun[[int(place * case.length) for place in starts]] = 1
    ids = begun.cumsum(0, dtype=torch.int32).view(case.ranks, case.length)
    inputs = {kind: x.unflatten(1, (case.ranks, case.length))[0] for kind, x in inputs.items()}
    return inputs, ids, OPS[name].options(case)


def compare(
    name: str, case: Case, starts: tuple[float, ...] | None = None, *, device: str = "cpu", backend: str = "triton"
) -> None:
    """Asserts that the two-phase scan is as good as the reference on the whole sequence, in output and gradients.

    On a GPU it also asserts that a second call gives the same bits.
    """
    inputs, shard_ids, options = make_shards(name, case, starts or ())
    op, documents = OPS[name], None if starts is None else shard_ids.flatten()[None].to(device)
    inputs = {kind: x.flatten(0, 1)[None].to(device) for kind, x in inputs.items()}
    options = {kind: x.to(device) if isinstance(x, Tensor) else x for kind, x in options.items()}
    shard_ids = shard_ids.to(device)
    shard = SingleProcessExchange().sequence_shard(shard_ids)

    def kernel(**x: Tensor) -> list[Tensor]:
        x = {kind: y.unflatten(1, (case.ranks, case.length))[0] for kind, y in x.items()}
        ids = None if starts is None else shard_ids
        scan = op.scan(**x, **options, shard=shard, document_ids=ids, backend=backend)
        return [scan.output.flatten(0, 1)[None]]

    def reference(**x: Tensor) -> list[Tensor]:
        return [op.reference(**x, **options, document_ids=documents).output]

    assert_as_good_as_the_reference(kernel, reference, inputs)
    if device != "cpu":
        first, second = (outputs_and_gradients(kernel, inputs) for _ in range(2))
        assert not [kind for kind in first if not torch.equal(first[kind], second[kind])], (
            "a second call gives other bits"
        )
