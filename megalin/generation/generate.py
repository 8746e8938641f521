"""Generation from prompts of any lengths and number, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megalin.errors import ConfigError
from megalin.generation.decoder import NO_TOKEN, Decoder, capture_cuda_graph
from megalin.generation.sampling import Sampling, sampling_problems
from megalin.model.language_model import LanguageModel

GRAPH_TOKENS = 64
"""Tokens of all batches together from which a graph saves more time than its capture takes."""


class Completion(NamedTuple):
    """The continuation of one prompt."""

    number: int
    """The prompt's number."""
    tokens: list[int]
    """Generated ids, without the prompt and the stop id."""
    stopped: bool
    """True where a stop id ended it, False where `max_tokens` did."""


def generate_batches(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    numbers: Sequence[int] | None = None,
    batch_size: int = 1,
    num_ids: int | None = None,
    stop_ids: Sequence[int] = (),
    stop_when: Callable[[list[int]], bool] | None = None,
    graph: bool | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Iterator[Completion]:
    """Yields the completion of every prompt, in order; prompts of different lengths share a batch.

    Draws depend on the seed, the prompt's number and the token's number, so completions do not depend on `batch_size`
    but for the rounding of the logits. The ranks of a tensor-parallel axis call it with the same arguments;
    `generate_on_mesh` divides prompts among ranks.

    Args:
        prompts: ids.
        numbers: the prompts' numbers; None: their indices.
        num_ids: only ids below it are generated; a tokenizer may have fewer ids than the model.
        stop_ids: ids that end a text.
        stop_when: called with a text's tokens so far whenever the host has read further ones; a batch ends when it is
            true, or a stop id was chosen, for all of its texts. Their completions keep the tokens read until then.
        graph: launch every token as one CUDA graph; None: on GPUs without tensor parallelism, if there are enough
            tokens.
        on_tokens: called with the number of tokens that each sequence of a batch has advanced, or skipped at its end.

    Raises:
        ConfigError: an empty prompt, an id outside of the vocabulary, a parameter out of range, or a graph that the
            device or tensor parallelism does not allow.
    """
    problems = generation_problems(model, prompts, sampling, max_tokens=max_tokens, batch_size=batch_size)
    obstacle = _graph_obstacle(model)
    if graph and obstacle:
        problems.append(f"graph = True, but {obstacle}; leave it out")
    if problems:
        raise ConfigError("\n".join(problems))
    batch_size = min(batch_size, len(prompts))  # no empty places in the only batch
    if graph is None:
        graph = not obstacle and max_tokens * len(prompts) >= GRAPH_TOKENS * batch_size
    return _batches(
        Decoder(
            model,
            sampling,
            batch_size=batch_size,
            max_length=max(len(prompt) for prompt in prompts) + max_tokens,
            num_ids=num_ids,
            stop_ids=stop_ids,
            capture=capture_cuda_graph if graph else None,
        ),
        prompts,
        range(len(prompts)) if numbers is None else numbers,
        max_tokens,
        stop_when,
        on_tokens,
    )


def _batches(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    max_tokens: int,
    stop_when: Callable[[list[int]], bool] | None,
    on_tokens: Callable[[int], None],
) -> Iterator[Completion]:
    for first in range(0, len(prompts), decoder.batch_size):
        batch, produced = prompts[first : first + decoder.batch_size], 0
        own_numbers = numbers[first : first + decoder.batch_size]
        decoder.start(batch, own_numbers)
        tokens: list[list[int]] = [[] for _ in batch]
        for block in decoder.blocks(max_tokens):
            for own, column in zip(tokens, block.T.tolist(), strict=False):
                own.extend(token for token in column if token != NO_TOKEN)
            produced += len(block)
            on_tokens(len(block))
            if stop_when is not None and all(len(own) < produced or stop_when(own) for own in tokens):
                break
        on_tokens(max_tokens - produced)
        for number, own in zip(own_numbers, tokens, strict=True):
            yield Completion(number, own, len(own) < produced)


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    num_ids: int | None = None,
    stop_id: int | None = None,
) -> list[int]:
    """Up to `max_tokens` ids that continue `prompt`, ending before `stop_id`; arguments as in `generate_batches`.

    Raises:
        ConfigError: the prompt is empty, an id is outside the vocabulary, or a sampling parameter is out of range.
    """
    (completion,) = generate_batches(
        model,
        [prompt],
        max_tokens=max_tokens,
        sampling=sampling,
        num_ids=num_ids,
        stop_ids=() if stop_id is None else (stop_id,),
    )
    return completion.tokens


def _graph_obstacle(model: LanguageModel) -> str:
    """The reason why no graph is captured of the model's steps; empty where one can be."""
    if model.tp.size > 1:
        return "a graph captures no collectives of parallel.tp"
    return "" if model.embedding.weight.device.type == "cuda" else "the model is not on a GPU"


def generation_problems(
    model: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling, *, max_tokens: int, batch_size: int
) -> list[str]:
    """A line for each prompt that cannot be continued and each parameter out of range."""
    problems = [*_prompt_problems(model, prompts), *sampling_problems(sampling)]
    for name, value in (("max_tokens", max_tokens), ("batch_size", batch_size)):
        if value < 1:
            problems.append(f"{name} = {value}: use at least 1")
    return problems


def _prompt_problems(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> list[str]:
    """A line for each prompt that cannot be continued."""
    vocab_size, problems = model.config.vocab_size, []
    if not prompts:
        problems.append("no prompts; give at least one")
    for number, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not prompt:
            problems.append(f"{name} has no tokens; give some text")
        if outside := [token for token in prompt if not 0 <= token < vocab_size]:
            problems.append(f"{name}: token {outside[0]} is outside the vocabulary of {vocab_size} ids")
    return problems
