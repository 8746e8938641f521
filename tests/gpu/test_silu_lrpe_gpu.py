"""SiLU and LRPE in one kernel on the chip against fp64: lengths, far positions, strided inputs, equal bits."""

from collections.abc import Iterator

import pytest
import torch

from megalin.ops.silu_lrpe import silu_lrpe, silu_lrpe_reference
from tests.numerics import errors, outputs_and_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory of `torch.empty` holds NaN; cuBLAS only warns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


FLOOR = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.mark.parametrize("form", ["cosine", "rotation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "key"),
    [(1, 1, 1, 128), (2, 63, 3, 96), (2, 64, 4, 128), (1, 65, 16, 128), (2, 1000, 5, 128), (1, 4096, 2, 128)],
)
@pytest.mark.parametrize("start", [0, 131072])
def test_values_and_gradients_are_as_good_as_the_reference(form, dtype, batch, length, heads, key, start):
    width = key if form == "cosine" else key // 2
    projection = torch.randn(batch, length, 3 * heads * key, device="cuda").to(dtype)
    theta = 10000.0 ** -torch.rand(heads, width, device="cuda")
    positions = torch.arange(start, start + length, device="cuda")
    positions = positions if batch == 1 else torch.stack([positions, positions % 17])

    def run(function, projection, theta, **options):
        q, k, _ = projection.unflatten(-1, (3, heads, key)).unbind(-3)
        return function(q, k, theta, positions, form=form, **options)

    inputs = {"projection": projection, "theta": theta}
    truth = outputs_and_gradients(
        lambda **x: run(silu_lrpe_reference, **x), {name: x.double() for name, x in inputs.items()}
    )
    same = errors(outputs_and_gradients(lambda **x: run(silu_lrpe_reference, **x), inputs), truth)
    results = [outputs_and_gradients(lambda **x: run(silu_lrpe, **x, backend="triton"), inputs) for _ in range(2)]
    found = errors(results[0], truth)
    assert all(found[name] <= max(2 * same[name], FLOOR[dtype]) for name in truth), (found, same)
    assert all(torch.equal(results[0][name], results[1][name]) for name in truth)
