"""Cases of self-tests, at the widths of presets and at narrow ones, and kernels of which a tile is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import InterpretedFunction

from megalin.ops.dispatch import backend as backends

Items = dict[str, Any]

BF16, FP32, DOCUMENTS = torch.bfloat16, torch.float32, torch.int32
NARROW = 16
"""Widths that one tile of every kernel covers."""


def _scan(sizes: Items, inputs: Items) -> Items:
    given = {"initial_state": FP32, "document_ids": DOCUMENTS, "state_gradient": True}
    return {"H": 1, **sizes, **inputs, **given}


def _heads(key: int, value: int, **decays: Any) -> Items:
    return _scan({"K": key, "V": value}, {"q": BF16, "k": BF16, "v": BF16, **decays})


def _gates(key: int, value: int) -> Items:
    return _scan({"K": key, "V": value}, {"q": BF16, "logit": BF16, "v": BF16, "bound": FP32})


def _channels(width: int, states: int) -> Items:
    dtypes = {"q": BF16, "k": BF16, "v": BF16, "step": FP32, "rates": FP32}
    return _scan({"D": width, "N": states}, dtypes)


def _conv(width: int) -> Items:
    dtypes = dict.fromkeys(("x", "weight", "bias"), BF16) | {"state": FP32, "document_ids": DOCUMENTS}
    return {"D": width, "W": 4, **dtypes, "activation": "silu"}


def _projected(width: int) -> Items:
    dtypes = dict.fromkeys(("projection", "weight", "bias"), BF16) | {"document_ids": DOCUMENTS}
    return {"D": width, "W": 4, **dtypes, "readers": 2}


def _tpe(width: int, decays: int) -> Items:
    dtypes = {"x": BF16, "coefficients": FP32, "log_decay": FP32, "state": None, "document_ids": DOCUMENTS}
    return {"D": width, "E": decays, **dtypes}


CASES = {
    "decay_scan": (_heads(128, 96, slopes=FP32), _heads(NARROW, NARROW, slopes=FP32)),
    "vector_decay_scan": (_heads(128, 96, log_decay=FP32), _heads(NARROW, NARROW, log_decay=FP32)),
    "forget_gate_scan": (_gates(128, 96), _gates(NARROW, NARROW)),
    "scalar_decay_scan": (
        _heads(128, 64, log_decay=FP32, key_heads=1),
        _heads(NARROW, NARROW, log_decay=FP32, key_heads=1),
    ),
    "decay_state": (_heads(128, 96, slopes=FP32), _heads(NARROW, NARROW, slopes=FP32)),
    "decay_step": (
        _heads(128, 96, slopes=FP32, state=FP32),
        _heads(NARROW, NARROW, slopes=FP32, state=FP32),
    ),
    "vector_decay_step": (
        _heads(128, 96, log_decay=FP32, state=FP32, key_heads=1, decays=128),
        _heads(NARROW, NARROW, log_decay=FP32, state=FP32, key_heads=1, decays=NARROW),
    ),
    "selective_scan": (_channels(32, 16), _channels(NARROW, 16)),
    "short_conv": (_conv(144), _conv(NARROW)),
    "projected_conv": (_projected(144), _projected(NARROW)),
    "tpe": (_tpe(NARROW, 128), _tpe(NARROW, NARROW)),
}
"""By op, a wide case, of more than one tile as those of presets are, and a narrow one."""
SHARDED = ("decay_scan", "vector_decay_scan", "forget_gate_scan", "scalar_decay_scan", "selective_scan")
CASES |= {f"split_{op}": CASES[op] for op in SHARDED}


def self_test(op: str, items: Items) -> str:
    """Error of the self-test of a Triton kernel in the interpreter."""
    backends._register_all()
    return backends._kernels[op].self_test("triton", "cpu", items)


@contextmanager
def wrong_tile(kernel: str, argument: str, first: int, dim: int = -1, **constants: Any) -> Iterator[None]:
    """Context in which a kernel leaves zeros in a result from index `first` of a dimension on, as one does that skips
    the last tile: only where it is wider, and in launches with these constants."""
    run = InterpretedFunction.run

    def wrong(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        result = run(self, *arguments, grid=grid, warmup=warmup, **keywords)
        if self.fn.__name__ == kernel:
            parameters = inspect.signature(self.fn).parameters
            named = {name: value for name, value in keywords.items() if name in parameters}
            bound = inspect.signature(self.fn).bind_partial(*arguments, **named).arguments
            if bound[argument] is not None and all(bound[name] == value for name, value in constants.items()):
                tensor = getattr(bound[argument], "base", bound[argument])  # of a descriptor
                if tensor.shape[dim] > first:
                    tensor.narrow(dim, first, tensor.shape[dim] - first).zero_()
        return result

    with mock.patch.object(InterpretedFunction, "run", wrong):
        yield
