"""Sums over a step's micro-batches in one fixed binary tree, whatever the number of ranks.

Micro-batch i of P = 2^k is m W + r: the m-th of rank r of W = 2^w ranks. The tree adds i and i + P/2 first, then the
sums of i and i + P/4 (i < P/4), and so on; its root adds the even and the odd micro-batches. Its lower k - w levels lie
within a rank, and its upper w levels add ranks, r and r + W/2 first. So every W gives the same additions in the same
order, and floating-point sums with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalin.parallel.collectives import Axis, all_gather, all_to_all, wait_tensor

NORM_BLOCK = 4096
"""Elements of the blocks in which squares are summed for a norm."""


def leaf_order(count: int) -> list[int]:
    """The micro-batches of a rank, of `count` = 2^n, in the order in which `TreeSum` adds them: their numbers with n
    reversed bits.

    0, 2, 1, 3 of four: 0 + 2, then 1 + 3, then both sums.
    """
    assert count.bit_count() == 1, count
    bits = count.bit_length() - 1
    return [int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(count)]


class TreeSum:
    """Sum of 2^n tensors of one shape, which are added one at a time in the order of `leaf_order`.

    A binary counter: two sums of the same number of leaves are added at once, as a carry. Of N leaves at most
    log2(N) + 1 tensors are in memory.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Tensor]] = []

    def add(self, leaf: Tensor) -> None:
        """Adds a leaf, whose memory the sum takes."""
        leaves = 1
        while self._sums and self._sums[-1][0] == leaves:
            _, earlier = self._sums.pop()
            leaf = earlier.add_(leaf)
            leaves *= 2
        self._sums.append((leaves, leaf))

    def total(self) -> Tensor:
        """The sum of all leaves; takes it out of the counter."""
        assert len(self._sums) == 1, f"{[leaves for leaves, _ in self._sums]} leaves are no power of two"
        return self._sums.pop()[1]


def fold(x: Tensor, dim: int = 0) -> Tensor:
    """Sum of `x` over `dim`, of 2^n elements, without it: adds both halves until one element is left.

    Additions of whole tensors, so the bits do not depend on the other dimensions, as those of `Tensor.sum` do.
    """
    size = x.shape[dim]
    assert size.bit_count() == 1, x.shape
    while size > 1:
        size //= 2
        x = x.narrow(dim, 0, size) + x.narrow(dim, size, size)
    return x.squeeze(dim)


def padded_size(elements: int, num_ranks: int) -> int:
    """Elements of a tensor of `elements` after padding to whole blocks of a norm on each rank."""
    multiple = NORM_BLOCK * num_ranks
    return -(-elements // multiple) * multiple


def sum_over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """This rank's slice of the sum of `x` over the axis, by the upper levels of the tree: [N] -> [N / W].

    One all-to-all sends each rank its slice of every tensor, and the rank adds them.
    """
    if axis.size == 1:
        return x
    received = wait_tensor(all_to_all(x, axis, split_dim=0, concat_dim=0))
    return fold(received.view(axis.size, -1))


def gather_slices(own: Tensor, axis: Axis) -> Tensor:
    """The slices of all ranks, in their order: [N / W] -> [N], on every rank."""
    return wait_tensor(all_gather(own, axis, dim=0))


def norm_of_slices(own: Tensor, axis: Axis) -> Tensor:
    """L2 norm [] of a tensor whose slices `own` [N / W] the ranks hold, equal on every rank.

    norm = sqrt(sum of x^2), in the dtype of `own`. Squares are summed by `fold` in blocks of NORM_BLOCK elements of the
    whole tensor, then over blocks, which zeros fill up to a power of two. Neither depends on the number of ranks, nor
    on the zeros that pad [N] to it.
    """
    squares = fold(own.square().view(-1, NORM_BLOCK), dim=1)
    blocks = gather_slices(squares, axis)
    size = 1 << (len(blocks) - 1).bit_length()
    return fold(torch.cat([blocks, blocks.new_zeros(size - len(blocks))])).sqrt()


def sum_of_losses(own: Tensor, axis: Axis) -> Tensor:
    """Sum [terms] over the axis of a few numbers `own` [terms], by the upper levels of the tree, on every rank."""
    return fold(gather_slices(own[None], axis))


def flatten(tensors: Sequence[Tensor], *, num_ranks: int, dtype: torch.dtype) -> Tensor:
    """The elements of all tensors, one after the other, cast to `dtype`, with zeros up to `padded_size`: [N]."""
    elements = sum(tensor.numel() for tensor in tensors)
    flat = tensors[0].new_empty(padded_size(elements, num_ranks), dtype=dtype)
    flat[elements:].zero_()
    views = flat[:elements].split([tensor.numel() for tensor in tensors])
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor.reshape(-1))
    return flat
