"""A small mixer with every extension point: learned decay, model-level gate, input layer, derived buffer."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.layers.config import MixerConfig
from megalin.layers.mixers.base import (
    BuildContext,
    FullPrecision,
    Mixer,
    MixerContext,
    MixerOutput,
    SequenceContext,
    State,
    update_derived_buffers,
)
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.parallel.initialisation import Initializer, normal
from megalin.parallel.linear import ColumnParallelLinear
from megalin.parallel.tensor_parallel import local

TYPE = "tests.mixers.decaying_sum"


def decaying_sum(v: Tensor, rate: Tensor, document_ids: Tensor | None, state: Tensor | None) -> Tensor:
    """m_t = exp(-rate) m_{t-1} + v_t per channel: v [B, T, D], rate [D], state [B, D] -> m [B, T, D], dtype of rate."""
    index = torch.arange(v.shape[1])
    distance = index[:, None] - index
    decay = torch.exp(-rate[:, None, None] * distance.clamp(min=0)).masked_fill(distance < 0, 0.0)  # [D, T, T]
    if document_ids is not None:
        decay = decay * (document_ids[:, None, :, None] == document_ids[:, None, None, :])  # [B, D, T, T]
    m = (decay @ v.to(decay.dtype).mT[..., None]).squeeze(-1).mT
    if state is not None:
        carried = torch.exp(-rate * (index + 1)[:, None]) * state[:, None]
        if document_ids is not None:
            carried = carried * (document_ids == document_ids[:, :1])[..., None]
        m = m + carried
    return m


class Rates(FullPrecision):
    """Decay rates softplus(theta) [D/tp]."""

    def __init__(self, scope: BuildContext) -> None:
        super().__init__()
        self.theta = scope.tp.parameter(scope.hidden_size, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        initializer(self.theta, "theta", normal(1.0))

    def forward(self) -> tuple[Tensor, ...]:
        return (functional.softplus(local(self.theta)),)


class LayerGates(nn.Module):
    """Gates [L, D/tp] of all layers: a softmax over the layers, so that each use has a gradient for all of them."""

    def __init__(self, scope: BuildContext) -> None:
        super().__init__()
        self.logits = scope.tp.parameter(scope.num_layers, scope.hidden_size, shard_dim=1)

    def init_weights(self, initializer: Initializer) -> None:
        initializer(self.logits, "logits", normal(1.0))

    def forward(self) -> Tensor:
        return local(self.logits).softmax(0)


class InputSum(Mixer):
    """y = x + gain * m, m the decaying sum of x with rate ln 2: channels sharded over tp."""

    def __init__(self, scope: BuildContext) -> None:
        super().__init__()
        self.tp, self.width = scope.tp, scope.hidden_size
        self.local_width = scope.tp.divide(self.width, "model.hidden_size")
        self.gain = scope.tp.parameter(self.width, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        initializer(self.gain, "gain", normal(1.0))

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        mine = self.tp.local_slice(self.tp.enter(x), dim=-1)  # [B, T, D/tp]
        rate = torch.full((self.local_width,), math.log(2.0), dtype=compute_dtype(x))
        m = decaying_sum(mine, rate, context.documents.ids, state[0] if state else None)
        y = mine + local(self.gain) * m.to(x.dtype)
        before = self.tp.axis.rank * self.local_width
        whole = functional.pad(y, (before, self.width - before - self.local_width))
        return MixerOutput(self.tp.leave(whole), () if state is None else (m[:, -1],))

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        return self(x, context, state)

    def flops(self, length: int) -> int:
        return 2 * length * self.width

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.local_width,)]


class DecayingSum(Mixer):
    """y = ratio * ((m * gate_l) W_out), m the decaying sum of x W_in; ratio = min(1, 1 / max |W_out|)."""

    ratio: Tensor

    def __init__(self, config: DecayingSumConfig, scope: BuildContext) -> None:
        super().__init__()
        width, self.tp, self.scope = scope.hidden_size, scope.tp, scope
        self.value = ColumnParallelLinear(width, width, tp=self.tp, std=scope.init_std, name="model.hidden_size")
        self.out = self.tp.parameter(width, width, shard_dim=1)
        self.full_precision = Rates(scope)
        self.register_buffer("ratio", torch.empty((), device="meta"), persistent=False)

    @classmethod
    def shared_module(cls, config: DecayingSumConfig, scope: BuildContext) -> LayerGates:
        return LayerGates(scope)

    @classmethod
    def input_layer(cls, config: DecayingSumConfig, scope: BuildContext) -> InputSum:
        return InputSum(scope)

    def init_weights(self, initializer: Initializer) -> None:
        initializer(self.out, "out", normal(2.0 * self.scope.init_std))
        update_derived_buffers([self])

    def norm_tracked_weights(self) -> list[nn.Parameter]:
        return [self.out]

    def update_from_weights(self, largest: Tensor) -> None:
        self.ratio.copy_((1.0 / largest[0]).clamp(max=1.0))

    def full_precision_tensors(self, context: SequenceContext) -> tuple[Tensor, ...]:
        return *super().full_precision_tensors(context), context.shared[TYPE][self.scope.layer]

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        rate, gate = context.full_precision
        (v,) = self.value(self.tp.enter(x))
        m = decaying_sum(v, rate, context.documents.ids, state[0] if state else None)
        y = functional.linear(m.to(x.dtype) * gate, local(self.out)) * self.ratio.to(x.dtype)
        return MixerOutput(self.tp.leave(y), () if state is None else (m[:, -1],))

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        return self(x, context, state)

    def flops(self, length: int) -> int:
        return self.value.flops() + 2 * length * self.scope.hidden_size + 2 * self.scope.hidden_size**2

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.scope.hidden_size // self.tp.size,)]


class DecayingSumConfig(MixerConfig):
    """The mixer of this file."""

    type: Literal["tests.mixers.decaying_sum"] = TYPE
    """This mixer."""


CONFIG = DecayingSumConfig
MIXER = DecayingSum
