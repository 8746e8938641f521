"""Chunkwise TPE against its recurrence: values and every gradient."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from megalin._triton.scans import tpe as kernels
from megalin._triton.scans import tpe_blocks
from megalin.errors import KernelError
from megalin.ops.scans.tpe import tpe, tpe_recurrent, tpe_step
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients, relative_error
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.test_fixed_decay import BOUNDARIES, documents_of

BATCH, WIDTH = 2, 5
BOUND = 1e-12
DECAYS = {"none": (0.0, 0.0, 0.0), "mild": (-0.001, -0.05, -0.7), "strong": (-3.0, -20.0, -500.0)}


def make_inputs(length: int, decay: str = "mild", dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(length)
    wide, num_decays = torch.promote_types(dtype, torch.float32), len(DECAYS[decay])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": draw(BATCH, length, WIDTH).to(dtype),
        "coefficients": draw(WIDTH, num_decays).to(wide),
        "log_decay": torch.tensor(DECAYS[decay], dtype=wide),
        "state": draw(BATCH, WIDTH, num_decays).to(wide),
    }


@lru_cache
def recurrent(length: int, decay: str) -> Tensors:
    return outputs_and_gradients(tpe_recurrent, make_inputs(length, decay))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_chunkwise_equals_recurrent(length: int, decay: str, chunk_size: int):
    actual = outputs_and_gradients(lambda **x: tpe(chunk_size=chunk_size, **x), make_inputs(length, decay))
    assert_close(actual, recurrent(length, decay), BOUND)


@pytest.mark.parametrize("chunk_size", [1, 7, 65, 66, 4096])
def test_any_chunk_size_gives_the_same(chunk_size: int):
    actual = outputs_and_gradients(lambda **x: tpe(chunk_size=chunk_size, **x), make_inputs(65))
    assert_close(actual, recurrent(65, "mild"), BOUND)


def test_the_recurrence_is_a_convolution_with_sums_of_powers():
    """The kernel of the convolution is tau_{c, i} = sum_k B[c, k] lambda_k^i."""
    inputs = make_inputs(20)
    del inputs["state"]
    x, coefficients, decay = inputs["x"], inputs["coefficients"], inputs["log_decay"].exp()
    expected = torch.zeros_like(x)
    for t in range(20):
        for s in range(t + 1):
            expected[:, t] += (coefficients * decay ** (t - s)).sum(-1) * x[:, s]
    assert relative_error(tpe_recurrent(**inputs).output, expected) <= BOUND
    assert relative_error(tpe(**inputs, chunk_size=16).output, expected) <= BOUND


@pytest.mark.parametrize("form", [tpe, tpe_recurrent])
def test_no_state_means_zeros(form):
    inputs = make_inputs(65)
    expected = outputs_and_gradients(form, inputs | {"state": torch.zeros_like(inputs["state"])})
    del inputs["state"], expected["gradient.state"]
    assert_close(outputs_and_gradients(form, inputs), expected, BOUND)


def test_state_carries_a_sequence_over_a_cut():
    inputs = make_inputs(150)
    whole = tpe(**inputs)
    for cut in (1, 63, 64, 65, 149):
        first = tpe(**(inputs | {"x": inputs["x"][:, :cut]}))
        second = tpe(**(inputs | {"x": inputs["x"][:, cut:], "state": first.state}))
        assert relative_error(torch.cat([first.output, second.output], dim=1), whole.output) <= BOUND
        assert relative_error(second.state, whole.state) <= BOUND


def test_steps_equal_the_scan():
    inputs = make_inputs(65)
    expected, state, outputs = tpe(**inputs), inputs["state"], []
    for t in range(65):
        output, state = tpe_step(inputs["x"][:, t], inputs["coefficients"], inputs["log_decay"], state)
        outputs.append(output)
    assert relative_error(torch.stack(outputs, dim=1), expected.output) <= BOUND
    assert relative_error(state, expected.state) <= BOUND


def separate_documents(x, coefficients, log_decay, state, documents):
    """The recurrence over each document separately; the first one continues the state."""
    rows, states = [], []
    for row, ids in enumerate(documents):
        _, lengths = ids.unique_consecutive(return_counts=True)
        parts, memory = [], state[row : row + 1]
        for index, piece in enumerate(x[row : row + 1].split(lengths.tolist(), dim=1)):
            output, memory = tpe_recurrent(piece, coefficients, log_decay, state=None if index else memory)
            parts.append(output)
        rows.append(torch.cat(parts, dim=1))
        states.append(memory)
    return torch.cat(rows), torch.cat(states)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_packed_documents_equal_separate_ones(name: str):
    documents, inputs = documents_of(BOUNDARIES[name], 130), make_inputs(130)
    expected = outputs_and_gradients(lambda **x: separate_documents(**x, documents=documents), inputs)
    for chunk_size in (16, 64):
        actual = outputs_and_gradients(lambda c=chunk_size, **x: tpe(document_ids=documents, chunk_size=c, **x), inputs)
        assert_close(actual, expected, BOUND)
    assert_close(outputs_and_gradients(lambda **x: tpe_recurrent(document_ids=documents, **x), inputs), expected, BOUND)


@pytest.mark.parametrize("boundary", [15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary: int, dtype: torch.dtype):
    inputs, documents = make_inputs(65, dtype=dtype), documents_of(((boundary,), (boundary,)), 65)
    results = []
    for scale in (1.0, -3.0):
        changed = inputs | {
            "x": torch.cat([inputs["x"][:, :boundary] * scale, inputs["x"][:, boundary:]], dim=1),
            "state": inputs["state"] * scale,
        }

        def second_document(**x: Tensor) -> list[Tensor]:
            result = tpe(document_ids=documents, chunk_size=16, **x)
            return [result.output[:, boundary:], result.state]

        results.append(outputs_and_gradients(second_document, changed))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    assert results[0]["gradient.x"][:, :boundary].eq(0).all()
    assert results[0]["gradient.x"][:, boundary:].ne(0).any()
    assert results[0]["gradient.state"].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", DECAYS)
def test_low_precision_errs_at_most_twice_as_much_as_the_recurrence(dtype: torch.dtype, decay: str):
    low = make_inputs(200, decay, dtype)
    truth = outputs_and_gradients(tpe_recurrent, {name: x.double() for name, x in low.items()})
    allowed = errors(outputs_and_gradients(tpe_recurrent, low), truth)
    found = errors(outputs_and_gradients(tpe, low), truth)
    # Plus one rounding of fp32, the dtype of states and of their gradients.
    assert not {n: (error, allowed[n]) for n, error in found.items() if not error <= 2.0 * allowed[n] + 2**-23}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_keep_the_dtype_and_states_are_wide(dtype: torch.dtype):
    for form in (tpe, tpe_recurrent):
        result = form(**make_inputs(20, dtype=dtype))
        assert result.output.dtype == dtype
        assert result.state.dtype == torch.promote_types(dtype, torch.float32)


def assert_kernel_right(inputs: Tensors, documents: Tensor | None = None) -> None:
    """Compares kernels and recurrence with the recurrence in fp64: both round the state at every token."""
    assert_as_good_as_the_reference(
        lambda **x: tpe(document_ids=documents, backend="triton", **x),
        lambda **x: tpe_recurrent(document_ids=documents, **x),
        inputs,
    )


FAST = (
    (1, "strong", torch.bfloat16),
    (65, "none", torch.bfloat16),
    (65, "mild", torch.float32),
    (130, "strong", torch.float32),
    (130, "mild", torch.bfloat16),
)
SLOW_BOUNDARIES = ("in the first and the last token", "edges of 16", "two in a chunk")


@pytest.mark.parametrize(
    ("length", "decay", "dtype"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST))
        for case in product((1, 64, 65, 130), DECAYS, (torch.float32, torch.bfloat16, torch.float16))
    ],
)
def test_the_kernels_are_as_good_as_the_recurrence(length: int, decay: str, dtype: torch.dtype):
    """Up to three segments of 64 tokens, with an initial state and a gradient of the final one."""
    assert_kernel_right(make_inputs(length, decay, dtype))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_BOUNDARIES)) for name in BOUNDARIES]
)
def test_the_kernels_keep_packed_documents_apart(name: str):
    assert_kernel_right(make_inputs(130, dtype=torch.float32), documents_of(BOUNDARIES[name], 130))


def test_the_kernels_take_channels_of_a_wider_tensor_and_any_number_of_decays():
    inputs = {"x": torch.randn(2, 20, 26), "coefficients": torch.randn(13, 9), "log_decay": -torch.rand(9)}

    def run(function, x: Tensor, **others) -> list[Tensor]:
        return [function(x[..., 4:17], **others).output]

    assert_as_good_as_the_reference(
        lambda **x: run(tpe, **x, backend="triton"), lambda **x: run(tpe_recurrent, **x), inputs
    )


def test_a_slow_decay_does_not_drift_with_the_distance():
    """exp(-1/532) rounds to fp32 with an error of 3e-8, which a segment of 64 tokens would make 2e-6."""
    inputs = {"x": torch.zeros(1, 200, 1), "coefficients": torch.ones(1, 1), "log_decay": torch.tensor([-1 / 532])}
    inputs["x"][0, 0] = 1.0
    found = tpe(**inputs, backend="triton").output[0, :, 0].double()
    expected = torch.exp(torch.arange(200) * inputs["log_decay"].double())
    assert ((found - expected).abs() / expected).max() <= 6e-7


INSIDE_BLOCKS = {
    "several in a block": ((2, 3, 9, 20), (1, 14)),
    "edges of a block": ((1, 16, 17), (15, 31, 32)),
    "one a token": (tuple(range(1, 97)), ()),
}


FAST_INSIDE = ((17, "several in a block"), (33, "one a token"), (97, "edges of a block"))


@pytest.mark.parametrize(
    ("length", "name"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST_INSIDE))
        for case in product((15, 16, 17, 31, 33, 97), INSIDE_BLOCKS)
    ],
)
def test_the_kernels_take_lengths_and_documents_around_a_block(length: int, name: str):
    starts = tuple(tuple(start for start in row if start < length) for row in INSIDE_BLOCKS[name])
    assert_kernel_right(make_inputs(length, dtype=torch.float32), documents_of(starts, length))


@pytest.mark.parametrize(
    "rates",
    [pytest.param(rates, marks=[pytest.mark.slow] * (rates[0] != 1e-4)) for rates in ((0, 0), (1e-4, 0.05), (0.5, 20))],
)
def test_the_kernels_take_decays_of_several_warps_and_an_incomplete_one(rates: tuple[float, float]):
    """40 decays: a warp of the scan has up to 32."""
    inputs = make_inputs(100, dtype=torch.float32) | {"log_decay": -torch.linspace(*rates, 40)}
    generator = torch.Generator().manual_seed(1)
    inputs["coefficients"] = torch.randn(WIDTH, 40, generator=generator)
    inputs["state"] = torch.randn(BATCH, WIDTH, 40, generator=generator)
    assert_kernel_right(inputs, documents_of(((70,), (71, 79)), 100))


def test_a_document_inside_a_segment_of_several_blocks_clears_the_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megalin._triton.scans.tpe.PROGRAMS", 5)
    inputs = make_inputs(300, dtype=torch.float32)
    assert kernels.segments_of(inputs["x"]) == (128, 3)
    assert_kernel_right(inputs, documents_of(((100, 130), (70, 200)), 300))


def test_a_slow_decay_does_not_drift_over_the_blocks_of_a_segment(monkeypatch: pytest.MonkeyPatch):
    """The 16th power of exp(-1/913) rounds to fp32 with an error of 2.9e-8, which 64 blocks would make 1.9e-6."""
    monkeypatch.setattr("megalin._triton.scans.tpe.PROGRAMS", 1)
    distance, log_decay = 1023, torch.tensor([-1 / 913])
    inputs = {"x": torch.zeros(1, distance + 1, 1), "coefficients": torch.ones(1, 1), "log_decay": log_decay}
    inputs["x"][0, 0] = 1.0
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    last = tpe(**leaves, backend="triton").output[0, -1, 0]
    gradients = dict(zip(leaves, torch.autograd.grad(last, list(leaves.values())), strict=True))
    expected = torch.exp(distance * log_decay.detach().double())
    found = {"output": last, "x": gradients["x"][0, 0], "coefficients": gradients["coefficients"][0]}
    found["log_decay"] = gradients["log_decay"] / distance
    relative = {name: (value.double() / expected - 1).item() for name, value in found.items()}
    assert not {name: error for name, error in relative.items() if not abs(error) <= 1e-6}


@pytest.mark.parametrize(("programs", "segment"), [(2, 4096), (1 << 20, 64)])
def test_a_slow_decay_does_not_drift_in_the_states_between_segments(
    programs: int, segment: int, monkeypatch: pytest.MonkeyPatch
):
    """The 64th power of exp(-1/913) is 3.1e-8 off, which 64 blocks, or 64 segments, would make 2e-6."""
    monkeypatch.setattr("megalin._triton.scans.tpe.PROGRAMS", programs)
    x, log_decay = torch.zeros(1, 8192, 1), torch.tensor([-1 / 913])
    x[0, 0] = 1.0
    segments = 8192 // segment
    assert kernels.segments_of(x) == (segment, segments)
    powers = tpe_blocks.powers_of(log_decay, segment)
    ages = tpe_blocks.ages_of(torch.zeros(1, 8193, dtype=torch.uint8), segment, segments, reverse=False)
    state, slope = kernels.entering_states(x, powers, ages, reverse=False, slopes=True)
    distance = (segments - 1) * segment - 1
    expected = torch.exp(distance * log_decay.double()).item()
    assert abs(state[0, -1, 0, 0].item() / expected - 1) <= 1e-6
    assert abs(slope[0, -1, 0, 0].item() / (distance * expected) - 1) <= 1e-6


def test_equal_calls_of_the_kernels_give_the_same_bits():
    inputs = make_inputs(130, dtype=torch.float32)
    first, second = (outputs_and_gradients(lambda **x: tpe(backend="triton", **x), inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_the_kernels_do_not_take_is_refused():
    inputs = make_inputs(20)
    with pytest.raises(KernelError, match=r"does not take dtypes torch\.float64, torch\.float64 and torch\.float64"):
        tpe(**inputs, backend="triton")
    many = {"coefficients": torch.ones(5, 300), "log_decay": torch.zeros(300)}
    with pytest.raises(KernelError, match="does not take 300 decays, above 256"):
        tpe(torch.ones(1, 3, 5), **many, backend="triton")
