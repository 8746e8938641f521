"""State ops against the final state of the scan over the same tokens: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalin.ops.scans.fixed_decay import decay_scan_recurrent
from megalin.ops.scans.states import decay_state, selected_state, tpe_state
from megalin.ops.scans.tpe import tpe_recurrent
from megalin.ops.scans.vector_decay import vector_decay_scan_recurrent
from tests.numerics import assert_close, outputs_and_gradients

BATCH, HEADS, KEY, VALUE = 2, 3, 4, 5
LENGTHS = (1, 63, 64, 65, 200)
BOUND = 1e-12


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def documents(length: int, packed: bool) -> Tensor | None:
    """Ids of a sample that ends in a long document, and of one whose last token is a document of its own."""
    if not packed:
        return None
    starts = torch.zeros(BATCH, length, dtype=torch.int32)
    starts[0, length // 3] = starts[1, length - 1] = 1
    return starts.cumsum(1)


every_length = pytest.mark.parametrize("length", LENGTHS)
every_packing = pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])


@every_length
@every_packing
@pytest.mark.parametrize("slopes", [None, (0.0, 0.05, 30.0)], ids=["no decay", "decay"])
def test_fixed_decay(length, packed, slopes):
    inputs = {"k": normal(BATCH, length, HEADS, KEY, seed=0), "v": normal(BATCH, length, HEADS, VALUE, seed=1)}
    s = None if slopes is None else torch.tensor(slopes, dtype=torch.float64)
    ids = documents(length, packed)
    expected = outputs_and_gradients(
        lambda k, v: [decay_scan_recurrent(torch.zeros_like(k), k, v, s, document_ids=ids).state], inputs
    )
    actual = outputs_and_gradients(lambda k, v: [decay_state(k, v, s, document_ids=ids)], inputs)
    assert_close(actual, expected, BOUND)


@every_length
@every_packing
@pytest.mark.parametrize("form", ["vector", "scalar", "scalar, one head of keys"])
def test_selected_decay(length, packed, form):
    key_heads, decays = 1 if "one head" in form else HEADS, KEY if form == "vector" else 1
    strength = torch.tensor([0.0, 0.1, 25.0], dtype=torch.float64)[:, None]  # the last head decays at once
    inputs = {
        "k": normal(BATCH, length, key_heads, KEY, seed=0),
        "v": normal(BATCH, length, HEADS, VALUE, seed=1),
        "g": -strength * normal(BATCH, length, HEADS, decays, seed=2).abs(),
    }
    ids = documents(length, packed)

    def final_state(k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
        k = k.expand(-1, -1, HEADS, -1)
        return [vector_decay_scan_recurrent(k, k, v, g.expand_as(k), document_ids=ids).state]

    actual = outputs_and_gradients(lambda k, v, g: [selected_state(k, v, g, document_ids=ids)], inputs)
    assert_close(actual, outputs_and_gradients(final_state, inputs), BOUND)


@every_length
@every_packing
def test_tpe(length, packed):
    inputs = {
        "x": normal(BATCH, length, VALUE, seed=0),
        "coefficients": normal(VALUE, 3, seed=1),
        "log_decay": torch.tensor([-1e-3, -0.2, -20.0], dtype=torch.float64),
    }
    ids = documents(length, packed)
    expected = outputs_and_gradients(lambda **leaves: [tpe_recurrent(**leaves, document_ids=ids).state], inputs)
    actual = outputs_and_gradients(lambda **leaves: [tpe_state(**leaves, document_ids=ids)], inputs)
    assert_close(actual, expected, BOUND)


def test_states_of_bf16_tokens_are_fp32():
    k, v = (normal(1, 8, HEADS, KEY, seed=seed).bfloat16() for seed in (0, 1))
    assert decay_state(k, v, torch.ones(HEADS)).dtype == torch.float32
    assert selected_state(k, v, -torch.ones(1, 8, HEADS, KEY)).dtype == torch.float32
    assert tpe_state(k[:, :, 0], torch.ones(KEY, 3), -torch.ones(3)).dtype == torch.float32


def test_another_document_does_not_move_a_bit():
    """State and gradients depend on the last token's document alone, to the last bit."""
    ids = documents(65, True)
    k, v = normal(BATCH, 65, HEADS, KEY, seed=0), normal(BATCH, 65, HEADS, VALUE, seed=1)
    g = -normal(BATCH, 65, HEADS, KEY, seed=2).abs()
    other = (ids != ids[:, -1:])[..., None, None]
    first, second = (
        outputs_and_gradients(
            lambda k, v, g: [selected_state(k, v, g, document_ids=ids), decay_state(k, v, None, document_ids=ids)],
            {"k": k + change * other, "v": v + change * other, "g": g - abs(change) * other},
        )
        for change in (0.0, 3.0)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
