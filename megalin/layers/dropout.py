"""Dropout at the sites of a model: the seed of its masks, and a site's number, as buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalin.ops.dropout import DropoutKeys, dropout, sample_keys
from megalin.parallel.initialisation import Initializer


class DropoutSeed(nn.Module):
    """The seed of a run's masks, its `train.seed`, from which a forward's keys are computed once for all sites."""

    seed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seed", torch.empty((), dtype=torch.int64, device="meta"), persistent=False)

    def init_weights(self, initializer: Initializer) -> None:
        """Takes the seed of the initial weights, of which the low 32 bits count."""
        self.seed.fill_(initializer.seed & 0xFFFFFFFF)

    def forward(self, draw: Tensor, tokens: Tensor) -> DropoutKeys:
        """The keys of B samples: draw [B], their numbers in the run, and tokens [T], indices in the full sequence."""
        return DropoutKeys(sample_keys(self.seed, draw), tokens)


class Dropout(nn.Module):
    """One site of dropout on the residual stream's layout.

    The number is a tensor, because compiled blocks would be compiled again for every other Python number.

    Args:
        rate: probability of a zero, in (0, 1).
        number: of the site in the full model (`input_site`, `output_site`).
    """

    site: Tensor

    def __init__(self, rate: float, number: int) -> None:
        super().__init__()
        self.rate, self.number = rate, number
        self.register_buffer("site", torch.empty((), dtype=torch.int64, device="meta"), persistent=False)

    def init_weights(self, initializer: Initializer) -> None:
        """Sets the site's number."""
        self.site.fill_(self.number)

    def forward(self, x: Tensor, keys: DropoutKeys) -> Tensor:
        """x [B, T or T/tp, D] with elements dropped, the others divided by 1 - rate."""
        return dropout(x, keys, self.site, rate=self.rate)


def dropout_at(rate: float, number: int) -> Dropout | None:
    """The dropout of a site; None at rate 0, which costs nothing."""
    return Dropout(rate, number) if rate > 0.0 else None


def apply_dropout(x: Tensor, site: Dropout | None, keys: DropoutKeys | None) -> Tensor:
    """x [B, T or T/tp, D] after dropout; unchanged without a site, or without keys (no training)."""
    return x if site is None or keys is None else site(x, keys)


def input_site(sublayer: int) -> int:
    """The number of the site at the input of a sub-layer; that of sub-layer 0 is the embedding's."""
    return 2 * sublayer


def output_site(sublayer: int) -> int:
    """The number of the site at the output of a sub-layer, counted in the full model from 0."""
    return 2 * sublayer + 1
