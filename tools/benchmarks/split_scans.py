"""Two-phase scans of a rank's shard of 32,768 tokens, against a separately computed state and an unsharded scan.

Simulates one rank: its computation, without the state exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkWork
from megalin.ops.scans.context_parallel import SingleProcessExchange
from megalin.ops.scans.driver import fold
from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_flops, decay_scan_reference, total_decay
from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_scan_flops, scalar_decay_scan_reference
from megalin.ops.scans.states import decay_state, selected_state
from megalin.ops.scans.transition import DiagonalDecay
from megalin.ops.scans.vector_decay import vector_decay_scan, vector_decay_scan_reference

TOKENS, CHECKED, CHUNK = 32768, 600, 64
Scan = Callable[..., Any]


def cases() -> Iterator[BenchmarkCase]:
    """The 1B presets' heads: fixed decays, HGRN2's, Rodimus' one wide head, and Mamba-2's; bf16."""
    slopes = torch.rand(16, device="cuda") / 8.0
    fixed = {"v": (16, 128), "q": (16, 128), "k": (16, 128)}
    flops = decay_scan_flops(TOKENS, num_heads=16, key_dim=128, value_dim=128, chunk_size=CHUNK)
    yield _case("fixed 16x128x128", fixed, decay_scan, decay_scan_reference, _fixed_state, flops, slopes=slopes)
    for name, heads, key, value in (("HGRN2 16x128x128", 16, 128, 128), ("Rodimus 1x64x4096", 1, 64, 4096)):
        widths = {"v": (heads, value), "q": (heads, key), "k": (heads, key), "log_decay": (heads, key)}
        flops = decay_scan_flops(TOKENS, num_heads=heads, key_dim=key, value_dim=value, chunk_size=CHUNK)
        yield _case(name, widths, vector_decay_scan, vector_decay_scan_reference, _vector_state, flops)
    shared = {"v": (64, 64), "q": (1, 128), "k": (1, 128), "log_decay": (64,)}
    flops = scalar_decay_scan_flops(TOKENS, num_heads=64, num_key_heads=1, key_dim=128, value_dim=64, chunk_size=CHUNK)
    yield _case("Mamba-2 64x128x64", shared, scalar_decay_scan, scalar_decay_scan_reference, _scalar_state, flops)


def _fixed_state(x: dict[str, Tensor], slopes: Tensor) -> tuple[Tensor, DiagonalDecay]:
    return decay_state(x["k"], x["v"], slopes), total_decay(x["k"], slopes)


def _vector_state(x: dict[str, Tensor]) -> tuple[Tensor, DiagonalDecay]:
    return selected_state(x["k"], x["v"], x["log_decay"]), DiagonalDecay(x["log_decay"].sum(1))


def _scalar_state(x: dict[str, Tensor]) -> tuple[Tensor, DiagonalDecay]:
    return selected_state(x["k"], x["v"], x["log_decay"][..., None]), DiagonalDecay(x["log_decay"].sum(1)[..., None])


def _case(
    shape: str,
    widths: dict[str, tuple[int, ...]],
    scan: Scan,
    reference: Scan,
    state: Callable[..., tuple[Tensor, DiagonalDecay]],
    flops: int,
    **options: Tensor,
) -> BenchmarkCase:
    inputs = {name: torch.randn(1, TOKENS, *width, device="cuda") for name, width in widths.items()}
    inputs = {name: x if name == "log_decay" else x.bfloat16() for name, x in inputs.items()}
    if "log_decay" in inputs:
        inputs["log_decay"] = torch.nn.functional.logsigmoid(inputs["log_decay"] + 1.0)

    def shard_of(x: dict[str, Tensor]) -> Any:
        return SingleProcessExchange().sequence_shard(torch.zeros(1, x["v"].shape[1], dtype=torch.int32, device="cuda"))

    compiled = torch.compile(state, dynamic=False)  # as a block does

    def two_phases(**x: Tensor) -> list[Tensor]:
        return [scan(**x, **options, shard=shard_of(x)).output]

    def separate_state(**x: Tensor) -> list[Tensor]:
        entering = fold(*compiled(x, **options), shard_of(x))
        return [scan(**x, **options, initial_state=entering).output]

    def unsharded(**x: Tensor) -> list[Tensor]:
        return [scan(**x, **options).output]

    in_bytes, out_bytes = sum(x.nbytes for x in inputs.values()), inputs["v"].nbytes
    return BenchmarkCase(
        op="split_scans",
        shape=shape,
        inputs=inputs,
        checked={name: x[:, :CHECKED].contiguous() for name, x in inputs.items()},
        reference=lambda **x: [reference(**x, **options).output],
        ours={"two phases": two_phases, "separate state": separate_state, "unsharded": unsharded},
        baselines={},
        bytes=BenchmarkWork(in_bytes + out_bytes, 2 * in_bytes + out_bytes),
        flops=BenchmarkWork(TOKENS * flops, 2 * TOKENS * flops),
        compiled=False,
    )
