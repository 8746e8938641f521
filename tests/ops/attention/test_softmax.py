"""Fused softmax attention against its definition, token by token: values, gradients, documents, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalin.errors import OperandError
from megalin.ops.attention.softmax import (
    KeyValueCache,
    softmax_attention,
    softmax_attention_flops,
    softmax_attention_reference,
    softmax_attention_step,
    visible_tokens,
)
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients, relative_error

BATCH, WIDTH = 2, 6
BOUND = 1e-12
HEADS = {"as many": (3, 3), "grouped": (4, 2), "one": (3, 1)}
STARTS = {1: (0,), 17: (0, 1, 16), 63: (0,), 64: (0, 63), 65: (0, 15, 16, 17, 64), 200: (0, 64, 129)}
"""Starts of the documents of the second sample, by length; the first sample is one document."""


def make_inputs(length: int, heads: str = "grouped", dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(length)
    queries, groups = HEADS[heads]

    def draw(num_heads: int) -> Tensor:
        return torch.randn((BATCH, length, num_heads, WIDTH), generator=generator, dtype=torch.float64).to(dtype)

    return {"q": draw(queries), "k": draw(groups), "v": draw(groups)}


def documents_of(length: int) -> Tensor:
    starts = torch.zeros(BATCH, length, dtype=torch.int32)
    starts[1, list(STARTS[length])] = 1
    return 3 + starts.cumsum(1, dtype=torch.int32)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 17, 63, 64, 65])
def test_attention_equals_its_definition(length: int, heads: str):
    inputs = make_inputs(length, heads)
    actual = outputs_and_gradients(lambda **x: [softmax_attention(**x)], inputs)
    assert_close(actual, outputs_and_gradients(lambda **x: [softmax_attention_reference(**x)], inputs), BOUND)


@pytest.mark.parametrize("length", [17, 64, 65])
def test_packed_documents_equal_the_definition(length: int):
    inputs, documents = make_inputs(length), documents_of(length)
    visible = visible_tokens(documents)
    actual = outputs_and_gradients(lambda **x: [softmax_attention(visible=visible, **x)], inputs)
    expected = outputs_and_gradients(lambda **x: [softmax_attention_reference(document_ids=documents, **x)], inputs)
    assert_close(actual, expected, BOUND)


def test_the_definition_attends_to_no_other_document():
    inputs, documents = make_inputs(17), documents_of(17)
    packed = softmax_attention_reference(document_ids=documents, **inputs)[1:]
    alone = [
        softmax_attention_reference(*(x[1:, a:b] for x in inputs.values())) for a, b in ((0, 1), (1, 16), (16, 17))
    ]
    assert torch.equal(packed, torch.cat(alone, dim=1))


@pytest.mark.parametrize("cut", [1, 16, 40, 64])
def test_cached_tokens_continue_a_sequence(cut: int):
    inputs, documents = make_inputs(65), documents_of(65)
    whole = softmax_attention(**inputs, visible=visible_tokens(documents))
    cached = documents[:, :cut] == documents[:, cut : cut + 1]
    visible = visible_tokens(documents[:, cut:], cached)
    second = softmax_attention(inputs["q"][:, cut:], inputs["k"], inputs["v"], visible=visible)
    assert relative_error(second, whole[:, cut:]) <= BOUND


def make_cache(slots: int, heads: str = "grouped") -> KeyValueCache:
    """An empty cache whose slots have arbitrary finite contents."""
    shape = (BATCH, slots, HEADS[heads][1], WIDTH)
    keys, values = (torch.full(shape, value, dtype=torch.float64) for value in (7.0, -9.0))
    return KeyValueCache(keys, values, torch.zeros(BATCH, slots, dtype=torch.float64))


@pytest.mark.parametrize("heads", HEADS)
def test_steps_equal_the_definition_and_fill_the_empty_slots(heads: str):
    """The second sequence starts three tokens later; its cache already holds two slots that are empty again."""
    inputs, cache = make_inputs(17, heads), make_cache(19, heads)
    addresses = [x.data_ptr() for x in cache]
    late = {name: torch.stack([x[0], x[1].roll(3, 0)]) for name, x in inputs.items()}
    outputs = []
    for t in range(17):
        outputs.append(softmax_attention_step(*(x[:, t : t + 1] for x in late.values()), cache))
        if t == 2:
            cache.remembered[1] = 0.0
    expected = softmax_attention_reference(**inputs)
    found = torch.cat(outputs, dim=1)
    assert relative_error(found[0], expected[0]) <= BOUND
    assert relative_error(found[1, 3:], expected[1, :14]) <= BOUND
    assert cache.remembered.sum(1).tolist() == [17, 14]
    assert [x.data_ptr() for x in cache] == addresses


def test_a_step_in_bf16_reads_a_cache_in_fp32():
    inputs, cache = make_inputs(17, dtype=torch.bfloat16), KeyValueCache(*(x.float() for x in make_cache(17)))
    steps = [softmax_attention_step(*(x[:, t : t + 1] for x in inputs.values()), cache) for t in range(17)]
    assert steps[0].dtype == torch.bfloat16
    truth = softmax_attention_reference(**{name: x.double() for name, x in inputs.items()})
    same = softmax_attention(**inputs)
    assert relative_error(torch.cat(steps, dim=1), truth) <= 2.0 * relative_error(same, truth)
    assert torch.equal(cache.k, inputs["k"].float())


@pytest.mark.parametrize(("tokens", "slots"), [(2, 4), (1, 0)])
def test_several_tokens_or_no_slot_are_refused(tokens: int, slots: int):
    inputs = {name: x[:, :tokens] for name, x in make_inputs(17).items()}
    message = f"softmax_attention_step: {tokens} tokens and {slots} slots; give one token of each sequence and a cache"
    with pytest.raises(OperandError, match=message):
        softmax_attention_step(**inputs, cache=make_cache(slots))


@pytest.mark.parametrize("boundary", [15, 64, 65, 129, 199])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary: int, dtype: torch.dtype):
    inputs = make_inputs(200, "grouped", dtype)
    visible, results = visible_tokens((torch.arange(200) >= boundary).int().expand(BATCH, -1)), []
    for factor in (1.0, -30.0):
        changed = {n: torch.cat([x[:, :boundary] * factor, x[:, boundary:]], dim=1) for n, x in inputs.items()}
        results.append(
            outputs_and_gradients(lambda **x: [softmax_attention(visible=visible, **x)[:, boundary:]], changed)
        )
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    for name in ("gradient.q", "gradient.k", "gradient.v"):
        assert results[0][name][:, :boundary].eq(0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_bf16_errs_at_most_twice_as_much_as_unfused_attention(masked: bool):
    low, visible = make_inputs(200, "grouped", torch.bfloat16), visible_tokens(documents_of(200)) if masked else None
    run = lambda **x: [softmax_attention(visible=visible, **x)]  # noqa: E731
    truth = outputs_and_gradients(run, {name: x.double() for name, x in low.items()})
    with sdpa_kernel(SDPBackend.MATH):
        same = outputs_and_gradients(run, low)
    found, allowed = errors(outputs_and_gradients(run, low), truth), errors(same, truth)
    assert not {n: (error, allowed[n]) for n, error in found.items() if not error <= 2.0 * allowed[n]}


def test_large_scores_stay_finite():
    inputs = {name: x * 1e4 for name, x in make_inputs(65, "grouped", torch.float32).items()}
    assert all(x.isfinite().all() for x in outputs_and_gradients(lambda **x: [softmax_attention(**x)], inputs).values())


def test_flops_are_those_of_all_pairs():
    assert softmax_attention_flops(100, num_heads=3, head_dim=8) * 100 == 2 * (2 * 100 * 100 * 3 * 8)
