"""Kernels of the vector-decay scan on a GPU against fp64: lengths, decays, dtypes, widths, documents, equal bits."""

import pytest
import torch

from megalin.ops.scans.vector_decay import vector_decay_scan, vector_decay_scan_reference
from megalin.ops.scans.vector_decay_step import vector_decay_step, vector_decay_step_reference
from tests.numerics import errors

FLOOR = {torch.float32: 2.4e-7, torch.bfloat16: 7.8e-3, torch.float16: 9.8e-4}
DECAYS = (0.0, -1e-6, -1.0, -5.0, -20.0, -50.0)
BOUNDARIES = ((15, 63, 64, 500), (20, 70, 71, 100, 128, 900))
TENSORS = ("q", "k", "v", "log_decay")


def make_inputs(length, decay, dtype, key, value, *, keys_dtype=None, batch=2, heads=2):
    """Inputs whose decay is one number, continuous random values ("weak", "data") or random DECAYS ("mixed")."""
    shape = (batch, length, heads, key)
    log_decay = {
        "weak": lambda: -torch.randn(shape).exp() * 0.01,
        "data": lambda: -torch.randn(shape).exp() * 0.3,
        "mixed": lambda: torch.tensor(DECAYS)[torch.randint(len(DECAYS), shape)],
    }.get(decay, lambda: torch.full(shape, decay))()
    inputs = {
        "v": torch.randn(*shape[:-1], value).to(dtype),
        "q": torch.randn(shape).to(keys_dtype or dtype),
        "k": torch.randn(shape).to(keys_dtype or dtype),
        "log_decay": log_decay,
        "initial_state": torch.randn(batch, heads, key, value),
    }
    return {name: x.cuda() for name, x in inputs.items()}


def documents_of(length):
    starts = torch.zeros(2, length, dtype=torch.int32)
    for row, places in enumerate(BOUNDARIES):
        starts[row, [place for place in places if place < length]] = 1
    return starts.cumsum(1, dtype=torch.int32).cuda()


def results(function, inputs, **options):
    """Outputs, and all gradients of a fixed weighted sum of them."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves, scale=0.3, **options)
    draw = torch.Generator("cuda").manual_seed(7)
    weights = [torch.randn(y.shape, generator=draw, device="cuda", dtype=torch.float64) for y in outputs]
    sum((y.double() * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()
    found = {f"output.{i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient.{name}": leaf.grad for name, leaf in leaves.items()}


def check(inputs, documents=None):
    truth = results(
        vector_decay_scan_reference, {name: x.double() for name, x in inputs.items()}, document_ids=documents
    )
    same = errors(results(vector_decay_scan_reference, inputs, document_ids=documents), truth)
    first, second = (results(vector_decay_scan, inputs, document_ids=documents, backend="triton") for _ in range(2))
    found, floor = errors(first, truth), FLOOR[inputs["v"].dtype]
    assert not {n: (found[n], same[n]) for n in truth if not found[n] <= max(2 * same[n], floor)}
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("length", "decay"),
    [(length, "data") for length in (1, 63, 64, 65, 1000, 4096)]
    + [(1000, decay) for decay in (0.0, -1e-6, "weak", -1.0, -20.0, "mixed")],
)
def test_values_and_gradients_are_as_good_as_the_reference(length, decay, packed):
    check(make_inputs(length, decay, torch.bfloat16, 128, 128), documents_of(length) if packed else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("decay", [0.0, "weak", "mixed", -20.0])
def test_values_and_gradients_in_other_dtypes(decay, dtype):
    check(make_inputs(300, decay, dtype, 64, 64), documents_of(300))


# Each width compiles all kernels.
@pytest.mark.parametrize("decay", ["weak", "data", "mixed"])
@pytest.mark.parametrize(("key", "value", "packed"), [(20, 24, False), (72, 40, True), (256, 96, False)])
def test_any_width(key, value, packed, decay):
    check(make_inputs(500, decay, torch.bfloat16, key, value), documents_of(500) if packed else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key", "value"), [(6, 64), (64, 6), (8, 8), (12, 20), (21, 23)])
def test_heads_narrower_than_a_block(key, value, dtype):
    """Head sizes of the models that `megalin verify` shrinks."""
    check(make_inputs(72, "data", dtype, key, value), documents_of(72))


@pytest.mark.parametrize("decay", ["weak", "mixed"])
@pytest.mark.parametrize(("length", "key", "value"), [(1000, 64, 512), (36, 6, 32), (72, 6, 64)])
def test_keys_wider_than_the_values_dtype(length, key, value, decay):
    """Shapes of Rodimus, full and shrunk by `megalin verify`; its keys come from gates in fp32."""
    inputs = make_inputs(length, decay, torch.bfloat16, key, value, heads=1, keys_dtype=torch.float32)
    check(inputs, documents_of(length) if key == 6 else None)


@pytest.mark.parametrize("decay", ["weak", "data"])
def test_a_long_sequence(decay):
    """One call against the same kernels on pieces, short enough for the reference to check."""
    inputs = make_inputs(131072, decay, torch.bfloat16, 128, 128, batch=1, heads=1)
    whole = vector_decay_scan(**inputs, backend="triton")
    state, outputs = inputs["initial_state"], []
    for begin in range(0, 131072, 4096):
        piece = {name: inputs[name][:, begin : begin + 4096] for name in TENSORS}
        scan = vector_decay_scan(**piece, initial_state=state, backend="triton")
        outputs.append(scan.output)
        state = scan.state
    found = errors({"output": whole.output, "state": whole.state}, {"output": torch.cat(outputs, 1), "state": state})
    assert found["output"] <= 4e-3
    assert found["state"] <= 1e-5


@pytest.mark.parametrize("boundary", [15, 64, 100, 700])
def test_contents_of_one_document_do_not_move_bits_of_the_next(boundary):
    inputs = make_inputs(1000, "weak", torch.bfloat16, 128, 128)
    documents = (torch.arange(1000, device="cuda") >= boundary).int().expand(2, -1)
    found = []
    for factor in (1.0, 100.0):
        changed = {n: torch.cat([inputs[n][:, :boundary] * factor, inputs[n][:, boundary:]], dim=1) for n in TENSORS}
        changed["initial_state"] = inputs["initial_state"] * factor

        def second_document(**x):
            scan = vector_decay_scan(document_ids=documents, backend="triton", **x)
            return scan.output[:, boundary:], scan.state

        found.append(results(second_document, changed))
    for name in ("output.0", "output.1"):
        assert torch.equal(found[0][name], found[1][name]), name
    for name in TENSORS:
        first, second = (result[f"gradient.{name}"] for result in found)
        assert torch.equal(first[:, boundary:], second[:, boundary:]), name
        assert first[:, :boundary].eq(0).all(), name
    assert found[0]["gradient.initial_state"].eq(0).all()


def test_a_compiled_function_gives_the_same_bits():
    inputs = make_inputs(300, "data", torch.bfloat16, 128, 128)

    def scan(**x):
        return tuple(vector_decay_scan(**x, backend="triton"))

    compiled = torch.compile(scan, fullgraph=True, dynamic=False)
    expected, found = results(scan, inputs), results(compiled, inputs)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key", "value"), [(128, 128), (64, 4096), (20, 24)])
def test_a_step_is_as_good_as_the_reference(key, value, dtype):
    inputs = make_inputs(1, "data", dtype, key, value, heads=3)
    state = inputs.pop("initial_state")
    inputs = {name: x[:, 0] for name, x in inputs.items()} | {"state": state}
    truth = vector_decay_step_reference(**{name: x.double() for name, x in inputs.items()}, scale=0.3)._asdict()
    same = errors(vector_decay_step_reference(**inputs, scale=0.3)._asdict(), truth)
    found = errors(vector_decay_step(**inputs, scale=0.3, backend="triton")._asdict(), truth)
    assert not {n: (found[n], same[n]) for n in truth if not found[n] <= 2 * same[n] + 2**-22}
