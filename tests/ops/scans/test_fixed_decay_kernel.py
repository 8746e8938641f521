"""Triton kernels of the fixed-decay scan in the interpreter: its decoding step, and memory and arguments it refuses."""

import pytest
import torch

from megalin._triton.dispatch.tiles import aligned
from megalin.errors import KernelError
from megalin.ops.scans import fixed_decay_step as ops
from megalin.ops.scans.fixed_decay import decay_scan
from megalin.ops.scans.fixed_decay_step import decay_step, decay_step_reference
from megalin.ops.scans.states import decay_state
from tests.ops.scans.scans import Case, initial_state, make_inputs

SLOPES = {"none": None, "mild": (0.0, 0.07), "strong": (20.0, 3.0)}


def test_memory_that_the_copy_engine_cannot_read_is_copied():
    """Addresses that are no multiple of 16 bytes, and arbitrary strides of dimensions of size one."""
    case = Case(20, key=16, value=16, decay=0.07, dtype=torch.bfloat16)
    inputs, options = make_inputs("decay_scan", case)
    inputs |= initial_state(case)
    moved = {n: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x) for n, x in inputs.items()}
    odd = {n: x.as_strided(x.shape, (7, *x.stride()[1:])) for n, x in inputs.items()}
    expected = decay_scan(**inputs, **options, backend="triton")
    for changed in (moved, odd):
        assert torch.equal(decay_scan(**changed, **options, backend="triton").output, expected.output)


def test_repeated_memory_is_copied():
    """The copy engine's descriptions have positive strides; the gradient of a sum has none."""
    repeated = torch.ones(1, 1, 1, 8).expand(2, 3, 4, 8)
    assert min(aligned(repeated).stride()) > 0
    assert torch.equal(aligned(repeated), repeated)


OPS = {
    "decay_scan": lambda q, k, v, slopes, _, **options: decay_scan(q[None], k[None], v[None], slopes, **options),
    "decay_state": lambda _, k, v, slopes, __, **options: [decay_state(k[None], v[None], slopes, **options)],
    "decay_step": decay_step,
}


@pytest.mark.parametrize("view", [lambda x: x.repeat_interleave(2)[::2], lambda x: x[:1].expand(2)])
@pytest.mark.parametrize("name", OPS)
def test_strided_slopes(name, view):
    """A column of a table, and one slope of all heads."""
    slopes = view(torch.tensor([0.1, 0.7]))
    q, k, v = (torch.randn(3, 2, 16).bfloat16() for _ in range(3))
    state = torch.randn(3, 2, 16, 16)
    found, expected = (OPS[name](q, k, v, x, state, backend="triton") for x in (slopes, slopes.contiguous()))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("decay", SLOPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_step_is_as_good_as_the_reference(decay, dtype):
    slopes = None if SLOPES[decay] is None else torch.tensor(SLOPES[decay])
    q, k, v = (torch.randn(3, 2, width).to(dtype) for width in (24, 24, 40))
    state = torch.randn(3, 2, 24, 40)
    found = decay_step(q, k, v, slopes, state, backend="triton")
    wide = None if slopes is None else slopes.double()
    truth = decay_step_reference(q.double(), k.double(), v.double(), wide, state.double())
    torch.testing.assert_close(found.state, truth.state.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.output, truth.output.to(dtype), rtol=1e-2, atol=1e-5)
    assert found.output.dtype == dtype


def test_unsupported_arguments_are_refused():
    x = torch.randn(1, 3, 1, 8)
    with pytest.raises(KernelError, match=r"decay_scan: the triton kernel does not take q, k, v of torch\.float64"):
        decay_scan(x.double(), x.double(), x.double(), None, backend="triton")
    wide = torch.randn(1, 3, 1, 264)
    with pytest.raises(KernelError, match="does not take heads of 264 keys and 8 values, above 256"):
        decay_scan(wide, wide, x, None, backend="triton")
    with pytest.raises(KernelError, match="decay_step: the triton kernel does not take inputs that require gradients"):
        decay_step(x[:, 0].requires_grad_(), x[:, 0], x[:, 0], None, torch.zeros(1, 1, 8, 8), backend="triton")


def test_the_fake_of_the_step_has_the_same_shapes():
    q, k, v, state = (torch.randn(shape) for shape in ((1, 2, 16), (1, 2, 16), (1, 2, 24), (1, 2, 16, 24)))
    arguments = (q, k, v, None, state)
    torch.library.opcheck(ops._step, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_step_in_place_overwrites_its_state():
    q, k, v, state = (torch.randn(shape) for shape in ((3, 2, 16), (3, 2, 16), (3, 2, 24), (3, 2, 16, 24)))
    expected = decay_step(q, k, v, torch.tensor([0.0, 0.3]), state, backend="triton")
    found = decay_step(q, k, v, torch.tensor([0.0, 0.3]), state, in_place=True, backend="triton")
    assert found.state is state
    assert torch.equal(state, expected.state)
    assert torch.equal(found.output, expected.output)
