"""Draws on the device: their distribution, their independence of the batch, and the filters before them."""

from __future__ import annotations

import pytest
import torch

from megalin.generation.sampling import Sampling, choose_tokens, penalize, prompt_keys, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])
SPLITMIX = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
"""The first outputs of SplitMix64 seeded with 0, as published with its reference implementation."""


def draws(prompts: int, tokens: int, *, seed: int = 0) -> torch.Tensor:
    """[tokens, prompts] uniform numbers."""
    return uniforms(prompt_keys(seed, torch.arange(prompts)), torch.arange(tokens)[:, None])


def test_the_generator_is_splitmix64():
    expected = [(word >> 11) * 2.0**-53 for word in SPLITMIX]
    assert uniforms(torch.tensor(0), torch.arange(3)).tolist() == expected


def test_draws_are_uniform_and_uncorrelated_over_prompts_tokens_and_seeds():
    found = draws(300, 200)
    counts = torch.histc(found, bins=20, min=0.0, max=1.0)
    expected = found.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 50.0  # chi-square, 19 degrees of freedom: 43.8 is 1 in 1000
    for other in (found.roll(1, 0), found.roll(1, 1), draws(300, 200, seed=1)):
        correlation = torch.corrcoef(torch.stack([found.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.015  # 3.7 standard deviations
    assert found.unique().numel() == found.numel()


def test_a_draw_does_not_depend_on_its_batch():
    numbers = torch.tensor([7, 0, 123456])
    assert torch.equal(uniforms(prompt_keys(5, numbers), torch.tensor(9)), draws(123457, 10, seed=5)[9, numbers])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=0.5), 4),
        (Sampling(temperature=1.0, top_k=2), 2),
        (Sampling(temperature=1.0, top_p=0.9), 3),
        (Sampling(temperature=2.0, top_k=3, top_p=0.7), 2),
    ],
)
def test_draws_follow_the_probabilities(sampling, kept):
    number = 20_000
    found = choose_tokens(LOGITS.expand(number, 4), sampling, draws(number, 1)[0])
    logits = LOGITS / sampling.temperature
    expected = logits[:kept].softmax(0)
    observed = torch.bincount(found, minlength=4) / number
    assert torch.allclose(observed[:kept], expected, atol=0.012)
    assert observed[kept:].sum() == 0


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_draw():
    logits = torch.randn(7, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[:, 400:] = float("-inf")
    logits[3, :300] = float("-inf")
    uniform = torch.tensor([0.0, 0.1, 0.5, 0.0, 0.9, 1.0 - 2.0**-53, 0.33])
    cumulative = logits.softmax(-1).cumsum(-1)
    found = choose_tokens(logits, Sampling(temperature=1.0), uniform.double())
    for row, (token, u) in enumerate(zip(found.tolist(), uniform.double().tolist(), strict=True)):
        assert logits[row, token] > float("-inf")
        assert u < cumulative[row, token] + 1e-12
        assert token == 0 or cumulative[row, token - 1] <= u + 1e-12


@pytest.mark.parametrize("temperature", [1e-30, 1e-31, 1e-38, 1e-40, 1e-46, 1e-320])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2}], ids=str)
def test_a_temperature_near_zero_takes_the_likeliest_token(temperature, filters):
    logits = torch.stack([LOGITS.roll(turn) * size for turn in range(4) for size in (1.0, 1e-20, 1e6)])
    uniform = draws(len(logits), 1)[0]
    found = choose_tokens(logits, Sampling(temperature, **filters), uniform)
    assert torch.equal(found, logits.argmax(-1))


def test_ties_of_the_last_of_the_likeliest_are_kept():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    found = choose_tokens(logits.expand(3000, 4), Sampling(temperature=1.0, top_k=1), draws(3000, 1)[0])
    assert found.unique().tolist() == [0, 1, 2]


def test_the_penalty_divides_positive_logits_and_multiplies_negative_ones():
    seen = torch.tensor([[True, False, True, True]])
    assert penalize(LOGITS[None], seen, 2.0).tolist() == [[1.0, 1.0, 0.0, -2.0]]
