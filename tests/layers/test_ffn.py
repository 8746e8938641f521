"""The feed-forward network: its activations against their definitions."""

import pytest

from tests.cases import FFN, VOCAB_SIZE, build, make_inputs, model, reference
from tests.numerics import assert_close


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "squared_relu"])
def test_activations_equal_their_definitions(activation: str):
    config, inputs = model({"sublayers": [FFN | {"activation": activation, "bias": True}]}), make_inputs()
    logits, _ = reference(config, dict(build(config).named_parameters()), inputs)
    found = build(config)(inputs.tokens, document_ids=inputs.document_ids).logits[..., :VOCAB_SIZE]
    assert_close({"logits": found}, {"logits": logits}, 1e-12)
