"""Construction of mixers: sizes that do not fit, and the initial values of parameters and buffers."""

from typing import Any

import pytest
import torch

from megalin.errors import ConfigError
from megalin.layers.config import MixerConfig, config_class, mixer_types
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import CASES, HYBRID, NAMES, TOY, attention, build, model
from tests.encoder_cases import CASES as ENCODERS


def test_the_package_lists_its_mixers():
    assert {"glu", "hgrn2", "tnl", "transnormer"} <= set(mixer_types())
    assert "base" not in mixer_types()


def test_every_mixer_has_a_case():
    blocks = [block for case in (*CASES, *ENCODERS) for _, block in case.model.blocks()]
    assert set(mixer_types()) <= {sublayer.type for block in blocks for sublayer in block.sublayers}


def config_of(kind: str) -> type[MixerConfig]:
    """The config class of a mixer type."""
    return config_class(kind)


def fields_of(kind: str) -> dict[str, Any]:
    """The config fields of a mixer type, by name."""
    return config_of(kind).model_fields


WITH_HEADS = [
    kind
    for kind in mixer_types()
    if {"num_heads", "chunk_size"} <= fields_of(kind).keys() and config_of(kind).attends_to == "earlier"
]
"""Recurrent mixers of decoders whose heads share the hidden size."""


@pytest.mark.parametrize("heads", [5, 7, 96])
@pytest.mark.parametrize("kind", WITH_HEADS)
def test_heads_that_do_not_divide_the_width_are_refused(kind, heads):
    config = model({"sublayers": [TOY]}, {"sublayers": [attention(kind, num_heads=heads)]})
    with pytest.raises(
        ConfigError,
        match=rf"model\.layers\.1\.sublayers\.0\.num_heads = {heads} does not divide model\.hidden_size = 48",
    ):
        LanguageModel(config)


def test_rotation_needs_heads_of_an_even_width():
    config = model({"sublayers": [attention("transnormer", num_heads=16, lrpe="rotation")]})
    with pytest.raises(ConfigError, match="into heads of an even width"):
        LanguageModel(config)
    LanguageModel(model({"sublayers": [attention("transnormer", num_heads=16, lrpe="cosine")]}))


def sizes() -> list[tuple[str, str]]:
    """Integer fields of every mixer: heads, widths, windows, chunks."""
    found = []
    for kind in mixer_types():
        found += [(kind, name) for name, field in fields_of(kind).items() if field.annotation in (int, int | None)]
    return found


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(("kind", "field"), sizes())
def test_a_size_below_one_is_refused(kind, field, value):
    with pytest.raises(ConfigError, match=rf"sublayers\.0\.{field} = {value}: input should be greater than"):
        model({"sublayers": [{"type": kind, field: value}]})


class _Axis(TensorParallel):
    """A tensor-parallel axis without ranks: sizes are checked before any parameter is created."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.axis = Axis("tp", size)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        *(
            (
                attention(kind),
                r"model\.layers\.0\.sublayers\.0\.num_heads = 12 is not divisible by parallel\.tp = 8; "
                r"use tp 1, 2, 3, 4, 6, 12",
            )
            for kind in WITH_HEADS
        ),
        (
            {"type": "glu", "intermediate_size": 36},
            r"model\.layers\.0\.sublayers\.0\.intermediate_size = 36 is not divisible by parallel\.tp = 8",
        ),
    ],
)
def test_sizes_that_the_axis_does_not_divide_are_refused(mixer, message):
    with pytest.raises(ConfigError, match=message):
        LanguageModel(model({"sublayers": [mixer]}), _Axis(8))


def test_vocabulary_that_the_axis_does_not_divide_is_refused():
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size padded to a multiple of 128 = 384 is not divisible by parallel\.tp = 5"
    ):
        LanguageModel(HYBRID.model, _Axis(5))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_init_weights_writes_every_parameter_and_buffer(case):
    """Uninitialised memory holds NaN here (tests/conftest.py)."""
    empty = LanguageModel(case.model)
    empty.to_empty(device="cpu")
    assert all(parameter.isnan().all() for parameter in empty.parameters())
    for name, tensor in [*build(case.model).named_parameters(), *build(case.model).named_buffers()]:
        assert tensor.isfinite().all(), name


def test_seeds_and_names_give_different_weights():
    first, second = build(HYBRID.model), build(HYBRID.model, seed=1)
    glus = [m.down.weight for m in first.mixers() if hasattr(m, "down")]
    assert len(glus) == 3
    assert not any(torch.equal(a, b) for a in glus for b in glus if a is not b)
    assert not torch.equal(first.embedding.weight, second.embedding.weight)
    parts = first.mixers()[0].qkvu.weight
    assert not torch.equal(parts[0], parts[1])


def test_weights_have_the_configured_spread():
    table = build(HYBRID.model).embedding.weight[:380]
    assert table.std().item() == pytest.approx(0.2, rel=0.02)
    assert table.mean().item() == pytest.approx(0.0, abs=0.01)
