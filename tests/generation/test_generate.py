"""Generation: greedy is the argmax of the training forward, batches change nothing, and the state is constant."""

from __future__ import annotations

import itertools

import pytest
import torch

from megalin.errors import ConfigError
from megalin.generation import Sampling, cast_weights, generate, generate_batches
from megalin.generation.decoder import BLOCK_TOKENS, Decoder, grows
from megalin.generation.prefill import prefill, state_tensors
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import CASES, HYBRID, NAMES, VOCAB_SIZE, build

PROMPT = [5, 17, 300, 2, 5, 9, 120]
GREEDY = Sampling()
LENGTH = 40
"""More than two chunks of the model, and more than a block of tokens."""
RAGGED = [PROMPT, [3], list(range(21)), [9, 9], PROMPT]
"""Prompts of several lengths, one longer than a chunk of the model."""


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return build(HYBRID.model, dtype=torch.float32)


def tokens(model: LanguageModel, sampling: Sampling = GREEDY, **keywords: int | None) -> list[int]:
    return generate(model, PROMPT, max_tokens=LENGTH, sampling=sampling, **keywords)


def test_greedy_tokens_are_the_likeliest_of_the_forward_at_every_step(model):
    generated = tokens(model)
    logits = model(torch.tensor([PROMPT + generated])).logits[0, :, :VOCAB_SIZE]
    assert generated == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert len(set(generated)) > 5


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_logits_after_prompts_of_several_lengths_are_those_of_each_alone(case):
    built = build(case.model)
    logits, state = prefill(built, RAGGED)
    for row, prompt in zip(logits, RAGGED, strict=True):
        torch.testing.assert_close(row, built(torch.tensor([prompt])).logits[0, -1], rtol=1e-11, atol=1e-11)
    assert state.positions.tolist() == [len(prompt) for prompt in RAGGED]
    for index, prompt in enumerate(RAGGED):
        for whole, alone in zip(state_tensors(state), state_tensors(prefill(built, [prompt])[1]), strict=True):
            own = whole[index : index + 1]
            if own.shape != alone.shape:  # a cache: entries that no token attends to, then its own
                assert not own[:, : own.shape[1] - alone.shape[1]].any()
                own = own[:, own.shape[1] - alone.shape[1] :]
            torch.testing.assert_close(own, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (not case.representative)) for case in CASES],
)
def test_a_batch_of_prompts_of_several_lengths_is_each_of_them_alone(case):
    built, sampling = build(case.model, dtype=torch.float32), Sampling(temperature=1.0, seed=3)

    def completions(batch_size):
        found = generate_batches(built, RAGGED, max_tokens=12, sampling=sampling, batch_size=batch_size)
        return [completion.tokens for completion in found]

    batched = completions(3)
    assert batched == completions(1)
    assert batched[0] != batched[4]  # equal prompts have different numbers


def test_a_long_prompt_runs_in_pieces_and_many_prompts_in_groups(model, monkeypatch):
    expected = [prefill(model, [prompt])[0][0] for prompt in RAGGED]
    monkeypatch.setattr("megalin.generation.prefill.PIECE_TOKENS", 8)
    monkeypatch.setattr("megalin.generation.prefill.FORWARD_TOKENS", 8)
    shapes, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **kw: shapes.append(tuple(ids.shape)) or forward(ids, **kw))
    logits, _ = prefill(model, RAGGED)
    assert shapes == [(1, 8), (1, 8), (2, 4), (1, 4), (3, 2), (4, 1)]
    for found, truth in zip(logits, expected, strict=True):
        torch.testing.assert_close(found[:VOCAB_SIZE], truth[:VOCAB_SIZE], rtol=1e-4, atol=1e-4)


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


def test_each_sequence_of_a_batch_stops_for_itself(model):
    whole = [c.tokens for c in generate_batches(model, RAGGED, max_tokens=LENGTH, sampling=GREEDY, batch_size=5)]
    stops = (whole[0][3], whole[2][20])
    steps = []
    found = generate_batches(
        model, RAGGED, max_tokens=LENGTH, sampling=GREEDY, batch_size=5, stop_ids=stops, on_tokens=steps.append
    )
    for completion, text in zip(found, whole, strict=True):
        expected = list(itertools.takewhile(lambda token: token not in stops, text))
        assert completion.tokens == expected
        assert completion.stopped == (len(expected) < LENGTH)
    assert sum(steps) == LENGTH


def test_a_batch_whose_sequences_have_all_ended_decodes_no_more_than_two_blocks(model):
    stop, steps = tokens(model)[2], []
    decoder = Decoder(model, GREEDY, batch_size=1, max_length=1000 + len(PROMPT), stop_ids=[stop])
    decoder.start([PROMPT], [0])
    step = decoder.step
    decoder.step = lambda: steps.append(step())
    assert len(list(decoder.blocks(1000))) == 1
    assert len(steps) == 2 * 32 - 1


def test_ids_that_the_tokenizer_lacks_are_never_generated(model):
    generated = tokens(model, Sampling(temperature=5.0), num_ids=50)
    assert max(generated) < 50
    assert max(tokens(model, Sampling(temperature=5.0))) >= 50


def test_a_repetition_penalty_forbids_what_the_prompt_and_the_text_have(model):
    # A penalty this large leaves no positive logit to a token that was there.
    prompt = [token for token in range(VOCAB_SIZE) if token % 2]
    found = generate(model, prompt, max_tokens=30, sampling=Sampling(repetition_penalty=1e6))
    assert len({*prompt, *found}) == len(prompt) + 30


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name == "hybrid" else pytest.mark.slow, id=case.name) for case in CASES],
)
def test_decoding_in_float16_keeps_the_logits(case):
    """Weights and activations in fp16, states in fp32: rounding alone, in every mixer."""
    ids = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(1))
    logits = []
    for dtype in (torch.float32, torch.float16):
        model, steps = build(case.model, dtype=torch.float32), []
        cast_weights(model, dtype)
        state = model.initial_state(2, dtype=torch.float32)
        for token in ids.T:
            output = model.step(token, state)
            state = output.state
            steps.append(output.logits[..., :VOCAB_SIZE])
        logits.append(torch.stack(steps).double())
    expected, found = logits
    assert (found - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("name", ["hybrid", "softmax-grouped"])
def test_state_does_not_grow_with_the_text(name, monkeypatch):
    model, sizes = build(CASES[NAMES.index(name)].model, dtype=torch.float32), []
    step = model.step

    def measured_step(*arguments):
        output = step(*arguments)
        recurrent = state_tensors(output.state)[:-2]
        assert all(tensor.dtype == torch.float32 for tensor in recurrent)
        sizes.append(sum(tensor.nbytes for tensor in recurrent))
        return output

    monkeypatch.setattr(model, "step", measured_step)
    tokens(model)
    assert len(sizes) == LENGTH - 1
    cache = model.reserve(model.initial_state(1), len(PROMPT) + LENGTH)
    assert set(sizes) == {sum(tensor.nbytes for tensor in state_tensors(cache)[:-2])}
    if name == "hybrid":
        assert set(sizes) == {model.state_bytes()}


def test_only_softmax_attention_has_a_state_that_grows():
    growing = {case.name for case in CASES if grows(build(case.model))}
    assert growing == {"softmax", "softmax-grouped"}


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "the prompt has no tokens; give some text"),
        ([1, VOCAB_SIZE], Sampling(), f"token {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE} ids"),
        ([1], Sampling(temperature=-0.5), r"temperature = -0.5 is not in \[0, inf\)"),
        ([1], Sampling(top_k=0), "top-k = 0 keeps no token"),
        ([1], Sampling(top_p=0.0), r"top-p = 0.0 is not in \(0, 1\]"),
        ([1], Sampling(seed=-1), r"seed = -1 is not in \[0, 2\^63\)"),
        ([1], Sampling(repetition_penalty=0.0), r"repetition penalty = 0.0 is not in \(0, inf\)"),
    ],
)
def test_what_cannot_be_generated_from_is_refused(model, prompt, sampling, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, prompt, max_tokens=1, sampling=sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = 0: use at least 1"),
        ({"batch_size": 0}, "batch_size = 0: use at least 1"),
        ({"graph": True}, "graph = True, but the model is not on a GPU; leave it out"),
    ],
)
def test_limits_and_graphs_that_cannot_be_are_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        generate_batches(model, [[1], []], **{"max_tokens": 1, "sampling": GREEDY, **options})
    with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
        generate_batches(model, [[1], []], **{"max_tokens": 1, "sampling": GREEDY, **options})


def test_graphs_of_tensor_parallel_ranks_are_refused():
    ranked = LanguageModel(HYBRID.model, TensorParallel(Axis("tp", 2)))
    with pytest.raises(ConfigError, match=r"graph = True, but a graph captures no collectives of parallel\.tp; leave"):
        generate_batches(ranked, [[1]], max_tokens=1, sampling=GREEDY, graph=True)


def test_a_batch_ends_when_all_of_its_texts_are_to_stop(model):
    """At the end of a block of tokens: here of the first of three, in which both texts meet their condition."""
    seen: list[int] = []
    options = {"max_tokens": 80, "sampling": GREEDY, "batch_size": 2}
    whole = [completion.tokens for completion in generate_batches(model, RAGGED[:2], **options)]

    def long(tokens: list[int]) -> bool:
        seen.append(len(tokens))
        return len(tokens) >= 10

    stopped = list(generate_batches(model, RAGGED[:2], stop_when=long, **options))
    assert [completion.tokens for completion in stopped] == [tokens[:BLOCK_TOKENS] for tokens in whole]
    assert not any(completion.stopped for completion in stopped)
    assert seen == [BLOCK_TOKENS] * 2
    never = generate_batches(model, RAGGED[:2], stop_when=lambda tokens: tokens[0] == whole[0][0], **options)
    assert whole[0][0] != whole[1][0]
    assert [completion.tokens for completion in never] == whole
