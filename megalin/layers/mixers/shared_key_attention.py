"""Rodimus+'s sliding-window attention with one key shared by all heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.layers.halo import entering_inputs
from megalin.layers.mixer_configs.shared_key_attention import SharedKeyAttentionConfig
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, State
from megalin.ops.attention.window import WindowCache, window_attention, window_attention_flops
from megalin.ops.positions.encodings import rope
from megalin.parallel.initialisation import Initializer, normal
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.sequence_documents import DocumentView, SequenceDocuments
from megalin.parallel.tensor_parallel import local


class SharedKeyAttention(Mixer):
    """y = softmax(RoPE(q_h) RoPE(k)^T / sqrt(K)) v_h W_o in a causal window, [q | v] = x W_qv, k = x W_k, no biases.

    Heads are sharded over the axis; W_k is replicated, and every rank computes the key. The state caches window - 1
    tokens, K + D numbers each.

    Source: Rodimus+ section 3.2.
    """

    def __init__(self, config: SharedKeyAttentionConfig, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.std = config, scope.tp, scope.cp, scope.init_std
        width, tp, std, name = scope.hidden_size, scope.tp, scope.init_std, "model.hidden_size"
        self.head_dim, remainder = divmod(width, config.num_heads)
        if remainder or self.head_dim % 2:
            raise ConfigError(
                f"{scope.path}.num_heads = {config.num_heads} does not divide model.hidden_size = {width} into heads "
                "of an even width, as rotary positions need; choose a divisor"
            )
        self.local_heads = tp.divide(config.num_heads, f"{scope.path}.num_heads")
        self.qv = ColumnParallelLinear(width, width, parts=2, tp=tp, std=std, name=name)
        self.key = tp.parameter(self.head_dim, width, shard_dim=None)
        self.out = RowParallelLinear(width, width, tp=tp, std=scope.output_std, name=name)

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the key's matrix from N(0, std^2)."""
        initializer(self.key, "key", normal(self.std))

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        x = self.tp.enter(x)
        q, v = (y.unflatten(-1, (self.local_heads, self.head_dim)) for y in self.qv(x))  # [B, T, H/tp, K]
        k = functional.linear(x, self.tp.all_reduce_gradient(local(self.key)))[:, :, None]  # [B, T, 1, K]
        q, k = (rope(y, context.positions, base=self.config.rope_base) for y in (q, k))
        k = k.squeeze(2)
        cache = WindowCache(*state) if state else None
        if context.documents.shard is not None:
            k, v = self._visible_keys_and_values(k, v, context)
        documents = context.documents.packed
        attention = window_attention(q, k, v, window=self.config.window, documents=documents, cache=cache)
        return MixerOutput(self.out(attention.output.flatten(2)), () if attention.cache is None else attention.cache)

    def document_view(self, documents: SequenceDocuments) -> DocumentView:
        packed = documents.in_window(self.config.window, offsets=self.config.host_reads_documents)
        return documents.local_view()._replace(packed=packed)

    def _visible_keys_and_values(self, k: Tensor, v: Tensor, context: MixerContext) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens visible to this rank's queries; one collective brings those of earlier
        ranks."""
        window = self.config.window
        if window == 1:
            return k, v
        tokens = torch.cat([k, v.flatten(2)], dim=-1)
        before = entering_inputs(tokens, context, self.cp, taps=window)
        assert before is not None
        reach = self.cp.window_reach(tokens, window=window)
        keys, values = torch.cat([before[:, window - 1 - reach :], tokens], dim=1).tensor_split([self.head_dim], dim=-1)
        return keys, values.unflatten(-1, v.shape[2:])

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        return self(x, context, state)

    def flops(self, length: int) -> int:
        key = 2 * self.key.numel()
        attention = window_attention_flops(
            length, window=self.config.window, num_heads=self.config.num_heads, head_dim=self.head_dim
        )
        return self.qv.flops() + key + attention + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        past = self.config.window - 1
        return [(past, self.head_dim), (past, self.local_heads, self.head_dim), (past,)]


MIXER = SharedKeyAttention
