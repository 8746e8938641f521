"""Draws by the inverse of the distribution function: the kernel in the interpreter, and both against fp64 sums."""

from __future__ import annotations

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.decoding.sampling import draw_tokens


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_draw(backend, dtype):
    logits = torch.randn(7, 2500, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, 2400:] = float("-inf")
    logits[3, :1300] = float("-inf")  # a whole block of the kernel
    uniform = torch.tensor([0.0, 0.1, 0.5, 0.0, 0.9, 1.0 - 2.0**-53, 0.33], dtype=torch.float64)
    cumulative = (logits.double() / 0.6).softmax(-1).cumsum(-1)
    found = draw_tokens(logits, uniform, temperature=0.6, backend=backend)
    for row, (token, u) in enumerate(zip(found.tolist(), uniform.tolist(), strict=True)):
        assert logits[row, token] > float("-inf")
        assert u < cumulative[row, token] + 1e-6
        assert token == 0 or cumulative[row, token - 1] <= u + 1e-6


def test_fp64_is_refused_by_the_kernel():
    with pytest.raises(KernelError, match=r"draw_tokens: the triton kernel does not take dtype torch\.float64"):
        draw_tokens(torch.zeros(1, 8).double(), torch.zeros(1).double(), temperature=1.0, backend="triton")
