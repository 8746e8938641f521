"""Config of linear attention with a chosen recurrence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic

from megalin.config import REPORTED
from megalin.errors import ConfigError
from megalin.layers.choices import DecayGateForm, DecaySide, NormKind, RecurrenceDecay, SlopeTable
from megalin.layers.config import MixerConfig
from megalin.ops.choices import QueryKeyActivation, TiedGate


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
    chunk_size: Annotated[int, REPORTED] = pydantic.Field(default=64, gt=0)
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
