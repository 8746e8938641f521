"""Data-dependent decays of GLA, gRetNet, RWKV6 and Mamba-2, and the gates of the keys that are tied to them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_operands

DecayForm = Literal["sigmoid", "double_exp", "step"]
"""sigmoid: A = sigmoid(g)^(1/tau) (GLA, gRetNet). double_exp: A = exp(-exp(g)) (RWKV6). step: A = exp(-a softplus(g))
(Mamba-2)."""
TiedGate = Literal["none", "complement", "selection"]
"""none: B = 1. complement: B = 1 - A (HGRN2). selection: B = softplus(g), of the form step (Mamba-2)."""
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
        complement: B = -expm1(log A)           selection: B = softplus(g)

    No form takes the logarithm of a rounded A, and 1 - A does not cancel for weak decays. Plain PyTorch on every
    device, which torch.compile fuses in training.

    Args:
        logit: g [..., H, K], K = 1 for a scalar decay.
        form: A.
        tied: B; selection only with step.
        temperature: tau > 0, of the form sigmoid.
        rate: a [H, 1] > 0 of the form step, in at least fp32.

    Returns:
        DecayGates [..., H, K], computed in at least fp32.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: Rodimus Table 4.
    """
    check_operands("decay_gates", {"logit": (logit, "*HK"), "rate": (rate, "Hk")})
    assert (rate is not None) == (form == "step"), (form, "needs a rate, and no other form takes one")
    assert tied != "selection" or form == "step", (form, "has no selection")
    g = logit.to(compute_dtype(logit))
    if form == "sigmoid":
        log_decay = functional.logsigmoid(g) / temperature
    elif form == "double_exp":
        log_decay = -torch.exp(g.clamp(max=MAX_EXPONENT))
    else:
        assert rate is not None
        step = functional.softplus(g, threshold=EXACT_ABOVE)
        log_decay = -rate * step
        if tied == "selection":
            return DecayGates(log_decay, step)
    return DecayGates(log_decay, -torch.expm1(log_decay) if tied == "complement" else None)
