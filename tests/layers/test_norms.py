"""Norms of the residual stream."""

import pytest
import torch

from megalin.errors import ConfigError
from megalin.layers.norms import LayerNorm, MaxNorm, RMSNorm, SRMSNorm, UncenteredLayerNorm, build_norm
from megalin.model.language_model import LanguageModel
from megalin.ops.norms.max_norm import max_norm
from megalin.ops.norms.srmsnorm import srmsnorm
from megalin.parallel.initialisation import init_weights
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import attention, model
from tests.numerics import assert_close, outputs_and_gradients


def test_norm_holds_no_parameters_and_uses_its_eps():
    norm, x = SRMSNorm(0.5), torch.randn(2, 3, 8)
    assert not list(norm.parameters())
    assert torch.equal(norm(x), srmsnorm(x, eps=0.5))
    assert not torch.equal(norm(x), SRMSNorm(1e-6)(x))


@pytest.mark.parametrize(
    ("kind", "expected", "names"),
    [
        ("srmsnorm", SRMSNorm, []),
        ("rmsnorm", RMSNorm, ["weight"]),
        ("layernorm", LayerNorm, ["weight", "bias"]),
        ("maxnorm", MaxNorm, []),
        ("uncentered_layernorm", UncenteredLayerNorm, ["weight"]),
    ],
)
def test_the_name_of_a_norm_sets_its_parameters(kind, expected, names):
    norm = build_norm(kind, 8, 1e-5, TensorParallel())
    assert isinstance(norm, expected)
    assert [name for name, _ in norm.named_parameters()] == names
    assert all(parameter.shape == (8,) for parameter in norm.parameters())


def initialized(kind: str, eps: float) -> torch.nn.Module:
    norm = build_norm(kind, 8, eps, TensorParallel())
    norm.to_empty(device="cpu")
    init_weights(norm, 0)
    return norm


def test_rmsnorm_and_its_gradients_equal_the_definition():
    norm = initialized("rmsnorm", 0.3).double()
    inputs = {"x": torch.randn(2, 3, 8).double(), "weight": torch.randn(8).double()}

    def actual(x, weight):
        return [torch.func.functional_call(norm, {"weight": weight}, (x,))]

    def definition(x, weight):
        return [weight * x / (x.square().mean(-1, keepdim=True) + 0.3).sqrt()]

    assert_close(outputs_and_gradients(actual, inputs), outputs_and_gradients(definition, inputs), 1e-14)


def test_uncentered_layernorm_and_its_gradients_equal_the_definition():
    norm = initialized("uncentered_layernorm", 0.3).double()
    inputs = {"x": torch.randn(2, 3, 8).double(), "weight": torch.randn(8).double()}

    def actual(x, weight):
        return [torch.func.functional_call(norm, {"weight": weight}, (x,))]

    def definition(x, weight):
        return [weight * x / (x.abs().sum(-1, keepdim=True) / 8 + 0.3)]

    assert_close(outputs_and_gradients(actual, inputs), outputs_and_gradients(definition, inputs), 1e-14)


def test_maxnorm_uses_its_eps():
    x = torch.randn(2, 3, 8)
    for eps in (1e-3, 0.5):
        assert torch.equal(build_norm("maxnorm", 8, eps, TensorParallel())(x), max_norm(x, eps=eps))


def test_layernorm_and_its_gradients_equal_the_definition():
    norm = initialized("layernorm", 0.3).double()
    inputs = {
        "x": torch.randn(2, 3, 8).double() + 2.0,
        "weight": torch.randn(8).double(),
        "bias": torch.randn(8).double(),
    }

    def actual(x, weight, bias):
        return [torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))]

    def definition(x, weight, bias):
        centred = x - x.mean(-1, keepdim=True)
        return [weight * centred / (centred.square().mean(-1, keepdim=True) + 0.3).sqrt() + bias]

    assert_close(outputs_and_gradients(actual, inputs), outputs_and_gradients(definition, inputs), 1e-14)


@pytest.mark.parametrize(("kind", "moment"), [("rmsnorm", 2), ("layernorm", 2), ("uncentered_layernorm", 1)])
def test_norms_start_without_effect_and_compute_wide(kind, moment):
    """With bf16 weights and inputs only the result is rounded."""
    norm = initialized(kind, 1e-5)
    x = (torch.randn(2, 3, 8) * 100.0 + 30.0).bfloat16()
    wide = norm(x.float())
    assert wide.abs().pow(moment).mean().item() == pytest.approx(1.0, rel=1e-3)
    assert torch.equal(norm.bfloat16()(x), wide.bfloat16())


@pytest.mark.parametrize("kind", ["maxnorm", "uncentered_layernorm"])
def test_danets_norms_are_not_for_sharded_heads(kind):
    """No collective reduces a largest or a mean magnitude over tp; on the residual stream these norms work."""
    with pytest.raises(ConfigError, match=rf"sublayers\.0\.output_norm = '{kind}': input should be 'srmsnorm'"):
        model({"sublayers": [attention("tnl", output_norm=kind)]})
    LanguageModel(model({"sublayers": [attention("tnl", norm=kind)]}))
