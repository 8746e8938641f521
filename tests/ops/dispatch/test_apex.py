"""Use of an installed apex, by a stand-in with its published names: when it runs, and the reasons when it does not."""

import sys
from unittest.mock import patch

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.dispatch import backend
from megalin.ops.dispatch.apex import unavailable_reason
from megalin.ops.norms.layer_norm import layer_norm, layer_norm_reference
from megalin.ops.norms.rms_norm import rms_norm, rms_norm_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.dispatch.apex_stand_in import installing, write_another_project, write_apex


@pytest.fixture
def installed(monkeypatch, tmp_path):
    with installing(monkeypatch, tmp_path / "site") as install:
        yield install


def test_apex_is_known_by_its_parts_without_an_import(installed, tmp_path):
    with patch.object(sys, "path", []):
        assert unavailable_reason("amp_C") == "apex is not installed"
    site = write_apex(tmp_path)
    with patch.object(sys, "path", [str(site)]):
        assert unavailable_reason("amp_C") == ""
        (site / "amp_C.py").unlink()
        assert "without its extension amp_C; build it with" in unavailable_reason("amp_C")
    assert "apex" not in sys.modules


def test_the_other_project_of_that_name_is_reported(installed):
    installed(write_another_project)
    assert "is not NVIDIA's (the one on PyPI is an unrelated project)" in unavailable_reason("amp_C")
    with pytest.raises(KernelError, match=r"layer_norm: the apex kernel cannot run: the installed package apex is not"):
        layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(4), eps=1e-5, backend="apex")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "reference"), [(layer_norm, layer_norm_reference), (rms_norm, rms_norm_reference)])
def test_norms_of_apex_are_the_references(installed, op, reference, dtype):
    installed(write_apex)
    generator = torch.Generator().manual_seed(0)
    names = ("x", "weight", "bias") if op is layer_norm else ("x", "weight")
    shapes = {"x": (3, 5, 64), "weight": (64,), "bias": (64,)}
    inputs = {name: torch.randn(shapes[name], generator=generator).to(dtype) for name in names}
    found = outputs_and_gradients(lambda **given: [op(**given, eps=1e-5, backend="apex")], inputs)
    truth = outputs_and_gradients(lambda **given: [reference(**given, eps=1e-5)], inputs)
    assert_close(found, truth, 2e-2 if dtype is torch.bfloat16 else 1e-6)
    assert backend.used()[op.__name__] == backend.Choice("apex", "")


def test_weights_of_another_dtype_are_left_to_others(installed):
    installed(write_apex)
    x, weight = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4)
    with pytest.raises(KernelError, match=r"rms_norm: the apex kernel does not take a weight of dtype torch\.float32"):
        rms_norm(x, weight, eps=1e-5, backend="apex")
    with pytest.raises(
        KernelError, match=r"layer_norm: the apex kernel does not take a weight of dtype torch\.float32"
    ):
        layer_norm(x, weight, weight, eps=1e-5, backend="apex")


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        (("weight.float(), eps)", "weight.float() + 0.1, eps)"), "self-test: output 0 is off by"),
        (("def fused_rms_norm_affine", "def another"), "self-test: ImportError: cannot import name"),
    ],
    ids=["wrong", "older"],
)
def test_apex_that_does_not_agree_is_refused(installed, replace, reason):
    installed(write_apex, replace=replace)
    with pytest.raises(KernelError, match=f"rms_norm: the apex kernel cannot run: {reason}"):
        rms_norm(torch.ones(2, 4), torch.ones(4), eps=1e-5, backend="apex")


def test_absence_changes_no_choice_but_its_reason(monkeypatch):
    monkeypatch.setattr(backend, "_missing", lambda name, device: "")
    for op, order in (("rms_norm", ("triton", "apex")), ("layer_norm", ("apex",))):
        monkeypatch.setitem(backend._kernels, op, backend._kernels[op]._replace(order=order))
    with backend.assume_kernels():
        assert backend.choose("rms_norm", "auto", "cpu") == "triton"
        assert backend.choose("layer_norm", "auto", "cpu") == "reference"
