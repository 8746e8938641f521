"""Parameters, operations and memory of the Mamba-1 presets, by formula."""

import pytest

from megalin.layers.mixers.mamba1 import Mamba1
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_names

# Width, blocks, and all parameters of the released models of these names.
SIZES = {
    "130m": (768, 24, 129_135_360),
    "370m": (1024, 48, 371_516_416),
    "790m": (1536, 48, 793_204_224),
    "1.4b": (2048, 48, 1_372_178_432),
}
VOCAB_SIZE, STATES, TAPS = 50_280, 16, 4


def test_every_preset_of_the_family_is_checked_here():
    names = [name for name in preset_names() if name.startswith("mamba1-")]
    assert names == [f"mamba1-{size}" for size in SIZES]


@pytest.mark.parametrize("size", SIZES)
def test_counts_work_and_state(size):
    width, layers, released = SIZES[size]
    model = LanguageModel(load_preset(f"mamba1-{size}").model)
    inner, rank = 2 * width, width // 16
    assert len(model.mixers()) == layers
    assert {type(mixer) for mixer in model.mixers()} == {Mamba1}
    matrices = 3 * width * inner + inner * (2 * rank + 2 * STATES)
    vectors = inner * (TAPS + 1 + STATES + 2) + width  # convolution, A, bias of the step and D; norm
    assert model.num_parameters() == layers * (matrices + vectors) + VOCAB_SIZE * width + width
    assert model.num_parameters() == released
    # N a channel and 3 tokens of the convolution, in fp32
    assert model.state_bytes() == layers * inner * (STATES + TAPS - 1) * 4
    assert model.forward_flops(4096) == layers * 2 * matrices + 2 * VOCAB_SIZE * width
