"""One step of a case, on the mesh and in one process: every tensor that the two must agree on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional
from torch import Tensor, nn

from megalin.model.language_model import LanguageModel
from megalin.optim.adamw import OptimizerConfig, build_optimizer
from megalin.parallel.collectives import all_gather
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.initialisation import fill
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor
from megalin.train.build import build_model
from megalin.train.evaluate import batch_to
from megalin.train.step import accumulate_gradients, apply_gradients
from megalin.verify.case import Case, make_batches, rank_batches

Outcome = dict[str, Tensor]
"""Whole tensors on the CPU by name: logits.<m>, token_losses.<m>, loss, grad_norm, gradient:<p>, weight:<p>."""

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.05)
"""The clip is far below the gradient's norm, so a norm that misses or repeats an element changes the weights."""


def run_on_mesh(case: Case, mesh: Mesh, *, after_fill: Callable[[nn.Module, Mesh], None] | None = None) -> Outcome:
    """The step on the mesh, by the code that trains; a collective, the outcome is whole on every rank.

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
    batches = rank_batches(make_batches(case), mesh.data.rank, mesh.device)
    outcome: Outcome = {}
    for index, batch in enumerate(batches):
        with torch.no_grad():
            output = model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids)
        assert output.token_losses is not None
        logits = all_gather(output.logits, mesh.tp.axis, dim=-1)[..., : case.model.vocab_size]
        # clone: a collective's result is waited on at its first use, and only rank 0 uses the outcome.
        outcome[f"logits.{index}"] = all_gather(logits, mesh.data, dim=0).clone().cpu()
        outcome[f"token_losses.{index}"] = all_gather(output.token_losses, mesh.data, dim=0).clone().cpu()
    loss, count = accumulate_gradients(model, batches, mesh)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # A copy: where nothing is gathered the whole gradient is the gradient itself, which clipping scales in place.
        outcome[f"gradient:{name}"] = full_tensor(parameter.grad).clone().cpu()
    result = apply_gradients(model, optimizer, loss, count, max_grad_norm=OPTIMIZER.max_grad_norm, step=0)
    scalars = {"loss": result.loss, "grad_norm": result.grad_norm}
    outcome |= {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
    for name, parameter in model.named_parameters():
        outcome[f"weight:{name}"] = full_tensor(parameter.detach()).cpu()
    return outcome


def run_reference(case: Case, dtype: torch.dtype, device: torch.device) -> Outcome:
    """The step in this process alone, in `dtype`: plain tensors, plain autograd, plain AdamW.

    `device` is that of the mesh: the draws of the initial weights are the same on every mesh of one kind of device.
    """
    wide = torch.promote_types(dtype, torch.float32)
    model = _filled(case, wide, device)
    # As on the mesh: the optimizer's weights and the sum of gradients are wide, what the model computes with is not.
    masters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters()}
    gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
    precise = {parameter for module in model.full_precision_modules() for parameter in module.parameters()}
    for parameter in set(model.parameters()) - precise:
        parameter.data = parameter.data.to(dtype)
    batches = [batch_to(batch, device) for batch in make_batches(case)]
    outcome: Outcome = {}
    count = sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index, batch in enumerate(batches):
        output = model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids)
        outcome[f"logits.{index}"] = logits = output.logits.detach()[..., : case.model.vocab_size]
        labels = batch.labels.clamp(min=0)[..., None]
        losses = -torch.nn.functional.log_softmax(logits.to(wide), -1).gather(-1, labels).squeeze(-1)
        outcome[f"token_losses.{index}"] = losses.masked_fill(batch.labels == IGNORED_LABEL, 0.0)
        assert output.token_losses is not None
        loss = output.token_losses.sum() / count
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
    return {name: tensor.cpu() for name, tensor in outcome.items()}


def run_step(case: Case, gradients: Outcome, device: torch.device) -> Outcome:
    """`grad_norm` and `weight:<p>` of the step of one process that starts from the same weights and has the gradients
    `gradient:<p>` of another outcome, all in fp32."""
    masters = dict(_filled(case, torch.float32, device).named_parameters())
    for name, master in masters.items():
        master.grad = gradients[f"gradient:{name}"].to(device, torch.float32, copy=True)  # clipped in place
    return {name: tensor.cpu() for name, tensor in _step(masters).items()}


def _filled(case: Case, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """The whole model with its initial weights."""
    model = LanguageModel(case.model).to(dtype)
    model.to_empty(device=device)
    fill(model, case.seed)
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
