"""MaxNorm, alone and with the factor and Cosine RelPE of DANet: 64 Mi elements at the models' widths."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.case import BenchmarkCase, BenchmarkWork
from megalin.ops.norms.max_norm import encoded_max_norm, encoded_max_norm_reference, max_norm, max_norm_reference

ELEMENTS, LENGTH = 2**26, 512
PLAIN = ENCODED = (1024, 2048, 4096, 8192, 12288)
EPS = 1e-3


def cases() -> Iterator[BenchmarkCase]:
    """bf16; the encoded cases with one head, as in DANet, and sequences of 512 tokens, a tenth of them padding.

    Bytes of encoded cases: x, y and the table of cosines once, of two bytes a position and element.
    """
    for width in PLAIN:
        x = torch.randn(ELEMENTS // width, width, device="cuda", dtype=torch.bfloat16)
        yield _case(f"{len(x)}x{width} bf16", x, max_norm, max_norm_reference, {}, table_bytes=0)
    for width in ENCODED:
        x = torch.randn(ELEMENTS // width // LENGTH, LENGTH, width, device="cuda", dtype=torch.bfloat16)
        factor = torch.full(x.shape[:2], LENGTH ** (-1 / 3), device="cuda")
        factor[:, -LENGTH // 10 :] = 0.0
        arguments = {"factor": factor, "positions": torch.arange(LENGTH, device="cuda"), "num_heads": 1}
        shape = f"{x.shape[0] * LENGTH}x{width} bf16 encoded"
        ours = functools.partial(encoded_max_norm, num_positions=LENGTH)
        yield _case(shape, x, ours, encoded_max_norm_reference, arguments, table_bytes=2 * LENGTH * width)


def _case(shape, x, function, reference, arguments, *, table_bytes) -> BenchmarkCase:  # type: ignore[no-untyped-def]
    x[..., 7] = 9.0  # a unique maximum: backends choose differently among equal ones

    def run(of, x, **options):  # type: ignore[no-untyped-def]
        own = arguments
        if x.dtype == torch.float64 and arguments:
            own = {**arguments, "factor": arguments["factor"][: len(x)].double()}
        elif arguments:
            own = {**arguments, "factor": arguments["factor"][: len(x)]}
        return [of(x, **own, eps=EPS, **options)]

    backends = ("auto", "triton", "cuda")
    return BenchmarkCase(
        op="max_norm",
        shape=shape,
        inputs={"x": x},
        checked={"x": x[:5]},
        reference=functools.partial(run, reference),
        ours={name: functools.partial(run, function, backend=name) for name in backends},
        baselines={},
        bytes=BenchmarkWork(2 * x.nbytes + table_bytes, 3 * x.nbytes + table_bytes),
        flops=BenchmarkWork(0, 0),
    )
