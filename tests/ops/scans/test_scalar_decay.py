"""Scan with a data-dependent scalar decay against the recurrence: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalin.ops.scans.fixed_decay import ScanOutput
from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_step
from megalin.ops.scans.vector_decay import vector_decay_scan_recurrent
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients, relative_error
from tests.ops.scans.test_fixed_decay import BOUNDARIES, documents_of

BATCH, HEADS, KEY, VALUE = 2, 3, 6, 4
BOUND = 1e-12
STRENGTHS = {"none": 0.0, "mild": 0.3, "strong": 20.0}


def make_inputs(
    length: int, decay: str = "mild", dtype: torch.dtype = torch.float64, *, key_heads: int = HEADS
) -> Tensors:
    generator = torch.Generator().manual_seed(length)
    wide = torch.promote_types(dtype, torch.float32)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(BATCH, length, key_heads, KEY).to(dtype),
        "k": draw(BATCH, length, key_heads, KEY).to(dtype),
        "v": draw(BATCH, length, HEADS, VALUE).to(dtype),
        "log_decay": (-STRENGTHS[decay] * draw(BATCH, length, HEADS).abs()).to(wide),
        "initial_state": draw(BATCH, HEADS, KEY, VALUE).to(wide),
    }


def recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **fields) -> ScanOutput:
    """The recurrence, with queries, keys and decays expanded to every head and key channel."""
    q, k = (x.expand(-1, -1, v.shape[2], -1) for x in (q, k))
    return vector_decay_scan_recurrent(q, k, v, log_decay[..., None].expand(k.shape), **fields)


@pytest.mark.parametrize("key_heads", [1, HEADS])
@pytest.mark.parametrize("decay", STRENGTHS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_chunkwise_equals_recurrent(length: int, decay: str, key_heads: int):
    inputs = make_inputs(length, decay, key_heads=key_heads)
    expected = outputs_and_gradients(recurrent, inputs)
    for chunk_size in (16, 64):
        actual = outputs_and_gradients(lambda c=chunk_size, **x: scalar_decay_scan(chunk_size=c, **x), inputs)
        assert_close(actual, expected, BOUND)


@pytest.mark.parametrize("chunk_size", [1, 7, 66, 4096])
def test_any_chunk_size_gives_the_same(chunk_size: int):
    actual = outputs_and_gradients(lambda **x: scalar_decay_scan(chunk_size=chunk_size, **x), make_inputs(65))
    assert_close(actual, outputs_and_gradients(recurrent, make_inputs(65)), BOUND)


def test_no_initial_state_means_zeros():
    inputs = make_inputs(65)
    zeros = inputs | {"initial_state": torch.zeros_like(inputs["initial_state"])}
    expected = outputs_and_gradients(scalar_decay_scan, zeros)
    del inputs["initial_state"], expected["gradient.initial_state"]
    assert_close(outputs_and_gradients(scalar_decay_scan, inputs), expected, BOUND)


def test_steps_equal_the_scan():
    inputs = make_inputs(65, key_heads=1)
    expected, state, outputs = scalar_decay_scan(**inputs), inputs["initial_state"], []
    for t in range(65):
        output, state = scalar_decay_step(*(inputs[n][:, t] for n in ("q", "k", "v", "log_decay")), state)
        outputs.append(output)
    assert relative_error(torch.stack(outputs, dim=1), expected.output) <= BOUND
    assert relative_error(state, expected.state) <= BOUND


@pytest.mark.parametrize("name", BOUNDARIES)
def test_packed_documents_equal_the_recurrence_on_them(name: str):
    """test_vector_decay.py has the test that the recurrence starts each document from a zero state."""
    documents, inputs = documents_of(BOUNDARIES[name], 130), make_inputs(130)
    expected = outputs_and_gradients(lambda **x: recurrent(document_ids=documents, **x), inputs)
    for chunk_size in (16, 64):
        actual = outputs_and_gradients(
            lambda c=chunk_size, **x: scalar_decay_scan(document_ids=documents, chunk_size=c, **x), inputs
        )
        assert_close(actual, expected, BOUND)


@pytest.mark.parametrize("boundary", [15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary: int, dtype: torch.dtype):
    inputs, documents = make_inputs(65, dtype=dtype), documents_of(((boundary,), (boundary,)), 65)
    results = []
    for scale in (1.0, 3.0):
        changed = {
            name: x * scale if name == "initial_state" else torch.cat([x[:, :boundary] * scale, x[:, boundary:]], dim=1)
            for name, x in inputs.items()
        }

        def second_document(**x: Tensor) -> list[Tensor]:
            scan = scalar_decay_scan(document_ids=documents, chunk_size=16, **x)
            return [scan.output[:, boundary:], scan.state]

        results.append(outputs_and_gradients(second_document, changed))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    for name in ("gradient.q", "gradient.k", "gradient.v", "gradient.log_decay"):
        assert results[0][name][:, :boundary].eq(0).all()
        assert results[0][name][:, boundary:].ne(0).any()
    assert results[0]["gradient.initial_state"].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", STRENGTHS)
def test_low_precision_errs_at_most_twice_as_much_as_the_recurrence(dtype: torch.dtype, decay: str):
    low = make_inputs(200, decay, dtype)
    truth = outputs_and_gradients(recurrent, {name: x.double() for name, x in low.items()})
    allowed = errors(outputs_and_gradients(recurrent, low), truth)
    found = errors(outputs_and_gradients(scalar_decay_scan, low), truth)
    # Plus one rounding of fp32, the dtype of states and of their gradients.
    assert not {n: (error, allowed[n]) for n, error in found.items() if not error <= 2.0 * allowed[n] + 2**-23}


def test_extreme_decay_stays_finite_in_fp32():
    inputs = make_inputs(200, dtype=torch.float32)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -500.0)
    assert all(x.isfinite().all() for x in outputs_and_gradients(scalar_decay_scan, inputs).values())
