"""Activation and learnable relative positions (LRPE) of q and k, with the activations of TransNormerLLM's Table 6."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from megalin.ops.choices import LRPEForm, QueryKeyActivation
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.positions.silu_lrpe import check_lrpe, lrpe, silu_lrpe


def activated_lrpe(
    projection: Tensor,
    theta: Tensor | None,
    positions: Tensor,
    *,
    form: LRPEForm | None,
    activation: QueryKeyActivation,
) -> tuple[Tensor, ...]:
    """Computes LRPE(phi(q)), LRPE(phi(k)) and returns the other parts; arguments and result as `silu_lrpe`.

    silu runs the fused op. none (phi(x) = x) and 1+elu (phi(x) = 1 + elu(x), in at least fp32) are plain PyTorch on
    every device.

    Raises:
        KernelError: MEGALIN_KERNELS names a backend that cannot run silu.
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: TransNormerLLM eq. 4 and Table 6.
    """
    if activation == "silu":
        return silu_lrpe(projection, theta, positions, form=form)
    check_lrpe("activated_lrpe", projection, theta, positions, form)
    q, k, *others = projection.unbind(2)
    if activation == "1+elu":
        q, k = one_plus_elu(q), one_plus_elu(k)
    return lrpe(q, theta, positions, form=form), lrpe(k, theta, positions, form=form), *others


def one_plus_elu(x: Tensor) -> Tensor:
    """1 + elu(x), in at least fp32 (TransNormerLLM Table 6)."""
    return (functional.elu(x.to(compute_dtype(x))) + 1.0).to(x.dtype)
