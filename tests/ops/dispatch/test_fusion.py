"""Ops that a compiled block leaves to inductor."""

import pytest
import torch

from megalin.ops.dispatch.fusion import left_to_inductor


@pytest.mark.parametrize(
    ("backend", "variable", "left"),
    [("auto", "", True), ("triton", "", False), ("auto", "srmsnorm=triton", False), ("auto", "rms_norm=cuda", True)],
)
def test_auto_leaves_a_norm_of_a_compiled_block_to_inductor_unless_one_is_named(monkeypatch, backend, variable, left):
    monkeypatch.setenv("MEGALIN_KERNELS", variable)
    import megalin.ops.norms.rms_norm
    import megalin.ops.norms.srmsnorm  # noqa: F401

    def function(x):
        return x.sin() if left_to_inductor("srmsnorm", backend) else x.cos()

    x = torch.randn(4)
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(compiled(x), x.sin() if left else x.cos())
    assert torch.equal(function(x), x.cos())
