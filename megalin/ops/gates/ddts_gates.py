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


def ddts_gates(strength: Tensor | None, temperature: Tensor | None, k: Tensor) -> DDTSGates:
    """Computes log alpha = -softplus(a) sigmoid(t) and k^ = softplus(a)^sigmoid(t) k / max(||k||, 1e-12).

    Without a temperature sigmoid(t) is one; without a strength too, log alpha is zero and k^ is the normed k.

    The power is exp(sigmoid(t) log softplus(a)), the logarithm by its expansion where softplus(a) would underflow, so
    values and gradients are correct for any a; softplus(a) ** sigmoid(t) has NaN gradients in fp32 from a = -104 down.

    Args:
        strength: a [..., N], the selection gate before its softplus, or None.
        temperature: t [..., N], the temperature gate before its sigmoid, or None.
        k: [..., N], normed over N.

    Returns:
        DDTSGates, computed in at least fp32.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: Rodimus eq. 9; without gates its Table 15.
    """
    check_operands("ddts_gates", {"strength": (strength, "*N"), "temperature": (temperature, "*N"), "k": (k, "*N")})
    wide = compute_dtype(k)
    key = functional.normalize(k.to(wide), dim=-1, eps=MIN_NORM)
    if strength is None:
        assert temperature is None, "a temperature without a strength"
        return DDTSGates(torch.zeros_like(key), key)
    strength = strength.to(wide)
    selection = functional.softplus(strength, threshold=EXACT_ABOVE)
    if temperature is None:
        return DDTSGates(-selection, selection * key)
    temperature = torch.sigmoid(temperature.to(wide))
    return DDTSGates(-selection * temperature, torch.exp(temperature * _log_softplus(strength)) * key)


def _log_softplus(a: Tensor) -> Tensor:
    """log(softplus(a)) with gradient sigmoid(a) / softplus(a), which tends to 1."""
    in_tail = a < TAIL
    # Each branch gets only arguments that are safe for it: a gradient of infinity times zero would be NaN.
    tail = a - 0.5 * torch.exp(a.clamp(max=TAIL))
    body = torch.log(functional.softplus(a.masked_fill(in_tail, 0.0), threshold=EXACT_ABOVE))
    return torch.where(in_tail, tail, body)
