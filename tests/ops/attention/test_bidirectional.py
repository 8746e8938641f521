"""Bidirectional attention against its definition: values, gradients, padding, documents, and rejected operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalin.errors import OperandError
from megalin.ops.attention.bidirectional import (
    bidirectional_attention,
    bidirectional_attention_reference,
    visible_in_documents,
)
from tests.numerics import assert_close

BATCH, LENGTH, HEADS, WIDTH = 3, 19, 2, 8
PLACES = torch.arange(LENGTH)
DOCUMENTS = torch.stack([PLACES // 7, (PLACES >= 1).long() + (PLACES >= 18), torch.zeros_like(PLACES)])
VALID = torch.tensor([[13], [19], [0]]) > PLACES
"""The last document of the first sequence is padding in part, the third sequence altogether."""


def operands(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, LENGTH, HEADS, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
@pytest.mark.parametrize("valid", [None, VALID], ids=["", "padding"])
def test_values_and_gradients_equal_the_definition(documents, valid, dtype, bound):
    weight = torch.linspace(-1.0, 1.0, BATCH * LENGTH * HEADS * WIDTH, dtype=torch.float64)
    results = []
    for name, inputs in (("op", operands(dtype)), ("definition", operands(torch.float64))):
        if name == "op":
            y = bidirectional_attention(*inputs, visible=visible_in_documents(documents, valid, PLACES))
        else:
            y = bidirectional_attention_reference(*inputs, document_ids=documents, valid=valid)
        (y * weight.view_as(y)).sum().backward()
        results.append({"y": y.detach(), **{f"d{n}": x.grad for n, x in zip("qkv", inputs, strict=True)}})
    assert_close({name: tensor.double() for name, tensor in results[0].items()}, results[1], bound)


def test_queries_of_some_tokens_have_the_rows_of_all():
    q, k, v = operands(torch.float64)
    full = bidirectional_attention(q, k, v, visible=visible_in_documents(DOCUMENTS, VALID, PLACES))
    some = PLACES[5:12]
    part = bidirectional_attention(q[:, some], k, v, visible=visible_in_documents(DOCUMENTS, VALID, some))
    torch.testing.assert_close(part, full[:, some], rtol=1e-13, atol=1e-13)


def test_operands_that_do_not_fit_are_refused():
    q, k, v = operands(torch.float64)
    with pytest.raises(OperandError, match="bidirectional_attention: v has shape"):
        bidirectional_attention(q, k, v[:, 1:])
    with pytest.raises(OperandError, match="bidirectional_attention: visible has shape"):
        bidirectional_attention(q, k, v, visible=VALID[:, None, 1:])
