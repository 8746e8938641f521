"""TransNormerLLM's Table 12, memory by model parallel size, from the planner's traces and stated assumptions.

Run as a module, it prints the tables of docs/planner.md.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.model.config import ModelConfig
from megalin.model.presets import load_preset
from megalin.ops.dispatch.backend import assume_kernels
from megalin.parallel.config import ParallelConfig
from megalin.planner.estimate import Estimator
from megalin.planner.hardware import HARDWARE
from megalin.planner.parameters import StageParameters
from megalin.planner.tracing import RunCost, trace
from megalin.planner.workload import ParallelLayout, Workload

Preset = Literal["transnormerllm-7b", "llama-7b"]

PAPER = {1: 64.0, 2: 41.0, 4: 36.3, 8: 24.1}
"""TransNormerLLM-7B: GB per GPU by model parallel size, 8 A100."""
TRANSFORMER = {1: 66.3, 2: 44.6, 4: 40.2, 8: 28.7}
"""Transformer-7B: GB per GPU by model parallel size, 8 A100."""
GPUS, BATCH, LENGTH = 8, 2, 2048
WIDTH, INNER, HEADS, VOCABULARY = 4096, 11008, 32, 50272
SCAN_WIDTH = 128
"""Key channels per call of the published lightning attention; wider keys are split over several calls."""
GIB, GB = 2**30, 10**9


class System(NamedTuple):
    """Assumptions about the paper's system; each field is a choice, none a fitted number."""

    autocast: bool = True
    """Parameters, all-gathers and gradients in fp32, and a bf16 copy of each weight that a matmul keeps for its
    backward (`torch.autocast`); False: the sharded data parallelism casts the shards, and all computation is bf16."""
    reshard: bool = True
    """FSDP units free their gathered weights after their forward."""
    wrap_elements: int = 10**8
    """Layers with fewer parameters on a rank are part of the outermost FSDP unit."""
    lrpe: Literal["cosine", "rotation", "first"] = "cosine"
    """Form of LRPE in every layer; first: cosine, in the first layer only."""
    rounded: bool = False
    """LRPE's queries and keys, in fp32 as its angles, are rounded to bf16 before lightning attention."""
    gathered_loss: bool = True
    """Each rank has the logits of the whole vocabulary; False: Megatron's vocabulary-parallel loss."""
    recompute: bool = False
    """Layers save their input only, and each is a unit."""
    batch_per_gpu: bool = False
    """Batch of 2 tp samples over tp ranks; False: 2."""


class Parts(NamedTuple):
    """Bytes of a rank at its peak."""

    state: int
    """Shards of fp32 weights and both moments."""
    gathered: int
    """All-gathered weights of units."""
    kept: int
    """Tensors saved by the layers' forward."""
    working: int
    """Temporaries of the loss or of a layer's backward, gradients included."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self)


class _Norm(torch.autograd.Function):
    """SRMSNorm as one kernel: saves its input and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, torch.empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


class _Attention(torch.autograd.Function):
    """Attention as one kernel: keeps contiguous q, k and v [B, H/tp, T, .]; the output has the dtype of q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.contiguous() for each in (q, k, v))
        ctx.save_for_backward(q, k, v)
        return torch.empty(v.shape, dtype=q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        gradient = gradient.contiguous()
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors)


class _ParallelLoss(torch.autograd.Function):
    """Megatron's vocabulary-parallel loss: fp32 logits become probabilities and then the gradient, in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.empty(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (probabilities,) = ctx.saved_tensors
        return probabilities.mul_(gradient[..., None])


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Matmul in bf16, as under autocast; no copies if both operands are bf16."""
    return functional.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16))


def _weight(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype))


class _TransNormerLayer(nn.Module):
    """x + GLA(SRMSNorm(x)), then x + SGLU(SRMSNorm(x)) (eq. 9), in eager operations on the heads and columns of a rank.
    Collectives of tensor parallelism work in place and keep nothing."""

    def __init__(self, tp: int, dtype: torch.dtype, lrpe: Literal["cosine", "rotation"] | None, rounded: bool) -> None:
        super().__init__()
        self.heads, self.lrpe, self.rounded = HEADS // tp, lrpe, rounded
        self.qkvu, self.out = _weight(dtype, 4 * WIDTH // tp, WIDTH), _weight(dtype, WIDTH, WIDTH // tp)
        self.value, self.gate = _weight(dtype, INNER // tp, WIDTH), _weight(dtype, INNER // tp, WIDTH)
        self.down = _weight(dtype, WIDTH, INNER // tp)
        angles = WIDTH // HEADS // (2 if lrpe == "rotation" else 1)
        self.theta = None if lrpe is None else _weight(dtype, self.heads, 1, angles)

    def forward(self, x: Tensor) -> Tensor:
        x = x + _matmul(self._attended(_Norm.apply(x)), self.out)
        normed = _Norm.apply(x)
        return x + _matmul(_matmul(normed, self.value) * _matmul(normed, self.gate), self.down)

    def _attended(self, normed: Tensor) -> Tensor:
        q, k, v, u = _matmul(normed, self.qkvu).chunk(4, dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        q, k = self._with_lrpe(functional.silu(q)), self._with_lrpe(functional.silu(k))
        parts = zip(q.split(SCAN_WIDTH, dim=-1), k.split(SCAN_WIDTH, dim=-1), strict=True)
        output = sum((_Attention.apply(part_q, part_k, v) for part_q, part_k in parts), start=torch.zeros(()))
        return u * _Norm.apply(output.transpose(1, 2).flatten(2))

    def _with_lrpe(self, x: Tensor) -> Tensor:
        """Applies LRPE to x [B, H/tp, T, K]."""
        if self.theta is None:
            return x
        angles = self.theta * torch.empty(1, LENGTH, 1, dtype=self.theta.dtype)
        if self.lrpe == "cosine":
            placed = torch.cat([x * angles.cos(), x * angles.sin()], dim=-1)
        else:
            cosines, sines = (torch.stack([each, each], dim=-1).flatten(-2) for each in (angles.cos(), angles.sin()))
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
            placed = x * cosines + turned * sines
        return placed.to(x.dtype) if self.rounded else placed


class _SoftmaxLayer(nn.Module):
    """LLaMA's layer: RMSNorm as separate operations in fp32, fixed rotary angles, flash attention in bf16."""

    def __init__(self, tp: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = HEADS // tp
        self.qkv, self.out = _weight(dtype, 3 * WIDTH // tp, WIDTH), _weight(dtype, WIDTH, WIDTH // tp)
        self.up, self.down = _weight(dtype, 2 * INNER // tp, WIDTH), _weight(dtype, WIDTH, INNER // tp)
        self.norms = nn.ParameterList(_weight(dtype, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        q, k, v = _matmul(self._normed(x) * first, self.qkv).unflatten(-1, (3, self.heads, -1)).unbind(2)
        output = _Attention.apply(self._turned(q), self._turned(k), v)
        x = x + _matmul(output.flatten(2), self.out)
        gate, value = _matmul(self._normed(x) * second, self.up).chunk(2, dim=-1)
        return x + _matmul(functional.silu(gate) * value, self.down)

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)

    def _turned(self, x: Tensor) -> Tensor:
        cosines, sines = torch.empty(2, LENGTH, 1, WIDTH // HEADS)
        half, other = x.chunk(2, dim=-1)
        return (x * cosines + torch.cat([-other, half], dim=-1) * sines).to(torch.bfloat16)


class _Head(nn.Module):
    """The last norm, the logits and their loss, unfused."""

    def __init__(self, tp: int, dtype: torch.dtype, gathered: bool) -> None:
        super().__init__()
        self.tp, self.gathered = tp, gathered
        self.table = _weight(dtype, VOCABULARY // tp, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits = _matmul(_Norm.apply(x), self.table)
        if not self.gathered:
            return _ParallelLoss.apply(logits.float()).sum()
        logits = torch.cat([logits] * self.tp, dim=-1) if self.tp > 1 else logits
        scores = functional.log_softmax(logits.flatten(0, 1), dim=-1, dtype=torch.float32)
        return functional.nll_loss(scores, torch.zeros(len(scores), dtype=torch.int64), reduction="sum")


def _run(module: nn.Module, dtype: torch.dtype, batch: int) -> RunCost:
    return trace(module, module, torch.empty(batch, LENGTH, WIDTH, dtype=dtype, requires_grad=True))


@cache
def layer_cost(preset: Preset, tp: int, dtype: torch.dtype, batch: int, lrpe: Any, rounded: bool) -> RunCost:
    """Cost of a layer on one rank, from the planner's trace."""
    with torch.device("meta"), assume_kernels():
        softmax = preset == "llama-7b"
        return _run(_SoftmaxLayer(tp, dtype) if softmax else _TransNormerLayer(tp, dtype, lrpe, rounded), dtype, batch)


@cache
def head_cost(tp: int, dtype: torch.dtype, batch: int, gathered: bool) -> RunCost:
    """Cost of the loss on one rank, from the planner's trace."""
    with torch.device("meta"), assume_kernels():
        return _run(_Head(tp, dtype, gathered), dtype, batch)


def _planned(preset: Preset, tp: int) -> tuple[Estimator, ParallelLayout]:
    dp = GPUS // tp
    model = load_preset(preset).model
    assert isinstance(model, ModelConfig)
    model = model.model_copy(update={"vocab_size": VOCABULARY, "tie_embeddings": True})
    workload = Workload(model, LENGTH, BATCH * dp, torch.bfloat16, False)
    parallel = ParallelConfig(tp=tp, zero=3 if dp > 1 else None)
    return Estimator(workload, HARDWARE["a100"]), ParallelLayout(parallel, dp, BATCH, 1, False)


@cache
def units(preset: Preset, tp: int) -> StageParameters:
    """Parameters of a rank, counted by the planner."""
    estimator, layout = _planned(preset, tp)
    return estimator.parameters(layout)[0]


@cache
def plan_bytes(tp: int) -> int:
    """The planner's own estimate: ZeRO 3 over the data axis, eager blocks of megalin."""
    estimator, layout = _planned("transnormerllm-7b", tp)
    return estimator.estimate(layout, refined=True).memory.total


def peak(system: System, tp: int, preset: Preset = "transnormerllm-7b") -> Parts:
    """Peak memory of a rank: the maximum over the moments of a step at which memory can peak.

    A unit's gradients are views of one flat parameter: they stay until the last is computed, then are concatenated.
    """
    sharded = GPUS // tp > 1  # one rank gathers nothing: torch computes on the parameters
    parameters = units(preset, tp)
    layers, layer = len(parameters.blocks), parameters.blocks[0].whole
    outer = parameters.rest.whole + parameters.precise.whole
    dtype, size = (torch.float32, 4) if system.autocast else (torch.bfloat16, 2)
    gathered_size = size if sharded or not system.autocast else 0
    own_unit = layer >= system.wrap_elements or system.recompute
    state = 12 * parameters.shard

    kept, kept_by_one, held_by_one = _layers(system, tp, preset, dtype, layers)
    batch = BATCH * tp if system.batch_per_gpu else BATCH
    loss, table = head_cost(tp, dtype, batch, system.gathered_loss), size * parameters.table
    between = outer if own_unit and system.reshard else outer + layers * layer
    during = outer + layer if own_unit and system.reshard else between
    moments = [
        Parts(state, gathered_size * between, kept, loss.backward_bytes),
        Parts(state, gathered_size * during, kept - kept_by_one, held_by_one + table),
    ]
    if own_unit:
        concatenated = table + 2 * size * layer
        moments.append(Parts(state, gathered_size * during, kept - kept_by_one, concatenated))
    else:
        moments.append(Parts(state, gathered_size * between, 0, 2 * size * (layers * layer + outer)))
    return max(moments, key=lambda moment: moment.total)


def _layers(system: System, tp: int, preset: Preset, dtype: torch.dtype, layers: int) -> tuple[int, int, int]:
    """Bytes that all layers keep, that the last keeps, and the maximum in its backward, which includes these."""
    batch = BATCH * tp if system.batch_per_gpu else BATCH
    forms = ["cosine", None] if system.lrpe == "first" else [system.lrpe]
    costs = [layer_cost(preset, tp, dtype, batch, form, system.rounded) for form in forms]
    own = costs[-1]
    if system.recompute:
        hidden_bytes = batch * LENGTH * WIDTH * dtype.itemsize
        return layers * hidden_bytes, hidden_bytes, hidden_bytes + own.backward_bytes
    return costs[0].saved_bytes + (layers - 1) * own.saved_bytes, own.saved_bytes, own.backward_bytes


def gib(system: System, preset: Preset = "transnormerllm-7b") -> list[float]:
    """Peak GiB for each model parallel size."""
    return [peak(system, tp, preset).total / GIB for tp in PAPER]


def errors(found: list[float], paper: dict[int, float]) -> list[float]:
    """Relative error for each model parallel size."""
    return [value / figure - 1 for value, figure in zip(found, paper.values(), strict=True)]


OWN = System(autocast=False, wrap_elements=0, lrpe="first")
"""The planner's own assumptions: one unit per layer, all in bf16, LRPE in the layer that the paper's text names."""
STEPS = {
    "layers and loss as separate operations": OWN,
    "autocast: fp32 gathers and residual stream, bf16 copies of weights": OWN._replace(autocast=True),
    "LRPE in every layer": OWN._replace(autocast=True, lrpe="cosine"),
    "layers of less than 10^8 parameters are no unit": System(),
}
OTHERWISE = {
    "the sharded data parallelism casts to bf16": System(autocast=False),
    "weights stay gathered after the forward": System(reshard=False),
    "each layer is a unit": System(wrap_elements=0),
    "LRPE in the first layer only": System(lrpe="first"),
    "LRPE as a rotation": System(lrpe="rotation"),
    "LRPE rounded to bf16": System(rounded=True),
    "vocabulary-parallel loss": System(gathered_loss=False),
    "layers recomputed": System(recompute=True),
    "batch 2 a GPU": System(batch_per_gpu=True),
}


def combinations() -> list[tuple[System, int]]:
    """All choices of `System`, each with both meanings of the paper's GB."""
    both = (True, False)
    forms: tuple[Literal["cosine", "rotation", "first"], ...] = ("cosine", "rotation", "first")
    choices = itertools.product(itertools.product(both, both, (10**8, 0), forms), itertools.product(both, repeat=4))
    return [(System(*first, *second), unit) for first, second in choices for unit in (GIB, GB)]


def within(tolerance: float) -> list[tuple[System, int]]:
    """The combinations under which each of the four figures is within the tolerance."""

    def worst(system: System, unit: int) -> float:
        return max(map(abs, errors([value * GIB / unit for value in gib(system)], PAPER)))

    return [(system, unit) for system, unit in combinations() if worst(system, unit) <= tolerance]


def _row(name: str, values: list[float], form: str) -> str:
    return f"| {name} | " + " | ".join(format(value, form) for value in values) + " |"


def tables() -> str:
    """Formats as Markdown the effect of each assumption, the parts of the sum, and the errors of other choices."""
    head = ["| GiB a GPU | tp 1 | tp 2 | tp 4 | tp 8 |", "|---|---|---|---|---|"]
    before = [plan_bytes(tp) / GIB for tp in PAPER]
    lines = [*head, _row("the plan, ZeRO 3, eager", before, ".1f")]
    for name, system in STEPS.items():
        now = gib(system)
        lines.append(_row(name, [b - a for a, b in zip(before, now, strict=True)], "+.1f"))
        before = now
    lines += [_row("together", before, ".1f"), _row("paper", list(PAPER.values()), ".1f")]
    lines += [_row("error", errors(before, PAPER), "+.1%"), "", *head]
    parts = [peak(System(), tp) for tp in PAPER]
    for field in Parts._fields:
        lines.append(_row(field, [getattr(part, field) / GIB for part in parts], ".1f"))
    lines += ["", head[0].replace("GiB a GPU", "one choice otherwise, error"), head[1]]
    lines += [_row(name, errors(gib(system), PAPER), "+.1%") for name, system in OTHERWISE.items()]
    lines += ["", head[0].replace("GiB a GPU", "the paper's Transformer, error"), head[1]]
    lines += [_row("LLaMA's layer", errors(gib(System(), "llama-7b"), TRANSFORMER), "+.1%"), ""]
    lines.append(f"within 10 %, of {len(combinations())} combinations:")
    for system, unit in within(0.1):
        other = [f"{name} {value}" for name, value in system._asdict().items() if value != getattr(System(), name)]
        missed = max(map(abs, errors([value * GIB / unit for value in gib(system)], PAPER)))
        lines.append(f"{missed:.1%}: {', '.join(['GiB' if unit == GIB else '10^9 bytes', *other])}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
