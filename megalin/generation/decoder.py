"""Batched decoding, token by token, from a state in fixed memory: one CUDA graph a token on GPUs.

A step reads and writes fixed tensors only: the state, the last tokens, the uniform numbers of a block of tokens and the
block's tokens. The host launches steps, and reads a block's tokens while the device computes the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megalin.generation.prefill import prefill, state_tensors
from megalin.generation.sampling import Sampling, choose_tokens, penalize, prompt_keys, uniforms
from megalin.model.language_model import LanguageModel, ModelState
from megalin.train.step import AsyncScalars

BLOCK_TOKENS = 32
"""Tokens of each sequence that the host reads at once; it launches up to two blocks beyond the last sequence's end."""
WARM_UP_STEPS = 2
"""Eager steps before the capture: they compile and choose kernels, which a capture cannot."""
NO_TOKEN = -1
"""Stands in a block after a sequence's end."""

Step = Callable[[], None]
Capture = Callable[[Step, torch.device], Step]
"""Makes of a step on fixed tensors one that replays its kernels."""


def capture_cuda_graph(step: Step, device: torch.device) -> Step:
    """The step as one CUDA graph: the same kernels on the same memory, launched by a single call. Runs nothing yet."""
    graph, cuda_stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=cuda_stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


class Decoder:
    """Decodes batches of B prompts; the memory, and on GPUs the graph, of one batch serves the next ones.

    Ranks of a tensor-parallel axis decode the same batches: they gather the logits of every token, and each makes the
    same choices. The cache of softmax attention has room for `max_length` tokens of each sequence from the start, and a
    step costs the attention to all of them.

    Args:
        batch_size: B; a batch of fewer prompts is filled up with sequences that have ended.
        max_length: most tokens of a sequence, those of its prompt included.
        num_ids: only ids below it are chosen; a tokenizer may have fewer ids than the model.
        stop_ids: ids that end a sequence, and are not part of it.
        capture: makes a graph of a step; None: every step runs eagerly.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampling: Sampling,
        *,
        batch_size: int,
        max_length: int,
        num_ids: int | None = None,
        stop_ids: Sequence[int] = (),
        capture: Capture | None = None,
    ) -> None:
        self._model, self._sampling, self._capture, self.batch_size = model, sampling, capture, batch_size
        weight = model.embedding.weight  # [V, D]; a DTensor has this global shape
        self._device, self._impossible = weight.device, None
        if num_ids is not None and num_ids < model.config.vocab_size:
            self._impossible = torch.arange(len(weight), device=weight.device) >= num_ids  # [V]
        self._stop_ids = torch.tensor(list(stop_ids), dtype=torch.int64, device=self._device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self._device)

        self._tokens, self._keys, self._number = integers(batch_size), integers(batch_size), integers(1)
        self._block = integers(BLOCK_TOKENS, batch_size)
        self._uniforms = torch.zeros(BLOCK_TOKENS, batch_size, dtype=torch.float64, device=self._device)
        self._finished = torch.zeros(batch_size, dtype=torch.bool, device=self._device)
        penalized = sampling.repetition_penalty != 1.0
        self._seen = torch.zeros(batch_size, len(weight), dtype=torch.bool, device=self._device) if penalized else None
        self._state: ModelState | None = None
        self._contexts = model.step_contexts(in_place=True)
        self._replay: Step | None = None
        self._warm_steps = 0
        self._max_length, self._length = max_length, 0

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> None:
        """Runs a batch's prompts and chooses their first tokens.

        Args:
            prompts: 1 to `batch_size` prompts, none empty, of at most `max_length` tokens.
            numbers: the prompts' numbers, which key their draws.
        """
        assert 0 < len(prompts) == len(numbers) <= self.batch_size, (len(prompts), len(numbers))
        self._length = max(len(prompt) for prompt in prompts)
        missing = self.batch_size - len(prompts)
        prompts, numbers = [*prompts, *[prompts[0]] * missing], [*numbers, *[numbers[0]] * missing]
        logits, state = prefill(self._model, prompts)
        self._load(self._model.reserve(state, self._max_length))
        self._keys.copy_(prompt_keys(self._sampling.seed, torch.tensor(numbers, device=self._device)))
        self._finished.copy_(torch.arange(self.batch_size, device=self._device) >= self.batch_size - missing)
        if self._seen is not None:
            self._seen.zero_()
            for row, prompt in enumerate(prompts):
                self._seen[row, torch.tensor(list(prompt), device=self._device)] = True
        self._draw(0)
        self._choose(logits)

    def blocks(self, max_tokens: int) -> Iterator[Tensor]:
        """Yields the tokens after `start`, [n, B] int64 on the host, NO_TOKEN after a sequence's end, until all have
        ended or have `max_tokens`."""
        waiting: AsyncScalars | None = None
        for first in range(0, max_tokens, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, max_tokens - first)
            if first > 0:
                self._draw(first)
            for _ in range(count if first > 0 else count - 1):  # `start` chose the first
                self.step()
            written, waiting = waiting, AsyncScalars(self._block[:count].clone())
            if written is not None:
                yield (block := written.read())
                if bool((block[-1] == NO_TOKEN).all()):
                    return
        if waiting is not None:
            yield waiting.read()

    @torch.no_grad()
    def step(self) -> None:
        """Decodes one token of every sequence."""
        self._length += 1  # tokens of the longest sequence in the state
        assert self._length <= self._max_length, self._max_length
        if self._capture is None or self._warm_steps < WARM_UP_STEPS:
            self._warm_steps += 1
            self._advance()
            return
        if self._replay is None:
            self._replay = self._capture(self._advance, self._device)
        self._replay()

    def state_tensors(self) -> list[Tensor]:
        """The tensors of the state, which every step overwrites."""
        assert self._state is not None
        return state_tensors(self._state)

    def _advance(self) -> None:
        assert self._state is not None
        output = self._model.step(self._tokens, self._state, self._contexts)
        assert output.logits is not None
        assert output.state is not None
        self._keep(output.state)
        self._choose(output.logits[:, 0])

    def _load(self, state: ModelState) -> None:
        """Copies a batch's first state into the fixed memory; the first batch's state becomes that memory."""
        if self._state is None:
            self._state = state
        else:
            self._keep(state)

    def _keep(self, state: ModelState) -> None:
        """Copies a state over the fixed one."""
        assert self._state is not None
        for old, new in zip(state_tensors(self._state), state_tensors(state), strict=True):
            if new is not old:
                old.copy_(new)

    def _draw(self, first: int) -> None:
        """Starts the block of tokens from number `first` with its uniform numbers."""
        self._number.zero_()
        if self._sampling.temperature > 0.0:
            numbers = torch.arange(first, first + BLOCK_TOKENS, device=self._device)[:, None]
            self._uniforms.copy_(uniforms(self._keys, numbers))

    def _choose(self, logits: Tensor) -> None:
        """Chooses the next tokens from logits [B, V/tp] and writes them to the block."""
        logits = self._model.tp.all_gather_last_dim(logits)
        if self._impossible is not None:
            logits = logits.masked_fill(self._impossible, float("-inf"))
        if self._seen is not None:
            logits = penalize(logits, self._seen, self._sampling.repetition_penalty)
        uniform = self._uniforms[0]  # greedy choices do not read it
        if self._sampling.temperature > 0.0:
            uniform = self._uniforms.index_select(0, self._number).squeeze(0)
        tokens = choose_tokens(logits, self._sampling, uniform)
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        if len(self._stop_ids):
            self._finished.logical_or_(torch.isin(tokens, self._stop_ids))
        self._tokens.copy_(tokens)
        self._block.index_copy_(0, self._number, tokens.masked_fill(self._finished, NO_TOKEN)[None])
        self._number.add_(1)


def grows(model: LanguageModel) -> bool:
    """True where a token makes the state larger, as softmax attention's cache of keys and values does without
    `LanguageModel.reserve`."""
    return any(0 in tensor.shape for tensor in state_tensors(model.initial_state(1)))
