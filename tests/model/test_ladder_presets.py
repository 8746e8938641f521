"""Counts of the built TNL, HGRN2 and LLaMA presets against those that their papers publish."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import pytest

from megalin.layers.mixers.glu import GLU
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_names

# Scaling-laws paper: blocks, width, GLU; and of Table 7, by family, millions without embeddings and PFLOPs a step.
LADDER = {"70m": (6, 512, 1536), "160m": (12, 768, 2048), "410m": (26, 1024, 2816)}
LADDER |= {"1b": (32, 1536, 4096), "3b": (35, 2560, 6912), "7b": (32, 4096, 11008)}
MILLIONS = {
    "tnl": (21.2, 87.3, 327.7, 918.6, 2798.4, 6509.6),
    "hgrn2": (20.5, 84.9, 334.0, 906.0, 2775.5, 6476.1),
    "llama": (20.5, 85.0, 334.1, 906.2, 2775.8, 6476.5),
}
PETAFLOPS = {
    "tnl": (0.5, 2.2, 7.9, 22.3, 66.6, 154.4),
    "hgrn2": (0.5, 2.1, 8.0, 22.0, 66.0, 153.6),
    "llama": (1.6, 5.6, 18.0, 40.4, 99.6, 202.7),
}
VOCABULARY, LENGTH, SEQUENCES = 100_280, 8192, 480

# HGRN2 paper, Table 10: blocks, width, GLU, billion parameters with embeddings.
HGRN2_PAPER = {"150m": (15, 768, 2048, 0.145), "385m": (26, 1024, 2816, 0.385)}
HGRN2_PAPER |= {"1b-paper": (18, 2048, 5632, 1.028), "2.9b": (36, 2560, 6912, 2.98)}

# Scaling-laws paper, Table 5: width, blocks and our GLU of models of 1B.
SHAPES = {"1792x24": (1792, 24, 4864), "2048x18": (2048, 18, 5632), "3072x8": (3072, 8, 8192)}

every_size = pytest.mark.parametrize(
    ("family", "size", "index"), [(family, size, i) for family in MILLIONS for i, size in enumerate(LADDER)]
)


@lru_cache
def built(name: str) -> LanguageModel:
    return LanguageModel(load_preset(name).model)


def sizes(family: str, size: str) -> tuple[int, int, int]:
    layers, width, glu = LADDER[size]
    return (25 if (family, size) == ("tnl", "410m") else layers), width, glu


def test_every_preset_of_these_families_is_checked_here():
    known = {f"{family}-{size}" for family in MILLIONS for size in LADDER}
    known |= {f"hgrn2-{size}" for size in [*HGRN2_PAPER, "44m-wikitext103"]} | {"llama-1b-gqa"}
    known |= {f"llama-1b-{shape}" for shape in SHAPES} | {f"{family}-tiny" for family in MILLIONS}
    assert {name for name in preset_names() if name.split("-")[0] in MILLIONS} == known


@every_size
def test_ladder_parameters(family: str, size: str, index: int):
    layers, width, glu = sizes(family, size)
    model = built(f"{family}-{size}")
    counted = model.num_parameters() - model.num_embedding_parameters()
    assert abs(counted / 1e6 - MILLIONS[family][index]) <= 0.05
    own = {"tnl": layers * 2 * width * 128, "hgrn2": layers * width, "llama": layers * 4 * width + 2 * width}[family]
    assert counted == layers * (4 * width**2 + 3 * width * glu) + own
    assert model.num_embedding_parameters() == VOCABULARY * width
    assert model.config.num_layers == layers


@every_size
def test_ladder_operations(family: str, size: str, index: int):
    """The paper's count of a step equals the model's, except for the width of the GLU and for element-wise operations.

    The paper takes the GLU to be 8 d / 3 wide, without rounding up, and adds element-wise operations, which are not
    counted here: the second term of each pair below, 2e-4 to 9e-4 of the total.
    """
    layers, width, glu = sizes(family, size)
    heads = width // 128
    matmuls, others = {
        "tnl": (Fraction(1, 2 * heads), Fraction(5, 18 * width)),
        "hgrn2": (Fraction(1, 3 * heads), Fraction(29, 72 * width)),
        "llama": (Fraction(LENGTH, 6 * width), Fraction(5, 18 * width) + Fraction(heads, 8 * width**2)),
    }[family]
    tokens, base = SEQUENCES * LENGTH, 72 * layers * width**2
    assert abs(tokens * base * (1 + matmuls + others) / 10**15 - Fraction(str(PETAFLOPS[family][index]))) <= 0.05
    model = built(f"{family}-{size}")
    counted = model.training_flops(LENGTH) - 3 * model.embedding.logits_flops()
    rounded_glu = 18 * layers * width * glu - 48 * layers * width**2
    assert counted - rounded_glu == base * (1 + matmuls)


@every_size
def test_ladder_norms_heads_and_positions(family: str, size: str, index: int):
    model = built(f"{family}-{size}")
    mixers, glus = model.mixers()[::2], model.mixers()[1::2]
    assert {mixer.head_dim for mixer in mixers} == {128}
    assert {glu.activation for glu in glus} == {"silu" if family == "llama" else "none"}
    kinds = {sublayer.norm for _, block in model.config.blocks() for sublayer in block.sublayers} | {model.config.norm}
    assert kinds == {"layernorm" if family == "llama" else "srmsnorm"}
    width = model.config.hidden_size
    assert model.config.embedding_scale == pytest.approx(width**0.5 if family == "tnl" else 1.0, rel=1e-15)
    assert model.state_bytes() == (0 if family == "llama" else len(mixers) * width * 128 * 4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "cosformer2"])
def test_aspect_ratios_of_the_1b_models(family: str, shape: str):
    """About as many parameters without embeddings as the ladder's 1b, of width 1536, and heads 128 wide."""
    width, layers, glu = SHAPES[shape]
    model = built(f"{family}-1b-{shape}")
    counted = model.num_parameters() - model.num_embedding_parameters()
    own = {"llama": layers * 4 * width + 2 * width}
    own["cosformer2"] = layers * (2 * width * 128 + 7 * width) + 128 * (width + 1) + 2 * width
    assert counted == layers * (4 * width**2 + 3 * width * glu) + own[family]
    ladder = built(f"{family}-1b")
    assert counted == pytest.approx(ladder.num_parameters() - ladder.num_embedding_parameters(), rel=0.04)
    assert {mixer.head_dim for mixer in model.mixers()[::2]} == {128}


@pytest.mark.parametrize("size", HGRN2_PAPER)
def test_hgrn2_paper_parameters(size: str):
    layers, width, glu, billions = HGRN2_PAPER[size]
    model = built(f"hgrn2-{size}")
    assert model.num_parameters() == layers * (4 * width**2 + 3 * width * glu + width) + 50_272 * width
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=0.5e-3 if billions < 2 else 0.5e-2)
    assert {mixer.head_dim for mixer in model.mixers()[::2]} == {128}
    assert model.config.num_layers == layers


def test_hgrn2_wikitext103():
    """44.66M as published; biases in every linear layer and affine norms, none of them under weight decay."""
    model = built("hgrn2-44m-wikitext103")
    assert model.num_parameters() == 44_661_244
    assert model.config.embedding_scale == pytest.approx(512**0.5, rel=1e-15)
    mixer, glu = model.mixers()[0], model.mixers()[1]
    assert isinstance(glu, GLU)
    assert glu.activation == "none"
    assert (mixer.config.query_activation, mixer.config.value_activation) == ("sigmoid", "silu")
    first = {n.removeprefix("blocks.0.sublayers."): p for n, p in model.named_parameters() if n.startswith("blocks.0.")}
    vectors = {name: tuple(p.shape) for name, p in first.items() if not name.endswith(("qfv.weight", "up.weight"))}
    assert vectors == {
        "0.norm.weight": (512,),
        "0.norm.bias": (512,),
        "0.mixer.qfv.bias": (3, 512),
        "0.mixer.out.weight": (512, 512),
        "0.mixer.out.bias": (512,),
        "0.mixer.out.norm_weight": (512,),
        "0.mixer.out.norm_bias": (512,),
        "1.norm.weight": (512,),
        "1.norm.bias": (512,),
        "1.mixer.up.bias": (2, 1365),
        "1.mixer.down.weight": (512, 1365),
        "1.mixer.down.bias": (512,),
    }
    decayed = {n for n, _ in model.named_parameters()} - model.no_decay_names()
    assert {name.split(".mixer.")[-1] for name in decayed} == {
        "embedding.weight",
        "qfv.weight",
        "out.weight",
        "up.weight",
        "down.weight",
    }


def test_llama_with_grouped_heads():
    model = built("llama-1b-gqa")
    assert model.num_parameters() == 1_100_048_384
    assert {mixer.local_groups for mixer in model.mixers()[::2]} == {4}
    assert {type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__} == {"RMSNorm"}
