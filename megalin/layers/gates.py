"""Decays and gates of a mixer's tokens, for inspection (`Mixer.gate_values`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

NO_GATES: Mapping[str, Tensor] = MappingProxyType({})


class MixerGates(NamedTuple):
    """The decay and the gates of a mixer, of this rank's heads."""

    log_decay: Tensor
    """ln of the factor on the state at each token, in nats, <= 0, at least fp32: [H, K] if all tokens share it, or
    [B, T, H, K]. K is the number of decays a head: 1 where all channels of its state decay equally."""
    lower_bounds: Tensor | None = None
    """[H, K] learned lower bounds of the decay, in [0, 1); None without any."""
    gates: Mapping[str, Tensor] = NO_GATES
    """Further gates by name, each [B, T, H, N], positive, mostly in [0, 1]."""
