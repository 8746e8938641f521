"""The decoder language model: embedding, input layers, blocks, norm and head."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from megalin.layers.mixers.base import BuildScope, FullPrecision, Mixer, SequenceContext, State
from megalin.layers.norms import build_norm
from megalin.model.block import Block
from megalin.model.config import BlockConfig, ModelConfig
from megalin.ops.srmsnorm import compute_dtype
from megalin.parallel.collectives import finish
from megalin.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalin.parallel.embedding import VocabParallelTable
from megalin.parallel.tensor_parallel import TensorParallel


class ModelState(NamedTuple):
    """What the model remembers of B sequences: constant in their length."""

    blocks: list[list[State]]
    """One state per block and sub-layer."""
    inputs: list[State]
    """One state per input layer."""
    positions: Tensor
    """[B] position of the next token."""
    document_ids: Tensor
    """[B] document of the last token; a next token of another document starts from zero."""


class ModelOutput(NamedTuple):
    """Result of a forward."""

    logits: Tensor
    """[B, T, V/tp], this rank's slice of the padded vocabulary; padding is -inf."""
    token_losses: Tensor | None
    """[B, T] in nats, at least fp32, 0 where the label is ignored; None without labels."""
    state: ModelState | None
    """The state after the last token, where one was given."""


class LanguageModel(nn.Module):
    """Causal language model over a pattern of blocks.

    Built on the meta device: shard it (`parallel.shard_model`), materialise it (`to_empty`), then fill it
    (`parallel.fill`).

    Raises:
        ConfigError: sizes that the tensor-parallel axis does not divide.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel | None = None, *, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.tp = tp = TensorParallel() if tp is None else tp
        vocabulary, width, std = config.vocab_size, config.hidden_size, config.init_std
        self.embedding = VocabParallelTable(vocabulary, width, tp=tp, std=std)
        self.input_layers = nn.ModuleDict()
        self.shared = nn.ModuleDict()
        self._shared_types: list[str] = []  # as in the config; names of modules hold no dots
        self.blocks = nn.ModuleList()
        for layer, (path, block) in enumerate(config.blocks()):
            scope = BuildScope(width, layer, config.num_layers, tp, std, path, config.output_std)
            self.blocks.append(Block(block, scope, recompute=recompute))
            self._build_model_level(block, scope)
        self.norm = build_norm(config.norm, width, config.norm_eps, tp)
        self.head = None if config.tie_embeddings else VocabParallelTable(vocabulary, width, tp=tp, std=std)

    def _build_model_level(self, block: BlockConfig, scope: BuildScope) -> None:
        """Builds, once per mixer type, what the type keeps at the level of the model."""
        for sublayer in block.sublayers:
            key = sublayer.type.replace(".", "_")
            if key not in self.shared and (module := sublayer.shared_module(scope)) is not None:
                self.shared[key] = module
                self._shared_types.append(sublayer.type)
            if key not in self.input_layers and (layer := sublayer.input_layer(scope)) is not None:
                self.input_layers[key] = layer

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        positions: Tensor | None = None,
        state: ModelState | None = None,
    ) -> ModelOutput:
        """Runs T tokens of each of B sequences.

        Args:
            tokens: [B, T] ids below the vocabulary size.
            labels: [B, T] next ids, IGNORED_LABEL where there is no loss.
            document_ids: [B, T], non-decreasing along T; None when each row is one document.
            positions: [T] or [B, T]; by default they count on from the state, or from 0.
            state: what the model remembers of the tokens before; the output then holds the next one.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            positions = positions if state is None else state.positions[:, None] + positions
        if state is not None:
            document_ids = _known_documents(tokens, document_ids, state)
            state = _forget_other_documents(state, document_ids)
        x = self.embedding.embed(tokens) * self.config.embedding_scale
        context = SequenceContext(positions, document_ids, self._shared_tensors(), x.dtype)
        inputs = []
        for index, layer in enumerate(self.input_mixers()):
            x, input_state = layer(x, layer.own_context(context), state.inputs[index] if state else None)
            inputs.append(input_state)
        x = finish(self._stream(x))
        blocks = []
        for index, block in enumerate(self.block_list()):
            x, states = block(x, block.contexts(context), state.blocks[index] if state else None)
            blocks.append(states)
        logits = self._table().logits(self.norm(x).to(context.compute_dtype))
        losses = None if labels is None else vocab_parallel_cross_entropy(logits, labels, self.tp.axis)
        if state is None or document_ids is None:
            return ModelOutput(logits, losses, None)
        ends = positions.expand_as(tokens)[:, -1] + 1
        return ModelOutput(logits, losses, ModelState(blocks, inputs, ends, document_ids[:, -1]))

    @torch.no_grad()
    def step(self, tokens: Tensor, state: ModelState) -> ModelOutput:
        """One token of decoding, of the state's document: tokens [B] -> logits [B, 1, V/tp] and the next state.

        Work and memory do not depend on how many tokens came before.
        """
        positions = state.positions[:, None]
        x = self.embedding.embed(tokens[:, None]) * self.config.embedding_scale
        context = SequenceContext(positions, None, self._shared_tensors(), x.dtype)
        inputs = []
        for layer, layer_state in zip(self.input_mixers(), state.inputs, strict=True):
            x, next_state = layer.step(x, layer.own_context(context), layer_state)
            inputs.append(next_state)
        x = self._stream(x)
        blocks = []
        for block, states in zip(self.block_list(), state.blocks, strict=True):
            x, next_states = block.step(x, block.contexts(context), states)
            blocks.append(next_states)
        logits = self._table().logits(self.norm(x).to(context.compute_dtype))
        return ModelOutput(logits, None, state._replace(blocks=blocks, inputs=inputs, positions=state.positions + 1))

    def _stream(self, x: Tensor) -> Tensor:
        """The embedded tokens in the dtype of the residual stream."""
        return x if self.config.residual_dtype == "compute" else x.to(compute_dtype(x))

    def _table(self) -> VocabParallelTable:
        return self.embedding if self.head is None else self.head

    def initial_state(self, batch_size: int, *, dtype: torch.dtype = torch.float32) -> ModelState:
        """The state before the first token; recurrent states in `dtype`, at least fp32, whatever the weights are."""
        device = self.embedding.weight.device

        def initial(mixers: list[Mixer]) -> list[State]:
            return [mixer.initial_state(batch_size, dtype=dtype, device=device) for mixer in mixers]

        zeros = torch.zeros(batch_size, dtype=torch.int64, device=device)
        blocks = [initial(block.mixers()) for block in self.block_list()]
        return ModelState(blocks, initial(self.input_mixers()), zeros, zeros.to(torch.int32))

    def full_precision_modules(self) -> list[nn.Module]:
        """The submodules whose parameters must compute in fp32: they feed exponentials or positions."""
        return [module for module in self.modules() if isinstance(module, FullPrecision)]

    def after_optimizer_step(self) -> None:
        """Lets every mixer renew what it derives from its weights: after a step, and after weights were loaded."""
        for mixer in [*self.input_mixers(), *self.mixers()]:
            mixer.after_optimizer_step()

    def no_decay_names(self) -> set[str]:
        """Global names of the parameters without weight decay: vectors (norm weights), biases (a fused one is
        [parts, out]) and all that computes in full precision."""
        precise = {id(p) for module in self.full_precision_modules() for p in module.parameters()}
        return {n for n, p in self.named_parameters() if p.dim() <= 1 or n.endswith(".bias") or id(p) in precise}

    def mixers(self) -> list[Mixer]:
        """Every mixer, blocks in order."""
        return [mixer for block in self.block_list() for mixer in block.mixers()]

    def block_list(self) -> list[Block]:
        """The blocks in order."""
        return cast(list[Block], list(self.blocks))

    def input_mixers(self) -> list[Mixer]:
        """The input layers in order."""
        return cast(list[Mixer], list(self.input_layers.values()))

    def _shared_tensors(self) -> dict[str, Tensor]:
        return {name: module() for name, module in zip(self._shared_types, self.shared.values(), strict=True)}

    def num_parameters(self) -> int:
        """Parameters of the whole model over all ranks; rows that pad the vocabulary are not counted."""
        padding = sum(m.padded_parameters() for m in self.modules() if isinstance(m, VocabParallelTable))
        return sum(parameter.numel() for parameter in self.parameters()) - padding

    def num_embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the head where it has a table of its own."""
        tables = 1 if self.head is None else 2
        return tables * self.config.vocab_size * self.config.hidden_size

    def forward_flops(self, length: int) -> int:
        """Forward floating-point operations a token at `length` tokens; a multiply and an add count as two."""
        layers = [*self.input_mixers(), *self.mixers()]
        return sum(layer.flops(length) for layer in layers) + self._table().logits_flops()

    def training_flops(self, length: int) -> int:
        """Forward and backward floating-point operations a token: three forwards. Recomputation is not counted."""
        return 3 * self.forward_flops(length)

    def state_bytes(self) -> int:
        """Bytes of one sequence's decoding state in fp32."""
        state = self.initial_state(1)
        tensors = [tensor for block in [*state.blocks, state.inputs] for states in block for tensor in states]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _known_documents(tokens: Tensor, document_ids: Tensor | None, state: ModelState) -> Tensor:
    """Without ids, all tokens continue the state's document."""
    return state.document_ids[:, None].expand_as(tokens) if document_ids is None else document_ids


def _forget_other_documents(state: ModelState, document_ids: Tensor) -> ModelState:
    """Zeroes the state of each sequence whose first token starts another document."""
    other = document_ids[:, 0] != state.document_ids  # [B]

    def forget(tensor: Tensor) -> Tensor:
        return tensor.masked_fill(other.view(-1, *[1] * (tensor.dim() - 1)), 0)

    def forget_all(states: list[State]) -> list[State]:
        return [tuple(forget(tensor) for tensor in layer) for layer in states]

    return state._replace(blocks=[forget_all(block) for block in state.blocks], inputs=forget_all(state.inputs))
