"""HGRN2's token mixer over all tokens of a document: one scan from the first token on, one from the last token back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor, nn

from megalin.errors import ConfigError
from megalin.layers.mixer_configs.two_way_hgrn2 import TwoWayHGRN2Config
from megalin.layers.mixers.base import BuildContext, MixerContext, MixerOutput, State
from megalin.layers.mixers.hgrn2 import HGRN2, gated_heads
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.fixed_decay import decay_scan_flops
from megalin.ops.scans.vector_decay import vector_decay_scan
from megalin.parallel.context_parallel import ReversedExchange


class TwoWayHGRN2(HGRN2):
    """y = norm(O + O') W_o, O = scan(q, 1 - f, v; log f) as in HGRN2, O' the same over the reversed tokens.

    Both scans share q, f and v, so the parameters are those of HGRN2; a token's own term is in both. A padding token
    leaves the state of either scan unchanged, so padding changes no valid token. Context parallelism: the states of the
    second scan go to the ranks before.

    Source: HGRN2 section 4.3 (Long Range Arena) prints no equation; shared projections and the sum are those of the
    authors' module BiHgru2_1d (hgru2-pytorch).
    """

    def __init__(self, config: TwoWayHGRN2Config, scope: BuildContext) -> None:
        super().__init__(config, scope)
        self.reversed_exchange = ReversedExchange(scope.cp)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        if state is not None:
            self._refuse_state()
        ids, valid, documents = context.documents.ids, context.documents.valid, context.documents.shard
        q, k, v, log_decay = gated_heads(*self._projections(x), context)
        if valid is not None:
            padding = ~valid[..., None, None]
            k, log_decay = k.masked_fill(padding, 0.0), log_decay.masked_fill(padding, 0.0)
        heads = (q, k, v, log_decay)
        forward = self._scan(heads, ids, self.cp.sequence_shard(documents))
        reversed_ids = None if ids is None else ids[:, -1:] - ids.flip(1)  # non-decreasing
        shard = None if documents is None else SequenceShard(self.reversed_exchange, documents)
        backward = self._scan([y.flip(1) for y in heads], reversed_ids, shard).flip(1)
        return MixerOutput(self.out((forward + backward).flatten(2)), ())

    def _scan(self, heads: Sequence[Tensor], ids: Tensor | None, shard: SequenceShard | None) -> Tensor:
        """Output [B, T, H/tp, K] of one scan in the order of its tokens, from q, k, v and log f [B, T, H/tp, K]."""
        q, k, v, log_decay = heads
        return vector_decay_scan(
            q,
            k,
            v,
            log_decay,
            scale=self.scale,
            shard=shard,
            state_gradient=False,
            document_ids=ids,
            chunk_size=self.config.chunk_size,
        ).output

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        self._refuse_state()

    def add_step(
        self, residual: Tensor, x: Tensor, norm: nn.Module, context: MixerContext, state: State
    ) -> MixerOutput:
        self._refuse_state()

    def _refuse_state(self) -> NoReturn:
        raise ConfigError(
            f"{self.scope.path}: two_way_hgrn2 reads later tokens too, so no state can continue a sequence; give it "
            'full sequences, and generate with a decoder of type = "hgrn2"'
        )

    def flops(self, length: int) -> int:
        width, chunk_size = self.head_dim, self.config.chunk_size
        scan = decay_scan_flops(
            length, num_heads=self.config.num_heads, key_dim=width, value_dim=width, chunk_size=chunk_size
        )
        return super().flops(length) + scan

    def state_shapes(self) -> list[tuple[int, ...]]:
        return []


MIXER = TwoWayHGRN2
