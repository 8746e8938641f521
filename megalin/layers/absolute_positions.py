"""Absolute positions, added to the embedded tokens: sinusoidal, or for decoders a learned table."""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.errors import ConfigError
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, SequenceContext, State
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.parallel.embedding import ReplicatedEmbedding
from megalin.parallel.tensor_parallel import TOKENS, TensorParallel


def sinusoidal_positions(positions: Tensor, x: Tensor, tp: TensorParallel) -> Tensor:
    """P_p = [sin(p w) | cos(p w)], w_j = 10000^(-2 j / D), j < D / 2, of positions p [B, T].

    In the layout and dtype of the residual stream x [B, T or T/tp, D]; D is even. Computed in at least fp32.

    Source: Transformer section 3.5, whose sines and cosines take turns.
    """
    if tp.sequence_parallel:
        positions = tp.local_slice(positions, dim=TOKENS)
    width, dtype = x.shape[-1], compute_dtype(x)
    exponent = torch.arange(width // 2, dtype=torch.float64, device=positions.device) * (-2.0 / width)
    angle = positions[..., None].to(dtype) * (10000.0**exponent).to(dtype)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(x.dtype)


class AbsolutePositions(Mixer):
    """Input layer y = x + P_p of tokens at positions p, which run on over packed documents.

    sinusoidal: P_p of `sinusoidal_positions`. learned: P is a table of `rows` rows from N(0, std^2). A token beyond it
    is NaN: no check in decoding may wait for the device.

    Args:
        rows: of a learned table; None: sinusoidal.

    Raises:
        ConfigError: sinusoidal positions of an odd width, or in a forward, a sequence longer than the table.
    """

    def __init__(self, rows: int | None, scope: BuildContext) -> None:
        super().__init__()
        self.rows, self.tp, self.cp, self.path, self.width = rows, scope.tp, scope.cp, scope.path, scope.hidden_size
        if rows is None and self.width % 2:
            raise ConfigError(
                f'{scope.path}: absolute_positions = "sinusoidal" has as many sines as cosines, but model.hidden_size '
                f'= {self.width} is odd; use an even width, or absolute_positions = "learned"'
            )
        self.table = None
        if rows is not None:
            self.table = ReplicatedEmbedding(rows, self.width, tp=scope.tp, std=scope.init_std)

    def build_mixer_context(self, context: SequenceContext) -> MixerContext:
        length = context.positions.shape[-1] * self.cp.size
        if self.rows is not None and length > self.rows:
            raise ConfigError(
                f"{self.path}: max_positions = {self.rows}, but a sequence has {length} tokens; use sequences of at "
                f"most {self.rows} (data.sequence_length), or train with more positions"
            )
        return super().build_mixer_context(context)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        positions = context.positions.expand(len(x), -1)  # [B, T]
        if self.table is None:
            return MixerOutput(x + sinusoidal_positions(positions, x, self.tp), ())
        assert self.rows is not None
        outside = positions >= self.rows
        added = self.table(positions.masked_fill(outside, 0))
        outside = self.tp.local_slice(outside, dim=TOKENS) if self.tp.sequence_parallel else outside
        return MixerOutput(x + added.masked_fill(outside[..., None], torch.nan).to(x.dtype), ())

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        return self(x, context, state)

    def flops(self, length: int) -> int:
        return 0
