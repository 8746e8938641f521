"""Choice of each op's backend (reference, Triton, CUDA or Apex): self-tested at first use, overridable, recorded.

An op registers its compiled backends, fastest first, with a self-test. `choose` picks one at every call: the `backend`
argument of the op, else MEGALIN_KERNELS, else the first that runs on this device and passes its self-test. That runs at
the widths and dtypes of the call, once a process; passes are kept on the disk (self_test_cache.py). `used` lists the
choices; a run writes them to kernels.json, and compares the results of self-tests over its ranks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, get_args

import torch

from megalin.config import suggest
from megalin.errors import KernelError
from megalin.ops.dispatch import self_test_cache
from megalin.ops.dispatch.compile_constants import assume_constant_result
from megalin.ops.dispatch.operands import Case

Backend = Literal["auto", "reference", "triton", "cuda", "apex"]
"""auto: the first backend in the op's order that runs here and passes its self-test, else the reference. The order is
by measured speed; NVIDIA Apex, which was not measured, precedes torch's own. triton, cuda, apex: this backend in every
op that has it, or an error with the reason; other ops choose as auto does. reference: plain PyTorch."""

Compiled = Literal["triton", "cuda", "apex"]
"""Kernels of csrc/, and NVIDIA Apex, if installed."""

BACKENDS: tuple[Backend, ...] = get_args(Backend)
VARIABLE = "MEGALIN_KERNELS"

_log = logging.getLogger(__name__)


SelfTest = Callable[[Compiled, str, Mapping[str, Any]], str]
"""(backend, device type, the items of a Case) -> the error of that backend at the widths and dtypes of the case, on few
tokens (values, gradients, bitwise determinism); empty where it passes. Calls the backend directly: the op would choose
again. It launches what the call will launch, so that a kernel is compiled once for both."""


class Kernel(NamedTuple):
    """Compiled backends of an op."""

    order: tuple[Compiled, ...]
    """Fastest first, as measured (docs/benchmarks/)."""
    self_test: SelfTest


class Choice(NamedTuple):
    """Backend of an op on a device, and the reason."""

    backend: str
    reason: str
    """Reasons against the backends before it in the order, or the setting that requested it; empty for the first."""


_kernels: dict[str, Kernel] = {}
_used: dict[str, Choice] = {}
_decided: dict[str, dict[Case, Choice]] = {}
_tested: dict[tuple[str, Compiled, Case], str] = {}
_assumed: ContextVar[Literal["none", "eager", "compiled"]] = ContextVar("assume_kernels", default="none")


def register(op: str, order: tuple[Compiled, ...], self_test: SelfTest) -> None:
    """Registers the compiled backends of an op, fastest first; called once, by the op's module."""
    assert op not in _kernels, op
    _kernels[op] = Kernel(order, self_test)


@assume_constant_result
def choose(
    op: str,
    backend: Backend,
    device: str,
    unsupported: str = "",
    limits: Mapping[Compiled, str] | None = None,
    case: Case = (),
) -> str:
    """Chooses the backend of one call of an op and records it for `used`; a constant to torch.compile.

    1. An explicit `backend` wins; "auto" is replaced by the environment's choice (`requested`).
    2. "reference" is taken without a check. A compiled backend of this op is taken if it supports the arguments and
       passes its self-test, else KernelError; an op without that backend goes on as "auto".
    3. "auto" takes the first compiled backend in the op's order that supports the arguments, runs on `device` and
       passes its self-test (`decide`), else the reference.

    Args:
        op: a registered name.
        backend: as `Backend`.
        device: type of the tensors' device.
        unsupported: why no compiled backend takes these arguments (dtype, size); empty where they do.
        limits: the same for single backends; auto goes on to the next in the order.
        case: properties of the call that select the kernels' code, for the self-test: no batch and no length.

    Returns:
        "reference", "triton", "cuda" or "apex".

    Raises:
        KernelError: the requested backend exists for this op but cannot run here; or MEGALIN_KERNELS is invalid.
    """
    if kernels_assumed():
        own = [name for name in _kernels[op].order if name != "apex"]  # few machines have Apex
        fit = [name for name in own if not (unsupported or (limits or {}).get(name))]
        return fit[0] if fit else "reference"
    choice = _choose(op, backend, device, unsupported, limits or {}, case)
    _used[op] = choice
    return choice.backend


def _choose(
    op: str, backend: Backend, device: str, unsupported: str, limits: Mapping[Compiled, str], case: Case
) -> Choice:
    reason = ""
    if backend == "auto":
        backend, reason = requested(op), VARIABLE
    if backend == "reference":
        return Choice("reference", reason)
    if backend == "auto" or backend not in _kernels[op].order:
        if unsupported:
            return Choice("reference", f"no kernel takes {unsupported}")
        return decide(op, device, tuple((name, limit) for name, limit in limits.items() if limit), case)
    if limit := unsupported or limits.get(backend, ""):
        raise KernelError(f'{op}: the {backend} kernel does not take {limit}; use backend "auto"')
    if problem := _unavailable_reason(op, backend, device, case):
        raise KernelError(f'{op}: the {backend} kernel cannot run: {problem}; use backend "auto" or "reference"')
    return Choice(backend, reason)


def requested(op: str) -> Backend:
    """Backend that MEGALIN_KERNELS sets for an op called with "auto"; "auto" where it sets none.

    The variable holds comma-separated entries: a backend for all ops, or op=backend for one: "reference", or
    "srmsnorm=cuda,decay_scan=reference". The last entry that applies wins.

    Raises:
        KernelError: an unknown op or backend.
    """
    chosen: Backend = "auto"
    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, equals, value = entry.strip().rpartition("=")
        if equals and name not in _kernels:
            _register_all()  # the op may belong to a module that is not imported yet
        if equals and name not in _kernels:
            raise KernelError(f"{VARIABLE}: {name!r} is not an op with kernels; {suggest(name, sorted(_kernels))}")
        if value not in BACKENDS:
            raise KernelError(f"{VARIABLE}: {value!r} is not a backend; {suggest(value, list(BACKENDS))}")
        if name in ("", op):
            chosen = value
    return chosen


def _register_all() -> None:
    """Imports every module of megalin.ops, so that each op registers; models import only the ones they need."""
    package = importlib.import_module("megalin.ops")
    for module in pkgutil.walk_packages(package.__path__, "megalin.ops."):
        importlib.import_module(module.name)


@functools.cache
def decide(op: str, device: str, limits: tuple[tuple[Compiled, str], ...] = (), case: Case = ()) -> Choice:
    """Backend that "auto" resolves to for an op: tries the order, logs the result, and is cached for the process.

    Off CUDA this is the reference. A backend is rejected if it is not installed, does not support the GPU, has a limit
    in `limits` (as in `choose`) or fails its self-test for `case`; the reasons are logged and returned with the choice.
    Warns where the op has kernels of csrc/ and none runs.
    """
    if device != "cuda":
        return Choice("reference", f"device {device}")
    choice = _decide(op, device, limits, case)
    _decided.setdefault(op, {})[case] = choice
    return choice


def _decide(op: str, device: str, limits: tuple[tuple[Compiled, str], ...], case: Case) -> Choice:
    reasons: list[str] = []
    name = f"{op} {describe(case)}" if case else op
    beyond = {name: f"does not take {limit}" for name, limit in limits}
    for candidate in _kernels[op].order:
        if not (reason := beyond.get(candidate) or _unavailable_reason(op, candidate, device, case)):
            _log.info("%s: %s%s", name, candidate, f" ({'; '.join(reasons)})" if reasons else "")
            return Choice(candidate, "; ".join(reasons))
        reasons.append(f"{candidate}: {reason}")
    if any(candidate != "apex" for candidate in _kernels[op].order):
        _log.warning("%s: no kernel can run here; using the slower PyTorch reference (%s)", name, "; ".join(reasons))
    else:  # most machines have no Apex
        _log.info("%s: reference (%s)", name, "; ".join(reasons))
    return Choice("reference", "; ".join(reasons))


@contextmanager
def assume_kernels(*, compiled: bool = False) -> Iterator[None]:
    """Context manager under which every op takes its first kernel that supports the arguments, without running it.

    As on a GPU where all kernels pass: for tracing meta tensors (shapes, saved activations) on a machine without one.

    Args:
        compiled: as in a block compiled by torch.compile.
    """
    token = _assumed.set("compiled" if compiled else "eager")
    try:
        yield
    finally:
        _assumed.reset(token)


@assume_constant_result
def kernels_assumed() -> bool:
    """Whether `assume_kernels` is active."""
    return _assumed.get() != "none"


@assume_constant_result
def compilation_assumed() -> bool:
    """Whether `assume_kernels` is active for a compiled block."""
    return _assumed.get() == "compiled"


def report_choice(op: str, choice: Choice) -> None:
    """Records in `used` the choice of an op that does not call `choose`, such as softmax attention."""
    if not kernels_assumed():
        _used[op] = choice


def used() -> dict[str, Choice]:
    """Latest choice of every op called so far in this process, by name; a run writes them to kernels.json.

    If "auto" chose differently for some widths or dtypes of an op, each has one more entry, with these in its name.
    """
    found = dict(_used)
    for op, choices in _decided.items():
        if len({choice.backend for choice in choices.values()}) > 1:
            found |= {f"{op} {describe(case)}": choice for case, choice in choices.items()}
    return dict(sorted(found.items()))


def self_tests() -> dict[str, str]:
    """Results of the self-tests of this process, by op, backend and case: the error, empty of a pass."""
    return {f"{op}={backend} {describe(case)}".strip(): error for (op, backend, case), error in _tested.items()}


def describe(case: Case) -> str:
    """The items of a case as text."""
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in case if value is not None)


def _unavailable_reason(op: str, backend: Compiled, device: str, case: Case) -> str:
    """Reason that a compiled backend cannot run on this device type, found once for each case; empty where it can."""
    if reason := _missing(backend, device):
        return reason
    if backend == "triton" and device == "cpu":  # the interpreter: no compiler is at work
        return ""
    key = (op, backend, case)
    if key not in _tested:
        _tested[key] = "" if self_test_cache.has_passed(*key) else _run_self_test(op, backend, device, case)
    return _tested[key]


def _run_self_test(op: str, backend: Compiled, device: str, case: Case) -> str:
    """Error of a backend in its self-test, which catches bugs of a compiler that give wrong values or gradients without
    an error; empty of a pass, which is kept on the disk."""
    own = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
    try:
        with torch.enable_grad(), own:  # the caller's hooks would recompute or offload the tensors of this backward
            error = _kernels[op].self_test(backend, device, dict(case))
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except _errors() as raised:
        error = f"self-test: {type(raised).__name__}: {raised}"
    if not error:
        self_test_cache.keep_pass(op, backend, case)
    return error


def _errors() -> tuple[type[Exception], ...]:
    """Exceptions raised by a compiler, a launch, or a library built for another version of torch."""
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError, OSError, ImportError)
    from triton.errors import TritonError

    return (RuntimeError, OSError, ImportError, TritonError)


def _missing(backend: Compiled, device: str) -> str:
    module = {"triton": "triton", "cuda": "megalin._C", "apex": "apex"}[backend]
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        return "" if capability >= (8, 0) else f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return f"the tensors are on {device}"
