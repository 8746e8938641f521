"""Benchmark case of one op at one shape: implementations, unavoidable work, correctness gate and timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import triton.testing
from torch import Tensor

BenchmarkFunction = Callable[..., Sequence[Tensor]]
Inputs = dict[str, Tensor]

ONE_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative errors that always pass: a reference may happen to be exact."""


class BenchmarkWork(NamedTuple):
    """Bytes or floating-point operations that no implementation can avoid."""

    forward: float
    backward: float


class BenchmarkCase(NamedTuple):
    """An op at one shape. Every function takes `inputs` by name and returns the outputs, in the same order."""

    op: str
    shape: str
    """Label in the table, dtype included."""
    inputs: Inputs
    """Random tensors; together with the outputs too large for the cache."""
    checked: Inputs
    """Inputs of the gate; smaller where the fp64 reference is expensive."""
    reference: BenchmarkFunction
    """Plain PyTorch, exact in fp64."""
    ours: dict[str, BenchmarkFunction]
    """By backend; the first is the default, the denominator of every ratio."""
    baselines: dict[str, BenchmarkFunction]
    """Installed implementations of the same function by other libraries."""
    bytes: BenchmarkWork
    """Each input read once and each output written once; the backward reads what it needs again."""
    flops: BenchmarkWork
    """Of matmuls, multiply and add counted as two."""
    compiled: bool = True
    """Whether inductor can compile the reference at `inputs` in seconds and within memory."""
    captured: bool = True
    """Timed as a CUDA graph, without launch overhead; False for implementations that read results on the host."""
    differentiable: bool = True
    """Whether there is a backward; a decoding step has none."""
    repeatable: bool = True
    """Whether two calls give the same bits; a library's kernel may add up in any order."""
    retained: bool = True
    """Whether the backward can be repeated on the tensors of one forward; otherwise both are timed together."""


class KernelTiming(NamedTuple):
    """Median milliseconds and the peak memory of forward and backward above their inputs; 0 for a missing backward, and
    for one that is timed with the forward."""

    forward: float
    backward: float
    peak_bytes: int


def gate(function: BenchmarkFunction, case: BenchmarkCase, *, factor: float) -> str:
    """Checks an implementation; returns its failure, or an empty string.

    Outputs and, where there is a backward, the gradient of every float input for fixed random output weights: the error
    against the reference in fp64 is at most `factor` times that of the reference in the inputs' own dtype, and a second
    call gives the same bits if the case is `repeatable`. A step's new state is compared at the rounding of its dtype.
    """
    inputs = case.checked
    dtype = next(x.dtype for x in inputs.values() if x.is_floating_point())
    results_of = _results if case.differentiable else _outputs
    truth = results_of(case.reference, {name: _exact(x) for name, x in inputs.items()})
    same = _errors(results_of(case.reference, inputs), truth)
    results = results_of(function, inputs)
    found = _errors(results, truth)
    least = {name: ONE_ROUNDING[dtype if case.differentiable else x.dtype] for name, x in results.items()}
    bad = [name for name in truth if not found[name] <= max(factor * same[name], least[name])]
    if bad:
        return ", ".join(f"{name} {found[name]:.1e} (reference {same[name]:.1e})" for name in bad)
    if not case.repeatable:
        return ""
    again = results_of(function, inputs)
    changed = [name for name in results if not torch.equal(results[name], again[name])]
    return f"differs between two calls: {', '.join(changed)}" if changed else ""


def measure(function: BenchmarkFunction, case: BenchmarkCase) -> KernelTiming:
    """Times the forward, which saves tensors for the backward, and the backward alone."""
    with torch.cuda.stream(torch.cuda.Stream()):
        if not case.differentiable:
            step = _median(lambda: function(**case.inputs), captured=case.captured)
            return KernelTiming(step, 0.0, _peak_bytes(function, case, []))
        leaves = _leaves(case.inputs)
        differentiable = [x for x in leaves.values() if x.requires_grad]
        outputs = [y for y in function(**leaves) if y.requires_grad]
        weights = [torch.randn_like(y) for y in outputs]

        def forward() -> None:
            function(**leaves)

        def backward() -> None:
            torch.autograd.grad(outputs, differentiable, weights, retain_graph=True, allow_unused=True)

        def both() -> None:
            torch.autograd.grad(function(**leaves), differentiable, weights, allow_unused=True)

        if not case.retained:
            return KernelTiming(_median(both, captured=case.captured), 0.0, _peak_bytes(function, case, weights))
        seconds = [_median(call, captured=case.captured) for call in (forward, backward)]
        return KernelTiming(*seconds, _peak_bytes(function, case, weights))


def _median(call: Callable[[], None], *, captured: bool) -> float:
    for _ in range(3):
        call()
    if captured:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            call()
        call = graph.replay
    return float(triton.testing.do_bench(call, warmup=20, rep=100, quantiles=[0.5]))


def _peak_bytes(function: BenchmarkFunction, case: BenchmarkCase, weights: Sequence[Tensor]) -> int:
    leaves = _leaves(case.inputs) if case.differentiable else case.inputs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = function(**leaves)
    if case.differentiable:
        outputs = [y for y in results if y.requires_grad]
        torch.autograd.grad(outputs, [x for x in leaves.values() if x.requires_grad], weights, allow_unused=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _leaves(inputs: Mapping[str, Tensor]) -> Inputs:
    return {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}


def _exact(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _outputs(function: BenchmarkFunction, inputs: Mapping[str, Tensor]) -> Inputs:
    return {f"output {i}": y for i, y in enumerate(function(**inputs))}


def _results(function: BenchmarkFunction, inputs: Mapping[str, Tensor]) -> Inputs:
    leaves = _leaves(inputs)
    outputs = [y for y in function(**leaves) if y.requires_grad]
    generator = torch.Generator(outputs[0].device).manual_seed(7)
    weights = [torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in outputs]
    names = [name for name, x in leaves.items() if x.requires_grad]
    gradients = torch.autograd.grad(outputs, [leaves[name] for name in names], weights)
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient of {name}": g for name, g in zip(names, gradients, strict=True)}


def _errors(actual: Inputs, expected: Inputs) -> dict[str, float]:
    """||actual - expected|| / ||expected||, absolute where `expected` is zero."""
    return {
        name: (actual[name].double() - truth).norm().item() / (truth.norm().item() or 1.0)
        for name, truth in expected.items()
    }
