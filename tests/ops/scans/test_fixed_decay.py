"""Chunkwise and parallel decay scans against the recurrence: values and every gradient."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from megalin.ops.scans.fixed_decay import (
    decay_scan,
    decay_scan_flops,
    decay_scan_parallel,
    decay_scan_recurrent,
)
from megalin.ops.scans.fixed_decay_step import decay_step
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients, relative_error

BATCH, HEADS, KEY, VALUE = 2, 3, 6, 4
BOUND = 1e-12
LENGTHS = (1, 63, 64, 65, 1000)
SLOPES = {"none": None, "mild": (0.0, 0.05, 0.7), "strong": (20.0, 3.0, 20.0)}


def make_inputs(length: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": draw(BATCH, length, HEADS, KEY),
        "k": draw(BATCH, length, HEADS, KEY),
        "v": draw(BATCH, length, HEADS, VALUE),
        "initial_state": draw(BATCH, HEADS, KEY, VALUE).to(torch.promote_types(dtype, torch.float32)),
    }


def slopes_of(decay: str) -> Tensor | None:
    return None if SLOPES[decay] is None else torch.tensor(SLOPES[decay], dtype=torch.float64)


@lru_cache
def recurrent(length: int, decay: str, dtype: torch.dtype = torch.float64) -> Tensors:
    return outputs_and_gradients(
        lambda **x: decay_scan_recurrent(slopes=slopes_of(decay), **x), make_inputs(length, dtype)
    )


@pytest.mark.parametrize("decay", SLOPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_chunkwise_equals_recurrent(length: int, decay: str, chunk_size: int):
    actual = outputs_and_gradients(
        lambda **x: decay_scan(slopes=slopes_of(decay), chunk_size=chunk_size, **x), make_inputs(length)
    )
    assert_close(actual, recurrent(length, decay), BOUND)


@pytest.mark.parametrize("chunk_size", [1, 7, 65, 66, 4096])
def test_any_chunk_size_gives_the_same(chunk_size: int):
    actual = outputs_and_gradients(
        lambda **x: decay_scan(slopes=slopes_of("mild"), chunk_size=chunk_size, **x), make_inputs(65)
    )
    assert_close(actual, recurrent(65, "mild"), BOUND)


@pytest.mark.parametrize("decay", SLOPES)
@pytest.mark.parametrize("length", [1, 63, 65])
def test_parallel_equals_recurrent_without_an_initial_state(length: int, decay: str):
    inputs = make_inputs(length)
    del inputs["initial_state"]
    slopes = slopes_of(decay)
    actual = outputs_and_gradients(lambda **x: [decay_scan_parallel(slopes=slopes, **x)], inputs)
    expected = outputs_and_gradients(lambda **x: [decay_scan_recurrent(slopes=slopes, **x).output], inputs)
    assert_close(actual, expected, BOUND)


@pytest.mark.parametrize("form", [decay_scan, decay_scan_recurrent])
def test_no_initial_state_means_zeros(form):
    inputs = make_inputs(65)
    zeros = inputs | {"initial_state": torch.zeros_like(inputs["initial_state"])}
    del inputs["initial_state"]
    slopes = slopes_of("mild")
    expected = outputs_and_gradients(lambda **x: form(slopes=slopes, **x), zeros)
    del expected["gradient.initial_state"]
    assert_close(outputs_and_gradients(lambda **x: form(slopes=slopes, **x), inputs), expected, BOUND)


def test_state_carries_a_sequence_over_a_cut():
    inputs, slopes = make_inputs(150), slopes_of("mild")
    whole = decay_scan(slopes=slopes, **inputs)
    for cut in (1, 63, 64, 65, 149):
        first = decay_scan(*(inputs[n][:, :cut] for n in "qkv"), slopes=slopes, initial_state=inputs["initial_state"])
        second = decay_scan(*(inputs[n][:, cut:] for n in "qkv"), slopes=slopes, initial_state=first.state)
        assert relative_error(torch.cat([first.output, second.output], dim=1), whole.output) <= BOUND
        assert relative_error(second.state, whole.state) <= BOUND


def test_steps_equal_the_scan():
    inputs, slopes = make_inputs(65), slopes_of("mild")
    expected = decay_scan(slopes=slopes, **inputs)
    state, outputs = inputs["initial_state"], []
    for t in range(65):
        output, state = decay_step(*(inputs[n][:, t] for n in "qkv"), slopes, state)
        outputs.append(output)
    assert relative_error(torch.stack(outputs, dim=1), expected.output) <= BOUND
    assert relative_error(state, expected.state) <= BOUND


# Starts of documents after the first, by sample: at and next to chunk edges, two in a chunk, in every chunk.
BOUNDARIES = {
    "edges of 16": ((16,), (48, 64)),
    "edges of 64": ((64,), (128,)),
    "before and after an edge": ((63, 129), (65, 127)),
    "two in a chunk": ((70, 75), (3, 5)),
    "in the first and the last token": ((1,), (129,)),
    "none and many": ((), tuple(range(1, 130, 3))),
}


def documents_of(boundaries: tuple[tuple[int, ...], ...], length: int) -> Tensor:
    starts = torch.zeros(len(boundaries), length, dtype=torch.int32)
    for row, places in enumerate(boundaries):
        starts[row, list(places)] = 1
    return 5 + starts.cumsum(1, dtype=torch.int32)


def separate_documents(q, k, v, initial_state, slopes, documents):
    """The recurrence over each document separately; the first one continues the initial state."""
    rows, states = [], []
    for row, ids in enumerate(documents):
        _, lengths = ids.unique_consecutive(return_counts=True)
        parts, begin = [], 0
        for length in lengths.tolist():
            piece = (x[row : row + 1, begin : begin + length] for x in (q, k, v))
            entering = initial_state[row : row + 1] if begin == 0 else None
            output, state = decay_scan_recurrent(*piece, slopes, initial_state=entering)
            parts.append(output)
            begin += length
        rows.append(torch.cat(parts, dim=1))
        states.append(state)
    return torch.cat(rows), torch.cat(states)


@pytest.mark.parametrize("name", BOUNDARIES)
@pytest.mark.parametrize("decay", ["none", "mild"])
def test_packed_documents_equal_separate_ones(name: str, decay: str):
    documents, slopes, inputs = documents_of(BOUNDARIES[name], 130), slopes_of(decay), make_inputs(130)
    expected = outputs_and_gradients(lambda **x: separate_documents(**x, slopes=slopes, documents=documents), inputs)
    for chunk_size in (16, 64):
        actual = outputs_and_gradients(
            lambda c=chunk_size, **x: decay_scan(slopes=slopes, document_ids=documents, chunk_size=c, **x), inputs
        )
        assert_close(actual, expected, BOUND)
    actual = outputs_and_gradients(lambda **x: decay_scan_recurrent(slopes=slopes, document_ids=documents, **x), inputs)
    assert_close(actual, expected, BOUND)
    del inputs["initial_state"]
    zero = torch.zeros(BATCH, HEADS, KEY, VALUE, dtype=torch.float64)
    alone = separate_documents(**inputs, initial_state=zero, slopes=slopes, documents=documents)[0]
    actual = decay_scan_parallel(**inputs, slopes=slopes, document_ids=documents)
    assert relative_error(actual, alone) <= BOUND


@pytest.mark.parametrize("boundary", [15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary: int, dtype: torch.dtype):
    inputs, documents = make_inputs(65, dtype), documents_of(((boundary,), (boundary,)), 65)
    results = []
    for scale in (1.0, -3.0):
        changed = {
            n: torch.cat([x[:, :boundary] * scale, x[:, boundary:]], dim=1) for n, x in inputs.items() if n in "qkv"
        }
        changed["initial_state"] = inputs["initial_state"] * scale

        def second_document(**x: Tensor) -> list[Tensor]:
            scan = decay_scan(slopes=slopes_of("mild"), document_ids=documents, chunk_size=16, **x)
            return [scan.output[:, boundary:], scan.state]

        results.append(outputs_and_gradients(second_document, changed))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    for name in ("gradient.q", "gradient.k", "gradient.v"):
        assert results[0][name][:, :boundary].eq(0).all()
        assert results[0][name][:, boundary:].ne(0).any()
    assert results[0]["gradient.initial_state"].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", SLOPES)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_low_precision_errs_at_most_twice_as_much_as_the_recurrence(dtype: torch.dtype, decay: str, chunk_size: int):
    length, slopes = 200, slopes_of(decay)
    low = make_inputs(length, dtype)
    truth = outputs_and_gradients(
        lambda **x: decay_scan_recurrent(slopes=slopes, **x), {name: x.double() for name, x in low.items()}
    )
    same = outputs_and_gradients(lambda **x: decay_scan_recurrent(slopes=slopes, **x), low)
    actual = outputs_and_gradients(lambda **x: decay_scan(slopes=slopes, chunk_size=chunk_size, **x), low)
    allowed, found = errors(same, truth), errors(actual, truth)
    assert not {n: (error, allowed[n]) for n, error in found.items() if not error <= 2.0 * allowed[n]}


@pytest.mark.parametrize("wide", ["q", "k", "v"])
def test_inputs_of_two_dtypes_are_taken(wide: str):
    inputs = make_inputs(20, torch.bfloat16)
    exact = {name: x.double() for name, x in inputs.items()}
    inputs[wide] = inputs[wide].float()
    found, truth = (decay_scan(slopes=slopes_of("mild"), **x) for x in (inputs, exact))
    assert found.output.dtype == inputs["v"].dtype
    assert relative_error(found.output.double(), truth.output) < 1e-2
    assert relative_error(found.state.double(), truth.state) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_keep_the_dtype_and_states_are_wide(dtype: torch.dtype):
    inputs = make_inputs(20, dtype)
    for form in (decay_scan, decay_scan_recurrent):
        scan = form(slopes=slopes_of("mild"), **inputs)
        assert scan.output.dtype == dtype
        assert scan.state.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("slope", [20.0, 500.0])
def test_extreme_decay_stays_finite_in_fp32(slope: float):
    inputs = make_inputs(200, torch.float32)
    result = outputs_and_gradients(lambda **x: decay_scan(slopes=torch.full((HEADS,), slope), **x), inputs)
    assert all(tensor.isfinite().all() for tensor in result.values())


def test_flops_are_those_of_the_matmuls():
    sizes = {"num_heads": 3, "key_dim": 8, "value_dim": 5, "chunk_size": 64}
    assert decay_scan_flops(1000, **sizes) == 3 * (2 * 64 * (8 + 5) + 4 * 8 * 5)
    assert decay_scan_flops(10, **sizes) == 3 * (2 * 10 * (8 + 5) + 4 * 8 * 5)
