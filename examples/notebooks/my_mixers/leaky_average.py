"""A mixer of one's own: an exponential moving average of values with a learned decay for each head."""

from __future__ import annotations

from typing import Literal, Self

import pydantic
from torch import Tensor
from torch.nn import functional

from megalin.layers.config import MixerConfig
from megalin.layers.mixers.base import BuildContext, FullPrecision, Mixer, MixerContext, MixerOutput, State
from megalin.ops import scalar_decay_scan
from megalin.parallel.initialisation import Initializer, constant
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import local


class Rates(FullPrecision):
    """Decay rates softplus(theta) [H/tp], in nats a token; they feed exponentials and so compute in fp32."""

    def __init__(self, num_heads: int, scope: BuildContext) -> None:
        super().__init__()
        self.theta = scope.tp.parameter(num_heads, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        initializer(self.theta, "theta", constant(-2.0))

    def forward(self) -> tuple[Tensor, ...]:
        return (functional.softplus(local(self.theta)),)


class LeakyAverage(Mixer):
    """y = scan(q, k, v; decay exp(-rate of the head)) W_o, [q | k | v] = x W_qkv."""

    def __init__(self, config: LeakyAverageConfig, scope: BuildContext) -> None:
        super().__init__()
        width, tp, name = scope.hidden_size, scope.tp, "model.hidden_size"
        self.local_heads = tp.divide(config.num_heads, f"{scope.path}.num_heads")
        self.head_dim = width // config.num_heads
        self.qkv = ColumnParallelLinear(width, width, parts=3, tp=tp, std=scope.init_std, name=name)
        self.out = RowParallelLinear(width, width, tp=tp, std=scope.output_std, name=name)
        self.full_precision = Rates(config.num_heads, scope)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        q, k, v = (y.unflatten(-1, (self.local_heads, self.head_dim)) for y in self.qkv(x, gather_input=True))
        (rates,) = context.full_precision
        scan = scalar_decay_scan(
            functional.elu(q) + 1,
            (functional.elu(k) + 1) / self.head_dim,
            v,
            -rates.expand(*q.shape[:3]),
            initial_state=state[0] if state else None,
            document_ids=context.documents.ids,
        )
        return MixerOutput(self.out(scan.output.flatten(2)), () if state is None else (scan.state,))

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        return self(x, context, state)

    def flops(self, length: int) -> int:
        return self.qkv.flops() + self.out.flops() + 4 * self.local_heads * self.head_dim**2

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.local_heads, self.head_dim, self.head_dim)]


class LeakyAverageConfig(MixerConfig):
    """The mixer of this file."""

    type: Literal["my_mixers.leaky_average"] = "my_mixers.leaky_average"
    """The path of this module."""
    num_heads: int = pydantic.Field(gt=0)
    """Heads, a divisor of the hidden size."""

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"num_heads": num_heads})


CONFIG = LeakyAverageConfig
MIXER = LeakyAverage
