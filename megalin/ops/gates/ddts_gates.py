"""Rodimus' data-dependent tempered selection: how one pair of gates decays the memory and scales what enters it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_operands

TAIL = -15.0
"""Below this, log softplus(a) is its own expansion a - e^a / 2: what is left out is e^(2a) / 24 at most."""
EXACT_ABOVE = 40.0
"""Above this, softplus(a) is a to the last bit of fp64."""
MIN_NORM = 1e-12


class DDTSGates(NamedTuple):
    """What the scan takes, each [..., N], at least fp32."""

    log_decay: Tensor
    key: Tensor


def ddts_gates(strength: Tensor, temperature: Tensor, k: Tensor) -> DDTSGates:
    """log alpha = -softplus(a) sigmoid(t) and k^ = softplus(a)^sigmoid(t) k / max(||k||, 1e-12).

    The power is exp(sigmoid(t) log softplus(a)), the logarithm by its expansion where softplus(a) would underflow, so
    values and gradients stay right down to any a: softplus(a) ** sigmoid(t) is NaN in the backward of fp32 from -104.

    Args:
        strength: a [..., N], the selection gate before its softplus.
        temperature: t [..., N], the temperature gate before its sigmoid.
        k: [..., N], normed over N.

    Returns:
        DDTSGates, computed in at least fp32.

    Raises:
        OperandError: tensors whose shapes, kinds or devices do not fit together.

    Source: Rodimus eq. 10-12.
    """
    check_operands("ddts_gates", {"strength": (strength, "*N"), "temperature": (temperature, "*N"), "k": (k, "*N")})
    wide = compute_dtype(k)
    strength, temperature, k = strength.to(wide), torch.sigmoid(temperature.to(wide)), k.to(wide)
    log_decay = -functional.softplus(strength, threshold=EXACT_ABOVE) * temperature
    scale = torch.exp(temperature * _log_softplus(strength))
    return DDTSGates(log_decay, scale * functional.normalize(k, dim=-1, eps=MIN_NORM))


def _log_softplus(a: Tensor) -> Tensor:
    """log(softplus(a)) with gradient sigmoid(a) / softplus(a), which tends to 1."""
    in_tail = a < TAIL
    # Each branch sees only arguments that are safe for it: a gradient of infinity times zero would be NaN.
    tail = a - 0.5 * torch.exp(a.clamp(max=TAIL))
    body = torch.log(functional.softplus(a.masked_fill(in_tail, 0.0), threshold=EXACT_ABOVE))
    return torch.where(in_tail, tail, body)
