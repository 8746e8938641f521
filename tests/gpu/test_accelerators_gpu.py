"""Tests of installed NVIDIA apex, flash-attn and flash-attn-4 on a GPU: values, gradients, and runs that use them."""

import json
from functools import partial

import pytest
import torch

from megalin.ops.attention.causal import causal_attention
from megalin.ops.attention.flash import is_installed
from megalin.ops.dispatch import backend
from megalin.ops.dispatch.apex import unavailable_reason
from megalin.ops.documents import UNPACKED, find_documents
from megalin.ops.norms.layer_norm import layer_norm, layer_norm_reference
from megalin.ops.norms.rms_norm import rms_norm, rms_norm_reference
from megalin.parallel.process_group import process_group
from megalin.train.config import load_run_config
from megalin.train.loop import train
from tests.gpu.test_softmax_gpu import DOCUMENTS, make_documents, make_heads, unfused
from tests.model_runs import losses, write_config
from tests.ops.kernels import assert_as_good_as_the_reference

with_apex = pytest.mark.skipif(bool(unavailable_reason("amp_C")), reason="needs NVIDIA's apex")
with_packages = pytest.mark.parametrize(
    "package",
    [
        pytest.param(name.replace("-", "_"), marks=pytest.mark.skipif(not is_installed(name), reason=f"needs {name}"))
        for name in ("flash-attn", "flash-attn-4")
    ],
)


@with_apex
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 64), (130, 1000), (1024, 2048)])
@pytest.mark.parametrize(("op", "reference"), [(layer_norm, layer_norm_reference), (rms_norm, rms_norm_reference)])
def test_norms_of_apex(op, reference, shape, dtype):
    vectors = ("weight", "bias") if op is layer_norm else ("weight",)
    inputs = {"x": torch.randn(shape, device="cuda").to(dtype)}
    inputs |= {name: torch.randn(shape[-1:], device="cuda").to(dtype) for name in vectors}
    options = [partial(op, eps=1e-5, backend="apex"), partial(reference, eps=1e-5)]
    ours, truth = (lambda run=run, **given: [run(**given)] for run in options)
    assert_as_good_as_the_reference(ours, truth, inputs)


@with_packages
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("heads", "groups", "width"), [(3, 3, 128), (8, 2, 64)])
@pytest.mark.parametrize("length", [63, 1000, 1337])
def test_flash_attn(length, heads, groups, width, window, documents, package):
    inputs = make_heads(2, length, heads, groups, width, torch.bfloat16)
    ids = make_documents(documents, 2, length)
    known = UNPACKED if ids is None else find_documents(ids)

    def ours(q, k, v):
        return [causal_attention(q, k, v, documents=known, window=window, backend=package)]

    assert_as_good_as_the_reference(ours, partial(unfused, document_ids=ids, window=window), inputs)
    kind = "whole rows" if ids is None and window is None else "packed rows or windows"
    assert backend.used()[f"softmax_attention of {kind}"] == backend.Choice(package, "")


def run(folder, model, *overrides):
    """The losses of a small run, and the kernels listed in its kernels.json."""
    config = write_config(folder, model=model, train={"dtype": "bfloat16"}, checkpoint={"every_steps": 100})
    device = torch.device("cuda", torch.cuda.current_device())
    with process_group(device):
        train(load_run_config(config, overrides), device, folder / "run")
    return losses(folder / "run"), json.loads((folder / "run" / "kernels.json").read_text())


def one_block(**options):
    attention = {"type": "softmax", "num_heads": 2, **options}
    return {"hidden_size": 128, "layers": [{"sublayers": [attention, {"type": "glu", "intermediate_size": 48}]}]}


@with_apex
def test_a_run_that_deepspeed_updates_by_apex(monkeypatch, tmp_path):
    found = {}
    for name in ("apex", "reference"):
        monkeypatch.setenv(backend.VARIABLE, f"adamw={name}")
        found[name], kernels = run(tmp_path / name, one_block(), "train.engine=deepspeed", "parallel.zero=2")
        assert kernels["adamw"]["backend"] == name
    assert found["apex"] == pytest.approx(found["reference"], rel=2e-3)


@with_packages
def test_a_run_that_attends_by_flash_attn(tmp_path, package):
    ours, kernels = run(tmp_path / "ours", one_block(backend=package))
    theirs, _ = run(tmp_path / "theirs", one_block(backend="sdpa"))
    assert ours == pytest.approx(theirs, rel=5e-3)
    assert package in {choice["backend"] for choice in kernels.values()}
