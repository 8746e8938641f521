"""Triton kernels of the selective scan in the interpreter, against the reference: values and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from megalin.errors import KernelError
from megalin.ops.dispatch import backend as backends
from megalin.ops.scans import selective_scan as module
from megalin.ops.scans.context_parallel import SingleProcessExchange
from megalin.ops.scans.driver import ScanOutput
from megalin.ops.scans.selective_scan import selective_scan, selective_scan_reference
from tests.numerics import Tensors, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.test_fixed_decay import documents_of
from tests.ops.scans.test_selective_scan import make_inputs

SIZES: dict[str, Any] = {"width": 7, "states": 6, "batch": 1}
DOCUMENTS = {
    "one": (),
    "over two shard boundaries": (2.5,),
    "at shard boundaries": (1.0, 2.0),
    "many": (0.3, 0.5, 1.1, 2.6, 2.8),
}
FP32_FLOORS = dict.fromkeys(("output.1", "gradient.rates", "gradient.initial_state"), 7.2e-7)
"""docs/adr/0005-kernel-bounds.md."""
FAST = "over two shard boundaries"
"""A document fills the second shard: its sum of time steps counts."""
slow = pytest.mark.slow
TOKENS = ("q", "k", "v", "step")
"""Inputs with a number of tokens."""


@pytest.fixture(params=[pytest.param(1, marks=slow), 3])
def segments(request, monkeypatch):
    """Segments of at least eight tokens that a longer sequence is cut into."""
    from megalin._triton.scans import selective_scan as kernels

    monkeypatch.setattr(kernels, "_segments", lambda programs, length: request.param)


def compare(inputs: Tensors, documents: Tensor | None = None) -> None:
    """Asserts that the kernels are as good as the reference."""
    assert_as_good_as_the_reference(
        lambda **x: selective_scan(**x, document_ids=documents, backend="triton"),
        lambda **x: token_by_token(**x, document_ids=documents),
        inputs,
        fp32_floors=FP32_FLOORS,
    )


@pytest.fixture(autouse=True)
def _kernels(request, monkeypatch):
    """Skips self-tests, which take longer in the interpreter than most tests of this file, and have one."""
    if request.node.name != "test_unsupported_arguments_are_refused":
        monkeypatch.setattr(backends, "choose", lambda *_, **__: "triton")


def token_by_token(**x: Any) -> ScanOutput:
    """The reference in one chunk, which multiplies the state by each token's decay as the kernels do."""
    return selective_scan_reference(**x, chunk_size=x["v"].shape[1])


def of_shards(inputs: Tensors, starts: tuple[float, ...], ranks: int = 3) -> tuple[Tensors, Tensor]:
    """Inputs [1, T, ...] without a state, and the ids [ranks, T / ranks] of documents that start at these shards."""
    length = inputs["v"].shape[1]
    ids = torch.zeros(length, dtype=torch.int32)
    ids[[int(place * length / ranks) for place in starts]] = 1
    return {name: x for name, x in inputs.items() if name != "initial_state"}, ids.cumsum(0).int().view(ranks, -1)


def shards(x: dict[str, Tensor], ids: Tensor) -> list[Tensor]:
    shard = SingleProcessExchange().sequence_shard(ids)
    cut = {name: y if name == "rates" else y.unflatten(1, ids.shape)[0] for name, y in x.items()}
    scan = selective_scan(**cut, shard=shard, document_ids=ids, backend="triton")
    return [scan.output.flatten(0, 1)[None]]


@pytest.mark.parametrize("decay", [0.0, 0.05, pytest.param(20.0, marks=slow)])
@pytest.mark.parametrize("length", [1, *(pytest.param(n, marks=slow) for n in (63, 64, 65, 150))])
@pytest.mark.usefixtures("segments")
def test_kernels_are_as_good_as_the_reference(length, decay):
    compare(make_inputs(length, decay, torch.bfloat16, **SIZES))


@pytest.mark.parametrize(
    "boundaries", [(8, 17, 24), pytest.param((9,), marks=slow), pytest.param((1, 2, 16), marks=slow)]
)
@pytest.mark.usefixtures("segments")
def test_packed_documents(boundaries):
    compare(make_inputs(27, 0.1, torch.float32, **SIZES), documents_of((boundaries,), 27))


@slow
@pytest.mark.parametrize(("dtype", "decay"), [(torch.float16, 0.1), (torch.float32, 0.1), (torch.float32, 20.0)])
def test_other_dtypes(dtype, decay):
    compare(make_inputs(70, decay, dtype, **SIZES | {"batch": 2}))


@slow
@pytest.mark.parametrize(("width", "states"), [(3, 1), (20, 16), (17, 100)])
def test_widths_that_tiles_do_not_divide(width, states):
    compare(make_inputs(20, 0.1, torch.float32, width=width, states=states))


@slow
@pytest.mark.parametrize("index", [0, 1], ids=["output", "state"])
def test_no_initial_state_and_a_gradient_of_one_output_only(index):
    inputs, _ = of_shards(make_inputs(21, 0.1, torch.bfloat16, **SIZES), ())
    assert_as_good_as_the_reference(
        lambda **x: [selective_scan(**x, backend="triton")[index]],
        lambda **x: [token_by_token(**x)[index] + 0 * x["q"].sum()],
        inputs,
    )


@slow
def test_strided_inputs():
    """Slices of a projection, and a transposed output gradient."""
    inputs = make_inputs(20, 0.1, torch.bfloat16, **SIZES | {"batch": 2})

    def view(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return x | {name: torch.cat([x[name], x[name]], -1)[..., : x[name].shape[-1]] for name in TOKENS}

    assert_as_good_as_the_reference(
        lambda **x: [selective_scan(**view(x), backend="triton").output.mT.cos()],
        lambda **x: [token_by_token(**x).output.mT.cos()],
        inputs,
    )


@pytest.mark.parametrize("documents", [name if name == FAST else pytest.param(name, marks=slow) for name in DOCUMENTS])
@pytest.mark.usefixtures("segments")
def test_two_phase_scans_are_as_good_as_the_reference(documents):
    inputs, ids = of_shards(make_inputs(60, 0.03, torch.float32, **SIZES), DOCUMENTS[documents])
    assert_as_good_as_the_reference(
        lambda **x: shards(x, ids),
        lambda **x: [token_by_token(**x, document_ids=ids.flatten()[None]).output],
        inputs,
        fp32_floors=FP32_FLOORS,
    )


@slow
def test_another_document_does_not_move_a_bit():
    """Outputs and gradients of the second document for two first ones, on one rank and on three."""
    inputs, ids = of_shards(make_inputs(60, 0.03, torch.float32, **SIZES), (1.5,))
    for run in (
        shards,
        lambda x, ids: [selective_scan(**x, document_ids=ids.flatten()[None], backend="triton").output],
    ):
        found = []
        for scale in (1.0, -300.0):
            changed = {name: x.clone() for name, x in inputs.items()}
            for name in TOKENS:
                changed[name][:, :30] *= abs(scale) if name == "step" else scale
            found.append(outputs_and_gradients(lambda run=run, **x: [y[:, 30:] for y in run(x, ids)], changed))
        for name, tensor in found[0].items():
            assert torch.equal(tensor, found[1][name]), name
        assert not any(found[0][f"gradient.{name}"][:, :30].any() for name in TOKENS)


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=slow), True], ids=["full", "shards"])
@pytest.mark.usefixtures("segments")
def test_the_fake_ops_have_the_same_shapes(sharded, monkeypatch):
    """Every op that a scan calls, forward and backward, with the arguments of that call."""
    checked = []

    def checking(op):
        def call(*arguments):
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
            checked.append(op.name())
            return op(*arguments)

        return call

    ops = {key: op for key, op in vars(module).items() if isinstance(op, OpOverload)}
    for key, op in ops.items():
        monkeypatch.setattr(module, key, checking(op))
    inputs, ids = of_shards(make_inputs(24, 0.1, torch.bfloat16, **SIZES), (1.5,), ranks=2)
    for x in inputs.values():
        x.requires_grad_()
    if sharded:
        (output,) = shards(inputs, ids)
    else:
        state = torch.randn(1, 7, 6, requires_grad=True)
        output, state = selective_scan(**inputs, initial_state=state, backend="triton")
        output = output.sum() + state.sum()
    output.sum().backward()
    assert set(checked) == {op.name() for op in ops.values()}


@slow
def test_the_op_compiles_in_one_graph():
    """To the bits of eager mode; where the last state has no gradient, kernels are not handed zeros for it."""
    inputs, _ = of_shards(make_inputs(21, 0.1, torch.bfloat16, **SIZES), ())

    def function(q, **others):
        return [selective_scan(q.sin(), **others, state_gradient=False, backend="triton").output.cos()]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = outputs_and_gradients(function, inputs)
    for key, found in outputs_and_gradients(compiled, inputs).items():
        assert torch.equal(found, expected[key]), key


def test_unsupported_arguments_are_refused():
    inputs = make_inputs(3, dtype=torch.float32)
    with pytest.raises(KernelError, match=r"the triton kernel does not take q, k, v of torch.float64"):
        selective_scan(**make_inputs(3), backend="triton")
    with pytest.raises(KernelError, match="does not take 136 states a channel, above 128"):
        selective_scan(**make_inputs(3, dtype=torch.float32, states=136), backend="triton")
    assert selective_scan(**inputs).output.shape == inputs["v"].shape
