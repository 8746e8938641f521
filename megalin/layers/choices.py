"""Options of layers that configs name too; without torch, so that a config is read at once."""

from __future__ import annotations

from typing import Literal

from megalin.ops.choices import DecayForm

HeadNormKind = Literal["srmsnorm", "rmsnorm", "layernorm"]
"""srmsnorm: no parameters. rmsnorm: a weight. layernorm: a weight and a bias, centred. These three also normalize the
outputs of sharded heads (`NormedRowParallelLinear`)."""
NormKind = Literal["srmsnorm", "rmsnorm", "layernorm", "maxnorm", "uncentered_layernorm"]
"""`HeadNormKind`, and DANet's norms. maxnorm: divides by the largest magnitude, no parameters. uncentered_layernorm:
divides by the mean magnitude, a weight."""
DecayTable = Literal["alibi", "paper", "alibi_no_temperature", "no_temperature"]
"""alibi: the released checkpoints' table. paper: TransNormerLLM eq. 2. Both without their layer factor, the decay
temperature, in alibi_no_temperature and no_temperature."""
SlopeTable = Literal[DecayTable, "retnet"]
"""retnet: the decays 1 - 2^(-5 - h) of RetNet."""
DecayKind = Literal[DecayTable, "none"]
"""none: a plain sum over earlier tokens."""
AbsolutePositionsKind = Literal["none", "sinusoidal", "learned"]
RecurrenceDecay = Literal["none", "fixed", "scalar", "vector"]
"""none: a plain sum. fixed: a constant a head. scalar: a number a token and head. vector: a number a token and key."""
DecaySide = Literal["keys", "values", "both"]
DecayGateForm = Literal[DecayForm, "tempered"]
"""tempered: A = exp(-softplus(g) sigmoid(t)) with keys normed and scaled by softplus(g)^sigmoid(t) (Rodimus)."""
