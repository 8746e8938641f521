"""Triton kernels of the vector-decay scan in the interpreter: mixed decays, wide keys, and its decoding step."""

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.scans.vector_decay import vector_decay_scan, vector_decay_scan_reference
from megalin.ops.scans.vector_decay_step import vector_decay_step, vector_decay_step_reference
from tests.numerics import relative_error
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.scans import Case, compare, initial_state, make_inputs
from tests.ops.scans.test_vector_decay import BOUNDARIES, DECAYS, SCALE, documents_of


def compare_changed(case, documents=None, **changed):
    """Compares with the reference, some of the inputs replaced."""
    options = {"scale": SCALE, "document_ids": documents}
    assert_as_good_as_the_reference(
        lambda **x: vector_decay_scan(backend="triton", **options, **x),
        lambda **x: vector_decay_scan_reference(**options, **x),
        {"v": torch.randn(case.batch, case.tokens, 2, case.value).to(case.dtype)} | changed | initial_state(case),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("boundaries", ["edges of chunks", "none and many"])
def test_decays_that_differ_between_tokens_and_channels(dtype, boundaries):
    case = Case(130, key=20, value=24, dtype=dtype, batch=2)
    inputs, _ = make_inputs("vector_decay_scan", case)
    choice = torch.tensor(list(DECAYS.values()))
    inputs["log_decay"] = choice[torch.randint(len(choice), inputs["log_decay"].shape)]
    compare_changed(case, documents_of(BOUNDARIES[boundaries], 130), **inputs)


def test_mild_and_steep_decays_on_a_chip_with_tensor_memory(monkeypatch):
    from megalin._triton.scans import vector_decay as kernels

    monkeypatch.setattr(kernels, "has_tensor_memory", lambda: True)
    case = Case(130, key=20, value=24, dtype=torch.bfloat16)
    inputs, _ = make_inputs("vector_decay_scan", case)
    inputs["log_decay"] = torch.tensor([-0.01, -3.0])[(torch.arange(130) >= 64).long()][None, :, None, None].expand(
        inputs["log_decay"].shape
    )
    compare_changed(case, **inputs)


def test_keys_wider_than_the_values_dtype():
    case = Case(70, key=20, value=24, decay=0.1, dtype=torch.bfloat16)
    inputs, _ = make_inputs("vector_decay_scan", case)
    compare_changed(case, **inputs | {name: inputs[name].float() for name in "qk"})


@pytest.mark.parametrize(("key", "value"), [(1, 1), (256, 16)])
def test_any_width(key, value):
    compare("vector_decay_scan", Case(65, key, value, decay=0.1, dtype=torch.bfloat16))


def test_states_pass_between_segments_of_a_long_sequence(monkeypatch):
    from megalin._triton.scans import vector_decay as kernels

    monkeypatch.setattr(kernels, "SEGMENT_CHUNKS", 1)
    compare("vector_decay_scan", Case(300, key=20, value=24, decay=0.1, dtype=torch.bfloat16))


def test_unsupported_widths_are_refused():
    inputs, _ = make_inputs("vector_decay_scan", Case(3, key=257, value=1))
    with pytest.raises(
        KernelError, match="vector_decay_scan: the triton kernel does not take keys of width 257, above"
    ):
        vector_decay_scan(**inputs, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key", "value"), [(1, 1), (20, 24), (64, 300)])
def test_the_step_is_as_good_as_the_reference(dtype, key, value):
    case = Case(1, key, value, decay=2.0, dtype=dtype, batch=2)
    inputs = {name: x[:, 0] for name, x in make_inputs("vector_decay_scan", case)[0].items()}
    inputs["state"] = initial_state(case)["initial_state"]
    truth = vector_decay_step_reference(**{name: x.double() for name, x in inputs.items()}, scale=SCALE)
    same = vector_decay_step_reference(**inputs, scale=SCALE)
    found = vector_decay_step(**inputs, scale=SCALE, backend="triton")
    for x, y, z in zip(found, same, truth, strict=True):
        assert x.dtype == y.dtype
        assert relative_error(x, z) <= 2 * relative_error(y, z) + 2**-23


def test_the_step_takes_decays_and_keys_that_heads_share():
    q, k, v, state = (torch.randn(shape) for shape in ((2, 1, 16), (2, 1, 16), (2, 3, 8), (2, 3, 16, 8)))
    inputs = (q, k, v, -torch.rand(2, 3, 1), state)
    for x, y in zip(vector_decay_step(*inputs, backend="triton"), vector_decay_step_reference(*inputs), strict=True):
        assert relative_error(x, y) <= 1e-6


def test_the_step_refuses_tensors_that_need_gradients():
    inputs = [torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.zeros(1, 1, 2)]
    with pytest.raises(KernelError, match="does not take tensors that need gradients"):
        vector_decay_step(*inputs, torch.ones(1, 1, 2, 2, requires_grad=True), backend="triton")


def test_a_step_in_place_overwrites_its_state():
    q, k, v, g = (torch.randn(2, 3, 20) for _ in range(4))
    state = torch.randn(2, 3, 20, 20)
    expected = vector_decay_step(q, k, v, -g.exp(), state, backend="triton")
    found = vector_decay_step(q, k, v, -g.exp(), state, in_place=True, backend="triton")
    assert found.state is state
    assert torch.equal(state, expected.state)
    assert torch.equal(found.output, expected.output)
