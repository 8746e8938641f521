"""Sites of dropout: their numbers, their buffers, and the seed of a model's masks."""

from __future__ import annotations

import torch

from megalin.layers.dropout import Dropout, DropoutSeed, apply_dropout, dropout_at, input_site, output_site
from megalin.ops.dropout import dropout, sample_keys
from megalin.parallel.initialisation import init_weights

SEED = 2**33 + 5


def initialised(module: torch.nn.Module) -> torch.nn.Module:
    module.to_empty(device="cpu")
    init_weights(module, SEED)
    return module


def test_sites_of_a_model_have_different_numbers():
    numbers = [input_site(0), *(output_site(sublayer) for sublayer in range(100))]
    assert len(set(numbers)) == len(numbers)


def test_a_site_drops_by_its_number_and_the_low_bits_of_the_seed():
    x, draw, tokens = torch.randn(2, 5, 8), torch.tensor([3, 4]), torch.arange(5)
    site, keys = initialised(Dropout(0.5, 17)), initialised(DropoutSeed())(draw, tokens)
    assert torch.equal(keys.samples, sample_keys(torch.tensor(5), draw))
    assert torch.equal(site(x, keys), dropout(x, keys, torch.tensor(17), rate=0.5))


def test_buffers_are_integers_that_no_checkpoint_holds():
    module = torch.nn.ModuleList([Dropout(0.5, 17), DropoutSeed()]).to(torch.float64)
    assert [buffer.dtype for buffer in module.buffers()] == [torch.int64] * 2
    assert not module.state_dict()


def test_rate_0_builds_nothing_and_changes_nothing():
    x = torch.randn(1, 2, 3)
    assert dropout_at(0.0, 1) is None
    assert apply_dropout(x, None, None) is x
