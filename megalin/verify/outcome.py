"""One training step of a case, on the mesh and in one process, with all tensors to compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional
from torch import Tensor, nn

from megalin.data.batch import AnyBatch, EncoderBatch, batch_to
from megalin.model.build import Model, make_model
from megalin.model.encoder import EncoderOutput
from megalin.model.language_model import ModelOutput
from megalin.optim.adamw import build_optimizer
from megalin.optim.config import OptimizerConfig
from megalin.parallel.collectives import Axis, all_gather, all_reduce
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.float8_layers import enable_float8, update_weight_magnitudes
from megalin.parallel.full_tensors import full_tensors
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.messages import gather_tensors
from megalin.train.build import TrainedModel, build_model
from megalin.train.loss_scale import LossScale
from megalin.train.pipeline_model import Pipeline
from megalin.train.precision import LossScaleConfig
from megalin.train.step import accumulate_gradients, apply_gradients
from megalin.verify.case import SAMPLES_PER_RANK, Case, make_batches, rank_batches
from megalin.verify.float8 import OperandRecorder, weight_magnitudes

Outcome = dict[str, Tensor]
"""Full tensors by name: logits.<m>, token_losses.<m>, loss, grad_norm, gradient:<p>, weight:<p>; for an encoder also
sequence_logits.<m> and sequence_losses.<m>."""

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.05)
"""Optimizer of the step. The clip is far below the gradient norm, so a norm that misses or repeats an element changes
the weights."""


LOSS_SCALE = LossScaleConfig(initial=64.0)
"""Loss scaling of the step in fp16: large enough for its gradients, and far from an overflow."""

STEPPED = "stepped_"
"""Prefix of the logits and losses of a forward after the step."""


class _Head(NamedTuple):
    """Output of one head of the model for a batch."""

    prefix: str
    logits: Tensor  # [..., V/tp or classes]
    losses: Tensor  # [...]
    labels: Tensor  # [...]


class _Axes(NamedTuple):
    """The axes over which the logits of a batch are sharded; by default those of one process."""

    tp: Axis = Axis("tp")
    cp: Axis = Axis("cp")
    samples: Axis = Axis("samples")


@torch.no_grad()
def _forward(model: TrainedModel, batch: AnyBatch) -> ModelOutput | EncoderOutput | None:
    """The model's output for a batch; None on a rank without the last stage."""
    if isinstance(model, Pipeline):
        return model.token_outputs(batch.inputs())
    output: ModelOutput | EncoderOutput = model(**batch.inputs())
    return output


def _heads(batch: AnyBatch, output: ModelOutput | EncoderOutput | None) -> list[_Head]:
    """The heads' outputs, in the order of the loss's terms."""
    if output is None:
        return []
    if isinstance(output, ModelOutput):
        assert not isinstance(batch, EncoderBatch)
        assert output.logits is not None
        assert output.token_losses is not None
        return [_Head("", output.logits, output.token_losses, batch.labels)]
    assert isinstance(batch, EncoderBatch)
    assert output.sequence_losses is not None
    heads = [_Head("sequence_", output.sequence_logits, output.sequence_losses, batch.sequence_labels)]
    if output.masked_logits is not None:
        assert output.masked_losses is not None
        heads.insert(0, _Head("", output.masked_logits, output.masked_losses, batch.masked_labels))
    return heads


def _full_sequences(head: _Head, tensor: Tensor, full: AnyBatch, axis: Axis) -> Tensor:
    """Combines a head's logits or losses over context-parallel ranks into those of the full batch."""
    if not head.prefix:
        labels = full.masked_labels if isinstance(full, EncoderBatch) else full.labels
        return all_gather(tensor, axis, dim=1)[:, : labels.shape[1]]
    # Sequence heads: all ranks have the logits, and the mean exposes one that differs; the first has the losses.
    total = all_reduce(tensor, axis)
    return total if tensor is head.losses else total / axis.size


def _forward_outcome(
    case: Case, axes: _Axes, model: TrainedModel, batch: AnyBatch, full: AnyBatch, index: int
) -> Outcome:
    """Logits and losses of a forward of this rank's part of micro-batch `index`, those of the full one."""
    outcome: Outcome = {}
    for head in _heads(batch, _forward(model, batch)):
        logits = head.logits
        if not head.prefix:
            logits = all_gather(logits, axes.tp, dim=-1)[..., : case.model.vocab_size]
        # clone: a collective's result is waited for at its first use, and only rank 0 uses the outcome.
        found = {f"{head.prefix}logits": logits, f"{head.prefix or 'token_'}losses": head.losses}
        for name, tensor in found.items():
            sequences = _full_sequences(head, tensor, full, axes.cp)
            outcome[f"{name}.{index}"] = all_gather(sequences, axes.samples, dim=0).clone().cpu()
    return outcome


def run_on_mesh(case: Case, mesh: Mesh, *, after_init: Callable[[nn.Module, Mesh], None] | None = None) -> Outcome:
    """Runs the step on the mesh with the training code; a collective. Every rank gets the full outcome, in host memory.

    Args:
        after_init: called on the initialized model; the self-test plants a fault there.
    """
    model = build_model(
        case.model,
        mesh,
        compute_dtype=case.compute_dtype,
        recompute=case.recompute,
        compile_blocks=False,
        seed=case.seed,
        float8=case.float8,
    )
    if after_init is not None:
        after_init(model, mesh)
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=())
    full, axes = make_batches(case), _Axes(mesh.tp.axis, mesh.cp.axis, mesh.samples)
    batches = rank_batches(full, mesh)
    outcome: Outcome = {}
    for index, batch in enumerate(batches):
        outcome |= _forward_outcome(case, axes, model, batch, full[index], index)
    recorder = OperandRecorder(model) if case.dtype == "float8" else None
    scale = LossScale(LOSS_SCALE, mesh) if case.dtype == "float16" else None
    losses, counts = accumulate_gradients(model, batches, mesh, None if scale is None else scale.scale)
    outcome |= {} if recorder is None else recorder.tensors(SAMPLES_PER_RANK, mesh)
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    for name, gradient in full_tensors(gradients):
        # A copy: without sharding the full gradient is the gradient itself, which clipping scales in place.
        copy = gradient.clone().cpu()
        outcome[f"gradient:{name}"] = copy if scale is None else copy / LOSS_SCALE.initial
    result = apply_gradients(
        model, optimizer, losses, counts, max_grad_norm=OPTIMIZER.max_grad_norm, step=0, loss_scale=scale
    ).wait()
    scalars = {"loss": result.loss, "grad_norm": result.grad_norm}
    outcome |= {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
    outcome |= {f"weight:{name}": weight.cpu() for name, weight in full_tensors(dict(model.named_parameters()))}
    if case.dtype == "float8":  # a forward with the scales of the changed weights
        stepped = _forward_outcome(case, axes, model, batches[0], full[0], 0)
        outcome |= {f"{STEPPED}{name}": tensor for name, tensor in stepped.items()} | weight_magnitudes(model, mesh)
    return _merge(gather_tensors(outcome, mesh.pp.group))


def _merge(stages: Sequence[Outcome]) -> Outcome:
    """Merges the outcomes of pipeline stages; a tensor whose copies differ between stages becomes NaN."""
    merged: Outcome = {}
    for name, tensor in (item for stage in stages for item in stage.items()):
        same = name not in merged or torch.equal(merged[name], tensor)
        merged[name] = tensor if same else torch.full_like(tensor, math.nan)
    return merged


def run_reference(
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dither: torch.Generator | None = None,
    recompute: bool = False,
) -> Outcome:
    """Runs the step in this process only, in `dtype`: plain tensors, plain autograd, plain AdamW; all on `device`.

    `device` is that of the mesh: initial weights are the same on every mesh of one kind of device.

    Args:
        dither: for bf16 and fp16: stochastic rounding of the weights instead of rounding to nearest.
        recompute: recomputes activations, with the same bits, for a model whose activations do not fit.
    """
    wide = torch.promote_types(dtype, torch.float32)
    model = build_initialized(case, wide, device, recompute=recompute)
    # As on the mesh: the optimizer's weights and gradient sums are wide, the weights of the forward are not.
    recorder = OperandRecorder(model) if case.dtype == "float8" else None
    masters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters()}
    gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
    round_weights(model, dtype, dither)
    batches = [batch_to(batch, device) for batch in make_batches(case)]
    outcome: Outcome = {}
    counts = torch.stack([batch.label_counts() for batch in batches]).sum(0).tolist()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index, batch in enumerate(batches):
        loss = torch.zeros((), dtype=wide, device=device)
        for head, count in zip(_heads(batch, model(**batch.inputs())), counts, strict=True):
            logits = head.logits.detach() if head.prefix else head.logits.detach()[..., : case.model.vocab_size]
            labels = head.labels.clamp(min=0)[..., None]
            losses = -torch.nn.functional.log_softmax(logits.to(wide), -1).gather(-1, labels).squeeze(-1)
            outcome[f"{head.prefix}logits.{index}"] = logits
            kept = losses.masked_fill(head.labels == IGNORED_LABEL, 0.0)
            outcome[f"{head.prefix or 'token_'}losses.{index}"] = kept
            loss = loss + head.losses.sum() / count
        factor = LOSS_SCALE.initial if dtype == torch.float16 else 1.0
        (loss * factor).backward()
        total += loss.detach()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            gradients[name].add_(parameter.grad, alpha=1.0 / factor)
            parameter.grad = None
    for name, master in masters.items():
        outcome[f"gradient:{name}"], master.grad = gradients[name].clone(), gradients[name]
    outcome["loss"] = total
    outcome |= {} if recorder is None else recorder.tensors(SAMPLES_PER_RANK * case.data_size)
    outcome |= _step(masters)
    return outcome


@torch.no_grad()
def run_stepped(case: Case, weights: Outcome, device: torch.device) -> Outcome:
    """Runs one process's forward of the first micro-batch with the weights `weight:<p>` of another outcome; returns
    logits and losses under `STEPPED`, and the weights' magnitudes."""
    model = build_initialized(case, case.compute_dtype, device)
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[f"weight:{name}"])
    model.after_optimizer_step()
    batch = batch_to(make_batches(case)[0], device)
    stepped = _forward_outcome(case, _Axes(), model, batch, batch, 0)
    return {f"{STEPPED}{name}": tensor for name, tensor in stepped.items()} | weight_magnitudes(model)


def round_weights(model: Model, dtype: torch.dtype, dither: torch.Generator | None = None) -> None:
    """Rounds the weights to `dtype`, to nearest or with `dither` stochastically, but for those that compute in fp32."""
    precise = {parameter for module in model.full_precision_modules() for parameter in module.parameters()}
    for parameter in model.parameters():
        if parameter not in precise:
            parameter.data = (parameter.data if dither is None else _dithered(parameter.data, dtype, dither)).to(dtype)


def on_host(outcome: Outcome) -> Outcome:
    """Copies an outcome to host memory, where several of a large model fit."""
    return {name: tensor.cpu() for name, tensor in outcome.items()}


def _dithered(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """x plus uniform noise of one unit in the last place of `dtype`, bf16 or fp16, centered at zero."""
    limits = torch.finfo(dtype)
    places = torch.frexp(x).exponent - 1 + math.frexp(limits.eps)[1] - 1
    lowest = math.frexp(limits.smallest_normal * limits.eps)[1] - 1
    unit = torch.ldexp(x.sign(), places.clamp(min=lowest))  # 0 of a weight that is 0
    return x + unit * (torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device) - 0.5)


def run_step(case: Case, gradients: Outcome, device: torch.device) -> Outcome:
    """Runs one process's optimizer step from the same weights with the gradients `gradient:<p>` of another outcome, all
    in fp32; returns `grad_norm` and `weight:<p>`."""
    masters = dict(build_initialized(case, torch.float32, device).named_parameters())
    for name, master in masters.items():
        master.grad = gradients[f"gradient:{name}"].to(device, torch.float32, copy=True)  # clipped in place
    return on_host(_step(masters))


def build_initialized(case: Case, dtype: torch.dtype, device: torch.device, *, recompute: bool = False) -> Model:
    """Builds the full model with its initial weights."""
    model = make_model(case.model, recompute=recompute).to(dtype)
    if case.float8 is not None:
        enable_float8(model, model.block_list(), case.float8)
    model.to_empty(device=device)
    init_weights(model, case.seed)
    update_weight_magnitudes(model)
    return model


def _step(masters: dict[str, nn.Parameter]) -> Outcome:
    """Clips gradients and takes AdamW's first step; returns the norm before clipping and the weights after the step."""
    assert OPTIMIZER.max_grad_norm is not None
    norm = torch.nn.utils.clip_grad_norm_(masters.values(), OPTIMIZER.max_grad_norm)
    beta1, beta2 = OPTIMIZER.betas
    torch.optim.AdamW(
        masters.values(), OPTIMIZER.lr, (beta1, beta2), OPTIMIZER.eps, OPTIMIZER.weight_decay, foreach=False
    ).step()
    return {"grad_norm": norm.detach()} | {f"weight:{name}": master.detach() for name, master in masters.items()}
