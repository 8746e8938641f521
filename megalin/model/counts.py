"""Parameters, operations and decoding state of a model, counted on the meta device."""

from __future__ import annotations

from typing import NamedTuple

from megalin.model.build import Model
from megalin.model.language_model import LanguageModel


class Counts(NamedTuple):
    """Counts of a model; the operations are those of one token of a sequence of a given length."""

    parameters: int
    """All parameters, without the padding of the vocabulary."""
    non_embedding_parameters: int
    """Without the embeddings and an untied head."""
    flops_per_token: int
    """Forward and backward; a multiply and an add count as two."""
    forward_flops_per_token: int
    state_bytes: int | None
    """Bytes of a sequence's decoding state in fp32, before its first token; None of an encoder."""


def count(model: Model, length: int) -> Counts:
    """Counts a model at `length` tokens a sequence."""
    parameters = model.num_parameters()
    return Counts(
        parameters,
        parameters - model.num_embedding_parameters(),
        model.training_flops(length),
        model.forward_flops(length),
        # An encoder attends to the full sequence and has no state.
        model.state_bytes() if isinstance(model, LanguageModel) else None,
    )
