"""Registration of a torch.library op together with its fake, which computes shapes and dtypes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


def custom_op(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Registers the decorated function as torch.ops.megalin.<name>; it changes none of its arguments.

    The function's annotations are the op's schema. No output may be an argument or a view of one.

    Args:
        fake: takes the op's positional arguments and returns empty tensors of the outputs' shapes and dtypes; it names
            the arguments that it reads, and takes the others as `*_`.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        op = torch.library.custom_op(f"megalin::{name}", function, mutates_args=())
        op.register_fake(fake)
        return op

    return register


def contiguous(x: Tensor | None) -> Tensor | None:
    """An operand, copied unless it is contiguous; None for an omitted one."""
    return None if x is None else x.contiguous()
