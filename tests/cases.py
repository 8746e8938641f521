"""Test cases of the decoder, one small model a mixer: all tests of tests/model and tests/parallel run on each.

A new mixer adds one case and its collectives here, and its definition to tests/references.py. Sizes suit tensor
parallelism over 2, 3 and 4 ranks: 12 heads, no two equal widths, and a vocabulary padded to 384 rows, of which four
belong to no token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.config import parse
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.ops.scans.limits import WIDTH_UNIT
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.initialisation import init_weights
from tests.mixers import decaying_sum
from tests.references import document_logits

VOCAB_SIZE, HIDDEN_SIZE, NUM_HEADS, CHUNK = 380, 48, 12, 16
GLU = {"type": "glu", "intermediate_size": 36}
FFN = {"type": "ffn", "intermediate_size": 36, "bias": False}
ADD_NORM = {"residual": "add_norm"}


class TensorParallelCollectives(NamedTuple):
    """Collectives of a type of sub-layer over tp, besides one [tokens, hidden size] each way; sizes in fp32 numbers."""

    num_norms: int = 0
    """Full-width norms on sharded heads: one number a token each."""
    partial_gradients: tuple[int, ...] = ()
    """Elements of each replicated weight that meets sharded data."""
    num_input_layers: int = 0
    """Input layers, with one [tokens, hidden size] collective each way."""
    input_partial_gradients: tuple[int, ...] = ()
    """Elements of each replicated weight of the input layer that meets sharded data."""
    contracted: tuple[int, ...] = ()
    """Numbers a token, forward and backward, of sums over a sharded width before a nonlinearity."""


class ContextParallelCollectives(NamedTuple):
    """Collectives of a block over cp, whose size does not depend on the length: fp32 numbers of a sequence and rank."""

    state: int
    """The state, K V a head, of scans with one decay a head in widths padded as for kernels; where it depends on the
    input also the total decay, K a head or 1 if all K are equal. One all-gather each way."""
    halos: tuple[int, ...] = ()
    """Inputs of convolutions, keys and values of a window; an all-gather forward, a reduce-scatter backward."""
    input_state: int = 0
    """The state of the input layer, once a model."""
    window_ids: int = 0
    """Document ids of the earlier tokens inside a window, once a batch."""


class Case(NamedTuple):
    """A named model of the tests."""

    name: str
    model: ModelConfig
    cp: ContextParallelCollectives | None = None
    """Given for one case of each recurrence."""
    representative: bool = False
    """True for the case of its mixers in tests that take one case a mixer."""


def attention(kind: str, **fields: Any) -> dict[str, Any]:
    """The table of a linear-attention sub-layer."""
    return {"type": kind, "num_heads": NUM_HEADS, "chunk_size": CHUNK, **fields}


def model(*layers: dict[str, Any], **fields: Any) -> ModelConfig:
    """A small model of these blocks; weights large enough that every branch matters."""
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "layers": list(layers),
        "init_std": 0.2,
        "embedding_scale": 2.0,
    }
    return parse(ModelConfig, values | fields, "cases")


def _case(name: str, mixer: dict[str, Any], channel: dict[str, Any] | None = None, **fields: Any) -> Case:
    return Case(name, model({"sublayers": [mixer, channel or GLU], "repeat": 2}), **fields)


TOY = {"type": decaying_sum.TYPE}

HYBRID = Case(
    "hybrid",
    model(
        {"sublayers": [attention("transnormer", lrpe="cosine"), attention("tnl", residual="two_hop"), GLU]},
        {"sublayers": [attention("tnl", lrpe="rotation", decay="paper"), GLU | {"activation": "silu"}], "repeat": 2},
        {"sublayers": [attention("transnormer", chunk_size=5, norm_eps=1e-3)]},
        tie_embeddings=False,
        norm_eps=1e-4,
    ),
)

NORMS = Case(
    "norms",
    model(
        {
            "sublayers": [
                attention("tnl", norm="layernorm", output_norm="layernorm"),
                attention("hgrn2", norm="rmsnorm", output_norm="rmsnorm"),
                GLU | {"norm": "layernorm"},
            ],
            "repeat": 2,
        },
        norm="layernorm",
        norm_eps=1e-3,
    ),
)

LAYER_NORM = {"norm": "layernorm", "bias": True}
BIASED = Case(
    "hgrn2-biased",
    model(
        {
            "sublayers": [
                attention(
                    "hgrn2", query_activation="sigmoid", value_activation="silu", output_norm="layernorm", **LAYER_NORM
                ),
                GLU | LAYER_NORM,
            ],
            "repeat": 2,
        },
        norm="layernorm",
    ),
)

FLA_HGRN2 = Case(
    "hgrn2-fla",
    model(
        {
            "sublayers": [
                attention(
                    "hgrn2", norm="rmsnorm", output_norm="rmsnorm", output_norm_eps=0.5, scan_scale="inverse_sqrt"
                ),
                GLU | {"activation": "silu", "norm": "rmsnorm"},
            ],
            "repeat": 2,
        },
        norm="rmsnorm",
        tie_embeddings=False,
    ),
)

RODIMUS = {"type": "rodimus", "norm": "srmsnorm", "state_size": 6, "input_gate_rank": 5, "chunk_size": CHUNK}

SHARED_KEY = {
    "type": "shared_key_attention",
    "norm": "srmsnorm",
    "num_heads": NUM_HEADS,
    "window": 7,
    "residual": "two_hop",
}

MAMBA2 = {"type": "mamba2", "norm": "srmsnorm", "head_dim": 8, "state_size": 10, "chunk_size": CHUNK}

MAMBA1 = {"type": "mamba1", "norm": "srmsnorm", "state_size": 5, "step_rank": 4}

GLA = attention(
    "recurrence", norm="srmsnorm", expand_k=0.5, decay="vector", decay_rank=3, temperature=4.0, conv_width=4
)

HEAD, INNER = HIDDEN_SIZE // NUM_HEADS, 2 * HIDDEN_SIZE
"""Width of a head, and of Rodimus and Mamba inside a block."""
WINDOW = SHARED_KEY["window"] - 1
"""Earlier tokens that a token attends to."""
RODIMUS_STATE, RODIMUS_HALO = RODIMUS["state_size"] * (INNER + 1), 3 * INNER
MAMBA2_SHARED = 2 * MAMBA2["state_size"]
"""Width of Mamba-2's B and C together."""


def _padded(width: int) -> int:
    return -(-width // WIDTH_UNIT) * WIDTH_UNIT


CASES = (
    _case(
        "transnormer",
        attention("transnormer"),
        cp=ContextParallelCollectives(NUM_HEADS * _padded(HEAD) * _padded(HEAD)),
    ),
    _case("transnormer-paper", attention("transnormer", decay="paper")),
    _case("transnormer-cosine", attention("transnormer", lrpe="cosine"), representative=True),
    _case("transnormer-rotation", attention("transnormer", lrpe="rotation", decay="paper")),
    _case("tnl", attention("tnl"), representative=True),
    _case("glu-silu", attention("tnl", lrpe="cosine"), GLU | {"activation": "silu"}),
    _case(
        "hgrn2",
        attention("hgrn2"),
        cp=ContextParallelCollectives(NUM_HEADS * HEAD * (HEAD + 1)),
        representative=True,
    ),
    BIASED,
    FLA_HGRN2,
    _case(
        "cosformer2",
        attention("cosformer2"),
        cp=ContextParallelCollectives(NUM_HEADS * _padded(2 * HEAD) * _padded(HEAD), input_state=HIDDEN_SIZE * HEAD),
        representative=True,
    ),
    Case(
        "rodimus_plus",
        model({"sublayers": [RODIMUS, SHARED_KEY, GLU | {"activation": "silu"}], "repeat": 2}),
        cp=ContextParallelCollectives(
            RODIMUS_STATE, halos=(RODIMUS_HALO, WINDOW * (HEAD + HIDDEN_SIZE)), window_ids=WINDOW
        ),
        representative=True,
    ),
    Case(
        "rodimus",
        model({"sublayers": [RODIMUS], "repeat": 2}, output_init="scaled_by_depth", residual_dtype="float32"),
        cp=ContextParallelCollectives(RODIMUS_STATE, halos=(RODIMUS_HALO,)),
    ),
    _case("softmax", {"type": "softmax", "num_heads": NUM_HEADS}),
    _case(
        "softmax-grouped",
        {"type": "softmax", "num_heads": 2 * NUM_HEADS, "num_key_value_heads": NUM_HEADS},
        representative=True,
    ),
    Case(
        "mamba2",
        model({"sublayers": [MAMBA2], "repeat": 2}),
        cp=ContextParallelCollectives(
            INNER // MAMBA2["head_dim"] * (_padded(MAMBA2["state_size"]) * _padded(MAMBA2["head_dim"]) + 1),
            halos=(3 * (INNER + MAMBA2_SHARED),),
        ),
        representative=True,
    ),
    Case(
        "mamba1",
        model({"sublayers": [MAMBA1], "repeat": 2}),
        cp=ContextParallelCollectives(INNER * (MAMBA1["state_size"] + 1), halos=(3 * INNER,)),
        representative=True,
    ),
    _case(
        "gla",
        GLA,
        cp=ContextParallelCollectives(NUM_HEADS * HEAD // 2 * (HEAD + 1), halos=(3 * 2 * HIDDEN_SIZE,)),
        representative=True,
    ),
    _case("ffn", attention("tnl") | ADD_NORM, FFN | ADD_NORM, representative=True),
    NORMS,
    _case("sockets", TOY),
    HYBRID,
)
NAMES = [case.name for case in CASES]
REPRESENTATIVES = [case for case in CASES if case.representative]
"""One case a mixer."""

LOW_RANK = HIDDEN_SIZE * HEAD
"""Elements of TNL's replicated down-projection, and of the shared key's matrix."""
COLLECTIVES = {
    "transnormer": TensorParallelCollectives(num_norms=1),
    "tnl": TensorParallelCollectives(num_norms=1, partial_gradients=(LOW_RANK,)),
    "hgrn2": TensorParallelCollectives(num_norms=1),
    "cosformer2": TensorParallelCollectives(
        num_norms=1, partial_gradients=(LOW_RANK,), num_input_layers=1, input_partial_gradients=(HEAD,)
    ),
    "softmax": TensorParallelCollectives(),
    "rodimus": TensorParallelCollectives(
        num_norms=1,
        contracted=(
            4 * RODIMUS["state_size"] + RODIMUS["input_gate_rank"],
            3 * RODIMUS["state_size"] + RODIMUS["input_gate_rank"],
        ),
    ),
    "mamba1": TensorParallelCollectives(contracted=(MAMBA1["step_rank"] + 2 * MAMBA1["state_size"],) * 2),
    "mamba2": TensorParallelCollectives(
        num_norms=1, partial_gradients=tuple(MAMBA2_SHARED * width for width in (HIDDEN_SIZE, 4, 1))
    ),
    "recurrence": TensorParallelCollectives(partial_gradients=(3 * HIDDEN_SIZE, HEAD)),
    "shared_key_attention": TensorParallelCollectives(partial_gradients=(LOW_RANK,)),
    "glu": TensorParallelCollectives(),
    "ffn": TensorParallelCollectives(),
    decaying_sum.TYPE: TensorParallelCollectives(num_input_layers=1),
}
"""By type of sub-layer."""


def build(config: ModelConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> LanguageModel:
    """The initialized model on one process, without a mesh."""
    built = LanguageModel(config).to(dtype)
    built.to_empty(device="cpu")
    init_weights(built, seed)
    return built


class Inputs(NamedTuple):
    """A batch of packed sequences."""

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor


LENGTH = 36
"""Two chunks and a quarter; divisible by 2, 3 and 4."""
DOCUMENT_STARTS = ((0,), (0, CHUNK), (0, CHUNK - 1, CHUNK + 1, CHUNK + 3), (0, 1, LENGTH - 1))
"""By sample: one document; one at a chunk's edge; one token before it, one after it and two documents in a chunk;
single tokens at both ends."""


def make_inputs(length: int = LENGTH, *, seed: int = 3) -> Inputs:
    """[4, length] packed tokens, labels, some of them ignored (each document's last token among them)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(DOCUMENT_STARTS), length)
    tokens = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    starts = torch.zeros(shape, dtype=torch.int32)
    for row, places in enumerate(DOCUMENT_STARTS):
        starts[row, [place for place in places if place < length]] = 1
    labels[:, :-1][starts[:, 1:] == 1] = IGNORED_LABEL
    labels[torch.rand(shape, generator=generator) < 0.2] = IGNORED_LABEL
    return Inputs(tokens, labels, starts.cumsum(1, dtype=torch.int32))


def weighted_loss(losses: Tensor) -> Tensor:
    """A loss in which every token counts differently: [B, T] -> []."""
    weights = torch.linspace(0.5, 1.5, losses.numel(), dtype=losses.dtype).view_as(losses)
    return (losses * weights).sum()


def reference(config: ModelConfig, weights: dict[str, Tensor], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Logits [B, T, vocabulary] and token losses [B, T] of the independent definition, one document at a time."""
    rows = []
    for tokens, ids in zip(inputs.tokens, inputs.document_ids, strict=True):
        _, lengths = ids.unique_consecutive(return_counts=True)
        starts = (lengths.cumsum(0) - lengths).tolist()
        parts = zip(tokens.split(lengths.tolist()), starts, strict=True)
        rows.append(torch.cat([document_logits(config, weights, part, first=first) for part, first in parts]))
    logits = torch.stack(rows)
    kept = inputs.labels != IGNORED_LABEL
    chosen = logits.gather(-1, inputs.labels.masked_fill(~kept, 0)[..., None]).squeeze(-1)
    return logits, (logits.logsumexp(-1) - chosen) * kept
