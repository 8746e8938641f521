"""Attention to windows with sinks and inside blocks over a cache, against its definition, values and every gradient."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalin.errors import OperandError
from megalin.ops.attention.local import LocalCache, block_attention, local_attention
from tests.numerics import Tensors, assert_close, outputs_and_gradients

BATCH, HEADS, GROUPS, KEY, LENGTH = 2, 4, 2, 4, 30
BOUND = 1e-12
STARTS = ((1, 3, 20), (2, 7, 8, 9, 25))
CUTS = (0, 1, 6, 7, 8, 21, LENGTH)
SHAPES = [(1, 0, False), (1, 3, False), (4, 0, False), (4, 2, False), (3, 9, False), (1, 0, True), (5, 0, True)]
"""(window or block, sinks, blocks)."""


def make_inputs() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    sizes = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    return {
        name: torch.randn(BATCH, LENGTH, heads, KEY, generator=generator, dtype=torch.float64)
        for name, heads in sizes.items()
    }


def make_documents() -> Tensor:
    starts = torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    for row, places in enumerate(STARTS):
        starts[row, list(places)] = 1
    return starts.cumsum(1, dtype=torch.int32)


def definition(q: Tensor, k: Tensor, v: Tensor, *, window: int, sinks: int, blocks: bool, ids: Tensor) -> Tensor:
    """One token and head at a time."""
    rows = []
    for b in range(len(q)):
        for t in range(LENGTH):
            start = int((ids[b] < ids[b, t]).sum())
            place = t - start
            visible = [
                start + s
                for s in range(place + 1)
                if (s // window == place // window if blocks else place - s < window or s < sinks)
            ]
            for h in range(HEADS):
                group = h * GROUPS // HEADS
                weights = (k[b, visible, group] @ q[b, t, h] / KEY**0.5).softmax(0)
                rows.append(weights @ v[b, visible, group])
    return torch.stack(rows).view_as(q)


def by_parts(q: Tensor, k: Tensor, v: Tensor, *, window: int, sinks: int, blocks: bool, ids: Tensor) -> Tensor:
    """Parts of one token and more, each from the cache of the one before; another document clears the cache."""
    slots = window - 1 + sinks
    cache = LocalCache(*(torch.zeros(BATCH, slots, *shape, dtype=q.dtype) for shape in ((GROUPS, KEY),) * 2 + ((),)))
    found = []
    for begin, end in pairwise(CUTS):
        if begin:
            other = ids[:, begin] != ids[:, begin - 1]
            cache = LocalCache(*(x.masked_fill(other.view(-1, *[1] * (x.dim() - 1)), 0.0) for x in cache))
        part = slice(begin, end)
        output, cache = local_attention(
            q[:, part],
            k[:, part],
            v[:, part],
            cache,
            window=window,
            num_sinks=sinks,
            blocks=blocks,
            document_ids=ids[:, part],
        )
        assert all(x.shape[1] == slots for x in cache)
        found.append(output)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("window", "sinks", "blocks"), SHAPES)
def test_parts_equal_the_definition(window: int, sinks: int, blocks: bool, packed: bool):
    ids = make_documents() if packed else torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    options = {"window": window, "sinks": sinks, "blocks": blocks, "ids": ids}
    actual, expected = (
        outputs_and_gradients(lambda f=function, **x: [f(**x, **options)], make_inputs())
        for function in (by_parts, definition)
    )
    assert_close(actual, expected, BOUND)


@pytest.mark.parametrize("block", [1, 7, 10, LENGTH, 100])
def test_blocks_of_whole_sequences_equal_the_definition(block: int):
    """Blocks that divide the length, that do not, and longer ones."""
    options = {"window": block, "sinks": 0, "blocks": True, "ids": torch.zeros(BATCH, LENGTH, dtype=torch.int32)}
    actual = outputs_and_gradients(lambda **x: [block_attention(**x, block=block)], make_inputs())
    assert_close(actual, outputs_and_gradients(lambda **x: [definition(**x, **options)], make_inputs()), BOUND)


def test_a_cache_of_another_size_is_refused():
    inputs = make_inputs()
    cache = LocalCache(*(torch.zeros(BATCH, 5, *shape, dtype=torch.float64) for shape in ((GROUPS, KEY),) * 2 + ((),)))
    with pytest.raises(OperandError, match="cache has 5 slots, but window = 4 and 1 sinks need 4; they must be equal"):
        local_attention(**inputs, cache=cache, window=4, num_sinks=1)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window: int):
    inputs = make_inputs()
    with pytest.raises(OperandError, match=f"block_attention: window = {window} excludes the token itself"):
        block_attention(**inputs, block=window)
