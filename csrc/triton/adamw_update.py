"""AdamW for many weights in one launch: reads gradient, weight and moments once, writes weight, moments and a copy.

A program updates CHUNK elements of one weight; a table holds the addresses, another the programs' weights and chunks.
In fp32, with the operations of torch's fused AdamW in their order: fused multiply-adds are explicit.
Bytes: 12 + 12 an element, the gradient's 2 or 4, and the copy's 2.
"""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl

ROWS = 7
"""Rows of the table: addresses of weight, moments, step count, copy and gradient, and the number of elements."""
CHUNK, BLOCK = 8192, 1024


@triton.jit
def _address(table_ptr, row, num_weights, weight):
    return tl.load(table_ptr + row * num_weights + weight)


@triton.jit
def _power(base, exponent):
    """base^exponent, rounded to fp32."""
    return tl.exp(exponent * tl.log(tl.cast(base, tl.float64))).to(tl.float32)


@triton.jit
def _update_block(
    weight_ptr, mean_ptr, square_ptr, copy_ptr, gradient_ptr, place, size, has_copy,
    scale, decay, beta1, beta2, eps, step_size, correction, ALIGNED: tl.constexpr
):  # fmt: skip
    """`place` [BLOCK]: elements to update; with ALIGNED all of them are below `size`, and addresses multiples of 16."""
    weights, means, squares = weight_ptr + place, mean_ptr + place, square_ptr + place
    gradients, copies = gradient_ptr + place, copy_ptr + place
    if ALIGNED:
        weights, means, squares = tl.multiple_of(weights, 16), tl.multiple_of(means, 16), tl.multiple_of(squares, 16)
        gradients, copies = tl.multiple_of(gradients, 16), tl.multiple_of(copies, 16)
        mask = None
        gradient, weight, mean, square = tl.load(gradients), tl.load(weights), tl.load(means), tl.load(squares)
    else:
        mask = place < size
        gradient = tl.load(gradients, mask=mask, other=0.0)
        weight = tl.load(weights, mask=mask, other=0.0)
        mean = tl.load(means, mask=mask, other=0.0)
        square = tl.load(squares, mask=mask, other=0.0)
    # Rounded, as by a pass that writes the scaled gradient.
    gradient = gradient.to(tl.float32) * scale
    squared = gradient * gradient
    weight = tl.fma(weight, -decay, weight)
    mean = tl.fma(mean, beta1, tl.fma(gradient, -beta1, gradient))
    square = tl.fma(square, beta2, tl.fma(squared, -beta2, squared))
    weight = weight - tl.div_rn(step_size * mean, tl.div_rn(tl.sqrt_rn(square), correction) + eps)
    tl.store(weights, weight, mask=mask)
    tl.store(means, mean, mask=mask)
    tl.store(squares, square, mask=mask)
    if has_copy:
        tl.store(copies, weight.to(copy_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_weights", "states_ptr", "gradients_ptr", "copies_ptr"])
def update_kernel(
    table_ptr, chunks_ptr, num_weights, rate, beta1, beta2, eps, decay, scale_ptr, skip_ptr, states_ptr,
    gradients_ptr, copies_ptr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`states_ptr`, `gradients_ptr` and `copies_ptr` give the dtypes alone."""
    if tl.load(skip_ptr) == 0.0:
        program = tl.program_id(0)
        index, chunk = tl.load(chunks_ptr + 2 * program), tl.load(chunks_ptr + 2 * program + 1)
        weight = _address(table_ptr, 0, num_weights, index)
        mean = _address(table_ptr, 1, num_weights, index)
        square = _address(table_ptr, 2, num_weights, index)
        count = _address(table_ptr, 3, num_weights, index)
        copy = _address(table_ptr, 4, num_weights, index)
        gradient = _address(table_ptr, 5, num_weights, index)
        size = _address(table_ptr, 6, num_weights, index)
        step = tl.load(count.to(states_ptr.dtype)).to(tl.float64)
        step_size = tl.div_rn(tl.cast(rate, tl.float32), 1.0 - _power(beta1, step))
        correction = tl.sqrt_rn(1.0 - _power(beta2, step))
        scale = tl.load(scale_ptr)
        aligned = ((weight | mean | square | copy | gradient) & 15) == 0
        start = chunk.to(tl.int64) * CHUNK
        end = tl.minimum(start + CHUNK, size)
        for first in range(start, end, BLOCK):
            place = first + tl.arange(0, BLOCK)
            if aligned & (first + BLOCK <= size):
                _update_block(
                    weight.to(states_ptr.dtype), mean.to(states_ptr.dtype), square.to(states_ptr.dtype),
                    copy.to(copies_ptr.dtype), gradient.to(gradients_ptr.dtype), place, size, copy != 0,
                    scale, rate * decay, beta1, beta2, eps, step_size, correction, True
                )  # fmt: skip
            else:
                _update_block(
                    weight.to(states_ptr.dtype), mean.to(states_ptr.dtype), square.to(states_ptr.dtype),
                    copy.to(copies_ptr.dtype), gradient.to(gradients_ptr.dtype), place, size, copy != 0,
                    scale, rate * decay, beta1, beta2, eps, step_size, correction, False
                )  # fmt: skip


def update(
    table: Tensor, chunks: Tensor, options: tuple[float, float, float, float, float], scale: Tensor, skip: Tensor,
    states: Tensor, gradients: Tensor, copies: Tensor,
) -> None:  # fmt: skip
    """table [ROWS, weights] int64, chunks [programs, 2] int32, options (learning rate, beta1, beta2, eps, weight
    decay), scale and skip [] fp32; `states`, `gradients` and `copies` are tensors of the dtypes that the addresses
    point to."""
    update_kernel[(len(chunks),)](
        table, chunks, table.shape[1], *options, scale, skip, states, gradients, copies,
        CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8
    )  # fmt: skip
