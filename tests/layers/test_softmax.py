"""Softmax mixer: sizes that do not fit, and a cache that grows with the length and drops other documents."""

import pytest
import torch

from megalin.errors import ConfigError
from megalin.generation import cast_weights
from megalin.generation.prefill import prefill, state_tensors
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import CASES, GLU, HIDDEN_SIZE, NAMES, build, make_inputs, model

GROUPED = CASES[NAMES.index("softmax-grouped")].model


def softmax(**fields):
    return model({"sublayers": [{"type": "softmax", **fields}, GLU]})


def test_key_value_heads_that_tp_does_not_divide_are_refused():
    """It is not enough that tp divides the query heads."""
    with pytest.raises(
        ConfigError,
        match=r"layers\.0\.sublayers\.0\.num_key_value_heads = 2 is not divisible by parallel\.tp = 4; use tp 1, 2",
    ):
        LanguageModel(softmax(num_heads=4, num_key_value_heads=2), TensorParallel(Axis("tp", 4)))
    LanguageModel(softmax(num_heads=4, num_key_value_heads=2), TensorParallel(Axis("tp", 2)))


def test_query_heads_that_tp_does_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"sublayers\.0\.num_heads = 6 is not divisible by parallel\.tp = 4"):
        LanguageModel(softmax(num_heads=6), TensorParallel(Axis("tp", 4)))


def test_key_value_heads_must_divide_the_heads():
    with pytest.raises(
        ConfigError,
        match=r"layers\.0\.sublayers\.0\.num_key_value_heads = 8 does not divide .*\.num_heads = 12; choose a div",
    ):
        LanguageModel(softmax(num_heads=12, num_key_value_heads=8))


@pytest.mark.parametrize("heads", [5, 16, 48, 96])
def test_heads_must_have_an_even_width(heads):
    with pytest.raises(
        ConfigError, match=rf"num_heads = {heads} does not divide model\.hidden_size = 48 into heads of"
    ):
        LanguageModel(softmax(num_heads=heads))


def test_the_cache_grows_by_keys_and_values_of_each_token():
    """The cache has 2 G K numbers and a marker per token, and is empty before the first."""
    built, tokens = build(GROUPED, dtype=torch.float32), make_inputs().tokens
    assert built.state_bytes() == 0
    numbers = 2 * HIDDEN_SIZE // 2 + 1
    output = built(tokens[:, :5], state=built.initial_state(4))
    for length in range(5, 9):
        for states in output.state.blocks:
            assert sum(tensor.numel() for tensor in states[0]) == 4 * length * numbers
            assert {tensor.dtype for tensor in states[0]} == {torch.float32}
        output = built.step(tokens[:, length], output.state)


@pytest.mark.parametrize("name", ["softmax", "softmax-grouped"])
def test_steps_in_a_reserved_cache_are_those_of_one_that_grows(name):
    built, prompts = build(CASES[NAMES.index(name)].model), [[5, 17, 300, 2, 5, 9, 120], [3], list(range(21))]
    growing = prefill(built, prompts)[1]
    fixed = built.reserve(prefill(built, prompts)[1], 21 + 12)
    contexts, tensors = built.step_contexts(in_place=True), state_tensors(fixed)[:-2]
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        tokens = torch.randint(0, 380, (3,), generator=generator)
        expected, found = built.step(tokens, growing), built.step(tokens, fixed, contexts)
        torch.testing.assert_close(found.logits[..., :380], expected.logits[..., :380], rtol=1e-12, atol=1e-12)
        growing, fixed = expected.state, found.state
    assert all(after is before for after, before in zip(state_tensors(fixed)[:-2], tensors, strict=True))
    for states in fixed.blocks:
        assert states[0][2].sum(1).tolist() == [7 + 12, 1 + 12, 21 + 12]


def test_a_forward_continues_a_reserved_cache():
    built, tokens = build(GROUPED), make_inputs().tokens
    output = built(tokens[:, :9], state=built.initial_state(4, dtype=torch.float64))
    found = built(tokens[:, 9:], state=built.reserve(output.state, 30))
    whole = built(tokens).logits[:, 9:]
    torch.testing.assert_close(found.logits[..., :380], whole[..., :380], rtol=1e-10, atol=1e-10)


def test_a_reserved_cache_has_the_dtype_of_the_weights():
    built = build(GROUPED, dtype=torch.float32)
    cast_weights(built, torch.bfloat16)
    state = built(make_inputs().tokens[:, :9], state=built.initial_state(4)).state
    for before, after in zip(state.blocks, built.reserve(state, 12).blocks, strict=True):
        for cache, reserved in zip(before[0][:2], after[0][:2], strict=True):
            assert (cache.dtype, reserved.dtype) == (torch.float32, torch.bfloat16)
            assert torch.equal(cache, reserved[:, :9].float())  # nothing is rounded
            assert reserved.shape[1] == 12


def test_a_zeroed_cache_has_no_effect():
    """The result is that of an empty cache, although keys of zero have a score too."""
    built, tokens = build(GROUPED), make_inputs().tokens
    state = built(tokens, state=built.initial_state(4, dtype=torch.float64)).state
    zeroed = [[tuple(torch.zeros_like(tensor) for tensor in states) for states in block] for block in state.blocks]
    after_nothing = built(tokens, state=built.initial_state(4, dtype=torch.float64)).logits
    after_zeros = built(tokens, state=state._replace(blocks=zeroed)).logits
    torch.testing.assert_close(after_zeros[..., :380], after_nothing[..., :380], rtol=1e-10, atol=1e-10)


def test_the_cache_drops_other_documents():
    built, inputs = build(GROUPED), make_inputs()
    output = built(inputs.tokens, document_ids=inputs.document_ids, state=built.initial_state(4, dtype=torch.float64))
    own = inputs.document_ids == inputs.document_ids[:, -1:]
    for keys, values, valid in (states[0] for states in output.state.blocks):
        assert torch.equal(valid > 0, own)
        assert all(cached[~own].eq(0).all() and cached[own].ne(0).all() for cached in (keys, values))
