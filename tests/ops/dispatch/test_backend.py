"""Choice of a kernel backend: order, refusals, self-tests, and a constant for torch.compile."""

import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint

from megalin.errors import KernelError
from megalin.ops.dispatch import backend
from megalin.ops.dispatch.self_test import compare
from megalin.ops.norms.srmsnorm import srmsnorm


@pytest.fixture
def op(monkeypatch):
    """An op whose Triton kernel passes its self-test and whose CUDA kernel fails, on a device with both."""
    backend._register_all()  # once, before the test replaces the registry
    monkeypatch.setattr(backend, "_kernels", {})
    monkeypatch.setattr(backend, "_used", {})
    monkeypatch.setattr(backend, "_missing", lambda name, device: "")
    backend.decide.cache_clear()
    backend._unavailable_reason.cache_clear()
    backend.register("op", ("cuda", "triton"), lambda name, device: "off by 1" if name == "cuda" else "")
    yield "op"
    backend.decide.cache_clear()
    backend._unavailable_reason.cache_clear()


def test_auto_falls_back_loudly_from_a_kernel_that_fails_its_self_test(op, caplog):
    with caplog.at_level(logging.INFO):
        assert backend.choose(op, "auto", "cuda") == "triton"
    assert "op: triton (cuda: off by 1)" in caplog.text


def test_auto_takes_the_reference_where_no_kernel_runs(op, monkeypatch, caplog):
    monkeypatch.setattr(backend, "_missing", lambda name, device: "no compiler")
    assert backend.choose(op, "auto", "cuda") == "reference"
    assert "no kernel can run here; using the slower PyTorch reference" in caplog.text


def test_an_op_without_kernels_of_its_own_is_quiet_where_apex_is_not(op, monkeypatch, caplog):
    monkeypatch.setitem(backend._kernels, "op", backend.Kernel(("apex",), lambda name, device: ""))
    monkeypatch.setattr(backend, "_missing", lambda name, device: "apex is not installed")
    with caplog.at_level(logging.INFO):
        assert backend.choose(op, "auto", "cuda") == "reference"
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_self_test_is_not_part_of_what_its_caller_recomputes(op, monkeypatch):
    """The first call of an op may be in a checkpoint, whose hooks would run the caller again in the test's backward."""

    def self_test(name, device):
        x = torch.ones(3, requires_grad=True)
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
        return "" if gradient.eq(2).all() else "wrong"

    monkeypatch.setitem(backend._kernels, "op", backend.Kernel(("triton",), self_test))
    calls = []

    def block(x):
        calls.append(backend.choose(op, "triton", "cuda"))
        return x * x

    x = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert calls == ["triton", "triton"]
    assert x.grad.eq(2).all()


def test_assumed_kernels_are_not_reported(op):
    before = backend.used()
    with backend.assume_kernels():
        backend.report_choice(op, backend.Choice("triton", ""))
        backend.choose(op, "auto", "cuda")
    assert backend.used() == before


def test_auto_takes_the_reference_on_a_cpu_and_for_arguments_that_no_kernel_takes(op):
    assert backend.choose(op, "auto", "cpu") == "reference"
    assert backend.choose(op, "auto", "cuda", "dtype torch.float64") == "reference"


def test_explicit_kernels_raise_with_the_reason(op):
    with pytest.raises(KernelError, match="op: the cuda kernel cannot run: off by 1; use backend"):
        backend.choose(op, "cuda", "cuda")
    with pytest.raises(KernelError, match=r"op: the triton kernel does not take dtype torch\.float64; use"):
        backend.choose(op, "triton", "cuda", "dtype torch.float64")


def test_what_one_kernel_does_not_take_goes_to_the_next_and_raises_for_that_one(op, monkeypatch, caplog):
    monkeypatch.setitem(backend._kernels, "op", backend.Kernel(("cuda", "triton"), lambda name, device: ""))
    assert backend.choose(op, "auto", "cuda") == "cuda"
    with caplog.at_level(logging.INFO):
        assert backend.choose(op, "auto", "cuda", "", {"cuda": "fp16"}) == "triton"
    assert "op: triton (cuda: does not take fp16)" in caplog.text
    assert backend.choose(op, "triton", "cuda", "", {"cuda": "fp16"}) == "triton"
    with pytest.raises(KernelError, match="op: the cuda kernel does not take fp16; use"):
        backend.choose(op, "cuda", "cuda", "", {"cuda": "fp16"})


def test_choices_are_listed_with_their_reasons(op, monkeypatch):
    assert backend.used() == {}
    backend.choose(op, "auto", "cuda")
    assert backend.used() == {"op": backend.Choice("triton", "cuda: off by 1")}
    backend.choose(op, "auto", "cuda", "dtype torch.float64")
    assert backend.used() == {"op": backend.Choice("reference", "no kernel takes dtype torch.float64")}
    monkeypatch.setenv("MEGALIN_KERNELS", "reference")
    backend.choose(op, "auto", "cuda")
    assert backend.used() == {"op": backend.Choice("reference", "MEGALIN_KERNELS")}


def test_the_environment_chooses_where_the_caller_does_not(op, monkeypatch):
    monkeypatch.setenv("MEGALIN_KERNELS", "triton,op=reference")
    assert backend.choose(op, "auto", "cuda") == "reference"
    assert backend.choose(op, "triton", "cuda") == "triton"
    monkeypatch.setenv("MEGALIN_KERNELS", "op=cuda")
    with pytest.raises(KernelError, match="op: the cuda kernel cannot run: off by 1"):
        backend.choose(op, "auto", "cuda")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tritn", "MEGALIN_KERNELS: 'tritn' is not a backend; did you mean 'triton'"),
        ("opp=cuda", "MEGALIN_KERNELS: 'opp' is not an op with kernels; did you mean 'op'"),
    ],
)
def test_the_environment_is_checked(op, monkeypatch, value, message):
    monkeypatch.setenv("MEGALIN_KERNELS", value)
    with pytest.raises(KernelError, match=message):
        backend.choose(op, "auto", "cpu")


def test_the_environment_may_name_ops_of_other_models():
    """Ops that are not imported yet are allowed: one line serves all runs of a cluster."""
    code = (
        "from megalin.ops.dispatch import backend; from megalin.ops.norms import srmsnorm;"
        " print(backend.requested('srmsnorm'))"
    )
    environment = os.environ | {"MEGALIN_KERNELS": "tpe=reference,srmsnorm=cuda"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cuda"


def test_a_kernel_that_does_not_compile_is_passed_over(op, monkeypatch):
    from triton.errors import TritonError

    def self_test(name, device):
        if name == "cuda":
            raise TritonError("out of registers")
        return ""

    monkeypatch.setitem(backend._kernels, "op", backend.Kernel(("cuda", "triton"), self_test))
    assert backend.decide(op, "cuda") == backend.Choice("triton", "cuda: self-test: TritonError: out of registers")


def test_a_choice_is_a_constant_to_the_compiler(op):
    def function(x):
        return x.sin() if backend.choose(op, "auto", x.device.type) == "reference" else x.cos()

    x = torch.randn(4)
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(compiled(x), x.sin())


def test_an_op_refuses_a_dtype_without_a_kernel():
    with pytest.raises(KernelError, match=r"srmsnorm: the triton kernel does not take dtype torch\.float64"):
        srmsnorm(torch.ones(2, 3, dtype=torch.float64), eps=1e-6, backend="triton")


def test_a_self_test_finds_wrong_values_wrong_gradients_and_chance():
    x = torch.randn(5, 7)

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.square()

        @staticmethod
        def backward(ctx, dy):
            return dy

    assert compare(torch.square, torch.square, [x]) == ""
    assert "output 0 is off" in compare(lambda x: x.square() * 1.1, torch.square, [x])
    assert "gradient 0 is off" in compare(WrongGradient.apply, torch.square, [x])
    noise = lambda x: x.square() + 1e-6 * torch.rand(5, 7)  # noqa: E731
    assert "differs between two equal calls" in compare(noise, torch.square, [x])
    assert "output 0 is off by nan" in compare(lambda x: x.square() * float("nan"), torch.square, [x])
