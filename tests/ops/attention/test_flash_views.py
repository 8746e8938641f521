"""Flash attention of tensors that are views of others."""

import pytest
import torch

from megalin.ops.attention import flash
from megalin.ops.attention.softmax import softmax_attention, visible_tokens
from megalin.ops.documents import find_documents
from tests.numerics import outputs_and_gradients
from tests.ops.attention.test_flash import attend, attend_backward


def test_a_strided_last_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels refuse it; every second channel of a projection is such a tensor."""

    def checked(function):
        def call(*tensors):
            assert all(x.stride(-1) == 1 for x in tensors[:-2]), "the last dimension is not contiguous"
            return function(*tensors)

        return call

    monkeypatch.setattr(flash, "_attend", checked(attend))
    monkeypatch.setattr(flash, "_attend_backward", checked(attend_backward))
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    inputs = {name: torch.randn(2, 6, 2, 16, dtype=torch.float64) for name in "qkv"}

    def packed(**wide):
        views = (x[..., ::2] for x in wide.values())
        return [flash.flash_attention(*views, documents=find_documents(ids), kernel="torch")]

    def masked(**wide):
        return [softmax_attention(*(x[..., ::2] for x in wide.values()), visible=visible_tokens(ids))]

    found, expected = (outputs_and_gradients(function, inputs) for function in (packed, masked))
    torch.testing.assert_close(found, expected)
