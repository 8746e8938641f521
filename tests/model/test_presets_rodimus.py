"""Counts of the Rodimus presets against the paper's: the sizes, and every entry of its ablation tables."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from megalin.config import parse
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_names, preset_table


class Size(NamedTuple):
    """Size of a preset, and its million parameters by the paper's own formula."""

    num_layers: int
    width: int
    vocab_size: int
    millions: float


SIZES = {
    "125m": Size(24, 768, 50277, 134.5),
    "350m": Size(48, 1024, 50277, 382.6),
    "760m": Size(48, 1536, 50277, 802.8),
    "1.3b": Size(48, 2048, 50277, 1375.5),
    "460m": Size(48, 1024, 126340, 460.5),
    "1.4b": Size(48, 2048, 126340, 1531.3),
}
# Millions at 125m and 350m: Table 12 by the rank of the input gate, with n = 16; Table 13 by n, with rank 16.
TABLE_12 = {
    1: (126.3, 360.8),
    2: (126.4, 361.0),
    4: (126.5, 361.4),
    8: (126.8, 362.2),
    16: (127.4, 363.7),
    32: (128.6, 366.9),
    64: (130.9, 373.2),
    128: (135.7, 385.8),
}
TABLE_13 = {16: (127.4, 363.7), 32: (129.8, 370.0), 64: (134.5, 382.6), 128: (143.9, 407.8), 256: (162.8, 458.1)}


# Blocks, width, vocabulary, attention heads, GLU width, millions.
PLUS = {
    "125m": (12, 768, 50277, 12, 1024, 136.7),
    "350m": (24, 1024, 50277, 16, 1368, 395.0),
    "760m": (24, 1536, 50277, 16, 2048, 840.0),
    "1.3b": (24, 2048, 50277, 32, 2736, 1447.9),
    "470m": (24, 1024, 126340, 8, 1368, 474.5),
    "1.6b": (24, 2048, 126340, 16, 2736, 1606.8),
}


WIKITEXT = "44m-wikitext103"
# Transformer++ of Table 8 and of WikiText-103: blocks, width, heads, vocabulary, GLU width, millions.
TRANSFORMERS = {
    WIKITEXT: (6, 512, 4, 50265, 1368, 44.6),
    "125m": (12, 768, 12, 50277, 2048, 123.6),
    "350m": (24, 1024, 16, 50277, 2736, 353.9),
    "760m": (24, 1536, 16, 50277, 4096, 756.8),
    "1.3b": (24, 2048, 32, 50277, 5464, 1311.4),
}


def block_parameters(width: int, *, state_size: int = 64, rank: int = 16) -> int:
    """Parameters of a block, of the published sizes by default."""
    inner = 2 * width
    gates = 4 * inner * state_size + 2 * state_size + 2 * inner * rank + inner
    return 6 * width**2 + gates + 5 * inner + inner + inner + width


def test_every_preset_of_the_family_is_checked_here():
    names = [name for name in preset_names() if name.startswith("rodimus")]
    names = [name for name in names if not name.endswith("-tiny")]
    assert names == [f"rodimus-{size}" for size in [*SIZES, WIKITEXT]] + [
        f"rodimus_plus-{size}" for size in [*PLUS, WIKITEXT]
    ]


@pytest.mark.parametrize("size", SIZES)
def test_counts_and_state(size: str):
    num_layers, width, vocab_size, millions = SIZES[size]
    preset = load_preset(f"rodimus-{size}")
    model = LanguageModel(preset.model)
    rank = max(width // 64, 16)
    expected = num_layers * block_parameters(width, rank=rank) + vocab_size * width + width
    assert model.num_parameters() == expected
    assert round(expected / 1e6, 1) == millions
    assert model.state_bytes() == 4 * num_layers * 2 * width * (64 + 3)
    assert preset.model.output_std == pytest.approx(0.02 / num_layers**0.5)


@pytest.mark.parametrize("size", PLUS)
def test_rodimus_plus_counts_and_state(size: str):
    num_layers, width, vocab_size, num_heads, glu, millions = PLUS[size]
    preset = load_preset(f"rodimus_plus-{size}")
    model = LanguageModel(preset.model)
    head = width // num_heads
    attention, channel = 3 * width**2 + width * head + width, 3 * width * glu + width
    block = block_parameters(width, rank=max(width // 64, 16)) + attention + channel
    expected = num_layers * block + vocab_size * width + width
    assert model.num_parameters() == expected
    assert round(expected / 1e6, 1) == millions
    # the state, the convolution's inputs, and keys, values and validity of 1,023 tokens
    assert model.state_bytes() == 4 * num_layers * (2 * width * (64 + 3) + 1023 * (head + width + 1))
    assert preset.model.output_std == pytest.approx(0.02 / (3 * num_layers) ** 0.5)
    assert [sublayer.residual for sublayer in preset.model.layers[0].sublayers] == ["add", "two_hop", "add"]


def test_wikitext103_counts():
    """The text's "about 44M" is neither: 46.7M and 47.7M, which the notes say."""
    block = block_parameters(512, state_size=32)
    attention, channel = 3 * 512**2 + 512 * 128 + 512, 3 * 512 * 688 + 512
    embedding = 50265 * 512 + 512
    for name, expected in (("rodimus", 12 * block), ("rodimus_plus", 6 * (block + attention + channel))):
        preset = load_preset(f"{name}-{WIKITEXT}")
        assert LanguageModel(preset.model).num_parameters() == expected + embedding
        assert f"{(expected + embedding) / 1e6:.1f}M" in preset.note


@pytest.mark.parametrize("size", TRANSFORMERS)
def test_transformer_counts(size: str):
    num_layers, width, num_heads, vocab_size, glu, millions = TRANSFORMERS[size]
    preset = load_preset(f"transformerpp-{size}")
    model = LanguageModel(preset.model)
    expected = num_layers * (4 * width**2 + 3 * width * glu + 2 * width) + vocab_size * width + width
    assert model.num_parameters() == expected
    assert f"{expected / 1e6:.1f}M" == f"{millions}M"
    assert f"{millions}M" in preset.note
    assert {mixer.head_dim for mixer in model.mixers()[::2]} == {width // num_heads}


def test_notes_have_the_counts_where_names_disagree():
    assert "0.461B" in load_preset("rodimus-460m").note
    assert "1.531B" in load_preset("rodimus-1.4b").note
    assert "0.474B" in load_preset("rodimus_plus-470m").note
    assert "1.607B" in load_preset("rodimus_plus-1.6b").note


@pytest.mark.parametrize(
    ("fields", "millions"),
    [({"state_size": 16, "input_gate_rank": rank}, millions) for rank, millions in TABLE_12.items()]
    + [({"state_size": n, "input_gate_rank": 16}, millions) for n, millions in TABLE_13.items()],
)
def test_every_entry_of_tables_12_and_13(fields: dict[str, int], millions: tuple[float, float]):
    for size, published in zip(("125m", "350m"), millions, strict=True):
        table = preset_table(f"rodimus-{size}")
        layers = [{"repeat": SIZES[size].num_layers, "sublayers": [{"type": "rodimus"} | fields]}]
        model = LanguageModel(parse(ModelConfig, table | {"layers": layers}, "ablation"))
        assert round(model.num_parameters() / 1e6, 1) == published
