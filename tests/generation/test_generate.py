"""Decoding: greedy is the argmax of the training forward, samples depend on the seed, and the state is constant."""

from __future__ import annotations

import itertools

import pytest
import torch

from megalin.errors import ConfigError
from megalin.generation import Sampling, choose, generate
from megalin.model.language_model import LanguageModel
from tests.cases import HYBRID, VOCAB_SIZE, build

PROMPT = [5, 17, 300, 2, 5, 9, 120]
GREEDY = Sampling()
LENGTH = 40
"""More than two chunks of the model."""


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return build(HYBRID.model, dtype=torch.float32)


def tokens(model: LanguageModel, sampling: Sampling = GREEDY, **keywords: int | None) -> list[int]:
    return list(generate(model, PROMPT, max_tokens=LENGTH, sampling=sampling, **keywords))


def test_greedy_tokens_are_the_likeliest_of_the_forward_at_every_step(model):
    generated = tokens(model)
    logits = model(torch.tensor([PROMPT + generated])).logits[0, :, :VOCAB_SIZE]
    assert generated == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert len(set(generated)) > 5


def test_samples_are_a_function_of_the_seed(model):
    first, again, other = (tokens(model, Sampling(temperature=1.0, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first != tokens(model)


def test_one_likeliest_token_is_greedy(model):
    assert tokens(model, Sampling(temperature=3.0, top_k=1, seed=5)) == tokens(model)
    assert tokens(model, Sampling(temperature=1.0, top_p=1e-9, seed=5)) == tokens(model)


def test_stop_id_ends_the_text_and_is_not_part_of_it(model):
    whole = tokens(model)
    stop = whole[10]
    assert tokens(model, stop_id=stop) == list(itertools.takewhile(lambda token: token != stop, whole))


def test_ids_that_the_tokenizer_lacks_are_never_generated(model):
    generated = tokens(model, Sampling(temperature=5.0), num_ids=50)
    assert max(generated) < 50
    assert max(tokens(model, Sampling(temperature=5.0))) >= 50


def test_draws_follow_the_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    for sampling, kept in (
        (Sampling(temperature=0.5), 4),
        (Sampling(temperature=1.0, top_k=2), 2),
        (Sampling(temperature=1.0, top_p=0.9), 3),
    ):
        draws = torch.tensor([choose(logits, sampling, generator) for _ in range(4000)])
        expected = (logits / sampling.temperature)[:kept].softmax(0)
        observed = torch.bincount(draws, minlength=4) / len(draws)
        assert torch.allclose(observed[:kept], expected, atol=0.03)
        assert observed[kept:].sum() == 0


def test_state_does_not_grow_with_the_text(model, monkeypatch):
    sizes = []
    step = model.step

    def measured_step(token, state):
        output = step(token, state)
        sizes.append(sum(t.numel() * t.element_size() for block in output.state.blocks for s in block for t in s))
        assert all(t.dtype == torch.float32 for block in output.state.blocks for s in block for t in s)
        return output

    monkeypatch.setattr(model, "step", measured_step)
    tokens(model)
    assert len(sizes) == LENGTH - 1
    assert set(sizes) == {model.state_bytes()}


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "the prompt has no token"),
        ([1, VOCAB_SIZE], Sampling(), f"prompt token {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE} ids"),
        ([1], Sampling(temperature=-0.5), r"temperature = -0.5 is not in \[0, inf\)"),
        ([1], Sampling(top_k=0), "top-k = 0 keeps no token"),
        ([1], Sampling(top_p=0.0), r"top-p = 0.0 is not in \(0, 1\]"),
        ([1], Sampling(seed=-1), r"seed = -1 is not in \[0, 2\^63\)"),
    ],
)
def test_what_cannot_be_generated_from_is_refused(model, prompt, sampling, message):
    with pytest.raises(ConfigError, match=message):
        list(generate(model, prompt, max_tokens=1, sampling=sampling))
