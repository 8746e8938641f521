"""One optimizer step: micro-batches, a token-exact loss, one norm, one finite check, clip, update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalin.data.packing import Batch
from megalin.errors import NumericError
from megalin.model.language_model import LanguageModel
from megalin.optim.clipping import clip_gradients
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.data_parallel import set_gradient_reduction
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import local


class StepResult(NamedTuple):
    """What a step tells, equal on every rank."""

    loss: float
    """Mean loss of the step's valid labels over all ranks, nats a token."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    label_tokens: int
    """Valid labels of the step over all ranks."""


def accumulate_gradients(model: LanguageModel, batches: Sequence[Batch], mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Forward and backward of a step's micro-batches; the gradient is that of the step's mean token loss.

    loss = sum over ranks and micro-batches of the token losses / number of valid labels of the whole step, so neither
    accumulation nor the mesh nor ignored labels change it. Gradients are reduced once, after the last micro-batch.

    Returns:
        The loss (fp64, nats a token) and the number of valid labels (int64), 0-dim, equal on every rank.
    """
    valid = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in batches]).sum()
    count = mesh.sum_over_data(valid)
    total = torch.zeros((), dtype=torch.float64, device=count.device)
    for index, batch in enumerate(batches):
        set_gradient_reduction(model, enabled=index == len(batches) - 1)
        output = model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids)
        assert output.token_losses is not None
        loss = output.token_losses.sum() / count.clamp(min=1)
        loss.backward()
        total += loss.detach()
        del output, loss  # before the next forward, which needs the memory
    return mesh.sum_over_data(total), count


def train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    mesh: Mesh,
    *,
    max_grad_norm: float | None,
    step: int,
) -> StepResult:
    """One update of the weights: `accumulate_gradients`, then `apply_gradients`."""
    loss, count = accumulate_gradients(model, batches, mesh)
    return apply_gradients(model, optimizer, loss, count, max_grad_norm=max_grad_norm, step=step)


def apply_gradients(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    count: Tensor,
    *,
    max_grad_norm: float | None,
    step: int,
) -> StepResult:
    """One norm, one finite check, clip, update; `loss` and `count` are `accumulate_gradients`', `step` is for messages.

    Raises:
        NumericError: on every rank, before any weight changes, when the loss or the gradient is not finite.
    """
    norm = clip_gradients(list(model.parameters()), max_grad_norm)
    values = torch.stack([loss, norm.to(loss.dtype), count.to(loss.dtype)]).tolist()
    result = StepResult(values[0], values[1], int(values[2]))
    if not torch.isfinite(torch.tensor(values)).all():
        raise NumericError(_describe_non_finite(model, result, step))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.after_optimizer_step()
    return result


def _describe_non_finite(model: nn.Module, result: StepResult, step: int) -> str:
    """Names the ranks and parameters with non-finite elements; a collective, called on every rank."""
    found = {
        "weight": [name for name, parameter in model.named_parameters() if not _is_finite(parameter)],
        "gradient": [name for name, parameter in model.named_parameters() if not _is_finite(parameter.grad)],
    }
    by_rank: list[dict[str, list[str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    # A weight that is not finite spoils the gradients of all the others: it alone tells where.
    what = "weight" if any(ranks["weight"] for ranks in by_rank) else "gradient"
    places = [
        f"rank {rank}: {', '.join(f'{name} ({what})' for name in names[what][:3])}"
        for rank, names in enumerate(by_rank)
        if names[what]
    ]
    where = "; ".join(places) if places else "no parameter: the loss itself"
    return (
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm} is not finite; first in {where}. "
        "No weight was changed and nothing was saved; resume from the last checkpoint with a lower optimizer.lr, "
        "or look at the samples of this step"
    )


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(local(tensor.detach())).all())
