"""Independent definition of the `recurrence` mixer for one document, token by token; see tests/references.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]
ACTIVATIONS = {
    "silu": functional.silu,
    "none": lambda x: x,
    "1+elu": lambda x: torch.where(x > 0.0, 1.0 + x, torch.exp(x)),
}


def recurrence(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    """Token by token: S <- A S + outer(B k, B^ v); output scale q S; rotary positions as complex turns."""
    heads = config.num_heads
    q, *keys = (x @ w.T for w in weights["qk.weight"])
    v, *gates = (x @ w.T for w in weights["vg.weight"])
    k = keys[0] if keys else torch.ones_like(q)
    if config.conv_width is not None:
        q, v = _short_conv(weights["conv_q"], q), _short_conv(weights["conv_v"], v)
        k = _short_conv(weights["conv_k"], k) if keys else k
    q, k = ACTIVATIONS[config.activation](q), ACTIVATIONS[config.activation](k) if keys else k
    if config.value_gate_rank:
        v = v * torch.sigmoid(_low_rank(weights, "value_gate.code", x) + weights["value_gate.bias"])
    q, k, v = (y.unflatten(-1, (heads, -1)) for y in (q, k, v))  # [T, H, K or V]
    if config.positions == "rope":
        half = q.shape[-1] // 2
        theta = (config.rope_base or 10000.0) ** (-torch.arange(half, dtype=x.dtype) / half)
        turn = torch.polar(torch.ones((), dtype=x.dtype), torch.arange(len(x), dtype=x.dtype)[:, None] * theta)[:, None]
        turned = [torch.complex(y[..., :half], y[..., half:]) * turn for y in (q, k)]
        q, k = (torch.cat([y.real, y.imag], -1) for y in turned)
    if config.key_gate_rank:
        gate = torch.sigmoid(_low_rank(weights, "key_gate.code", x) + weights["key_gate.bias"])
        k = k * gate.unflatten(-1, (heads, -1))
    decay = torch.ones_like(k)
    if config.decay == "fixed":
        retnet = config.slopes in (None, "retnet")
        rates = [-math.log(1.0 - 2.0 ** (-5 - h)) if retnet else 8.0 * (h + 1) / heads for h in range(heads)]
        decay = torch.exp(-x.new_tensor(rates))[:, None].expand_as(k)
    elif config.decay != "none" and config.decay_side != "values":
        decay, k = _selected(config, weights, x, k)
    of_values = torch.ones_like(v)
    if config.decay_side != "keys":
        logit = _logits(config, weights, x, "value_decay_gate.logit", "value_bias")
        of_values = torch.sigmoid(logit) ** (1.0 / (config.temperature or 16.0))
    outputs, state = [], x.new_zeros(heads, k.shape[-1], v.shape[-1])
    for t in range(len(x)):
        state = decay[t][..., None] * state * of_values[t][:, None] + k[t][..., None] * v[t][:, None]
        outputs.append((q[t][:, None] @ state)[:, 0])
    o = torch.stack(outputs) * (1.0 if config.query_scale == "one" else k.shape[-1] ** -0.5)
    if config.head_norm != "none":
        o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + config.norm_eps) * weights.get("norm_weight", 1.0)
    y = o.flatten(1)
    if gates:
        y = y * torch.sigmoid(gates[0]) * (gates[0] if config.gate == "silu" else 1.0)
    return y @ weights["out.weight"].T


def _selected(config: Any, weights: Weights, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The decay [T, H, K or 1] and the gated keys of a scalar or vector decay."""
    g = _logits(config, weights, x, "decay_gate.logit", "bias")
    softplus = torch.log1p(g.exp())
    form = config.decay_gate or "sigmoid"
    if form == "tempered":
        tau = torch.sigmoid(_logits(config, weights, x, "decay_gate.temperature_logit", "temperature_bias"))
        return torch.exp(-softplus * tau), softplus**tau * k / k.norm(dim=-1, keepdim=True)
    if form == "sigmoid":
        decay = torch.sigmoid(g) ** (1.0 / (config.temperature or 16.0))
    elif form == "double_exp":
        decay = torch.exp(-torch.exp(g))
    elif form == "power":
        power = weights["full_precision.a_log"].exp().unflatten(0, (config.num_heads, -1)) * torch.sigmoid(g)
        # 1 - A^2 = 2 A sinh(power) without cancellation for decays near 1.
        return torch.exp(-power), k * torch.sqrt(2.0 * torch.exp(-power) * torch.sinh(power))
    else:
        decay = torch.exp(-weights["full_precision.a_log"].exp()[:, None] * softplus)
    return decay, k * {"none": 1.0, "complement": 1.0 - decay, "selection": softplus}[config.input_gate]


def _logits(config: Any, weights: Weights, x: Tensor, name: str, bias: str) -> Tensor:
    found = _low_rank(weights, name, x) if config.decay_rank else x @ weights[f"{name}.weight"][0].T
    return (found + weights[f"full_precision.{bias}"]).unflatten(-1, (config.num_heads, -1))


def _low_rank(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.down"].T @ weights[f"{name}.up"].T


def _short_conv(taps: Tensor, x: Tensor) -> Tensor:
    padded = torch.cat([x.new_zeros(taps.shape[1] - 1, x.shape[1]), x])
    conv = torch.stack([(padded[t : t + taps.shape[1]] * taps.T).sum(0) for t in range(len(x))])
    return functional.silu(conv)
