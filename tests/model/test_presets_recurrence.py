"""Parameters, operations and memory of the GLA and RetNet presets, by formula."""

from __future__ import annotations

import pytest

from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_names

# Blocks, width, heads, GLU, vocabulary, and all parameters in millions; untied above 25m.
SIZES = {
    "gla-25m": (8, 512, 4, 1408, 8192, 30),
    "gla-340m": (24, 1024, 4, 2816, 32000, 374),
    "gla-1.3b": (24, 2048, 4, 5632, 32000, 1366),
    "retnet-25m": (8, 512, 4, 768, 8192, 30),
    "retnet-340m": (24, 1024, 4, 1536, 32000, 380),
    "retnet-1.3b": (24, 2048, 8, 2816, 32000, 1352),
}
RANK = 16


def test_every_preset_of_both_families_is_checked_here():
    names = [name for name in preset_names() if name.startswith(("gla-", "retnet-"))]
    assert sorted(names) == sorted(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_counts_work_and_state(name: str):
    layers, width, heads, glu, vocab_size, millions = SIZES[name]
    model = LanguageModel(load_preset(name).model)
    keys, values = (width // 2, width) if name.startswith("gla") else (width, 2 * width)
    matrices = width * (2 * keys + 3 * values) + 3 * width * glu
    vectors = values // heads + 2 * width  # the norm of a head, and those of the sub-layers
    if name.startswith("gla"):
        matrices, vectors = matrices + RANK * (width + keys), vectors + keys
    tables = vocab_size * width * (1 if name.endswith("25m") else 2)
    assert model.num_parameters() == layers * (matrices + vectors) + tables + width
    assert round(model.num_parameters() / 1e6) == millions
    assert model.state_bytes() == layers * keys * values // heads * 4
    # Values of more than 256 a head are slices with scores of their own.
    slices = 2 if name.startswith("retnet") and values // heads > 256 else 1
    scan = 2 * 64 * (slices * keys + values) + 4 * keys * values // heads
    assert model.forward_flops(4096) == layers * (2 * matrices + scan) + 2 * vocab_size * width


@pytest.mark.parametrize("family", ["gla", "retnet"])
def test_the_small_size_suits_the_comparison_at_25m(family: str):
    model = LanguageModel(load_preset(f"{family}-25m").model)
    assert 25e6 <= model.num_parameters() - model.num_embedding_parameters() <= 27e6
    assert model.config.hidden_size == 512
