"""LRPE and RoPE, whose scores depend on the distance alone; Cosine RelPE; spans of documents."""

import itertools
import math

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.positions.encodings import (
    RopeScaling,
    cosine_relpe,
    document_spans,
    lrpe_cosine,
    lrpe_rotation,
    num_tokens_in_documents,
    rope,
    rope_reference,
)
from tests.numerics import assert_close, outputs_and_gradients, relative_error
from tests.ops.kernels import assert_as_good_as_the_reference

LENGTH, HEADS, KEY = 7, 2, 6
FORMS = {"cosine": (lrpe_cosine, KEY), "rotation": (lrpe_rotation, KEY // 2)}

every_form = pytest.mark.parametrize("form", FORMS)


def make_inputs(form: str) -> dict[str, torch.Tensor]:
    shape = (1, LENGTH, HEADS, KEY)
    return {
        "q": torch.randn(shape, dtype=torch.float64),
        "k": torch.randn(shape, dtype=torch.float64),
        "theta": torch.rand(HEADS, FORMS[form][1], dtype=torch.float64),
    }


def encoded_scores(form: str, q, k, theta, positions=None):
    """Scores [1, H, T, T] of encoded queries and keys."""
    encode = FORMS[form][0]
    positions = torch.arange(LENGTH) if positions is None else positions
    return [torch.einsum("bthk,bshk->bhts", encode(q, theta, positions), encode(k, theta, positions))]


def defined_scores(form: str, q, k, theta):
    """The same scores from the distance of each pair of tokens, one pair at a time."""
    scores = []
    for t in range(LENGTH):
        for s in range(LENGTH):
            angle = (t - s) * theta
            if form == "cosine":
                scores.append((q[0, t] * k[0, s] * angle.cos()).sum(-1))
            else:
                a, b = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q[0, t], k[0, s]))
                scores.append((a * b.conj() * torch.polar(torch.ones_like(angle), angle)).real.sum(-1))
    return [torch.stack(scores, dim=-1).view(HEADS, LENGTH, LENGTH)[None]]


@every_form
def test_scores_and_gradients_equal_the_definition(form: str):
    inputs = make_inputs(form)
    actual = outputs_and_gradients(lambda **x: encoded_scores(form, **x), inputs)
    assert_close(actual, outputs_and_gradients(lambda **x: defined_scores(form, **x), inputs), 1e-12)


@every_form
@pytest.mark.parametrize("shift", [1, 64, 10_000])
def test_a_shift_of_all_positions_changes_nothing(form: str, shift: int):
    inputs = make_inputs(form)
    plain = outputs_and_gradients(lambda **x: encoded_scores(form, **x), inputs)
    moved = outputs_and_gradients(lambda **x: encoded_scores(form, **x, positions=torch.arange(LENGTH) + shift), inputs)
    assert_close(moved, plain, 1e-10)


@every_form
def test_each_sample_may_have_its_own_positions(form: str):
    encode, width = FORMS[form]
    x, theta = torch.randn(2, 3, HEADS, KEY), torch.rand(HEADS, width)
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    together = encode(x, theta, positions)
    for row in range(2):
        assert torch.equal(together[row], encode(x[row : row + 1], theta, positions[row])[0])


@every_form
def test_bf16_inputs_keep_exact_positions(form: str):
    """bf16 has no odd integers above 256, so angles need a wider dtype."""
    encode, width = FORMS[form]
    x, theta = torch.randn(1, 3, HEADS, KEY).bfloat16(), torch.rand(HEADS, width)
    positions = torch.tensor([257, 1001, 4095])
    found = encode(x, theta, positions)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, encode(x.double(), theta.double(), positions)) <= 4e-3


def rope_by_definition(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """RoPE one token and one pair of channels at a time, as complex numbers."""
    width, pairs = x.shape[-1], []
    for j in range(width // 2):
        turns = torch.stack(
            [torch.polar(x.new_ones(()), x.new_tensor(int(p) * base ** (-2 * j / width))) for p in positions]
        )
        pairs.append(torch.complex(x[..., j], x[..., j + width // 2]) * turns[:, None])
    turned = torch.stack(pairs, dim=-1)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("base", [10000.0, 50.0])
@pytest.mark.parametrize("width", [2, 8])
def test_rope_equals_its_definition(base: float, width: int):
    inputs = {"x": torch.randn(2, 5, HEADS, width, dtype=torch.float64)}
    positions = torch.tensor([0, 1, 2, 63, 8191])
    actual = outputs_and_gradients(lambda x: [rope(x, positions, base=base)], inputs)
    assert_close(actual, outputs_and_gradients(lambda x: [rope_by_definition(x, positions, base)], inputs), 1e-11)


@pytest.mark.parametrize(
    ("scaling", "divisors"),
    [
        (RopeScaling("linear", 4.0), [4.0, 4.0, 4.0, 4.0]),
        # 64, 6.4, 0.64 and 0.064 radians in 64 tokens / 2 pi: 10.2, 1.02, 0.1, 0.01 turns
        (RopeScaling("llama3", 4.0, 0.5, 2.0, 64), [1.0, 1 / (0.25 + 0.75 * (6.4 / math.tau - 0.5) / 1.5), 4.0, 4.0]),
    ],
    ids=["linear", "llama3"],
)
def test_rope_divides_frequencies(scaling: RopeScaling, divisors: list[float]):
    x, position = torch.ones(1, 1, 1, 8, dtype=torch.float64), 3
    angles = torch.tensor([10.0**-j / divisor for j, divisor in enumerate(divisors)], dtype=torch.float64) * position
    expected = torch.cat([angles.cos() - angles.sin(), angles.sin() + angles.cos()])
    actual = rope(x, torch.tensor([position]), base=10000.0, scaling=scaling)
    torch.testing.assert_close(actual.flatten(), expected, rtol=1e-12, atol=1e-12)


def test_rope_scores_depend_on_the_distance():
    q, k = torch.randn(2, 1, LENGTH, HEADS, 8, dtype=torch.float64).unbind(0)
    scores = [
        torch.einsum("bthk,bshk->bhts", rope(q, positions), rope(k, positions))
        for positions in (torch.arange(LENGTH), torch.arange(LENGTH) + 10_000)
    ]
    assert relative_error(scores[1], scores[0]) <= 1e-10


def test_rope_takes_positions_by_sample_and_keeps_them_exact_in_bf16():
    x, positions = torch.randn(2, 3, HEADS, 8).bfloat16(), torch.tensor([[0, 1, 2], [257, 1001, 4095]])
    together = rope(x, positions)
    assert together.dtype == torch.bfloat16
    for row in range(2):
        assert torch.equal(together[row], rope(x[row : row + 1], positions[row])[0])
    assert relative_error(together, rope(x.double(), positions)) <= 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 7, 3, 12), (1, 40, 2, 96)])
def test_the_kernel_of_rope_is_as_good_as_the_reference(dtype, shape):
    positions = torch.arange(shape[1])
    for places in (positions * 11, torch.stack([positions * 3001, positions])[: shape[0]]):
        assert_as_good_as_the_reference(
            lambda x, p=places: [rope(x, p, base=500.0, backend="triton")],
            lambda x, p=places: [rope_reference(x, p, base=500.0)],
            {"x": torch.randn(shape).to(dtype)},
        )


def test_the_kernel_of_rope_takes_slices_of_a_projection_and_any_strides():
    def run(function, whole, other, **options):
        k = whole.unflatten(-1, (2, 3, 8)).unbind(-3)[0]  # rows of 48
        return [function(x, torch.arange(7), **options) for x in (k, other.permute(1, 3, 0, 2))]

    assert_as_good_as_the_reference(
        lambda **x: run(rope, **x, backend="triton"),
        lambda **x: run(rope_reference, **x),
        {"whole": torch.randn(2, 7, 48), "other": torch.randn(3, 2, 12, 7)},
    )


def test_the_kernel_of_rope_compiles_into_one_graph():
    def block(x):
        return [rope(x * 2.0, torch.arange(7), backend="triton").sin()]

    inputs = {"x": torch.randn(2, 7, 3, 8)}
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_close(outputs_and_gradients(compiled, inputs), outputs_and_gradients(block, inputs), 1e-6)


def test_rope_refuses_dtypes_without_a_kernel():
    with pytest.raises(KernelError, match=r"rope: the triton kernel does not take dtype torch\.float64"):
        rope(torch.randn(1, 2, 1, 4, dtype=torch.float64), torch.arange(2), backend="triton")


def test_cosine_relpe_is_the_cosine_of_each_heads_frequencies():
    x, positions = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.tensor([[0, 1, 2, 0, 1], [7, 3, 900, 70_000, 0]])
    expected = torch.empty_like(x)
    for b, t, h, i in itertools.product(*map(range, x.shape)):
        expected[b, t, h, i] = x[b, t, h, i] * math.cos(int(positions[b, t]) * 10000.0 ** (-i / 4))
    torch.testing.assert_close(cosine_relpe(x, positions), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cosine_relpe(x[1:], positions[1]), expected[1:], rtol=1e-12, atol=1e-12)


def test_cosine_relpe_counts_in_full_precision():
    x, positions = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16), torch.tensor([1001])
    assert torch.equal(cosine_relpe(x, positions), cosine_relpe(x.float(), positions).bfloat16())


def test_spans_and_counts_of_packed_documents():
    documents = torch.tensor([[4, 4, 4, 7, 8, 8], [2, 2, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]])
    valid = torch.tensor([[1, 0, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1]]).bool()
    first, last = document_spans(documents)
    assert first.tolist() == [[0, 0, 0, 3, 4, 4], [0] * 6, [0, 1, 2, 3, 4, 5]]
    assert last.tolist() == [[2, 2, 2, 3, 5, 5], [5] * 6, [0, 1, 2, 3, 4, 5]]
    assert num_tokens_in_documents(documents, None).tolist() == [[3, 3, 3, 1, 2, 2], [6] * 6, [1] * 6]
    expected = [[2, 2, 2, 0, 1, 1], [4] * 6, [1, 1, 1, 1, 0, 1]]
    assert num_tokens_in_documents(documents, valid).tolist() == expected
