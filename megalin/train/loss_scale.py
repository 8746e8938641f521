"""Dynamic loss scaling of float16 runs: its config, and the scale, which the device updates within each step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX
from megalin.parallel.agreement import on_rank_zero, rank
from megalin.parallel.mesh import Mesh
from megalin.train.precision import LARGEST_SCALE, LossScaleConfig

if TYPE_CHECKING:
    from megalin.train.config import TrainConfig

LOSS_SCALE_PREFIX = f"{OPTIMIZER_PREFIX}loss_scale."
"""Prefix of the names of a loss scale's tensors in a checkpoint."""

_log = logging.getLogger(__name__)


class StepScale(NamedTuple):
    """Loss scaling of a finished step."""

    scale: float
    """The scale of its backward."""
    skipped: bool
    """True if its gradients overflowed, so that the weights did not change."""
    overflows: int
    """Such steps of the run so far, this one included."""


class LossScale:
    """A loss scale with its counts, on the device: the host reads none of them to launch a step.

    After a step whose gradients overflow the scale is halved, and after `growth_interval` other steps in a row doubled.

    Attributes:
        scale: [] fp32. Its memory stays the same, for CUDA graphs.
    """

    def __init__(self, config: LossScaleConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self.scale = torch.full((), config.initial, device=mesh.device)
        self._clean_steps = torch.zeros((), device=mesh.device)
        self._overflows = torch.zeros((), device=mesh.device)

    @torch.no_grad()
    def judge(self, loss_is_finite: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Decides about a step by its loss and the norm of its gradients.

        Returns:
            Two [] bools, equal on every rank. The first is false if the run must stop: the loss is not finite, or the
            gradients overflow with the lowest scale. The second is true if they overflow: the norm is not finite on
            any rank, though the loss is.
        """
        overflow = self._mesh.is_true_anywhere(loss_is_finite & ~norm.isfinite())
        return loss_is_finite & ~(overflow & (self.scale <= self._config.minimum)), overflow

    @torch.no_grad()
    def update(self, overflow: Tensor) -> Tensor:
        """Updates scale and counts after a step; returns the values of `read_step`, [3] fp64."""
        used = self.scale.clone()
        clean_steps = torch.where(overflow, 0.0, self._clean_steps + 1.0)
        is_grown = clean_steps >= self._config.growth_interval
        factor = torch.where(overflow, 0.5, torch.where(is_grown, 2.0, 1.0))
        self.scale.mul_(factor).clamp_(self._config.minimum, LARGEST_SCALE)
        self._clean_steps.copy_(torch.where(is_grown, 0.0, clean_steps))
        self._overflows.add_(overflow)
        return torch.stack([used, overflow.to(used.dtype), self._overflows]).double()

    def must_stop(self, step: StepScale) -> bool:
        """True if a step overflowed with the lowest scale."""
        return step.skipped and step.scale <= self._config.minimum

    def tensors(self) -> dict[str, Tensor]:
        """The state in a checkpoint, by name; loading writes it in place."""
        state = {"scale": self.scale, "clean_steps": self._clean_steps, "overflows": self._overflows}
        return {f"{LOSS_SCALE_PREFIX}{name}": tensor for name, tensor in state.items()}

    def saved_in(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The tensors to load from a checkpoint; none, with a warning, if it is of a run in another dtype. One
        broadcast."""
        tensors = self.tensors()
        if on_rank_zero(lambda: tensors.keys() <= checkpoint.index().tensors.keys()):
            return tensors
        if rank() == 0:
            _log.warning(
                "%s has no loss scale, since its run was not in float16; it starts at %g",
                checkpoint.path,
                self._config.initial,
            )
        self.scale.fill_(self._config.initial)
        self._clean_steps.zero_()
        self._overflows.zero_()
        return {}


def read_step(values: list[float]) -> StepScale:
    """The loss scaling of a step, from the values that `LossScale.update` returned."""
    scale, skipped, overflows = values
    return StepScale(scale, bool(skipped), int(overflows))


def describe_lowest_scale(step: StepScale) -> str:
    """Message for a step that overflowed with the lowest scale."""
    return (
        f"the gradient overflows float16 with the loss scale {step.scale:,.0f}, and train.loss_scale.minimum allows no "
        f'lower one ({step.overflows} overflows in this run); train.dtype = "bfloat16" has a wider range'
    )


def make_loss_scale(train: TrainConfig, mesh: Mesh) -> LossScale | None:
    """The loss scale of a run; None unless it computes in float16."""
    return LossScale(train.loss_scale or LossScaleConfig(), mesh) if train.dtype == "float16" else None
