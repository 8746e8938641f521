"""The decoder language model: embedding, input layers, blocks, norm and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalin.layers.mixers.base import Mixer, MixerContext, SequenceContext, State
from megalin.model.base import BaseModel, Stage
from megalin.model.config import ModelConfig
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.parallel.collectives import wait_tensor_with_grad
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.cross_entropy import TokenScores, vocab_parallel_cross_entropy
from megalin.parallel.embedding import VocabParallelEmbedding
from megalin.parallel.sequence_documents import SequenceDocuments
from megalin.parallel.tensor_parallel import TensorParallel

LossKind = Literal["tokens", "sum", "scores"]
"""Losses that a forward returns; see `LanguageModel.forward`."""


class ModelState(NamedTuple):
    """Recurrent state of B sequences; its size does not depend on their length (a softmax cache's does until
    `LanguageModel.reserve`)."""

    blocks: list[list[State]]
    """One state per block and sub-layer."""
    inputs: list[State]
    """One state per input layer."""
    positions: Tensor
    """[B] position of the next token."""
    document_ids: Tensor
    """[B] document of the last token; a next token of another document starts from zero."""


class StepContexts(NamedTuple):
    """The mixers' contexts of decoding steps, without positions. They depend on the weights alone."""

    inputs: list[MixerContext]
    """One per input layer."""
    blocks: list[list[MixerContext]]
    """One per block and sub-layer."""


class ModelOutput(NamedTuple):
    """Result of a forward."""

    logits: Tensor | None
    """[B, T, V/tp], this rank's slice of the padded vocabulary; padding is -inf. [B, 1, V/tp] of the last tokens with
    losses = "last"; None with losses = "sum" or "scores"."""
    token_losses: Tensor | None
    """[B, T] in nats, at least fp32, 0 where the label is ignored; None without labels or with losses = "sum"."""
    loss_sum: Tensor | None
    """[] the sum of the token losses, with losses = "sum"."""
    state: ModelState | None
    """The state after the last token, where one was given."""
    greedy: Tensor | None = None
    """[B, T] bool, True where the label is the likeliest id, with losses = "scores"."""

    def token_scores(self) -> TokenScores:
        """The scores of the labels, with losses = "scores"."""
        assert self.token_losses is not None
        assert self.greedy is not None
        return TokenScores(self.token_losses, self.greedy)

    def loss_sums(self) -> Tensor:
        """[1] sum of the token losses."""
        if self.loss_sum is not None:
            return self.loss_sum.view(1)
        assert self.token_losses is not None
        return self.token_losses.sum().view(1)


class LanguageModel(BaseModel[ModelConfig]):
    """Causal language model over a pattern of blocks."""

    loss_names = ("next_token",)

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel | None = None,
        *,
        cp: ContextParallel | None = None,
        recompute: bool = False,
        stage: Stage | None = None,
        max_label_fraction: float = 1.0,
    ) -> None:
        """`max_label_fraction`: largest fraction of a batch's tokens that have a label, for `losses = "sum"`; see
        `VocabParallelEmbedding.loss_sum`."""
        stage = Stage(0, 1, range(config.num_sublayers)) if stage is None else stage
        has_table = stage.is_first or (stage.is_last and config.tie_embeddings)
        super().__init__(config, tp, recompute=recompute, cp=cp, stage=stage, has_table=has_table)
        tied, vocabulary, width = config.tie_embeddings, config.vocab_size, config.hidden_size
        self._max_label_fraction = max_label_fraction
        has_head = stage.is_last and not tied
        self.head = VocabParallelEmbedding(vocabulary, width, tp=self.tp, std=config.init_std) if has_head else None

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        state: ModelState | None = None,
        losses: LossKind | Literal["last"] = "tokens",
        draw: Tensor | None = None,
    ) -> ModelOutput:
        """Runs T tokens of each of B sequences; with context parallelism T is this rank's shard, and there is no state.

        Args:
            tokens: [B, T] ids below the vocabulary size.
            labels: [B, T] next ids, IGNORED_LABEL where there is no loss.
            document_ids: [B, T], non-decreasing along T; None where each sequence is one document.
            positions: [T] or [B, T]; by default they continue those of the state, or start from 0 at the first rank.
            state: the recurrent state of earlier tokens; the output then holds the next one.
            losses: tokens: the logits, and with labels each token's loss; sum: the sum of the losses alone, which a
                fused kernel computes in less time and memory; scores: each labelled token's loss and whether the label
                is the likeliest id, without a gradient and without the logits of other tokens; last: the logits of
                each sequence's last token alone.
            draw: [B] int64, the numbers of the samples in the run, which key dropout masks; read in training alone.
        """
        assert state is None or self.cp.size == 1, self.cp.size
        dropout = self.dropout_keys(draw, tokens)
        assert state is None or dropout is None, "dropout of a continued sequence; use eval mode"
        consecutive = positions is None
        if positions is None:
            positions = self.cp.positions(tokens)
            positions = positions if state is None else state.positions[:, None] + positions
        if state is not None:
            document_ids = _known_documents(tokens, document_ids, state)
            state = _clear_other_documents(state, document_ids)
        x = self.embedding.embed(tokens) * self.config.embedding_scale
        context = self.context(tokens, positions, document_ids, x.dtype)
        context = context._replace(consecutive=consecutive, dropout=dropout)
        x, inputs = self.apply_input_layers(x, context, state)
        blocks = []
        for index, block in enumerate(self.block_list()):
            x, states = block(x, block.contexts(context), state.blocks[index] if state else None)
            blocks.append(states)
        if losses == "last":
            assert not self.tp.sequence_parallel
            x, losses = x[:, -1:], "tokens"
        output = self.head_output(self.norm(x).to(context.compute_dtype), labels, losses)
        if state is None or document_ids is None:
            return output
        ends = positions.expand_as(tokens)[:, -1] + 1
        return output._replace(state=ModelState(blocks, inputs, ends, document_ids[:, -1]))

    def context(
        self, tokens: Tensor, positions: Tensor, document_ids: Tensor | None, compute_dtype: torch.dtype
    ) -> SequenceContext:
        """The mixers' context of tokens [B, T], which are read for their shape and device alone."""
        documents = SequenceDocuments(self.cp, tokens, document_ids)
        return SequenceContext(positions, documents, self.shared_tensors(), compute_dtype)

    def apply_input_layers(
        self, x: Tensor, context: SequenceContext, state: ModelState | None
    ) -> tuple[Tensor, list[State]]:
        """The residual stream from the embedded tokens x, and the input layers' next states."""
        inputs = []
        for index, layer in enumerate(self.input_mixers()):
            x, input_state = layer(x, layer.build_mixer_context(context), state.inputs[index] if state else None)
            inputs.append(input_state)
        return self.drop_embedding(wait_tensor_with_grad(self._to_residual_dtype(x)), context.dropout), inputs

    def head_output(self, x: Tensor, labels: Tensor | None, losses: LossKind) -> ModelOutput:
        """The output, without a state, from the normed residual stream x [B, T or T/tp, D]."""
        if losses == "sum":
            assert labels is not None
            return ModelOutput(None, None, self._loss_sum(x, labels), None)
        if losses == "scores":
            assert labels is not None
            scores = self._table().token_scores(x, labels)
            return ModelOutput(None, scores.losses, None, None, scores.greedy)
        logits = self._table().logits(x)
        token_losses = None if labels is None else vocab_parallel_cross_entropy(logits, labels, self.tp.axis)
        return ModelOutput(logits, token_losses, None, None)

    def _loss_sum(self, x: Tensor, labels: Tensor) -> Tensor:
        return self._table().loss_sum(x, labels, max_label_fraction=self._max_label_fraction)

    def loss_sums(self, inputs: Mapping[str, Tensor]) -> Tensor:
        output: ModelOutput = self(**inputs, losses="sum")
        return output.loss_sums()

    @torch.no_grad()
    def token_scores(self, inputs: Mapping[str, Tensor]) -> TokenScores:
        """Scores of a batch's labels, without a backward."""
        output: ModelOutput = self(**inputs, losses="scores")
        return output.token_scores()

    @torch.no_grad()
    def step(self, tokens: Tensor, state: ModelState, contexts: StepContexts | None = None) -> ModelOutput:
        """One token of decoding, in the state's document: tokens [B] -> logits [B, 1, V/tp] and the next state.

        Work and memory do not depend on the number of earlier tokens (but for softmax caches).

        Args:
            contexts: `step_contexts()` of the present weights, computed once for many steps; None: of this step.
        """
        contexts = self.step_contexts() if contexts is None else contexts
        positions = state.positions[:, None]
        x = self.embedding.embed(tokens[:, None]) * self.config.embedding_scale
        compute_dtype = x.dtype
        inputs = []
        for layer, context, layer_state in zip(self.input_mixers(), contexts.inputs, state.inputs, strict=True):
            x, next_state = layer.decode(x, context._replace(positions=positions), layer_state)
            inputs.append(next_state)
        x = self._to_residual_dtype(x)
        blocks = []
        for block, own, states in zip(self.block_list(), contexts.blocks, state.blocks, strict=True):
            x, next_states = block.step(x, [context._replace(positions=positions) for context in own], states)
            blocks.append(next_states)
        logits = self._table().logits(self.norm(x).to(compute_dtype))
        state = state._replace(blocks=blocks, inputs=inputs, positions=state.positions + 1)
        return ModelOutput(logits, None, None, state)

    @torch.no_grad()
    def step_contexts(self, *, in_place: bool = False) -> StepContexts:
        """Contexts of `step`, which hold the tensors that mixers derive from the weights, such as HGRN2's bounds, and
        the method that decodes (`Mixer.decoding_path`): hooks registered after this call may not run.

        Args:
            in_place: mixers that can do it write the next state over the given one (`MixerContext.in_place`), which
                then comes from `reserve`.
        """
        weight = self.embedding.weight
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        context = self.context(tokens, tokens, None, weight.dtype)

        inputs = [
            mixer.build_mixer_context(context)._replace(in_place=in_place, decoding=mixer.decoding_path())
            for mixer in self.input_mixers()
        ]
        return StepContexts(inputs, [block.step_contexts(context, in_place=in_place) for block in self.block_list()])

    def _to_residual_dtype(self, x: Tensor) -> Tensor:
        """The embedded tokens in the dtype of the residual stream."""
        return x if self.config.residual_dtype == "compute" else x.to(compute_dtype(x))

    def _table(self) -> VocabParallelEmbedding:
        return self.embedding if self.head is None else self.head

    def initial_state(self, batch_size: int, *, dtype: torch.dtype = torch.float32) -> ModelState:
        """The state before the first token; recurrent states in `dtype`, at least fp32, whatever the weights' dtype."""
        device = self.embedding.weight.device

        def initial(mixers: list[Mixer]) -> list[State]:
            return [mixer.initial_state(batch_size, dtype=dtype, device=device) for mixer in mixers]

        zeros = torch.zeros(batch_size, dtype=torch.int64, device=device)
        blocks = [initial(block.mixers()) for block in self.block_list()]
        return ModelState(blocks, initial(self.input_mixers()), zeros, zeros.to(torch.int32))

    def reserve(self, state: ModelState, num_tokens: int) -> ModelState:
        """The state for steps in place until the sequences have `num_tokens` tokens (`Mixer.reserve`)."""

        def reserved(mixers: list[Mixer], states: list[State]) -> list[State]:
            return [mixer.reserve(each, num_tokens) for mixer, each in zip(mixers, states, strict=True)]

        pairs = zip(self.block_list(), state.blocks, strict=True)
        blocks = [reserved(block.mixers(), states) for block, states in pairs]
        return state._replace(blocks=blocks, inputs=reserved(self.input_mixers(), state.inputs))

    def num_embedding_parameters(self) -> int:
        """Number of parameters of the embedding, and of an untied output embedding."""
        tables = 1 if self.head is None else 2
        return tables * self.config.vocab_size * self.config.hidden_size

    def forward_flops(self, length: int) -> int:
        """Forward floating-point operations a token at `length` tokens; a multiply and an add count as two."""
        return self.stack_flops(length) + round(self._table().logits_flops() * self._max_label_fraction)

    def state_bytes(self) -> int:
        """Bytes of one sequence's decoding state in fp32."""
        state = self.initial_state(1)
        tensors = [tensor for block in [*state.blocks, state.inputs] for states in block for tensor in states]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _known_documents(tokens: Tensor, document_ids: Tensor | None, state: ModelState) -> Tensor:
    """Document ids of the tokens [B, T]; without ids all of them continue the state's document."""
    return state.document_ids[:, None].expand_as(tokens) if document_ids is None else document_ids


def _clear_other_documents(state: ModelState, document_ids: Tensor) -> ModelState:
    """Zeroes the state of each sequence whose first token starts a new document."""
    other = document_ids[:, 0] != state.document_ids  # [B]

    def clear(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(other.view(-1, *[1] * (tensor.dim() - 1)), 0)

    def clear_all(states: list[State]) -> list[State]:
        return [tuple(clear(tensor) for tensor in layer) for layer in states]

    return state._replace(blocks=[clear_all(block) for block in state.blocks], inputs=clear_all(state.inputs))
