"""AdamW over plain tensors or DTensors, with weight decay on selected parameters only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalin.ops.adamw_update import AdamWOptions, UpdateTables, UpdateTensors, adamw_update, choose_update
from megalin.optim.config import OptimizerConfig
from megalin.parallel.tensor_parallel import local, sharded_zeros_like
from megalin.parallel.weight_copies import WeightCopy, add_weight_copies, compute_dtype

_STOP = "stop_updates"
"""Attribute of an optimizer, [] fp32: 1 after a step that was not sound."""


class _LocalAdamW(torch.optim.AdamW):
    """Updates this rank's shard of each weight, which suffices for an elementwise update. With DTensors torch would
    match the placements of every weight, gradient and moment first."""

    def _init_group(self, *args: Any) -> Any:
        """Fills the lists after the group (weights, gradients, moments, step counts) with local tensors."""
        for weight in args[0]["params"]:
            if weight.grad is not None and not self.state[weight]:
                self.state[weight] = {
                    "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                    "exp_avg": sharded_zeros_like(weight),
                    "exp_avg_sq": sharded_zeros_like(weight),
                }
        has_complex = super()._init_group(*args)
        for tensors in args[1:]:
            tensors[:] = map(local, tensors)
        return has_complex


_LANES = 64
"""Multiple of the elements that an instruction of any CPU updates at once."""


class _PaddedAdamW(_LocalAdamW):
    """Updates shards on a CPU so that the bits of an element do not depend on its place in the shard.

    Torch's fused update computes the elements after the last whole vector of a tensor by other instructions, which may
    round differently. So a shard with such a rest is updated in a copy that zeros fill up to whole vectors.
    """

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, **options)
        self._copies: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the weights that have a gradient, unless `found_inf` is not 0."""
        assert closure is None
        super().step()
        for tensor, copy in self._copies:
            tensor.copy_(copy[: tensor.numel()].view_as(tensor))
        self._copies.clear()

    def _init_group(self, *args: Any) -> Any:
        has_complex = super()._init_group(*args)
        for tensors in args[1:5]:  # weights, gradients, both moments
            tensors[:] = map(self._padded, tensors)
        return has_complex

    def _padded(self, tensor: Tensor) -> Tensor:
        """The tensor, or its padded copy."""
        rest = tensor.numel() % _LANES
        if rest == 0:
            return tensor
        copy = torch.cat([tensor.flatten(), tensor.new_zeros(_LANES - rest)])
        self._copies.append((tensor, copy))
        return copy


class _KernelAdamW(_LocalAdamW):
    """AdamW by the kernel of `megalin.ops.adamw_update`: it scales the gradients, which stay as they are, and writes
    the copies of the weights.

    Attributes:
        gradient_scale: [] fp32, the factor of the gradients in the next update; None: 1.
    """

    gradient_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: Any, copies: Mapping[nn.Parameter, WeightCopy], **options: Any) -> None:
        super().__init__(groups, **options)
        self._copies, self._tables = copies, [UpdateTables() for _ in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the weights that have a gradient, unless `found_inf` is not 0."""
        assert closure is None
        for group, tables in zip(self.param_groups, self._tables, strict=True):
            lists: list[list[Any]] = [[] for _ in range(5)]
            self._init_group(group, *lists[:4], [], lists[4])
            weights, gradients, means, squares, steps = lists
            if not weights:
                continue
            copies = [self._copies.get(p) for p in group["params"] if p.grad is not None]
            zero, (beta1, beta2) = torch.zeros((), device=weights[0].device), group["betas"]
            skip = zero if self.found_inf is None else self.found_inf
            torch._foreach_add_(steps, [1 - skip] * len(steps))
            adamw_update(
                UpdateTensors(
                    weights,
                    [gradient.contiguous() for gradient in gradients],
                    means,
                    squares,
                    steps,
                    [None if copy is None else copy.shard for copy in copies],
                ),
                scale=zero + 1 if self.gradient_scale is None else self.gradient_scale,
                skip=skip,
                options=AdamWOptions(group["lr"], beta1, beta2, group["eps"], group["weight_decay"]),
                tables=tables,
            )
            torch.autograd.graph.increment_version([*weights, *means, *squares])
            for copy in copies:
                if copy is not None:
                    copy.mark_written()


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    no_decay: Collection[str],
    *,
    plain: bool = False,
    same_on_any_shard: bool = False,
) -> torch.optim.AdamW:
    """Builds AdamW over the trainable parameters of `model`, plain tensors or DTensors, on CPU or CUDA: by the kernel
    of op "adamw_update" where it runs, else torch's fused one. With the kernel each weight gets a copy in the compute
    dtype (`megalin.parallel.weight_copies`).

    Call it after sharding, before the first forward. State has the dtype and placements of its parameter. Groups carry
    the parameters' names (`param_names`), for checkpoints.

    Args:
        no_decay: global names of parameters without weight decay; names that are not in this model (another pipeline
            stage's) are ignored. An attribute on the parameter would not survive `fully_shard`.
        plain: no parameter is a DTensor; the optimizer is torch's own class, which DeepSpeed requires.
        same_on_any_shard: the update of an element has the same bits in every shard of its weight; without it, this
            holds on GPUs only.

    Raises:
        KernelError: MEGALIN_KERNELS requests the kernel, and it cannot run.
    """
    groups = parameter_groups(model, config, no_decay)
    betas = (config.betas[0], config.betas[1])
    options: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps, "fused": True}
    if plain:
        return torch.optim.AdamW(groups, **options)
    with torch.no_grad():
        weights = [local(parameter) for group in groups for _, parameter in group["params"]]
    if choose_update(weights, compute_dtype(model)) == "triton":
        return _KernelAdamW(groups, add_weight_copies(model), **options)
    if same_on_any_shard and weights[0].device.type == "cpu":
        return _PaddedAdamW(groups, **options)
    return _LocalAdamW(groups, **options)


def folds_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's update scales the gradients (`step_or_skip`)."""
    return isinstance(optimizer, _KernelAdamW)


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


def step_or_skip(
    sound: Tensor, optimizer: torch.optim.AdamW, *, skip: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Updates the weights; or, if `skip` [] is true, or `sound` [] is false or was false at an earlier call, leaves
    weights, moments and step count unchanged (docs/adr/0019-step-or-skip.md).

    The device reads both flags, through fused AdamW's support for gradient scalers; the host does not wait for them.

    Args:
        sound: false: the run must stop, so every later update is skipped too, until `clear_stop`.
        skip: true: this update alone is skipped, and the run goes on.
        scale: [], the factor of the gradients, for an optimizer that `folds_scale`; None: 1.

    Returns:
        [] bool on the device: whether the weights were updated.
    """
    stop = (~sound).to(torch.float32)
    before: Tensor | None = getattr(optimizer, _STOP, None)
    stop = stop if before is None else torch.maximum(before, stop)
    found_inf = stop if skip is None else torch.maximum(stop, skip.to(torch.float32))
    setattr(optimizer, _STOP, stop)
    cast(Any, optimizer).found_inf = found_inf
    if isinstance(optimizer, _KernelAdamW):
        optimizer.gradient_scale = scale
    else:
        assert scale is None, "torch's AdamW does not scale gradients"
    optimizer.step()
    return found_inf == 0


def clear_stop(optimizer: torch.optim.AdamW) -> None:
    """Clears the flag of a step that was not sound, so that updates resume."""
    setattr(optimizer, _STOP, None)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of the next update in every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
