"""Naive fp64 forwards of other systems' model classes, from their tensors and config.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Tensors = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, base: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """Rotates x [T, H, K]: the halves of a head are real and imaginary parts, position p turns by p base^(-2j/K)."""
    half = x.shape[-1] // 2
    rates = [rescaled(base ** (-j / half), scaling or {"rope_type": "default"}) for j in range(half)]
    turns = torch.arange(len(x), dtype=x.dtype)[:, None] * torch.tensor(rates, dtype=x.dtype)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turns), turns)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def rescaled(rate: float, scaling: Mapping[str, Any]) -> float:
    """A frequency after the scaling of config.json."""
    if scaling["rope_type"] == "default":
        return rate
    if scaling["rope_type"] == "linear":
        return rate / scaling["factor"]
    wavelength, length = 2 * math.pi / rate, scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength > length / low:
        return rate / scaling["factor"]
    if wavelength < length / high:
        return rate
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * rate / scaling["factor"] + smooth * rate


def attend(q: Tensor, k: Tensor, v: Tensor, left: int | None = None) -> Tensor:
    """q, k, v [T, H, K] -> [T, H K], causal attention to the token itself and the `left` tokens before it."""
    scores = torch.einsum("thk,shk->hts", q, k) / math.sqrt(q.shape[-1])
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (distance < 0) | (distance > (len(q) if left is None else left))
    return torch.einsum("hts,shk->thk", scores.masked_fill(hidden, -math.inf).softmax(-1), v).flatten(1)


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: float) -> Tensor:
    """q, k, decay [T, H, K], v [T, H, V] -> [T, H V], token by token."""
    state, outputs = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype), []
    for q_t, k_t, v_t, a_t in zip(q, k, v, decay, strict=True):
        state = a_t[..., None] * state + k_t[..., None] * v_t[:, None]
        outputs.append(scale * (q_t[..., None] * state).sum(1).flatten())
    return torch.stack(outputs)


def affine(t: Tensors, name: str, x: Tensor) -> Tensor:
    """A projection, with a bias where the folder has one."""
    y = x @ t[f"{name}.weight"].T
    return y + t[f"{name}.bias"] if f"{name}.bias" in t else y


def swiglu(t: Tensors, prefix: str, x: Tensor) -> Tensor:
    gate, up = affine(t, f"{prefix}gate_proj", x), affine(t, f"{prefix}up_proj", x)
    return affine(t, f"{prefix}down_proj", functional.silu(gate) * up)


def head(t: Tensors, config: Mapping[str, Any], embedding: str) -> Tensor:
    return t[embedding if config["tie_word_embeddings"] else "lm_head.weight"].T


def llama(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """transformers' LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    eps, heads, groups = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    x = t["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        normed = rms(x, t[f"{layer}input_layernorm.weight"], eps)
        q, k, v = (affine(t, f"{layer}self_attn.{name}_proj", normed) for name in "qkv")
        q, k, v = q.unflatten(1, (heads, -1)), k.unflatten(1, (groups, -1)), v.unflatten(1, (groups, -1))
        if f"{layer}self_attn.q_norm.weight" in t:
            q, k = (rms(y, t[f"{layer}self_attn.{name}_norm.weight"], eps) for name, y in (("q", q), ("k", k)))
        table = config["rope_parameters"]
        q, k = (rotate(y, table["rope_theta"], table) for y in (q, k))
        k, v = (y.repeat_interleave(heads // groups, dim=1) for y in (k, v))
        slides = window is not None and (kinds is None or kinds[index] == "sliding_attention")
        x = x + affine(t, f"{layer}self_attn.o_proj", attend(q, k, v, window - 1 if slides else None))
        x = x + swiglu(t, f"{layer}mlp.", rms(x, t[f"{layer}post_attention_layernorm.weight"], eps))
    return rms(x, t["model.norm.weight"], eps) @ head(t, config, "model.embed_tokens.weight")


def hgrn2(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """flash-linear-attention's HGRN2ForCausalLM."""
    eps, width = config["norm_eps"], config["expand_ratio"]
    increments = t["model.lower_bounds"].softmax(0)
    x = t["model.embeddings.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        normed = rms(x, t[f"{layer}attn_norm.weight"], eps)
        q, f, i = (normed @ t[f"{layer}attn.{name}_proj.weight"].T for name in "qfi")
        bound = increments[: index + 1].sum(0) - increments[0]
        forget = bound + (1.0 - bound) * torch.sigmoid(f)
        q, k, v, decay = (y.unflatten(1, (-1, width)) for y in (functional.silu(q), 1.0 - forget, i, forget))
        o = recurrence(q, k, v, decay, width**-0.5)
        o = rms(o, t[f"{layer}attn.g_norm.weight"], 1e-5)
        x = x + o @ t[f"{layer}attn.o_proj.weight"].T
        x = x + swiglu(t, f"{layer}mlp.", rms(x, t[f"{layer}mlp_norm.weight"], eps))
    return rms(x, t["model.norm.weight"], eps) @ head(t, config, "model.embeddings.weight")


def gla(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """flash-linear-attention's GLAForCausalLM."""

    def mix(prefix: str, x: Tensor) -> Tensor:
        q, k, v = projections(t, config, prefix, x)
        logit = x @ t[f"{prefix}gk_proj.0.weight"].T @ t[f"{prefix}gk_proj.1.weight"].T + t[f"{prefix}gk_proj.1.bias"]
        decay = (torch.sigmoid(logit) ** (1 / 16)).unflatten(1, (config["num_heads"], -1))
        return recurrence(q, k, v, decay, q.shape[-1] ** -0.5)

    return gated_heads(t, config, tokens, mix)


def retnet(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """flash-linear-attention's RetNetForCausalLM."""

    def mix(prefix: str, x: Tensor) -> Tensor:
        q, k, v = projections(t, config, prefix, x)
        q, k = rotate(q, 10000.0), rotate(k, 10000.0)
        rates = 1.0 - 2.0 ** (-5.0 - torch.arange(config["num_heads"], dtype=x.dtype))
        return recurrence(q, k, v, rates[:, None].expand_as(k), q.shape[-1] ** -0.5)

    return gated_heads(t, config, tokens, mix)


def projections(t: Tensors, config: Mapping[str, Any], prefix: str, x: Tensor) -> list[Tensor]:
    """q, k, v [T, H, K or V], after the convolutions if there are any."""
    parts = []
    for name in "qkv":
        y = x @ t[f"{prefix}{name}_proj.weight"].T
        if config["use_short_conv"]:
            weight = t[f"{prefix}{name}_conv1d.weight"]
            y = short_conv(y, weight, weight.new_zeros(len(weight)))
        parts.append(y.unflatten(1, (config["num_heads"], -1)))
    return parts


def gated_heads(t: Tensors, config: Mapping[str, Any], tokens: Tensor, mix: Callable[[str, Tensor], Tensor]) -> Tensor:
    """GLA and RetNet around their recurrence: a norm a head, a silu gate and a SwiGLU."""
    eps, heads = config["norm_eps"], config["num_heads"]
    x = t["model.embeddings.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        normed = rms(x, t[f"{layer}attn_norm.weight"], eps)
        o = rms(mix(f"{layer}attn.", normed).unflatten(1, (heads, -1)), t[f"{layer}attn.g_norm_swish_gate.weight"], eps)
        o = o.flatten(1) * functional.silu(normed @ t[f"{layer}attn.g_proj.weight"].T)
        x = x + o @ t[f"{layer}attn.o_proj.weight"].T
        x = x + swiglu(t, f"{layer}mlp.", rms(x, t[f"{layer}mlp_norm.weight"], eps))
    return rms(x, t["model.norm.weight"], eps) @ head(t, config, "model.embeddings.weight")


def transnormerllm(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """The released TransnormerForCausalLM."""
    heads, layers, width = config["decoder_attention_heads"], config["decoder_layers"], config["decoder_embed_dim"]
    assert heads & (heads - 1) == 0  # the slopes below hold for powers of two
    x = t["model.embed_tokens.weight"][tokens] * (1.0 if config["no_scale_embedding"] else math.sqrt(width))
    distance = (torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))).double()
    for index in range(layers):
        layer = f"model.layers.{index}."
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=x.dtype)
        slopes = slopes * (1 - index / (layers - 1) + 1e-5)
        q, k, v, u = (rms(x, 1.0, 1e-6) @ t[f"{layer}token_mixer.qkvu_proj.weight"].T).chunk(4, -1)
        q, k, v = (y.unflatten(1, (heads, -1)) for y in (functional.silu(q), functional.silu(k), v))
        if config["linear_use_lrpe_list"][index]:
            angle = torch.arange(len(tokens))[:, None, None] * t[f"{layer}token_mixer.lrpe.theta"].transpose(0, 1)
            q, k = (torch.cat([y * angle.cos(), y * angle.sin()], dim=-1) for y in (q, k))
        scores = torch.einsum("thk,shk->hts", q, k) * torch.exp(-slopes[:, None, None] * distance).tril()
        o = torch.einsum("hts,shv->thv", scores, v).flatten(1)
        x = x + (rms(o, 1.0, 1e-6) * u) @ t[f"{layer}token_mixer.out_proj.weight"].T
        normed = rms(x, 1.0, 1e-6)
        first, second = (normed @ t[f"{layer}channel_mixer.l{number}.weight"].T for number in (1, 2))
        x = x + (first * second) @ t[f"{layer}channel_mixer.l3.weight"].T
    return rms(x, 1.0, 1e-6) @ head(t, config, "model.embed_tokens.weight")


def selection(x: Tensor, conv: Tensor, q: Tensor, k: Tensor, gates: tuple[Tensor, Tensor], beta: Tensor) -> Tensor:
    """Rodimus' memory: x and conv [T, M], q, k, gates [T, N], beta [T, M] -> [T, M]."""
    strength, temperature = functional.softplus(gates[0]), torch.sigmoid(gates[1])
    k = functional.normalize(k, dim=-1, eps=1e-12) * strength**temperature
    decay = torch.exp(-strength * temperature)
    return recurrence(*(y[:, None] for y in (q, k, beta * x, decay)), q.shape[-1] ** -0.5)


def short_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, M], weight [M, 1, taps]."""
    padded = functional.pad(x.T[None], (weight.shape[-1] - 1, 0))
    return functional.silu(functional.conv1d(padded, weight, bias, groups=len(weight))[0].T)


def rodimus_fla(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """flash-linear-attention's RodimusForCausalLM."""
    eps = config["norm_eps"]
    x = t["model.embeddings.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        mixer = f"{layer}mixer."
        normed = rms(x, t[f"{layer}mixer_norm.weight"], eps)
        up, gate = normed @ t[f"{mixer}up_proj.weight"].T, normed @ t[f"{mixer}gate_proj.weight"].T
        conv = short_conv(up, t[f"{mixer}short_conv.weight"], t[f"{mixer}short_conv.bias"])
        q, k = conv @ t[f"{mixer}q_proj.weight"].T, conv @ t[f"{mixer}k_proj.weight"].T
        gates = (
            conv @ t[f"{mixer}g_gate_proj.weight"].T + t[f"{mixer}g_gate_proj.bias"],
            conv @ t[f"{mixer}tau_gate_proj.weight"].T + t[f"{mixer}tau_gate_proj.bias"],
        )
        code = up @ t[f"{mixer}i_gate_proj.0.weight"].T
        beta = torch.sigmoid(code @ t[f"{mixer}i_gate_proj.1.weight"].T + t[f"{mixer}i_gate_proj.1.bias"])
        o = selection(up, conv, q, k, gates, beta) + conv * t[f"{mixer}residual_weight"]
        o = rms(o * functional.silu(gate), t[f"{mixer}activation_norm.weight"], eps)
        x = x + o @ t[f"{mixer}down_proj.weight"].T
        if config["block_type"] == "rodimus_plus":
            table = config["ska_attn"]
            normed = rms(x, t[f"{layer}ska_attn_norm.weight"], eps)
            y = shared_key(t, f"{layer}ska_attn.", "o_proj", normed, table["rope_theta"], table["window_size"] - 1)
            x = x + swiglu(t, f"{layer}mlp.", rms(x + y, t[f"{layer}mlp_norm.weight"], eps))
    return rms(x, t["model.norm.weight"], eps) @ head(t, config, "model.embeddings.weight")


def mamba(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """transformers' MambaForCausalLM."""
    eps, size, rank = config["layer_norm_epsilon"], config["state_size"], config["time_step_rank"]
    x = t["backbone.embeddings.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"backbone.layers.{index}."
        mixer = f"{layer}mixer."
        up, gate = (rms(x, t[f"{layer}norm.weight"], eps) @ t[f"{mixer}in_proj.weight"].T).chunk(2, -1)
        conv = short_conv(up, t[f"{mixer}conv1d.weight"], t[f"{mixer}conv1d.bias"])
        code, b, c = (conv @ t[f"{mixer}x_proj.weight"].T).split([rank, size, size], -1)
        step = functional.softplus(code @ t[f"{mixer}dt_proj.weight"].T + t[f"{mixer}dt_proj.bias"])
        decay = torch.exp(step[..., None] * -torch.exp(t[f"{mixer}A_log"]))  # [T, M, N]
        q, k = (y[:, None].expand(decay.shape) for y in (c, b))
        o = recurrence(q, k, (step * conv)[..., None], decay, 1.0) + conv * t[f"{mixer}D"]
        x = x + (o * functional.silu(gate)) @ t[f"{mixer}out_proj.weight"].T
    return rms(x, t["backbone.norm_f.weight"], eps) @ head(t, config, "backbone.embeddings.weight")


def mamba2(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """transformers' Mamba2ForCausalLM."""
    eps, heads, groups = config["layer_norm_epsilon"], config["num_heads"], config["n_groups"]
    inner, size = heads * config["head_dim"], groups * config["state_size"]
    x = t["backbone.embeddings.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"backbone.layers.{index}."
        mixer = f"{layer}mixer."
        entering = rms(x, t[f"{layer}norm.weight"], eps) @ t[f"{mixer}in_proj.weight"].T
        gate, read, logit = entering.split([inner, inner + 2 * size, heads], -1)
        conv = short_conv(read, t[f"{mixer}conv1d.weight"], t[f"{mixer}conv1d.bias"])
        values, b, c = conv.split([inner, size, size], -1)
        values = values.unflatten(-1, (heads, -1))
        b, c = (y.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for y in (b, c))
        step = functional.softplus(logit + t[f"{mixer}dt_bias"])
        decay = torch.exp(-step * torch.exp(t[f"{mixer}A_log"]))
        o = recurrence(c, b, step[..., None] * values, decay[..., None].expand(b.shape), 1.0)
        o = (o + (values * t[f"{mixer}D"][:, None]).flatten(1)) * functional.silu(gate)
        o = rms(o.unflatten(-1, (groups, -1)), 1.0, eps).flatten(1) * t[f"{mixer}norm.weight"]
        x = x + o @ t[f"{mixer}out_proj.weight"].T
    return rms(x, t["backbone.norm_f.weight"], eps) @ head(t, config, "backbone.embeddings.weight")


def rodimus_codefuse(t: Tensors, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """The authors' RodimusForCausalLM."""
    eps, n = config["norm_epsilon"], config["mixer_cfg"]["mem_size"]
    x = t["model.embeddings.weight"][tokens] * (math.sqrt(n) if config["use_scale_embedding"] else 1.0)
    for index in range(config["n_layer"]):
        layer = f"model.layers.{index}."
        inner = f"{layer}mixer.inner_mixer."
        flow, gate = (rms(x, t[f"{layer}mixer_norm.weight"], eps) @ t[f"{layer}mixer.fc.weight"].T).chunk(2, -1)
        conv = short_conv(flow, t[f"{inner}short_conv.conv1d.weight"], t[f"{inner}short_conv.conv1d.bias"])
        q, k = (conv @ t[f"{inner}in_proj.weight"].T).chunk(2, -1)
        gates = (conv @ t[f"{inner}mem_gate_proj.weight"].T + t[f"{inner}mem_gate_proj.bias"]).chunk(2, -1)
        code = flow @ t[f"{inner}ch_gate_proj.0.weight"].T
        beta = torch.sigmoid(code @ t[f"{inner}ch_gate_proj.1.weight"].T + t[f"{inner}ch_gate_proj.1.bias"])
        o = selection(flow, conv, q, k, gates, beta) + conv * t[f"{inner}residual_weight"]
        o = rms(o * functional.silu(gate), t[f"{layer}mixer.act_norm.weight"], eps)
        x = x + o @ t[f"{layer}mixer.out_proj.weight"].T
        if config["block_type"] == "rodimus_plus":
            table = config["attn_cfg"]
            normed = rms(x, t[f"{layer}attn_norm.weight"], eps)
            left = table["window_size"] // 2
            y = shared_key(t, f"{layer}attn.", "out_proj", normed, table["rotary_emb_base"], left)
            normed = rms(x + y, t[f"{layer}ffn_norm.weight"], eps)
            linear, gated = (normed @ t[f"{layer}ffn.fc.weight"].T).chunk(2, -1)
            x = x + (functional.silu(gated) * linear) @ t[f"{layer}ffn.out_proj.weight"].T
    return rms(x, t["model.norm_f.weight"], eps) @ head(t, config, "model.embeddings.weight")


def shared_key(t: Tensors, prefix: str, out: str, x: Tensor, base: float, left: int) -> Tensor:
    """Attention with one key head for all query heads."""
    width = len(t[f"{prefix}k_proj.weight"])
    q, k, v = ((x @ t[f"{prefix}{name}_proj.weight"].T).unflatten(1, (-1, width)) for name in "qkv")
    q, k = rotate(q, base), rotate(k, base).expand_as(q)
    return attend(q, k, v, left) @ t[f"{prefix}{out}.weight"].T
