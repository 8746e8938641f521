"""Choice of the next token on the device: penalty, temperature, top-k, top-p, and draws that no batch changes.

A draw is a pure function of (seed, prompt number, token number), a counter-based generator: with mix(x) the finaliser
of SplitMix64 (Steele, Lea and Flood 2014) and g its increment, in integers modulo 2^64,

    key = mix(mix(seed + g) + (prompt + 1) g),    u = floor(mix(key + (token + 1) g) / 2^11) 2^-53,

uniform in [0, 1). The token is the inverse of the distribution function at u: the first whose cumulative probability,
in the order of the ids, exceeds u. Neither the number of sequences in a batch nor their order enters it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.errors import ConfigError
from megalin.ops.decoding.sampling import SMALLEST_TEMPERATURE, draw_tokens
from megalin.ops.dispatch.dtypes import compute_dtype

_INCREMENT = 0x9E3779B97F4A7C15
_FIRST_FACTOR, _SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Sampling(NamedTuple):
    """Sampling parameters of the next token, applied in this order: penalty, temperature, top-k, top-p."""

    temperature: float = 0.0
    """Divides the logits; 0, as any below 1e-30, takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Samples from the k likeliest tokens only, and from those equal to the last of them."""
    top_p: float | None = None
    """Samples from the smallest set of likeliest tokens whose probabilities reach p (nucleus sampling)."""
    seed: int = 0
    """Seed of the sampling."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the prompt or the text has, and multiplies their negative ones
    (CTRL section 4.1); 1: no penalty."""


def sampling_problems(sampling: Sampling) -> list[str]:
    """A line for each parameter out of range."""
    problems = []
    if not 0.0 <= sampling.temperature < float("inf"):
        problems.append(f"temperature = {sampling.temperature} is not in [0, inf); use 0 for the likeliest token")
    if sampling.top_k is not None and sampling.top_k < 1:
        problems.append(f"top-k = {sampling.top_k} keeps no token; use at least 1")
    if sampling.top_p is not None and not 0.0 < sampling.top_p <= 1.0:
        problems.append(f"top-p = {sampling.top_p} is not in (0, 1]; use 1 to keep every token")
    if not 0 <= sampling.seed < 2**63:
        problems.append(f"seed = {sampling.seed} is not in [0, 2^63); use a small number")
    if not 0.0 < sampling.repetition_penalty < float("inf"):
        problems.append(f"repetition penalty = {sampling.repetition_penalty} is not in (0, inf); use 1 for none")
    return problems


def check_sampling(sampling: Sampling) -> None:
    """Raises ConfigError with a line for each parameter out of range."""
    if problems := sampling_problems(sampling):
        raise ConfigError("\n".join(problems))


def prompt_keys(seed: int, prompt_numbers: Tensor) -> Tensor:
    """Keys of the prompts' draws: numbers [B] int64 -> [B] int64."""
    start = _mixed_integer(seed + _INCREMENT)
    return _mixed(prompt_numbers.add(1) * _signed(_INCREMENT) + _signed(start))


def uniforms(keys: Tensor, token_numbers: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-53: keys and numbers, int64 tensors that broadcast, -> fp64."""
    bits = _mixed(token_numbers.add(1) * _signed(_INCREMENT) + keys)
    return _shifted(bits, 11).double() * 2.0**-53


def choose_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The next tokens: logits [B, V], -inf for tokens that are impossible, and uniform numbers [B] -> ids [B] int64.

    Greedy choices and ties take the lowest id. Probabilities as in `draw_tokens`.
    """
    if sampling.temperature < SMALLEST_TEMPERATURE:
        return logits.argmax(-1)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_p, sampling.temperature)
    return draw_tokens(logits, uniform, temperature=sampling.temperature)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Lowers the logits [B, V] of the tokens with `seen` [B, V] true (`Sampling.repetition_penalty`)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _nucleus(logits: Tensor, top_p: float, temperature: float) -> Tensor:
    """logits [B, V], -inf outside of the smallest set of likeliest tokens whose probabilities reach top_p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = (ordered.to(compute_dtype(ordered)) / temperature).softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    # A token stays if the likelier ones do not reach p; the first one always stays.
    return logits.scatter(-1, order, ordered.masked_fill(before >= top_p, float("-inf")))


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST_FACTOR)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND_FACTOR)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x / 2^bits, rounded down, of the unsigned 64-bit numbers that int64 holds."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed_integer(x: int) -> int:
    x %= 2**64
    x = (x ^ (x >> 30)) * _FIRST_FACTOR % 2**64
    x = (x ^ (x >> 27)) * _SECOND_FACTOR % 2**64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
