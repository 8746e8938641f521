"""Statistics of a mixer's decay and gates over tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalin.layers.gates import MixerGates

NUM_BINS = 32
"""Bins of a histogram over [0, 1], of equal width; the last one has larger values too."""
MAX_ROWS = 64
"""Most rows of a histogram or a heat map: neighbouring heads or channels beyond it share one."""
SHOWN_TOKENS = 256
"""Tokens of the first sample whose gates are kept, for curves and heat maps over tokens."""
_PIECE_ELEMENTS = 1 << 22
_QUANTILES = {"min": 0.0, "median": 0.5, "max": 1.0}

Array = npt.NDArray[np.float64]
DecayKind = Literal["fixed", "selected"]


class GateSummary(NamedTuple):
    """A gate, or the decay itself, over all tokens and units; a unit is a head, or a channel if there is one head."""

    mean: float
    standard_deviation: float
    row_means: Array
    """[rows]."""
    histogram: npt.NDArray[np.int64]
    """[rows, NUM_BINS] numbers of values."""
    tokens: Array
    """[rows, tokens] of the first sample, at most SHOWN_TOKENS; one token for a decay that all tokens share."""

    def values(self) -> dict[str, Any]:
        """The summary as JSON; the tokens as one curve, their mean over rows."""
        return {
            "mean": _rounded(self.mean),
            "standard_deviation": _rounded(self.standard_deviation),
            "row_means": _rounded(self.row_means),
            "histogram": self.histogram.tolist(),
            "curve": _rounded(self.tokens.mean(0)),
        }


class LayerGates(NamedTuple):
    """Decay and gates of one mixer."""

    decay: DecayKind
    """fixed: all tokens share it. selected: a function of the input."""
    num_heads: int
    decays_per_head: int
    first_units: list[int]
    """[rows] first head or channel of each row."""
    half_life: Array
    """[H, K] tokens in which a state decays to its half: ln 2 over the mean of -ln of the decay. Infinite without."""
    effective_length: Array
    """[H, K] tokens, 1 / (1 - mean decay): the sum of the weights of earlier tokens under that decay."""
    summary: GateSummary
    """Of the decay."""
    lower_bounds: Array | None
    """[H, K]."""
    gates: Mapping[str, GateSummary]

    def values(self) -> dict[str, Any]:
        """The statistics as JSON; infinite numbers of tokens are null."""
        return {
            "decay": self.decay,
            "num_heads": self.num_heads,
            "decays_per_head": self.decays_per_head,
            "first_unit_of_row": self.first_units,
            "half_life_tokens": _rounded(self.half_life),
            "effective_length_tokens": _rounded(self.effective_length),
            "half_life_quantiles": _rounded(quantiles(self.half_life)),
            "effective_length_quantiles": _rounded(quantiles(self.effective_length)),
            "lower_bounds": None if self.lower_bounds is None else _rounded(self.lower_bounds),
            "decays": self.summary.values(),
            "gates": {name: gate.values() for name, gate in self.gates.items()},
        }


def quantiles(values: Array) -> dict[str, float]:
    """Smallest, median and largest of the values, which may be infinite."""
    found = np.quantile(values, list(_QUANTILES.values()), method="inverted_cdf")
    return dict(zip(_QUANTILES, found.tolist(), strict=True))


class GateStatistics:
    """Sums over the tokens of a mixer's forwards, in fp64; a batch at a time."""

    def __init__(self) -> None:
        self._decay: _Sums | None = None
        self._gates: dict[str, _Sums] = {}
        self._bounds: Tensor | None = None
        self._kind: DecayKind = "fixed"

    def add(self, gates: MixerGates, valid: Tensor | None) -> None:
        """Adds a batch; `valid` [B, T] is False at padding. A decay that all tokens share is added once."""
        log_decay = gates.log_decay
        self._bounds = gates.lower_bounds
        if log_decay.dim() == 4:
            self._kind = "selected"
            self._decay = self._decay or _Sums(log_decay.shape[2:], log_decay.device)
            self._decay.add(log_decay, valid, is_log=True)
        elif self._decay is None:
            self._decay = _Sums(log_decay.shape, log_decay.device)
            self._decay.add(log_decay[None, None], None, is_log=True)
        for name, gate in gates.gates.items():
            self._gates.setdefault(name, _Sums(gate.shape[2:], gate.device)).add(gate, valid, is_log=False)

    def result(self) -> LayerGates | None:
        """The statistics of all tokens so far; None without any."""
        decay = self._decay
        if decay is None:
            return None
        with np.errstate(divide="ignore"):
            half_life = math.log(2.0) / np.abs(decay.logs / decay.count)
            effective = decay.count / decay.complements
        return LayerGates(
            decay=self._kind,
            num_heads=decay.shape[0],
            decays_per_head=decay.shape[1],
            first_units=decay.first_units(),
            half_life=half_life,
            effective_length=effective,
            summary=decay.summary(),
            lower_bounds=None if self._bounds is None else self._bounds.double().cpu().numpy(),
            gates={name: gate.summary() for name, gate in self._gates.items()},
        )


class _Sums:
    """Sums of values [tokens, H, K] over tokens."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        heads, channels = self.shape = tuple(shape)
        units = channels if heads == 1 else heads
        self._num_rows = min(units, MAX_ROWS)
        rows = torch.arange(units, device=device) * self._num_rows // units  # [units]
        self._rows = rows.expand(heads, channels) if heads == 1 else rows[:, None].expand(heads, channels)
        zeros = torch.zeros(4, heads, channels, dtype=torch.float64, device=device)
        self._logs, self._complements, self._values, self._squares = zeros
        self._counts = torch.zeros(self._num_rows * NUM_BINS, dtype=torch.int64, device=device)
        self._tokens: Tensor | None = None
        self.count = 0

    def add(self, batch: Tensor, valid: Tensor | None, *, is_log: bool) -> None:
        """Adds values [B, T, H, K], or their logarithms, where `valid`."""
        if self._tokens is None:
            first = batch[0] if valid is None else batch[0][valid[0]]
            self._tokens = self._row_means(first[:SHOWN_TOKENS].double().exp() if is_log else first[:SHOWN_TOKENS])
        values = batch.flatten(0, 1) if valid is None else batch[valid]  # [N, H, K]
        self.count += len(values)
        for piece in values.split(max(1, _PIECE_ELEMENTS // self._rows.numel())):
            piece = piece.double()
            if is_log:
                self._logs += piece.sum(0)
                self._complements -= torch.expm1(piece).sum(0)
                piece = piece.exp()
            self._values += piece.sum(0)
            self._squares += piece.square().sum(0)
            bins = (piece * NUM_BINS).long().clamp(0, NUM_BINS - 1)
            self._counts += torch.bincount((self._rows * NUM_BINS + bins).flatten(), minlength=len(self._counts))

    def _row_means(self, values: Tensor) -> Tensor:
        """[N, H, K] -> [rows, N], fp64."""
        flat = values.double().flatten(1)  # [N, H K]
        sums = torch.zeros(len(flat), self._num_rows, dtype=torch.float64, device=flat.device)
        rows = self._rows.flatten()
        sums.index_add_(1, rows, flat)
        return (sums / torch.bincount(rows, minlength=self._num_rows)).mT

    @property
    def logs(self) -> Array:
        """[H, K] sums of the logarithms."""
        return self._logs.cpu().numpy()

    @property
    def complements(self) -> Array:
        """[H, K] sums of one minus the value."""
        return self._complements.cpu().numpy()

    def first_units(self) -> list[int]:
        """[rows]."""
        flat = self._rows[0] if self.shape[0] == 1 else self._rows[:, 0]
        return torch.searchsorted(flat.contiguous(), torch.arange(self._num_rows, device=flat.device)).tolist()

    def summary(self) -> GateSummary:
        assert self._tokens is not None
        means = self._values / self.count
        mean = means.mean()
        variance = (self._squares / self.count).mean() - mean.square()
        return GateSummary(
            mean=mean.item(),
            standard_deviation=variance.clamp(min=0.0).sqrt().item(),
            row_means=self._row_means(means[None])[:, 0].cpu().numpy(),
            histogram=self._counts.view(self._num_rows, NUM_BINS).cpu().numpy(),
            tokens=self._tokens.cpu().numpy(),
        )


def _rounded(values: Any) -> Any:
    """Numbers of a float, an array or a table for JSON: six significant digits, null for those that are not finite."""
    if isinstance(values, np.ndarray):
        return _rounded(values.tolist())
    if isinstance(values, Mapping):
        return {name: _rounded(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.6g}") if math.isfinite(values) else None
