"""Memory accesses of kernels stay within their tensors at the sizes that `megalin verify` gives a rank.

Fewer channels than any tile has, odd numbers of keys, slices of projections, documents shorter than the taps.
"""

import pytest
import torch
from triton.runtime.errors import InterpreterError

from megalin.ops.dispatch import backend as backends
from megalin.ops.gates.forget_gate_scan import forget_gate_scan
from megalin.ops.gates.gated_product import gated_product
from megalin.ops.gates.low_rank_gate import low_rank_gate
from megalin.ops.norms.gated_layer_norm import gated_layer_norm
from megalin.ops.norms.layer_norm import add_layer_norm
from megalin.ops.norms.rms_norm import rms_norm
from megalin.ops.norms.skip_gated_squares import skip_gated_squares
from megalin.ops.positions.encodings import rope
from megalin.ops.scaled_linear import quantize_rows
from megalin.ops.scans.selective_scan import selective_scan
from megalin.ops.scans.short_conv import short_conv
from megalin.ops.scans.vector_decay import vector_decay_scan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter can check addresses")
BATCH, WIDTH, KEYS, RANK = 2, 32, 6, 5
CASES = ((1, torch.float32), (72, torch.bfloat16))


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """Skips self-tests, which take longer in the interpreter than all tests of this file."""
    monkeypatch.setattr(backends, "choose", lambda *_, **__: "triton")


def draw(*shape, dtype):
    return torch.randn(shape).to(dtype).requires_grad_()


def documents(length):
    starts = torch.zeros(BATCH, length, dtype=torch.int32)
    starts[0, [place for place in (1, 2, 35, 36, 37) if place < length]] = 1
    return starts.cumsum(1, dtype=torch.int32)


def run(function, *inputs):
    """Computes outputs, and the gradients of all inputs, with checked addresses."""
    from tests.interpreter import checked_addresses  # enables the interpreter

    with checked_addresses():
        outputs = [y for y in function(*inputs) if y.requires_grad]
        torch.autograd.grad(sum(y.float().sum() for y in outputs), inputs)


@pytest.mark.parametrize(("length", "dtype"), CASES)
def test_the_short_convolution(length, dtype):
    def conv(projection, weight, bias, state):
        x = projection[..., :WIDTH]
        return short_conv(x, weight, bias, state=state, document_ids=documents(length))

    shapes = ((BATCH, length, 2 * WIDTH), (WIDTH, 4), (WIDTH,))
    run(conv, *(draw(*shape, dtype=dtype) for shape in shapes), draw(BATCH, 3, WIDTH, dtype=torch.float32))


@pytest.mark.parametrize(("length", "dtype"), CASES)
def test_the_scan_of_a_vector_decay(length, dtype):
    def scan(gates, v, state):
        q, k, strength, _ = gates.split([KEYS, KEYS, KEYS, RANK], dim=-1)
        log_decay = -strength.square()
        q, k, log_decay, v = (x[:, :, None] for x in (q, k, log_decay, v))
        return vector_decay_scan(q, k, v, log_decay, initial_state=state, document_ids=documents(length))

    gates = draw(BATCH, length, 3 * KEYS + RANK, dtype=torch.float32)
    run(scan, gates, draw(BATCH, length, WIDTH, dtype=dtype), draw(BATCH, 1, KEYS, WIDTH, dtype=torch.float32))


@pytest.mark.parametrize(("length", "dtype"), CASES)
def test_the_scan_of_forget_gates(length, dtype):
    def scan(projection, v, bound, state):
        q, logit, _ = (x[:, :, None] for x in projection.split([KEYS, KEYS, RANK], dim=-1))
        ids = documents(length)
        return forget_gate_scan(q, logit, v[:, :, None], bound.sigmoid(), initial_state=state, document_ids=ids)

    tensors = (draw(BATCH, length, 2 * KEYS + RANK, dtype=dtype), draw(BATCH, length, WIDTH, dtype=dtype))
    run(scan, *tensors, *(draw(*shape, dtype=torch.float32) for shape in ((1, KEYS), (BATCH, 1, KEYS, WIDTH))))


@pytest.mark.parametrize(("length", "dtype"), [(1, torch.float32), pytest.param(*CASES[1], marks=pytest.mark.slow)])
def test_the_selective_scan(length, dtype):
    def scan(projection, code, step, a_log, state):
        q, k, _ = code.split([KEYS, KEYS, RANK], dim=-1)
        v, rates = projection[..., :WIDTH], -a_log.exp()
        return selective_scan(q, k, v, step.square(), rates, initial_state=state, document_ids=documents(length))

    projection = draw(BATCH, length, 2 * WIDTH, dtype=dtype)
    code = draw(BATCH, length, 2 * KEYS + RANK, dtype=dtype)
    wide = ((BATCH, length, WIDTH), (WIDTH, KEYS), (BATCH, WIDTH, KEYS))
    run(scan, projection, code, *(draw(*shape, dtype=torch.float32) for shape in wide))


@pytest.mark.parametrize(("length", "dtype"), CASES)
def test_passes_over_rows(length, dtype):
    def gate(projection, code, weight, bias):
        return [low_rank_gate(projection[..., :WIDTH], code[..., -RANK:], weight, bias)]

    def skip_gate(projection, skip, factor, weight):
        x, gate = projection.chunk(2, dim=-1)
        return skip_gated_squares(x, skip, factor, gate, weight)

    projection = draw(BATCH, length, 2 * WIDTH, dtype=dtype)
    code = draw(BATCH, length, 3 * KEYS + RANK, dtype=dtype)
    run(gate, projection, code, draw(WIDTH, RANK, dtype=dtype), draw(WIDTH, dtype=dtype))
    vectors = draw(WIDTH, dtype=torch.float32), draw(WIDTH, dtype=dtype)
    skip = draw(BATCH, length, WIDTH, dtype=dtype)
    run(skip_gate, projection, skip, *vectors)
    run(lambda x: [gated_product(x, activation="silu")], projection)
    run(lambda x, w: [rms_norm(x, w, eps=1e-5)], skip, draw(WIDTH, dtype=dtype))
    sum_and_vectors = [draw(*shape, dtype=dtype) for shape in (skip.shape, skip.shape, (WIDTH,), (WIDTH,))]
    run(lambda *x: add_layer_norm(*x, eps=1e-5), *sum_and_vectors)
    run(lambda *x: [gated_layer_norm(*x, eps=1e-5, gate_activation="sigmoid")], *sum_and_vectors)
    heads = projection.detach().unflatten(-1, (-1, KEYS + 2)).requires_grad_()
    run(lambda x: [rope(x, torch.arange(length))], heads)


@pytest.mark.parametrize(("length", "dtype"), CASES)
def test_casts_of_rows(length, dtype):
    from tests.interpreter import checked_addresses

    x = draw(length, WIDTH + KEYS, dtype=dtype).detach()
    with checked_addresses():
        for rows in (x, x.t(), x[:, 3:]):
            quantize_rows(rows)


def test_an_address_outside_of_its_tensor_raises():
    from megalin._triton.dispatch import column_sums
    from tests.interpreter import checked_addresses

    x, y = torch.ones(3, 20), torch.empty(20)
    launch = {"BLOCK_ROWS": 4, "BLOCK_WIDTH": 16}
    with checked_addresses():
        column_sums.sum_kernel[(2,)](x, y, 3, 20, **launch)
        with pytest.raises(InterpreterError, match="sum_kernel leaves its tensors"):
            column_sums.sum_kernel[(2,)](x[:, :19].contiguous(), y, 3, 20, **launch)
