"""Partition of sequences by the CUDA scan, and refused dtypes; the kernels themselves are tested on a GPU."""

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.scans.fixed_decay import decay_scan
from megalin.ops.scans.fixed_decay_cuda import PROCESSORS, cut, saved_shape


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 100, 132, 133, 1000])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 8192, 131072])
def test_blocks_of_whole_parts_and_chunks_cover_a_sequence(rows, length):
    plan = cut(rows, length)
    assert 1 <= plan.blocks <= plan.slots
    assert (plan.blocks - 1) * plan.block_tokens < length <= plan.blocks * plan.block_tokens
    if plan.blocks > 1:
        assert plan.block_tokens % (64 * plan.parts) == 0
        assert rows * plan.blocks <= PROCESSORS


def test_long_sequences_fill_the_gpu():
    for rows in (1, 16, 64, 132):
        assert rows * cut(rows, 131072).blocks > PROCESSORS // 2


def test_states_are_saved_where_there_are_several_blocks():
    assert saved_shape(4, 8192, 16, 128, 64) == (4, 16, 2, 128, 64)
    assert saved_shape(16, 8192, 16, 128, 64) == (16, 16, 0, 128, 64)


def test_other_dtypes_are_refused():
    x = torch.ones(1, 2, 1, 8)
    with pytest.raises(KernelError, match=r"decay_scan: the cuda kernel does not take q, k, v of torch\.float32; use"):
        decay_scan(x, x, x, None, backend="cuda")
