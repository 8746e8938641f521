"""LayerNorm, alone, of a sum and before a gate: 64 Mi elements at the models' widths, 48 Mi at cosformer2-1b's."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.norms.gated_layer_norm import gated_layer_norm, gated_layer_norm_reference
from megalin.ops.norms.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm, layer_norm_reference

SHAPES = ((65536, 1024), (32768, 1536), (32768, 2048), (16384, 4096), (8192, 8192))
EPS = 1e-5
BACKENDS = ("auto", "triton")


def cases() -> Iterator[BenchmarkCase]:
    """Three cases per width, bf16: a row alone, the sum of two with its norm, and a row with a sigmoid gate."""
    for rows, width in SHAPES:
        x, addend = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight, bias = (torch.rand(width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        vectors = {"weight": weight, "bias": bias}
        yield BenchmarkCase(
            op="layer_norm",
            shape=f"{rows}x{width} bf16",
            inputs={"x": x, **vectors},
            checked={"x": x[:4097], **vectors},
            reference=lambda **inputs: [layer_norm_reference(**inputs, eps=EPS)],
            ours={backend: functools.partial(_alone, backend=backend) for backend in BACKENDS},
            baselines={"F.layer_norm": _torch} | _baselines(),
            bytes=BenchmarkWork(2 * x.nbytes, 3 * x.nbytes),
            flops=BenchmarkWork(0, 0),
        )
        yield BenchmarkCase(
            op="add_layer_norm",
            shape=f"{rows}x{width} bf16",
            inputs={"x": x, "addend": addend, **vectors},
            checked={"x": x[:4097], "addend": addend[:4097], **vectors},
            reference=lambda **inputs: add_layer_norm_reference(**inputs, eps=EPS),
            ours={backend: functools.partial(add_layer_norm, eps=EPS, backend=backend) for backend in BACKENDS},
            baselines=_baselines_of_sum(),
            bytes=BenchmarkWork(4 * x.nbytes, 4 * x.nbytes),
            flops=BenchmarkWork(0, 0),
        )
        options = {"eps": EPS, "gate_activation": "sigmoid"}
        yield BenchmarkCase(
            op="gated_layer_norm",
            shape=f"{rows}x{width} bf16",
            inputs={"x": x, "gate": addend, **vectors},
            checked={"x": x[:4097], "gate": addend[:4097], **vectors},
            reference=functools.partial(_gated, gated_layer_norm_reference, **options),
            ours={
                backend: functools.partial(_gated, gated_layer_norm, **options, backend=backend) for backend in BACKENDS
            },
            baselines={},
            bytes=BenchmarkWork(3 * x.nbytes, 5 * x.nbytes),
            flops=BenchmarkWork(0, 0),
        )


def _alone(x: Tensor, weight: Tensor, bias: Tensor, *, backend: str) -> list[Tensor]:
    return [layer_norm(x, weight, bias, eps=EPS, backend=backend)]


def _gated(function: Callable[..., Tensor], **inputs: Any) -> list[Tensor]:
    return [function(**inputs)]


def _torch(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    return [functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)]


def _baselines() -> dict[str, BenchmarkFunction]:
    baselines: dict[str, BenchmarkFunction] = {}
    if importlib.util.find_spec("fla") is not None:
        from fla.modules.layernorm import layer_norm as fla_layer_norm

        baselines["fla"] = lambda x, weight, bias: [fla_layer_norm(x, weight, bias, eps=EPS)]
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        baselines["Liger"] = lambda x, weight, bias: [LigerLayerNormFunction.apply(x, weight, bias, EPS)]
    return baselines


def _baselines_of_sum() -> dict[str, BenchmarkFunction]:
    if importlib.util.find_spec("fla") is None:
        return {}
    from fla.modules.layernorm import layer_norm as fla_layer_norm

    return {"fla": lambda x, addend, weight, bias: fla_layer_norm(x, weight, bias, addend, EPS, prenorm=True)}
