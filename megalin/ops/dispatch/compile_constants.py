"""Functions whose result torch.compile takes as a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def assume_constant_result(function: FunctionT) -> FunctionT:
    """Marks `function` as `torch.compiler.assume_constant_result` does: torch.compile calls it once, while tracing.

    Torch's own imports torch._dynamo, which would add a second to the start of programs that compile nothing.
    """
    cast(Any, function)._dynamo_marked_constant = True
    return function
