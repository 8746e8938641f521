"""Registration of a torch.library op together with its fake, which computes shapes and dtypes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalin.errors import KernelError


def custom_op(
    name: str, fake: Callable[..., Any], *, mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as torch.ops.megalin.<name>, and returns that op.

    The function's annotations are the op's schema. No output may be an argument or a view of one: tests check this with
    `torch.library.opcheck`, where `torch.library.custom_op` checks it in every call.

    An op whose gradient is asked for needs `torch.library.register_autograd`, or a caller that is an autograd.Function.
    Without either it raises KernelError; so do second derivatives, which no op has.

    Args:
        fake: takes the op's positional arguments and returns empty tensors of the outputs' shapes and dtypes; it names
            the arguments that it reads, and takes the others as `*_`.
        mutates: names of the arguments that the op writes; by default it changes none.
    """
    qualified = f"megalin::{name}"

    def register(function: Callable[..., Any]) -> Any:
        def kernel(*arguments: Any) -> Any:
            # Autograd runs forwards and backwards that have a formula without gradients; torch only warns of others.
            if torch.is_grad_enabled() and any(map(_requires_grad, arguments)):
                raise KernelError(f'{qualified} has no derivative; use backend "reference" for second derivatives')
            return function(*arguments)

        schema = torch.library.infer_schema(function, mutates_args=mutates)
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "CompositeExplicitAutograd", kernel)
        torch.library.register_fake(qualified, fake)
        return getattr(torch.ops.megalin, name).default

    return register


def _requires_grad(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return any(map(_requires_grad, argument))
    return isinstance(argument, Tensor) and argument.requires_grad


def contiguous(x: Tensor | None) -> Tensor | None:
    """An operand, copied unless it is contiguous; None for an omitted one."""
    return None if x is None else x.contiguous()
