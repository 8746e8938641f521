"""Softmax attention over all tokens of a document: the attention of BERT."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from megalin.errors import ConfigError
from megalin.layers.mixer_configs.bidirectional_softmax import BidirectionalSoftmaxConfig
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, State
from megalin.ops.attention.bidirectional import bidirectional_attention, visible_in_documents
from megalin.ops.attention.softmax import softmax_attention_flops
from megalin.ops.positions.encodings import rope
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.sequence_documents import DocumentView, SequenceDocuments


class BidirectionalSoftmax(Mixer):
    """y = softmax(q k^T / sqrt(K)) v W_o, [q | k | v] = x W_qkv, over the valid tokens of a document, with biases or
    without; rotary positions on q and k where `rope_base` is set.

    Context parallelism: an all-to-all turns q, k and v from T/cp tokens of all heads into all tokens of H/cp heads,
    another returns y; where cp does not divide a rank's heads, each rank gathers the keys and values of all tokens.

    Source: Devlin et al., BERT (2019), the baseline of DenseAttention (DANet).
    """

    def __init__(self, config: BidirectionalSoftmaxConfig, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.path = config, scope.tp, scope.cp, scope.path
        width, heads, tp = scope.hidden_size, config.num_heads, scope.tp
        self.head_dim, remainder = divmod(width, heads)
        if remainder or (config.rope_base is not None and self.head_dim % 2):
            even = "" if config.rope_base is None else " into heads of an even width, as rope_base needs"
            raise ConfigError(
                f"{scope.path}.num_heads = {heads} does not divide model.hidden_size = {width}{even}; choose a divisor"
            )
        self.gathers_tokens = tp.divide(heads, f"{scope.path}.num_heads") % scope.cp.size != 0
        name, bias = "model.hidden_size", config.bias
        self.qkv = ColumnParallelLinear(width, width, parts=3, bias=bias, tp=tp, std=scope.init_std, name=name)
        self.out = RowParallelLinear(width, width, bias=bias, tp=tp, std=scope.output_std, name=name)

    def document_view(self, documents: SequenceDocuments) -> DocumentView:
        return DocumentView(documents.ids, documents.valid, full_sequence=documents.full_sequence)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        if state is not None:
            self._refuse_state()
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(x, gather_input=True))  # [B, T, H/tp, K]
        if (base := self.config.rope_base) is not None:
            q, k = (rope(y, context.positions, base=base) for y in (q, k))
        return MixerOutput(self.out(self._attention(q, k, v, context).flatten(2)), ())

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, context: MixerContext) -> Tensor:
        """Attention [B, T/cp, H/tp, K] over full sequences."""
        sequence = context.documents.full_sequence
        if self.gathers_tokens:
            k, v = self.cp.gather_tokens(k), self.cp.gather_tokens(v)
            return bidirectional_attention(q, k, v, visible=visible_in_documents(*sequence, self.cp.positions(q)))
        q, k, v = self.cp.to_heads(q, k, v)  # [B, T, H/tp/cp, K]
        visible = visible_in_documents(*sequence, torch.arange(q.shape[1], device=q.device))
        return self.cp.to_tokens(bidirectional_attention(q, k, v, visible=visible))

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        self._refuse_state()

    def _refuse_state(self) -> NoReturn:
        raise ConfigError(
            f"{self.path}: bidirectional_softmax attends to later tokens too, so no state can continue a sequence; "
            "give it full sequences, and generate with a decoder"
        )

    def flops(self, length: int) -> int:
        attention = softmax_attention_flops(length, num_heads=self.config.num_heads, head_dim=self.head_dim)
        return self.qkv.flops() + attention + self.out.flops()


MIXER = BidirectionalSoftmax
