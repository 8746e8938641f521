"""Parameters, operations and memory of the Mamba-2 presets, by formula."""

import pytest

from megalin.layers.mixers.mamba2 import Mamba2
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_names

# Blocks, width, and all parameters of the released models of these names, in millions.
SIZES = {"410m": (48, 1024, 368), "1b": (48, 2048, 1344), "3b": (64, 2560, 2703)}
VOCAB_SIZE, KEYS, VALUES, TAPS = 50_280, 128, 64, 4


def test_every_preset_of_the_family_is_checked_here():
    names = [name for name in preset_names() if name.startswith("mamba2-")]
    assert names == [f"mamba2-{size}" for size in [*SIZES, "tiny"]]


@pytest.mark.parametrize("size", SIZES)
def test_counts_work_and_state(size):
    num_layers, width, millions = SIZES[size]
    model = LanguageModel(load_preset(f"mamba2-{size}").model)
    inner, heads = 2 * width, 2 * width // VALUES
    assert len(model.mixers()) == num_layers
    assert {type(mixer) for mixer in model.mixers()} == {Mamba2}
    matrices = width * (2 * inner + 2 * KEYS + heads) + inner * width
    vectors = (inner + 2 * KEYS) * (TAPS + 1) + 3 * heads + inner + width  # convolutions, rates, both norms
    assert model.num_parameters() == num_layers * (matrices + vectors) + VOCAB_SIZE * width + width
    assert round(model.num_parameters() / 1e6) == millions
    # N P a head and 3 tokens of the convolutions, in fp32
    assert model.state_bytes() == num_layers * (inner * KEYS + (TAPS - 1) * (inner + 2 * KEYS)) * 4
    scan = 2 * 64 * KEYS + inner * (2 * 64 + 4 * KEYS)
    assert model.forward_flops(4096) == num_layers * (2 * matrices + scan) + 2 * VOCAB_SIZE * width
