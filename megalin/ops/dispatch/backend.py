"""Which implementation of an op runs, reference, Triton, CUDA or apex: chosen once, self-tested, told."""

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
from typing import Literal, NamedTuple, get_args

import torch

from megalin.config import suggest
from megalin.errors import KernelError

Backend = Literal["auto", "reference", "triton", "cuda", "apex"]
"""auto: the first of the op's order that runs and passes its self-test: the fastest as measured, and NVIDIA's apex,
which was not, before torch's own. triton, cuda, apex: that one in every op that has it, or an
error that says why not; ops without it choose as auto does. reference: plain PyTorch."""

Compiled = Literal["triton", "cuda", "apex"]
"""Kernels of csrc/, and NVIDIA's apex where it is installed."""

BACKENDS: tuple[Backend, ...] = get_args(Backend)
VARIABLE = "MEGALIN_KERNELS"

_log = logging.getLogger(__name__)


class Kernel(NamedTuple):
    """The compiled implementations of an op."""

    order: tuple[Compiled, ...]
    """Fastest first, as measured (docs/benchmarks/)."""
    self_test: Callable[[Compiled, str], str]
    """(backend, device type) -> what is wrong with that implementation on a small case (values, gradients, the same
    bits twice); empty where nothing is. It calls the implementation itself, not the op, which would ask again."""


class Choice(NamedTuple):
    """What was decided for an op on a device."""

    backend: str
    reason: str
    """Why none before it in the order runs, or who asked for it; empty for the first."""


_kernels: dict[str, Kernel] = {}
_used: dict[str, Choice] = {}
_supposed: ContextVar[bool] = ContextVar("supposed", default=False)


def register(op: str, order: tuple[Compiled, ...], self_test: Callable[[Compiled, str], str]) -> None:
    """Called once by the module of each op that has compiled implementations."""
    assert op not in _kernels, op
    _kernels[op] = Kernel(order, self_test)


@torch.compiler.assume_constant_result
def choose(
    op: str, backend: Backend, device: str, unsupported: str = "", limits: Mapping[Compiled, str] | None = None
) -> str:
    """The implementation that runs: "reference", "triton", "cuda" or "apex". A constant to torch.compile.

    Args:
        op: a registered name.
        backend: as `Backend`.
        device: type of the tensors' device.
        unsupported: why no compiled implementation takes these arguments (dtype, size); empty where they do.
        limits: the same of single implementations; auto goes on to the next in the order.

    Raises:
        KernelError: `backend` names an implementation that the op has but that cannot run here.
    """
    if _supposed.get():
        own = [name for name in _kernels[op].order if name != "apex"]  # which few machines have
        fit = [name for name in own if not (unsupported or (limits or {}).get(name))]
        return fit[0] if fit else "reference"
    choice = _choose(op, backend, device, unsupported, limits or {})
    _used[op] = choice
    return choice.backend


def _choose(op: str, backend: Backend, device: str, unsupported: str, limits: Mapping[Compiled, str]) -> Choice:
    reason = ""
    if backend == "auto":
        backend, reason = requested(op), VARIABLE
    if backend == "reference":
        return Choice("reference", reason)
    if backend == "auto" or backend not in _kernels[op].order:
        if unsupported:
            return Choice("reference", f"no kernel takes {unsupported}")
        return decide(op, device, tuple((name, limit) for name, limit in limits.items() if limit))
    if reason_against := unsupported or limits.get(backend, ""):
        raise KernelError(f'{op}: the {backend} kernel does not take {reason_against}; use backend "auto"')
    if unfit := _unfit(op, backend, device):
        raise KernelError(f'{op}: the {backend} kernel cannot run: {unfit}; use backend "auto" or "reference"')
    return Choice(backend, reason)


def requested(op: str) -> Backend:
    """What the environment asks of an op that is called with "auto".

    MEGALIN_KERNELS names one backend for all ops, or some ops: "reference", or "srmsnorm=cuda,decay_scan=reference".

    Raises:
        KernelError: a name that is no op or no backend.
    """
    chosen: Backend = "auto"
    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, equals, value = entry.strip().rpartition("=")
        if equals and name not in _kernels:
            _register_all()  # an op of other models' mixers
        if equals and name not in _kernels:
            raise KernelError(f"{VARIABLE}: {name!r} is no op with kernels; {suggest(name, sorted(_kernels))}")
        if value not in BACKENDS:
            raise KernelError(f"{VARIABLE}: {value!r} is no backend; {suggest(value, list(BACKENDS))}")
        if name in ("", op):
            chosen = value
    return chosen


def _register_all() -> None:
    """Ops register with their modules, which models import as they need them."""
    package = importlib.import_module("megalin.ops")
    for module in pkgutil.walk_packages(package.__path__, "megalin.ops."):
        importlib.import_module(module.name)


@functools.cache
def decide(op: str, device: str, limits: tuple[tuple[Compiled, str], ...] = ()) -> Choice:
    """What `auto` takes for an op, decided at its first use and logged; `limits` as `choose` has them."""
    if device != "cuda":
        return Choice("reference", f"device {device}")
    reasons: list[str] = []
    beyond = {name: f"does not take {limit}" for name, limit in limits}
    for candidate in _kernels[op].order:
        if not (reason := beyond.get(candidate) or _unfit(op, candidate, device)):
            _log.info("%s: %s%s", op, candidate, f" ({'; '.join(reasons)})" if reasons else "")
            return Choice(candidate, "; ".join(reasons))
        reasons.append(f"{candidate}: {reason}")
    if any(name != "apex" for name in _kernels[op].order):
        _log.warning("%s: no kernel runs here, the slower reference does (%s)", op, "; ".join(reasons))
    else:  # torch's own is what most machines have
        _log.info("%s: reference (%s)", op, "; ".join(reasons))
    return Choice("reference", "; ".join(reasons))


@contextmanager
def assume_kernels() -> Iterator[None]:
    """For the body, every op takes the first kernel of its order that takes the arguments, as on a GPU where all are
    sound: for tensors without values, of which shapes and what is kept are asked, on a machine where none runs."""
    token = _supposed.set(True)
    try:
        yield
    finally:
        _supposed.reset(token)


def report_choice(op: str, choice: Choice) -> None:
    """Adds to `used` what an op decided by itself."""
    if not _supposed.get():
        _used[op] = choice


def used() -> dict[str, Choice]:
    """What ran last in every op that was called so far."""
    return dict(sorted(_used.items()))


@functools.cache
def _unfit(op: str, backend: Compiled, device: str) -> str:
    """Why a compiled implementation cannot run on this kind of device; empty where it can."""
    if reason := _missing(backend, device):
        return reason
    # A compiler's known and unknown bugs show here: wrong gradients come without an error.
    own = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
    try:
        with torch.enable_grad(), own:  # those around the caller recompute, or move, what its backward needs
            return _kernels[op].self_test(backend, device)
    except _errors() as error:
        return f"self-test: {type(error).__name__}: {error}"


def _errors() -> tuple[type[Exception], ...]:
    """What a compiler, a launch, or a library of another torch's build raises."""
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
