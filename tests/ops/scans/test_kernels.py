"""Kernels of every scan in the interpreter, on full sequences, against the reference: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload

from megalin.ops.scans.context_parallel import SingleProcessExchange
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.scans import (
    HEADS,
    ROWS,
    SCANS,
    SHARED_KEYS,
    Case,
    compare,
    initial_state,
    make_inputs,
    make_shards,
)
from tests.ops.scans.test_fixed_decay import documents_of

DECAYS = {"none": 0.0, "mild": 0.07, "strong": 20.0}
every_row = pytest.mark.parametrize("name", ROWS)
slow = pytest.mark.slow
every_scan = pytest.mark.parametrize("name", [*SCANS, pytest.param(SHARED_KEYS, marks=slow)])
"""For tests of what shared keys have in common with the scalar scan."""


@pytest.fixture(
    params=[(1, 1), pytest.param((3, 1), marks=slow), (2, 2)],
    ids=["one segment", "segments", "segments of two parts"],
)
def segments(request, monkeypatch):
    """Number of blocks, or segments, that a sequence is cut into, and of the parts of a block; the segments of the
    vector scan have none, and two of its cases are the same."""
    from megalin._triton.scans import fixed_decay, scalar_decay, vector_decay

    blocks, parts = request.param
    if (blocks, parts) == (3, 1) and "vector" in request.node.callspec.params["name"]:
        pytest.skip("the same as two parts")
    monkeypatch.setattr(fixed_decay, "num_blocks", lambda rows: blocks)
    monkeypatch.setattr(fixed_decay, "num_parts", lambda rows, slots: parts)
    monkeypatch.setattr(scalar_decay, "_num_slots", lambda rows: blocks)
    monkeypatch.setattr(scalar_decay, "_num_parts", lambda rows, slots: parts)
    monkeypatch.setattr(vector_decay, "SEGMENT_CHUNKS", 100 if blocks == 1 else 1)


ONE, SEVERAL, PARTS = (1, 1), (3, 1), (2, 2)
FAST = {
    ONE: ((1, "none"), (63, "mild"), (65, "strong"), (150, "mild")),
    SEVERAL: (),
    PARTS: ((65, "strong"), (150, "none"), (150, "mild")),
}
"""Lengths and decays by segments: one chunk has no second segment."""


@every_row
@pytest.mark.parametrize(
    ("segments", "length", "decay"),
    [
        pytest.param(cut, length, decay, marks=[slow] * ((length, decay) not in FAST[cut]))
        for cut in FAST
        for length in (1, 63, 65, 150)
        for decay in DECAYS
    ],
    indirect=["segments"],
)
@pytest.mark.usefixtures("segments")
def test_kernels_are_as_good_as_the_reference(name, length, decay):
    compare(name, Case(length, key=24, value=40, decay=DECAYS[decay], dtype=torch.bfloat16))


@every_scan
@pytest.mark.parametrize(
    ("dtype", "decay"),
    [
        (torch.float32, "mild"),
        (torch.float16, "strong"),
        pytest.param(torch.float32, "strong", marks=slow),
        pytest.param(torch.float16, "mild", marks=slow),
    ],
)
def test_other_dtypes(name, dtype, decay):
    compare(name, Case(150, key=24, value=40, decay=DECAYS[decay], dtype=dtype))


@every_scan
@pytest.mark.parametrize(("key", "value"), [(6, 3), (80, 17), pytest.param(16, 120, marks=slow)])
def test_widths_that_are_no_power_of_two(name, key, value):
    compare(name, Case(70, key, value))


@pytest.mark.parametrize("name", ["decay_scan", "vector_decay_scan"])
def test_more_values_than_a_tile_holds(name):
    compare(name, Case(70, key=16, value=130))


@every_scan
@pytest.mark.parametrize("index", [0, 1], ids=["output", "state"])
def test_no_initial_state_and_a_gradient_of_one_output_only(name, index):
    case = Case(150, key=16, value=24, dtype=torch.bfloat16)
    row, (inputs, options) = ROWS[name], make_inputs(name, case)
    assert_as_good_as_the_reference(
        lambda **x: [row.scan(**x, **options, backend="triton")[index]],
        lambda **x: [row.reference(**x, **options)[index] + 0 * x["q"].sum()],
        inputs,
    )


VIEWS = {
    "heads first": (lambda x: x.transpose(1, 2).contiguous(), lambda x: x.transpose(1, 2)),
    "channels first": (lambda x: x.mT.contiguous(), lambda x: x.mT),
    "a slice": (lambda x: torch.cat([x, x], dim=-1), lambda x: x[..., : x.shape[-1] // 2]),
}
"""Tensors that are held, and the views of them that are scanned."""


@every_scan
@pytest.mark.parametrize("kind", ["heads first", "channels first", pytest.param("a slice", marks=slow)])
def test_strided_inputs(name, kind):
    hold, view = VIEWS[kind]
    row, (inputs, options) = ROWS[name], make_inputs(name, Case(70, 16, 24, dtype=torch.bfloat16, batch=2))
    assert_as_good_as_the_reference(
        lambda **x: row.scan(**{key: view(y) for key, y in x.items()}, **options, backend="triton"),
        lambda **x: row.reference(**{key: view(y) for key, y in x.items()}, **options),
        {key: hold(x) for key, x in inputs.items()},
    )


BOUNDARIES = [((64,), (128,)), ((63, 129), (65, 127)), ((), tuple(range(1, 150, 3)))]
"""Starts of documents by sequence: at the edges of chunks, next to them, none and many."""


@every_row
@pytest.mark.parametrize(
    "boundaries", [((63, 128), (64, *range(65, 150, 3))), *(pytest.param(x, marks=slow) for x in BOUNDARIES)]
)
@pytest.mark.usefixtures("segments")
def test_packed_documents(name, boundaries):
    case = Case(150, key=24, value=40, decay=0.07, dtype=torch.bfloat16, batch=2)
    compare(name, case, documents_of(boundaries, 150))


@every_scan
def test_packed_documents_without_decay(name):
    compare(name, Case(150, 24, 40, 0.0, torch.bfloat16, batch=2), documents_of(((63, 129), (65, 127)), 150))


@every_scan
@pytest.mark.parametrize(
    ("segments", "boundary"),
    [
        ((1, 1), 64),
        ((2, 2), 40),
        *(pytest.param(cut, at, marks=slow) for cut, at in [((1, 1), 40), ((2, 2), 64), ((3, 1), 40), ((3, 1), 64)]),
    ],
    indirect=["segments"],
)
@pytest.mark.usefixtures("segments")
def test_contents_of_one_document_do_not_move_bits_of_the_next(name, boundary):
    case = Case(150, key=16, value=24, decay=0.07, dtype=torch.bfloat16)
    (inputs, options), first = make_inputs(name, case), initial_state(case)
    options["document_ids"] = documents_of(((boundary,),), 150)

    def second_document(**x):
        scan = ROWS[name].scan(**x, **options, backend="triton")
        return [scan.output[:, boundary:], scan.state]

    results = []
    for scale in (1.0, -3.0):
        # A decay so strong that even an fp64 sum over both documents would lose the decays of the second.
        scales = dict.fromkeys(inputs, scale) | {"log_decay": scale**24}
        changed = {key: torch.cat([x[:, :boundary] * scales[key], x[:, boundary:]], 1) for key, x in inputs.items()}
        results.append(outputs_and_gradients(second_document, changed | {key: x * scale for key, x in first.items()}))
    for key, tensor in results[0].items():
        assert torch.equal(tensor, results[1][key]), key
    for key in inputs:
        assert results[0][f"gradient.{key}"][:, :boundary].eq(0).all(), key
    assert results[0]["gradient.initial_state"].eq(0).all()


COMPILED = [("decay_scan", kind) for kind in ("whole", "initial state", "no state gradient")]
COMPILED += [("vector_decay_scan", kind) for kind in ("no state gradient", "shards")] + [("scalar_decay_scan", "whole")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[slow] * ((name, kind) not in COMPILED))
        for kind in ("whole", "initial state", "no state gradient", "shards")
        for name in ROWS
    ],
)
def test_the_op_compiles_inside_a_block(name, kind):
    """To the bits of eager mode; where the last state has no gradient, kernels are not handed zeros for it."""
    case = Case(70, key=16, value=24, dtype=torch.bfloat16, ranks=3 if kind == "shards" else 1)
    inputs, ids, options = make_shards(name, case, (0.5,))
    if kind == "shards":
        options["shard"] = SingleProcessExchange().sequence_shard(ids)
    elif kind == "no state gradient":
        options["state_gradient"] = False
    elif kind == "initial state":
        inputs |= initial_state(case)
    backwards = []

    def backward_compiler(graph, _):
        backwards.append(graph)
        return make_boxed_func(graph.forward)

    def function(q, **others):
        scan = ROWS[name].scan(q.sin(), **others, **options, document_ids=ids, backend="triton")
        return scan if kind in ("whole", "initial state") else [scan.output.cos()]

    eager_kernels = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward_compiler
    )
    compiled = torch.compile(function, fullgraph=True, backend=eager_kernels)
    expected = outputs_and_gradients(function, inputs)
    for key, found in outputs_and_gradients(compiled, inputs).items():
        assert torch.equal(found, expected[key]), key
    (graph,) = backwards
    (node,) = (x for x in graph.graph.nodes if x.target is ROWS[name].module._finish_backward)
    assert (node.args[1] is None) == (kind == "no state gradient")


@every_scan
@pytest.mark.parametrize(("dtype", "sharded"), [(torch.float32, False), (torch.bfloat16, True)], ids=["full", "shards"])
@pytest.mark.parametrize("segments", [(1, 1), *(pytest.param(x, marks=slow) for x in [(3, 1), (2, 2)])], indirect=True)
@pytest.mark.usefixtures("segments")
def test_the_fake_ops_have_the_same_shapes(name, dtype, sharded, monkeypatch):
    """Every op that a scan calls, forward and backward, with the arguments of that call, and once their schemas."""
    checked, module = [], ROWS[name].module
    checks = ("test_faketensor",) if sharded else ("test_schema", "test_faketensor")  # each computes the op again

    def checking(op):
        def call(*arguments):
            torch.library.opcheck(op, arguments, test_utils=checks)
            checked.append(op.name())
            return op(*arguments)

        return call

    ops = {key: op for key, op in vars(module).items() if isinstance(op, OpOverload) and key != "_step"}
    for key, op in ops.items():
        monkeypatch.setattr(module, key, checking(op))
    inputs, ids, options = make_shards(name, Case(70, key=16, value=24, dtype=dtype, ranks=2), (1.5,))
    for x in inputs.values():
        x.requires_grad_()
    if sharded:
        options["shard"] = SingleProcessExchange().sequence_shard(ids)
    else:
        options["initial_state"] = torch.randn(2, HEADS, 16, 24, requires_grad=True)
    output, state = ROWS[name].scan(**inputs, **options, document_ids=ids, backend="triton")
    (output.sum() + (0.0 if sharded else state.sum())).backward()
    assert set(checked) == {op.name() for op in ops.values()}
