"""Linear attention with a chosen recurrence: decay, gates of keys and values, positions, widths and short convolution.

It makes the recurrences of Rodimus' Table 4 a config space, GLA and RetNet among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Self

import pydantic
import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.layers.decay import SlopeTable, decay_slopes
from megalin.layers.gates import MixerGates
from megalin.layers.halo import entering_inputs
from megalin.layers.mixers.base import BuildContext, Mixer, MixerConfig, MixerContext, MixerOutput, State
from megalin.layers.norms import NormKind
from megalin.layers.recurrence_gates import DecayGate, DecayGateForm, DecayVectors, GateSizes, LowRankGate
from megalin.layers.recurrence_scan import DecaySide, Recurrence, RecurrenceDecay
from megalin.ops.gates.decay_gates import TiedGate
from megalin.ops.norms.rms_norm import rms_norm
from megalin.ops.norms.srmsnorm import srmsnorm
from megalin.ops.positions.activated_lrpe import QueryKeyActivation, one_plus_elu
from megalin.ops.positions.encodings import rope
from megalin.ops.scans.short_conv import short_conv
from megalin.parallel.initialisation import Initializer, constant, uniform
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import local


class _ScanInputs(NamedTuple):
    """Inputs of the scan of this rank's heads, and of the output projection."""

    q: Tensor  # [B, T, H/tp, K]
    k: Tensor  # [B, T, H/tp, K]
    v: Tensor  # [B, T, H/tp, V]
    decay: Tensor | None  # [H/tp], [B, T, H/tp] or [B, T, H/tp, K]
    value_decay: Tensor | None  # [B, T, H/tp, V]
    gate: Tensor | None  # [B, T, H V/tp]
    conv_state: tuple[Tensor, ...]  # [B, taps - 1, (2 K + V) H/tp]; empty without a convolution


class RecurrenceMixer(Mixer):
    """y = (norm(o) * act(x W_g)) W_o, o_t = scale S_t^T q_t, S_t = A_t S_{t-1} + (B_t k_t) (B^_t v_t)^T in each head.

    [q | k] = x W_qk of expand_k D channels and v = x W_v of expand_v D, then a short convolution, the activation of q
    and k, and positions. A_t is the decay, B_t and B^_t are gates (`RecurrenceConfig`). The norm is over one head.

    Tensor parallel over heads.

    Source: Rodimus Table 4; GLA; RetNet.
    """

    slopes: Tensor | None

    def __init__(self, config: RecurrenceConfig, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.scope, self.tp, self.cp = config, scope, scope.tp, scope.cp
        width, tp, std, heads = scope.hidden_size, scope.tp, scope.init_std, config.num_heads
        name = f"{scope.path}.num_heads"
        self.key_dim, self.value_dim = config.head_dims(width, scope.path)
        self.local_heads = tp.divide(heads, name)
        self.recurrence = Recurrence(
            config.decay, self.key_dim, self.value_dim, config.scale(self.key_dim), config.chunk_size, config.decay_side
        )
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.projects_keys = config.keys == "projected"
        self.qk = ColumnParallelLinear(width, keys, parts=2 if self.projects_keys else 1, tp=tp, std=std, name=name)
        self.vg = ColumnParallelLinear(
            width, values, parts=1 if config.gate == "none" else 2, tp=tp, std=std, name=name
        )
        self.conv_weights: list[str] = []
        if config.conv_width is not None:
            parts = {"conv_q": keys} | ({"conv_k": keys} if self.projects_keys else {}) | {"conv_v": values}
            for part, size in parts.items():
                self.register_parameter(part, tp.parameter(size, config.conv_width, shard_dim=0))
            self.conv_weights = list(parts)
        rank = config.key_gate_rank
        self.key_gate = None if rank is None else LowRankGate(width, rank, keys, tp=tp, std=std, name=name)
        rank = config.value_gate_rank
        self.value_gate = None if rank is None else LowRankGate(width, rank, values, tp=tp, std=std, name=name)
        self._build_decay()
        self.norm_weight = tp.parameter(self.value_dim, shard_dim=None) if config.head_norm == "rmsnorm" else None
        self.out = RowParallelLinear(values, width, tp=tp, std=scope.output_std, name=name)
        slopes = torch.empty(self.local_heads, device="meta") if config.decay == "fixed" else None
        self.register_buffer("slopes", slopes, persistent=False)

    def _build_decay(self) -> None:
        """Gates of a scalar or vector decay, along keys and values."""
        config, scope = self.config, self.scope
        self.decay_gate = self.value_decay_gate = None
        if config.decay not in ("scalar", "vector"):
            return
        options: dict[str, Any] = {"rank": config.decay_rank, "temperature": config.decay_temperature}
        options |= {"tp": scope.tp, "std": scope.init_std, "name": f"{scope.path}.num_heads"}
        keys = GateSizes(scope.hidden_size, config.num_heads, 1 if config.decay == "scalar" else self.key_dim)
        values = None if config.decay_side == "keys" else keys._replace(channels=self.value_dim)
        form = None if config.decay_side == "values" else config.decay_form
        if form is not None:
            self.decay_gate = DecayGate(form, keys, tied=config.input_gate, **options)
        if values is not None:
            self.value_decay_gate = DecayGate("sigmoid", values, tied="none", **options)
        self.full_precision = DecayVectors(form, keys, values, scope.tp)

    def init_weights(self, initializer: Initializer) -> None:
        """Convolutions uniformly within 1 / sqrt(taps), the norm's weight one, and the table of slopes."""
        for name in self.conv_weights:
            taps = getattr(self, name).shape[1]
            initializer(getattr(self, name), name, uniform(1.0 / math.sqrt(taps)))
        if self.norm_weight is not None:
            initializer(self.norm_weight, "norm_weight", constant(1.0))
        if self.slopes is not None:
            place, heads = self.scope, self.config.num_heads
            kind = self.config.slope_table
            table = decay_slopes(kind, layer=place.layer, num_layers=place.num_layers, num_heads=heads)
            self.slopes.copy_(self.tp.local_slice(table, dim=0))

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state)
        scan = self.recurrence.scan(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.decay,
            inputs.value_decay,
            initial_state=state[-1] if state else None,
            shard=self.cp.sequence_shard(context.documents.shard),
            document_ids=context.documents.ids,
        )
        y = self._output(scan.output, inputs.gate)
        return MixerOutput(y, () if state is None else (*inputs.conv_state, scan.state))

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state)
        q, k, v = inputs.q[:, 0], inputs.k[:, 0], inputs.v[:, 0]
        decay = inputs.decay if inputs.decay is None or self.slopes is not None else inputs.decay[:, 0]
        value_decay = None if inputs.value_decay is None else inputs.value_decay[:, 0]
        scan = self.recurrence.step(q, k, v, decay, state[-1], value_decay, in_place=context.in_place)
        return MixerOutput(self._output(scan.output[:, None], inputs.gate), (*inputs.conv_state, scan.state))

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """ln A_t of each head, key, or value where these alone decay; with both, that of values is a gate."""
        if self.config.decay in ("none", "fixed"):
            slopes = torch.zeros(self.local_heads, device=x.device) if self.slopes is None else self.slopes
            return MixerGates(-slopes[:, None])
        inputs = self._scan_inputs(x, context, None)
        found = [each for each in (inputs.decay, inputs.value_decay) if each is not None]
        log_decay = found[0][..., None] if found[0].dim() == 3 else found[0]
        return MixerGates(log_decay, gates={"value_decay": found[1].exp()} if found[1:] else {})

    def _scan_inputs(self, x: Tensor, context: MixerContext, state: State | None) -> _ScanInputs:
        x = self.tp.enter(x)
        (q, *keys), (v, *gates) = self.qk(x), self.vg(x)
        conv_state: tuple[Tensor, ...] = ()
        if self.conv_weights:
            (q, *keys, v), after = self._convolved([q, *keys, v], context, state)
            conv_state = (after,)
        v = v if self.value_gate is None else self.value_gate(x, v)
        q, v = q.unflatten(-1, (self.local_heads, -1)), v.unflatten(-1, (self.local_heads, -1))
        k = keys[0].unflatten(-1, (self.local_heads, -1)) if keys else torch.ones_like(q)
        q = self._positioned(self._activated(q), context)
        k = self._positioned(self._activated(k) if keys else k, context)
        if self.key_gate is not None:
            k = self.key_gate(x, k.flatten(2)).view_as(k)
        decay, value_decay = self.slopes, None
        if self.decay_gate is not None:
            k, decay = self.decay_gate(x, k, context.full_precision)
            decay = decay.squeeze(-1) if self.config.decay == "scalar" else decay
        if self.value_decay_gate is not None:
            _, value_decay = self.value_decay_gate(x, v, context.full_precision[-1:])
        return _ScanInputs(q, k, v, decay, value_decay, gates[0] if gates else None, conv_state)

    def _convolved(
        self, parts: list[Tensor], context: MixerContext, state: State | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """silu of the convolutions of q, k and v, as one, and its last inputs."""
        joined = torch.cat(parts, dim=-1)
        weights = torch.cat([local(getattr(self, name)) for name in self.conv_weights])
        before = state[0] if state else entering_inputs(joined, context, self.cp, taps=weights.shape[1])
        conv = short_conv(joined, weights, None, state=before, document_ids=context.documents.ids)
        return conv.output.split([part.shape[-1] for part in parts], dim=-1), conv.state

    def _activated(self, x: Tensor) -> Tensor:
        if self.config.activation == "1+elu":
            return one_plus_elu(x)
        return functional.silu(x) if self.config.activation == "silu" else x

    def _positioned(self, x: Tensor, context: MixerContext) -> Tensor:
        return x if self.config.positions == "none" else rope(x, context.positions, base=self.config.base)

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """The scan's output [B, T, H/tp, V] and the gate -> y in the layout of the residual stream."""
        if self.norm_weight is not None:
            weight = self.tp.all_reduce_gradient(local(self.norm_weight))
            o = rms_norm(o, weight, eps=self.config.norm_eps)
        elif self.config.head_norm == "srmsnorm":
            o = srmsnorm(o, eps=self.config.norm_eps)
        y = o.flatten(2)
        if gate is not None:
            y = y * (functional.silu(gate) if self.config.gate == "silu" else torch.sigmoid(gate))
        return self.out(y)

    def flops(self, length: int) -> int:
        gates = (self.key_gate, self.value_gate, self.decay_gate, self.value_decay_gate)
        projections = self.qk.flops() + self.vg.flops() + sum(gate.flops() for gate in gates if gate is not None)
        return projections + self.recurrence.flops(length, self.config.num_heads) + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        if self.config.conv_width is not None:
            keys = 2 * self.key_dim if self.projects_keys else self.key_dim
            shapes.append((self.config.conv_width - 1, self.local_heads * (keys + self.value_dim)))
        return [*shapes, self.recurrence.state_shape(self.local_heads)]


class RecurrenceConfig(MixerConfig):
    """Linear attention with a chosen recurrence: the rows of Rodimus' Table 4, GLA and RetNet among them."""

    supports_context_parallel: ClassVar[bool] = True
    type: Literal["recurrence"] = "recurrence"
    """This mixer."""
    norm: NormKind = "rmsnorm"
    """Norm of the sub-layer's input."""
    num_heads: int = pydantic.Field(gt=0)
    """Heads; must divide the widths of keys and of values, and be divided by parallel.tp."""
    expand_k: float = pydantic.Field(default=1.0, gt=0)
    """Width of all heads' queries, and of their keys, as a multiple of the hidden size."""
    expand_v: float = pydantic.Field(default=1.0, gt=0)
    """Width of all heads' values as a multiple of the hidden size."""
    decay: RecurrenceDecay = "none"
    """Decay A_t of the state. none: 1 (linear attention). fixed: a constant a head (RetNet). scalar: a number a token
    and head (gRetNet, Mamba-2). vector: a number a token and key (GLA, RWKV6, HGRN2, Rodimus)."""
    decay_side: DecaySide = "keys"
    """Side of the state along which a vector decay runs (Rodimus Table 16). keys. values: sigmoid(g)^(1/temperature) a
    value, keys do not decay. both: along keys by decay_gate, along values so. Values have no kernel
    (docs/ablations.md)."""
    slopes: SlopeTable | None = None
    """Table of the fixed decay, as of `tnl`'s `decay`; left out: retnet, 1 - 2^(-5 - h) of head h = 0 .. H-1."""
    decay_gate: DecayGateForm | None = None
    """Form of a scalar or vector decay, of the logits g = x W + b. sigmoid: sigmoid(g)^(1/temperature), also if left
    out. double_exp: exp(-exp(g)). step: exp(-a softplus(g)), a learned a head. power: exp(-a sigmoid(g)), a learned a
    decay (Hawk). tempered: exp(-softplus(g) sigmoid(t)), vector only, with keys normed and scaled by
    softplus(g)^sigmoid(t)."""
    temperature: float | None = pydantic.Field(default=None, gt=0)
    """Temperature of the form sigmoid; left out: 16."""
    decay_rank: int | None = pydantic.Field(default=None, gt=0)
    """Rank of the matrix W of the decay's logits (GLA: 16); left out: a full matrix."""
    input_gate: TiedGate = "none"
    """Gate B_t of the keys that is tied to the decay. none: 1. complement: 1 - A_t (HGRN2). root_complement:
    sqrt(1 - A_t^2) (Hawk). selection: softplus(g) of the form step (Mamba-2), softplus(g)^sigmoid(t) of the form
    tempered (Rodimus), which has no other."""
    keys: Literal["projected", "ones"] = "projected"
    """Keys before the gates. projected: x W_k. ones: all ones, so that the gate is the key (HGRN2)."""
    key_gate_rank: int | None = pydantic.Field(default=None, gt=0)
    """Rank of a gate sigmoid(x W_1 W_2 + b) of the keys, besides the tied one; left out: no such gate."""
    value_gate_rank: int | None = pydantic.Field(default=None, gt=0)
    """Rank of a gate sigmoid(x W_1 W_2 + b) of the values (Rodimus' beta-hat); left out: no such gate."""
    activation: QueryKeyActivation = "none"
    """Applied to queries and projected keys, after the convolution."""
    positions: Literal["none", "rope"] = "none"
    """Positions of queries and keys. rope: rotary (RetNet)."""
    rope_base: float | None = pydantic.Field(default=None, gt=1)
    """Base of the rotary frequencies; left out: 10000."""
    conv_width: int | None = pydantic.Field(default=None, ge=2)
    """Taps of a short convolution of queries, projected keys and values, with silu, the current token included; left
    out: no convolution."""
    query_scale: Literal["inverse_sqrt", "one"] = "inverse_sqrt"
    """Factor on the scan's output. inverse_sqrt: K^(-1/2) for K keys a head. one: 1."""
    head_norm: Literal["rmsnorm", "srmsnorm", "none"] = "rmsnorm"
    """Norm of each head's output. rmsnorm: with a weight that all heads share. srmsnorm: without."""
    gate: Literal["silu", "sigmoid", "none"] = "silu"
    """Output gate act(x W_g), after the norm. none: no such matrix."""
    chunk_size: int = pydantic.Field(default=64, gt=0)
    """Tokens a chunk of the scan; the result does not depend on it."""

    @property
    def slope_table(self) -> SlopeTable:
        """Table of the fixed decay."""
        return self.slopes or "retnet"

    @property
    def decay_form(self) -> DecayGateForm:
        """Form of a scalar or vector decay."""
        return self.decay_gate or "sigmoid"

    @property
    def decay_temperature(self) -> float:
        """Temperature of the form sigmoid."""
        return 16.0 if self.temperature is None else self.temperature

    @property
    def base(self) -> float:
        """Base of the rotary frequencies."""
        return 10000.0 if self.rope_base is None else self.rope_base

    def scale(self, key_dim: int) -> float:
        """Factor on the scan's output."""
        return 1.0 if self.query_scale == "one" else key_dim**-0.5

    def head_dims(self, hidden_size: int, path: str) -> tuple[int, int]:
        """Keys and values of a head. Raises ConfigError where the widths are not multiples of the heads."""
        problems, dims = [], []
        for name, factor in (("expand_k", self.expand_k), ("expand_v", self.expand_v)):
            width = round(hidden_size * factor)
            if not math.isclose(width, hidden_size * factor, rel_tol=1e-9) or width % self.num_heads or not width:
                problems.append(
                    f"{path}.num_heads = {self.num_heads} does not divide model.hidden_size = {hidden_size} times "
                    f"{name} = {factor}, which is {hidden_size * factor:g}, into whole heads; change one of them"
                )
            dims.append(max(1, width // self.num_heads))
        if not problems and self.positions == "rope" and dims[0] % 2:
            problems.append(
                f"{path}.expand_k = {self.expand_k} leaves {dims[0]} keys a head, but rotary positions need an even "
                "number; change expand_k or num_heads"
            )
        if problems:
            raise ConfigError("\n".join(problems))
        return dims[0], dims[1]

    @pydantic.model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if problems := list(self._contradictions()):
            raise ValueError("\n".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """A line for each key that has no meaning with another."""
        depends = self.decay in ("scalar", "vector")
        if self.slopes is not None and self.decay != "fixed":
            yield f'slopes = "{self.slopes}" has no meaning with decay = "{self.decay}"; leave it out, or use "fixed"'
        if not depends:
            given: dict[str, Any] = {
                "decay_gate": self.decay_gate,
                "temperature": self.temperature,
                "decay_rank": self.decay_rank,
            }
            given["input_gate"] = None if self.input_gate == "none" else self.input_gate
            for name, value in given.items():
                if value is not None:
                    yield (
                        f'{name} = {value!r} has no meaning with decay = "{self.decay}", which does not depend on the '
                        'input; leave it out, or use decay = "scalar" or "vector"'
                    )
        elif self.temperature is not None and self.decay_form != "sigmoid" and self.decay_side == "keys":
            yield (
                f'temperature = {self.temperature} has no meaning with decay_gate = "{self.decay_form}"; leave it out, '
                'or use "sigmoid"'
            )
        if self.decay_side != "keys" and self.decay != "vector":
            yield f'decay_side = "{self.decay_side}" needs decay = "vector", not "{self.decay}"; use it, or "keys"'
        if depends and self.decay_side == "values":
            given = {
                "decay_gate": self.decay_gate,
                "input_gate": None if self.input_gate == "none" else self.input_gate,
            }
            for name, value in given.items():
                if value is not None:
                    yield (
                        f'{name} = "{value}" has no meaning with decay_side = "values": keys do not decay; leave it '
                        'out, or use decay_side = "both"'
                    )
        elif depends:
            yield from self._tied_gate_problems()
        if self.keys == "ones" and self.input_gate == "none" and self.key_gate_rank is None:
            yield 'keys = "ones" leaves keys without input; give input_gate or key_gate_rank, or use "projected"'
        if self.rope_base is not None and self.positions == "none":
            yield f'rope_base = {self.rope_base} has no meaning with positions = "none"; leave it out, or use "rope"'

    def _tied_gate_problems(self) -> Iterator[str]:
        form, tied = self.decay_form, self.input_gate
        if form == "tempered" and self.decay == "scalar":
            yield 'decay_gate = "tempered" is a vector; use decay = "vector", or another form'
        if form == "tempered" and tied != "selection":
            yield f'decay_gate = "tempered" has input_gate = "selection" alone, not "{tied}"; use it, or another form'
        if tied == "selection" and form not in ("step", "tempered"):
            yield (
                f'input_gate = "selection" has no meaning with decay_gate = "{form}"; use "step" or "tempered", or '
                'input_gate = "complement"'
            )

    def build(self, scope: BuildContext) -> RecurrenceMixer:
        return RecurrenceMixer(self, scope)

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        small = {"decay_rank": 3, "key_gate_rank": 3, "value_gate_rank": 5}
        update: dict[str, Any] = {name: rank for name, rank in small.items() if getattr(self, name) is not None}
        for name in ("expand_k", "expand_v"):
            factor = getattr(self, name)
            width = hidden_size * factor / num_heads
            if width % 2:  # an even whole number of channels a head
                update[name] = 1.0
        return self.model_copy(update=update | {"num_heads": num_heads, "chunk_size": 16})


CONFIG = RecurrenceConfig
