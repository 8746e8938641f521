"""One step of a case, on the mesh and in one process: every tensor that the two must agree on."""

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
from megalin.optim.adamw import OptimizerConfig, build_optimizer
from megalin.parallel.collectives import Axis, all_gather, all_reduce, gather_objects
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor
from megalin.train.build import TrainedModel, build_model
from megalin.train.pipeline_model import Pipeline
from megalin.train.step import accumulate_gradients, apply_gradients
from megalin.verify.case import Case, make_batches, rank_batches

Outcome = dict[str, Tensor]
"""Whole tensors by name: logits.<m>, token_losses.<m>, loss, grad_norm, gradient:<p>, weight:<p>; of an
encoder also sequence_logits.<m> and sequence_losses.<m>."""

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.05)
"""The clip is far below the gradient's norm, so a norm that misses or repeats an element changes the weights."""


class _Head(NamedTuple):
    """What a head of the model gave for a batch."""

    prefix: str
    logits: Tensor  # [..., V/tp or classes]
    losses: Tensor  # [...]
    labels: Tensor  # [...]


@torch.no_grad()
def _forward(model: TrainedModel, batch: AnyBatch) -> ModelOutput | EncoderOutput | None:
    """The model's output of a batch; None on a rank without the last stage."""
    if isinstance(model, Pipeline):
        return model.token_outputs(batch.inputs())
    output: ModelOutput | EncoderOutput = model(**batch.inputs())
    return output


def _heads(batch: AnyBatch, output: ModelOutput | EncoderOutput | None) -> list[_Head]:
    """Each head's results, in the order of the loss's terms."""
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


def _of_whole_rows(head: _Head, tensor: Tensor, whole: AnyBatch, axis: Axis) -> Tensor:
    """A head's logits or losses on this rank of context parallelism -> those of the batch before it was split."""
    if not head.prefix:
        places = whole.masked_labels if isinstance(whole, EncoderBatch) else whole.labels
        return all_gather(tensor, axis, dim=1)[:, : places.shape[1]]
    # Sequences: every rank has the logits, whose mean shows one that differs; the first has the losses.
    total = all_reduce(tensor, axis)
    return total if tensor is head.losses else total / axis.size


def run_on_mesh(case: Case, mesh: Mesh, *, after_fill: Callable[[nn.Module, Mesh], None] | None = None) -> Outcome:
    """The step on the mesh, by the code that trains; a collective, the outcome is whole on every rank, on its host.

    Args:
        after_fill: called on the filled model; the self-test plants a fault there.
    """
    model = build_model(
        case.model,
        mesh,
        compute_dtype=case.compute_dtype,
        recompute=case.recompute,
        compile_blocks=False,
        seed=case.seed,
    )
    if after_fill is not None:
        after_fill(model, mesh)
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=())
    whole = make_batches(case)
    batches = rank_batches(whole, mesh)
    outcome: Outcome = {}
    for index, batch in enumerate(batches):
        for head in _heads(batch, _forward(model, batch)):
            logits = head.logits
            if not head.prefix:
                logits = all_gather(logits, mesh.tp.axis, dim=-1)[..., : case.model.vocab_size]
            # clone: a collective's result is waited on at its first use, and only rank 0 uses the outcome.
            found = {f"{head.prefix}logits": logits, f"{head.prefix or 'token_'}losses": head.losses}
            for name, tensor in found.items():
                rows = _of_whole_rows(head, tensor, whole[index], mesh.cp.axis)
                outcome[f"{name}.{index}"] = all_gather(rows, mesh.samples, dim=0).clone().cpu()
    losses, counts = accumulate_gradients(model, batches, mesh)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # A copy: where nothing is gathered the whole gradient is the gradient itself, which clipping scales in place.
        outcome[f"gradient:{name}"] = full_tensor(parameter.grad).clone().cpu()
    result = apply_gradients(model, optimizer, losses, counts, max_grad_norm=OPTIMIZER.max_grad_norm, step=0).wait()
    scalars = {"loss": result.loss, "grad_norm": result.grad_norm}
    outcome |= {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
    for name, parameter in model.named_parameters():
        outcome[f"weight:{name}"] = full_tensor(parameter.detach()).cpu()
    return _joined(gather_objects(outcome, mesh.pp.group))


def _joined(parts: Sequence[Outcome]) -> Outcome:
    """The outcome of a model whose stages gave parts of it; NaN for a tensor of which two stages have other copies."""
    whole: Outcome = {}
    for name, tensor in (item for part in parts for item in part.items()):
        same = name not in whole or torch.equal(whole[name], tensor)
        whole[name] = tensor if same else torch.full_like(tensor, math.nan)
    return whole


def run_reference(
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dither: torch.Generator | None = None,
    recompute: bool = False,
) -> Outcome:
    """The step in this process alone, in `dtype`: plain tensors, plain autograd, plain AdamW; all on `device`.

    `device` is that of the mesh: the draws of the initial weights are the same on every mesh of one kind of device.

    Args:
        dither: for bf16: rounds each weight up or down by chance, the nearer the likelier, instead of to the nearest.
        recompute: blocks compute their activations again: the same bits, for a model whose activations do not fit.
    """
    wide = torch.promote_types(dtype, torch.float32)
    model = _filled(case, wide, device, recompute=recompute)
    # As on the mesh: the optimizer's weights and the sum of gradients are wide, what the model computes with is not.
    masters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters()}
    gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
    precise = {parameter for module in model.full_precision_modules() for parameter in module.parameters()}
    for parameter in model.parameters():
        if parameter not in precise:
            parameter.data = (parameter.data if dither is None else _dithered(parameter.data, dither)).to(dtype)
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
        loss.backward()
        total += loss.detach()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] += parameter.grad
            parameter.grad = None
    for name, master in masters.items():
        outcome[f"gradient:{name}"], master.grad = gradients[name].clone(), gradients[name]
    outcome["loss"] = total
    outcome |= _step(masters)
    return outcome


def on_host(outcome: Outcome) -> Outcome:
    """The same in the host's memory, where several of a large model fit."""
    return {name: tensor.cpu() for name, tensor in outcome.items()}


def _dithered(x: Tensor, generator: torch.Generator) -> Tensor:
    """x plus an even draw from one unit in the last place of bf16, half of it to either side."""
    unit = torch.ldexp(x.sign(), torch.frexp(x).exponent - 8)  # 0 of a weight that is 0
    return x + unit * (torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device) - 0.5)


def run_step(case: Case, gradients: Outcome, device: torch.device) -> Outcome:
    """`grad_norm` and `weight:<p>` of the step of one process that starts from the same weights and has the gradients
    `gradient:<p>` of another outcome, all in fp32."""
    masters = dict(_filled(case, torch.float32, device).named_parameters())
    for name, master in masters.items():
        master.grad = gradients[f"gradient:{name}"].to(device, torch.float32, copy=True)  # clipped in place
    return on_host(_step(masters))


def _filled(case: Case, dtype: torch.dtype, device: torch.device, *, recompute: bool = False) -> Model:
    """The whole model with its initial weights."""
    model = make_model(case.model, recompute=recompute).to(dtype)
    model.to_empty(device=device)
    init_weights(model, case.seed)
    return model


def _step(masters: dict[str, nn.Parameter]) -> Outcome:
    """Clips the weights' gradients and takes AdamW's first step: the norm before, and the weights after."""
    assert OPTIMIZER.max_grad_norm is not None
    norm = torch.nn.utils.clip_grad_norm_(masters.values(), OPTIMIZER.max_grad_norm)
    beta1, beta2 = OPTIMIZER.betas
    torch.optim.AdamW(
        masters.values(), OPTIMIZER.lr, (beta1, beta2), OPTIMIZER.eps, OPTIMIZER.weight_decay, foreach=False
    ).step()
    return {"grad_norm": norm.detach()} | {f"weight:{name}": master.detach() for name, master in masters.items()}
