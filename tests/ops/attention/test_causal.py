"""Causal attention against its definition: documents with and without known offsets, and windows."""

from __future__ import annotations

import pytest
import torch

from megalin.ops.attention.causal import causal_attention
from megalin.ops.attention.local import block_ids
from megalin.ops.attention.softmax import softmax_attention_reference
from megalin.ops.attention.window import window_attention_reference
from megalin.ops.documents import (
    UNPACKED,
    DocumentBounds,
    PackedDocuments,
    declare_bounds,
    document_bounds,
    find_documents,
)
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.attention.test_softmax import documents_of, make_inputs


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 16])
def test_equals_the_definition(packed: bool, window: int | None):
    inputs, ids = make_inputs(65, "as many"), documents_of(65) if packed else None
    inputs["k"] = inputs["k"][:, :, :1].expand(-1, -1, 3, -1)

    def definition(q, k, v):
        if window is None:
            return [softmax_attention_reference(q, k, v, document_ids=ids)]
        return [window_attention_reference(q, k[:, :, 0], v, window=window, document_ids=ids)]

    expected = outputs_and_gradients(definition, inputs)
    expected["gradient.k"] = expected["gradient.k"].sum(2)
    for documents in (PackedDocuments(ids), find_documents(ids)) if packed else (UNPACKED,):
        actual = outputs_and_gradients(
            lambda documents=documents, **x: [causal_attention(**x, documents=documents, window=window)], inputs
        )
        actual["gradient.k"] = actual["gradient.k"].sum(2)
        assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 16])
def test_queries_of_the_last_tokens_alone(packed: bool, window: int | None):
    inputs, documents = make_inputs(65), PackedDocuments(documents_of(65)) if packed else UNPACKED

    def last(q, k, v):
        return [causal_attention(q[:, 40:], k, v, documents=documents, window=window)]

    def every(q, k, v):
        return [causal_attention(q, k, v, documents=documents, window=window)[:, 40:]]

    actual, expected = outputs_and_gradients(last, inputs), outputs_and_gradients(every, inputs)
    if window == 1:  # the weight of the only visible key is 1: what rounding leaves of these gradients differs by CPU
        for name in ("gradient.q", "gradient.k"):
            assert actual.pop(name).abs().max() < 1e-14
            assert expected.pop(name).abs().max() < 1e-14
    assert_close(actual, expected, 1e-12)


def test_documents_are_their_starts_in_few_sizes():
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 3]], dtype=torch.int32)
    known = find_documents(ids)
    assert known.ids is ids
    assert known.offsets.tolist() == [0, 2, 5, 6, 7, 9, *[10] * 11]
    assert known.offsets.dtype == torch.int32
    assert known.sizes.tolist() == [6, 3]
    assert find_documents(ids[:1]).offsets.tolist() == [0, 2, 5, 5, 5]
    assert find_documents(ids[:1]).sizes.tolist() == [2, 3]
    assert {len(find_documents(torch.arange(n)[None]).offsets) for n in range(2, 257)} == {5, 17, 65, 257}


def test_sequences_of_one_document_are_unpacked():
    assert find_documents(torch.tensor([[4, 4, 4], [0, 0, 0]])) is UNPACKED
    assert find_documents(torch.tensor([[7]])) is UNPACKED
    assert find_documents(torch.tensor([[0, 1], [0, 0]])).offsets.tolist() == [0, 1, 2, 4, 4]


def test_documents_within_declared_bounds_are_followed_by_empty_ones():
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 3]], dtype=torch.int32)
    declare_bounds(ids, DocumentBounds(17, 4))
    assert document_bounds(ids) == (17, 4)
    known = find_documents(ids)
    assert known.offsets.tolist() == [0, 2, 5, 6, 7, 9, *[10] * 59]
    assert known.sizes.tolist() == [17, 4]


@pytest.mark.parametrize("block", [1, 3, 8, 100])
def test_bounds_of_blocks_cover_them(block):
    ids = torch.tensor([[0] * 7 + [1] + [2] * 4, [0] * 3 + [1] * 8 + [2]])
    blocks = block_ids(12, block=block, document_ids=ids, device=ids.device)
    assert document_bounds(ids).blocks(block, ids.numel()).covers(document_bounds(blocks))


def test_bounds_that_are_too_small_cover_nothing():
    assert DocumentBounds(5, 7).covers(DocumentBounds(5, 7))
    assert not DocumentBounds(4, 7).covers(DocumentBounds(5, 7))
    assert not DocumentBounds(5, 6).covers(DocumentBounds(5, 7))
