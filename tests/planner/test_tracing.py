"""Traces of functions, eager and compiled, against costs computed by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from megalin.layers.mixers.base import FullPrecision
from megalin.ops.dispatch import backend
from megalin.ops.dispatch.backend import assume_kernels
from megalin.parallel.collectives import reduce_from_axis
from megalin.parallel.config import ParallelConfig
from megalin.parallel.fake_mesh import fake_mesh
from megalin.planner.block_traces import trace_model
from megalin.planner.graph_cost import COPY, graph_cost
from megalin.planner.tracing import materialize, trace, trace_compiled
from megalin.planner.workload import Workload
from tests.cases import GLU, HIDDEN_SIZE, model

TOKENS, WIDTH, INNER = 64, 32, 96
X, H, W = TOKENS * WIDTH * 4, TOKENS * INNER * 4, WIDTH * INNER * 4


class _Gated(nn.Module):
    """y = (exp(x U^T) * 2) V^T"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(INNER, WIDTH, device="meta"))
        self.down = nn.Parameter(torch.empty(WIDTH, INNER, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.exp(x @ self.up.T) * 2.0) @ self.down.T


def test_an_eager_function_keeps_what_its_backward_reads():
    module = _Gated()
    with assume_kernels():
        materialize(module, torch.float32)
        cost = trace(module, module, torch.empty(TOKENS, WIDTH, requires_grad=True, device="meta"))
    assert cost.saved_bytes == X + 2 * H  # x, exp(..) and its double; the weights are not counted
    # exp and its double, forward and backward: each reads one or two tensors and writes one.
    assert cost.moved_bytes >= 8 * H
    assert cost.backward_bytes >= cost.saved_bytes + H


def test_a_compiled_function_keeps_less_and_fuses():
    module = _Gated()
    with assume_kernels():
        materialize(module, torch.float32)
        cost = trace_compiled(module, module, torch.empty(TOKENS, WIDTH, requires_grad=True, device="meta"))
    assert cost.saved_bytes <= X + 2 * H
    assert cost.moved_bytes <= 6 * H  # exp: one read, one written; its backward: gradient and exp read, one written
    assert cost.forward == cost.backward == []


def test_a_graph_holds_what_is_still_read_and_fuses_what_is_element_wise():
    module = _Gated()
    with assume_kernels():
        materialize(module, torch.float32)
        x = torch.empty(TOKENS, WIDTH, device="meta")
        graph = make_fx(lambda x, up, down: (torch.exp(x @ up.T) * 2.0) @ down.T)(x, module.up, module.down).graph
    _, *weights = [node.name for node in graph.nodes if node.op == "placeholder"]
    cost = graph_cost(graph, weights)
    assert cost.peak_bytes == 2 * H  # a matmul's result and its gated form; x is freed
    assert cost.moved_bytes == 2 * H  # exp and its double are one kernel; matmuls are not counted
    assert graph_cost(graph, []).peak_bytes == 2 * H + 2 * W - W  # up's last use is the first matmul


def test_what_a_reduction_has_read_is_read_once():
    """A division of rows by their largest number: x and the result, and the reduction's result written and read."""
    x = torch.empty(TOKENS, WIDTH)
    graph = make_fx(lambda x: x / x.abs().amax(-1, keepdim=True))(x).graph
    assert graph_cost(graph, []).moved_bytes == 2 * X + 2 * 4 * TOKENS


@pytest.mark.parametrize("compiled", [False, True])
def test_collectives_of_both_directions_are_reported(compiled):
    with fake_mesh(ParallelConfig(tp=4), 4) as mesh:
        axis, module = mesh.tp.axis, _Gated()

        def run(x: Tensor) -> Tensor:
            return reduce_from_axis(module(mesh.tp.enter(x)), axis)

        class _Sharded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, x: Tensor) -> Tensor:
                return run(x)

        sharded = _Sharded()
        with assume_kernels():
            materialize(sharded, torch.float32)
            x = torch.empty(TOKENS, WIDTH, requires_grad=True, device="meta")
            run_cost = trace_compiled if compiled else trace
            cost = run_cost(sharded, sharded, x)
            materialize(module, torch.float32)  # clears the gradients
            alone = run_cost(module, module, x.detach().requires_grad_())
        assert cost.moved_bytes == alone.moved_bytes  # a collective's bytes are not memory traffic
        for collectives in (cost.forward, cost.backward):
            assert [(each.name, each.group, each.bytes) for each in collectives] == [("all_reduce", axis.group_name, X)]


@pytest.mark.parametrize("compiled", [False, True])
def test_overlapped_matmuls_are_reported_with_their_transfers(compiled):
    """y = exp(all-gather(x) U^T) V^T, reduce-scattered: the sent bytes, the overlapped operations, and that the matmuls
    add no memory traffic."""
    with fake_mesh(ParallelConfig(tp=4, sequence_parallel=True), 4, async_tp=True) as mesh:
        parallel, module = mesh.tp, _Gated()

        class _Sharded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, x: Tensor) -> Tensor:
                return parallel.linear_reduce_scatter(torch.exp(parallel.all_gather_linear(x, module.up)), module.down)

        sharded = _Sharded()
        with assume_kernels():
            materialize(sharded, torch.float32)
            x = torch.empty(2, TOKENS // 4, WIDTH, requires_grad=True, device="meta")
            cost = trace_compiled(sharded, sharded, x) if compiled else trace(sharded, sharded, x)
    transfer = (COPY, parallel.buffers.name, 2 * X, 2 * (2 * TOKENS) * WIDTH * INNER * 3 // 4)
    assert [tuple(each) for each in cost.forward] == [transfer, transfer]
    # The gradient of the gathered input: the tokens once more, and the sums.
    assert [tuple(each) for each in cost.backward] == [transfer, transfer, transfer]
    # exp reads and writes; its gradient reads two tensors and writes one. Eager mode copies arriving gradients.
    arrived = 0 if compiled else 2 * (X // 2) + 2 * 2 * (W + X // 4)
    assert 0 <= cost.moved_bytes - 5 * 2 * H <= arrived
    assert cost.saved_bytes == X // 2 + 2 * H  # x of the rank's own tokens, and exp's result


def test_kernels_are_chosen_without_a_gpu_while_they_are_assumed():
    with assume_kernels():
        assert backend.choose("srmsnorm", "auto", "cpu") == "triton"
        assert backend.choose("srmsnorm", "auto", "cpu", "an empty tensor") == "reference"
    assert backend.choose("srmsnorm", "auto", "cpu") == "reference"


class _Precise(FullPrecision):
    def __init__(self) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.empty(3, device="meta"))


def test_weights_take_the_dtypes_that_they_compute_in():
    module = nn.ModuleDict({"plain": nn.Linear(2, 3, device="meta"), "precise": _Precise()})
    module.register_buffer("table", torch.zeros(5, dtype=torch.int32, device="meta"))
    with assume_kernels():
        materialize(module, torch.bfloat16)
    assert module["plain"].weight.dtype == torch.bfloat16
    assert module["precise"].angle.dtype == torch.float32
    assert module.get_buffer("table").dtype == torch.int32


def test_dropout_saves_a_byte_an_element_of_each_site():
    plain, dropped = (
        trace_model(Workload(network, TOKENS, 4, torch.bfloat16, False, ()), ParallelConfig(), 4)
        for network in (
            model({"sublayers": [GLU, GLU]}, hidden_dropout=rate, embedding_dropout=rate) for rate in (0.0, 0.1)
        )
    )
    elements = 4 * TOKENS * HIDDEN_SIZE
    assert dropped.blocks[0].saved_bytes - plain.blocks[0].saved_bytes == 2 * elements
    assert dropped.entry.saved_bytes - plain.entry.saved_bytes == elements
