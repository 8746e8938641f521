"""Counts of the cosFormer2 presets against the scaling-laws paper's; operations and memory by formula."""

from fractions import Fraction

import pytest

from megalin.layers.mixers.cosformer2 import TPE, CosFormer2
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_names

# Blocks, width, GLU width, and Table 7's millions without the embedding; its 3b row fits no rule (see its note).
SIZES = {
    "70m": (6, 512, 1536, 21.3),
    "160m": (12, 768, 2048, 87.5),
    "410m": (25, 1024, 2816, 328.0),
    "1b": (32, 1536, 4096, 919.1),
    "3b": (35, 2560, 6912, 2799.0),
    "7b": (32, 4096, 11008, 6511.0),
}
WIDTH_OF_A_HEAD = 128
PETAFLOPS = {"70m": 0.5, "160m": 2.3, "410m": 8.1, "1b": 22.7, "3b": 67.4, "7b": 155.6}
"""PFLOPs of a step of 480 sequences of 8192 tokens without the embedding, in Table 7."""
LENGTH, SEQUENCES = 8192, 480


def test_every_preset_of_the_family_is_checked_here():
    names = [name for name in preset_names() if name.startswith("cosformer2-")]
    shapes = ["1b-1792x24", "1b-2048x18", "1b-3072x8"]  # in test_ladder_presets.py
    assert names == [f"cosformer2-{size}" for size in [*SIZES, *shapes, "tiny"]]


@pytest.mark.parametrize("size", SIZES)
def test_counts_are_the_papers(size):
    num_layers, width, glu, published = SIZES[size]
    preset = load_preset(f"cosformer2-{size}")
    model = LanguageModel(preset.model)
    count = model.num_parameters() - model.num_embedding_parameters()
    layer = 4 * width**2 + 3 * width * glu + 2 * width * WIDTH_OF_A_HEAD + 7 * width
    assert count == num_layers * layer + WIDTH_OF_A_HEAD * (width + 1) + 2 * width
    assert model.num_embedding_parameters() == 100_280 * width
    assert (round(count / 1e6, 1) == published) == (size != "3b")
    assert f"{count / 1e6:.1f}M" in preset.note
    assert f"{published:.1f}M" in preset.note


@pytest.mark.parametrize("size", SIZES)
def test_heads_work_and_state(size):
    num_layers, width, glu, _ = SIZES[size]
    model = LanguageModel(load_preset(f"cosformer2-{size}").model)
    mixers = [mixer for mixer in model.mixers() if isinstance(mixer, CosFormer2)]
    assert len(mixers) == num_layers
    assert {(mixer.head_dim, mixer.key_dim) for mixer in mixers} == {(WIDTH_OF_A_HEAD, 2 * WIDTH_OF_A_HEAD)}
    (layer,) = model.input_mixers()
    assert isinstance(layer, TPE)
    assert layer.num_decays == WIDTH_OF_A_HEAD
    # h x 256 x 128 a layer and d x 128 once, in fp32
    assert model.state_bytes() == (num_layers * 256 * width + 128 * width) * 4
    # per token: twice the weights of every matrix, the scan of chunks of 64, TPE, twice the tied table
    matrices = 2 * num_layers * (4 * width**2 + 3 * width * glu + 2 * width * WIDTH_OF_A_HEAD)
    scan = num_layers * width * (2 * 64 * 3 + 4 * 256)
    assert model.forward_flops(4096) == matrices + scan + 4 * width * 128 + 2 * 100_280 * width


@pytest.mark.parametrize("size", SIZES)
def test_operations_of_a_step_are_the_papers(size):
    """72 n l d^2 (1 + 3/4h + 23/72d) + 12 n d^2 / h for n tokens equals the model's count but for three terms.

    The paper takes the GLU to be 8 d / 3 wide, without rounding up, and scans in blocks of d / h = 128 tokens, where
    megalin's have 64: both are added to its count here. It adds element-wise operations (23 d a block), which are not
    counted here. TPE's 4 d 128 are in both, LRPE's rotation is in neither.
    """
    num_layers, width, glu, _ = SIZES[size]
    heads, tokens = width // WIDTH_OF_A_HEAD, SEQUENCES * LENGTH
    base, tpe = 72 * num_layers * width**2, 12 * width * WIDTH_OF_A_HEAD
    matmuls, others = Fraction(3, 4 * heads), Fraction(23, 72 * width)
    published = Fraction(str(PETAFLOPS[size]))
    assert abs(tokens * (base * (1 + matmuls + others) + tpe) / 10**15 - published) <= Fraction("0.05")
    model = LanguageModel(load_preset(f"cosformer2-{size}").model)
    counted = model.training_flops(LENGTH) - 3 * model.embedding.logits_flops()
    rounded_glu = 18 * num_layers * width * glu - 48 * num_layers * width**2
    shorter_chunks = 3 * num_layers * (2 * 64 - 2 * WIDTH_OF_A_HEAD) * (2 * width + width)
    assert counted - rounded_glu - shorter_chunks == base * (1 + matmuls) + tpe
