"""Rodimus' data-dependent tempered selection: one pair of gates decays the state and scales the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_operands

TAIL = -15.0
"""Below this, log softplus(a) is computed by its expansion a - e^a / 2; the error is at most e^(2a) / 24."""
EXACT_ABOVE = 40.0
"""Above this, softplus(a) equals a to the last bit of fp64."""
MIN_NORM = 1e-12


class DDTSGates(NamedTuple):
    """Inputs of the scan, each [..., N], at least fp32."""

    log_decay: Tensor
    key: Tensor


def ddts_gates(strength: Tensor, temperature: Tensor, k: Tensor) -> DDTSGates:
    """Computes log alpha = -softplus(a) sigmoid(t) and k^ = softplus(a)^sigmoid(t) k / max(||k||, 1e-12).

    The power is exp(sigmoid(t) log softplus(a)), the logarithm by its expansion where softplus(a) would underflow, so
    values and gradients are correct for any a; softplus(a) ** sigmoid(t) has NaN gradients in fp32 from a = -104 down.

    Args:
        strength: a [..., N], the selection gate before its softplus.
        temperature: t [..., N], the temperature gate before its sigmoid.
        k: [..., N], normed over N.

    Returns:
        DDTSGates, computed in at least fp32.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.

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
    # Each branch gets only arguments that are safe for it: a gradient of infinity times zero would be NaN.
    tail = a - 0.5 * torch.exp(a.clamp(max=TAIL))
    body = torch.log(functional.softplus(a.masked_fill(in_tail, 0.0), threshold=EXACT_ABOVE))
    return torch.where(in_tail, tail, body)
