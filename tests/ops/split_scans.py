"""Scans of a row that is split over ranks, in one process: rows of a batch in the place of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.decay_scan import decay_scan, decay_scan_reference
from megalin.ops.scalar_decay_scan import scalar_decay_scan, scalar_decay_scan_reference
from megalin.ops.split import RowsAsRanks
from megalin.ops.vector_decay_scan import vector_decay_scan, vector_decay_scan_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

HEADS = 2


class Case(NamedTuple):
    """A row of ranks * length tokens."""

    ranks: int
    length: int
    key: int
    value: int
    decay: float = 0.03
    """How strong, in nats a token."""
    dtype: torch.dtype = torch.float32
    shared_keys: bool = False


class Op(NamedTuple):
    """A scan, its reference, and the logs of its decays, an input or not."""

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


def documents_of(case: Case, starts: tuple[float, ...]) -> Tensor:
    """[1, ranks * length]; documents start at these parts of shards: 1.5 is the middle of the second."""
    begun = torch.zeros(1, case.ranks * case.length, dtype=torch.int32)
    begun[0, [int(place * case.length) for place in starts]] = 1
    return begun.cumsum(1, dtype=torch.int32)


def compare(
    name: str, case: Case, starts: tuple[float, ...] | None = None, *, device: str = "cpu", backend: str = "triton"
) -> None:
    """The split scan is as good as the reference on the whole row, in the output and all gradients; on a device it
    gives the same bits again."""
    op, keys = OPS[name], 1 if case.shared_keys else HEADS
    tokens = case.ranks * case.length
    widths = {"q": (keys, case.key), "k": (keys, case.key), "v": (HEADS, case.value)}
    inputs = {kind: torch.randn(1, tokens, *width).to(case.dtype) for kind, width in widths.items()} | op.decays(case)
    inputs = {kind: x.to(device) for kind, x in inputs.items()}
    options = {kind: x.to(device) if isinstance(x, Tensor) else x for kind, x in op.options(case).items()}
    documents = None if starts is None else documents_of(case, starts).to(device)
    parts = (torch.zeros(1, tokens, device=device, dtype=torch.int32) if starts is None else documents).view(
        case.ranks, case.length
    )
    split = RowsAsRanks().split(parts)

    def kernel(**x: Tensor) -> list[Tensor]:
        x = {kind: y.unflatten(1, (case.ranks, case.length))[0] for kind, y in x.items()}
        ids = None if starts is None else parts
        scan = op.scan(**x, **options, split=split, document_ids=ids, backend=backend)
        return [scan.output.flatten(0, 1)[None]]

    def reference(**x: Tensor) -> list[Tensor]:
        return [op.reference(**x, **options, document_ids=documents).output]

    assert_as_good_as_the_reference(kernel, reference, inputs)
    if device != "cpu":
        first, second = (outputs_and_gradients(kernel, inputs) for _ in range(2))
        assert not [kind for kind in first if not torch.equal(first[kind], second[kind])], "other bits"
