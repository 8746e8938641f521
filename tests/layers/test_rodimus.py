"""Rodimus: initial values, precision, and refused sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.layers.mixers.rodimus import Rodimus
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import HIDDEN_SIZE, RODIMUS, build, make_inputs, model
from tests.numerics import relative_error

INNER = 2 * HIDDEN_SIZE


def rodimus(**fields) -> Rodimus:
    """The first mixer of an initialized model of two blocks."""
    return build(model({"sublayers": [RODIMUS | fields], "repeat": 2}, output_init="scaled_by_depth")).mixers()[0]


def test_initial_values_equal_those_of_the_released_code():
    mixer = rodimus(state_size=64, input_gate_rank=16)
    for matrix in (mixer.qk, mixer.gates, mixer.input_gate_down, mixer.input_gate_up):
        bound = 2.0**-2.5 * math.sqrt(6.0 / sum(matrix.shape))
        assert 0.98 * bound < matrix.abs().max() <= bound
    selection, temperature = mixer.full_precision.gate_bias.chunk(2)
    strength = functional.softplus(selection)
    assert 0.001 <= strength.min() < 0.002 < 0.05 < strength.max() <= 0.1001
    assert 0.06 < torch.sigmoid(temperature).min() < 0.15 < 0.8 < torch.sigmoid(temperature).max() <= 0.9
    assert mixer.full_precision.feed_through.eq(1).all()
    assert mixer.input_gate_bias.eq(0).all()
    assert mixer.conv.weight.abs().max() <= 0.5
    assert mixer.conv.bias.std() > 0.2


def test_the_output_matrix_shrinks_with_the_number_of_sublayers():
    assert rodimus().out.weight.std().item() == pytest.approx(0.2 / math.sqrt(2), rel=0.05)
    glu = {"type": "glu", "intermediate_size": 200}
    mixers = build(model({"sublayers": [RODIMUS, glu, glu], "repeat": 3}, output_init="scaled_by_depth")).mixers()
    assert mixers[1].down.weight.std().item() == pytest.approx(0.2 / 3, rel=0.05)
    assert mixers[1].up.weight.std().item() == pytest.approx(0.2, rel=0.05)


def test_the_rank_of_the_input_gate_follows_the_width():
    for width, rank in ((768, 16), (2048, 32)):
        built = LanguageModel(model({"sublayers": [{"type": "rodimus"}]}, hidden_size=width))
        assert built.mixers()[0].input_gate_down.shape == (rank, 2 * width)


def test_an_odd_width_is_rounded_up():
    built = LanguageModel(model({"sublayers": [{"type": "rodimus"}]}, hidden_size=50))
    assert built.mixers()[0].inner == 104


def test_a_width_that_the_axis_does_not_divide_is_refused():
    message = (
        r"the inner width of model\.layers\.0\.sublayers\.0, twice model\.hidden_size, = 96 is not divisible by "
        r"parallel\.tp = 5"
    )
    tp = TensorParallel(Axis("tp", 5))
    with pytest.raises(ConfigError, match=message):
        LanguageModel(model({"sublayers": [RODIMUS]}, vocab_size=640), tp)


def test_gate_vectors_stay_out_of_weight_decay():
    names = build(model({"sublayers": [RODIMUS]})).no_decay_names()
    prefix = "blocks.0.sublayers.0.mixer"
    assert {f"{prefix}.full_precision.{name}" for name in ("gate_bias", "feed_through")} <= names
    assert {f"{prefix}.conv.bias", f"{prefix}.input_gate_bias", f"{prefix}.out.norm_weight"} <= names
    assert f"{prefix}.qk" not in names


def in_bf16(built: LanguageModel) -> LanguageModel:
    """The model with its weights in the dtypes of a bf16 run."""
    precise = {id(p) for module in built.full_precision_modules() for p in module.parameters()}
    for parameter in built.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in precise else torch.bfloat16)
    return built


def test_the_residual_stream_can_have_a_wider_dtype_than_mixer_inputs():
    residuals, inputs, tokens = [], [], make_inputs().tokens
    for dtype in ("compute", "float32"):
        built = in_bf16(build(model({"sublayers": [RODIMUS]}, residual_dtype=dtype)))
        built.blocks[0].register_forward_hook(lambda _, args, output: residuals.append((args[0].dtype, output.x.dtype)))
        built.mixers()[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
        output = built(tokens, labels=tokens)
        output.token_losses.sum().backward()
        assert output.logits.dtype == torch.bfloat16
        assert all(p.grad.isfinite().all() for p in built.parameters())
        assert built.step(tokens[:, 0], built.initial_state(len(tokens))).logits.dtype == torch.bfloat16
    # Of the forward and of the decoding step, each.
    assert residuals == [(torch.bfloat16, torch.bfloat16)] * 2 + [(torch.float32, torch.float32)] * 2
    assert inputs == [torch.bfloat16] * 4


def test_bf16_decoding_equals_the_bf16_forward():
    """The recurrent states stay in fp32, so only the order of sums differs."""
    built, tokens = build(model({"sublayers": [RODIMUS], "repeat": 2})), make_inputs().tokens
    exact = built(tokens, state=built.initial_state(len(tokens), dtype=torch.float64)).logits[..., :380]
    in_bf16(built)
    state, logits = built.initial_state(len(tokens)), []
    whole = built(tokens, state=state).logits[..., :380]
    for t in range(tokens.shape[1]):
        output = built.step(tokens[:, t], state)
        state = output.state
        logits.append(output.logits[..., :380])
    assert all(tensor.dtype == torch.float32 for layers in state.blocks for layer in layers for tensor in layer)
    assert relative_error(torch.cat(logits, dim=1), exact) <= 2 * relative_error(whole, exact)
