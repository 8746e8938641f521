"""Inputs of the scans' self-tests, and the self-test of a sharded sequence in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch.self_test import compare, few, sample
from megalin.ops.scans.context_parallel import SingleProcessExchange
from megalin.ops.scans.driver import ScanOutput

NUM_SHARDS = 3
TOKENS = 336
"""Tokens of `compare_shards`: three shards of a chunk of 64 and a shorter one."""


def heads_of(case: Mapping[str, Any]) -> int:
    """Heads of a self-test."""
    return few(case["H"])


def differentiable(case: Mapping[str, Any]) -> int:
    """Outputs of a scan with a gradient, the first ones: its output alone, or its state too."""
    return 2 if case["state_gradient"] else 1


def documents_of(case: Mapping[str, Any], length: int, device: str) -> Tensor | None:
    """Two documents [1, T], of which the second has the last third of the tokens; None if the call has none."""
    dtype = case["document_ids"]
    return None if dtype is None else (torch.arange(length, device=device) >= 2 * length // 3).to(dtype)[None]


def initial_state_of(case: Mapping[str, Any], device: str) -> list[Tensor]:
    """The initial state [1, H, K, V], if the call has one."""
    if (dtype := case["initial_state"]) is None:
        return []
    return [sample(1, heads_of(case), case["K"], case["V"], device=device, seed=4, dtype=dtype)]


def samples_of(case: Mapping[str, Any], *leading: int, device: str) -> list[Tensor]:
    """q, k and v [leading, H, K or V] of a scan with a fixed decay."""
    sizes = {"q": case["K"], "k": case["K"], "v": case["V"]}
    return [
        sample(*leading, heads_of(case), size, device=device, seed=seed, dtype=case[name])
        for seed, (name, size) in enumerate(sizes.items())
    ]


def slopes_of(case: Mapping[str, Any], strongest: float, device: str) -> Tensor | None:
    """Slopes from zero to the strongest, if the call has some."""
    dtype = case["slopes"]
    return None if dtype is None else torch.linspace(0.0, strongest, heads_of(case), device=device, dtype=dtype)


def compare_shards(
    scan: Callable[..., ScanOutput],
    reference: Callable[..., ScanOutput],
    inputs: Sequence[Tensor],
    case: Mapping[str, Any],
) -> str:
    """Error of `scan` on three shards of a sequence against `reference` on all of it; empty where it passes.

    If the call has documents, one fills the second shard, and another starts in the third.

    Args:
        scan: (SequenceShard, document_ids [3, T / 3] or None, *inputs [3, T / 3, ...]) -> its outputs of the shards.
        reference: (document_ids [1, T] or None, *inputs [1, T, ...]) -> its outputs of the sequence.
        inputs: [1, TOKENS, ...].
    """
    dtype = case["document_ids"]
    start = TOKENS if dtype is None else TOKENS * 23 // 30
    documents = (torch.arange(TOKENS, device=inputs[0].device) >= start).to(dtype or torch.int32)[None]
    shards = documents.view(NUM_SHARDS, -1)
    shard = SingleProcessExchange().sequence_shard(shards)

    def kernel(*inputs: Tensor) -> Tensor:
        own = (x.unflatten(1, (NUM_SHARDS, -1))[0] for x in inputs)
        return scan(shard, None if dtype is None else shards, *own).output.flatten(0, 1)[None]

    return compare(kernel, lambda *inputs: reference(None if dtype is None else documents, *inputs).output, inputs)
