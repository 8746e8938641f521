"""Guard against spikes of the loss and of the gradient's norm, which the device finds within each step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX
from megalin.parallel.agreement import on_rank_zero
from megalin.parallel.mesh import Mesh
from megalin.train.config import TrainConfig

SPIKES_PREFIX = f"{OPTIMIZER_PREFIX}spikes."
"""Prefix of the names of a guard's tensors in a checkpoint."""
WINDOW = 128
"""Steps whose median and deviation a step is compared with."""
WARM_UP = 100
"""Steps before the first comparison."""
DEVIATIONS = (10.0, 100.0)
"""Distance of a spike of the loss and of the norm from the median, in median absolute deviations."""
LEAST_LOSS = 0.1
"""Distance of a spike of the loss from the median, at least, nats a token: the losses of a task that a model has learnt
hardly deviate."""
LEAST_RATIO = 50.0
"""Ratio of a spike of the norm to the median, at least; norms up to 29 times the median were seen without a spike of
the loss."""
NUM_VALUES = 5
"""Numbers that `SpikeGuard.judge` returns for the host."""


class SpikeReading(NamedTuple):
    """A finished step against the steps before it."""

    found: bool
    """Whether its loss or norm is a spike."""
    withheld: bool
    """Whether its update was left out for that reason."""
    loss_median: float
    norm_median: float
    loss_deviation: float
    """Median absolute deviation."""
    norm_deviation: float

    def describe(self, loss: float, norm: float) -> str:
        """Message for people about a step that is a spike."""
        update = "its update was left out" if self.withheld else "its update was applied"
        return (
            f"spike: loss {loss:.4g}, in the {WINDOW} steps before it {self.loss_median:.4g} +- "
            f"{self.loss_deviation:.2g} (median, median absolute deviation); gradient norm {norm:.4g}, before it "
            f"{self.norm_median:.4g} +- {self.norm_deviation:.2g}; {update}"
        )


class SpikeGuard:
    """Losses and norms of the last steps, on the device: the host reads none of them to launch a step.

    A step is a spike if, after the first 100 steps, its loss is above the median of the last 128 steps by more than 10
    of their median absolute deviations and 0.1 nat, or its norm is above 50 times their median and 100 deviations.
    Every finite step counts among the next one's last 128, so a loss that stays high is no spike after 65 steps.

    Attributes:
        skips: whether the updates of spikes are to be left out.
    """

    def __init__(self, mesh: Mesh, *, skips: bool) -> None:
        self.skips = skips
        self._mesh = mesh
        self._history = torch.zeros(2, WINDOW, dtype=torch.float64, device=mesh.device)
        self._count = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._places = torch.arange(WINDOW, device=mesh.device)
        self._deviations = torch.tensor([DEVIATIONS], dtype=torch.float64, device=mesh.device).mT
        self._least = torch.tensor([[LEAST_LOSS], [0.0]], dtype=torch.float64, device=mesh.device)
        self._ratios = torch.tensor([[0.0], [LEAST_RATIO - 1.0]], dtype=torch.float64, device=mesh.device)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Compares a step with the ones before it, and adds it to them.

        Args:
            loss, norm: [], the loss, and the norm of the gradient before clipping.

        Returns:
            A [] bool: it is a spike; with `skips` equal on every rank. And the values of `read`, [NUM_VALUES] fp64.
        """
        step = torch.stack([loss, norm]).to(torch.float64)[:, None]
        known = torch.where(self._places < self._count, self._history, torch.inf)
        middle = ((self._count.clamp(1, WINDOW) - 1) / 2).long().expand(2, 1)
        median = known.sort(1).values.gather(1, middle)
        deviation = (known - median).abs().sort(1).values.gather(1, middle)
        least = torch.maximum(self._deviations * deviation, self._least + self._ratios * median)
        finite = step.isfinite().all()
        spike = (step > median + least).any() & finite & (self._count >= WARM_UP)
        if self.skips:  # norms of replicated weights may differ in their last bits
            spike = self._mesh.is_true_anywhere(spike)
        place = (self._count % WINDOW).long().expand(2, 1)
        self._history.scatter_(1, place, torch.where(finite, step, self._history.gather(1, place)))
        self._count.add_(finite)
        return spike, torch.cat([spike.to(torch.float64)[None], median[:, 0], deviation[:, 0]])

    def read(self, values: list[float]) -> SpikeReading:
        """The reading of a step, from the values that `judge` returned."""
        found, *others = values
        return SpikeReading(bool(found), bool(found) and self.skips, *others)

    def tensors(self) -> dict[str, Tensor]:
        """The state in a checkpoint, by name; loading writes it in place."""
        return {f"{SPIKES_PREFIX}history": self._history, f"{SPIKES_PREFIX}count": self._count}

    def saved_in(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The tensors to load from a checkpoint; none if it has no such state: then the guard starts new, and the next
        100 steps are exempt. One broadcast."""
        tensors = self.tensors()
        if on_rank_zero(lambda: tensors.keys() <= checkpoint.index().tensors.keys()):
            return tensors
        self._history.zero_()
        self._count.zero_()
        return {}


def make_spike_guard(train: TrainConfig, mesh: Mesh) -> SpikeGuard:
    """The guard of a run."""
    return SpikeGuard(mesh, skips=train.on_spike != "warn")
