"""Parameters, operations and decoding state of a model, counted on the meta device."""

from __future__ import annotations

from typing import NamedTuple

from megalin.model.build import Model, make_model
from megalin.model.config import AnyModelConfig
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


def count_config(config: AnyModelConfig, length: int) -> Counts:
    """`count` of a config's model, from models with one or two blocks of each entry of `layers`.

    Every repetition of a block adds the same to each count, so that n blocks count f(1) + (n - 1) (f(2) - f(1)). A
    model with a mixer of another package, which may differ from layer to layer, is counted in full.
    """
    if any("." in sublayer.type for block in config.layers for sublayer in block.sublayers):
        return count(make_model(config), length)

    def counted(repeats: list[int]) -> Counts:
        layers = [block.model_copy(update={"repeat": n}) for block, n in zip(config.layers, repeats, strict=True)]
        return count(make_model(config.model_copy(update={"layers": layers})), length)

    ones = [1] * len(config.layers)
    once = total = counted(ones)
    for index, block in enumerate(config.layers):
        if block.repeat > 1:
            twice = counted([*ones[:index], 2, *ones[index + 1 :]])
            total = _plus(total, twice, once, block.repeat - 1)
    return total


def _plus(total: Counts, more: Counts, less: Counts, times: int) -> Counts:
    """total + times (more - less)."""
    state = total.state_bytes
    if state is not None and more.state_bytes is not None and less.state_bytes is not None:
        state += times * (more.state_bytes - less.state_bytes)
    return Counts(
        total.parameters + times * (more.parameters - less.parameters),
        total.non_embedding_parameters + times * (more.non_embedding_parameters - less.non_embedding_parameters),
        total.flops_per_token + times * (more.flops_per_token - less.flops_per_token),
        total.forward_flops_per_token + times * (more.forward_flops_per_token - less.forward_flops_per_token),
        state,
    )
