"""The softmax baseline: LLaMA's attention with rotary positions and grouped keys and values.

With a window it is Rodimus+'s windowed MHA or GQA, with sinks StreamingLLM's attention, with blocks DiagAttention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.layers.mixer_configs.softmax import RopeScalingConfig, SoftmaxConfig
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, SequenceContext, State
from megalin.ops.attention.causal import causal_attention, check_backend
from megalin.ops.attention.local import LocalCache, block_attention, block_ids, local_attention
from megalin.ops.attention.softmax import (
    KeyValueCache,
    softmax_attention,
    softmax_attention_flops,
    softmax_attention_step,
    visible_near,
    visible_tokens,
)
from megalin.ops.attention.window import window_attention_flops
from megalin.ops.documents import UNPACKED
from megalin.ops.norms.rms_norm import rms_norm
from megalin.ops.positions.encodings import RopeScaling, rope
from megalin.parallel.initialisation import Initializer, constant
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.sequence_documents import DocumentView, SequenceDocuments
from megalin.parallel.tensor_parallel import local


class Softmax(Mixer):
    """y = softmax(RoPE(q) RoPE(k)^T / sqrt(K)) v W_o, causal, q = x W_q, [k | v] = x W_kv.

    With `qkv_bias` the three projections have biases (Qwen2), with `output_bias` W_o has one; with `qk_norm` each head
    of q and k passes an RMSNorm over its K channels, of one weight for all heads, before RoPE (Qwen3).

    The state is a cache of keys and values, which grows with the length: 2 G K numbers a token for G key-value heads;
    so does the work of a decoding step. The state (k [B, S, G/tp, K], v [B, S, G/tp, K], remembered [B, S]) starts
    with S = 0. Tokens where `remembered` is 1 are visible, so a zeroed state is empty; others are zero. `reserve`
    appends empty slots, which steps in place fill: S is then fixed, and a step costs the work of S tokens.

    Context parallelism: an all-to-all turns q, k and v from T/cp tokens of all heads into all tokens of H/cp heads,
    another returns y; key-value heads are repeated where cp does not divide them. Where cp does not divide a rank's
    query heads, each rank gathers the keys and values of all tokens instead.
    """

    @classmethod
    def build(cls, config: SoftmaxConfig, scope: BuildContext) -> Softmax:
        """`LocalSoftmax` with a window or blocks."""
        is_local = config.window is not None or config.block_size is not None
        return LocalSoftmax(config, scope) if is_local else Softmax(config, scope)

    def __init__(self, config: SoftmaxConfig, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.path = config, scope.tp, scope.cp, scope.path
        width, tp, heads, groups = scope.hidden_size, scope.tp, config.num_heads, config.key_value_heads
        self.head_dim, remainder = divmod(width, heads) if config.head_dim is None else (config.head_dim, 0)
        if remainder or self.head_dim % 2:
            raise ConfigError(
                f"{scope.path}.num_heads = {heads} does not divide model.hidden_size = {width} into heads of an even "
                "width, as rotary positions need; choose a divisor, or set head_dim"
            )
        if heads % groups:
            raise ConfigError(
                f"{scope.path}.num_key_value_heads = {groups} does not divide {scope.path}.num_heads = {heads}; "
                "choose a divisor"
            )
        tp.divide(heads, f"{scope.path}.num_heads")
        tp.divide(groups, f"{scope.path}.num_key_value_heads")
        self.local_groups = groups // tp.size
        local_heads, cp = heads // tp.size, scope.cp.size
        self.gathers_tokens = local_heads % cp != 0
        self.repeats = cp // math.gcd(cp, self.local_groups)  # of each key-value head, so that cp divides them
        if self.gathers_tokens and config.backend in ("flash_attn", "flash_attn_4"):
            raise ConfigError(
                f'{scope.path}.backend = "{config.backend}" cannot run: parallel.cp = {cp} does not divide the '
                f"{local_heads} query heads of a rank, so each computes the queries of its own tokens only; "
                'use "auto" or "sdpa"'
            )
        name, std = "model.hidden_size", scope.init_std
        size, bias = heads * self.head_dim, config.qkv_bias
        self.q = ColumnParallelLinear(width, size, bias=bias, tp=tp, std=std, name=name)
        self.kv = ColumnParallelLinear(width, groups * self.head_dim, parts=2, bias=bias, tp=tp, std=std, name=name)
        self.out = RowParallelLinear(size, width, bias=config.output_bias, tp=tp, std=scope.output_std, name=name)
        if config.qk_norm:
            self.q_norm = tp.parameter(self.head_dim, shard_dim=None)
            self.k_norm = tp.parameter(self.head_dim, shard_dim=None)

    def init_weights(self, initializer: Initializer) -> None:
        """Norm weights of queries and keys are one."""
        for name in ("q_norm", "k_norm") if self.config.qk_norm else ():
            initializer(getattr(self, name), name, constant(1.0))

    def build_mixer_context(self, context: SequenceContext) -> MixerContext:
        # Outside of the block: no graph can hold an error.
        if torch.is_grad_enabled():
            group = self.config.num_heads // self.config.key_value_heads
            kind = (self.config.backend, context.positions.device.type, context.compute_dtype, self.head_dim, group)
            check_backend(*kind, field=f"{self.path}.backend")
        return super().build_mixer_context(context)

    def document_view(self, documents: SequenceDocuments) -> DocumentView:
        packed = UNPACKED
        if not self.gathers_tokens:
            packed = documents.packed if self.config.host_reads_documents else documents.unread
        return DocumentView(documents.ids, full_sequence=documents.full_sequence, packed=packed)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        y, state = self._attention(*self._heads(x, context), context, state)
        return MixerOutput(self.out(y.flatten(2)), state)

    def _heads(self, x: Tensor, context: MixerContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H/tp, K], keys and values [B, T, G/tp, K], the first two with their positions."""
        x = self.tp.enter(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (*self.q(x), *self.kv(x)))
        if self.config.qk_norm:  # each rank has other heads, so the gradients of the shared weights are partial sums
            weights = (self.tp.all_reduce_gradient(local(weight)) for weight in (self.q_norm, self.k_norm))
            q, k = (rms_norm(y, weight, eps=self.config.norm_eps) for y, weight in zip((q, k), weights, strict=True))
        base, table = self.config.rope_base, self.config.rope_scaling
        scaling = None if table is None else _rope_scaling(table)
        q, k = (rope(y, context.positions, base=base, scaling=scaling) for y in (q, k))
        return q, k, v

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: MixerContext, state: State | None
    ) -> tuple[Tensor, State]:
        """Attention [B, T/cp, H/tp, K] over full sequences, or over the state's tokens too, and the next state."""
        if state is None:
            return _full_attention(self, q, k, v, context), ()
        if context.in_place:
            return softmax_attention_step(q, k, v, KeyValueCache(*state)), state
        documents = context.documents.ids
        if documents is None:
            documents = torch.zeros(k.shape[:2], dtype=torch.int32, device=k.device)
        past_k, past_v, remembered = state
        visible = visible_tokens(documents, remembered > 0)
        all_k, all_v = torch.cat([past_k.to(k.dtype), k], dim=1), torch.cat([past_v.to(v.dtype), v], dim=1)
        y = softmax_attention(q, all_k, all_v, visible=visible)
        kept = visible[:, -1]  # the last token's document so far
        keys, values = (_keep(tensor, kept).to(past_k.dtype) for tensor in (all_k, all_v))
        return y, (keys, values, kept.to(remembered.dtype))

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        return self(x, context, state)

    def flops(self, length: int) -> int:
        attention = softmax_attention_flops(length, num_heads=self.config.num_heads, head_dim=self.head_dim)
        return self.q.flops() + self.kv.flops() + attention + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        heads = (0, self.local_groups, self.head_dim)
        return [heads, heads, (0,)]

    def reserve(self, state: State, num_tokens: int) -> State:
        """The cache with empty slots up to `num_tokens`; keys and values in the weights' dtype, in which they were
        computed, instead of the at least fp32 of states."""
        keys, values, remembered = state
        dtype, missing = self.kv.weight.dtype, num_tokens - keys.shape[1]
        assert missing >= 0, (num_tokens, keys.shape)
        keys, values = (functional.pad(x.to(dtype), (0, 0, 0, 0, 0, missing)) for x in (keys, values))
        return keys, values, functional.pad(remembered, (0, missing))


class LocalSoftmax(Softmax):
    """Softmax attention to a window and the sinks of each document, or inside blocks of it.

    Rotary positions are those of the sequence, also between a token and the sinks. The state has a fixed size: 2 G K
    numbers for each sink and each token of a window or block but one (`ops.attention.local.LocalCache`).
    """

    def document_view(self, documents: SequenceDocuments) -> DocumentView:
        size = self.config.block_size
        if size is None or self.gathers_tokens:
            return super().document_view(documents)
        packed = documents.in_blocks(size, offsets=self.config.host_reads_documents)
        return DocumentView(documents.ids, full_sequence=documents.full_sequence, packed=packed)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: MixerContext, state: State | None
    ) -> tuple[Tensor, State]:
        if state is None:
            return super()._attention(q, k, v, context, None)
        config = self.config
        attention = local_attention(
            q,
            k,
            v,
            LocalCache(*state),
            window=config.span,
            num_sinks=config.num_sinks or 0,
            blocks=config.block_size is not None,
            document_ids=context.documents.ids,
        )
        return attention.output, attention.cache

    def flops(self, length: int) -> int:
        visible = self.config.span + (self.config.num_sinks or 0)
        heads, width = self.config.num_heads, self.head_dim
        attention = window_attention_flops(length, window=visible, num_heads=heads, head_dim=width)
        return self.q.flops() + self.kv.flops() + attention + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        slots = self.config.span - 1 + (self.config.num_sinks or 0)
        heads = (slots, self.local_groups, self.head_dim)
        return [heads, heads, (slots,)]

    def reserve(self, state: State, num_tokens: int) -> State:
        return state  # of fixed size


def _full_attention(mixer: Softmax, q: Tensor, k: Tensor, v: Tensor, context: MixerContext) -> Tensor:
    """Attention [B, T/cp, H/tp, K] over full sequences, without a state."""
    config, cp = mixer.config, mixer.cp
    if mixer.gathers_tokens:
        k, v = cp.gather_tokens(k), cp.gather_tokens(v)
        documents, length = context.documents.full_sequence.document_ids, k.shape[1]
        if config.block_size is not None:
            documents = block_ids(length, block=config.block_size, document_ids=documents, device=q.device)
        sinks = config.num_sinks or 0
        visible = visible_near(cp.positions(q), length, documents, window=config.window, num_sinks=sinks)
        return softmax_attention(q, k, v, visible=visible)
    if mixer.repeats > 1:
        k, v = k.repeat_interleave(mixer.repeats, dim=2), v.repeat_interleave(mixer.repeats, dim=2)
    q, k, v = cp.to_heads(q, k, v)  # [B, T, H or G/tp/cp, K]
    return cp.to_tokens(_causal_attention(config, q, k, v, context))


def _causal_attention(config: SoftmaxConfig, q: Tensor, k: Tensor, v: Tensor, context: MixerContext) -> Tensor:
    """Attention of some heads over full sequences."""
    documents = context.documents.packed
    if config.block_size is not None and documents.ids is None:
        return block_attention(q, k, v, block=config.block_size, backend=config.backend)
    window, sinks = config.window, config.num_sinks or 0
    return causal_attention(q, k, v, documents=documents, window=window, num_sinks=sinks, backend=config.backend)


def _keep(x: Tensor, kept: Tensor) -> Tensor:
    """x [B, S, G, K], zero where not `kept` [B, S]."""
    return x.masked_fill(~kept[..., None, None], 0.0)


def _rope_scaling(config: RopeScalingConfig) -> RopeScaling:
    """The config as an argument of `rope`."""
    return RopeScaling(
        config.type,
        config.factor,
        config.low_frequency_factor,
        config.high_frequency_factor,
        config.original_length,
    )


MIXER = Softmax
