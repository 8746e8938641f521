"""AdamW over plain tensors or DTensors, with weight decay on selected parameters only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalin.optim.config import OptimizerConfig
from megalin.parallel.tensor_parallel import local

_STOP = "stop_updates"
"""Attribute of an optimizer, [] fp32: 1 after a step that was not sound."""


class _LocalAdamW(torch.optim.AdamW):
    """Updates this rank's shard of each weight, which suffices for an elementwise update. With DTensors torch would
    match the placements of every weight, gradient and moment first."""

    def _init_group(self, *args: Any) -> Any:
        """Fills the lists after the group (weights, gradients, moments, step counts) with local tensors."""
        has_complex = super()._init_group(*args)
        for tensors in args[1:]:
            tensors[:] = map(local, tensors)
        return has_complex


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, no_decay: Collection[str], *, plain: bool = False
) -> torch.optim.AdamW:
    """Builds torch's fused AdamW over the trainable parameters of `model`, plain tensors or DTensors, on CPU or CUDA.

    Call it after sharding. State has the dtype and placements of its parameter. Groups carry the parameters' names
    (`param_names`), for checkpoints.

    Args:
        no_decay: global names of parameters without weight decay; names that are not in this model (another pipeline
            stage's) are ignored. An attribute on the parameter would not survive `fully_shard`.
        plain: no parameter is a DTensor; the optimizer is torch's own class, which DeepSpeed requires.
    """
    kind = torch.optim.AdamW if plain else _LocalAdamW
    groups = parameter_groups(model, config, no_decay)
    return kind(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def parameter_groups(model: nn.Module, config: OptimizerConfig, no_decay: Collection[str]) -> list[dict[str, Any]]:
    """Parameter groups of the trainable parameters with their names: with weight decay, then without."""
    decayed: list[tuple[str, nn.Parameter]] = []
    kept: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (kept if name in no_decay else decayed).append((name, parameter))
    return [
        {"params": group, "weight_decay": weight_decay}
        for group, weight_decay in ((decayed, config.weight_decay), (kept, 0.0))
        if group
    ]


def step_or_skip(sound: Tensor, optimizer: torch.optim.AdamW, *, skip: Tensor | None = None) -> Tensor:
    """Updates the weights; or, if `skip` [] is true, or `sound` [] is false or was false at an earlier call, leaves
    weights, moments and step count unchanged (docs/adr/0019-step-or-skip.md).

    The device reads both flags, through fused AdamW's support for gradient scalers; the host does not wait for them.

    Args:
        sound: false: the run must stop, so every later update is skipped too, until `clear_stop`.
        skip: true: this update alone is skipped, and the run goes on.

    Returns:
        [] bool on the device: whether the weights were updated.
    """
    stop = (~sound).to(torch.float32)
    before: Tensor | None = getattr(optimizer, _STOP, None)
    stop = stop if before is None else torch.maximum(before, stop)
    found_inf = stop if skip is None else torch.maximum(stop, skip.to(torch.float32))
    setattr(optimizer, _STOP, stop)
    cast(Any, optimizer).found_inf = found_inf
    optimizer.step()
    return found_inf == 0


def clear_stop(optimizer: torch.optim.AdamW) -> None:
    """Clears the flag of a step that was not sound, so that updates resume."""
    setattr(optimizer, _STOP, None)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of the next update in every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
