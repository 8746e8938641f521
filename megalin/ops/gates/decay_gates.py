"""Data-dependent decays of GLA, gRetNet, RWKV6, Hawk and Mamba-2, and the gates of the keys that are tied to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.choices import DecayForm, TiedGate
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_operands

MAX_EXPONENT = 6.0
"""Above this, exp(-exp(g)) < 1e-175 is zero, and exp(g) would soon overflow."""
EXACT_ABOVE = 40.0
"""Above this, softplus(g) equals g to the last bit of fp64."""


class DecayGates(NamedTuple):
    """The decay A of the state, as log A <= 0, and the gate B of the keys, both in at least fp32."""

    log_decay: Tensor
    key_gate: Tensor | None
    """None for B = 1."""


def decay_gates(
    logit: Tensor,
    *,
    form: DecayForm,
    tied: TiedGate = "none",
    temperature: float = 1.0,
    rate: Tensor | None = None,
) -> DecayGates:
    """Computes log A and B of the recurrence S_t = A_t S_{t-1} + (B_t k_t) v_t^T.

        sigmoid: log A = logsigmoid(g) / tau    double_exp: log A = -exp(min(g, 6))    step: log A = -a softplus(g)
        power: log A = -a sigmoid(g)            complement: B = -expm1(log A)          selection: B = softplus(g)
        root_complement: B = sqrt(-expm1(2 log A))

    No form takes the logarithm of a rounded A, and 1 - A and 1 - A^2 do not cancel for weak decays. Plain PyTorch on
    every device, which torch.compile fuses in training.

    Args:
        logit: g [..., H, K], K = 1 for a scalar decay.
        form: A.
        tied: B; selection only with step.
        temperature: tau > 0, of the form sigmoid.
        rate: a > 0, in at least fp32: [H, 1] of the form step, [H, K] of the form power.

    Returns:
        DecayGates [..., H, K], computed in at least fp32.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: Rodimus Table 4.
    """
    check_operands("decay_gates", {"logit": (logit, "*HK"), "rate": (rate, "Hk")})
    assert (rate is not None) == (form in ("step", "power")), (form, "needs a rate, or takes none")
    assert tied != "selection" or form == "step", (form, "has no selection")
    g = logit.to(compute_dtype(logit))
    if form == "sigmoid":
        log_decay = functional.logsigmoid(g) / temperature
    elif form == "double_exp":
        log_decay = -torch.exp(g.clamp(max=MAX_EXPONENT))
    elif form == "power":
        assert rate is not None
        log_decay = -rate * torch.sigmoid(g)
    else:
        assert rate is not None
        step = functional.softplus(g, threshold=EXACT_ABOVE)
        log_decay = -rate * step
        if tied == "selection":
            return DecayGates(log_decay, step)
    if tied == "root_complement":  # without the clamp, a root of zero would have an infinite gradient
        return DecayGates(log_decay, (-torch.expm1(2.0 * log_decay)).clamp(min=torch.finfo(g.dtype).tiny).sqrt())
    return DecayGates(log_decay, -torch.expm1(log_decay) if tied == "complement" else None)
