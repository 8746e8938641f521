"""Rows of the scans' tests, and comparisons with the reference: of full sequences, and of shards in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.scans import fixed_decay, scalar_decay, vector_decay
from megalin.ops.scans.context_parallel import SingleProcessExchange
from tests.numerics import Tensors, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

HEADS = 2


class Case(NamedTuple):
    """Sequences of ranks * length tokens and the sizes of their heads."""

    length: int
    key: int
    value: int
    decay: float = 0.03
    """Strength of the decay, in nats a token."""
    dtype: torch.dtype = torch.float32
    ranks: int = 1
    batch: int = 1

    @property
    def tokens(self) -> int:
        return self.ranks * self.length


class Scan(NamedTuple):
    """A scan, its reference and module, and its decays: inputs with a gradient, or options."""

    scan: Callable[..., Any]
    reference: Callable[..., Any]
    module: ModuleType
    decays: Callable[[Case], Tensors]
    options: Callable[[Case], dict[str, Any]] = lambda case: {}
    key_heads: int = HEADS
    """Heads of q and k."""
    fp32_floors: Mapping[str, float] = {}
    """Errors that are allowed in fp32 in place of the common floor (docs/adr/0005-kernel-bounds.md)."""


def _slopes(case: Case) -> dict[str, Any]:
    return {"slopes": case.decay * torch.arange(HEADS) if case.decay else None}


def _key_decays(case: Case) -> Tensors:
    return {"log_decay": -case.decay * torch.randn(case.batch, case.tokens, HEADS, case.key).exp()}


def _head_decays(case: Case) -> Tensors:
    return {"log_decay": -case.decay * torch.randn(case.batch, case.tokens, HEADS).exp()}


SCANS = {
    "decay_scan": Scan(fixed_decay.decay_scan, fixed_decay.decay_scan_reference, fixed_decay, lambda case: {}, _slopes),
    "vector_decay_scan": Scan(
        vector_decay.vector_decay_scan,
        vector_decay.vector_decay_scan_reference,
        vector_decay,
        _key_decays,
        lambda case: {"scale": 0.3},
    ),
    "scalar_decay_scan": Scan(
        scalar_decay.scalar_decay_scan,
        scalar_decay.scalar_decay_scan_reference,
        scalar_decay,
        _head_decays,
        fp32_floors={"gradient.log_decay": 3.6e-7},
    ),
}
"""By the name of the op."""
SHARED_KEYS = "scalar_decay_scan of shared keys"
ROWS = SCANS | {SHARED_KEYS: SCANS["scalar_decay_scan"]._replace(key_heads=1)}


def make_inputs(name: str, case: Case) -> tuple[Tensors, dict[str, Any]]:
    """Inputs [batch, tokens, ...] and options of a scan of full sequences."""
    row = ROWS[name]
    widths = {"q": (row.key_heads, case.key), "k": (row.key_heads, case.key), "v": (HEADS, case.value)}
    inputs = {kind: torch.randn(case.batch, case.tokens, *width).to(case.dtype) for kind, width in widths.items()}
    return inputs | row.decays(case), row.options(case)


def initial_state(case: Case) -> Tensors:
    return {"initial_state": torch.randn(case.batch, HEADS, case.key, case.value)}


def make_shards(name: str, case: Case, starts: tuple[float, ...]) -> tuple[Tensors, Tensor, dict[str, Any]]:
    """Inputs [ranks, length, ...], document ids [ranks, length] and options of a scan; the batch stands for the ranks.

    `starts` count in shards: at 1.5 a document starts in the middle of the second.
    """
    inputs, options = make_inputs(name, case)
    begun = torch.zeros(case.tokens, dtype=torch.int32)
    begun[[int(place * case.length) for place in starts]] = 1
    ids = begun.cumsum(0, dtype=torch.int32).view(case.ranks, case.length)
    return {kind: x.unflatten(1, (case.ranks, case.length))[0] for kind, x in inputs.items()}, ids, options


def compare(name: str, case: Case, documents: Tensor | None = None) -> None:
    """Asserts that the kernels are as good as the reference on full sequences with an initial state: in output, last
    state and every gradient."""
    row, (inputs, options) = ROWS[name], make_inputs(name, case)
    options["document_ids"] = documents
    assert_as_good_as_the_reference(
        lambda **x: row.scan(**x, **options, backend="triton"),
        lambda **x: row.reference(**x, **options),
        inputs | initial_state(case),
        fp32_floors=row.fp32_floors,
    )


def compare_shards(
    name: str, case: Case, starts: tuple[float, ...] | None = None, *, device: str = "cpu", backend: str = "triton"
) -> None:
    """Asserts that the two-phase scan is as good as the reference on the whole sequence, in output and gradients.

    On a GPU it also asserts that a second call gives the same bits.
    """
    inputs, shard_ids, options = make_shards(name, case, starts or ())
    row, documents = ROWS[name], None if starts is None else shard_ids.flatten()[None].to(device)
    inputs = {kind: x.flatten(0, 1)[None].to(device) for kind, x in inputs.items()}
    options = {kind: x.to(device) if isinstance(x, Tensor) else x for kind, x in options.items()}
    shard_ids = shard_ids.to(device)
    shard = SingleProcessExchange().sequence_shard(shard_ids)

    def kernel(**x: Tensor) -> list[Tensor]:
        x = {kind: y.unflatten(1, (case.ranks, case.length))[0] for kind, y in x.items()}
        ids = None if starts is None else shard_ids
        scan = row.scan(**x, **options, shard=shard, document_ids=ids, backend=backend)
        return [scan.output.flatten(0, 1)[None]]

    def reference(**x: Tensor) -> list[Tensor]:
        return [row.reference(**x, **options, document_ids=documents).output]

    assert_as_good_as_the_reference(kernel, reference, inputs, fp32_floors=row.fp32_floors)
    if device != "cpu":
        first, second = (outputs_and_gradients(kernel, inputs) for _ in range(2))
        assert not [kind for kind in first if not torch.equal(first[kind], second[kind])], (
            "a second call gives other bits"
        )
