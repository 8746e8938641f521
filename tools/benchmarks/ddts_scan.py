"""Rodimus' path from the projection to the scan's output: convolution, q, k and gates, input gate, scan of one head."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.gates.ddts_gates import ddts_gates
from megalin.ops.gates.low_rank_gate import low_rank_gate, low_rank_gate_reference
from megalin.ops.scans.fixed_decay import decay_scan_flops
from megalin.ops.scans.short_conv import short_conv, short_conv_reference
from megalin.ops.scans.vector_decay import vector_decay_scan, vector_decay_scan_reference

BATCH, LENGTH, WIDTH, KEY, RANK, TAPS, CHECKED, CHUNK = 4, 8192, 4096, 64, 32, 4, 600, 64


class Ops(NamedTuple):
    """The ops in which ours and the reference differ."""

    conv: BenchmarkFunction
    gate: BenchmarkFunction
    scan: BenchmarkFunction


def cases() -> Iterator[BenchmarkCase]:
    """Rodimus-1.3B: 32,768 tokens of 4096 channels in bf16, 64 keys, an input gate of rank 32."""

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device="cuda")).bfloat16()

    weights = {
        "conv_weight": draw(WIDTH, TAPS, scale=0.5),
        "conv_bias": draw(WIDTH, scale=0.1),
        "four": draw(4 * KEY, WIDTH, scale=WIDTH**-0.5),
        "gate_bias": torch.randn(2 * KEY, device="cuda") - 1.0,
        "down": draw(RANK, WIDTH, scale=WIDTH**-0.5),
        "up": draw(WIDTH, RANK, scale=RANK**-0.5),
        "up_bias": draw(WIDTH, scale=0.1),
    }
    x = draw(BATCH, LENGTH, WIDTH)
    tokens, small = BATCH * LENGTH, 2 * BATCH * LENGTH * WIDTH * (4 * KEY + 2 * RANK)
    sizes = {"num_heads": 1, "key_dim": KEY, "value_dim": WIDTH, "chunk_size": CHUNK}
    flops = small + tokens * decay_scan_flops(LENGTH, **sizes)
    ours = _path(Ops(short_conv, low_rank_gate, vector_decay_scan))
    yield BenchmarkCase(
        op="ddts_scan",
        shape=f"Rodimus B{BATCH} T{LENGTH} bf16",
        inputs={"x": x} | weights,
        checked={"x": x[:1, :CHECKED]} | weights,
        reference=_path(Ops(short_conv_reference, low_rank_gate_reference, vector_decay_scan_reference)),
        # Compiled, as blocks of a model are.
        ours={"auto": torch.compile(ours, fullgraph=True, dynamic=False), "eager": ours},
        baselines=_baselines(),
        bytes=BenchmarkWork(2 * x.nbytes, 3 * x.nbytes),
        flops=BenchmarkWork(flops, 2 * flops),
        compiled=False,
    )


def _path(ops: Ops) -> BenchmarkFunction:
    def run(
        x: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor,
        four: Tensor,
        gate_bias: Tensor,
        down: Tensor,
        up: Tensor,
        up_bias: Tensor,
    ) -> list[Tensor]:
        wide = compute_dtype(x)
        mixed = ops.conv(x, conv_weight, conv_bias).output
        q, k, gates = functional.linear(mixed, four).to(wide).split([KEY, KEY, 2 * KEY], dim=-1)
        strength, temperature = (gates + gate_bias.to(wide)).chunk(2, dim=-1)
        selected = ddts_gates(strength, temperature, k)
        v = ops.gate(x, functional.linear(x, down), up, up_bias)
        q, k, v, log_decay = (y[:, :, None] for y in (q, selected.key, v, selected.log_decay))  # one head
        return [ops.scan(q, k, v, log_decay, scale=KEY**-0.5, chunk_size=CHUNK).output]

    return run


def _baselines() -> dict[str, BenchmarkFunction]:
    """The same path through fla's ops, in the dtypes of its Rodimus layer."""
    if importlib.util.find_spec("fla") is None:
        return {}
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.ops.gla import chunk_gla

    def baseline(
        x: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor,
        four: Tensor,
        gate_bias: Tensor,
        down: Tensor,
        up: Tensor,
        up_bias: Tensor,
    ) -> list[Tensor]:
        mixed = causal_conv1d(x, conv_weight, conv_bias, activation="silu")[0]
        q, k, strength, temperature = (functional.linear(mixed, w) for w in four.chunk(4))
        v = torch.sigmoid(functional.linear(functional.linear(x, down), up, up_bias)) * x
        strength, temperature = (y + b for y, b in zip((strength, temperature), gate_bias.chunk(2), strict=True))
        strength, temperature = functional.softplus(strength), torch.sigmoid(temperature)
        k = functional.normalize(k.float(), dim=-1, eps=1e-12) * strength**temperature
        q, k, v, g = (y.to(x.dtype)[:, :, None] for y in (q, k, v, -strength * temperature))
        return [chunk_gla(q, k, v, g, state_v_first=True)[0]]

    return {"fla chunk_gla": baseline}
