"""Triton kernels of the decay scan in the interpreter, against the reference: lengths, widths, documents."""

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.scans import fixed_decay as ops
from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_reference, decay_step, decay_step_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.test_fixed_decay import documents_of

SLOPES = {"none": None, "mild": (0.0, 0.07), "strong": (20.0, 3.0)}


@pytest.fixture(params=[1, 2, 3])
def blocks(request, monkeypatch):
    """Number of blocks that a long enough sequence is cut into."""
    from megalin._triton.scans import fixed_decay as kernels

    monkeypatch.setattr(kernels, "num_blocks", lambda rows: request.param)
    monkeypatch.setattr(kernels, "num_parts", lambda rows, slots: 1 if request.param == 3 else 2)


def make_inputs(length, dtype=torch.float32, *, key=24, value=40, batch=1):
    widths = {"q": key, "k": key, "v": value}
    inputs = {name: torch.randn(batch, length, 2, width).to(dtype) for name, width in widths.items()}
    return inputs | {"initial_state": torch.randn(batch, 2, key, value)}


def compare(inputs, slopes, documents=None):
    slopes = None if slopes is None else torch.tensor(slopes)
    assert_as_good_as_the_reference(
        lambda **x: decay_scan(slopes=slopes, document_ids=documents, backend="triton", **x),
        lambda **x: decay_scan_reference(slopes=slopes, document_ids=documents, **x),
        inputs,
    )


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("decay", SLOPES)
@pytest.mark.parametrize("length", [1, 63, 65, 150])
def test_the_kernel_is_as_good_as_the_reference(length, decay):
    compare(make_inputs(length, torch.bfloat16), SLOPES[decay])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    compare(make_inputs(150, dtype), SLOPES["mild"])


@pytest.mark.parametrize(("key", "value"), [(6, 3), (80, 17), (16, 130)])
def test_widths_that_are_no_power_of_two(key, value):
    compare(make_inputs(70, key=key, value=value), SLOPES["mild"])


def test_no_initial_state_and_no_gradient_of_the_last():
    inputs = make_inputs(150, torch.bfloat16)
    del inputs["initial_state"]
    slopes = torch.tensor(SLOPES["mild"])
    assert_as_good_as_the_reference(
        lambda **x: [decay_scan(slopes=slopes, backend="triton", **x).output],
        lambda **x: [decay_scan_reference(slopes=slopes, **x).output],
        inputs,
    )
    assert_as_good_as_the_reference(
        lambda **x: [decay_scan(slopes=slopes, backend="triton", **x).state],
        lambda **x: [decay_scan_reference(slopes=slopes, **x).state + 0 * x["q"].sum()],
        inputs,
    )


def test_strided_inputs():
    slopes = torch.tensor(SLOPES["mild"])
    qkv = {"qkv": torch.randn(2, 2, 70, 3, 40).to(torch.bfloat16)}

    def with_op(op):
        return lambda qkv: op(*qkv.transpose(1, 2).unbind(3), slopes)

    assert_as_good_as_the_reference(
        with_op(lambda *x: decay_scan(*x, backend="triton")), with_op(decay_scan_reference), qkv
    )


def test_memory_that_the_copy_engine_cannot_read_is_copied():
    """Addresses that are no multiple of 16 bytes, and arbitrary strides of dimensions of size one."""
    inputs = make_inputs(20, torch.bfloat16, key=16, value=16)
    moved = {n: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x) for n, x in inputs.items()}
    odd = {n: x.as_strided(x.shape, (7, *x.stride()[1:])) for n, x in inputs.items()}
    slopes = torch.tensor(SLOPES["mild"])
    expected = decay_scan(slopes=slopes, backend="triton", **inputs)
    for changed in (moved, odd):
        assert torch.equal(decay_scan(slopes=slopes, backend="triton", **changed).output, expected.output)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("boundaries", [((64,), (128,)), ((63, 129), (65, 127)), ((), tuple(range(1, 150, 3)))])
@pytest.mark.parametrize("decay", ["none", "mild"])
def test_packed_documents(boundaries, decay):
    compare(make_inputs(150, torch.bfloat16, batch=2), SLOPES[decay], documents_of(boundaries, 150))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("boundary", [40, 64])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary):
    inputs, documents = make_inputs(150, torch.bfloat16), documents_of(((boundary,),), 150)
    results = []
    for scale in (1.0, -3.0):
        changed = {n: torch.cat([x[:, :boundary] * scale, x[:, boundary:]], 1) for n, x in inputs.items() if n in "qkv"}

        def second_document(**x):
            scan = decay_scan(slopes=torch.tensor(SLOPES["mild"]), document_ids=documents, backend="triton", **x)
            return [scan.output[:, boundary:], scan.state]

        results.append(
            outputs_and_gradients(second_document, changed | {"initial_state": inputs["initial_state"] * scale})
        )
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    for name in ("gradient.q", "gradient.k", "gradient.v"):
        assert results[0][name][:, :boundary].eq(0).all()
    assert results[0]["gradient.initial_state"].eq(0).all()


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


def test_a_self_test_passes():
    assert ops._self_test("triton", "cpu") == ""
    assert ops._self_test_step("triton", "cpu") == ""


def test_unsupported_arguments_are_refused():
    x = torch.randn(1, 3, 1, 8)
    with pytest.raises(KernelError, match=r"decay_scan: the triton kernel does not take q, k, v of torch\.float64"):
        decay_scan(x.double(), x.double(), x.double(), None, backend="triton")
    wide = torch.randn(1, 3, 1, 264)
    with pytest.raises(KernelError, match="does not take heads of 264 keys and 8 values, above 256"):
        decay_scan(wide, wide, x, None, backend="triton")
    with pytest.raises(KernelError, match="decay_step: the triton kernel does not take inputs that require gradients"):
        decay_step(x[:, 0].requires_grad_(), x[:, 0], x[:, 0], None, torch.zeros(1, 1, 8, 8), backend="triton")


@pytest.mark.usefixtures("blocks")
def test_the_op_compiles_inside_a_block():
    slopes = torch.tensor(SLOPES["mild"])
    inputs = make_inputs(150, torch.bfloat16, key=16, value=16)

    def function(q, k, v, initial_state):
        return decay_scan(q.sin(), k, v, slopes, initial_state=initial_state, backend="triton")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = outputs_and_gradients(function, inputs)
    for name, found in outputs_and_gradients(compiled, inputs).items():
        assert torch.equal(found, expected[name]), name


def test_the_fake_of_the_step_has_the_same_shapes():
    q, k, v, state = make_inputs(1, key=16, value=24).values()
    arguments = (q[:, 0], k[:, 0], v[:, 0], None, state)
    torch.library.opcheck(ops._step, arguments, test_utils=("test_schema", "test_faketensor"))
