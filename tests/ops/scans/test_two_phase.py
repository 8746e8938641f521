"""Two-phase scans of a sharded sequence, in the interpreter, against the reference on the whole sequence."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._ops import OpOverload

from megalin.errors import KernelError
from megalin.ops.dispatch import backend as backends
from megalin.ops.scans import fixed_decay, scalar_decay, vector_decay
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
    assert op._shards_self_test("triton", "cpu") == ""
    for method in ("entering", "leaving_gradient"):
        with monkeypatch.context() as changed:
            changed.setattr(SingleProcessExchange, method, lambda self, x, transition, documents: torch.zeros_like(x))
            assert "is off by" in op._shards_self_test("triton", "cpu"), method


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


@pytest.mark.parametrize("sharded", [False, True], ids=["full", "shards"])
@pytest.mark.parametrize(("name", "module"), list(zip(OPS, [fixed_decay, vector_decay, scalar_decay], strict=True)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("segments")
def test_the_fake_ops_have_the_same_shapes(name, module, dtype, sharded, monkeypatch):
    """Every op that a scan calls, forward and backward, with the arguments of that call."""
    checked = []

    def checking(op):
        def call(*arguments):
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
            checked.append(op.name())
            return op(*arguments)

        return call

    ops = {key: op for key, op in vars(module).items() if isinstance(op, OpOverload) and key != "_step"}
    for key, op in ops.items():
        monkeypatch.setattr(module, key, checking(op))
    inputs, ids, options = make_shards(name, Case(ranks=3, length=150, key=16, value=24, dtype=dtype), (1.5,))
    for x in inputs.values():
        x.requires_grad_()
    if sharded:
        options["shard"] = SingleProcessExchange().sequence_shard(ids)
    else:
        options["initial_state"] = torch.randn(3, 2, 16, 24, requires_grad=True)
    output, state = OPS[name].scan(**inputs, **options, document_ids=ids, backend="triton")
    (output.sum() + (0.0 if sharded else state.sum())).backward()
    assert set(checked) == {op.name() for op in ops.values()}
