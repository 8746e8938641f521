"""Triton kernels of the scalar-decay scan in the interpreter, against the reference: values and every gradient."""

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.scans import scalar_decay as ops
from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_scan_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.test_fixed_decay import documents_of

STRENGTHS = {"none": 0.0, "mild": 0.3, "strong": 20.0}


def make_inputs(length, dtype=torch.bfloat16, *, key=24, value=40, batch=1, key_heads=1, strength=0.3):
    return {
        "q": torch.randn(batch, length, key_heads, key).to(dtype),
        "k": torch.randn(batch, length, key_heads, key).to(dtype),
        "v": torch.randn(batch, length, 2, value).to(dtype),
        "log_decay": -strength * torch.randn(batch, length, 2).abs(),
        "initial_state": torch.randn(batch, 2, key, value),
    }


def compare(inputs, documents=None):
    assert_as_good_as_the_reference(
        lambda **x: scalar_decay_scan(document_ids=documents, backend="triton", **x),
        lambda **x: scalar_decay_scan_reference(document_ids=documents, **x),
        inputs,
    )


@pytest.mark.parametrize("decay", STRENGTHS)
@pytest.mark.parametrize(("length", "key_heads"), [(1, 1), (63, 2), (65, 1), (150, 2)])
def test_the_kernel_is_as_good_as_the_reference(length, key_heads, decay):
    compare(make_inputs(length, key_heads=key_heads, strength=STRENGTHS[decay]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("decay", ["mild", "strong"])
def test_other_dtypes(dtype, decay):
    compare(make_inputs(100, dtype, strength=STRENGTHS[decay]))


@pytest.mark.parametrize(("key", "value"), [(6, 3), (80, 17)])
def test_widths_that_are_no_power_of_two(key, value):
    compare(make_inputs(70, key=key, value=value))


def test_no_initial_state_and_no_gradient_of_the_last():
    inputs = make_inputs(100)
    del inputs["initial_state"]
    assert_as_good_as_the_reference(
        lambda **x: [scalar_decay_scan(backend="triton", **x).output],
        lambda **x: [scalar_decay_scan_reference(**x).output],
        inputs,
    )


@pytest.mark.parametrize("boundaries", [((64,), (128,)), ((63, 129), (65, 127)), ((), tuple(range(1, 150, 3)))])
def test_packed_documents(boundaries):
    compare(make_inputs(150, batch=2), documents_of(boundaries, 150))


def test_states_pass_between_blocks():
    inputs = make_inputs(520, key=16, value=16, strength=0.01)
    from megalin._triton.scans import scalar_decay as kernels

    assert kernels.saved_shape(inputs["k"], inputs["v"])[2] > 1
    compare(inputs, documents_of(((100,),), 520))


@pytest.mark.parametrize("boundary", [40, 64])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary):
    inputs, documents = make_inputs(150), documents_of(((boundary,),), 150)
    results = []
    for scale in (1.0, 3.0):
        # A decay so strong that even an fp64 sum over both documents would lose the decays of the second.
        scales = dict.fromkeys(inputs, scale) | {"log_decay": scale**24}
        changed = {
            name: x * scale
            if name == "initial_state"
            else torch.cat([x[:, :boundary] * scales[name], x[:, boundary:]], dim=1)
            for name, x in inputs.items()
        }

        def second_document(**x):
            scan = scalar_decay_scan(document_ids=documents, backend="triton", **x)
            return [scan.output[:, boundary:], scan.state]

        results.append(outputs_and_gradients(second_document, changed))
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
    for name in ("gradient.q", "gradient.k", "gradient.v", "gradient.log_decay"):
        assert results[0][name][:, :boundary].eq(0).all()
    assert results[0]["gradient.initial_state"].eq(0).all()


def test_extreme_decay_stays_finite():
    inputs = make_inputs(100)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -500.0)
    found = outputs_and_gradients(lambda **x: scalar_decay_scan(backend="triton", **x), inputs)
    assert all(x.isfinite().all() for x in found.values())


def test_a_self_test_passes():
    assert ops._self_test("triton", "cpu") == ""


def test_unsupported_arguments_are_refused():
    x = make_inputs(3, key_heads=2)
    with pytest.raises(KernelError, match="the triton kernel does not take 1 heads of q but 2 of k"):
        scalar_decay_scan(**x | {"q": x["q"][:, :, :1]}, backend="triton")
    with pytest.raises(KernelError, match="does not take heads of 136 values, above 128"):
        scalar_decay_scan(**make_inputs(3, value=136), backend="triton")


def test_the_op_compiles_inside_a_block():
    inputs = make_inputs(100, key=16, value=24)

    def function(q, k, v, log_decay, initial_state):
        return scalar_decay_scan(q.sin(), k, v, log_decay, initial_state=initial_state, backend="triton")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = outputs_and_gradients(function, inputs)
    for name, found in outputs_and_gradients(compiled, inputs).items():
        assert torch.equal(found, expected[name]), name
