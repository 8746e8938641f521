"""DenseAttention's ablations: encodings of positions, tables of frequencies, and forced forms of the matmuls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalin.errors import ConfigError
from megalin.layers.mixers.base import BuildContext
from megalin.parallel.collectives import Axis
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.tensor_parallel import TensorParallel
from tests.layers.test_dense_attention import BOUND, WIDTH, build, configured, context, defined, inputs_of, outcome
from tests.numerics import assert_close

VARIANTS: dict[str, dict[str, Any]] = {
    "cosine-qk": {"relpe": "cosine_qk"},
    "g2": {"relpe": "g2"},
    "rope": {"relpe": "rope"},
    "none": {"relpe": "none"},
    "printed": {"relpe_frequencies": "printed"},
    "printed-qk": {"relpe": "cosine_qk", "relpe_frequencies": "printed", "norm": "srmsnorm"},
    "constant": {"relpe_frequencies": "constant", "relpe_constant": 0.3},
    "constant-rope": {"relpe": "rope", "relpe_frequencies": "constant", "relpe_constant": 0.02},
    "linear": {"form": "linear"},
    "quadratic": {"form": "quadratic"},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("global", 1),
        ("shifted", 4),
        pytest.param("global", 4, marks=pytest.mark.slow),
        pytest.param("local-document-relpe", 1, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_equal_the_equations(name: str, kind: str, heads: int):
    """Packed documents with padding."""
    mixer, (x, valid) = build(configured(kind, heads, **VARIANTS[name])), inputs_of(21, padded=True)
    ids = (torch.arange(21) // 12).int().expand(3, -1)
    dy = torch.randn_like(x)
    actual = outcome(mixer, x, context(valid=valid, document_ids=ids), dy)
    assert_close(actual, defined(mixer, x, valid, ids, dy), BOUND)


@pytest.mark.parametrize(("form", "length"), [("linear", 4), ("quadratic", 48)])
def test_a_forced_form_has_its_own_operations(form: str, length: int):
    """With 6 channels a head the form with fewer operations is the other one."""
    mixer, x = build(configured("global", 4, form=form)), torch.randn(2, length, WIDTH, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        mixer(x, context(), None)
    assert counter.get_total_flops() == 2 * length * mixer.flops(length)
    assert mixer.flops(length) > build(configured("global", 4)).flops(length)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "local", "relpe": "none", "relpe_frequencies": "printed"},
            r'(?s)kind = "local" needs a window.*relpe_frequencies = "printed" has no meaning with relpe = "none"',
        ),
        ({"relpe": "rope", "relpe_frequencies": "printed"}, r'"printed" are those of rope already'),
        ({"relpe_frequencies": "constant"}, r'relpe_frequencies = "constant" needs relpe_constant, in radians a token'),
        ({"relpe_constant": 0.1}, r'relpe_constant = 0\.1 has no meaning without relpe_frequencies = "constant"'),
    ],
)
def test_keys_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        configured(**fields)


def test_meshes_that_a_variant_excludes_are_refused_together():
    tp, cp = TensorParallel(Axis("tp", 8)), ContextParallel(Axis("cp", 3))
    scope = BuildContext(WIDTH, 0, 1, tp, 0.02, "place", 0.02, cp)
    message = r'(?s)place\.form = "quadratic" needs all tokens, but parallel\.cp = 3.*a rank has 3 channels of a head'
    with pytest.raises(ConfigError, match=message):
        configured(heads=1, form="quadratic", relpe="rope").build(scope)
