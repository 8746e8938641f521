"""One optimizer step: micro-batches, a token-exact loss, one norm, one finite check, clip, update."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalin.data.batch import AnyBatch
from megalin.errors import NumericError
from megalin.optim.adamw import clear_stop, folds_scale, step_or_skip
from megalin.optim.clipping import GradientNorms, clip_gradients
from megalin.parallel.collectives import wait_tensor
from megalin.parallel.data_parallel import finish_backward, prepare_backward
from megalin.parallel.mesh import Mesh
from megalin.parallel.messages import gather_values
from megalin.parallel.tensor_parallel import local
from megalin.train.build import TrainedModel
from megalin.train.loss_scale import LossScale, StepScale, describe_lowest_scale, read_step
from megalin.train.pipeline_model import Pipeline
from megalin.train.spikes import NUM_VALUES, SpikeGuard, SpikeReading
from megalin.train.start_checks import check_same_self_tests
from megalin.train.step_timer import StepDuration, StepTimer

NOTHING_CHANGED = (
    "No weight was changed and nothing was saved; resume from the last checkpoint with a lower optimizer.lr, or look "
    "at the samples of this step"
)
"""End of the error message of a skipped step."""


class StepResult(NamedTuple):
    """Result of a step, equal on every rank except for `seconds` and `own_seconds`."""

    loss: float
    """Sum of the terms; for a decoder, the mean loss of the step's valid labels over all ranks, nats a token."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    label_tokens: int
    """Valid token labels of the step over all ranks."""
    terms: tuple[float, ...]
    """The mean loss of each term of the model's `loss_names`, over its own valid labels of all ranks."""
    seconds: float
    """Duration of the step on this rank, as `StepTimer` measures it."""
    scaling: StepScale | None = None
    """Loss scaling of the step; None unless the run computes in float16."""
    spike: SpikeReading | None = None
    """The step against those before it; None without a guard."""
    own_seconds: float = 0.0
    """Time of this rank's GPU in the step without waits for other ranks; 0 where it is not measured."""

    @property
    def skipped(self) -> bool:
        """Whether the update was left out, for an overflow of float16 or a spike."""
        overflow = self.scaling is not None and self.scaling.skipped
        return overflow or (self.spike is not None and self.spike.withheld)

    @property
    def is_ready(self) -> bool:
        """True: the result is already on the host."""
        return True

    def wait(self) -> StepResult:
        """Returns itself."""
        return self


class PendingStep(Protocol):
    """A launched step, whose result may still be on the device."""

    @property
    def is_ready(self) -> bool:
        """Whether the step is done and its result is on the host; the same on every rank."""

    def wait(self) -> StepResult:
        """Waits for the result. A collective if the result is an error.

        Raises:
            NumericError: on every rank, when the loss or the gradient is not finite; in float16 a gradient only with
                the lowest loss scale. Neither this step nor a later one has changed a weight.
        """


class AsyncScalars:
    """Asynchronous device-to-host copy of a few scalars; `read()` blocks only until that copy has finished."""

    def __init__(self, scalars: Tensor) -> None:
        self._scalars = scalars.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if scalars.is_cuda else None

    def read(self) -> Tensor:
        """The scalars in host memory."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._scalars


class LaunchedStep:
    """A step launched by `apply_gradients`.

    Attributes:
        applied: [] bool on the device: whether its update was applied, which a loss or gradient that is not finite
            prevents, in this step or in an earlier one whose error was not raised yet; and in this step an overflow of
            float16, or a spike whose update is to be left out.
    """

    applied: Tensor

    def __init__(
        self,
        model: TrainedModel,
        optimizer: torch.optim.AdamW,
        names: list[str],
        scalars: Tensor,
        duration: StepDuration,
        step: int,
        loss_scale: LossScale | None = None,
        spikes: SpikeGuard | None = None,
    ) -> None:
        """`scalars`: loss, norm, labels, terms, with a loss scale its values, with a guard its values, and the norm of
        each named gradient on this rank.

        The end of `duration` was recorded before this call, so it is readable once the scalars are on the host.
        """
        self._model, self._optimizer, self._names, self._step = model, optimizer, names, step
        self._duration, self._loss_scale, self._spikes = duration, loss_scale, spikes
        self._scalars = AsyncScalars(scalars)
        self.is_ready = not scalars.is_cuda

    def wait(self) -> StepResult:
        scalars = self._scalars.read()
        values, local_norms = scalars.split([len(scalars) - len(self._names), len(self._names)])
        loss, norm, labels, *terms = values.tolist()
        scaling = spike = None
        if self._spikes is not None:
            terms, spike = terms[:-NUM_VALUES], self._spikes.read(terms[-NUM_VALUES:])
        if self._loss_scale is not None:
            terms, scaling = terms[:-3], read_step(terms[-3:])
        seconds, own_seconds = self._duration.seconds(), self._duration.own_seconds()
        result = StepResult(loss, norm, int(labels), tuple(terms), seconds, scaling, spike, own_seconds)
        if self._must_stop(result):
            clear_stop(self._optimizer)
            norms = dict(zip(self._names, local_norms.tolist(), strict=True))
            raise NumericError(_describe_non_finite(self._model, norms, result, self._step))
        return result

    def _must_stop(self, result: StepResult) -> bool:
        """The decision of the device, equal on every rank."""
        if result.scaling is None or self._loss_scale is None:
            return not all(map(math.isfinite, (result.loss, result.grad_norm, *result.terms)))
        return not math.isfinite(result.loss) or self._loss_scale.must_stop(result.scaling)


def accumulate_gradients(
    model: TrainedModel, batches: Sequence[AnyBatch], mesh: Mesh, loss_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Forward and backward of a step's micro-batches; the gradient is that of the sum of the step's mean losses.

    loss = sum over the model's terms of (sum over ranks and micro-batches of the term's losses / number of its valid
    labels in the whole step), so neither accumulation nor the mesh nor ignored labels change it.

    Args:
        loss_scale: [], multiplies the gradients but not the losses.

    Returns:
        The mean loss of each term (fp64, nats a label) and the number of its valid labels (int64), [terms], equal on
        every rank. No collective is pending in them: after the capture of a CUDA graph nothing could wait for it.
    """
    counts = mesh.count_labels([batch.label_counts() for batch in batches])
    if isinstance(model, Pipeline):
        total = model.accumulate_gradients(batches, counts, loss_scale)
        return wait_tensor(mesh.sum_over_data(mesh.pp.sum(total))), wait_tensor(counts)
    total = torch.zeros(counts.shape, dtype=torch.float64, device=counts.device)
    for index, batch in enumerate(batches):
        prepare_backward(model, mesh, last=index == len(batches) - 1)
        sums = model.loss_sums(batch.inputs())
        counts = wait_tensor(counts)
        losses = sums / counts.clamp(min=1)
        loss = losses.sum()
        (loss if loss_scale is None else loss * loss_scale).backward()
        total += losses.detach()
        del sums, losses, loss  # before the next forward, which needs the memory
    finish_backward(model, mesh)
    return wait_tensor(mesh.sum_over_data(total)), wait_tensor(counts)


def train_step(
    model: TrainedModel,
    optimizer: torch.optim.AdamW,
    batches: Sequence[AnyBatch],
    mesh: Mesh,
    *,
    max_grad_norm: float | None,
    step: int,
    timer: StepTimer | None = None,
    loss_scale: LossScale | None = None,
    spikes: SpikeGuard | None = None,
    compare_kernels: bool = False,
    copied: torch.cuda.Event | None = None,
) -> LaunchedStep:
    """One update of the weights: `accumulate_gradients`, then `apply_gradients`.

    Args:
        timer: the clock of a run's steps; without one this step is measured alone.
        loss_scale: of a run in float16.
        spikes: the losses and norms of the steps before.
        compare_kernels: as in `apply_gradients`.
        copied: recorded after a copy of the state before this step, for which the update waits on the GPU.
    """
    timer = timer or StepTimer(mesh.device)
    timer.start()
    losses, counts = accumulate_gradients(model, batches, mesh, None if loss_scale is None else loss_scale.scale)
    return apply_gradients(
        model,
        optimizer,
        losses,
        counts,
        max_grad_norm=max_grad_norm,
        step=step,
        timer=timer,
        loss_scale=loss_scale,
        spikes=spikes,
        compare_kernels=compare_kernels,
        copied=copied,
    )


def apply_gradients(
    model: TrainedModel,
    optimizer: torch.optim.AdamW,
    losses: Tensor,
    counts: Tensor,
    *,
    max_grad_norm: float | None,
    step: int,
    timer: StepTimer | None = None,
    loss_scale: LossScale | None = None,
    spikes: SpikeGuard | None = None,
    compare_kernels: bool = False,
    copied: torch.cuda.Event | None = None,
    grad_norm: Tensor | None = None,
) -> LaunchedStep:
    """One norm, one finite check, clip, update; `losses` and `counts` come from `accumulate_gradients`, `copied` is
    that of `train_step`, `step` is for messages.

    The host waits for none of it, so it can launch the next step while the device works. If the loss or the gradient
    is not finite, the device skips this update and every later one until that result has been waited for. With a loss
    scale, a gradient that overflows skips this update alone, unless the scale is at its minimum. So does a spike with a
    guard that skips.

    The step's duration ends with its loss and norm, before the update, so that reading it waits for nothing more; the
    update counts for the next step. Without a `timer` this function alone is measured.

    Args:
        grad_norm: [], of the whole gradient with its loss scale; None: it is computed.

    Raises:
        KernelError: with `compare_kernels`, as `check_same_self_tests` does, before the update.
    """
    if compare_kernels:
        check_same_self_tests()
    timer = timer or StepTimer(losses.device)
    timer.start()
    given = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    scale = None if loss_scale is None else loss_scale.scale
    norms = _clip(model, optimizer, given.values(), max_grad_norm, scale, grad_norm)
    values = torch.stack([losses.sum(), norms.global_norm.to(losses.dtype), counts[0].to(losses.dtype), *losses])
    scalars = [values]
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)
    if loss_scale is None:
        sound, skip = values.isfinite().all(), None
    else:
        sound, skip = loss_scale.judge(losses.isfinite().all(), norms.global_norm)
        scalars.append(loss_scale.update(skip))
    if spikes is not None:
        spike, compared = spikes.judge(values[0], values[1])
        scalars.append(compared)
        if spikes.skips:
            skip = spike if skip is None else skip | spike
    scalars.append(norms.local_norms.to(losses.dtype))
    pending = LaunchedStep(model, optimizer, list(given), torch.cat(scalars), timer.end(), step, loss_scale, spikes)
    pending.applied = step_or_skip(sound, optimizer, skip=skip, scale=norms.scale)
    optimizer.zero_grad(set_to_none=True)
    model.after_optimizer_step()
    return pending


def _clip(
    model: TrainedModel,
    optimizer: torch.optim.AdamW,
    given: Collection[nn.Parameter],
    max_norm: float | None,
    loss_scale: Tensor | None,
    grad_norm: Tensor | None,
) -> GradientNorms:
    """Norms of the gradients of the `given` parameters, which are scaled here or in the optimizer's update."""
    copies, stages = (model.counted_elsewhere(), model.pp.axis) if isinstance(model, Pipeline) else ((), None)
    return clip_gradients(
        given,
        max_norm,
        counted_elsewhere=copies,
        stages=stages,
        loss_scale=loss_scale,
        in_place=not folds_scale(optimizer),
        global_norm=grad_norm,
    )


def _describe_non_finite(model: nn.Module, norms: Mapping[str, float], result: StepResult, step: int) -> str:
    """Names the ranks and parameters with non-finite elements; a collective, called on every rank."""
    names = {
        "weight": [name for name, parameter in model.named_parameters() if not _is_finite(parameter)],
        "gradient": [name for name, norm in norms.items() if not math.isfinite(norm)],
    }
    by_rank: list[dict[str, list[str]]] = gather_values(names, dist.group.WORLD)
    # A weight that is not finite makes the gradients of all the others non-finite: only the weight is the cause.
    what = "weight" if any(ranks["weight"] for ranks in by_rank) else "gradient"
    places = [
        f"rank {rank}: {', '.join(f'{name} ({what})' for name in names[what][:3])}"
        for rank, names in enumerate(by_rank)
        if names[what]
    ]
    where = "; ".join(places) if places else "no parameter: the loss itself"
    found = f"loss {result.loss}, gradient norm {result.grad_norm} is not finite"
    if result.scaling is not None and math.isfinite(result.loss):
        found = describe_lowest_scale(result.scaling)
    return f"step {step}: {found}; first in {where}. {NOTHING_CHANGED}"


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local(tensor.detach())).all())
