"""Self-test of a scan's kernels on a sharded sequence, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalin.ops.dispatch.self_test import compare
from megalin.ops.scans.context_parallel import SingleProcessExchange
from megalin.ops.scans.driver import ScanOutput

NUM_SHARDS = 3


def compare_shards(
    scan: Callable[..., ScanOutput], reference: Callable[..., ScanOutput], inputs: Sequence[Tensor]
) -> str:
    """Error of `scan` on three shards of a sequence against `reference` on all of it; empty where it passes.

    One document fills the second shard; another starts in the third.

    Args:
        scan: (SequenceShard, document_ids [3, T / 3], *inputs [3, T / 3, ...]) -> its outputs of the shards.
        reference: (document_ids [1, T], *inputs [1, T, ...]) -> its outputs of the sequence.
        inputs: [1, T, ...].
    """
    length = inputs[0].shape[1]
    documents = (torch.arange(length, device=inputs[0].device) >= length * 23 // 30).int()[None]
    shards = documents.view(NUM_SHARDS, -1)
    shard = SingleProcessExchange().sequence_shard(shards)

    def kernel(*inputs: Tensor) -> Tensor:
        own = (x.unflatten(1, (NUM_SHARDS, -1))[0] for x in inputs)
        return scan(shard, shards, *own).output.flatten(0, 1)[None]

    return compare(kernel, lambda *inputs: reference(documents, *inputs).output, inputs)
