"""The recurrences of Rodimus' Table 4 as configs of `recurrence`, against their definition token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalin.errors import ConfigError
from megalin.layers.decay import decay_slopes
from megalin.layers.recurrence_scan import Recurrence
from megalin.model.language_model import LanguageModel
from megalin.ops.gates.decay_gates import decay_gates
from megalin.parallel.config import ParallelConfig
from megalin.verify.case import make_case
from tests.cases import HIDDEN_SIZE, LENGTH, VOCAB_SIZE, attention, build, make_inputs, model, reference, weighted_loss
from tests.numerics import assert_close, relative_error
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

BOUND = 1e-12
PLAIN = {"norm": "srmsnorm"}
TABLE_4: dict[str, dict[str, Any]] = {
    "linear-attention": {"activation": "1+elu", "head_norm": "none", "gate": "none", "query_scale": "one"},
    "linear-attention-gates": {"key_gate_rank": 3, "value_gate_rank": 5, "activation": "silu", "gate": "sigmoid"},
    "steep": {"decay": "fixed", "slopes": "no_temperature", "head_norm": "srmsnorm", "conv_width": 3, "rope_base": 50.0}
    | {"positions": "rope"},
    "retnet": {"decay": "fixed", "positions": "rope", "expand_v": 2.0, "value_gate_rank": 3},
    "gretnet": {"decay": "scalar", "positions": "rope", "expand_v": 2.0},
    "mamba2": {"decay": "scalar", "decay_gate": "step", "input_gate": "selection", "conv_width": 4, "expand_k": 0.5},
    "scalar-complement": {"decay": "scalar", "input_gate": "complement", "decay_rank": 3, "key_gate_rank": 2},
    "rwkv6": {"decay": "vector", "decay_gate": "double_exp", "decay_rank": 4},
    "hgrn2": {"decay": "vector", "temperature": 1.0, "input_gate": "complement", "keys": "ones", "activation": "silu"},
    "hgrn2-conv": {"decay": "vector", "input_gate": "complement", "keys": "ones", "conv_width": 2},
    "hawk": {"num_heads": HIDDEN_SIZE, "decay": "vector", "decay_gate": "power", "input_gate": "root_complement"}
    | {"keys": "ones"},
    "power-scalar": {"decay": "scalar", "decay_gate": "power", "input_gate": "root_complement", "decay_rank": 3},
    "step-vector": {"decay": "vector", "decay_gate": "step", "input_gate": "complement"},
    "rodimus": {"decay": "vector", "decay_gate": "tempered", "input_gate": "selection", "value_gate_rank": 3},
    "decay-of-values": {"decay": "vector", "decay_side": "values", "decay_rank": 3, "conv_width": 3},
    "decay-of-both": {"decay": "vector", "decay_side": "both", "temperature": 2.0, "expand_v": 2.0}
    | {"decay_gate": "tempered", "input_gate": "selection"},
    "rodimus-low-rank": {"decay": "vector", "decay_gate": "tempered", "input_gate": "selection", "decay_rank": 3},
}
MODELS = {name: model({"sublayers": [attention("recurrence", **PLAIN, **keys)]}) for name, keys in TABLE_4.items()}
FAST = ("linear-attention-gates", "retnet", "gretnet", "mamba2", "hgrn2", "rodimus", "hawk", "decay-of-both")
every_row = pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TABLE_4]
)


@every_row
def test_forward_and_all_gradients_equal_the_definition(name: str):
    built, inputs = build(MODELS[name]), make_inputs()
    output = built(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
    weighted_loss(output.token_losses).backward()
    weights = {key: p.detach().clone().requires_grad_() for key, p in built.named_parameters()}
    logits, losses = reference(MODELS[name], weights, inputs)
    weighted_loss(losses).backward()
    assert relative_error(output.logits[..., :VOCAB_SIZE], logits) <= BOUND
    expected = {key: weight.grad for key, weight in weights.items()}
    assert_close({key: p.grad for key, p in built.named_parameters()}, expected, BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE_4)
def test_a_prompt_and_steps_equal_the_forward(name: str):
    built, tokens = build(MODELS[name]), make_inputs().tokens
    with torch.no_grad():
        expected = built(tokens).logits
        output = built(tokens[:, :19], state=built.initial_state(len(tokens), dtype=torch.float64))
        state, logits = output.state, [output.logits]
        for t in range(19, LENGTH):
            output = built.step(tokens[:, t], state)
            state = output.state
            logits.append(output.logits)
    assert relative_error(torch.cat(logits, dim=1)[..., :VOCAB_SIZE], expected[..., :VOCAB_SIZE]) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "data_size"),
    [({"tp": 2, "sequence_parallel": True}, 2), ({"tp": 2, "cp": 3}, 1), ({"cp": 4}, 1)],
    ids=["tp2 sequence parallel dp2", "tp2 cp3", "cp4"],
)
def test_every_row_agrees_with_one_process(axes: dict[str, Any], data_size: int):
    """Losses, all gradients, and the weights after a step."""
    options: dict[str, Any] = {"dtype": "float64", "full": True, "length": LENGTH, "recompute": False}
    cases = [make_case(each, ParallelConfig(**axes), data_size=data_size, **options) for each in MODELS.values()]
    found = run_ranks(data_size * axes.get("tp", 1) * axes.get("cp", 1), verify_all, cases)[0]
    assert all(errors for errors in found)
    assert [str(error) for errors in found for error in errors if not error.passed] == []


@pytest.mark.parametrize("decay", ["fixed", "scalar"])
def test_values_beyond_the_kernels_are_cut_into_slices(decay: str):
    """Slices of wide heads give the numbers of the heads."""
    widest = 112 if decay == "scalar" else 168
    wide = Recurrence(decay, 6, widest * 2, 0.5, 16)
    q, k, v = (torch.randn(1, 20, 2, n, dtype=torch.float64) for n in (6, 6, 2 * widest))
    rates = torch.rand(1, 20, 2, dtype=torch.float64) if decay == "scalar" else torch.rand(2, dtype=torch.float64)
    rates, of_first = (-rates, -rates[:, 0]) if decay == "scalar" else (rates, rates)
    options: dict[str, Any] = {"initial_state": None, "shard": None, "document_ids": None}
    found = wide.scan(q, k, v, rates, **options)
    step = wide.step(q[:, 0], k[:, 0], v[:, 0], of_first, found.state, in_place=False)
    assert wide.slices == 2
    assert found.state.shape == (1, *wide.state_shape(2)) == (1, 4, 6, widest)
    for part in range(2):
        columns, alone = slice(part * widest, (part + 1) * widest), wide._replace(value_dim=widest)
        assert alone.slices == 1
        expected = alone.scan(q, k, v[..., columns], rates, **options)
        after = alone.step(q[:, 0], k[:, 0], v[:, 0, :, columns], of_first, expected.state, in_place=False)
        assert torch.equal(found.output[..., columns], expected.output)
        assert torch.equal(step.output[..., columns], after.output)


def test_retnets_slopes_are_those_of_its_equation():
    expected = [-torch.log(torch.tensor(1.0 - 2.0 ** (-5 - h), dtype=torch.float64)) for h in range(4)]
    found = decay_slopes("retnet", layer=3, num_layers=7, num_heads=4)
    assert relative_error(found, torch.stack(expected)) <= 1e-14


@pytest.mark.parametrize(
    ("form", "tied"),
    [
        *(("sigmoid", "complement"), ("double_exp", "complement"), ("step", "selection")),
        *(("power", "root_complement"), ("double_exp", "root_complement")),
    ],
)
def test_gates_and_gradients_are_finite_and_exact_for_any_logit(form: Any, tied: Any):
    logit = torch.tensor([-200.0, -20.0, 0.0, 3.0, 80.0, 2000.0]).view(-1, 1).requires_grad_()
    rate = torch.full((1, 1), 2.0) if form in ("step", "power") else None
    gates = decay_gates(logit[:, None], form=form, tied=tied, temperature=2.0, rate=rate)
    wide = decay_gates(logit[:, None].double(), form=form, tied=tied, temperature=2.0, rate=rate)
    (gates.log_decay.exp().sum() + gates.key_gate.sum()).backward()
    assert logit.grad.isfinite().all()
    assert gates.log_decay.dtype == torch.float32
    assert relative_error(gates.key_gate.double(), wide.key_gate) <= 1e-6
    if tied == "complement" and form == "sigmoid":  # 1 - sigmoid(80)^(1/2) = exp(-80) / 2 does not cancel to zero
        assert gates.key_gate[4].item() == pytest.approx(math.exp(-80.0) / 2, rel=1e-5, abs=0.0)
    if form == "power":  # nor does the root of 1 - A^2: at g = -20, of 4 exp(-20)
        assert gates.key_gate[1].item() == pytest.approx(2.0 * math.exp(-10.0), rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"slopes": "alibi", "temperature": 2.0, "input_gate": "complement", "rope_base": 5.0, "keys": "ones"},
            r'(?s)slopes = "alibi" has no meaning with decay = "none".*temperature = 2\.0 has no meaning with decay = '
            r'"none", which.*input_gate = .complement. has no meaning.*rope_base = 5\.0 has no meaning with positions',
        ),
        (
            {"decay": "scalar", "decay_gate": "tempered", "temperature": 2.0},
            r'(?s)temperature = 2\.0 has no meaning with decay_gate = "tempered".*"tempered" is a vector; use.*has '
            r'input_gate = "selection" alone, not "none"',
        ),
        (
            {"decay": "vector", "input_gate": "selection"},
            r'input_gate = "selection" has no meaning with decay_gate = "sigmoid"; use "step"',
        ),
        (
            {"decay": "vector", "decay_side": "values", "decay_gate": "step", "input_gate": "complement"},
            r'(?s)decay_gate = "step" has no meaning with decay_side = "values": keys.*input_gate = "complement" has',
        ),
        ({"decay": "fixed", "decay_side": "both"}, r'decay_side = "both" needs decay = "vector", not "fixed"; use it'),
        ({"decay": "fixed", "keys": "ones"}, r'keys = "ones" leaves keys without input; give input_gate or key_gate'),
    ],
)
def test_keys_that_contradict_each_other_are_refused_together(keys: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        model({"sublayers": [attention("recurrence", **keys)]})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"expand_k": 0.3, "expand_v": 0.8},
            r"(?s)num_heads = 12 does not divide model\.hidden_size = 48 times expand_k = 0\.3, which is 14\.4, into "
            r"whole heads.*times expand_v = 0\.8",
        ),
        ({"expand_k": 0.25, "positions": "rope"}, r"expand_k = 0\.25 leaves 1 keys a head, but rotary positions need"),
    ],
)
def test_widths_that_do_not_fit_the_heads_are_refused(keys: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        LanguageModel(model({"sublayers": [attention("recurrence", **keys)]}))
