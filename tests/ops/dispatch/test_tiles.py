"""Tile sizes that tables of configurations must never hold."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_gradient_tiles_of_32_channels_which_triton_3_6_miscompiles(dtype):
    from megalin._triton.scans import vector_decay as scan

    for width in range(1, 257):
        tables = (scan._gradients_constants(width, dtype), scan._mild_gradients_constants(width))
        assert [table["BLOCK_K"] for table in tables] == [64, 64], width
