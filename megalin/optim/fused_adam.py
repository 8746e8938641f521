"""AdamW over plain tensors: apex's FusedAdam if it is installed and agrees with torch's AdamW, else torch's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from megalin.ops.dispatch import apex, backend
from megalin.ops.dispatch.backend import Compiled
from megalin.optim.adamw import build_optimizer, parameter_groups
from megalin.optim.config import OptimizerConfig

_BOUND = 1e-5
"""Largest relative error in the self-test: above fp32 rounding over a few steps, far below another update rule."""
_STEPS = 3


def build_plain_optimizer(
    model: nn.Module, config: OptimizerConfig, no_decay: Collection[str], *, device: torch.device, group_by_group: bool
) -> torch.optim.Optimizer:
    """Builds AdamW over the trainable parameters of `model`, plain fp32 tensors, with the state of torch's AdamW.

    The implementation is selected like a kernel: op "adamw", with torch's AdamW as the reference.

    Args:
        no_decay: as in `build_optimizer`.
        device: device of weights and moments at the update.
        group_by_group: a step updates one group at a time while the others are empty, which apex does not support.

    Raises:
        KernelError: MEGALIN_KERNELS requests apex, and it cannot run.
    """
    unsupported = "groups without parameters" if group_by_group else ""
    if backend.choose("adamw", "auto", device.type, unsupported) == "apex":
        return _fused_adam(parameter_groups(model, config, no_decay), config)
    return build_optimizer(model, config, no_decay, plain=True)


def _fused_adam(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    from apex.optimizers import FusedAdam  # type: ignore[import-not-found]

    betas = (config.betas[0], config.betas[1])
    optimizer: torch.optim.Optimizer = FusedAdam(groups, lr=config.lr, betas=betas, eps=config.eps)
    optimizer.register_step_pre_hook(_set_group_steps)
    optimizer.register_step_post_hook(_count_step)
    return optimizer


def _set_group_steps(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Sets the step count of each group, where apex reads it; checkpoints and torch keep one per parameter."""
    for group in optimizer.param_groups:
        counts = {int(_state(optimizer, parameter)["step"]) for parameter in group["params"]}
        assert len(counts) <= 1, f"parameters of one group have taken {counts} steps"
        group["step"] = max(counts, default=0)


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                optimizer.state[parameter]["step"] += 1


def _state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    state = optimizer.state[parameter]
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    return state


def _self_test(name: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Compares weights and moments after a few steps, with and without decay, with torch's AdamW."""
    assert name == "apex", name
    if reason := apex.unavailable_reason("amp_C"):
        return reason
    config = OptimizerConfig(lr=0.01, betas=[0.9, 0.95], weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((33, 7), (1001,), (1,))]
    steps = [[torch.randn(x.shape, generator=generator) for x in start] for _ in range(_STEPS)]
    found = {}
    for kind in ("apex", "torch"):
        weights = [nn.Parameter(x.to(device, copy=True)) for x in start]
        groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = (
            _fused_adam(groups, config)
            if kind == "apex"
            else torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=config.eps)
        )
        for gradients in steps:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.to(device)
            optimizer.step()
        found[kind] = [
            tensor for x in weights for tensor in (x.detach(), *(optimizer.state[x][key] for key in _MOMENTS))
        ]
    for ours, truth in zip(found["apex"], found["torch"], strict=True):
        error = float((ours - truth).norm() / truth.norm())
        if not error <= _BOUND:
            return f"self-test: weights or moments differ from torch's by {error:.1e} (bound {_BOUND:.0e})"
    return ""


_MOMENTS = ("exp_avg", "exp_avg_sq")

backend.register("adamw", ("apex",), _self_test)
