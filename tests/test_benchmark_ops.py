"""Correctness gate of the op benchmarks: a wrong implementation gets no figure."""

import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def case(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from benchmarks.case import BenchmarkCase, BenchmarkWork

    x = torch.randn(6, 8, dtype=torch.bfloat16)
    none = BenchmarkWork(0, 0)
    yield BenchmarkCase("square", "6x8", {"x": x}, {"x": x}, lambda x: [x.square()], {}, {}, none, none)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0]


def test_the_gate_is_green_for_the_same_function_and_red_for_others(case):
    from benchmarks.case import gate

    chance = lambda x: [x.square() + 0.01 * torch.rand_like(x)]  # noqa: E731
    assert gate(lambda x: [x * x], case, factor=2) == ""
    assert gate(lambda x: [x * x * 1.05], case, factor=2).startswith("output 0 4.9e-02")
    assert gate(lambda x: [_WrongGradient.apply(x)], case, factor=2).startswith("gradient of x 5.0e-01")
    assert "output 0 nan" in gate(lambda x: [x.square() * float("nan")], case, factor=2)
    assert gate(chance, case, factor=20).startswith("differs between two calls: output 0")
    assert gate(chance, case._replace(repeatable=False), factor=20) == ""


def test_the_gate_of_a_step_compares_its_outputs_alone_each_in_its_dtype(case):
    from benchmarks.case import gate

    def step(x, *, state_error=0.0):
        assert not x.requires_grad
        return [x * x, x.to(torch.promote_types(x.dtype, torch.float32)) * (1 + state_error)]

    step_case = case._replace(reference=step, differentiable=False)
    assert gate(lambda x: [x.square(), x.float()], step_case, factor=2) == ""
    assert gate(lambda x: [x * x * 1.05, x.float()], step_case, factor=2).startswith("output 0 ")
    assert gate(lambda x: step(x, state_error=1e-4), step_case, factor=2).startswith("output 1 1.0e-04")


def test_forward_and_backward_timed_together_have_one_row(case, monkeypatch):
    import benchmark_ops
    from benchmarks.case import KernelTiming

    milliseconds = iter([2.0, 3.0, 5.0])
    monkeypatch.setattr(benchmark_ops, "measure", lambda function, case: KernelTiming(next(milliseconds), 0.0, 0))
    monkeypatch.delitem(sys.modules, "benchmark_ops")
    function = case.reference
    case = case._replace(ours={"auto": function}, baselines={"other": function}, retained=False)
    rows = benchmark_ops.rows_of(case, {"bytes": 1.0, "flops": 1.0}, compile_reference=False)
    assert [(row["implementation"], row["direction"], row["times_ours"]) for row in rows] == [
        ("auto", "both", 1.0),
        ("reference", "both", 1.5),
        ("other", "both", 2.5),
    ]
