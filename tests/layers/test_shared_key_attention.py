"""Attention of Rodimus+: refused sizes, and its cache."""

import pytest
import torch

from megalin.errors import ConfigError
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import HIDDEN_SIZE, NUM_HEADS, SHARED_KEY, TOY, build, make_inputs, model

ATTENTION = SHARED_KEY | {"residual": "add"}


@pytest.mark.parametrize("heads", [7, 16])
def test_heads_need_an_even_width(heads: int):
    with pytest.raises(
        ConfigError,
        match=rf"sublayers\.0\.num_heads = {heads} does not divide model\.hidden_size = 48 into heads of an even width",
    ):
        LanguageModel(model({"sublayers": [ATTENTION | {"num_heads": heads}]}))


def test_heads_that_the_axis_does_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"sublayers\.0\.num_heads = 12 is not divisible by parallel\.tp = 8"):
        LanguageModel(model({"sublayers": [ATTENTION]}), TensorParallel(Axis("tp", 8)))


def test_a_window_holds_at_least_the_token_itself():
    with pytest.raises(ConfigError, match=r"window = 0: input should be greater than or equal to 1"):
        model({"sublayers": [ATTENTION | {"window": 0}]})


def test_a_two_hop_sublayer_needs_one_after_it():
    with pytest.raises(ConfigError, match="the last sub-layer has residual"):
        model({"sublayers": [SHARED_KEY]})
    model({"sublayers": [SHARED_KEY, TOY]})


def test_the_cache_marks_the_tokens_of_the_last_document():
    built, tokens = build(model({"sublayers": [ATTENTION]})), make_inputs().tokens[:1, :5]
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    k, v, cached = built(tokens, document_ids=documents, state=built.initial_state(1)).state.blocks[0][0]
    head = HIDDEN_SIZE // NUM_HEADS
    assert (k.shape, v.shape) == ((1, 6, head), (1, 6, NUM_HEADS, head))
    assert cached.tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]
    assert k[:, :3].eq(0).all()
    assert v[:, :3].eq(0).all()
    assert k[:, 3:].ne(0).all()
