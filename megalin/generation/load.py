"""Text generation with a state of constant size: the prompt in chunks, then token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.checkpoint.load import load
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalin.errors import ConfigError
from megalin.model.config import EncoderConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.initialisation import init_weights
from megalin.train.open_run import open_run


class Sampling(NamedTuple):
    """Sampling parameters of the next token."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Samples from the k likeliest tokens only."""
    top_p: float | None = None
    """Samples from the smallest set of likeliest tokens whose probabilities reach p (nucleus sampling)."""
    seed: int = 0
    """Seed of the sampling."""


def load_for_generation(folder: str | Path, device: torch.device) -> tuple[LanguageModel, Tokenizer]:
    """Loads the newest checkpoint of a run as one fp32 model on `device`, and the run's tokenizer.

    Raises:
        MegalinError: the run has no checkpoint or no tokenizer, or its model is an encoder.
    """
    config, checkpoint = open_run(folder)
    if isinstance(config.model, EncoderConfig):
        raise ConfigError(
            f'{folder}: model.kind = "encoder" attends to full sequences and cannot continue one; give a decoder run'
        )
    if config.data.tokenizer is None:
        raise ConfigError(f"{folder}: data.tokenizer is not set, so text cannot be encoded; set it")
    model = LanguageModel(config.model)
    model.to_empty(device=device)
    init_weights(model, config.train.seed)
    load(checkpoint, weights(model), ignore=(OPTIMIZER_PREFIX,))
    model.after_optimizer_step()
    return model, load_tokenizer(config.data.tokenizer)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    num_ids: int | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Yields up to `max_tokens` ids that continue `prompt`, ending before `stop_id`.

    The prompt runs through the chunkwise forward once. Each further token costs the same work and memory at any
    length: that of the model's state, kept in fp32.

    Args:
        num_ids: only ids below it are generated; a tokenizer may have fewer ids than the model.

    Raises:
        ConfigError: the prompt is empty, an id is outside the vocabulary, or a sampling parameter is out of range.
    """
    _check(model, prompt, sampling)
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    vocab_size = min(model.config.vocab_size, num_ids or model.config.vocab_size)
    output = model(tokens, state=model.initial_state(1))
    for index in range(max_tokens):
        token = choose(output.logits[0, -1, :vocab_size], sampling, generator)
        if token == stop_id:
            return
        yield token
        if index + 1 < max_tokens:
            assert output.state is not None
            output = model.step(torch.tensor([token], device=device), output.state)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Picks the next token from logits [V]: the likeliest, or one sampled from softmax(logits / temperature)."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    logits = logits.double().cpu() / sampling.temperature
    if sampling.top_k is not None:
        threshold = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.top_p is not None:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # A token stays if the likelier ones do not reach p; the first one always stays.
        dropped = ordered.cumsum(0) - ordered >= sampling.top_p
        probabilities[order[dropped]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _check(model: LanguageModel, prompt: Sequence[int], sampling: Sampling) -> None:
    vocab_size = model.config.vocab_size
    problems = []
    if not prompt:
        problems.append("the prompt has no tokens; give some text")
    if outside := [token for token in prompt if not 0 <= token < vocab_size]:
        problems.append(f"prompt token {outside[0]} is outside the vocabulary of {vocab_size} ids")
    if not 0.0 <= sampling.temperature < float("inf"):
        problems.append(f"temperature = {sampling.temperature} is not in [0, inf); use 0 for the likeliest token")
    if sampling.top_k is not None and sampling.top_k < 1:
        problems.append(f"top-k = {sampling.top_k} keeps no token; use at least 1")
    if sampling.top_p is not None and not 0.0 < sampling.top_p <= 1.0:
        problems.append(f"top-p = {sampling.top_p} is not in (0, 1]; use 1 to keep every token")
    if not 0 <= sampling.seed < 2**63:
        problems.append(f"seed = {sampling.seed} is not in [0, 2^63); use a small number")
    if problems:
        raise ConfigError("\n".join(problems))
