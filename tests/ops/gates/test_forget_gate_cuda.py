"""Launches of the forget-gate scan in CUDA C++: its limits, the partition, and the Triton kernels of steep chunks. Its
own kernels, which PyTorch replaces here, are tested on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.gates import forget_gate_cuda
from megalin.ops.gates.forget_gate_scan import forget_gate_scan, forget_gate_scan_reference
from megalin.ops.scans.context_parallel import SingleProcessExchange
from tests.ops.gates import forget_gate_stand_in
from tests.ops.gates.test_forget_gate_scan import ALL, SCALE, make_inputs
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.scans import Case, initial_state
from tests.ops.scans.test_fixed_decay import documents_of
from tools.kernel_launches.preset_steps import faked_chip

BF16 = torch.bfloat16


@pytest.fixture
def _stand_in(monkeypatch):
    monkeypatch.setattr(forget_gate_cuda, "call", forget_gate_stand_in.call)
    monkeypatch.setattr(forget_gate_cuda, "MOST", 3)


def scan(**inputs):
    return forget_gate_cuda.scan(**{"document_ids": None, "scale": SCALE} | inputs)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("shifts", [("weak",), ALL], ids=str)
def test_values_and_gradients_are_as_good_as_the_reference(shifts):
    case = Case(330, key=128, value=128, dtype=BF16)
    inputs = make_inputs(case, *shifts) | initial_state(case)
    assert_as_good_as_the_reference(scan, lambda **x: forget_gate_scan_reference(**x, scale=SCALE), inputs)


@pytest.mark.usefixtures("_stand_in")
def test_packed_documents():
    documents = documents_of(((64,), (63, 65, *range(130, 150, 3))), 150)
    options = {"document_ids": documents, "scale": SCALE}
    inputs = make_inputs(Case(150, key=128, value=128, dtype=BF16, batch=2), "mild", "strong")
    assert_as_good_as_the_reference(
        lambda **x: scan(**x, **options), lambda **x: forget_gate_scan_reference(**x, **options), inputs
    )


@pytest.mark.usefixtures("_stand_in")
def test_shards_are_as_good_as_the_full_sequence():
    case = Case(70, key=64, value=64, dtype=BF16, ranks=3)
    begun = torch.zeros(case.tokens, dtype=torch.int32)
    begun[[30, 175]] = 1
    ids = begun.cumsum(0, dtype=torch.int32).view(3, 70)
    shard = SingleProcessExchange().sequence_shard(ids)

    def kernel(bound, **x):
        x = {name: y.unflatten(1, (3, 70))[0] for name, y in x.items()}
        return [scan(**x, bound=bound, shard=shard, document_ids=ids).output.flatten(0, 1)[None]]

    def reference(**x):
        return [forget_gate_scan_reference(**x, scale=SCALE, document_ids=ids.view(1, -1)).output]

    assert_as_good_as_the_reference(kernel, reference, make_inputs(case, "weak"))


@pytest.mark.parametrize("shards", [False, True])
def test_the_fake_ops_have_the_same_shapes(shards, monkeypatch):
    monkeypatch.setattr(forget_gate_cuda, "call", lambda *_: None)
    checked = []

    def checking(op):
        def call(*arguments):
            torch.library.opcheck(op, arguments, test_utils=("test_faketensor",))
            checked.append(op.name())
            return op(*arguments)

        return call

    for name in ("_begin", "_finish", "_begin_backward", "_finish_backward"):
        monkeypatch.setattr(forget_gate_cuda, name, checking(getattr(forget_gate_cuda, name)))
    ids = torch.zeros(1, 70, dtype=torch.int32)
    shard = SingleProcessExchange().sequence_shard(ids) if shards else None
    inputs = make_inputs(Case(70, key=64, value=64, dtype=BF16), "mild")
    scan(**{name: x.requires_grad_() for name, x in inputs.items()}, shard=shard).output.sum().backward()
    assert len(checked) == 4


@pytest.mark.parametrize("rows", [1, 3, 16, 48, 132, 133, 1000])
@pytest.mark.parametrize("length", [1, 64, 65, 1000, 131072])
def test_segments_cover_a_sequence_and_do_not_depend_on_its_length(rows, length):
    found = forget_gate_cuda.cut(rows, length)
    assert 1 <= found.segments <= forget_gate_cuda.MOST
    assert found.segments * (found.chunks - 1) * 64 < length <= found.segments * found.chunks * 64
    assert found.segments == forget_gate_cuda.cut(rows, 8192).segments


def test_other_dtypes_widths_and_chips_are_refused():
    inputs = make_inputs(Case(3, key=64, value=64), "mild")
    with pytest.raises(KernelError, match=r"the cuda kernel does not take q, logit, v of torch\.float32"):
        forget_gate_scan(**inputs, backend="cuda")
    inputs = make_inputs(Case(3, key=64, value=128, dtype=BF16), "mild")
    with pytest.raises(KernelError, match=r"does not take heads of 64 keys and 128 values, only 64 or 128 of both"):
        forget_gate_scan(**inputs, backend="cuda")
    x = SimpleNamespace(shape=(1, 2, 1, 128), dtype=BF16, is_cuda=True)
    for chip in (80, 90, 100):
        with faked_chip(chip):
            reason = forget_gate_cuda.limit(x, x, x)
            assert reason == ("" if chip == 90 else f"compute capability {chip // 10}.0, only 9.0")
