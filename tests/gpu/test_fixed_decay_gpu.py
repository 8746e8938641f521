"""Kernels of the decay scans on a GPU against fp64: lengths, decays, dtypes, widths, documents, equal bits."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_reference
from megalin.ops.scans.fixed_decay_step import decay_step, decay_step_reference
from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_scan_reference
from tests.numerics import errors

CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(importlib.util.find_spec("megalin._C") is None, reason="the CUDA extension is not built"),
)
FLOOR = {torch.float32: 2.4e-7, torch.bfloat16: 7.8e-3, torch.float16: 9.8e-4}
SLOPES = {"none": None, "weak": (1e-6, 0.004, 0.0), "strong": (0.5, 3.0, 20.0)}
STRENGTHS = {"none": 0.0, "weak": 0.003, "strong": 20.0}
OTHERS = [
    (torch.float32, 128, 64),
    (torch.float16, 128, 64),
    (torch.bfloat16, 256, 128),
    (torch.bfloat16, 80, 17),
]
BOUNDARIES = ((15, 63, 64, 500), (20, 70, 71, 100, 128, 900))


def documents_of(length):
    starts = torch.zeros(2, length, dtype=torch.int32)
    for row, places in enumerate(BOUNDARIES):
        starts[row, [place for place in places if place < length]] = 1
    return starts.cumsum(1, dtype=torch.int32).cuda()


def make_inputs(length, dtype, key, value, *, key_heads=3):
    shapes = {"q": (key_heads, key), "k": (key_heads, key), "v": (3, value)}
    inputs = {name: torch.randn(2, length, *shape).to("cuda", dtype) for name, shape in shapes.items()}
    return inputs | {"initial_state": torch.randn(2, 3, key, value).cuda()}


def results(function, inputs, **options):
    """Outputs, and all gradients of a fixed weighted sum of them."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves, **options)
    draw = torch.Generator("cuda").manual_seed(7)
    weights = [torch.randn(y.shape, generator=draw, device="cuda", dtype=torch.float64) for y in outputs]
    sum((y.double() * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()
    found = {f"output.{i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient.{name}": leaf.grad for name, leaf in leaves.items()}


def compare(function, reference, inputs, *, backend="triton", **options):
    exact = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    truth = results(reference, {name: x.double() for name, x in inputs.items()}, **exact)
    same = errors(results(reference, inputs, **options), truth)
    first, second = (results(function, inputs, backend=backend, **options) for _ in range(2))
    found, floor = errors(first, truth), FLOOR[inputs["v"].dtype]
    bad = {n: (found[n], same[n]) for n in truth if not found[n] <= max(2 * same[n], floor)}
    assert not bad, f"(error, reference's error): {bad}"
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", SLOPES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("backend", ["triton", CUDA])
def test_fixed_decay(backend, length, decay, packed):
    slopes = None if SLOPES[decay] is None else torch.tensor(SLOPES[decay], device="cuda")
    documents = documents_of(length) if packed else None
    inputs = make_inputs(length, torch.bfloat16, 128, 128)
    compare(decay_scan, decay_scan_reference, inputs, backend=backend, slopes=slopes, document_ids=documents)


@pytest.mark.parametrize(("dtype", "key", "value"), OTHERS)
def test_fixed_decay_of_other_dtypes_and_widths(dtype, key, value):
    slopes = torch.tensor(SLOPES["weak"], device="cuda")
    compare(decay_scan, decay_scan_reference, make_inputs(1000, dtype, key, value), slopes=slopes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("key", "value"),
    [(256, 128), (200, 136), (128, 64), (64, 128), (80, 17), (40, 104), (192, 96), (96, 192), (88, 136), (136, 200)],
)
@pytest.mark.parametrize("backend", [CUDA])
def test_fixed_decay_of_other_widths_in_cuda(backend, key, value, packed):
    slopes = torch.tensor(SLOPES["weak"], device="cuda")
    documents = documents_of(1000) if packed else None
    inputs = make_inputs(1000, torch.bfloat16, key, value)
    compare(decay_scan, decay_scan_reference, inputs, backend=backend, slopes=slopes, document_ids=documents)


@pytest.mark.parametrize("backend", ["triton", CUDA])
def test_fixed_decay_as_the_first_launch_of_a_thread(backend, monkeypatch):
    """As in autograd's thread. Memory is of torch's cache and not filled: both would make the context current."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    inputs = make_inputs(1000, torch.bfloat16, 192, 96)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}

    def run():
        o = decay_scan(**leaves, slopes=None, backend=backend).output
        return torch.autograd.grad(o, list(leaves.values()), o.detach())

    expected = run()
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(run).result()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", ["triton", CUDA])
def test_fixed_decay_of_views_and_without_a_state(backend):
    """Slices of one projection as q, k, v; enough sequences and heads for one block each."""
    slopes = torch.full([16], 0.01, device="cuda")
    projection = torch.randn(10, 200, 16, 3 * 64, device="cuda", dtype=torch.bfloat16)
    inputs = dict(zip("qkv", projection.split(64, dim=-1), strict=True))
    found = results(lambda **x: decay_scan(**x, slopes=slopes, backend=backend), inputs)
    exact = {name: x.double() for name, x in inputs.items()}
    truth = results(lambda **x: decay_scan_reference(**x, slopes=slopes.double()), exact)
    assert max(errors(found, truth).values()) <= FLOOR[torch.bfloat16]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", STRENGTHS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4096])
def test_scalar_decay(length, decay, packed):
    inputs = make_inputs(length, torch.bfloat16, 128, 64, key_heads=1)
    inputs["log_decay"] = -STRENGTHS[decay] * torch.rand(2, length, 3, device="cuda")
    documents = documents_of(length) if packed else None
    compare(scalar_decay_scan, scalar_decay_scan_reference, inputs, document_ids=documents)


@pytest.mark.parametrize(("dtype", "key", "value"), OTHERS)
def test_scalar_decay_of_other_dtypes_and_widths(dtype, key, value):
    inputs = make_inputs(1000, dtype, key, value)
    inputs["log_decay"] = -torch.rand(2, 1000, 3, device="cuda")
    compare(scalar_decay_scan, scalar_decay_scan_reference, inputs)


@pytest.mark.parametrize(("key", "value"), [(8, 8), (16, 6), (6, 64)])
def test_heads_narrower_than_a_block(key, value):
    """Head sizes of the models that `megalin verify` shrinks."""
    slopes, documents = torch.tensor(SLOPES["weak"], device="cuda"), documents_of(72)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(72, dtype, key, value)
        compare(decay_scan, decay_scan_reference, inputs, slopes=slopes, document_ids=documents)
    inputs["log_decay"] = -torch.rand(2, 72, 3, device="cuda")
    compare(scalar_decay_scan, scalar_decay_scan_reference, inputs, document_ids=documents)


@pytest.mark.parametrize("backend", ["triton", CUDA])
def test_a_long_sequence_equals_its_pieces(backend):
    """131072 tokens at once, against eight pieces in fp64 that pass on their states."""
    slopes = torch.tensor([0.0, 1e-4, 0.3], device="cuda")
    q, k, v = (torch.randn(1, 131072, 3, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found, state, pieces = decay_scan(q, k, v, slopes, backend=backend), None, []
    for piece in zip(*(x.split(16384, dim=1) for x in (q, k, v)), strict=True):
        output, state = decay_scan_reference(*(x.double() for x in piece), slopes.double(), initial_state=state)
        pieces.append(output)
    for head in range(3):
        assert errors({"o": found.output[:, :, head]}, {"o": torch.cat(pieces, 1)[:, :, head]})["o"] <= 8e-3
    assert errors({"state": found.state}, {"state": state})["state"] <= 8e-3


@pytest.mark.parametrize("dtype", FLOOR)
def test_a_step(dtype):
    slopes = torch.tensor([0.0, 0.01, 3.0], device="cuda")
    q, k, v = (torch.randn(5, 3, width, device="cuda").to(dtype) for width in (128, 128, 100))
    state = torch.randn(5, 3, 128, 100, device="cuda")
    found = decay_step(q, k, v, slopes, state, backend="triton")
    truth = decay_step_reference(*(x.double() for x in (q, k, v, slopes, state)))
    assert errors({"state": found.state}, {"state": truth.state})["state"] <= 1e-6
    assert errors({"o": found.output}, {"o": truth.output})["o"] <= max(FLOOR[dtype], 1e-6)


@pytest.mark.parametrize("key", [64, 256])
@pytest.mark.parametrize("backend", ["triton", CUDA])
def test_blocks_compile_with_the_scans_inside(backend, key):
    slopes = torch.tensor([0.0, 0.01], device="cuda")

    def function(q, k, v, g):
        o = decay_scan(q.sin(), k, v, slopes, backend=backend).output
        return scalar_decay_scan(q[..., :64], k[..., :64].cos(), o, g, backend="triton").output

    shapes = ((2, 200, 2, width) for width in (key, key, 64))
    q, k, v = (torch.randn(x, device="cuda", dtype=torch.bfloat16, requires_grad=True) for x in shapes)
    g = -torch.rand(2, 200, 2, device="cuda")
    eager = function(q, k, v, g)
    compiled = torch.compile(function, fullgraph=True)(q, k, v, g)
    weight = torch.randn_like(eager)
    for first, second in zip(
        torch.autograd.grad(eager, (q, k, v), weight), torch.autograd.grad(compiled, (q, k, v), weight), strict=True
    ):
        assert errors({"x": second}, {"x": first})["x"] <= 2e-2
