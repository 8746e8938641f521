"""Two-phase scans of a sharded sequence, in the interpreter, against the reference on the whole sequence."""

from __future__ import annotations

import logging

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.dispatch import backend as backends
from megalin.ops.scans import (
    fixed_decay,
    fixed_decay_kernels,
    scalar_decay,
    scalar_decay_kernels,
    vector_decay,
    vector_decay_kernels,
)
from megalin.ops.scans.context_parallel import SingleProcessExchange
from tests.ops.scans.two_phase import OPS, Case, compare, make_shards

DOCUMENTS = {
    "one": None,
    "over two shard boundaries": (2.5,),
    "at shard boundaries": (1.0, 2.0),
    "many": (0.3, 0.5, 1.1, 2.6, 2.8),
}
every_scan = pytest.mark.parametrize("name", OPS)


@pytest.fixture(params=[1, 3], ids=["one segment", "segments"])
def segments(request, monkeypatch):
    """Number of blocks, or segments, that each shard of a sequence is cut into."""
    from megalin._triton.scans import fixed_decay, scalar_decay, vector_decay

    monkeypatch.setattr(fixed_decay, "num_blocks", lambda rows: request.param)
    monkeypatch.setattr(fixed_decay, "num_parts", lambda rows, slots: 1 if slots == 1 else 2)
    monkeypatch.setattr(scalar_decay, "_num_slots", lambda rows: request.param)
    monkeypatch.setattr(scalar_decay, "_num_parts", lambda rows, slots: 1)
    monkeypatch.setattr(vector_decay, "SEGMENT_CHUNKS", 100 if request.param == 1 else 1)


@every_scan
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.usefixtures("segments")
def test_two_phase_scans_are_as_good_as_the_reference(name, documents):
    compare(name, Case(ranks=3, length=140, key=24, value=40, decay=0.003), DOCUMENTS[documents])


@every_scan
@pytest.mark.parametrize("length", [1, 64, 65])
def test_lengths(name, length):
    compare(name, Case(ranks=4, length=length, key=16, value=16))


@every_scan
@pytest.mark.parametrize("decay", [0.0, 3.0, 30.0])
def test_decays(name, decay):
    compare(name, Case(ranks=3, length=70, key=16, value=24, decay=decay), (1.5,))


@every_scan
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(name, dtype):
    compare(name, Case(ranks=3, length=100, key=24, value=40, decay=0.01, dtype=dtype), (1.5,))


@every_scan
def test_widths_that_kernels_pad(name):
    compare(name, Case(ranks=2, length=70, key=13, value=21), (1.5,))


def test_keys_that_heads_share():
    compare("scalar_decay_scan", Case(ranks=3, length=100, key=24, value=16, shared_keys=True), (1.5,))


@every_scan
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_the_reference_takes_a_sharded_sequence(name, documents):
    compare(name, Case(ranks=3, length=50, key=8, value=12), DOCUMENTS[documents], backend="reference")


@every_scan
def test_another_document_does_not_move_a_bit(name):
    """Outputs and gradients of a document that starts in the second of three shards, for two first documents."""
    case = Case(ranks=3, length=70, key=16, value=24)
    found = []
    for scale in (1.0, 0.5):
        torch.manual_seed(0)
        inputs, ids, options = make_shards(name, case, (1.5,))
        first = ids == 0
        for x in inputs.values():
            x[first] *= scale
            x.requires_grad_()
        shard = SingleProcessExchange().sequence_shard(ids)
        scan = OPS[name].scan(**inputs, **options, shard=shard, document_ids=ids, backend="triton")
        scan.output[~first].square().sum().backward()
        found.append([scan.output[~first], *(x.grad[~first] for x in inputs.values())])
        assert not any(x.grad[first].any() for x in inputs.values())
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", [fixed_decay, vector_decay, scalar_decay], ids=list(OPS))
def test_the_self_test_passes_and_finds_a_lost_state_exchange(op, monkeypatch):
    assert op._two_phase_self_test("triton", "cpu") == ""
    for method in ("entering", "leaving_gradient"):
        with monkeypatch.context() as changed:
            changed.setattr(SingleProcessExchange, method, lambda self, x, decay, documents: torch.zeros_like(x))
            assert "is off by" in op._two_phase_self_test("triton", "cpu"), method


@every_scan
def test_without_a_two_phase_kernel_the_state_is_computed_separately(name, monkeypatch, caplog):
    """A two-phase kernel that fails its self-test is logged, and the kernel of the scan itself still runs."""
    broken = backends._kernels["split_" + name]._replace(self_test=lambda backend, device: "self-test: off")
    monkeypatch.setitem(backends._kernels, "split_" + name, broken)
    monkeypatch.setenv("MEGALIN_KERNELS", f"{name}=triton")
    for cached in (backends._unavailable_reason, backends.decide):
        cached.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            backends.decide("split_" + name, "cpu")
            compare(name, Case(ranks=3, length=70, key=16, value=24), (1.5,), backend="auto")
            assert backends.used()[name].backend == "triton"
            assert backends.used()["split_" + name].backend == "reference"
        monkeypatch.setenv("MEGALIN_KERNELS", f"split_{name}=triton")
        with pytest.raises(KernelError, match=f"split_{name}: the triton kernel cannot run: self-test: off"):
            compare(name, Case(ranks=3, length=70, key=16, value=24), backend="auto")
    finally:
        for cached in (backends._unavailable_reason, backends.decide):
            cached.cache_clear()


def make(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fake_ops_have_the_same_shapes(dtype):
    tests, documents = ("test_schema", "test_faketensor"), torch.zeros(1, 150, dtype=torch.int32)
    q, k, v = (make(1, 150, 2, width, dtype=dtype) for width in (16, 16, 24))
    entering, output, g = make(1, 2, 16, 24), make(1, 150, 2, 24, dtype=dtype), -make(1, 150, 2, 16).abs()

    ops = fixed_decay_kernels
    for k_or_q, v_or_do, reverse in ((k, v, False), (q, output, True)):
        torch.library.opcheck(ops._begin, (k_or_q, v_or_do, None, documents, reverse, "triton"), test_utils=tests)
    _, parts = ops._begin(k, v, None, documents, False, "triton")
    arguments = (q, k, v, None, entering, documents, parts, "triton")
    torch.library.opcheck(ops._finish, arguments, test_utils=tests)
    states = ops._finish(*arguments)[2]
    _, parts = ops._begin(q, output, None, documents, True, "triton")
    arguments = (output, entering, q, k, v, None, entering, documents, states, parts, "triton")
    torch.library.opcheck(ops._finish_backward, arguments, test_utils=tests)

    ops = vector_decay_kernels
    torch.library.opcheck(ops._begin, (q, k, v, g, documents, 1.0), test_utils=tests)
    _, _, *begun = ops._begin(q, k, v, g, documents, 1.0)
    torch.library.opcheck(ops._finish, (v, entering, begun, False), test_utils=tests)
    torch.library.opcheck(ops._finish, (v, entering, begun, True), test_utils=tests)
    saved = [*begun[:5], ops._finish(v, entering, begun, True)[2]]
    torch.library.opcheck(ops._begin_backward, (output, begun[:5]), test_utils=tests)
    _, *segments = ops._begin_backward(output, begun[:5])
    arguments = (output, entering, q, k, v, g, documents, saved, segments, 1.0)
    torch.library.opcheck(ops._finish_backward, arguments, test_utils=tests)

    ops, g = scalar_decay_kernels, g[..., 0]
    torch.library.opcheck(ops._begin, (k, v, g, documents), test_utils=tests)
    _, _, *begun = ops._begin(k, v, g, documents)
    torch.library.opcheck(ops._finish, (q, k, v, entering, documents, begun), test_utils=tests)
    *_, saved = ops._finish(q, k, v, entering, documents, begun)
    torch.library.opcheck(ops._begin_backward, (output, q, g, documents), test_utils=tests)
    _, *begun = ops._begin_backward(output, q, g, documents)
    arguments = (output, entering, q, k, v, g, entering, documents, saved, begun)
    torch.library.opcheck(ops._finish_backward, arguments, test_utils=tests)
