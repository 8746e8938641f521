"""Kernels of TPE on a GPU against the chunkwise reference in fp64: lengths, decays, documents, states, equal bits."""

import pytest
import torch

from megalin.ops.scans.tpe import tpe, tpe_reference
from tests.numerics import errors, outputs_and_gradients

FLOOR = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
DECAYS = {"zero": (0.0, 0.0), "weak": (1e-4, 0.05), "strong": (0.5, 20.0)}
"""Rates of the slowest and the fastest decay, nats a token."""


def assert_right(inputs, dtype, documents):
    def run(function, options):
        return lambda **x: function(**x, document_ids=documents, **options)

    truth = outputs_and_gradients(run(tpe_reference, {}), {name: x.double() for name, x in inputs.items()})
    same = errors(outputs_and_gradients(run(tpe_reference, {}), inputs), truth)
    results = [outputs_and_gradients(run(tpe, {"backend": "triton"}), inputs) for _ in range(2)]
    found = errors(results[0], truth)
    bounds = {name: max(2 * same[name], FLOOR[dtype]) for name in truth}
    assert not {name: (found[name], bound) for name, bound in bounds.items() if not found[name] <= bound}
    assert all(torch.equal(results[0][name], results[1][name]) for name in truth)


@pytest.mark.parametrize("dtype", list(FLOOR))
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("decay", list(DECAYS))
@pytest.mark.parametrize(("width", "num_decays", "whole"), [(100, 128, False), (64, 40, True)])
def test_values_and_gradients(dtype, length, decay, width, num_decays, whole):
    """Unpacked sequences from a zero state, or packed documents with an initial state."""
    slowest, fastest = DECAYS[decay]
    inputs = {
        "x": torch.randn(2, length, width, device="cuda").to(dtype),
        "coefficients": torch.randn(width, num_decays, device="cuda") / num_decays,
        "log_decay": -torch.linspace(slowest, fastest, num_decays, device="cuda"),
    }
    if not whole:
        inputs["state"] = torch.randn(2, width, num_decays, device="cuda")
    starts = torch.tensor([[97], [length // 2]], device="cuda")
    documents = (torch.arange(length, device="cuda") >= starts).int() if not whole else None
    assert_right(inputs, dtype, documents)


@pytest.mark.parametrize("dtype", list(FLOOR))
@pytest.mark.parametrize("length", [15, 16, 17, 31, 33, 300])
@pytest.mark.parametrize(("width", "num_decays"), [(33, 9), (64, 40), (96, 256)])
def test_documents_around_blocks_of_16_tokens(dtype, length, width, num_decays):
    inputs = {
        "x": torch.randn(2, length, width, device="cuda").to(dtype),
        "coefficients": torch.randn(width, num_decays, device="cuda") / num_decays,
        "log_decay": -torch.linspace(1e-4, 2.0, num_decays, device="cuda"),
        "state": torch.randn(2, width, num_decays, device="cuda"),
    }
    starts = torch.zeros(2, length, dtype=torch.int32, device="cuda")
    for row, places in enumerate(((1, 2, 3, 9, 16, 40, 299), (14, 15, 17, 32, 120, 125))):
        starts[row, [place for place in places if place < length]] = 1
    assert_right(inputs, dtype, starts.cumsum(1))


def test_a_long_sequence():
    inputs = {
        "x": torch.randn(1, 131072, 64, device="cuda").bfloat16(),
        "coefficients": torch.randn(64, 128, device="cuda") / 128,
        "log_decay": torch.nn.functional.logsigmoid(torch.linspace(-4.0, 9.0, 128, device="cuda")),
    }
    assert_right(inputs, torch.bfloat16, None)
