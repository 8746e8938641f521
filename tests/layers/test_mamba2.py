"""Mamba-2: groups of heads, sizes that do not fit, and ranges of its initial rates."""

import pytest
import torch
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import MAMBA2, VOCAB_SIZE, build, make_inputs, model, reference, weighted_loss
from tests.numerics import assert_close

GROUPS = model({"sublayers": [MAMBA2 | {"num_groups": 4}]})


def test_groups_of_heads_equal_their_definition():
    """Forward and gradients of packed documents, and both halves from a state."""
    built, inputs = build(GROUPS), make_inputs(20)
    output = built(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    weighted_loss(output.token_losses).backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in built.named_parameters()}
    logits, losses = reference(GROUPS, weights, inputs)
    weighted_loss(losses).backward()
    gradients = {name: p.grad for name, p in built.named_parameters()}
    assert_close(gradients, {name: weight.grad for name, weight in weights.items()}, 1e-11)
    state, parts = built.initial_state(len(inputs.tokens), dtype=torch.float64), []
    with torch.no_grad():
        for part in (slice(7), slice(7, 19), slice(19, None)):  # the last one has a single token
            found = built(inputs.tokens[:, part], document_ids=inputs.document_ids[:, part], state=state)
            parts.append(found.logits)
            state = found.state
    found = {"whole": output.logits[..., :VOCAB_SIZE], "parts": torch.cat(parts, dim=1)[..., :VOCAB_SIZE]}
    assert_close(found, dict.fromkeys(found, logits), 1e-11)


@pytest.mark.parametrize(
    ("groups", "tp", "message"),
    [
        (5, 1, r"sublayers\.0\.num_groups = 5 does not divide the 12 heads"),
        (2, 4, r"sublayers\.0\.num_groups = 2 is not divisible by parallel\.tp = 4"),
    ],
)
def test_groups_that_do_not_divide_are_refused(groups: int, tp: int, message: str):
    with pytest.raises(ConfigError, match=message):
        LanguageModel(model({"sublayers": [MAMBA2 | {"num_groups": groups}]}), TensorParallel(Axis("tp", tp)))


def test_head_width_that_does_not_divide_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"model\.layers\.0\.sublayers\.0\.head_dim = 7 does not divide twice model\.hidden_size = 96",
    ):
        LanguageModel(model({"sublayers": [MAMBA2 | {"head_dim": 7}]}))


def test_heads_that_the_axis_does_not_divide_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"the number of heads of model\.layers\.0\.sublayers\.0, .* = 12 is not divisible by parallel\.tp = 8",
    ):
        LanguageModel(model({"sublayers": [MAMBA2]}), TensorParallel(Axis("tp", 8)))


def test_rates_start_in_their_ranges():
    rates = build(model({"sublayers": [MAMBA2], "repeat": 8}), dtype=torch.float32).mixers()
    decay = torch.cat([mixer.full_precision.a_log.detach().exp() for mixer in rates])
    step = torch.cat([functional.softplus(mixer.full_precision.step_bias.detach()) for mixer in rates])
    for values, low, high in ((decay, 1.0, 16.0), (step, 1e-3, 1e-1)):
        assert values.min() >= low * (1 - 1e-5)
        assert values.max() <= high * (1 + 1e-5)
        assert values.max() > 5 * values.min()
