"""Fused head and cross entropy against the definition: vocabulary slices, ignored labels, weights, chunks."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megalin._triton import cross_entropy
from megalin.errors import KernelError
from megalin.ops import linear_cross_entropy as op
from megalin.ops.linear_cross_entropy import VocabularySlice, fused_linear_cross_entropy, linear_cross_entropy_reference
from megalin.parallel.collectives import Axis
from megalin.parallel.cross_entropy import vocab_parallel_linear_cross_entropy
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

IGNORED = -100


def make_case(tokens, width, vocab_size, rows, dtype):
    """Inputs, and the labels and weights of their loss; every fifth label is ignored."""
    inputs = {"x": torch.randn(tokens, width).to(dtype), "weight": (torch.randn(rows, width) * width**-0.5).to(dtype)}
    labels = torch.randint(vocab_size, (tokens,))
    labels[0], labels[-1] = vocab_size - 1, 0
    labels[2::5] = IGNORED
    return inputs, labels, torch.rand(tokens, dtype=torch.float64) + 0.5


def fused(x, weight, *, labels, token_weights, vocab_size, **options):
    vocabulary = VocabularySlice(0, vocab_size)
    return [
        fused_linear_cross_entropy(
            x,
            weight,
            labels,
            vocabulary=vocabulary,
            ignored_label=IGNORED,
            token_weights=token_weights,
            **options,
        )
    ]


def reference(x, weight, *, labels, token_weights, vocab_size):
    return [
        linear_cross_entropy_reference(
            x,
            weight,
            labels,
            vocab_size=vocab_size,
            ignored_label=IGNORED,
            token_weights=token_weights.to(torch.promote_types(x.dtype, torch.float32)),
        )
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "vocab_size", "rows"), [(1, 1, 1), (6, 300, 384), (9, 4097, 4224), (5, 2048, 2048)])
def test_kernels_are_as_good_as_the_reference(dtype, tokens, vocab_size, rows):
    inputs, labels, token_weights = make_case(tokens, 24, vocab_size, rows, dtype)
    labels[0] = 0
    case = {"labels": labels, "token_weights": token_weights, "vocab_size": vocab_size}
    assert_as_good_as_the_reference(lambda **x: fused(**x, **case), lambda **x: reference(**x, **case), inputs)


def test_chunks_do_not_change_the_loss_and_add_the_weight_gradients_in_fp32(monkeypatch):
    inputs, labels, token_weights = make_case(140, 16, 300, 384, torch.bfloat16)
    case = {"labels": labels, "token_weights": token_weights, "vocab_size": 300}
    whole = outputs_and_gradients(lambda **x: fused(**x, **case), inputs)
    monkeypatch.setattr(op, "CHUNK_BYTES", 1)
    assert op.chunk_rows(inputs["weight"], 140) == 128
    chunked = outputs_and_gradients(lambda **x: fused(**x, **case), inputs)
    assert torch.equal(chunked["output.0"], whole["output.0"])
    assert torch.equal(chunked["gradient.x"], whole["gradient.x"])
    truth = outputs_and_gradients(lambda **x: reference(**x, **case), {n: x.double() for n, x in inputs.items()})
    assert_close({"": chunked["gradient.weight"]}, {"": truth["gradient.weight"]}, 3e-3)


@pytest.mark.parametrize("num_slices", [2, 3])
def test_slices_of_the_vocabulary_equal_the_whole(num_slices):
    """Of three slices of 128 rows the last one holds no token."""
    inputs, labels, token_weights = make_case(7, 16, 200, 128 * num_slices, torch.float32)
    case = {"labels": labels, "token_weights": token_weights, "vocab_size": 200}
    truth = outputs_and_gradients(lambda **x: reference(**x, **case), {n: x.double() for n, x in inputs.items()})
    slices = [VocabularySlice(128 * p, min(max(200 - 128 * p, 0), 128)) for p in range(num_slices)]
    weights = inputs["weight"].chunk(num_slices)
    statistics: list[torch.Tensor] = []

    def run(x, weight, p, gather):
        return fused_linear_cross_entropy(
            x, weight, labels, vocabulary=slices[p], ignored_label=IGNORED, token_weights=token_weights, gather=gather
        )

    for p in range(num_slices):  # the statistics that each slice would send to the others

        def collect(own):
            statistics.append(own)
            return own[None]

        run(inputs["x"], weights[p], p, collect)
    gathered = torch.stack(statistics)
    found = [
        outputs_and_gradients(
            lambda x, weight, p=p: [run(x, weight, p, lambda _: gathered)], {"x": inputs["x"], "weight": weights[p]}
        )
        for p in range(num_slices)
    ]
    for each in found:
        assert_close({"loss": each["output.0"]}, {"loss": truth["output.0"]}, 1e-6)
    gradients = {
        "x": sum(each["gradient.x"] for each in found),
        "weight": torch.cat([each["gradient.weight"] for each in found]),
    }
    assert_close(gradients, {name: truth[f"gradient.{name}"] for name in gradients}, 2e-6)
    assert gradients["weight"][200:].eq(0).all()


def test_ignored_tokens_take_no_part_even_where_their_logits_are_not_finite():
    inputs, labels, token_weights = make_case(6, 8, 50, 64, torch.float32)
    inputs["x"][2] = float("inf")
    labels[2] = IGNORED
    weight = inputs["weight"].requires_grad_(False)
    x = inputs["x"].requires_grad_()
    (loss,) = fused(x, weight, labels=labels, token_weights=token_weights, vocab_size=50)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert x.grad[2].eq(0).all()


@pytest.mark.parametrize("label", [50, 63, 64, 1000, -1])
def test_a_label_of_no_token_makes_the_loss_infinite(label):
    inputs, labels, token_weights = make_case(3, 8, 50, 64, torch.float32)
    labels[0] = label
    (loss,) = fused(**inputs, labels=labels, token_weights=token_weights, vocab_size=50)
    assert loss == float("inf")


def test_the_gradient_scales_with_what_comes_from_above():
    inputs, labels, token_weights = make_case(4, 8, 50, 64, torch.bfloat16)
    case = {"labels": labels, "token_weights": token_weights, "vocab_size": 50}
    once = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    fused(**once, **case)[0].backward()
    scaled = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    (fused(**scaled, **case)[0] / 8).backward()
    for name in inputs:
        assert torch.equal(scaled[name].grad * 8, once[name].grad)


def test_a_retained_graph_gives_the_same_gradients_again():
    inputs, labels, token_weights = make_case(4, 8, 50, 64, torch.bfloat16)
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    loss = fused(**leaves, labels=labels, token_weights=token_weights, vocab_size=50)[0] / 3
    first, second = (torch.autograd.grad(loss, list(leaves.values()), retain_graph=again) for again in (True, False))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_operand_does_not_change_the_gradient_of_the_other(frozen):
    inputs, labels, token_weights = make_case(4, 8, 50, 64, torch.bfloat16)
    case = {"labels": labels, "token_weights": token_weights, "vocab_size": 50}
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    fused(**leaves, **case)[0].backward()
    (name,) = inputs.keys() - {frozen}
    fused(**{**inputs, name: inputs[name].requires_grad_()}, **case)[0].backward()
    assert torch.equal(inputs[name].grad, leaves[name].grad)


def test_the_backward_frees_the_fp32_gradient_of_the_weight_before_it_scales_the_one_of_x(monkeypatch):
    inputs, labels, token_weights = make_case(4, 8, 50, 64, torch.bfloat16)
    (loss,) = fused(
        **{n: x.requires_grad_() for n, x in inputs.items()}, labels=labels, token_weights=token_weights, vocab_size=50
    )
    sources: list[StorageWeakRef] = []
    calls = []

    def scaled(source, *options):
        gc.collect()  # the interpreter's own references to an operand
        calls.append((source.dtype, [each.expired() for each in sources]))
        sources.append(StorageWeakRef(source.untyped_storage()))
        return kernel(source, *options)

    kernel = cross_entropy.scaled
    monkeypatch.setattr(cross_entropy, "scaled", scaled)
    loss.backward()
    assert calls == [(torch.float32, []), (torch.bfloat16, [True])]


def test_without_a_gradient_the_same_loss_and_nothing_saved():
    inputs, labels, token_weights = make_case(4, 8, 50, 64, torch.float32)
    case = {"labels": labels, "token_weights": token_weights, "vocab_size": 50}
    (expected,) = fused(**{n: x.requires_grad_() for n, x in inputs.items()}, **case)
    with torch.no_grad():
        (loss,) = fused(**inputs, **case)
    assert torch.equal(loss, expected)
    assert loss.grad_fn is None


def test_the_dispatcher_keeps_leading_dimensions_and_refuses_what_the_kernels_do_not_take():
    inputs, labels, _ = make_case(6, 8, 50, 64, torch.float32)
    x, labels = inputs["x"].view(2, 3, 8), labels.view(2, 3)
    expected = vocab_parallel_linear_cross_entropy(x, inputs["weight"], labels, Axis("tp"), vocab_size=50)
    loss = vocab_parallel_linear_cross_entropy(x, inputs["weight"], labels, Axis("tp"), vocab_size=50, backend="triton")
    torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=0)
    with pytest.raises(KernelError, match=r"does not take dtypes torch.float64 and torch.float64"):
        vocab_parallel_linear_cross_entropy(
            x.double(), inputs["weight"].double(), labels, Axis("tp"), vocab_size=50, backend="triton"
        )
