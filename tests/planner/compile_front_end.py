"""Traces by torch.compile's own front end (dynamo, AOTAutograd, inductor's partitioner), and eager ones on CPU tensors
without values: the oracle of the planner's traces on meta."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from megalin.model.language_model import LanguageModel
from megalin.ops.dispatch.backend import assume_kernels
from megalin.parallel.config import ParallelConfig
from megalin.parallel.fake_mesh import fake_mesh
from megalin.parallel.float8_layers import enable_float8
from megalin.planner import block_traces
from megalin.planner.block_traces import Trace, uses_async_tp
from megalin.planner.graph_cost import GraphCost, graph_cost
from megalin.planner.tracing import RunCost, _SavedTensors, materialize
from megalin.planner.workload import Workload, one_of_each


def front_end_trace(workload: Workload, parallel: ParallelConfig, micro_batch_size: int) -> Trace:
    """Like `trace_model`, for a layout without pipeline."""
    with fake_mesh(parallel, parallel.tp * parallel.cp, async_tp=uses_async_tp(parallel)) as mesh:
        model = LanguageModel(one_of_each(workload.model), mesh.tp, cp=mesh.cp)
        if workload.float8 is not None:
            enable_float8(model, model.block_list(), workload.float8)
        materialize(model, workload.dtype)
        with assume_kernels(), FakeTensorMode(allow_non_fake_inputs=True):
            for submodule in model.modules():
                for name, parameter in submodule.named_parameters(recurse=False):
                    submodule.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
                for name, buffer in submodule.named_buffers(recurse=False):
                    submodule.register_buffer(name, torch.empty_like(buffer, device="cpu"))
            with mock.patch.object(block_traces, "trace_compiled", _front_end_cost):
                return block_traces._trace(workload, model, mesh, micro_batch_size, device="cpu")


def _front_end_cost(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> RunCost:
    saved = _SavedTensors(module)
    costs: list[GraphCost] = []
    parameters: set[str] = set()

    def count(graph: GraphModule, inputs: Any, *, is_backward: bool = False, **options: Any) -> Callable[[Any], Any]:
        if not is_backward:
            names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            parameters.update(names[index] for index in options.get("static_input_idxs", ()))
        costs.append(graph_cost(graph.graph, parameters))

        def call(arguments: list[Any]) -> Any:
            return graph(*arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch._dynamo.reset()  # otherwise a layer of another size counts as a recompilation of the same code
    inner: Any = count  # torch's annotation is stricter than its use
    module.compile(backend=partial(compile_fx, inner_compile=inner), fullgraph=True, dynamic=False)
    with functorch_config.patch(enable_autograd_cache=False):
        with saved.hooks():
            y = run(x)
        torch.autograd.backward(y, torch.empty_like(y))
    forward, backward = costs
    return RunCost(
        sum(saved.bytes.values()),
        backward.peak_bytes,
        forward.moved_bytes + backward.moved_bytes,
        forward.collectives,
        backward.collectives,
    )
