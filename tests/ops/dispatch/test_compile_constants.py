"""The mark of a function whose result torch.compile takes as a constant."""

from __future__ import annotations

import torch

from megalin.ops.dispatch.compile_constants import assume_constant_result


def test_mark_is_that_of_torch():
    def ours() -> None: ...

    def torchs() -> None: ...

    marked = vars(torch.compiler.assume_constant_result(torchs))
    assert marked
    assert vars(assume_constant_result(ours)) == marked
