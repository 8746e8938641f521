"""Parts of training on a GPU against fp64: the scan, compiled blocks and their gradients."""

import pytest
import torch

from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.ops.scans.fixed_decay import decay_scan
from megalin.parallel.initialisation import init_weights


def _relative(actual, expected):
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("slope", [0.0, 1e-3, 0.5, 20.0])
def test_scan_and_its_gradients_match_fp64(dtype, bound, length, slope):
    torch.manual_seed(0)
    batch, heads, key_dim, value_dim = 2, 4, 128, 128
    q, k, v, weight = (
        torch.randn(batch, length, heads, size, device="cuda").to(dtype)
        for size in (key_dim, key_dim, value_dim, value_dim)
    )
    slopes = torch.full((heads,), slope, device="cuda")
    documents = (torch.arange(length, device="cuda") // 97).expand(batch, -1).to(torch.int32)

    def gradients(cast):
        inputs = [x.to(cast).requires_grad_() for x in (q, k, v)]
        output = decay_scan(*inputs, slopes, document_ids=documents).output
        return output, *torch.autograd.grad((output * weight.to(cast)).sum(), inputs)

    for actual, expected in zip(gradients(dtype), gradients(torch.float64), strict=True):
        assert _relative(actual, expected) < bound


def _gradients(dtype, *, compiled, recompute=False):
    config = ModelConfig.model_validate(
        {
            "vocab_size": 1000,
            "hidden_size": 256,
            "embedding_scale": 16.0,
            "layers": [
                {
                    "sublayers": [
                        {"type": mixer, "num_heads": 2, "lrpe": lrpe},
                        {"type": "glu", "intermediate_size": 384},
                    ]
                }
                for mixer, lrpe in (("transnormer", "cosine"), ("transnormer", "rotation"), ("tnl", None))
            ],
        }
    )
    model = LanguageModel(config, recompute=recompute).to(dtype)
    for module in model.full_precision_modules():
        module.to(torch.promote_types(dtype, torch.float32))
    model.to_empty(device="cuda")
    init_weights(model, 0)
    if compiled:
        for block in model.block_list():
            block.compile(fullgraph=True, dynamic=False)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1000, (2, 301), generator=generator).cuda()
    documents = (torch.arange(300) // 113).expand(2, -1).to(torch.int32).cuda()
    output = model(ids[:, :-1], labels=ids[:, 1:], document_ids=documents)
    output.token_losses.mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_of_compiled_bf16_blocks_are_as_good_as_eager_ones():
    truth = _gradients(torch.float64, compiled=False)
    eager = _gradients(torch.bfloat16, compiled=False)
    compiled = _gradients(torch.bfloat16, compiled=True)
    for name, expected in truth.items():
        bound = max(2e-3, 2 * _relative(eager[name], expected))
        assert _relative(compiled[name], expected) < bound, name


def test_gradients_of_compiled_fp32_blocks_match_fp64():
    truth = _gradients(torch.float64, compiled=False)
    for name, gradient in _gradients(torch.float32, compiled=True).items():
        assert _relative(gradient, truth[name]) < 2e-5, name


def test_compiled_blocks_that_recompute_have_the_same_gradients():
    kept = _gradients(torch.bfloat16, compiled=True)
    for name, gradient in _gradients(torch.bfloat16, compiled=True, recompute=True).items():
        assert torch.equal(gradient, kept[name]), name
