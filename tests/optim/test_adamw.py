"""AdamW in one process: its equation, the decay groups, and the bounds of its config."""

import tomllib

import pytest
import torch
from torch import nn

from megalin.config import dumps, parse
from megalin.errors import ConfigError
from megalin.optim.adamw import build_optimizer, set_learning_rate, step_or_skip
from megalin.optim.config import OptimizerConfig

CONFIG = OptimizerConfig(lr=0.1, betas=[0.8, 0.9], eps=1e-3, weight_decay=0.5)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()


def test_update_is_the_documented_equation():
    model = _model()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, CONFIG, {"0.bias"})
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step, rate in enumerate([0.05, 0.1], start=1):
        for name, parameter in model.named_parameters():
            gradient = parameter.grad = torch.randn_like(parameter)
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            decay = 0.0 if name == "0.bias" else 0.5
            ratio = (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-3)
            weights[name] = weights[name] - rate * (ratio + decay * weights[name])
        set_learning_rate(optimizer, rate)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-12, atol=1e-12)


def test_a_non_finite_update_changes_nothing():
    model = _model()
    optimizer = build_optimizer(model, CONFIG, ())
    kept = []
    for gradient, finite in ((1.0, True), (float("nan"), False)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        step_or_skip(torch.tensor(finite), optimizer)
        states = [tensor.clone() for state in optimizer.state.values() for tensor in state.values()]
        kept.append([*(parameter.detach().clone() for parameter in model.parameters()), *states])
    assert len(kept[0]) == 4 * 4
    for before, after in zip(*kept, strict=True):
        assert torch.equal(before, after)


def test_groups_carry_names_and_decay():
    optimizer = build_optimizer(_model(), CONFIG, {"0.bias", "1.weight", "1.bias", "on.another.stage"})
    found = [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(["0.weight"], 0.5), (["0.bias", "1.weight", "1.bias"], 0.0)]
    assert all(group["fused"] for group in optimizer.param_groups)


def test_frozen_parameters_are_left_out():
    model = _model()
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model, CONFIG, ())
    assert [group["param_names"] for group in optimizer.param_groups] == [["0.bias", "1.weight", "1.bias"]]


def test_config_survives_toml():
    for config in (CONFIG, OptimizerConfig(lr=1e-3, max_grad_norm=1.0)):
        assert parse(OptimizerConfig, tomllib.loads(dumps(config)), "dump") == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", float("nan")),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("max_grad_norm", 0.0),
        ("betas", [0.9]),
        ("betas", [0.9, 0.95, 0.99]),
        ("betas.1", 1.0),
    ],
)
def test_values_out_of_bounds_name_the_field(field, value):
    values = {"lr": 1e-3, **({"betas": [0.9, value]} if field == "betas.1" else {field: value})}
    with pytest.raises(ConfigError, match=rf"{field} = "):
        parse(OptimizerConfig, values, "run.toml")
