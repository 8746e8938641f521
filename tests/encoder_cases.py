"""Small encoders for tests/model/test_encoder.py, and an independent definition of them.

Sizes suit tensor parallelism over 2 and 4 ranks; of the 384 rows of the padded vocabulary four belong to no token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.config import parse
from megalin.data.batch import EncoderBatch
from megalin.model.config import EncoderConfig
from megalin.model.encoder import Encoder
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.initialisation import init_weights
from tests.references import any_norm, ffn, glu, maps

VOCAB_SIZE, HIDDEN_SIZE, LENGTH, PREDICTIONS, CLASSES = 380, 48, 36, 7, 5
HEADS = {"type": "dense_attention", "num_heads": 4, "ffn_ratio": 3}
ONE_HEAD = HEADS | {"num_heads": 1}
LOCAL = HEADS | {"kind": "local", "window": 8}
SHIFTED = HEADS | {"kind": "shifted_local", "window": 6, "local_relpe": False}
LAYER_NORM = {"norm": "layernorm", "norm_eps": 1e-5}
SOFTMAX = {"type": "bidirectional_softmax", "num_heads": 4, **LAYER_NORM}
ROTARY = SOFTMAX | {"num_heads": 12, "bias": False, "rope_base": 100.0}
FFN = {"type": "ffn", "intermediate_size": 36, **LAYER_NORM}
ADD_NORM = {"residual": "add_norm"}
TWO_WAY = {"type": "two_way_hgrn2", "num_heads": 12, "chunk_size": 16}
GLU = {"type": "glu", "intermediate_size": 36}


class Case(NamedTuple):
    """A named encoder of the tests."""

    name: str
    model: EncoderConfig


def model(*layers: dict[str, Any] | list[dict[str, Any]], **fields: Any) -> EncoderConfig:
    """A small encoder of these blocks, of one or several sub-layers; weights large enough that every branch matters."""
    values = {
        "kind": "encoder",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "max_positions": 40,
        "layers": [{"sublayers": layer if isinstance(layer, list) else [layer]} for layer in layers],
        "init_std": 0.4,
    }
    return parse(EncoderConfig, values | fields, "encoder cases")


CASES = (
    Case("heads", model(HEADS, HEADS)),
    Case("one-head", model(ONE_HEAD, ONE_HEAD | {"scale_ffn_weights": False})),
    Case("local", model(LOCAL, SHIFTED, HEADS, norm_eps=1e-3, logit_bounds=[-3.0, 1.5])),
    Case("classes", model(HEADS, ONE_HEAD, num_classes=CLASSES)),
    Case(
        "classes-of-the-mean",
        model(HEADS | {"relpe": "none"}, num_classes=CLASSES, pooling="mean", position_embedding="sinusoidal"),
    ),
    Case(
        "bert",
        model(
            *([SOFTMAX | ADD_NORM, FFN | ADD_NORM] for _ in range(2)),
            embedding_norm="layernorm",
            norm="layernorm",
            norm_eps=1e-5,
            final_norm=False,
            head_bias=True,
        ),
    ),
    Case(
        "rotary",
        model(
            [ROTARY, FFN | {"activation": "relu", "bias": False}],
            embedding_norm="none",
            norm="rmsnorm",
            norm_eps=1e-5,
            num_classes=CLASSES,
            pooling="mean",
            pooler="none",
        ),
    ),
    Case(
        "two-way",
        model(
            [TWO_WAY, GLU],
            TWO_WAY | {"bias": True, "query_activation": "sigmoid", "output_norm": "layernorm"},
            norm="srmsnorm",
            pooling="mean",
        ),
    ),
)
NAMES = [case.name for case in CASES]


def build(config: EncoderConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Encoder:
    """The initialized model on one process, without a mesh."""
    built = Encoder(config).to(dtype)
    built.to_empty(device="cpu")
    init_weights(built, seed)
    return built


SIZES = (LENGTH, LENGTH - 7, 10, 0)
"""Tokens before the padding, by sample; the last sample is all padding and has no label."""


def make_batch(config: EncoderConfig, *, seed: int = 3) -> EncoderBatch:
    """A batch [4, LENGTH] of samples with two segments each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB_SIZE, (4, LENGTH), generator=generator)
    sizes = torch.tensor(SIZES)[:, None]
    places = torch.arange(LENGTH)
    predictions = 0 if config.num_classes else PREDICTIONS
    positions = torch.zeros(4, predictions, dtype=torch.int64)
    labels = torch.full((4, predictions), IGNORED_LABEL)
    for row, size in enumerate(SIZES):
        count = min(size, predictions, 3 + 2 * row)
        positions[row, :count] = torch.randperm(size, generator=generator)[:count].sort().values
        labels[row, :count] = torch.randint(0, VOCAB_SIZE, (count,), generator=generator)
    classes = torch.randint(0, config.num_classes or 2, (4,), generator=generator)
    classes[3] = IGNORED_LABEL
    return EncoderBatch(
        tokens, (places >= sizes // 3).long(), places < sizes, positions, labels, classes, torch.arange(4)
    )


def weighted_loss(sums: list[Tensor]) -> Tensor:
    """A loss in which every sample and prediction counts differently."""
    total = sums[0].new_zeros(())
    for each in sums:
        weights = torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).view_as(each)
        total = total + (each * weights).sum()
    return total


def reference(
    config: EncoderConfig, weights: dict[str, Tensor], batch: EncoderBatch, document_ids: Tensor | None = None
) -> dict[str, Tensor]:
    """Hidden states, logits and losses of each head, computed sample by sample from the definition, without padding."""
    rows = []
    for row in range(len(batch.tokens)):
        x = weights["embedding.weight"][batch.tokens[row]]
        if config.position_embedding == "learned":
            x = x + weights["position_embedding.weight"][:LENGTH]
        else:
            frequencies = [10000.0 ** (-2.0 * j / HIDDEN_SIZE) for j in range(HIDDEN_SIZE // 2)]
            angles = [[place * frequency for frequency in frequencies] for place in range(LENGTH)]
            table = [[*map(math.sin, angle), *map(math.cos, angle)] for angle in angles]
            x = x + torch.tensor(table, dtype=x.dtype)
        x = x + weights["type_embedding.weight"][batch.token_types[row]]
        x = _norm(config.embedding_norm, x, config.norm_eps, weights, "embedding_norm.")
        documents = torch.zeros(LENGTH) if document_ids is None else document_ids[row]
        for layer, (_, block) in enumerate(config.blocks()):
            for index, sublayer in enumerate(block.sublayers):
                prefix = f"blocks.{layer}.sublayers.{index}."
                x = _sublayer(sublayer, weights, prefix, x, batch.valid[row], documents)
        rows.append(_norm(config.norm, x, config.norm_eps, weights, "norm.") if config.final_norm else x)
    hidden = torch.stack(rows)
    found = {"hidden": hidden}
    if config.num_classes is None:
        picked = torch.stack([row[index] for row, index in zip(rows, batch.masked_positions, strict=True)])
        z = picked @ weights["masked_head.dense.weight"].T + weights.get("masked_head.dense.bias", 0.0)
        z = z * 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0)))
        z = _norm(config.norm, z, config.norm_eps, weights, "masked_head.norm.")
        logits = z @ weights["embedding.weight"].T + weights["masked_head.vocabulary.bias"]
        if config.logit_bounds is not None:
            logits = logits.clamp(*config.logit_bounds)
        found |= _losses("masked", logits[..., :VOCAB_SIZE], batch.masked_labels)
    pooled = hidden[:, 0]
    if config.pooling == "mean":
        kept = batch.valid.to(hidden.dtype)
        pooled = (hidden * kept[..., None]).sum(1) / kept.sum(1).clamp(min=1)[:, None]
    z = pooled
    if config.pooler == "tanh":
        z = torch.tanh(z @ weights["sequence_head.pooler.weight"].T + weights.get("sequence_head.pooler.bias", 0.0))
    logits = z @ weights["sequence_head.classifier.weight"].T + weights["sequence_head.classifier.bias"]
    return found | _losses("sequence", logits, batch.sequence_labels)


def _losses(name: str, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    kept = labels != IGNORED_LABEL
    chosen = logits.gather(-1, labels.masked_fill(~kept, 0)[..., None]).squeeze(-1)
    return {f"{name}_logits": logits, f"{name}_losses": (logits.logsumexp(-1) - chosen) * kept}


def _norm(kind: str, x: Tensor, eps: float, weights: dict[str, Tensor], prefix: str) -> Tensor:
    """The norm called `kind`, with the parameters at `prefix`."""
    match kind:
        case "none":
            return x
        case "hardtanh":
            return x.clamp(-1.0, 1.0)
        case "uncentered_layernorm":
            return weights[f"{prefix}weight"] * x / (x.abs().mean(-1, keepdim=True) + eps)
    return any_norm(kind, x, eps, weights, prefix)


def _maxnorm(x: Tensor) -> Tensor:
    return x / (x.abs().amax(-1, keepdim=True) + 1e-3)


def _sublayer(
    config: Any, weights: dict[str, Tensor], prefix: str, x: Tensor, valid: Tensor, documents: Tensor
) -> Tensor:
    """The residual stream [T, D] of one sample after a sub-layer."""
    if config.type == "dense_attention":
        return x + _dense(config, weights, f"{prefix}mixer.", x, valid, documents)
    own = {name.removeprefix(f"{prefix}mixer."): value for name, value in weights.items() if name.startswith(prefix)}
    norm_last = config.residual == "add_norm"
    source = x if norm_last else _norm(config.norm, x, config.norm_eps, weights, f"{prefix}norm.")
    match config.type:
        case "ffn":
            y = ffn(config, own, source, 0, 0)
        case "glu":
            y = glu(config, own, source, 0, 0)
        case "two_way_hgrn2":
            own |= {name: value for name, value in weights.items() if name.startswith("shared.")}
            y = _two_way(config, own, source, valid, documents, int(prefix.split(".")[1]))
        case "bidirectional_softmax":
            y = _softmax(config, own, source, valid, documents)
    return _norm(config.norm, x + y, config.norm_eps, weights, f"{prefix}norm.") if norm_last else x + y


def _softmax(config: Any, weights: dict[str, Tensor], x: Tensor, valid: Tensor, documents: Tensor) -> Tensor:
    """Softmax attention [T, D] of one sample: the valid tokens of the document, or all of one of padding alone."""
    q, k, v = maps(weights, "qkv", x)
    same = documents[:, None] == documents
    visible = same & valid
    visible = visible | (same & ~visible.any(1, keepdim=True))
    heads, width = [], HIDDEN_SIZE // config.num_heads
    for a, b, c in zip(q.split(width, 1), k.split(width, 1), v.split(width, 1), strict=True):
        logits = a @ b.T if config.rope_base is None else _rotary_scores(a, b, config.rope_base)
        heads.append((logits / width**0.5).masked_fill(~visible, float("-inf")).softmax(1) @ c)
    return torch.cat(heads, 1) @ weights["out.weight"].T + weights.get("out.bias", 0.0)


def _rotary_scores(q: Tensor, k: Tensor, base: float) -> Tensor:
    """Scores [T, T] of RoPE, which depend on the distance of the tokens alone."""
    half = q.shape[1] // 2
    places = torch.arange(len(q), dtype=q.dtype)
    angle = (places[:, None] - places)[..., None] * base ** (-torch.arange(half, dtype=q.dtype) / half)
    real = torch.einsum("tj,sj->tsj", q[:, :half], k[:, :half]) + torch.einsum("tj,sj->tsj", q[:, half:], k[:, half:])
    crossed = torch.einsum("tj,sj->tsj", q[:, :half], k[:, half:]) - torch.einsum(
        "tj,sj->tsj", q[:, half:], k[:, :half]
    )
    return (real * angle.cos() + crossed * angle.sin()).sum(-1)


def _two_way(
    config: Any, weights: dict[str, Tensor], x: Tensor, valid: Tensor, documents: Tensor, layer: int
) -> Tensor:
    """HGRN2 in both directions [T, D] of one sample, token by token: each direction walks over the valid tokens of a
    document; padding reads the state there and changes nothing."""
    q, logit, v = maps(weights, "qfv", x)
    q = torch.sigmoid(q) * (q if config.query_activation == "silu" else 1.0)
    v = v * torch.sigmoid(v) if config.value_activation == "silu" else v
    shares = weights["shared.two_way_hgrn2.rows.gamma"].softmax(0)
    beta = shares[1 : layer + 1].sum(0)
    f = beta + (1.0 - beta) * torch.sigmoid(logit)
    width, total = HIDDEN_SIZE // config.num_heads, torch.zeros_like(x)
    for order in (range(len(x)), reversed(range(len(x)))):
        states, before, rows = torch.zeros(config.num_heads, width, width, dtype=x.dtype), None, {}
        for t in order:
            if before is not None and documents[t] != documents[before]:
                states = torch.zeros_like(states)
            before = t
            if valid[t]:
                heads = f[t].view(config.num_heads, width)
                states = heads[..., None] * states + (1.0 - heads)[..., None] * v[t].view(-1, 1, width)
            rows[t] = torch.einsum("hk,hkv->hv", q[t].view(-1, width), states).flatten()
        total = total + torch.stack([rows[t] for t in range(len(x))])
    y = any_norm(config.output_norm, total, config.norm_eps, weights, "out.norm_")
    return y @ weights["out.weight"].T + weights.get("out.bias", 0.0)


def _dense(config: Any, weights: dict[str, Tensor], prefix: str, x: Tensor, valid: Tensor, documents: Tensor) -> Tensor:
    """MaxNorm(ReLU(Y W_up) W_down) of one sample [T, D], one group of mutually visible tokens at a time."""
    query, up, down = (weights[f"{prefix}{name}.weight"] for name in ("query", "up", "down"))
    query, up = query[0], up[0]
    if config.scale_ffn_weights:
        bound = (2 * len(up)) ** -0.5
        up, down = (w * min(1.0, bound / w.detach().abs().max().item()) for w in (up, down))
    width, outputs = HIDDEN_SIZE // config.num_heads, torch.zeros_like(x)
    theta = 10000.0 ** (-torch.arange(width, dtype=x.dtype) / width)
    for document in documents.unique():
        tokens = (documents == document).nonzero().flatten()
        places = torch.arange(len(tokens))
        group = torch.zeros_like(places) if config.window is None else (places + config.offset) // config.window
        if config.window is not None and config.local_relpe:
            places = (places + config.offset) % config.window
        seen = max(1, int(valid[tokens].sum())) if config.window is None else config.window
        z = _maxnorm(x[tokens]) * valid[tokens, None] * seen ** (-1.0 / 3.0)
        if config.relpe == "cosine":
            z = (z.view(len(tokens), -1, width) * torch.cos(places[:, None].to(x.dtype) * theta)[:, None]).flatten(1)
        for number in group.unique():
            own = z[group == number]
            heads = []
            for q, k in zip((own @ query.T).split(width, -1), own.split(width, -1), strict=True):
                heads.append((q @ k.T) @ k)
            hidden = torch.relu(torch.cat(heads, -1) @ up.T) @ down.T
            outputs = outputs.index_put((tokens[group == number],), _maxnorm(hidden))
    return outputs
