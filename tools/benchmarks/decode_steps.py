"""Decoding step of every scan from an fp32 state: bound by the state, which is read and written once."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork, Inputs
from megalin.ops.scans.fixed_decay_step import decay_step, decay_step_reference
from megalin.ops.scans.vector_decay_step import vector_decay_step, vector_decay_step_reference

STATE_BYTES, CHECKED = 2**28, 3
"""Size of all states together, far above the cache."""


def cases() -> Iterator[BenchmarkCase]:
    """q, k and v in bf16 (Rodimus' q and k in fp32), state and log decays in fp32, as in the models."""
    yield _fixed("TransNormerLLM", 16, 128, 128, decay=True)
    yield _fixed("cosFormer2", 12, 256, 128, decay=False)
    yield _selective("HGRN2", 12, 128, 128, key_heads=12, decays=128)
    yield _selective("Rodimus", 1, 64, 4096, key_heads=1, decays=64, dtype=torch.float32)
    yield _selective("Mamba-2", 64, 128, 64, key_heads=1, decays=1)


def _operands(heads: int, key: int, value: int, *, key_heads: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    rows = STATE_BYTES // (4 * heads * key * value)
    draw = functools.partial(torch.randn, device="cuda")
    return {
        "v": draw(rows, heads, value, dtype=torch.bfloat16),
        "q": draw(rows, key_heads, key, dtype=dtype),
        "k": draw(rows, key_heads, key, dtype=dtype),
        "state": draw(rows, heads, key, value),
    }


def _fixed(model: str, heads: int, key: int, value: int, *, decay: bool) -> BenchmarkCase:
    inputs = _operands(heads, key, value, key_heads=heads)
    slopes = torch.exp2(-torch.arange(1, heads + 1, device="cuda") * 8.0 / heads) if decay else None

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(v: Tensor, q: Tensor, k: Tensor, state: Tensor) -> list[Tensor]:
            return list(op(q, k, v, slopes, state))

        return run

    baselines: dict[str, BenchmarkFunction] = {}
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        def baseline(v: Tensor, q: Tensor, k: Tensor, state: Tensor) -> list[Tensor]:
            options = {"g_gamma": None if slopes is None else -slopes, "scale": 1.0, "output_final_state": True}
            q, k, v = (x[:, None] for x in (q, k, v))
            output, state = fused_recurrent_simple_gla(q, k, v, initial_state=state, **options)
            return [output[:, 0], state]

        baselines["fla fused_recurrent"] = baseline
    return _case("decay_step", model, inputs, apply(decay_step_reference), apply(decay_step), baselines)


def _selective(
    model: str,
    heads: int,
    key: int,
    value: int,
    *,
    key_heads: int,
    decays: int,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchmarkCase:
    inputs = _operands(heads, key, value, key_heads=key_heads, dtype=dtype)
    inputs["log_decay"] = -torch.rand(len(inputs["v"]), heads, decays, device="cuda")

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(v: Tensor, q: Tensor, k: Tensor, state: Tensor, log_decay: Tensor) -> list[Tensor]:
            return list(op(q, k, v, log_decay, state))

        return run

    baselines: dict[str, BenchmarkFunction] = {}
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.gla import fused_recurrent_gla

        def baseline(v: Tensor, q: Tensor, k: Tensor, state: Tensor, log_decay: Tensor) -> list[Tensor]:
            q, k, g = (x.expand(-1, heads, key)[:, None] for x in (q, k, log_decay))
            options = {"gk": g, "scale": 1.0, "output_final_state": True}
            output, state = fused_recurrent_gla(q, k, v[:, None], initial_state=state, **options)
            return [output[:, 0], state]

        baselines["fla fused_recurrent"] = baseline
    ours, reference = apply(vector_decay_step), apply(vector_decay_step_reference)
    return _case("vector_decay_step", model, inputs, reference, ours, baselines)


def _case(
    op: str,
    model: str,
    inputs: Inputs,
    reference: BenchmarkFunction,
    ours: BenchmarkFunction,
    baselines: dict[str, BenchmarkFunction],
) -> BenchmarkCase:
    rows, heads, key, value = inputs["state"].shape
    moved = sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes + inputs["state"].nbytes
    return BenchmarkCase(
        op=op,
        shape=f"{model} {rows}x{heads}x{key}x{value}",
        inputs=inputs,
        checked={name: x[:CHECKED] for name, x in inputs.items()},
        reference=reference,
        ours={"auto": ours},
        baselines=baselines,
        bytes=BenchmarkWork(moved, 0),
        flops=BenchmarkWork(4 * inputs["state"].numel(), 0),
        compiled=False,
        differentiable=False,
    )
