"""Gates of the `recurrence` mixer: the data-dependent decay with its tied gate, and gates of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalin.layers.choices import DecayGateForm
from megalin.layers.decay import draw_step_bias
from megalin.layers.mixers.base import FullPrecision
from megalin.ops.choices import TiedGate
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.overrides import unchanged
from megalin.ops.gates.ddts_gates import ddts_gates
from megalin.ops.gates.decay_gates import decay_gates
from megalin.ops.gates.low_rank_gate import low_rank_gate
from megalin.parallel.initialisation import Initializer, constant
from megalin.parallel.linear import ColumnParallelLinear, LowRankLinear
from megalin.parallel.tensor_parallel import TensorParallel, local


class GateSizes(NamedTuple):
    """Sizes of a gate of `num_heads` heads with `channels` numbers each, as a function of x of width `width`."""

    width: int
    num_heads: int
    channels: int

    @property
    def total(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.channels


class DecayVectors(FullPrecision):
    """Biases [H K] of the logits of decay and temperature, log a of the form step [H] or power [H K], and the bias
    [H V] of the decay along values; heads sharded over the axis."""

    def __init__(
        self, form: DecayGateForm | None, sizes: GateSizes, values: GateSizes | None, tp: TensorParallel
    ) -> None:
        """`form` is None without a decay along keys, `values` without one along values."""
        super().__init__()
        self.form = form
        self.bias = None if form is None else tp.parameter(sizes.total, shard_dim=0)
        self.temperature_bias = tp.parameter(sizes.total, shard_dim=0) if form == "tempered" else None
        rates = {"step": sizes.num_heads, "power": sizes.total}.get(str(form))
        self.a_log = None if rates is None else tp.parameter(rates, shard_dim=0)
        self.value_bias = None if values is None else tp.parameter(values.total, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """sigmoid, power and values: zero. double_exp: uniform in [-6, -1], so A in [0.69, 0.998]. step and tempered:
        softplus(bias) log-uniform in [0.001, 0.1], sigmoid of the temperature's bias uniform in [1/16, 0.9]. a: of step
        uniform in [1, 16], of power so that exp(-a), the least A, is uniform in [0.9, 0.999]."""
        if self.bias is not None and self.form == "double_exp":
            initializer(self.bias, "bias", lambda full, generator: full.uniform_(-6.0, -1.0, generator=generator))
        elif self.bias is not None:
            initializer(self.bias, "bias", constant(0.0) if self.form in ("sigmoid", "power") else draw_step_bias)
        if self.temperature_bias is not None:
            initializer(
                self.temperature_bias,
                "temperature_bias",
                lambda full, generator: full.uniform_(1 / 16, 0.9, generator=generator).logit_(),
            )
        if self.a_log is not None:
            initializer(self.a_log, "a_log", self._draw_rates)
        if self.value_bias is not None:
            initializer(self.value_bias, "value_bias", constant(0.0))

    def _draw_rates(self, full: Tensor, generator: torch.Generator) -> None:
        if self.form == "step":
            full.uniform_(1.0, 16.0, generator=generator).log_()
        else:
            full.uniform_(0.9, 0.999, generator=generator).log_().neg_().log_()

    def forward(self) -> tuple[Tensor, ...]:
        """The bias, that of the temperature or log a, and that of the values, each where there is one."""
        vectors = (self.bias, self.temperature_bias, self.a_log, self.value_bias)
        return tuple(local(vector).clone() for vector in vectors if vector is not None)


class RecurrenceGates(NamedTuple):
    """Inputs of the scan."""

    k: Tensor
    """[B, T, H/tp, K]."""
    decay: Tensor
    """log A [B, T, H/tp, K or 1], at least fp32."""


class DecayGate(nn.Module):
    """The decay A_t and the tied gate of the keys B_t, from logits x W + b, W of rank `rank` or full.

    Source: Rodimus Table 4.
    """

    def __init__(
        self,
        form: DecayGateForm,
        sizes: GateSizes,
        *,
        tied: TiedGate,
        temperature: float,
        rank: int | None,
        tp: TensorParallel,
        std: float,
        name: str,
    ) -> None:
        """Raises ConfigError where the heads, called `name` in the message, do not divide."""
        super().__init__()
        self.form, self.tied, self.temperature, self.sizes = form, tied, temperature, sizes
        self.local_heads = tp.divide(sizes.num_heads, name)
        self.logit = self._linear(rank, tp, std, name)
        self.temperature_logit = self._linear(rank, tp, std, name) if form == "tempered" else None

    def forward(self, x: Tensor, k: Tensor, vectors: tuple[Tensor, ...]) -> RecurrenceGates:
        """x [B, T, D] (after `TensorParallel.enter`), k [B, T, H/tp, K], and the tensors of `DecayVectors`."""
        bias, *others = vectors
        logit = self._logits(self.logit, x, bias)
        if self.form == "tempered":
            assert self.temperature_logit is not None
            gates = ddts_gates(logit, self._logits(self.temperature_logit, x, others[0]), k)
            return RecurrenceGates(gates.key.to(k.dtype), gates.log_decay)
        rate = None
        if self.form in ("step", "power"):
            rate = torch.exp(others[0]).unflatten(0, (self.local_heads, -1))
        log_decay, key_gate = decay_gates(
            logit, form=self.form, tied=self.tied, temperature=self.temperature, rate=rate
        )
        k = k if key_gate is None else (k * key_gate).to(k.dtype)
        return RecurrenceGates(k, log_decay)

    def flops(self) -> int:
        """Forward floating-point operations a token, whole axis."""
        return self.logit.flops() + (0 if self.temperature_logit is None else self.temperature_logit.flops())

    def _linear(
        self, rank: int | None, tp: TensorParallel, std: float, name: str
    ) -> ColumnParallelLinear | LowRankLinear:
        width, total = self.sizes.width, self.sizes.total
        if rank is None:
            return ColumnParallelLinear(width, total, tp=tp, std=std, name=name)
        return LowRankLinear(width, rank, total, tp=tp, std=std, name=name)

    def _logits(self, linear: ColumnParallelLinear | LowRankLinear, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, H/tp, K or 1], in at least fp32."""
        logit = linear(x) if isinstance(linear, LowRankLinear) else linear(x)[0]
        logit = logit.to(compute_dtype(logit)) + bias
        return logit.unflatten(-1, (self.local_heads, self.sizes.channels))


class LowRankGate(nn.Module):
    """y = sigmoid(x W_down W_up + b) z on the sharded channels z of keys or values (Rodimus' beta-hat)."""

    def __init__(
        self, in_features: int, rank: int, out_features: int, *, tp: TensorParallel, std: float, name: str
    ) -> None:
        """Raises ConfigError where `out_features`, called `name` in the message, does not divide."""
        super().__init__()
        self.tp = tp
        self.code = LowRankLinear(in_features, rank, out_features, tp=tp, std=std, name=name)
        self.bias = tp.parameter(out_features, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """A bias of zero."""
        initializer(self.bias, "bias", constant(0.0))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x [B, T, in] (after `TensorParallel.enter`), z [B, T, out/tp] -> [B, T, out/tp]."""
        if not unchanged(self.code, LowRankLinear):
            return (torch.sigmoid(self.code(x) + local(self.bias)) * z).to(z.dtype)
        code = nn.functional.linear(x, self.tp.all_reduce_gradient(local(self.code.down)))
        return low_rank_gate(z, code, local(self.code.up), local(self.bias))

    def flops(self) -> int:
        """Forward floating-point operations a token, whole axis."""
        return self.code.flops()
