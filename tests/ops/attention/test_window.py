"""Windowed attention with a shared key against its definition, values and every gradient, and its cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalin.ops.attention.window import WindowCache, window_attention, window_attention_reference
from megalin.ops.documents import PackedDocuments
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients

BATCH, HEADS, KEY, VALUE = 2, 3, 4, 4
BOUND = 1e-12


def make_inputs(length: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": draw(BATCH, length, HEADS, KEY),
        "k": draw(BATCH, length, KEY),
        "v": draw(BATCH, length, HEADS, VALUE),
    }


def make_documents(length: int) -> Tensor:
    starts = torch.zeros(BATCH, length, dtype=torch.int32)
    for row, places in enumerate(((1, 3, 20), (2, 7, 8, 9, 40))):
        starts[row, [place for place in places if place < length]] = 1
    return starts.cumsum(1, dtype=torch.int32)


def empty_cache(window: int, dtype: torch.dtype = torch.float64) -> WindowCache:
    shapes = ((KEY,), (HEADS, VALUE), ())
    return WindowCache(*(torch.zeros(BATCH, window - 1, *shape, dtype=dtype) for shape in shapes))


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("length", [1, 7, 8, 50])
def test_equals_the_definition(length: int, window: int, packed: bool):
    ids, inputs = make_documents(length) if packed else None, make_inputs(length)
    actual = outputs_and_gradients(
        lambda **x: [window_attention(**x, window=window, documents=PackedDocuments(ids)).output], inputs
    )
    expected = outputs_and_gradients(
        lambda **x: [window_attention_reference(**x, window=window, document_ids=ids)], inputs
    )
    assert_close(actual, expected, BOUND)


def test_a_window_holds_exactly_its_tokens_itself_included():
    inputs = make_inputs(20) | {"v": torch.ones(BATCH, 20, HEADS, VALUE, dtype=torch.float64)}
    for s in range(20):
        impulse = torch.zeros_like(inputs["v"])
        impulse[:, s] = 1.0
        visible = window_attention(inputs["q"], inputs["k"], impulse, window=7).output[0, :, 0, 0] > 0
        assert visible.nonzero().flatten().tolist() == list(range(s, min(s + 7, 20)))


@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("cut", [1, 6, 7, 8, 21, 39])
def test_cache_carries_a_sequence_over_a_cut(cut: int, window: int):
    inputs, documents = make_inputs(50), make_documents(50)
    whole = window_attention(**inputs, window=window, documents=PackedDocuments(documents), cache=empty_cache(window))
    first = window_attention(
        **{name: x[:, :cut] for name, x in inputs.items()},
        window=window,
        documents=PackedDocuments(documents[:, :cut]),
        cache=empty_cache(window),
    )
    other = documents[:, cut] != documents[:, cut - 1]
    cache = WindowCache(*(x.masked_fill(other.view(-1, *[1] * (x.dim() - 1)), 0.0) for x in first.cache))
    second = window_attention(
        **{name: x[:, cut:] for name, x in inputs.items()},
        window=window,
        documents=PackedDocuments(documents[:, cut:]),
        cache=cache,
    )
    parts = {"output": torch.cat([first.output, second.output], dim=1), **second.cache._asdict()}
    assert_close(parts, {"output": whole.output, **whole.cache._asdict()}, BOUND)
    assert second.cache.k.shape[1] == window - 1


def test_packed_documents_do_not_leak():
    """Outputs, cache and gradients are equal bit by bit in fp32."""
    inputs, results = make_inputs(24, torch.float32), []
    documents = (torch.arange(24) >= 11).int().expand(BATCH, -1)
    for other in (1.0, 1e4):
        leaves = [
            torch.where((documents == 0).view(BATCH, 24, *[1] * (x.dim() - 2)), other * x, x).requires_grad_()
            for x in inputs.values()
        ]
        y = window_attention(
            *leaves, window=7, documents=PackedDocuments(documents), cache=empty_cache(7, torch.float32)
        )
        gradients = torch.autograd.grad(y.output[:, 11:].square().sum() + y.cache.k.sum(), leaves)
        assert all(gradient[:, :11].eq(0).all() for gradient in gradients)
        results.append([y.output[:, 11:], *y.cache, *(gradient[:, 11:] for gradient in gradients)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bf16_error_is_that_of_its_inputs():
    inputs = make_inputs(50, torch.bfloat16)
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    expected = outputs_and_gradients(lambda **x: [window_attention_reference(**x, window=7)], exact)
    actual = errors(outputs_and_gradients(lambda **x: [window_attention(**x, window=7).output], inputs), expected)
    naive = errors(outputs_and_gradients(lambda **x: [window_attention_reference(**x, window=7)], inputs), expected)
    for name in expected:
        assert actual[name] <= 2 * naive[name], name
