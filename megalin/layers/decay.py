"""Decays of heads: tables of fixed slopes (TransNormerLLM, TNL, RetNet), and the first bias of selected decays."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalin.layers.choices import SlopeTable


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi slopes 2^(-8 h / H) for H a power of two; else those of the power below, then every other of twice it."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    if power == num_heads:
        return slopes
    return slopes + [2.0 ** (-4.0 * h / power) for h in range(1, 2 * power + 1, 2)][: num_heads - power]


def decay_slopes(kind: SlopeTable, *, layer: int, num_layers: int, num_heads: int) -> Tensor:
    """s [H] in nats a token, fp64: head h of layer l multiplies its state by exp(-s) each token.

    alibi: s = slope_h (1 - l / (L - 1) + 1e-5), l = 0 .. L-1; the layer factor is 1 + 1e-5 for a single layer.
    paper: s = (8 h / H) (1 - l / L), h = 1 .. H, l = 1 .. L.
    alibi_no_temperature, no_temperature: s = slope_h and s = 8 h / H in every layer (TransNormerLLM Table 4).
    retnet: s = -log(1 - 2^(-5 - h)), h = 0 .. H-1, in every layer (RetNet eq. 8).
    """
    if kind == "retnet":
        return -torch.log1p(-(2.0 ** (-5.0 - torch.arange(num_heads, dtype=torch.float64))))
    if kind in ("paper", "no_temperature"):
        slopes = torch.arange(1, num_heads + 1, dtype=torch.float64) * 8.0 / num_heads
    else:
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float64)
    if kind == "paper":
        return slopes * (1.0 - (layer + 1) / num_layers)
    if kind == "alibi":
        depth = layer / (num_layers - 1) if num_layers > 1 else 0.0
        return slopes * (1.0 - depth + 1e-5)
    return slopes


def draw_step_bias(full: Tensor, generator: torch.Generator) -> None:
    """Fills a bias with softplus(bias) log-uniform in [0.001, 0.1], the initial time steps of Mamba-2 and Rodimus."""
    full.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
    full.add_((-torch.expm1(-full)).log())  # the inverse of softplus
