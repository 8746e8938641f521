"""Launches of Triton kernels as text: types and alignment of the arguments, constants and compiler options."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, KernelParam, create_function_from_signature

PREFIX = "megalin._triton."
CHIPS = (80, 89, 90, 100, 120)
"""Compute capabilities that the kernels are compiled for, times ten."""
OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "launch_pdl": False}
"""Compiler options that launches set, with their defaults."""


class KernelLaunch(NamedTuple):
    """A specialisation of a kernel: one compilation for each chip."""

    kernel: str
    """Module below csrc/triton, and function."""
    text: str
    """`argument=value`, one a kernel argument in its order, then the options that differ from OPTIONS.

    The value of a constant is its repr, that of a dtype its name; of another argument it is Triton's name of the type,
    followed by /16 where the pointer or integer is a multiple of 16.
    """

    def without_hints(self) -> KernelLaunch:
        """The launch without what Triton knows of its integers: multiples of 16, and ones, which are constants."""
        return KernelLaunch(self.kernel, re.sub(r"(\b[a-z]\w*)=(1|i32|i64)(/16)?(?= |$)", r"\1=#", self.text))

    def form(self) -> KernelLaunch:
        """The launch without sizes and alignment: launches of a form run the same branches on the same types."""
        text = self.without_hints().text.replace("/16", "")
        return KernelLaunch(self.kernel, re.sub(r"(?<=[=,\[])\d+\b", "#", text))


def launch_of(kernel: str, types: Mapping[str, str], constants: Mapping[str, object], aligned: set[str],
              options: Mapping[str, object]) -> KernelLaunch:  # fmt: skip
    """KernelLaunch from Triton's own description; `types` names every argument in order, constants as "constexpr"."""
    arguments = [
        f"{name}={_literal(constants.get(name))}"
        if kind == "constexpr"
        else f"{name}={kind.replace(' ', '')}{'/16' if name in aligned else ''}"
        for name, kind in types.items()
    ]
    chosen = [f"{name}={options[name]}" for name, default in OPTIONS.items() if options.get(name, default) != default]
    return KernelLaunch(kernel.removeprefix(PREFIX), " ".join([*arguments, *chosen]))


def launch_of_call(kernel: Any, arguments: tuple[object, ...], keywords: Mapping[str, object]) -> KernelLaunch:
    """KernelLaunch of a call `kernel[grid](*arguments, **keywords)`, of a compiled or an interpreted kernel."""
    bound, specialization, options = _binder(kernel)(*arguments, **keywords)
    types = {name: kind for name, (kind, _) in zip(bound, specialization, strict=True)}
    aligned = {name for name, (kind, hint) in zip(bound, specialization, strict=True) if hint == "D"}
    return launch_of(f"{kernel.fn.__module__}.{kernel.fn.__name__}", types, bound, aligned, options)


@functools.cache
def _binder(kernel: Any) -> Any:
    """Triton's function from the arguments of a call to types and alignment, which the interpreter does not use."""
    signature = inspect.signature(kernel.fn)
    if isinstance(kernel, JITFunction):
        parameters = kernel.params
    else:
        fixed = kernel.kwargs.get("do_not_specialize") or ()
        parameters = [
            KernelParam(index, parameter, index in fixed or parameter.name in fixed, False)
            for index, parameter in enumerate(signature.parameters.values())
        ]
    return create_function_from_signature(signature, parameters, make_backend(GPUTarget("cuda", 90, 32)))


def _literal(value: object) -> str:
    value = getattr(value, "value", value)  # tl.constexpr
    return str(value) if hasattr(value, "primitive_bitwidth") else repr(value)


def kernel_of(launch: KernelLaunch) -> Any:
    """Function of csrc/triton that a launch names."""
    module, _, name = launch.kernel.rpartition(".")
    return getattr(importlib.import_module(PREFIX + module), name)
