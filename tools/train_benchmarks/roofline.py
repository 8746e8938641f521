"""Roofline of a training step: the time of its matmuls, its token mixing and its unavoidable memory traffic.

The roofline is the sum of three times of one run, since a step runs them one after the other:

- matmuls: every matmul of a profiled step, with its shapes, strides and dtypes, timed in isolation; or their time in
  that step where it is less, since back to back they run into the GPU's power limit;
- mixing: the kernels of scans or softmax attention, at their time in the profiled step;
- bytes: memory traffic that no kernel between them can avoid, over the bandwidth of a device copy. With n tokens, for a
  matrix [out, in] inside a block, in the compute dtype c: forward, its input is written (n in) by a norm, gate or
  activation, and its output read (n out) by the next kernel; backward, that output is read again (n out), the gradient
  of the input read (n in) and that of the output written (n out). Depthwise convolutions [C, width] count as in = 0.
  The residual stream, in its own dtype, is read and written by each sub-layer, and backward read twice and written
  once (5 n D). The embedding writes n D and reads its gradient; the logits are read once and their gradient written
  once (2 n V). A parameter's gradient is read in c for the norm (c) and the update (c), the weight and two moments are
  read and written in fp32 (24), and a weight in c, where that is not fp32, is written too (c).

Reads and writes of scans and of matmuls are part of their own time.

The lower bound is the same sum with the mixing at its own roofline, so that a slow scan shows: the larger of

- its bytes over the same bandwidth: forward, the inputs (q, k, v, gates) are read and the output written; backward,
  both are read again and the gradients of the inputs written; states stay in the chip;
- its operations, those of the step (`training_flops`) that no recorded matmul has, without those of token pairs behind
  softmax attention's mask (`masked_flops`), at the rate of the fastest matmul.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalin.layers.mixers.shared_key_attention import SharedKeyAttention
from megalin.layers.mixers.softmax import Softmax

MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
MIXING_BACKWARD = re.compile(r"(?<!_begin)_backward$")
"""The backward op that has all arguments: a scan's second phase, or attention's."""
MIXING = re.compile(r"megalin::\w*(scan|attention)|aten::_(cudnn|flash|efficient)_attention")
NARROW = 8
"""Matrices of at most this many inputs are depthwise convolutions."""
DTYPES = {"float": torch.float32, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16, "double": torch.float64}
UPDATE_BYTES = 24
"""Bytes per parameter: weight and two moments read and written."""


class Operand(NamedTuple):
    """One tensor of a matmul."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


Matmul = tuple[str, tuple[Operand, ...]]
"""Op name and operands: two, or the addend and two."""


class Recorded(NamedTuple):
    """Matmuls and token mixing of a profiled step."""

    matmuls: Counter[Matmul]
    matmul_seconds: float
    """Device time of all matmuls in the step."""
    mixing_seconds: dict[str, float]
    """Device time by op."""
    mixing_bytes: int
    """Bytes of scans and attention by the rule above."""


class Roofline(NamedTuple):
    """Roofline of a step in seconds, with its parts."""

    matmuls: float
    """The smaller of the next two."""
    matmuls_isolated: float
    matmuls_in_step: float
    mixing: float
    bytes: float
    matmul_rows: list[dict[str, Any]]
    """Per shape: count, milliseconds each, TFLOP/s."""
    mixing_seconds: dict[str, float]
    moved_bytes: int
    copy_bandwidth: float
    """Bytes a second, read and written."""
    mixing_roofline: float

    @property
    def seconds(self) -> float:
        """Sum of the three parts."""
        return self.matmuls + self.mixing + self.bytes

    @property
    def lower_bound(self) -> float:
        """The sum with the mixing at its roofline, where that is less than its time."""
        return self.matmuls + min(self.mixing, self.mixing_roofline) + self.bytes


def record(step: Callable[[], object]) -> tuple[Recorded, Any]:
    """Profiles one call of `step`; returns its matmuls and mixing, and the profile."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    seconds = {event.key: event.self_device_time_total * 1e-6 for event in profile.key_averages()}
    mixing = {name: time for name, time in seconds.items() if MIXING.match(name) and time}
    in_step = sum(time for name, time in seconds.items() if name in MATMULS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return Recorded(Counter(_matmuls(events)), in_step, mixing, _mixing_bytes(events)), profile


def _matmuls(events: Iterable[dict[str, Any]]) -> Iterable[Matmul]:
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"] in MATMULS:
            arguments, count = event["args"], 3 if "add" in event["name"] else 2
            columns = (arguments["Input Dims"], arguments["Input Strides"], arguments["Input type"])
            operands = [Operand(tuple(d), tuple(s), DTYPES[t]) for d, s, t in list(zip(*columns, strict=True))[:count]]
            if all(0 not in operand.shape for operand in operands):
                yield event["name"], tuple(operands)


def _mixing_bytes(events: Iterable[dict[str, Any]]) -> int:
    """Bytes of all scans and attention, read off the arguments of their backward ops: (d_output, q, k, v, ...) of
    attention, (d_output, d_leaving, q, k, v, gates..., document ids, ...) of scans."""
    total = 0
    for event in events:
        name = event["name"]
        if event.get("cat") != "cpu_op" or not MIXING.match(name) or not MIXING_BACKWARD.search(name):
            continue
        arguments = event["args"]
        sizes = list(map(_nbytes, arguments["Input Dims"], arguments["Input type"]))
        inputs = sizes[1:4] if "attention" in name else list(itertools.takewhile(bool, sizes[2:]))
        total += 3 * sum(inputs) + 2 * sizes[0]
    return total


def _nbytes(shape: Any, name: str) -> int:
    """Bytes of a float tensor; 0 for other arguments."""
    return math.prod(shape) * DTYPES[name].itemsize if name in DTYPES and shape else 0


def matmul_flops(matmul: Matmul) -> int:
    """Operations of one matmul, multiply and add counted as two."""
    left, right = matmul[1][-2:]
    flops = 2 * right.shape[-1]
    for size in left.shape:
        flops *= size
    return flops


def unavoidable_bytes(model: nn.Module, *, tokens: int, compute_bytes: int, hidden_bytes: int) -> int:
    """Bytes by the rule above, for `model` with blocks `model.block_list()`."""
    config = model.config
    inner = [p for block in model.block_list() for p in block.parameters() if p.ndim >= 2]
    columns = 0
    for weight in inner:
        width = weight.shape[-1]
        outputs = weight.numel() // width
        columns += 3 * outputs + (2 * width if width > NARROW else 0)
    sublayers = sum(len(block.sublayers) for _, block in config.blocks())
    residual = (5 * sublayers + 2) * config.hidden_size
    parameters = sum(p.numel() for p in model.parameters())
    per_token = (columns + 2 * config.vocab_size) * compute_bytes + residual * hidden_bytes
    update = UPDATE_BYTES + compute_bytes * (3 if compute_bytes < 4 else 2)
    return tokens * per_token + parameters * update


def masked_flops(model: nn.Module, length: int) -> int:
    """Forward and backward operations a token that `training_flops` counts for pairs of tokens behind the masks of
    softmax attention, without documents: a token s of a window of c = min(length, window) tokens has s visible ones.

    Per attention of heads H K: 12 H K times the mean number of masked keys a token, c (c - 1) / (2 length), or
    (c - 1) / 2 with blocks of c tokens.
    """
    total = 0.0
    for mixer in [*model.input_mixers(), *model.mixers()]:
        if isinstance(mixer, Softmax | SharedKeyAttention):
            window, blocks = getattr(mixer.config, "window", None), getattr(mixer.config, "block_size", None)
            keys = min(length, window or blocks or length)
            masked = (keys - 1) / 2 * (1 if blocks else keys / length)
            total += 12 * mixer.config.num_heads * mixer.head_dim * masked
    return round(total)


def measure_roofline(recorded: Recorded, moved_bytes: int, *, step_flops: float, rounds: int = 3) -> Roofline:
    """Times each matmul on random data, as many back to back as in the step, so that the GPU's power limit applies.

    Args:
        moved_bytes: `unavoidable_bytes` of the step.
        step_flops: operations of the step, scans and attention included, those of `masked_flops` not.
    """
    seconds: dict[Matmul, list[float]] = {matmul: [] for matmul in recorded.matmuls}
    for _ in range(rounds):
        for matmul, count in recorded.matmuls.items():
            seconds[matmul].append(_time_matmul(matmul, count))
    rows = []
    for matmul, times in seconds.items():
        each, count = statistics.median(times), recorded.matmuls[matmul]
        row = {"matmul": _describe(matmul), "count": count, "milliseconds": each * 1e3}
        rows.append(row | {"tflops_per_second": matmul_flops(matmul) / each / 1e12})
    rows.sort(key=lambda row: -row["count"] * row["milliseconds"])
    bandwidth, isolated = copy_bandwidth(), sum(row["count"] * row["milliseconds"] for row in rows) / 1e3
    others = max(0.0, step_flops - sum(count * matmul_flops(matmul) for matmul, count in recorded.matmuls.items()))
    rate = max((row["tflops_per_second"] * 1e12 for row in rows), default=math.inf)
    return Roofline(
        matmuls=min(isolated, recorded.matmul_seconds),
        matmuls_isolated=isolated,
        matmuls_in_step=recorded.matmul_seconds,
        mixing=sum(recorded.mixing_seconds.values()),
        bytes=moved_bytes / bandwidth,
        matmul_rows=rows,
        mixing_seconds=recorded.mixing_seconds,
        moved_bytes=moved_bytes,
        copy_bandwidth=bandwidth,
        mixing_roofline=max(recorded.mixing_bytes / bandwidth, others / rate),
    )


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a device copy of 1 GiB; the median of ten."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = [_time(lambda: target.copy_(source), 1) for _ in range(12)][2:]
    return 2 * source.nbytes / statistics.median(times)


def _time_matmul(matmul: Matmul, count: int) -> float:
    name, operands = matmul
    tensors = [_random(operand) for operand in operands]
    # An addend in fp32 with bf16 factors: the matmul that accumulates into an fp32 gradient.
    mixed = {"out_dtype": operands[0].dtype} if operands[0].dtype != operands[-1].dtype else {}
    function = getattr(torch, name.removeprefix("aten::"))
    return _time(lambda: function(*tensors, **mixed), count)


def _time(call: Callable[[], object], count: int) -> float:
    """Seconds per call of `count` consecutive calls, after an untimed one."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def _random(operand: Operand) -> Tensor:
    """Normal random numbers in the operand's layout."""
    size = 1 + sum((n - 1) * s for n, s in zip(operand.shape, operand.strides, strict=True))
    return torch.randn(size, device="cuda", dtype=operand.dtype).as_strided(operand.shape, operand.strides)


def _describe(matmul: Matmul) -> str:
    layouts = "".join("N" if operand.strides[-1] == 1 else "T" for operand in matmul[1][-2:])
    shapes = " x ".join("x".join(map(str, operand.shape)) for operand in matmul[1][-2:])
    return f"{matmul[0].removeprefix('aten::')} {layouts} {shapes}"
