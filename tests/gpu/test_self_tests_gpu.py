"""Self-tests of every backend on a GPU, at the widths of presets: they pass, and find a tile that is wrong there."""

import logging

import pytest
import torch

from megalin._triton.dispatch.chips import capability
from megalin._triton.scans import vector_decay as kernels
from megalin.model.presets import load_preset, preset_families
from megalin.ops.dispatch import backend as backends
from megalin.ops.gates import forget_gate_cuda
from megalin.ops.scans import fixed_decay_cuda
from megalin.ops.scans.vector_decay import vector_decay_scan
from tools.kernel_launches.self_tests import cases_of


@pytest.fixture
def first_start(monkeypatch, tmp_path):
    """A process that has tested nothing, and finds no pass on the disk."""
    monkeypatch.setenv("MEGALIN_CACHE", str(tmp_path))
    monkeypatch.setattr(backends, "_tested", {})
    backends.decide.cache_clear()
    yield
    backends.decide.cache_clear()


def _backends(op, case):
    """Compiled backends of csrc/ that take a call."""
    found = [name for name in backends._kernels[op].order if name != "apex"]
    if op.endswith(("decay_scan", "gate_scan")) and "cuda" in found:
        sizes, unsupported = dict(case), forget_gate_cuda.limit if "gate" in op else fixed_decay_cuda.unsupported
        q, v = (torch.empty(1, 1, 1, sizes[width], dtype=torch.bfloat16, device="cuda") for width in "KV")
        found = [name for name in found if name != "cuda" or not unsupported(q, q, v)]
    return [name for name in found if not backends._missing(name, "cuda")]


@pytest.mark.parametrize("name", [names[0] for names in preset_families().values()])
@pytest.mark.usefixtures("first_start")
def test_kernels_pass_at_the_widths_of_presets(name):
    major, minor = capability()
    cases = cases_of(load_preset(name).model, 10 * major + minor, lambda launch: None)
    failed = [
        f"{op} {backend} {backends.describe(case)}: {reason}"
        for op, case in sorted(cases, key=str)
        for backend in _backends(op, case)
        if (reason := backends._unavailable_reason(op, backend, "cuda", case))
    ]
    assert failed == []


@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.usefixtures("first_start")
def test_a_tile_that_is_wrong_above_64_keys_is_found_there(key, monkeypatch, caplog):
    """The gradient of the keys, in the widths of HGRN2."""
    finish = kernels.finish_backward

    def without_the_last_tile(*arguments):
        dq, dk, *others = finish(*arguments)
        dk[..., 64:] = 0.0
        return dq, dk, *others

    monkeypatch.setattr(kernels, "finish_backward", without_the_last_tile)
    q, k, v = (torch.randn(1, 128, 4, width, device="cuda", dtype=torch.bfloat16) for width in (key, key, 128))
    with caplog.at_level(logging.WARNING):
        vector_decay_scan(q, k, v, -torch.rand(q.shape, device="cuda"))
    assert backends._used["vector_decay_scan"].backend == ("triton" if key == 64 else "reference")
    assert ("self-test: gradient 1 is off by" in caplog.text) == (key == 128)
