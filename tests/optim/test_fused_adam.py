"""AdamW of apex, through a stand-in with its published behaviour, against torch's weights, moments and step counts."""

import functools

import pytest
import torch
from torch import nn

from megalin.errors import KernelError
from megalin.ops.dispatch import backend
from megalin.optim.adamw import build_optimizer, set_learning_rate
from megalin.optim.config import OptimizerConfig
from megalin.optim.fused_adam import build_plain_optimizer
from tests.ops.dispatch.apex_stand_in import installing, write_apex

CPU = torch.device("cpu")
CONFIG = OptimizerConfig(lr=0.1, betas=[0.9, 0.95], weight_decay=0.1)
STEPS = 4


@pytest.fixture
def apex(monkeypatch, tmp_path):
    """Selects apex; yields a function that installs its stand-in."""
    monkeypatch.setenv("MEGALIN_KERNELS", "adamw=apex")
    with installing(monkeypatch, tmp_path / "site") as install:
        yield functools.partial(install, write_apex)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))


def _plain(model, *, group_by_group=False):
    return build_plain_optimizer(
        model, CONFIG, no_decay=["1.weight", "1.bias"], device=CPU, group_by_group=group_by_group
    )


def _train(model, optimizer, steps):
    for step in steps:
        set_learning_rate(optimizer, 0.1 / (step + 1))
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def _state(model, optimizer):
    return {
        name: [parameter.detach(), *(optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step"))]
        for name, parameter in model.named_parameters()
    }


def _assert_same(found, truth):
    for name, tensors in truth.items():
        for tensor, expected in zip(found[name], tensors, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)


def test_steps_of_apex_are_those_of_torch(apex):
    apex()
    model, truth = _model(), _model()
    optimizer = _plain(model)
    assert type(optimizer).__name__ == "FusedAdam"
    assert backend.used() == {"adamw": backend.Choice("apex", "MEGALIN_KERNELS")}
    expected = build_optimizer(truth, CONFIG, no_decay=["1.weight", "1.bias"])
    _train(model, optimizer, range(STEPS))
    _train(truth, expected, range(STEPS))
    _assert_same(_state(model, optimizer), _state(truth, expected))


def test_steps_go_on_from_a_loaded_count(apex):
    apex()
    model, truth = _model(), _model()
    expected = build_optimizer(truth, CONFIG, no_decay=["1.weight", "1.bias"])
    _train(truth, expected, range(STEPS))
    optimizer = _plain(model)
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), truth.parameters(), strict=True):
            parameter.copy_(source)
            optimizer.state[parameter] = {key: value.clone() for key, value in expected.state[source].items()}
    _train(model, optimizer, range(STEPS, STEPS + 2))
    _train(truth, expected, range(STEPS, STEPS + 2))
    _assert_same(_state(model, optimizer), _state(truth, expected))


@pytest.mark.parametrize(
    "replace",
    [(' + group["weight_decay"] * p', ""), ("/ (1 - beta2**count)", ""), ('.sqrt() + group["eps"]', "")],
    ids=["no decay", "no correction", "no root"],
)
def test_another_rule_does_not_pass_the_self_test(apex, replace):
    apex(replace=replace)
    with pytest.raises(KernelError, match="adamw: the apex kernel cannot run: self-test: weights or moments differ"):
        _plain(_model())


def test_groups_without_parameters_are_left_to_torch(apex, monkeypatch):
    apex()
    with pytest.raises(KernelError, match="adamw: the apex kernel does not take groups without parameters"):
        _plain(_model(), group_by_group=True)
    monkeypatch.delenv("MEGALIN_KERNELS")
    assert isinstance(_plain(_model(), group_by_group=True), torch.optim.AdamW)
    assert backend.used()["adamw"].reason == "no kernel takes groups without parameters"


def test_torch_steps_where_apex_is_absent(monkeypatch):
    monkeypatch.setattr(backend, "_used", {})
    assert isinstance(_plain(_model()), torch.optim.AdamW)
    assert backend.used() == {"adamw": backend.Choice("reference", "device cpu")}
