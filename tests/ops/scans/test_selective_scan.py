"""Selective scan against the recurrence of vector_decay.py with D heads of one value: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalin.ops.scans.context_parallel import SingleProcessExchange
from megalin.ops.scans.selective_scan import selective_scan, selective_step
from megalin.ops.scans.vector_decay import vector_decay_scan_recurrent
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients, relative_error
from tests.ops.scans.test_fixed_decay import BOUNDARIES, documents_of

BATCH, WIDTH, STATES = 2, 4, 3
BOUND = 1e-12
STRENGTHS = {"none": 0.0, "mild": 0.3, "strong": 20.0}


def make_inputs(
    length: int,
    decay: float = 0.3,
    dtype: torch.dtype = torch.float64,
    *,
    width: int = WIDTH,
    states: int = STATES,
    batch: int = BATCH,
) -> Tensors:
    """Inputs of the scan, with rates of `decay` nats a unit of time."""
    generator = torch.Generator().manual_seed(length)
    wide = torch.promote_types(dtype, torch.float32)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "q": draw(batch, length, states).to(dtype),
        "k": draw(batch, length, states).to(dtype),
        "v": draw(batch, length, width).to(dtype),
        "step": draw(batch, length, width).abs().to(wide),
        "rates": (-decay * draw(width, states).abs()).to(wide),
        "initial_state": draw(batch, width, states).to(wide),
    }


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, rates: Tensor, initial_state: Tensor | None = None, **fields
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: H = D heads, K = N keys, V = 1 value."""
    q, k = (x[:, :, None].expand(-1, -1, v.shape[2], -1) for x in (q, k))
    first = None if initial_state is None else initial_state[..., None]
    values = (step * v).to(step.dtype)[..., None]
    scan = vector_decay_scan_recurrent(q, k, values, step[..., None] * rates, initial_state=first, **fields)
    return scan.output[..., 0].to(v.dtype), scan.state[..., 0]


@pytest.mark.parametrize("decay", STRENGTHS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 65])
def test_chunkwise_equals_recurrent(length: int, decay: str):
    inputs = make_inputs(length, STRENGTHS[decay])
    expected = outputs_and_gradients(recurrent, inputs)
    for chunk_size in (7, 16):
        actual = outputs_and_gradients(lambda c=chunk_size, **x: selective_scan(chunk_size=c, **x), inputs)
        assert_close(actual, expected, BOUND)


def test_no_initial_state_means_zeros():
    inputs = make_inputs(20)
    zeros = inputs | {"initial_state": torch.zeros_like(inputs["initial_state"])}
    expected = outputs_and_gradients(selective_scan, zeros)
    del inputs["initial_state"], expected["gradient.initial_state"]
    assert_close(outputs_and_gradients(selective_scan, inputs), expected, BOUND)


@pytest.mark.parametrize("in_place", [False, True])
def test_steps_equal_the_scan(in_place: bool):
    inputs = make_inputs(33)
    expected, state, outputs = selective_scan(**inputs), inputs["initial_state"].clone(), []
    for t in range(33):
        tokens = (inputs[name][:, t] for name in ("q", "k", "v", "step"))
        output, state = selective_step(*tokens, inputs["rates"], state, in_place=in_place)
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
            lambda c=chunk_size, **x: selective_scan(document_ids=documents, chunk_size=c, **x), inputs
        )
        assert_close(actual, expected, BOUND)


@pytest.mark.parametrize("boundary", [15, 16, 17, 40])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary: int):
    inputs, documents = make_inputs(65, dtype=torch.float32), documents_of(((boundary,), (boundary,)), 65)
    results = []
    for scale in (1.0, 3.0):
        changed = {name: x.clone() for name, x in inputs.items()}
        for name in ("q", "k", "v", "step"):
            changed[name][:, :boundary] *= scale
        changed["initial_state"] *= scale

        def second_document(**x: Tensor) -> list[Tensor]:
            scan = selective_scan(document_ids=documents, **x)
            return [scan.output[:, boundary:], scan.state]

        results.append(outputs_and_gradients(second_document, changed))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    for name in ("q", "k", "v", "step"):
        assert results[0][f"gradient.{name}"][:, :boundary].eq(0).all()
        assert results[0][f"gradient.{name}"][:, boundary:].ne(0).any()
    assert results[0]["gradient.initial_state"].eq(0).all()


@pytest.mark.parametrize("starts", [(), (1.0, 2.0), (0.5, 2.5)], ids=["one", "at boundaries", "over a boundary"])
def test_three_shards_equal_the_sequence(starts: tuple[float, ...]):
    """The state exchange sends the sums of dt; the rates, equal on all ranks, get the gradients of all."""
    inputs, length = make_inputs(60, 0.05, batch=1), 20
    del inputs["initial_state"]
    ids = torch.zeros(60, dtype=torch.int32)
    ids[[int(place * length) for place in starts]] = 1
    ids = ids.cumsum(0, dtype=torch.int32)
    shard = SingleProcessExchange().sequence_shard(ids.view(3, length))

    def sharded(rates: Tensor, **x: Tensor) -> list[Tensor]:
        x = {name: y.view(3, length, -1) for name, y in x.items()}
        scan = selective_scan(**x, rates=rates, shard=shard, document_ids=ids.view(3, length))
        return [scan.output.flatten(0, 1)[None]]

    expected = outputs_and_gradients(lambda **x: [recurrent(**x, document_ids=ids[None])[0]], inputs)
    assert_close(outputs_and_gradients(sharded, inputs), expected, BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", STRENGTHS)
def test_low_precision_errs_at_most_twice_as_much_as_the_recurrence(dtype: torch.dtype, decay: str):
    low = make_inputs(200, STRENGTHS[decay], dtype)
    truth = outputs_and_gradients(recurrent, {name: x.double() for name, x in low.items()})
    allowed = errors(outputs_and_gradients(recurrent, low), truth)
    found = errors(outputs_and_gradients(selective_scan, low), truth)
    # Plus one rounding of fp32, the dtype of states and of their gradients.
    assert not {n: (error, allowed[n]) for n, error in found.items() if not error <= 2.0 * allowed[n] + 2**-23}


def test_extreme_decay_stays_finite_in_fp32():
    inputs = make_inputs(100, 500.0, torch.float32)
    assert all(x.isfinite().all() for x in outputs_and_gradients(selective_scan, inputs).values())
