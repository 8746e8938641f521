"""The loss of a model on a split: nats a token, perplexity, bits per byte, beside the unigram entropy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.data.packing import Batch
from megalin.model.language_model import LanguageModel
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.data_parallel import reshard
from megalin.parallel.mesh import Mesh


class Evaluation(NamedTuple):
    """Result over all valid labels of a split, equal on every rank."""

    loss: float
    """Mean nats a token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """Total loss in bits over the UTF-8 bytes that the labels decode to; None without a tokenizer."""
    unigram_entropy: float
    """Entropy in nats of the labels' own frequencies: the loss of the best model that knows no context."""
    tokens: int
    """Number of labels."""


@torch.no_grad()
def evaluate(
    model: LanguageModel, batches: Iterable[Batch], mesh: Mesh, *, token_bytes: Tensor | None = None
) -> Evaluation:
    """Runs every batch of this rank; all ranks call it with the same number of batches.

    Args:
        token_bytes: [vocabulary] int64, UTF-8 bytes that each id decodes to.
    """
    vocab_size, device = model.config.vocab_size, mesh.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=device)
    for batch in batches:
        batch = batch_to(batch, device)
        output = model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids)
        assert output.token_losses is not None
        total += output.token_losses.sum(dtype=torch.float64)
        counts += torch.bincount(batch.labels[batch.labels != IGNORED_LABEL], minlength=vocab_size)
    reshard(model)
    nats = mesh.sum_over_data(total).item()
    counts = mesh.sum_over_data(counts).cpu()
    tokens = int(counts.sum())
    loss = nats / max(tokens, 1)
    share = counts[counts > 0].double() / max(tokens, 1)
    bits_per_byte = None
    if token_bytes is not None:
        num_bytes = int((counts[: len(token_bytes)] * token_bytes[:vocab_size]).sum())
        bits_per_byte = nats / math.log(2) / max(num_bytes, 1)
    perplexity = math.exp(min(loss, 700.0))
    return Evaluation(loss, perplexity, bits_per_byte, -(share * share.log()).sum().item(), tokens)


def batch_to(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`."""
    return Batch(*(tensor.to(device, non_blocking=True) for tensor in batch))
