"""Chunkwise and parallel vector-decay scans against the recurrence: values and every gradient."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from megalin.ops.scans.vector_decay import vector_decay_scan, vector_decay_scan_parallel, vector_decay_scan_recurrent
from megalin.ops.scans.vector_decay_step import vector_decay_step
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients, relative_error

BATCH, HEADS, KEY, VALUE = 2, 2, 5, 4
BOUND = 1e-12
SCALE = 0.3
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200)
DECAYS = {"none": 0.0, "nearly none": -1e-6, "mild": -1.0, "strong": -5.0, "stronger": -20.0, "extreme": -50.0}
"""Log decay per token."""
TENSORS = ("q", "k", "v", "log_decay")


def make_inputs(length: int, decay: str = "data", dtype: torch.dtype = torch.float64) -> Tensors:
    """Inputs whose decay is one of DECAYS everywhere, continuous random values ("data") or random DECAYS ("mixed")."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape, wide = (BATCH, length, HEADS, KEY), torch.promote_types(dtype, torch.float32)
    choice = torch.randint(len(DECAYS), shape, generator=generator)
    log_decay = {
        "data": -draw(*shape).exp() * 0.3,
        "mixed": torch.tensor(list(DECAYS.values()), dtype=torch.float64)[choice],
    }.get(decay)
    return {
        "q": draw(*shape).to(dtype),
        "k": draw(*shape).to(dtype),
        "v": draw(*shape[:-1], VALUE).to(dtype),
        "log_decay": (torch.full(shape, DECAYS[decay]) if log_decay is None else log_decay).to(wide),
        "initial_state": draw(BATCH, HEADS, KEY, VALUE).to(wide),
    }


@lru_cache
def recurrent(length: int, decay: str, dtype: torch.dtype = torch.float64) -> Tensors:
    return outputs_and_gradients(
        lambda **x: vector_decay_scan_recurrent(scale=SCALE, **x), make_inputs(length, decay, dtype)
    )


@pytest.mark.parametrize("decay", [*DECAYS, "data", "mixed"])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunkwise_equals_recurrent(length: int, decay: str):
    inputs = make_inputs(length, decay)
    actual = outputs_and_gradients(lambda **x: vector_decay_scan(scale=SCALE, **x), inputs)
    assert_close(actual, recurrent(length, decay), BOUND)


@pytest.mark.parametrize("chunk_size", [1, 16, 17, 32, 48, 128, 4096])
def test_any_chunk_size_gives_the_same(chunk_size: int):
    inputs = make_inputs(65)
    actual = outputs_and_gradients(lambda **x: vector_decay_scan(scale=SCALE, chunk_size=chunk_size, **x), inputs)
    assert_close(actual, recurrent(65, "data"), BOUND)


@pytest.mark.parametrize("decay", [*DECAYS, "data", "mixed"])
@pytest.mark.parametrize("length", [1, 17, 40])
def test_parallel_equals_recurrent_without_an_initial_state(length: int, decay: str):
    inputs = make_inputs(length, decay)
    del inputs["initial_state"]
    actual = outputs_and_gradients(lambda **x: [vector_decay_scan_parallel(scale=SCALE, **x)], inputs)
    expected = outputs_and_gradients(lambda **x: [vector_decay_scan_recurrent(scale=SCALE, **x).output], inputs)
    assert_close(actual, expected, BOUND)


@pytest.mark.parametrize("form", [vector_decay_scan, vector_decay_scan_recurrent])
def test_no_initial_state_means_zeros(form):
    inputs = make_inputs(65)
    zeros = inputs | {"initial_state": torch.zeros_like(inputs["initial_state"])}
    del inputs["initial_state"]
    expected = outputs_and_gradients(form, zeros)
    del expected["gradient.initial_state"]
    assert_close(outputs_and_gradients(form, inputs), expected, BOUND)


def test_state_carries_a_sequence_over_a_cut():
    inputs = make_inputs(150)
    whole = vector_decay_scan(**inputs)
    for cut in (1, 16, 63, 64, 65, 149):
        first = vector_decay_scan(*(inputs[n][:, :cut] for n in TENSORS), initial_state=inputs["initial_state"])
        second = vector_decay_scan(*(inputs[n][:, cut:] for n in TENSORS), initial_state=first.state)
        assert relative_error(torch.cat([first.output, second.output], dim=1), whole.output) <= BOUND
        assert relative_error(second.state, whole.state) <= BOUND


def test_steps_equal_the_scan():
    inputs = make_inputs(65)
    expected = vector_decay_scan(scale=SCALE, **inputs)
    state, outputs = inputs["initial_state"], []
    for t in range(65):
        output, state = vector_decay_step(*(inputs[n][:, t] for n in TENSORS), state, scale=SCALE)
        outputs.append(output)
    assert relative_error(torch.stack(outputs, dim=1), expected.output) <= BOUND
    assert relative_error(state, expected.state) <= BOUND


# Starts of documents after the first, by sample: at and next to edges of sub-blocks and chunks, several in one.
BOUNDARIES = {
    "edges of sub-blocks": ((16,), (48, 96)),
    "edges of chunks": ((64,), (128,)),
    "next to an edge": ((63, 129), (15, 17, 65, 127)),
    "two in a chunk": ((70, 75), (3, 5)),
    "the first and the last token": ((1,), (129,)),
    "none and many": ((), tuple(range(1, 130, 3))),
}


def documents_of(boundaries: tuple[tuple[int, ...], ...], length: int) -> Tensor:
    starts = torch.zeros(len(boundaries), length, dtype=torch.int32)
    for row, places in enumerate(boundaries):
        starts[row, list(places)] = 1
    return 5 + starts.cumsum(1, dtype=torch.int32)


def separate_documents(initial_state: Tensor, documents: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over each document separately; the first one continues the initial state."""
    rows, states = [], []
    for row, ids in enumerate(documents):
        _, lengths = ids.unique_consecutive(return_counts=True)
        parts, begin, state = [], 0, initial_state[row : row + 1]
        for length in lengths.tolist():
            piece = {name: x[row : row + 1, begin : begin + length] for name, x in tensors.items()}
            output, state = vector_decay_scan_recurrent(**piece, initial_state=state if begin == 0 else None)
            parts.append(output)
            begin += length
        rows.append(torch.cat(parts, dim=1))
        states.append(state)
    return torch.cat(rows), torch.cat(states)


@pytest.mark.parametrize("name", BOUNDARIES)
@pytest.mark.parametrize("decay", ["data", "mixed"])
def test_packed_documents_equal_separate_ones(name: str, decay: str):
    documents, inputs = documents_of(BOUNDARIES[name], 130), make_inputs(130, decay)
    expected = outputs_and_gradients(lambda **x: separate_documents(documents=documents, **x), inputs)
    for chunk_size in (32, 64):
        actual = outputs_and_gradients(
            lambda c=chunk_size, **x: vector_decay_scan(document_ids=documents, chunk_size=c, **x), inputs
        )
        assert_close(actual, expected, BOUND)
    actual = outputs_and_gradients(lambda **x: vector_decay_scan_recurrent(document_ids=documents, **x), inputs)
    assert_close(actual, expected, BOUND)


def test_parallel_form_separates_documents():
    documents, inputs = documents_of(((16, 17), (5, 39)), 40), make_inputs(40)
    inputs["initial_state"] = torch.zeros_like(inputs["initial_state"])
    expected = separate_documents(documents=documents, **inputs)[0]
    del inputs["initial_state"]
    assert relative_error(vector_decay_scan_parallel(document_ids=documents, **inputs), expected) <= BOUND


@pytest.mark.parametrize("boundary", [15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary: int, dtype: torch.dtype):
    inputs, documents = make_inputs(65, "data", dtype), documents_of(((boundary,), (boundary,)), 65)
    results = []
    for factor in (1.0, 3.0):
        changed = {n: torch.cat([inputs[n][:, :boundary] * factor, inputs[n][:, boundary:]], dim=1) for n in TENSORS}
        changed["initial_state"] = inputs["initial_state"] * factor

        def second_document(**x: Tensor) -> list[Tensor]:
            scan = vector_decay_scan(document_ids=documents, chunk_size=32, **x)
            return [scan.output[:, boundary:], scan.state]

        results.append(outputs_and_gradients(second_document, changed))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    for name in TENSORS:
        assert results[0][f"gradient.{name}"][:, :boundary].eq(0).all()
        assert results[0][f"gradient.{name}"][:, boundary:].ne(0).any()
    assert results[0]["gradient.initial_state"].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [*DECAYS, "data", "mixed"])
def test_low_precision_errs_at_most_twice_as_much_as_the_recurrence(dtype: torch.dtype, decay: str):
    low = make_inputs(200, decay, dtype)
    truth = outputs_and_gradients(vector_decay_scan_recurrent, {name: x.double() for name, x in low.items()})
    same = outputs_and_gradients(vector_decay_scan_recurrent, low)
    actual = outputs_and_gradients(vector_decay_scan, low)
    allowed, found = errors(same, truth), errors(actual, truth)
    # Plus one rounding of fp32, the dtype of states and of their gradients.
    assert not {n: (error, allowed[n]) for n, error in found.items() if not error <= 2.0 * allowed[n] + 2**-23}


@pytest.mark.parametrize("decay", [*DECAYS, "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_decay_is_finite_and_exact_in_low_precision(decay: str, dtype: torch.dtype):
    """Quotients of cumulative decays overflow from -5 a token on; differences of them lose the decay's gradient."""
    inputs = make_inputs(200, decay, dtype)
    actual = outputs_and_gradients(vector_decay_scan, inputs)
    assert all(tensor.isfinite().all() for tensor in actual.values())
    truth = outputs_and_gradients(vector_decay_scan_recurrent, {name: x.double() for name, x in inputs.items()})
    assert_close(actual, truth, 2e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_keep_the_dtype_and_states_are_wide(dtype: torch.dtype):
    inputs = make_inputs(20, "data", dtype)
    for form in (vector_decay_scan, vector_decay_scan_recurrent):
        scan = form(**inputs)
        assert scan.output.dtype == dtype
        assert scan.state.dtype == torch.promote_types(dtype, torch.float32)
