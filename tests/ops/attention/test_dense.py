"""Both forms of softmax-free attention, and its windows, against the sum over tokens: values and all gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalin.ops.attention.dense import (
    dense_attention,
    dense_attention_flops,
    dense_attention_linear,
    dense_attention_quadratic,
    dense_attention_reference,
    local_dense_attention,
)
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients

BATCH, HEADS, BOUND = 2, 3, 1e-12
FORMS = {"auto": dense_attention, "quadratic": dense_attention_quadratic, "linear": dense_attention_linear}
WIDTHS = {"equal": (6, 6), "sharded": (3, 12)}
"""Widths of keys and of values: of a head, and of a single head whose width is sharded over an axis."""
STARTS = {1: (0,), 63: (0, 1, 62), 64: (0, 63), 65: (0, 15, 16, 17, 64), 200: (0, 64, 129)}
"""Starts of the documents of the second sample, by length; the first sample is one document."""

every_form = pytest.mark.parametrize("form", FORMS)
every_length = pytest.mark.parametrize("length", STARTS)


def make_inputs(length: int, widths: str = "equal", dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(length)
    key, value = WIDTHS[widths]

    def draw(width: int) -> Tensor:
        return torch.randn((BATCH, length, HEADS, width), generator=generator, dtype=torch.float64).to(dtype)

    return {"q": draw(key), "k": draw(key), "v": draw(value)}


def documents_of(length: int) -> Tensor:
    starts = torch.zeros(BATCH, length, dtype=torch.int32)
    starts[1, list(STARTS[length])] = 1
    return 3 + starts.cumsum(1, dtype=torch.int32)


def results(function: Callable[..., Tensor], inputs: Tensors, **arguments: object) -> Tensors:
    return outputs_and_gradients(lambda **x: [function(**x, **arguments)], inputs)


@every_form
@every_length
@pytest.mark.parametrize("widths", WIDTHS)
def test_every_form_equals_the_definition(form: str, length: int, widths: str):
    inputs = make_inputs(length, widths)
    assert_close(results(FORMS[form], inputs), results(dense_attention_reference, inputs), BOUND)


@every_form
@every_length
def test_packed_documents_equal_the_definition(form: str, length: int):
    inputs, documents = make_inputs(length), documents_of(length)
    expected = results(dense_attention_reference, inputs, document_ids=documents)
    assert_close(results(FORMS[form], inputs, document_ids=documents), expected, BOUND)


def test_the_definition_attends_to_the_whole_document_and_no_other():
    inputs, documents = make_inputs(65), documents_of(65)
    packed = dense_attention_reference(**inputs, document_ids=documents)[1:]
    alone = [
        dense_attention_reference(*(x[1:, a:b] for x in inputs.values()))
        for a, b in ((0, 15), (15, 16), (16, 17), (17, 64), (64, 65))
    ]
    assert torch.equal(packed, torch.cat(alone, dim=1))
    scores = torch.einsum("thk,shk->hts", inputs["q"][0], inputs["k"][0])
    whole = torch.einsum("hts,shv->thv", scores, inputs["v"][0])
    torch.testing.assert_close(dense_attention_reference(**inputs)[0], whole, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_the_paper():
    """Y = Q T with T = X^T X: dQ = dY T, dT = Q^T dY, dX = X (dT + dT^T)."""
    q, x, dy = (torch.randn(20, 5, dtype=torch.float64) for _ in range(3))
    q.requires_grad_()
    x.requires_grad_()
    heads = x[None, :, None]
    for form in FORMS.values():
        q.grad = x.grad = None
        form(q[None, :, None], heads, heads)[0, :, 0].backward(dy, retain_graph=True)
        memory, of_memory = x.detach().T @ x.detach(), q.detach().T @ dy
        torch.testing.assert_close(q.grad, dy @ memory, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad, x.detach() @ (of_memory + of_memory.T), rtol=1e-12, atol=1e-12)


def groups_of(length: int, window: int, offset: int, documents: Tensor | None) -> Tensor:
    """A number for each window of each document, counted token by token."""
    rows = []
    for row in torch.zeros(BATCH, length) if documents is None else documents:
        group, place, ids = 0, offset, []
        for t in range(length):
            place = offset if t == 0 or row[t] != row[t - 1] else place + 1
            group += place == offset or place % window == 0
            ids.append(int(group))
        rows.append(torch.tensor(ids))
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize(("length", "window"), [(1, 8), (64, 8), (65, 8), (200, 8), (63, 80), (64, 64)])
def test_windows_equal_the_definition_at_every_length(length: int, window: int, offset: int, packed: bool):
    """Lengths that are multiples of the window or not, windows longer than the sequence or cut by documents."""
    inputs, documents = make_inputs(length), documents_of(length) if packed else None
    groups = groups_of(length, window, offset, documents)
    actual = results(local_dense_attention, inputs, window=window, offset=offset, document_ids=documents)
    assert_close(actual, results(dense_attention_reference, inputs, document_ids=groups), BOUND)


@every_form
@pytest.mark.parametrize("boundary", [15, 64, 65, 129, 199])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contents_of_one_document_do_not_move_bits_of_the_other(form: str, boundary: int, dtype: torch.dtype):
    """Neither of the next document, nor of the previous one."""
    inputs = make_inputs(200, dtype=dtype)
    documents = (torch.arange(200) >= boundary).int().expand(BATCH, -1)
    before, after = slice(0, boundary), slice(boundary, 200)
    for mine, other in ((before, after), (after, before)):
        found = []
        for factor in (1.0, -30.0):
            changed = {name: x.clone() for name, x in inputs.items()}
            for x in changed.values():
                x[:, other] *= factor
            found.append(results(lambda **x: FORMS[form](**x, document_ids=documents)[:, mine], changed))  # noqa: B023
        for name, tensor in found[0].items():
            assert torch.equal(tensor, found[1][name]), name
        for name in ("gradient.q", "gradient.k", "gradient.v"):
            assert found[0][name][:, other].eq(0).all()


@every_form
@pytest.mark.parametrize("packed", [False, True])
def test_bf16_errs_at_most_twice_as_much_as_plain_matmuls(form: str, packed: bool):
    low = make_inputs(200, dtype=torch.bfloat16)
    documents = documents_of(200) if packed else None
    mask = 1.0 if documents is None else (documents[:, None, :, None] == documents[:, None, None, :])

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhts,bshv->bthv", torch.einsum("bthk,bshk->bhts", q, k) * mask, v)

    truth = results(FORMS[form], {name: x.double() for name, x in low.items()}, document_ids=documents)
    found, allowed = (
        errors(results(FORMS[form], low, document_ids=documents), truth),
        errors(results(plain, low), truth),
    )
    assert not {n: (error, allowed[n]) for n, error in found.items() if not error <= 2.0 * allowed[n]}


@pytest.mark.parametrize("packed", [False, True])
def test_the_linear_form_sums_over_tokens_in_fp32(packed: bool):
    """257 - 256 = 1; in bf16 there is no 257."""
    k = torch.ones(1, 257, 1, 2, dtype=torch.bfloat16)
    k[:, -1, :, 1] = 0.0
    q, v = torch.tensor([1.0, -1.0]).bfloat16().expand(1, 257, 1, 2), torch.ones(1, 257, 1, 1).bfloat16()
    documents = torch.zeros(1, 257, dtype=torch.int32) if packed else None
    assert dense_attention_linear(q, k, v, document_ids=documents).eq(1.0).all()


@pytest.mark.parametrize(("length", "expected"), [(4, 4 * 4 * 16), (16, 4 * 16 * 16), (300, 4 * 16 * 16)])
def test_the_cheaper_form_runs_and_is_what_is_counted(length: int, expected: int):
    x = torch.randn(BATCH, length, HEADS, 16)
    with FlopCounterMode(display=False) as counter:
        dense_attention(x, x, x)
    assert counter.get_total_flops() == BATCH * length * HEADS * expected
    assert dense_attention_flops(length, num_heads=HEADS, head_dim=16) == HEADS * expected


@pytest.mark.parametrize(("length", "scans"), [(96, False), (4096, True)])
def test_long_packed_sequences_are_scanned_instead_of_masked(length: int, scans: bool):
    x, documents = (
        torch.empty(1, length, 1, 16, device="meta"),
        torch.zeros(1, length, dtype=torch.int32, device="meta"),
    )
    with FlopCounterMode(display=False) as counter:
        dense_attention(x, x, x, document_ids=documents)
    masked = 4 * length * length * 16
    assert counter.get_total_flops() < masked if scans else counter.get_total_flops() == masked
