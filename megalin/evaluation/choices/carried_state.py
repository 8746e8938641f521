"""Batches of answers that start from the state after their prompt, which runs through the model once.

For a request of prompt c_1 .. c_m and answer a_1 .. a_n, the state S after c_1 .. c_(m-1) depends on the prompt alone;
the answer's tokens c_m, a_1 .. a_(n-1) continue from a copy of S and predict a_1 .. a_n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
    request: EncodedRequest
    prompt: int
    """Index of the prompt in its batch."""


def prompt_groups(
    model: LanguageModel, requests: Sequence[EncodedRequest], *, rank: int = 0, size: int = 1
) -> list[list[list[int]]]:
    """Groups of prompts that run together, by rising length: the numbers of each prompt's requests.

    Args:
        rank, size: of `size` ranks that divide the distinct prompts among them.
    """
    same_prompt = sorted(distinct_prompts(requests).values(), key=lambda numbers: len(requests[numbers[0]].prompt))
    same_prompt = same_prompt[rank::size]
    lengths = [len(requests[numbers[0]].prompt) - 1 for numbers in same_prompt]
    return [[same_prompt[index] for index in group] for group in forward_groups(lengths, model.state_bytes())]


def carried_batches(
    model: LanguageModel, requests: Sequence[EncodedRequest], group: Sequence[Sequence[int]], device: torch.device
) -> Iterator[Scored]:
    """Yields the scores of the requests of a group of `prompt_groups`, batch by batch; its prompts run once."""
    state = _prompt_state(model, [requests[numbers[0]].prompt[:-1] for numbers in group], device)
    answers = [_Answer(number, requests[number], prompt) for prompt, numbers in enumerate(group) for number in numbers]
    answers.sort(key=lambda answer: answer.request.num_answer_tokens)
    lengths = [answer.request.num_answer_tokens for answer in answers]
    for part in forward_groups(lengths, _sequence_bytes(state)):
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
    tokens = np.zeros((len(prompts), length), np.int64)
    documents = np.full(tokens.shape, _PADDING, np.int32)
    for row, ids in enumerate(prompts):
        if ids:
            tokens[row, -len(ids) :], documents[row, -len(ids) :] = ids, _PROMPT
    output = model(
        _to(tokens, device),
        labels=torch.full(tokens.shape, IGNORED_LABEL, device=device),
        document_ids=_to(documents, device),
        state=state,
        losses="scores",
    )
    assert output.state is not None
    return output.state


def _score_answers(model: LanguageModel, answers: Sequence[_Answer], state: ModelState, device: torch.device) -> Scored:
    length = max(answer.request.num_answer_tokens for answer in answers)
    ids = np.zeros((len(answers), length), np.int64)
    targets = np.full(ids.shape, IGNORED_LABEL)
    for row, (_, request, _) in enumerate(answers):
        count = request.num_answer_tokens
        last = request.ids[-count - 1 :]  # the prompt's last id and the answer
        ids[row, :count], targets[row, :count] = last[:-1], last[1:]
    tokens, labels = _to(ids, device), _to(targets, device)
    prompts = _to(np.array([answer.prompt for answer in answers]), device)
    output = model(
        tokens,
        labels=labels,
        # A prompt of one id has only padding behind it, whose state is cleared here.
        document_ids=torch.full_like(tokens, _PROMPT, dtype=torch.int32),
        state=_copies(state, prompts),
        losses="scores",
    )
    numbers = _to(np.array([answer.number for answer in answers]), device)
    return Scored(numbers[:, None].expand_as(labels), labels, output.token_scores())


def _to(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies an array to the device, without waiting for the device's earlier work."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def _copies(state: ModelState, rows: Tensor) -> ModelState:
    """Copies of the states of the sequences `rows` [N], each for one sequence of a new batch."""
    blocks = [[tuple(tensor[rows] for tensor in layer) for layer in block] for block in state.blocks]
    inputs = [tuple(tensor[rows] for tensor in layer) for layer in state.inputs]
    return ModelState(blocks, inputs, state.positions[rows], state.document_ids[rows])
