"""Batches of answers that start from the state after their prompt, which runs through the model once.

For a request of prompt c_1 .. c_m and answer a_1 .. a_n, the state S after c_1 .. c_(m-1) depends on the prompt alone;
the answer's tokens c_m, a_1 .. a_(n-1) continue from a copy of S and predict a_1 .. a_n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.evaluation.choices.encoding import EncodedRequest, distinct_prompts
from megalin.evaluation.forward_groups import forward_groups
from megalin.model.language_model import LanguageModel, ModelState
from megalin.parallel.cross_entropy import IGNORED_LABEL, TokenScores

_PADDING, _PROMPT = 0, 1
"""Document ids: padding before a short prompt, and the request."""


class Scored(NamedTuple):
    """Scores of the tokens of a batch."""

    numbers: Tensor
    """[B, T] int64, number of the request of each token; any at tokens without a label."""
    labels: Tensor
    """[B, T]"""
    scores: TokenScores
    """[B, T]"""

    def has_label(self) -> Tensor:
        """[B, T] bool, True at the tokens that predict an answer's token."""
        return self.labels != IGNORED_LABEL


class _Answer(NamedTuple):
    """An answer that continues a prompt of a batch."""

    number: int
    """Number of the request."""
    prompt: int
    """Index of the prompt in its batch."""
    ids: list[int]
    """The prompt's last id and the answer."""


def carried_batches(model: LanguageModel, requests: Sequence[EncodedRequest], device: torch.device) -> Iterator[Scored]:
    """Yields the scores of all requests, batch by batch; every batch of prompts runs once."""
    prompts = list(distinct_prompts(requests).items())
    prompts.sort(key=lambda item: len(item[0]))
    for group in forward_groups([len(ids) - 1 for ids, _ in prompts], model.state_bytes()):
        batch = [prompts[index] for index in group]
        state = _prompt_state(model, [ids[:-1] for ids, _ in batch], device)
        answers = [
            _Answer(number, index, [ids[-1], *requests[number].ids[len(ids) :]])
            for index, (ids, numbers) in enumerate(batch)
            for number in numbers
        ]
        answers.sort(key=lambda answer: len(answer.ids))
        for part in forward_groups([len(answer.ids) - 1 for answer in answers], _sequence_bytes(state)):
            yield _score_answers(model, [answers[index] for index in part], state, device)


def _sequence_bytes(state: ModelState) -> int:
    """Bytes of one sequence's state; those of a softmax cache grow with the prompts."""
    tensors = [tensor for states in [*state.blocks, state.inputs] for layer in states for tensor in layer]
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)


def _prompt_state(model: LanguageModel, prompts: Sequence[Sequence[int]], device: torch.device) -> ModelState:
    """The state after each prompt, of any lengths. Shorter ones have padding before them, a document of its own, so
    that their state starts from zero."""
    state = model.initial_state(len(prompts), dtype=model.embedding.weight.dtype)
    length = max(map(len, prompts))
    if length == 0:
        return state
    tokens = torch.zeros(len(prompts), length, dtype=torch.int64)
    documents = torch.full(tokens.shape, _PADDING, dtype=torch.int32)
    for row, ids in enumerate(prompts):
        if ids:
            tokens[row, -len(ids) :], documents[row, -len(ids) :] = torch.tensor(ids), _PROMPT
    output = model(
        tokens.to(device),
        labels=torch.full_like(tokens, IGNORED_LABEL).to(device),
        document_ids=documents.to(device),
        state=state,
        losses="scores",
    )
    assert output.state is not None
    return output.state


def _score_answers(model: LanguageModel, answers: Sequence[_Answer], state: ModelState, device: torch.device) -> Scored:
    length = max(len(answer.ids) for answer in answers) - 1
    tokens = torch.zeros(len(answers), length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    for row, answer in enumerate(answers):
        ids = torch.tensor(answer.ids)
        tokens[row, : len(ids) - 1], labels[row, : len(ids) - 1] = ids[:-1], ids[1:]
    tokens, labels = tokens.to(device), labels.to(device)
    output = model(
        tokens,
        labels=labels,
        # A prompt of one id has only padding behind it, whose state is cleared here.
        document_ids=torch.full_like(tokens, _PROMPT, dtype=torch.int32),
        state=_copies(state, torch.tensor([answer.prompt for answer in answers], device=device)),
        losses="scores",
    )
    numbers = torch.tensor([answer.number for answer in answers], device=device)
    return Scored(numbers[:, None].expand_as(labels), labels, output.token_scores())


def _copies(state: ModelState, rows: Tensor) -> ModelState:
    """Copies of the states of the sequences `rows` [N], each for one sequence of a new batch."""
    blocks = [[tuple(tensor[rows] for tensor in layer) for layer in block] for block in state.blocks]
    inputs = [tuple(tensor[rows] for tensor in layer) for layer in state.inputs]
    return ModelState(blocks, inputs, state.positions[rows], state.document_ids[rows])
