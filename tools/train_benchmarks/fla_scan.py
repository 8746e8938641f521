"""Fixed-decay scan on fla's kernels, the baseline for a model without a public implementation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megalin.ops.scans.fixed_decay import ScanOutput


@contextlib.contextmanager
def scans_by_fla() -> Iterator[None]:
    """Replaces the scan of layers built and run in the body by `fla_decay_scan`; nothing else changes."""
    with mock.patch("megalin.layers.linear_attention.decay_scan", fla_decay_scan):
        yield


def fla_decay_scan(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, **others: Any) -> ScanOutput:
    """`decay_scan` without decay on full sequences from zero states, by fla's chunk_simple_gla.

    A custom op, so that blocks compile as one graph, as with our op. The last state is empty; document ids are
    ignored.
    """
    assert slopes is None, "a decay"
    assert others["initial_state"] is others["shard"] is None, "a scan from a state"
    return ScanOutput(_forward(q, k, v), q.new_empty(0))


@torch.library.custom_op("megalin_peers::fla_scan", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd

    q, k, v = (x.contiguous() for x in (q, k, v))
    return chunk_simple_gla_fwd(q, k, v, scale=1.0)[0].to(v.dtype)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.custom_op("megalin_peers::fla_scan_backward", mutates_args=())
def _backward(d_output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from fla.ops.simple_gla.chunk import chunk_simple_gla_bwd

    do, q, k, v = (x.contiguous() for x in (d_output, q, k, v))
    results = chunk_simple_gla_bwd(q, k, v, g=None, g_gamma=None, initial_state=None, do=do, dht=None, scale=1.0)
    return results[0].to(q.dtype), results[1].to(k.dtype), results[2].to(v.dtype)


@_backward.register_fake
def _(d_output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _backward(d_output, *ctx.saved_tensors)
    return dq, dk, dv


_forward.register_autograd(_differentiate, setup_context=_save)
