"""States that rotate with LRPE between segments: the kernels, and segments against one scan of the whole sequence."""

import math

import pytest
import torch

from megalin.errors import KernelError, OperandError
from megalin.ops.positions.lrpe_states import enter_segments, move_origin
from megalin.ops.positions.silu_lrpe import silu_lrpe_reference
from megalin.ops.scans.fixed_decay import decay_scan_reference
from megalin.ops.scans.states import decay_state_reference
from tests.numerics import outputs_and_gradients, relative_error
from tests.ops.kernels import assert_as_good_as_the_reference

B, H, WIDTH = 2, 3, 6
SLOPES = torch.tensor([0.0, 0.02, 0.5], dtype=torch.float64)
every_form = pytest.mark.parametrize("form", ["cosine", "rotation"])


def documents(length):
    """Ids of a sample with document starts inside and between segments of 8 tokens, and of one with one document."""
    ids = torch.zeros(B, length, dtype=torch.int64)
    for start in (3, 16, 21, 22):
        ids[0, start:] += 1
    return ids


def in_segments(projection, theta, form, length, ids=None, initial=None):
    """(output, final state in positions of the sequence) of scans whose positions restart every `length` tokens."""
    total = projection.shape[1]
    positions = torch.arange(total) % length - length // 2
    q, k, v = silu_lrpe_reference(projection, theta, positions, form=form)
    q, k, v = (x.reshape(-1, length, *x.shape[2:]) for x in (q, k, v))
    rows = None if ids is None else ids.reshape(-1, length)
    added = decay_state_reference(k, v, SLOPES, document_ids=rows).unflatten(0, (B, -1))
    if initial is not None:
        initial = move_origin(initial, theta, length // 2, form=form)
    states = enter_segments(
        added, theta, SLOPES, form=form, length=length, initial=initial, document_ids=ids, backend="reference"
    )
    entering = states.entering.flatten(0, 1)
    output = decay_scan_reference(q, k, v, SLOPES, initial_state=entering, document_ids=rows).output
    leaving = move_origin(states.leaving, theta, -(total + length // 2), form=form)
    return [output.reshape(B, total, H, WIDTH), leaving]


def of_the_whole_sequence(projection, theta, form, ids=None, initial=None):
    q, k, v = silu_lrpe_reference(projection, theta, torch.arange(projection.shape[1]), form=form)
    return list(decay_scan_reference(q, k, v, SLOPES, initial_state=initial, document_ids=ids))


@every_form
@pytest.mark.parametrize("length", [1, 8, 32])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("entered", [False, True], ids=["from zero", "from a state"])
def test_segments_equal_the_whole_sequence(form, length, packed, entered):
    inputs = {
        "projection": torch.randn(B, 32, 3, H, WIDTH, dtype=torch.float64),
        "theta": torch.rand(H, WIDTH if form == "cosine" else WIDTH // 2, dtype=torch.float64),
    }
    if entered:
        inputs["initial"] = torch.randn(B, H, 2 * WIDTH if form == "cosine" else WIDTH, WIDTH, dtype=torch.float64)
    ids = documents(32) if packed else None
    expected = outputs_and_gradients(lambda **x: of_the_whole_sequence(**x, form=form, ids=ids), inputs)
    found = outputs_and_gradients(lambda **x: in_segments(**x, form=form, length=length, ids=ids), inputs)
    for name, tensor in expected.items():
        assert relative_error(found[name], tensor) < 1e-12, name


@every_form
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("entered", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize(("segments", "key", "value"), [(1, 4, 5), (5, 24, 40), (3, 40, 130)])
def test_the_kernels_are_as_good_as_the_reference(form, packed, entered, segments, key, value):
    inputs = {"added": torch.randn(B, segments, H, key, value), "theta": torch.rand(H, key // 2)}
    if entered:
        inputs["initial"] = torch.randn(B, H, key, value)
    ids = documents(8 * segments) if packed else None

    def run(added, theta, backend, initial=None):
        slopes, theta = SLOPES.to(added.dtype), theta.mT.contiguous().mT
        options = {"form": form, "length": 8, "document_ids": ids, "backend": backend}
        return enter_segments(added, theta, slopes, initial=initial, **options)

    assert_as_good_as_the_reference(
        lambda **x: run(**x, backend="triton"), lambda **x: run(**x, backend="reference"), inputs
    )


@every_form
def test_it_compiles_into_one_graph(form):
    inputs = {
        "added": torch.randn(B, 4, H, 8, WIDTH),
        "theta": torch.rand(H, 4),
        "initial": torch.randn(B, H, 8, WIDTH),
    }

    def run(added, theta, initial):
        options = {"form": form, "length": 8, "initial": initial, "backend": "triton"}
        found = enter_segments(added * 2.0, theta, SLOPES.float(), **options)
        return [found.entering.sin(), move_origin(found.leaving, theta, 1000, form=form)]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected, found = outputs_and_gradients(run, inputs), outputs_and_gradients(compiled, inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_far_origins_lose_no_digits():
    """A distance of 2^20 tokens at 2 pi / 3 radians each is a third of a turn."""
    state, theta = torch.randn(1, 1, 2, 3), torch.tensor([[2.0 * math.pi / 3.0]])
    near = move_origin(state.double(), theta.double(), 2**20, form="cosine")
    assert relative_error(move_origin(state, theta, 2**20, form="cosine").double(), near) < 2e-7


def test_what_the_kernel_does_not_take():
    added, theta = torch.randn(1, 2, 1, 4, 4).double(), torch.rand(1, 2)
    with pytest.raises(KernelError, match=r"states of torch\.float64"):
        enter_segments(added, theta, torch.ones(1), form="cosine", length=4, backend="triton")
    with pytest.raises(OperandError, match="document_ids has 7 tokens per sequence, but 2 segments of 4 have 8; they "):
        enter_segments(added, theta, torch.ones(1), form="cosine", length=4, document_ids=torch.zeros(1, 7).int())
    with pytest.raises(OperandError, match=r"initial has dtype torch\.float32, added torch\.float64"):
        enter_segments(added, theta, torch.ones(1), form="cosine", length=4, initial=added[:, 0].float())
    with pytest.raises(OperandError, match="theta has 3 frequencies per head"):
        enter_segments(added, torch.rand(1, 3), torch.ones(1), form="cosine", length=4)
