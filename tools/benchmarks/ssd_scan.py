"""Mamba-2's path from the convolved tensors to the scan's output: step sizes, decays, weighted values and the scan."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.gates.scaled_heads import scaled_heads, scaled_heads_reference
from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_scan_flops, scalar_decay_scan_reference

BATCH, LENGTH, HEADS, KEY, VALUE, CHECKED, CHUNK, BASELINE_CHUNK = 4, 8192, 64, 128, 64, 600, 64, 256


def cases() -> Iterator[BenchmarkCase]:
    """The 1B model: 64 heads of 64 values that share one head of 128 keys, 32,768 tokens in bf16."""
    rows = {
        "x": torch.randn(BATCH, LENGTH, HEADS, VALUE, device="cuda", dtype=torch.bfloat16),
        "steps": torch.randn(BATCH, LENGTH, HEADS, device="cuda", dtype=torch.bfloat16),
        "b": torch.randn(BATCH, LENGTH, 1, KEY, device="cuda", dtype=torch.bfloat16),
        "c": torch.randn(BATCH, LENGTH, 1, KEY, device="cuda", dtype=torch.bfloat16),
    }
    # Steps of 0.001 to 0.1 and rates of 1 to 16, the model's initial values.
    heads = {
        "bias": torch.linspace(-6.9, -2.3, HEADS, device="cuda", dtype=torch.bfloat16),
        "log_rates": torch.linspace(1, 16, HEADS, device="cuda").log(),
    }
    sizes = {"num_heads": HEADS, "num_key_heads": 1, "key_dim": KEY, "value_dim": VALUE, "chunk_size": CHUNK}
    flops = BATCH * LENGTH * scalar_decay_scan_flops(LENGTH, **sizes)
    read, written = sum(tensor.nbytes for tensor in rows.values()), rows["x"].nbytes
    ours = _path(scaled_heads, scalar_decay_scan)
    yield BenchmarkCase(
        op="ssd_scan",
        shape=f"Mamba-2 B{BATCH} T{LENGTH} bf16",
        inputs=rows | heads,
        checked={name: tensor[:1, :CHECKED] for name, tensor in rows.items()} | heads,
        reference=_path(scaled_heads_reference, scalar_decay_scan_reference),
        # Compiled, as blocks of a model are.
        ours={"auto": torch.compile(ours, fullgraph=True, dynamic=False), "eager": ours},
        baselines=_baselines(),
        bytes=BenchmarkWork(read + written, 2 * read + written),
        flops=BenchmarkWork(flops, 2 * flops),
        compiled=False,
    )


def _path(scaled: BenchmarkFunction, scan: BenchmarkFunction) -> BenchmarkFunction:
    def run(x: Tensor, steps: Tensor, b: Tensor, c: Tensor, bias: Tensor, log_rates: Tensor) -> list[Tensor]:
        wide = compute_dtype(x)
        sizes = functional.softplus(steps.to(wide) + bias.to(wide))
        log_decay = -torch.exp(log_rates.to(wide)) * sizes
        return [scan(c, b, scaled(x, sizes), log_decay, chunk_size=CHUNK).output]

    return run


def _baselines() -> dict[str, BenchmarkFunction]:
    """The Triton implementation by Mamba-2's authors with its own chunk size; it needs none of their CUDA packages."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return {}
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    # Our op leaves D x to the following norm; a D of zero keeps the kernel configurations of a model with D.
    skip = torch.zeros(HEADS, device="cuda", dtype=torch.bfloat16)

    def baseline(x: Tensor, steps: Tensor, b: Tensor, c: Tensor, bias: Tensor, log_rates: Tensor) -> list[Tensor]:
        rates = -torch.exp(log_rates)
        return [mamba_chunk_scan_combined(x, steps, rates, b, c, BASELINE_CHUNK, skip, dt_bias=bias, dt_softplus=True)]

    return {"mamba_ssm chunk_scan": baseline}
