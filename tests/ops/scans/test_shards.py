"""Two-phase scans of a sharded sequence, in the interpreter, against the reference on the whole sequence."""

from __future__ import annotations

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.dispatch import backend as backends
from megalin.ops.scans.context_parallel import SingleProcessExchange
from tests.ops.scans.scans import ROWS, SCANS, Case, compare_shards, make_shards
from tests.ops.scans.test_kernels import every_row, every_scan, segments, slow  # noqa: F401

DOCUMENTS = {
    "one": None,
    "over two shard boundaries": (2.5,),
    "at shard boundaries": (1.0, 2.0),
    "many": (0.3, 0.5, 1.1, 2.6, 2.8),
}


FAST = (((1, 1), "at shard boundaries"), ((2, 2), "many"))
"""Segments and documents; the lengths and the decays below have one document and one over a boundary."""


@every_row
@pytest.mark.parametrize(
    ("segments", "length", "documents"),
    [
        pytest.param(cut, length, documents, marks=[slow] * ((cut, documents) not in FAST))
        for cut, length in (((1, 1), 70), ((3, 1), 140), ((2, 2), 140))
        for documents in DOCUMENTS
    ],
    indirect=["segments"],
)
@pytest.mark.usefixtures("segments")
def test_two_phase_scans_are_as_good_as_the_reference(name, length, documents):
    compare_shards(name, Case(length, key=24, value=40, decay=0.003, ranks=3), DOCUMENTS[documents])


@every_scan
@pytest.mark.parametrize("length", [1, pytest.param(64, marks=slow), 65])
def test_lengths(name, length):
    compare_shards(name, Case(length, key=16, value=16, ranks=3))


@every_scan
@pytest.mark.parametrize("decay", [0.0, pytest.param(3.0, marks=slow), 30.0])
def test_decays(name, decay):
    compare_shards(name, Case(70, key=16, value=24, decay=decay, ranks=3), (1.5,))


@every_scan
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_dtypes(name, dtype):
    compare_shards(name, Case(100, key=24, value=40, decay=0.01, dtype=dtype, ranks=3), (1.5,))


@every_scan
def test_widths_that_kernels_pad(name):
    compare_shards(name, Case(70, key=13, value=21, ranks=2), (1.5,))


class _Recorded(SingleProcessExchange):
    """Records the shapes and dtypes of what is exchanged."""

    def __init__(self):
        self.exchanged = []

    def entering(self, state, transition, documents):
        self.exchanged.append([(x.shape, x.dtype) for x in (state, *transition.tensors())])
        return super().entering(state, transition, documents)

    def leaving_gradient(self, gradient, transition, documents):
        self.exchanged.append([(x.shape, x.dtype) for x in (gradient, *transition.tensors())])
        return super().leaving_gradient(gradient, transition, documents)


@pytest.mark.parametrize("name", SCANS)
def test_ranks_with_kernels_and_without_exchange_the_same_shapes(name):
    """At widths that kernels pad: a rank whose kernel failed its self-test must not make the others wait."""
    found = []
    for backend in ("triton", "reference"):
        inputs, ids, options = make_shards(name, Case(20, key=13, value=21, ranks=2), (1.5,))
        leaves = {kind: x.requires_grad_() for kind, x in inputs.items()}
        exchange = _Recorded()
        shard = exchange.sequence_shard(ids)
        scan = SCANS[name].scan(**leaves, **options, shard=shard, document_ids=ids, backend=backend)
        scan.output.square().sum().backward()
        found.append(exchange.exchanged)
    assert len(found[0]) == 2
    assert found[0] == found[1]


@every_row
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_the_reference_takes_a_sharded_sequence(name, documents):
    compare_shards(name, Case(50, key=8, value=12, ranks=3), DOCUMENTS[documents], backend="reference")


@every_scan
def test_another_document_does_not_move_a_bit(name):
    """Outputs and gradients of a document that starts in the second of three shards, for two first documents."""
    case = Case(40, key=16, value=24, ranks=3)
    found = []
    for scale in (1.0, 0.5):
        torch.manual_seed(0)
        inputs, ids, options = make_shards(name, case, (1.5,))
        first = ids == 0
        for x in inputs.values():
            x[first] *= scale
            x.requires_grad_()
        shard = SingleProcessExchange().sequence_shard(ids)
        scan = ROWS[name].scan(**inputs, **options, shard=shard, document_ids=ids, backend="triton")
        scan.output[~first].square().sum().backward()
        found.append([scan.output[~first], *(x.grad[~first] for x in inputs.values())])
        assert not any(x.grad[first].any() for x in inputs.values())
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[slow] * (name != "scalar_decay_scan")) for name in SCANS])
def test_without_a_two_phase_kernel_the_state_is_computed_separately(name, monkeypatch):
    """A two-phase kernel that fails its self-test is left out, and the kernel of the scan itself still runs."""
    monkeypatch.setattr(backends, "_used", {})
    monkeypatch.setattr(backends, "_unavailable_reason", lambda op, *_: "self-test: off" if op[:5] == "split" else "")
    monkeypatch.setenv("MEGALIN_KERNELS", f"{name}=triton")
    case = Case(70, key=16, value=24, ranks=3)
    compare_shards(name, case, (1.5,), backend="auto")
    assert backends.used()[name].backend == "triton"
    assert backends.used()["split_" + name].backend == "reference"
    monkeypatch.setenv("MEGALIN_KERNELS", f"split_{name}=triton")
    with pytest.raises(KernelError, match=f"split_{name}: the triton kernel cannot run: self-test: off"):
        compare_shards(name, case, backend="auto")
