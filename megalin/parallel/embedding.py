"""Token embedding sharded by vocabulary rows over the tensor-parallel axis, the head that shares its table, and
replicated tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.labelled_tokens import label_capacity, labelled_tokens
from megalin.parallel.cross_entropy import (
    IGNORED_LABEL,
    TokenScores,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_logits,
)
from megalin.parallel.initialisation import FillFunction, Initializer, constant, normal
from megalin.parallel.tensor_parallel import TOKENS, TensorParallel, local

ROW_MULTIPLE = 128
"""Vocabulary rows are padded to this multiple on every mesh, so that tables of all meshes are equal."""

_SCORED_TOKENS = 2048
"""Tokens whose logits are in memory at the same time in `token_scores`."""


def padded_rows(vocab_size: int) -> int:
    """Rows of a table for `vocab_size` tokens."""
    return -(-vocab_size // ROW_MULTIPLE) * ROW_MULTIPLE


class VocabParallelEmbedding(nn.Module):
    """A [padded vocabulary, D] table, rows sharded over the axis; rows beyond the vocabulary are zero and masked."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: TensorParallel, std: float) -> None:
        """Raises ConfigError where the padded rows do not divide."""
        super().__init__()
        self.vocab_size, self.hidden_size, self.std, self.tp = vocab_size, hidden_size, std, tp
        rows = padded_rows(vocab_size)
        self.local_rows = tp.divide(rows, "model.vocab_size padded to a multiple of 128")
        self.first_row = tp.axis.rank * self.local_rows
        self.weight = tp.parameter(rows, hidden_size, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the rows of real tokens from N(0, std^2); padding is zero."""
        initializer(self.weight, "weight", self._rows(normal(self.std)))

    def _rows(self, initialise: FillFunction) -> FillFunction:
        def padded(full: Tensor, generator: torch.Generator) -> None:
            full.zero_()
            initialise(full[: self.vocab_size], generator)

        return padded

    def padded_parameters(self) -> int:
        """Elements of the table that belong to no token."""
        return (padded_rows(self.vocab_size) - self.vocab_size) * self.hidden_size

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] ids below the vocabulary size -> [B, T or T/tp, D] of the residual stream."""
        weight = local(self.weight)
        if self.tp.size == 1:
            return functional.embedding(tokens, weight)
        index = tokens - self.first_row
        absent = (index < 0) | (index >= self.local_rows)
        rows = functional.embedding(index.masked_fill(absent, 0), weight)
        return self.tp.leave(rows.masked_fill(absent[..., None], 0.0))

    def logits(self, x: Tensor) -> Tensor:
        """x [B, T or T/tp, D] of the residual stream -> this rank's logits [B, T, V/tp]; padding is -inf."""
        return self.logits_of_entered(self.tp.enter(x))

    def logits_of_entered(self, x: Tensor) -> Tensor:
        """x [..., D] that has entered the sharded region -> this rank's logits [..., V/tp]; padding is -inf."""
        return vocab_parallel_logits(x, local(self.weight), self.tp.axis, vocab_size=self.vocab_size)

    def loss_sum(self, x: Tensor, labels: Tensor, *, max_label_fraction: float = 1.0) -> Tensor:
        """Sum of the token losses of `logits(x)` in nats, [] in at least fp32: labels [B, T], IGNORED_LABEL for tokens
        without a loss. Kernels keep no logits.

        Args:
            max_label_fraction: below 1, logits are computed for so many of the tokens only, those with a label; with
                more labels than that the loss is infinite.
        """
        x, overflow = self.tp.enter(x), None
        if max_label_fraction < 1.0:
            capacity = label_capacity(labels.numel(), max_label_fraction)
            x, labels, overflow = labelled_tokens(
                x.flatten(0, -2), labels.flatten(), capacity=capacity, ignored_label=IGNORED_LABEL
            )
        loss = vocab_parallel_linear_cross_entropy(
            x, local(self.weight), labels, self.tp.axis, vocab_size=self.vocab_size
        )
        return loss if overflow is None else loss.masked_fill(overflow, float("inf"))

    def token_scores(self, x: Tensor, labels: Tensor) -> TokenScores:
        """Scores of the labels [B, T] under `logits(x)`; only tokens with a label have logits, some of them at a time.
        Not differentiable."""
        x = self.tp.enter(x).flatten(0, -2)  # [B T, D]
        flat = labels.flatten()
        losses, greedy = x.new_zeros(len(flat), dtype=compute_dtype(x)), torch.zeros_like(flat, dtype=torch.bool)
        labelled = (flat != IGNORED_LABEL).nonzero().squeeze(-1)  # the same on every rank of the axis
        for chosen in labelled.split(_SCORED_TOKENS) if len(labelled) else ():
            logits = self.logits_of_entered(x[chosen])
            losses[chosen] = vocab_parallel_cross_entropy(logits, flat[chosen], self.tp.axis)
            greedy[chosen] = vocab_parallel_argmax(logits, self.tp.axis) == flat[chosen]
        return TokenScores(losses.view_as(labels), greedy.view_as(labels))

    def logits_flops(self) -> int:
        """Forward floating-point operations a token of `logits`, whole axis, without the padding."""
        return 2 * self.vocab_size * self.hidden_size


class VocabularyBias(nn.Module):
    """One number a token id, added to its logit; sharded as `VocabParallelEmbedding` is, initially zero."""

    def __init__(self, vocab_size: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.bias = tp.parameter(padded_rows(vocab_size), shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """Fills the bias with zeros."""
        initializer(self.bias, "bias", constant(0.0))

    def padded_parameters(self) -> int:
        """Elements that belong to no token."""
        return padded_rows(self.vocab_size) - self.vocab_size

    def forward(self, logits: Tensor) -> Tensor:
        """This rank's logits [..., V/tp] with the bias; padding stays -inf."""
        return logits + local(self.bias)


class ReplicatedEmbedding(nn.Module):
    """A replicated [rows, D] table: positions and token types, added to the residual stream."""

    def __init__(self, rows: int, hidden_size: int, *, tp: TensorParallel, std: float) -> None:
        super().__init__()
        self.std, self.tp = std, tp
        self.weight = tp.parameter(rows, hidden_size, shard_dim=None)

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the rows from N(0, std^2)."""
        initializer(self.weight, "weight", normal(self.std))

    def forward(self, index: Tensor) -> Tensor:
        """[B, T] row numbers of all tokens -> [B, T or T/tp, D] of the residual stream."""
        if self.tp.sequence_parallel:
            index = self.tp.local_slice(index, dim=TOKENS)
        return functional.embedding(index, self.tp.sequence_parallel_weight(local(self.weight)))
