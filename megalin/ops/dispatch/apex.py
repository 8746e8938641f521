"""NVIDIA Apex, if installed: a check that the installed package is NVIDIA's, and its fused norms."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from torch import Tensor


def unavailable_reason(extension: str) -> str:
    """Reason that Apex cannot be used; empty where it can. Imports nothing.

    Args:
        extension: the required compiled module of Apex: amp_C for optimizers, fused_layer_norm_cuda for norms.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "apex is not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return (
            "the installed package apex is not NVIDIA's (the one on PyPI is an unrelated project); build NVIDIA's from "
            "its own repository"
        )
    if importlib.util.find_spec(extension) is None:
        return f"apex was built without its extension {extension}; build it with --cpp_ext and --cuda_ext"
    return ""


def apex_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x [..., D], weight [D] of the dtype of `x`; computed in fp32."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine  # type: ignore[import-not-found]

    return fused_rms_norm_affine(x, weight, weight.shape, eps)


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """LayerNorm over the last dimension: x [..., D], weight and bias [D] of the dtype of `x`; computed in fp32."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
