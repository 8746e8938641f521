"""Independent definitions of whole models: one document at a time, straight from the papers.

Nothing here calls the code under test. Token mixers are sums over earlier tokens that depend only on the distance
t - s: no chunks, no states and no absolute positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megalin.layers.config import MixerConfig
from megalin.model.config import ModelConfig
from tests.recurrence_reference import recurrence

Weights = Mapping[str, Tensor]
Reference = Callable[[Any, Weights, Tensor, int, int], Tensor]
"""(sub-layer's config, its weights, its normed input x [T, D], block index, number of blocks) -> y [T, D]."""


def norm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def any_norm(kind: str, x: Tensor, eps: float, weights: Weights, prefix: str) -> Tensor:
    """The norm called `kind`, with the parameters at `prefix`."""
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = norm(x, eps)
    if kind != "srmsnorm":
        x = x * weights[f"{prefix}weight"]
    return x + weights[f"{prefix}bias"] if kind == "layernorm" else x


def slope(kind: str, head: int, num_heads: int, layer: int, num_layers: int) -> float:
    """-log lambda of a head, both counted from 0."""
    if kind == "none":
        return 0.0
    if kind in ("paper", "no_temperature"):
        temperature = 1.0 - (layer + 1) / num_layers if kind == "paper" else 1.0
        return 8.0 * (head + 1) / num_heads * temperature
    power = 2 ** math.floor(math.log2(num_heads))
    exponent = 8.0 * (head + 1) / power if head < power else 8.0 * (2 * (head - power) + 1) / (2 * power)
    return 2.0**-exponent * (1.0 if kind == "alibi_no_temperature" else 1.0 - layer / (num_layers - 1) + 1e-5)


def scores(kind: str | None, q: Tensor, k: Tensor, theta: Tensor | None, distance: Tensor) -> Tensor:
    """[T, T] similarities of one head's q, k [T, K] at `distance` t - s: plain, cosine or rotation LRPE."""
    if kind is None:
        return q @ k.T
    assert theta is not None
    angle = distance[..., None] * theta  # [T, T, K or K/2]
    if kind == "cosine":
        return torch.einsum("ti,si,tsi->ts", q, k, angle.cos())
    q1, q2, k1, k2 = q[:, ::2], q[:, 1::2], k[:, ::2], k[:, 1::2]
    real = torch.einsum("ti,si->tsi", q1, k1) + torch.einsum("ti,si->tsi", q2, k2)
    imaginary = torch.einsum("ti,si->tsi", q2, k1) - torch.einsum("ti,si->tsi", q1, k2)
    return (real * angle.cos() - imaginary * angle.sin()).sum(-1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "none": lambda x: x,
    "1+elu": lambda x: torch.where(x > 0.0, 1.0 + x, torch.exp(x)),
}


def attention(
    config: Any, weights: Weights, qkv: list[Tensor], gate: Tensor | float, layer: int, num_layers: int
) -> Tensor:
    q, k, v = qkv
    q, k = ACTIVATIONS[config.activation](q), ACTIVATIONS[config.activation](k)
    index = torch.arange(q.shape[0], dtype=q.dtype)
    distance = index[:, None] - index
    heads = []
    for head, (q_h, k_h, v_h) in enumerate(zip(*(x.chunk(config.num_heads, -1) for x in (q, k, v)), strict=True)):
        kind = getattr(config, "decay", None)
        rate = 0.0 if kind is None else slope(kind, head, config.num_heads, layer, num_layers)
        decay = torch.exp(-rate * distance.abs()).tril()
        theta = weights["full_precision.theta"][head] if config.lrpe else None
        heads.append((scores(config.lrpe, q_h, k_h, theta, distance) * decay) @ v_h)
    normed = any_norm(config.output_norm, torch.cat(heads, -1), config.norm_eps, weights, "out.norm_")
    return (normed * gate) @ weights["out.weight"].T


def transnormer(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    if config.gate == "none":
        return attention(config, weights, maps(weights, "qkv", x), 1.0, layer, num_layers)
    *qkv, gate = maps(weights, "qkvu", x)
    return attention(config, weights, qkv, gate, layer, num_layers)


def tnl(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    normed = any_norm(config.norm, x, config.norm_eps, weights, "input_norm.") if config.norms_input else x
    gate: Tensor | float = 1.0
    if config.gate != "none":  # of x, the sub-layer's input without its norm where the mixer applies that
        gate = torch.sigmoid(x @ weights["gate.down"].T @ weights["gate.up"].T)
    return attention(config, weights, maps(weights, "qkv", normed), gate, layer, num_layers)


def maps(weights: Weights, name: str, x: Tensor) -> list[Tensor]:
    """x times each matrix of the fused parameter `name`, plus its bias if there is one."""
    parts = weights[f"{name}.weight"]
    return [x @ w.T + b for w, b in zip(parts, weights.get(f"{name}.bias", torch.zeros(parts.shape[:2])), strict=True)]


def hgrn2(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    q, logit, v = maps(weights, "qfv", x)
    q = torch.sigmoid(q) * (q if config.query_activation == "silu" else 1.0)
    v = torch.sigmoid(v) * v if config.value_activation == "silu" else v
    beta: Tensor | float = 0.0
    if config.lower_bounds == "learned":
        beta = weights["shared.rows.gamma"].softmax(0)[1 : layer + 1].sum(0)
    forget = beta + (1.0 - beta) * torch.sigmoid(logit)
    heads = []
    for q_h, f_h, v_h in zip(*(y.chunk(config.num_heads, -1) for y in (q, forget, v)), strict=True):
        state, rows = torch.zeros(f_h.shape[1], v_h.shape[1], dtype=x.dtype), []
        for q_t, f_t, v_t in zip(q_h, f_h, v_h, strict=True):
            state = f_t[:, None] * state + torch.outer(1.0 - f_t, v_t)
            rows.append(q_t @ state)
        scale = 1.0 if config.scan_scale == "one" else 1.0 / math.sqrt(f_h.shape[1])
        heads.append(torch.stack(rows) * scale)
    eps = config.output_norm_eps or config.norm_eps
    normed = any_norm(config.output_norm, torch.cat(heads, -1), eps, weights, "out.norm_")
    return normed @ weights["out.weight"].T + weights.get("out.bias", 0.0)


def rodimus(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    n = config.state_size
    x, gate = maps(weights, "fc", x)
    taps = weights["conv.weight"]
    padded = torch.cat([x.new_zeros(taps.shape[1] - 1, x.shape[1]), x])
    conv = torch.stack([(padded[t : t + taps.shape[1]] * taps.T).sum(0) for t in range(len(x))])
    conv = functional.silu(conv + weights["conv.bias"])
    q, k = ((conv if config.query_key_input == "convolved" else x) @ weights["qk"].T).split(n, -1)
    alpha, scale, v = torch.ones_like(k), torch.ones_like(k), x
    if "selection" in config.gates:
        logits = conv @ weights["gates"].T + weights["full_precision.gate_bias"]
        selection = torch.log1p(logits[:, :n].exp())
        tempered = torch.sigmoid(logits[:, n:]) if "temperature" in config.gates else 1.0
        alpha, scale = torch.exp(-selection * tempered), selection**tempered
    k = scale * k / k.norm(dim=-1, keepdim=True)
    if "input" in config.gates:
        code = x @ weights["input_gate_down"].T
        v = x * torch.sigmoid(code @ weights["input_gate_up"].T + weights["input_gate_bias"])
    state, rows = torch.zeros(n, x.shape[1], dtype=x.dtype), []
    for q_t, k_t, v_t, decay in zip(q, k, v, alpha, strict=True):
        state = decay[:, None] * state + torch.outer(k_t, v_t)
        rows.append(q_t @ state / math.sqrt(n))
    o = torch.stack(rows) + weights["full_precision.feed_through"] * conv
    return norm(o * functional.silu(gate), config.norm_eps) * weights["out.norm_weight"] @ weights["out.weight"].T


def shared_key_attention(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    """Attention of each token to its window; rotary positions by the distance, as in `softmax`."""
    (q, v), width = maps(weights, "qv", x), x.shape[1] // config.num_heads
    theta = config.rope_base ** (-2.0 * torch.arange(width // 2, dtype=x.dtype) / width)
    q, k = (
        torch.complex(*y.unflatten(-1, (-1, 2, width // 2)).unbind(-2)) for y in (q, x @ weights["key"].T)
    )  # [T, H or 1, K/2]
    rows = []
    for t in range(len(x)):
        near = torch.arange(max(0, t - config.window + 1), t + 1)
        turn = torch.polar(torch.ones((), dtype=x.dtype), (t - near)[:, None] * theta)
        logits = torch.einsum("hj,sj,sj->hs", q[t], k[near, 0].conj(), turn).real
        weight = (logits / width**0.5).softmax(-1)
        rows.append(torch.einsum("hs,shv->hv", weight, v[near].unflatten(-1, (-1, width))).flatten())
    return torch.stack(rows) @ weights["out.weight"].T


def softmax(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    """Rotary positions by the distance only: score = Re(sum_j q_j conj(k_j) e^(i (t - s) theta_j)) / sqrt(K).

    Token t attends to all s <= t; with a window those of t - s < W or s < P; with blocks those of floor(s / W) =
    floor(t / W).
    """
    q, k, v = [*maps(weights, "q", x), *maps(weights, "kv", x)]
    width = q.shape[1] // config.num_heads
    theta = config.rope_base ** (-2.0 * torch.arange(width // 2, dtype=x.dtype) / width)
    index = torch.arange(x.shape[0], dtype=x.dtype)
    turn = torch.polar(torch.ones((), dtype=x.dtype), (index[:, None] - index)[..., None] * theta)  # [T, T, K/2]
    pairs = [torch.complex(*y.unflatten(-1, (-1, 2, width // 2)).unbind(-2)) for y in (q, k)]  # [T, H or G, K/2]
    heads = []
    for head in range(config.num_heads):
        group = head * (config.num_key_value_heads or config.num_heads) // config.num_heads
        logits = torch.einsum("tj,sj,tsj->ts", pairs[0][:, head], pairs[1][:, group].conj(), turn).real
        visible = torch.ones_like(logits).tril().bool()
        if config.window is not None:
            visible &= (index[:, None] - index < config.window) | (index < (config.num_sinks or 0))
        if config.block_size is not None:
            visible &= (index[:, None] // config.block_size) == (index // config.block_size)
        weight = (logits / width**0.5).masked_fill(~visible, float("-inf")).softmax(-1)
        heads.append(weight @ v[:, group * width : (group + 1) * width])
    return torch.cat(heads, -1) @ weights["out.weight"].T


def glu(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    gate, value = maps(weights, "up", x)
    if config.activation == "silu":
        gate = gate / (1.0 + torch.exp(-gate))
    return (gate * value) @ weights["down.weight"].T + weights.get("down.bias", 0.0)


def ffn(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    """W_2 act(W_1 x), with the exact GELU."""
    (z,) = maps(weights, "up", x)
    active = {
        "relu": z.clamp(min=0.0),
        "silu": z / (1.0 + torch.exp(-z)),
        "gelu": z * 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))),
        "gelu_tanh": z * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))),
        "squared_relu": z.clamp(min=0.0) ** 2,
    }
    return active[config.activation] @ weights["down.weight"].T + weights.get("down.bias", 0.0)


def running_sum(v: Tensor, factor: Tensor) -> Tensor:
    total, sums = torch.zeros_like(v[0]), []
    for row in v:
        total = factor * total + row
        sums.append(total)
    return torch.stack(sums)


def decaying_sum(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    v = x @ weights["value.weight"][0].T
    m = running_sum(v, 1.0 / (1.0 + weights["full_precision.theta"].exp()))
    gate = weights["shared.logits"].softmax(0)[layer]
    out = weights["out"]
    return (m * gate) @ out.T / out.detach().abs().max().clamp(min=1.0)


def tpe(weights: Weights, x: Tensor) -> Tensor:
    """y_t = sum over s <= t of x_s sum_k B_k lambda_k^(t - s)."""
    coefficients = weights["full_precision.coefficients"]
    decay = 1.0 / (1.0 + torch.exp(-weights["full_precision.decay_logit"]))
    rows = []
    for t in range(x.shape[0]):
        taps = [(coefficients * decay ** (t - s)).sum(-1) for s in range(t + 1)]
        rows.append((torch.stack(taps) * x[: t + 1]).sum(0))
    return torch.stack(rows)


def input_sum(weights: Weights, x: Tensor) -> Tensor:
    return x + weights["gain"] * running_sum(x, torch.tensor(0.5, dtype=x.dtype))


def mamba2(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    groups = config.num_groups
    gate, x_in = [x @ part.T for part in weights["zx.weight"]]
    bc, bc_taps = (weights[name].reshape(-1, weights[name].shape[-1]) for name in ("bc", "bc_conv_weight"))
    taps = torch.cat([weights["conv_weight"], bc_taps])
    read = torch.cat([x_in, x @ bc.T], -1)
    padded = torch.cat([read.new_zeros(taps.shape[1] - 1, read.shape[1]), read])
    conv = torch.stack([(padded[t : t + taps.shape[1]] * taps.T).sum(0) for t in range(len(x))])
    conv = functional.silu(conv + torch.cat([weights["conv_bias"], weights["bc_conv_bias"].flatten()]))
    x_conv, b, c = conv.split([x_in.shape[1], *[groups * config.state_size] * 2], -1)
    logit = x @ weights["time_step.weight"][0].T + weights["full_precision.step_bias"]
    step = torch.log1p(logit.exp())
    values = x_conv.unflatten(-1, (-1, config.head_dim))  # [T, H, P]
    heads = values.shape[1] // groups
    b, c = (y.unflatten(-1, (groups, -1)).repeat_interleave(heads, 1) for y in (b, c))  # [T, H, N]
    rows = []
    for t in range(len(x)):
        total = weights["full_precision.feed_through"][:, None] * values[t]
        for s in range(t + 1):
            decay = torch.exp(-weights["full_precision.a_log"].exp() * step[s + 1 : t + 1].sum(0))
            total = total + ((c[t] * b[s]).sum(-1) * decay * step[s])[:, None] * values[s]
        rows.append(total.flatten())
    gated = (torch.stack(rows) * functional.silu(gate)).unflatten(-1, (groups, -1))
    return (norm(gated, config.norm_eps).flatten(1) * weights["out.norm_weight"]) @ weights["out.weight"].T


def mamba1(config: Any, weights: Weights, x: Tensor, layer: int, num_layers: int) -> Tensor:
    x_in, gate = [x @ part.T for part in weights["xz.weight"]]
    taps = weights["conv.weight"]
    padded = torch.cat([x_in.new_zeros(taps.shape[1] - 1, x_in.shape[1]), x_in])
    conv = torch.stack([(padded[t : t + taps.shape[1]] * taps.T).sum(0) for t in range(len(x))])
    x_conv = functional.silu(conv + weights["conv.bias"])
    code, b, c = (x_conv @ weights["selection"].T).split(
        [weights["time_step"].shape[1], config.state_size, config.state_size], -1
    )
    step = torch.log1p((code @ weights["time_step"].T + weights["full_precision.step_bias"]).exp())
    rates = -weights["full_precision.a_log"].exp()
    state, rows = torch.zeros_like(rates), []
    for t in range(len(x)):
        state = torch.exp(step[t][:, None] * rates) * state + (step[t] * x_conv[t])[:, None] * b[t]
        rows.append(state @ c[t] + weights["full_precision.feed_through"] * x_conv[t])
    return (torch.stack(rows) * functional.silu(gate)) @ weights["out.weight"].T


REFERENCES: dict[str, Reference] = {
    "transnormer": transnormer,
    "tnl": tnl,
    "hgrn2": hgrn2,
    "cosformer2": tnl,
    "rodimus": rodimus,
    "shared_key_attention": shared_key_attention,
    "softmax": softmax,
    "mamba1": mamba1,
    "mamba2": mamba2,
    "recurrence": recurrence,
    "glu": glu,
    "ffn": ffn,
    "tests.mixers.decaying_sum": decaying_sum,
}
INPUT_REFERENCES: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "cosformer2": tpe,
    "tests.mixers.decaying_sum": input_sum,
}


def absolute_positions(weights: Weights, x: Tensor, first: int) -> Tensor:
    """Positions of the learned table, or else sines and cosines."""
    places = torch.arange(first, first + len(x))
    if "table.weight" in weights:
        return weights["table.weight"][places]
    half = x.shape[1] // 2
    angles = [[p / 10000.0 ** (2 * j / x.shape[1]) for j in range(half)] for p in places.tolist()]
    return x.new_tensor([[*map(math.sin, row), *map(math.cos, row)] for row in angles])


def document_logits(config: ModelConfig, weights: Weights, tokens: Tensor, *, first: int = 0) -> Tensor:
    """Logits [T, vocabulary] of one document's tokens [T], which start at position `first` of a sequence; `weights` are
    keyed by their global names."""
    table = weights["embedding.weight"][: config.vocab_size]
    x = table[tokens] * config.embedding_scale
    sublayers = [sublayer for _, block in config.blocks() for sublayer in block.sublayers]
    for kind in dict.fromkeys(sublayer.type for sublayer in sublayers if sublayer.type in INPUT_REFERENCES):
        x = INPUT_REFERENCES[kind](_below(weights, f"input_layers.{_key(kind)}."), x)
    for kind in dict.fromkeys(s.type for s in sublayers if getattr(s, "absolute_positions", "none") != "none"):
        x = x + absolute_positions(_below(weights, f"input_layers.{_key(kind)}."), x, first)
    for layer, (_, block) in enumerate(config.blocks()):
        source = x
        for index, sublayer in enumerate(block.sublayers):
            y = _sublayer(config, sublayer, weights, f"blocks.{layer}.sublayers.{index}.", source, layer)
            source = x + y
            if sublayer.residual == "add_norm":
                prefix = f"blocks.{layer}.sublayers.{index}.norm."
                source = any_norm(sublayer.norm, source, sublayer.norm_eps, weights, prefix)
            x = x if sublayer.residual == "two_hop" else source
    head = table if config.tie_embeddings else weights["head.weight"][: config.vocab_size]
    return any_norm(config.norm, x, config.norm_eps, weights, "norm.") @ head.T


def _sublayer(
    config: ModelConfig, sublayer: MixerConfig, weights: Weights, prefix: str, source: Tensor, layer: int
) -> Tensor:
    shared = _below(weights, f"shared.{_key(sublayer.type)}.")
    own = _below(weights, f"{prefix}mixer.") | {f"shared.{name}": tensor for name, tensor in shared.items()}
    norm_first = sublayer.residual != "add_norm" and not sublayer.norms_input
    entering = any_norm(sublayer.norm, source, sublayer.norm_eps, weights, f"{prefix}norm.") if norm_first else source
    return REFERENCES[sublayer.type](sublayer, own, entering, layer, config.num_layers)


def _below(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _key(kind: str) -> str:
    return kind.replace(".", "_")
