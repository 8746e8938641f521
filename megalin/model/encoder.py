"""The bidirectional encoder: embeddings, blocks, and heads for masked tokens and for sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.layers.absolute_positions import sinusoidal_positions
from megalin.layers.mixers.base import SequenceContext
from megalin.layers.norms import build_norm
from megalin.model.base import BaseModel
from megalin.model.config import EncoderConfig
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.cross_entropy import IGNORED_LABEL, vocab_parallel_cross_entropy
from megalin.parallel.embedding import ReplicatedEmbedding, VocabParallelEmbedding, VocabularyBias
from megalin.parallel.linear import ReplicatedLinear
from megalin.parallel.sequence_documents import SequenceDocuments
from megalin.parallel.tensor_parallel import TensorParallel

POSITION_TABLE = "position_embedding.weight"
"""Name of the table of positions [max_positions, D], the one weight whose shape depends on the longest sequence."""
MASKED_FRACTION = 0.15
"""Fraction of a sequence's tokens whose prediction `forward_flops` counts."""


class EncoderOutput(NamedTuple):
    """Result of a forward."""

    hidden: Tensor
    """[B, T or T/tp, D] the residual stream after the last norm."""
    masked_logits: Tensor | None
    """[B, P/cp, V/tp] at the masked positions, this rank's slice of the padded vocabulary; padding is -inf. None
    without masked positions."""
    masked_losses: Tensor | None
    """[B, P/cp] in nats, at least fp32, 0 where the label is ignored; None without labels."""
    sequence_logits: Tensor
    """[B, classes]; for a pretraining model, 0: segment B follows A, 1: it comes from another document."""
    sequence_losses: Tensor | None
    """[B] in nats, at least fp32, 0 where the label is ignored; None without labels."""

    def loss_sums(self) -> Tensor:
        """[1 or 2] the sums of the losses of masked tokens and of sequences, each where there is one."""
        losses = [losses for losses in (self.masked_losses, self.sequence_losses) if losses is not None]
        return torch.stack([each.sum() for each in losses])


class MaskedTokenHead(nn.Module):
    """logits = norm(gelu(x W^T)) E^T + b with the embedding E and the exact (erf) GELU, clamped to `logit_bounds`, if
    the config has some. `head_bias` adds a bias to x W^T.
    """

    def __init__(self, config: EncoderConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp = tp.without_sequence_parallel()
        width = config.hidden_size
        self.dense = ReplicatedLinear(width, width, bias=config.head_bias, tp=tp, std=config.init_std)
        self.norm = build_norm(config.norm, width, config.norm_eps, tp)
        self.vocabulary = VocabularyBias(config.vocab_size, tp=tp)
        self.bounds = config.logit_bounds

    def forward(self, x: Tensor, table: VocabParallelEmbedding) -> Tensor:
        """x [B, P, D], in full on every rank -> this rank's logits [B, P, V/tp]."""
        x = self.norm(functional.gelu(self.dense(x)))
        logits: Tensor = self.vocabulary(table.logits_of_entered(self.tp.enter(x)))
        if self.bounds is None:
            return logits
        least, largest = self.bounds
        return logits.clamp(least, largest).masked_fill(logits.isneginf(), -math.inf)  # -inf: padding


class SequenceHead(nn.Module):
    """logits = tanh(x W_1^T) W_2^T + b, of one vector a sequence; `head_bias` adds one to x W_1^T, and with
    `pooler = "none"` x stands in place of tanh(x W_1^T)."""

    def __init__(self, config: EncoderConfig, tp: TensorParallel) -> None:
        super().__init__()
        tp = tp.without_sequence_parallel()
        width, std = config.hidden_size, config.init_std
        has_pooler = config.pooler == "tanh"
        self.pooler = ReplicatedLinear(width, width, bias=config.head_bias, tp=tp, std=std) if has_pooler else None
        self.classifier = ReplicatedLinear(width, config.num_classes or 2, bias=True, tp=tp, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D], in full on every rank -> [B, classes]."""
        return self.classifier(x if self.pooler is None else torch.tanh(self.pooler(x)))

    def flops(self) -> int:
        """Forward floating-point operations a sequence."""
        return (0 if self.pooler is None else self.pooler.flops()) + self.classifier.flops()


def _embedding_norm(config: EncoderConfig, tp: TensorParallel) -> nn.Module:
    """`EncoderConfig.embedding_norm` of the residual stream."""
    match config.embedding_norm:
        case "hardtanh":
            return nn.Hardtanh()
        case "none":
            return nn.Identity()
        case kind:
            return build_norm(kind, config.hidden_size, config.norm_eps, tp)


class Encoder(BaseModel[EncoderConfig]):
    """X = embedding_norm(E_token + E_position + E_type), blocks over X, a norm, and the heads (DenseAttention, BERT).
    E_position is a learned table or sinusoidal (`position_embedding`).

    A pretraining model has a head for masked tokens, which computes logits at the masked positions alone, and a
    next-sentence head; a model with `num_classes` has a sequence head instead.
    """

    def __init__(
        self,
        config: EncoderConfig,
        tp: TensorParallel | None = None,
        *,
        cp: ContextParallel | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__(config, tp, recompute=recompute, cp=cp)
        width, std = config.hidden_size, config.init_std
        self.position_embedding = None
        if config.position_embedding == "learned":
            self.position_embedding = ReplicatedEmbedding(config.max_positions, width, tp=self.tp, std=std)
        self.type_embedding = ReplicatedEmbedding(config.num_token_types, width, tp=self.tp, std=std)
        self.embedding_norm = _embedding_norm(config, self.tp)
        if not config.final_norm:
            self.norm = nn.Identity()
        pretraining = config.num_classes is None
        self.masked_head = MaskedTokenHead(config, self.tp) if pretraining else None
        self.sequence_head = SequenceHead(config, self.tp)
        self.head: VocabParallelEmbedding | None = None  # tied to the embedding
        self.loss_names = ("mlm", "nsp") if pretraining else ("classification",)

    def forward(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        valid: Tensor | None = None,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        masked_positions: Tensor | None = None,
        masked_labels: Tensor | None = None,
        sequence_labels: Tensor | None = None,
        draw: Tensor | None = None,
    ) -> EncoderOutput:
        """Runs T tokens of each of B sequences.

        With context parallelism T is this rank's shard, each rank predicts as many of the masked tokens, and the first
        rank has the labels of sequences (`data.batch.split_tokens`).

        Args:
            tokens: [B, T] ids below the vocabulary size; the full sequence has at most `max_positions`.
            token_types: [B, T]; None: all 0.
            valid: [B, T] bool, False at padding; None: all tokens count.
            document_ids: [B, T], non-decreasing along T, for sequences of several documents; tokens attend within
                their document. None where each sequence is one document. The sequence head ignores documents.
            positions: [B, T], below `max_positions`; None: from 0 at the first rank's tokens.
            masked_positions: [B, P] positions of the tokens to predict, in the full sequence; P is constant, padded
                where fewer are masked, and divisible by cp.
            masked_labels: [B, P/cp] ids, IGNORED_LABEL where there is no loss.
            sequence_labels: [B] classes, IGNORED_LABEL where there is no loss.
            draw: [B] int64, the numbers of the samples in the run, which key dropout masks; read in training alone.
        """
        assert tokens.shape[1] * self.cp.size <= self.config.max_positions, (tokens.shape, self.config.max_positions)
        if positions is None:
            positions = self.cp.positions(tokens).expand_as(tokens)
        token_types = torch.zeros_like(tokens) if token_types is None else token_types
        x = self._embed(tokens, positions, token_types)
        documents = SequenceDocuments(self.cp, tokens, document_ids, valid)
        dropout = self.dropout_keys(draw, tokens)
        context = SequenceContext(positions, documents, self.shared_tensors(), x.dtype, dropout=dropout)
        x = self.drop_embedding(self.embedding_norm(x), dropout)
        for block in self.block_list():
            x = block(x, block.contexts(context), None).x
        hidden = self.norm(x)
        masked_logits = masked_losses = sequence_losses = None
        if masked_positions is not None:
            assert self.masked_head is not None
            picked = self.cp.reduce_scatter_tokens(self.cp.pick_tokens(hidden, masked_positions, self.tp))
            masked_logits = self.masked_head(picked, self.embedding)
            if masked_labels is not None:
                masked_losses = vocab_parallel_cross_entropy(masked_logits, masked_labels, self.tp.axis)
        sequence_logits = self.sequence_head(self._pool(hidden, context))
        if sequence_labels is not None:
            wide = sequence_logits.to(compute_dtype(sequence_logits))
            sequence_losses = functional.cross_entropy(
                wide, sequence_labels, ignore_index=IGNORED_LABEL, reduction="none"
            )
        return EncoderOutput(hidden, masked_logits, masked_losses, sequence_logits, sequence_losses)

    def loss_sums(self, inputs: Mapping[str, Tensor]) -> Tensor:
        output: EncoderOutput = self(**inputs)
        return output.loss_sums()

    def _embed(self, tokens: Tensor, positions: Tensor, token_types: Tensor) -> Tensor:
        """The sum of the three embeddings, [B, T or T/tp, D]."""
        x = self.embedding.embed(tokens)
        if self.position_embedding is None:
            x = x + sinusoidal_positions(positions, x, self.tp)
        else:
            x = x + self.position_embedding(positions)
        embedded: Tensor = x + self.type_embedding(token_types)
        return embedded

    def _pool(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """One vector a sequence: [B, T or T/tp, D] -> [B, D], in full on every rank."""
        positions = context.positions
        if self.config.pooling == "first":
            first = self.cp.pick_tokens(hidden, torch.zeros_like(positions[:, :1]), self.tp)
            return self.cp.all_reduce_both(first)[:, 0]
        valid, full = context.documents.valid, context.documents.full_sequence.valid
        kept = (torch.ones_like(positions) if valid is None else valid).to(compute_dtype(hidden))
        count = kept.sum(1, keepdim=True) * self.cp.size if full is None else full.sum(1, keepdim=True)
        return self.cp.all_reduce_both(self.tp.weighted_token_sum(hidden, (kept / count.clamp(min=1)).to(hidden.dtype)))

    def num_embedding_parameters(self) -> int:
        """Number of parameters of the embeddings; that of the vocabulary is tied to the head."""
        config = self.config
        rows = 0 if self.position_embedding is None else config.max_positions
        return (config.vocab_size + rows + config.num_token_types) * config.hidden_size

    def forward_flops(self, length: int) -> int:
        """Forward floating-point operations a token at `length` tokens; a multiply and an add count as two. The
        masked-token head counts for MASKED_FRACTION of the tokens, rounded up."""
        heads = self.sequence_head.flops()
        if self.masked_head is not None:
            each = self.masked_head.dense.flops() + self.embedding.logits_flops()
            heads += math.ceil(MASKED_FRACTION * length) * each
        return self.stack_flops(length) + math.ceil(heads / length)
