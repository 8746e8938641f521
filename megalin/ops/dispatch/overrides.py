"""Fused forms of methods, taken only where they ignore no override and no forward hook.

A fused form computes the same as other methods of its class without calling them, so it would ignore a subclass that
overrides one of those. `bypasses` declares them at the fused form, `ignored_override` finds such an override.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from torch import nn

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


class Bypassed(NamedTuple):
    """Code that a fused form replaces."""

    methods: tuple[str, ...]
    """Methods of its class; with `forward`, the module's hooks too."""
    modules: dict[str, type[nn.Module]]
    """Sub-modules whose calls it replaces, by attribute, and their classes."""


def bypasses(*methods: str, **modules: type[nn.Module]) -> Callable[[FunctionT], FunctionT]:
    """Declares the code that the decorated method replaces (`Bypassed`)."""

    def declare(function: FunctionT) -> FunctionT:
        function.bypassed = Bypassed(methods, modules)  # type: ignore[attr-defined]
        return function

    return declare


def ignored_override(module: nn.Module, method: str) -> str:
    """The override that `method` of the module would ignore, for an error or a log; empty without one.

    An override is a bypassed method of a subclass of the class that defines `method`, or one set on the module itself;
    a forward hook, where `forward` is bypassed; a bypassed sub-module that is not `unchanged`. The class that defines
    `method` answers for its own methods. What the methods of its base classes bypass, `method` bypasses too.
    """
    owner = next(cls for cls in type(module).__mro__ if method in vars(cls))
    for bypassed in _declared(owner, method):
        for name in bypassed.methods:
            if name in vars(module) or getattr(type(module), name) is not getattr(owner, name):
                return f"{type(module).__name__}.{name}"
            if name == "forward" and has_hooks(module):
                return f"a forward hook of {type(module).__name__}"
        for attribute, cls in bypassed.modules.items():
            child = getattr(module, attribute, None)
            if child is not None and not unchanged(child, cls):
                return f"{type(module).__name__}.{attribute}"
    return ""


def unchanged(module: nn.Module, cls: type[nn.Module]) -> bool:
    """True where a call of the module runs the forward of `cls` and nothing else."""
    return type(module) is cls and "forward" not in module.__dict__ and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """True for a module with hooks of its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _declared(owner: type, method: str) -> Iterator[Bypassed]:
    """The code that `method` of the class and of its bases bypasses."""
    for cls in owner.__mro__:
        bypassed = getattr(vars(cls).get(method), "bypassed", None)
        if bypassed is not None:
            yield bypassed
