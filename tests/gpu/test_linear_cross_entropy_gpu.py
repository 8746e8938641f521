"""Fused head and cross entropy on a GPU against fp64: values, gradients, memory and determinism."""

import pytest
import torch

from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.ops.linear_cross_entropy import VocabularySlice, fused_linear_cross_entropy, linear_cross_entropy_reference
from megalin.parallel.initialisation import init_weights
from tests.numerics import errors


def _case(tokens, width, vocab_size, rows, dtype, *, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(tokens + vocab_size)
    options = {"generator": generator, "device": "cuda"}
    x = torch.randn(tokens, width, **options).to(dtype)
    weight = (torch.randn(rows, width, **options) * scale * width**-0.5).to(dtype)
    # Frequent tokens, whose gradients accumulate over all chunks, and rare ones.
    labels = (torch.rand(tokens, **options).pow(4) * vocab_size).long()
    labels[-1] = vocab_size - 1
    labels[1::7] = -100
    return x, weight, labels, torch.rand(tokens, **options) + 0.5


def _results(function, x, weight):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(x, weight)
    (loss / 3).backward()
    return {"loss": loss.detach(), "x": x.grad, "weight": weight.grad}


def _fused(x, weight, labels, token_weights, vocab_size):
    return fused_linear_cross_entropy(
        x,
        weight,
        labels,
        vocabulary=VocabularySlice(0, vocab_size),
        ignored_label=-100,
        token_weights=token_weights,
    )


def _reference(x, weight, labels, token_weights, vocab_size):
    return linear_cross_entropy_reference(
        x, weight, labels, vocab_size=vocab_size, ignored_label=-100, token_weights=token_weights.to(torch.float64)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "width", "vocab_size", "rows"),
    [
        (1, 64, 1, 1),
        (1, 256, 1000, 1024),
        (63, 256, 32000, 32000),
        (64, 128, 4099, 4099),
        (65, 256, 100280, 100352),
        (1000, 512, 50257, 50304),
        (4096, 256, 100280, 100352),
        (9001, 128, 64000, 64000),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_values_and_gradients_are_as_good_as_the_reference(dtype, tokens, width, vocab_size, rows, scale):
    x, weight, labels, token_weights = _case(tokens, width, vocab_size, rows, dtype, scale=scale)
    arguments = labels, token_weights, vocab_size
    truth = _results(lambda x, w: _reference(x, w, *arguments), x.double(), weight.double())
    same = errors(_results(lambda x, w: _reference(x, w, *arguments), x, weight), truth)
    results = _results(lambda x, w: _fused(x, w, *arguments), x, weight)
    found = errors(results, truth)
    again = _results(lambda x, w: _fused(x, w, *arguments), x, weight)
    floor = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert all(found[name] <= max(2 * same[name], floor) for name in truth), (found, same)
    assert all(torch.equal(results[name], again[name]) for name in truth)


def test_the_weight_gradient_of_many_chunks_is_rounded_once():
    x, weight, labels, token_weights = _case(65536, 128, 64000, 64000, torch.bfloat16)
    arguments = labels, token_weights, 64000
    truth = _results(lambda x, w: _fused(x, w, *arguments), x.float(), weight.float())
    found = _results(lambda x, w: _fused(x, w, *arguments), x, weight)
    assert errors(found, truth)["weight"] <= 2.5e-3


def _bytes_beyond_gradients(tokens, width, rows):
    """Peak memory of forward and backward above inputs and gradients, in bytes."""
    x, weight, labels, token_weights = _case(tokens, width, rows, rows, torch.bfloat16)
    _results(lambda x, w: _fused(x, w, labels[:256], token_weights[:256], rows), x[:256], weight)  # cuBLAS's workspace
    x.requires_grad_()
    weight.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _fused(x, weight, labels, token_weights, rows).backward()
    return torch.cuda.max_memory_allocated() - before - x.nbytes - weight.nbytes


def test_no_tensor_of_tokens_times_vocabulary_is_kept():
    # The fp32 gradient of the weight instead of the bf16 one, and a chunk; all logits would be 4.2 GB.
    assert _bytes_beyond_gradients(32768, 512, 64000) <= 64000 * 512 * 2 + 430e6


def test_memory_beyond_the_gradients_at_16384_tokens_of_width_2048_and_a_vocabulary_of_100352():
    assert _bytes_beyond_gradients(16384, 2048, 100352) <= 0.8 * 2**30


def test_a_model_learns_the_same_from_the_sum_alone():
    config = ModelConfig.model_validate(
        {
            "vocab_size": 1000,
            "hidden_size": 256,
            "layers": [{"sublayers": [{"type": "tnl", "num_heads": 2}, {"type": "glu", "intermediate_size": 384}]}],
        }
    )
    model = LanguageModel(config).to(torch.bfloat16)
    model.to_empty(device="cuda")
    init_weights(model, 0)
    ids = torch.randint(0, 1000, (2, 301), generator=torch.Generator().manual_seed(1)).cuda()
    inputs = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}

    def gradients(losses):
        model.zero_grad()
        losses.sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    whole, summed = model(**inputs).loss_sums(), model.loss_sums(inputs)
    torch.testing.assert_close(summed.double(), whole.double(), rtol=1e-5, atol=0)
    found, expected = gradients(summed), gradients(whole)
    assert max(errors(found, expected).values()) <= 2e-2
