"""NVIDIA's apex where it is installed: whether what is there under that name is it, and its fused norms."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from torch import Tensor


def reason_against(extension: str) -> str:
    """Why apex cannot be used; empty where it can. Imports nothing.

    Args:
        extension: the compiled module of apex that is needed: amp_C for optimizers, fused_layer_norm_cuda for norms.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "apex is not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return (
            "the installed package apex is another project of that name, as the one on PyPI is; NVIDIA's is built from "
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
