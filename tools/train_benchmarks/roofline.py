"""The floor of a training step: what its products, its token mixing and the bytes that it must move take by themselves.

The floor is the sum of three times of one run, since a step does them one after the other:

- products: every matrix product that a profiled step launched, with its shapes, strides and dtypes, timed alone; or
  the time that they took in that step where it is less, since alone, in a row, they run into the chip's power limit;
- mixing: the scans or the softmax attention, at the time that their kernels take in the profiled step;
- bytes: what no pass around them can avoid, over the bandwidth of a device copy. Of n tokens, for a matrix of
  [out, in] inside a block, in the dtype of computation c: forward, its input is written (n in) by a norm, gate or
  activation, and its output read (n out) by the next pass; backward, that output is read again (n out), the gradient
  of the input read (n in) and that of the output written (n out). Depthwise convolutions [C, width] count as in = 0.
  The residual stream, in its own dtype, is read and written by each sub-layer, and backward read twice and written
  once (5 n D). The embedding writes n D and reads its gradient; the logits are read once and their gradient written
  once (2 n V). A parameter is cast to c (4 + c bytes), its fp32 gradient read for the norm (4) and the update (4), and
  the weight and two moments read and written in fp32 (24).

What scans read and write is in their own time, and what products read and write in theirs.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
MIXING = re.compile(r"megalin::\w*(scan|attention)|aten::_(cudnn|flash|efficient)_attention")
NARROW = 8
"""A matrix of at most so many inputs is a depthwise convolution."""
DTYPES = {"float": torch.float32, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16, "double": torch.float64}
UPDATE_BYTES = 4 + 4 + 4 + 24
"""A parameter: its gradient twice, the weight for the cast, weight and two moments read and written."""


class Operand(NamedTuple):
    """One tensor of a product."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


Product = tuple[str, tuple[Operand, ...]]
"""Its name and its operands: two, or the summand and two."""


class Recorded(NamedTuple):
    """What a profiled step launched."""

    products: Counter[Product]
    product_seconds: float
    """Device time of all products in the step."""
    mixing_seconds: dict[str, float]
    """Device time by op."""


class Floor(NamedTuple):
    """Seconds a step, and where they come from."""

    products: float
    """The lesser of the two below."""
    products_alone: float
    products_in_step: float
    mixing: float
    bytes: float
    product_rows: list[dict[str, Any]]
    """Each shape with its count, milliseconds each and TFLOP/s."""
    mixing_seconds: dict[str, float]
    moved_bytes: int
    copy_bandwidth: float
    """Bytes a second, read and written."""

    @property
    def seconds(self) -> float:
        """The floor."""
        return self.products + self.mixing + self.bytes


def record(step: Callable[[], object]) -> tuple[Recorded, Any]:
    """Profiles one call of `step`; also the profile, for tables."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    seconds = {event.key: event.self_device_time_total * 1e-6 for event in profile.key_averages()}
    mixing = {name: time for name, time in seconds.items() if MIXING.match(name) and time}
    in_step = sum(time for name, time in seconds.items() if name in PRODUCTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return Recorded(Counter(_products(events)), in_step, mixing), profile


def _products(events: Iterable[dict[str, Any]]) -> Iterable[Product]:
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"] in PRODUCTS:
            arguments, count = event["args"], 3 if "add" in event["name"] else 2
            columns = (arguments["Input Dims"], arguments["Input Strides"], arguments["Input type"])
            operands = [Operand(tuple(d), tuple(s), DTYPES[t]) for d, s, t in list(zip(*columns, strict=True))[:count]]
            if all(0 not in operand.shape for operand in operands):
                yield event["name"], tuple(operands)


def product_flops(product: Product) -> int:
    """Multiplies and adds of one product, counted as two."""
    left, right = product[1][-2:]
    flops = 2 * right.shape[-1]
    for size in left.shape:
        flops *= size
    return flops


def unavoidable_bytes(model: nn.Module, *, tokens: int, compute_bytes: int, hidden_bytes: int) -> int:
    """The bytes of the rule above, for `model` whose blocks are `model.block_list()`."""
    config = model.config
    inner = [p for block in model.block_list() for p in block.parameters() if p.ndim >= 2]
    columns = 0
    for weight in inner:
        width = weight.shape[-1]
        outputs = weight.numel() // width
        columns += 3 * outputs + (2 * width if width > NARROW else 0)
    sublayers = sum(len(block.sublayers) for _, block in config.blocks())
    stream = (5 * sublayers + 2) * config.hidden_size
    parameters = sum(p.numel() for p in model.parameters())
    per_token = (columns + 2 * config.vocab_size) * compute_bytes + stream * hidden_bytes
    return tokens * per_token + parameters * (UPDATE_BYTES + compute_bytes)


def measure_floor(recorded: Recorded, moved_bytes: int, *, rounds: int = 3) -> Floor:
    """Times each product on random data, as many in a row as the step has, so that the chip's power limit counts."""
    seconds: dict[Product, list[float]] = {product: [] for product in recorded.products}
    for _ in range(rounds):
        for product, count in recorded.products.items():
            seconds[product].append(_time_product(product, count))
    rows = []
    for product, times in seconds.items():
        each, count = statistics.median(times), recorded.products[product]
        row = {"product": _describe(product), "count": count, "milliseconds": each * 1e3}
        rows.append(row | {"tflops_per_second": product_flops(product) / each / 1e12})
    rows.sort(key=lambda row: -row["count"] * row["milliseconds"])
    bandwidth, alone = copy_bandwidth(), sum(row["count"] * row["milliseconds"] for row in rows) / 1e3
    return Floor(
        products=min(alone, recorded.product_seconds),
        products_alone=alone,
        products_in_step=recorded.product_seconds,
        mixing=sum(recorded.mixing_seconds.values()),
        bytes=moved_bytes / bandwidth,
        product_rows=rows,
        mixing_seconds=recorded.mixing_seconds,
        moved_bytes=moved_bytes,
        copy_bandwidth=bandwidth,
    )


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a device copy of 1 GiB; the median of ten."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = [_time(lambda: target.copy_(source), 1) for _ in range(12)][2:]
    return 2 * source.nbytes / statistics.median(times)


def _time_product(product: Product, count: int) -> float:
    name, operands = product
    tensors = [_random(operand) for operand in operands]
    # A summand in fp32 beside bf16 factors: the product that adds into a wide gradient.
    mixed = {"out_dtype": operands[0].dtype} if operands[0].dtype != operands[-1].dtype else {}
    function = getattr(torch, name.removeprefix("aten::"))
    return _time(lambda: function(*tensors, **mixed), count)


def _time(call: Callable[[], object], count: int) -> float:
    """Seconds a call, of `count` one after the other, after one that is not timed."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def _random(operand: Operand) -> Tensor:
    """Normal numbers in the operand's own layout."""
    size = 1 + sum((n - 1) * s for n, s in zip(operand.shape, operand.strides, strict=True))
    return torch.randn(size, device="cuda", dtype=operand.dtype).as_strided(operand.shape, operand.strides)


def _describe(product: Product) -> str:
    layouts = "".join("N" if operand.strides[-1] == 1 else "T" for operand in product[1][-2:])
    shapes = " x ".join("x".join(map(str, operand.shape)) for operand in product[1][-2:])
    return f"{product[0].removeprefix('aten::')} {layouts} {shapes}"
