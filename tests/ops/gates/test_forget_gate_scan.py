"""The scan of tied forget gates: its kernels in the interpreter, and its reference, which is the gates and the scan."""

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.gates.forget_gate_scan import forget_gate_scan, forget_gate_scan_reference
from megalin.ops.gates.forget_gates import forget_gates
from megalin.ops.scans import vector_decay
from megalin.ops.scans.context_parallel import SingleProcessExchange
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.scans import HEADS, Case, initial_state
from tests.ops.scans.test_fixed_decay import documents_of

SCALE = 0.3
SHIFTS = {"weak": 8.0, "mild": 3.0, "strong": -2.0, "off": -200.0}
"""Centres of logits: f of 1 - 3e-4, 0.95, 0.1, and of its bound, 0 in some channels."""
ALL = ("mild", "strong", "off", "weak")


def make_inputs(case, *shifts):
    """Inputs whose logits are around each shift in turn, and bounds of 0, 0.01 and 0.9 by channel."""
    shape = (case.batch, case.tokens, HEADS, case.key)
    centre = torch.tensor([SHIFTS[x] for x in shifts])[torch.arange(case.tokens) * len(shifts) // case.tokens]
    bound = torch.tensor([0.0, 0.01, 0.9])[torch.arange(HEADS * case.key) % 3].view(HEADS, case.key)
    return {
        "q": torch.randn(shape).to(case.dtype),
        "logit": (2.0 * torch.randn(shape) + centre[:, None, None]).to(case.dtype),
        "v": torch.randn(*shape[:3], case.value).to(case.dtype),
        "bound": bound.clone(),
    }


def kernel(**inputs):
    return forget_gate_scan(**inputs, scale=SCALE, backend="triton")


def compare(case, *shifts, documents=None, view=lambda x: x):
    options = {"document_ids": documents, "scale": SCALE}
    assert_as_good_as_the_reference(
        lambda logit, **x: forget_gate_scan(logit=view(logit), **x, **options, backend="triton"),
        lambda logit, **x: forget_gate_scan_reference(logit=view(logit), **x, **options),
        make_inputs(case, *shifts) | initial_state(case),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shifts", [("weak",), ALL], ids=str)
def test_kernels_are_as_good_as_the_reference(shifts, dtype):
    """Full chunks of mild and of steep decays, and a shorter last one."""
    compare(Case(130, key=20, value=24, dtype=dtype, batch=2), *shifts)


def test_closed_gates_in_mild_chunks_have_finite_gradients():
    """f is 0 or near the smallest number, and values are so large that the gradient of log f times 1 / f overflows."""
    inputs = make_inputs(Case(128, key=16, value=16, dtype=torch.bfloat16), "mild")
    inputs["logit"][:, [20, 90]] = torch.tensor([-86.0, -200.0], dtype=torch.bfloat16)[None, :, None, None]
    inputs["v"] *= 1e8
    assert_as_good_as_the_reference(kernel, lambda **x: forget_gate_scan_reference(**x, scale=SCALE), inputs)


@pytest.mark.parametrize("length", [1, 63, 65])
def test_lengths_around_a_chunk(length):
    compare(Case(length, key=16, value=16, dtype=torch.bfloat16), "mild")


@pytest.mark.parametrize("key", [6, 80])
def test_widths_that_are_no_power_of_two(key):
    compare(Case(70, key=key, value=17, dtype=torch.bfloat16), "mild", "strong")


def test_packed_documents():
    """Documents from the edges of chunks, next to them, none and many; mild chunks and steep ones."""
    documents = documents_of(((64,), (63, 65, *range(130, 150, 3))), 150)
    compare(Case(150, key=24, value=40, dtype=torch.bfloat16, batch=2), "mild", documents=documents)


def test_a_slice_of_a_projection():
    compare(
        Case(70, key=16, value=24, dtype=torch.bfloat16, batch=2), "mild", view=lambda x: x.flip(1).mT.contiguous().mT
    )


def test_mild_and_steep_decays_on_a_chip_with_tensor_memory(monkeypatch):
    from megalin._triton.scans import vector_decay as kernels

    monkeypatch.setattr(kernels, "has_tensor_memory", lambda: True)
    compare(Case(130, key=20, value=24, dtype=torch.bfloat16), "mild", "strong")


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_shards_are_as_good_as_the_full_sequence(backend):
    """In one process: the batch stands for three ranks, with a document over the first two."""
    case = Case(70, key=16, value=24, dtype=torch.bfloat16, ranks=3)
    begun = torch.zeros(case.tokens, dtype=torch.int32)
    begun[[30, 175]] = 1
    ids = begun.cumsum(0, dtype=torch.int32).view(3, 70)
    shard = SingleProcessExchange().sequence_shard(ids)

    def kernel(bound, **x):
        x = {name: y.unflatten(1, (3, 70))[0] for name, y in x.items()}
        scan = forget_gate_scan(**x, bound=bound, scale=SCALE, shard=shard, document_ids=ids, backend=backend)
        return [scan.output.flatten(0, 1)[None]]

    def reference(**x):
        return [forget_gate_scan_reference(**x, scale=SCALE, document_ids=ids.view(1, -1)).output]

    assert_as_good_as_the_reference(kernel, reference, make_inputs(case, "weak"))


def test_the_reference_is_the_gates_and_the_scan_bit_for_bit():
    case = Case(70, key=16, value=24, dtype=torch.bfloat16)

    def in_turn(q, logit, v, bound, initial_state):
        k, log_decay = (x.unflatten(-1, (HEADS, -1)) for x in forget_gates(logit.flatten(2), bound.flatten()))
        return vector_decay.vector_decay_scan(q, k, v, log_decay, initial_state=initial_state, chunk_size=32)

    inputs = make_inputs(case, *ALL) | initial_state(case)
    expected = outputs_and_gradients(in_turn, inputs)
    for function in (forget_gate_scan, forget_gate_scan_reference):
        found = outputs_and_gradients(lambda f=function, **x: f(**x, chunk_size=32), inputs)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_gradients_without_a_state_gradient_compile():
    """To the bits of eager mode, by the fake ops."""
    case = Case(70, key=16, value=24, dtype=torch.bfloat16)
    inputs = make_inputs(case, "mild")

    def function(q, **x):
        return [forget_gate_scan(q.sin(), **x, state_gradient=False, backend="triton").output.cos()]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = outputs_and_gradients(function, inputs)
    for name, found in outputs_and_gradients(compiled, inputs).items():
        assert torch.equal(found, expected[name]), name


def test_the_fake_ops_have_the_same_shapes(monkeypatch):
    """Of the two ops whose results depend on the gates."""
    checked = []

    def checking(op):
        def call(*arguments):
            torch.library.opcheck(op, arguments, test_utils=("test_faketensor",))
            checked.append(op.name())
            return op(*arguments)

        return call

    for name in ("_begin", "_finish_backward"):
        monkeypatch.setattr(vector_decay, name, checking(getattr(vector_decay, name)))
    inputs = {name: x.requires_grad_() for name, x in make_inputs(Case(70, key=16, value=24), "mild").items()}
    forget_gate_scan(**inputs, backend="triton").output.sum().backward()
    assert len(checked) == 2


def test_bounds_in_half_precision_are_refused():
    inputs = make_inputs(Case(3, key=4, value=4), "mild")
    with pytest.raises(KernelError, match=r"the triton kernel does not take bounds of torch\.float16"):
        forget_gate_scan(**inputs | {"bound": inputs["bound"].half()}, backend="triton")
