"""Counts of the presets against those of the paper and of the released checkpoints."""

import time

import pytest

from megalin.errors import ConfigError
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_names, preset_table

# TransNormerLLM Table 10, with the 385M row as computed by the table's rule (see the preset's note).
TABLE_10 = {
    "385m": (24, 1024, 2816, 384_937_984),
    "1b": (16, 2048, 5632, 992_165_888),
    "3b": (32, 2560, 6912, 2_876_006_400),
    "7b": (30, 4096, 11008, 6_780_547_072),
    "13b": (36, 5120, 13824, 12_620_195_840),
    "65b": (72, 8192, 22016, 63_528_009_728),
    "175b": (88, 12288, 32768, 173_356_498_944),
}
RELEASED = {
    "385m-64k": (24, 1024, 2816, 398_984_192),
    "1b-64k": (16, 2048, 5632, 1_020_266_496),
    "7b-64k": (30, 4096, 11008, 6_836_719_616),
}
# Mix, which Tables 1 to 8 print as 385M and 1B: the vocabulary of Table 10 and the positions of the text.
MIX = {"385m-mix": (24, 1024, 2816, 384_926_720), "1b-mix": (16, 2048, 5632, 992_151_552)}


def test_every_preset_is_checked_here():
    names = [name for name in preset_names() if name.startswith("transnormerllm-")]
    assert names == [f"transnormerllm-{size}" for size in ["tiny", *TABLE_10, *RELEASED, *MIX]]


@pytest.mark.parametrize("size", TABLE_10)
def test_table_10_counts(size):
    layers, width, glu, published = TABLE_10[size]
    preset = load_preset(f"transnormerllm-{size}")
    model = LanguageModel(preset.model)
    assert model.num_parameters() == published
    assert model.num_parameters() == layers * (5 * width**2 + 3 * width * glu) + 50272 * width + layers * width // 2
    assert model.num_embedding_parameters() == 50272 * width
    assert preset.model.num_layers == layers
    assert {mixer.config.lrpe for mixer in model.mixers()[::2]} == {"rotation"}
    assert ("384,974,848" in preset.note) == (size == "385m")


@pytest.mark.parametrize("size", RELEASED)
def test_released_counts(size):
    layers, width, _, published = RELEASED[size]
    model = LanguageModel(load_preset(f"transnormerllm-{size}").model)
    assert model.num_parameters() == published
    assert model.num_embedding_parameters() == 64000 * width
    assert [mixer.config.lrpe for mixer in model.mixers()[::2]] == ["cosine"] + [None] * (layers - 1)


@pytest.mark.parametrize("size", MIX)
def test_mix_counts_and_decays(size):
    layers, width, glu, count = MIX[size]
    model = LanguageModel(load_preset(f"transnormerllm-{size}").model)
    assert model.num_parameters() == count
    assert count == layers * (5 * width**2 + 3 * width * glu) + 50272 * width + width
    mixers = [mixer.config for mixer in model.mixers()[::2]]
    assert [mixer.lrpe for mixer in mixers] == ["cosine"] + [None] * (layers - 1)
    assert {mixer.decay for mixer in mixers} == {"paper"}


@pytest.mark.parametrize("size", [*TABLE_10, *RELEASED, *MIX])
def test_head_width_embedding_scale_and_state(size):
    layers, width, glu, _ = (TABLE_10 | RELEASED | MIX)[size]
    preset = load_preset(f"transnormerllm-{size}")
    model = LanguageModel(preset.model)
    assert preset.model.embedding_scale == pytest.approx(width**0.5, rel=1e-15)
    assert {mixer.head_dim for mixer in model.mixers()[::2]} == {128}
    # h x 128 x 128 a layer in fp32, twice that where cosine LRPE doubles the keys
    doubled = 0 if size in TABLE_10 else 1
    assert model.state_bytes() == (layers + doubled) * width * 128 * 4
    # per token: twice the weights of every matrix, the scan of chunks of 64, twice the tied table
    scan = width * (2 * 64 * 2 + 4 * 128) * layers + doubled * width * (2 * 64 + 4 * 128)
    matrices = 2 * layers * (5 * width**2 + 3 * width * glu)
    assert model.forward_flops(4096) == matrices + scan + 2 * preset.model.vocab_size * width


def test_the_largest_builds_within_seconds():
    start = time.process_time()
    model = LanguageModel(load_preset("transnormerllm-175b").model)
    assert model.num_parameters() + model.forward_flops(2048) + model.state_bytes() > 0
    assert time.process_time() - start < 5
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("load", [load_preset, preset_table])
def test_unknown_preset_suggests_one(load):
    with pytest.raises(
        ConfigError, match=r"preset 'transnormerllm-1B'.*no such preset; did you mean 'transnormerllm-1b'"
    ):
        load("transnormerllm-1B")
