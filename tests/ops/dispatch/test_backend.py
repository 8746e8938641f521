"""Choice of a kernel backend: order, refusals, self-tests, and a constant for torch.compile."""

import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint

from megalin.errors import KernelError
from megalin.ops.dispatch import backend, self_test_cache
from megalin.ops.dispatch.operands import static
from megalin.ops.dispatch.self_test import compare
from megalin.ops.norms.srmsnorm import srmsnorm


@pytest.fixture
def op(monkeypatch, tmp_path):
    """An op whose Triton kernel passes its self-test and whose CUDA kernel fails, on a device with both."""
    backend._register_all()  # once, before the test replaces the registry
    monkeypatch.setattr(backend, "_kernels", {})
    monkeypatch.setattr(backend, "_used", {})
    monkeypatch.setattr(backend, "_decided", {})
    monkeypatch.setattr(backend, "_tested", {})
    monkeypatch.setattr(backend, "_missing", lambda name, device: "")
    monkeypatch.setattr(self_test_cache, "_machine", lambda name: {"gpu": "a GPU"})
    monkeypatch.setenv("MEGALIN_CACHE", str(tmp_path / "cache"))
    backend.decide.cache_clear()
    backend.register("op", ("cuda", "triton"), lambda name, device, case: "off by 1" if name == "cuda" else "")
    yield "op"
    backend.decide.cache_clear()


@pytest.fixture
def tested(op, monkeypatch):
    """The cases of the self-tests that run of an op whose Triton kernel fails at a width of 96."""
    ran = []

    def self_test(name, device, case):
        ran.append(case["D"])
        return "off by 1" if case["D"] == 96 else ""

    monkeypatch.setitem(backend._kernels, op, backend.Kernel(("triton",), self_test))
    return ran


def restart():
    """Clears what this process has found, as a new one of the same machine starts."""
    backend.decide.cache_clear()
    backend._tested.clear()


def choose(width, **options):
    return backend.choose("op", "auto", "cuda", case=(("D", width), ("x", torch.bfloat16)), **options)


def test_auto_falls_back_loudly_from_a_kernel_that_fails_its_self_test(op, caplog):
    with caplog.at_level(logging.INFO):
        assert backend.choose(op, "auto", "cuda") == "triton"
    assert "op: triton (cuda: off by 1)" in caplog.text


def test_auto_takes_the_reference_where_no_kernel_runs(op, monkeypatch, caplog):
    monkeypatch.setattr(backend, "_missing", lambda name, device: "no compiler")
    assert backend.choose(op, "auto", "cuda") == "reference"
    assert "no kernel can run here; using the slower PyTorch reference" in caplog.text


def test_an_op_without_kernels_of_its_own_is_quiet_where_apex_is_not(op, monkeypatch, caplog):
    monkeypatch.setitem(backend._kernels, "op", backend.Kernel(("apex",), lambda name, device, case: ""))
    monkeypatch.setattr(backend, "_missing", lambda name, device: "apex is not installed")
    with caplog.at_level(logging.INFO):
        assert backend.choose(op, "auto", "cuda") == "reference"
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_self_test_is_not_part_of_what_its_caller_recomputes(op, monkeypatch):
    """The first call of an op may be in a checkpoint, whose hooks would run the caller again in the test's backward."""

    def self_test(name, device, case):
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
    monkeypatch.setitem(backend._kernels, "op", backend.Kernel(("cuda", "triton"), lambda name, device, case: ""))
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

    def self_test(name, device, case):
        if name == "cuda":
            raise TritonError("out of registers")
        return ""

    monkeypatch.setitem(backend._kernels, "op", backend.Kernel(("cuda", "triton"), self_test))
    assert backend.decide(op, "cuda") == backend.Choice("triton", "cuda: self-test: TritonError: out of registers")


def test_each_width_has_a_self_test_of_its_own(tested, caplog):
    with caplog.at_level(logging.INFO):
        assert [choose(width) for width in (64, 96, 64, 96)] == ["triton", "reference", "triton", "reference"]
    assert tested == [64, 96]
    assert "op D=64 x=bfloat16: triton" in caplog.text
    assert backend.used() == {
        "op": backend.Choice("reference", "triton: off by 1"),
        "op D=64 x=bfloat16": backend.Choice("triton", ""),
        "op D=96 x=bfloat16": backend.Choice("reference", "triton: off by 1"),
    }
    assert backend.self_tests() == {"op=triton D=64 x=bfloat16": "", "op=triton D=96 x=bfloat16": "off by 1"}


def test_passes_are_kept_on_disk_and_failures_are_not(tested):
    for _ in range(2):
        restart()
        assert [choose(64), choose(96)] == ["triton", "reference"]
    assert tested == [64, 96, 96]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b" "),
        lambda path: path.write_bytes(path.read_bytes().replace(b"64", b"65")),
        lambda path: path.write_bytes(b""),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to(path)),
    ],
    ids=["truncated", "longer", "changed", "empty", "folder", "loop"],
)
def test_a_damaged_pass_is_none(tested, damage):
    choose(64)
    (path,) = (self_test_cache.cache_folder() / "self_tests").iterdir()
    damage(path)
    restart()
    assert choose(64) == "triton"
    assert tested == [64, 64]


def test_a_pass_of_another_machine_is_none(tested, monkeypatch):
    choose(64)
    monkeypatch.setattr(self_test_cache, "_machine", lambda name: {"gpu": "another GPU"})
    restart()
    choose(64)
    assert tested == [64, 64]


def test_a_folder_that_cannot_be_written_costs_the_next_start_alone(tested, caplog, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGALIN_CACHE", str(tmp_path / "file"))
    assert [choose(64), choose(128)] == ["triton", "triton"]
    assert [record.message for record in caplog.records if "tested again" in record.message] == [
        f"{tmp_path}/file/self_tests: [Errno 20] Not a directory: '{tmp_path}/file/self_tests'; "
        "kernels will be tested again at the next start"
    ]


def test_the_hash_of_the_sources_follows_each_file(tmp_path, monkeypatch):
    monkeypatch.setattr(self_test_cache, "__file__", str(tmp_path / "ops" / "dispatch" / "self_test_cache.py"))
    for folder in ("ops", "_triton"):
        (tmp_path / folder / "scans").mkdir(parents=True)
        (tmp_path / folder / "scans" / "a.py").write_text("x")
    found = {self_test_cache._source_digest("triton")}
    for folder in ("ops", "_triton"):
        (tmp_path / folder / "scans" / "a.py").write_text("y")
        found.add(self_test_cache._source_digest("triton"))
    assert len(found) == 3


def test_the_batch_and_the_length_are_not_part_of_a_self_test(tested):
    """In a graph for any batch and length, the width is a constant."""

    def function(x):
        case = (("D", static(x.shape[2])), ("x", x.dtype))
        return x.sin() if backend.choose("op", "auto", "cuda", case=case) == "triton" else x.cos()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    for shape in ((2, 3, 64), (4, 5, 64), (3, 7, 96)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), x.cos() if shape[2] == 96 else x.sin())
    assert tested == [64, 96]


def test_a_self_test_without_memory_is_no_failure_of_its_kernel(op, monkeypatch):
    def self_test(name, device, case):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(backend._kernels, "op", backend.Kernel(("triton",), self_test))
    with pytest.raises(torch.OutOfMemoryError):
        choose(64)
    assert backend.self_tests() == {}


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
