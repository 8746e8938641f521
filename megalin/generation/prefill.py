"""States and logits after prompts of different lengths: few forwards of many sequences, each exact for its own prompt.

A prompt runs in pieces: while the batch has prompts with P or more tokens left, those run their next P tokens, P a
power of two from large to small. So a batch takes about log2(length) forwards, without padding, and each sequence's
state is that of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalin.model.language_model import LanguageModel, ModelState
from megalin.ops.dispatch.dtypes import compute_dtype

PIECE_TOKENS = 2048
"""Most tokens of a prompt in one forward."""
FORWARD_TOKENS = 65536
"""Most tokens of all prompts in one forward."""


@torch.no_grad()
def prefill(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, ModelState]:
    """Logits [B, V/tp] of each prompt's next token, and the batch's state; the prompts are not empty.

    Softmax caches of the shorter prompts are padded at the start with entries that no token attends to.
    """
    weight = model.embedding.weight
    device, logits = weight.device, None
    state = model.initial_state(len(prompts), dtype=compute_dtype(weight))
    done = [0] * len(prompts)
    while left := {row: len(prompts[row]) - done[row] for row in range(len(prompts)) if done[row] < len(prompts[row])}:
        size = _piece(list(left.values()))
        rows = [row for row, count in left.items() if count >= size]
        for start in range(0, len(rows), max(FORWARD_TOKENS // size, 1)):
            group = rows[start : start + max(FORWARD_TOKENS // size, 1)]
            tokens = torch.tensor([prompts[row][done[row] : done[row] + size] for row in group], device=device)
            index = torch.tensor(group, device=device)
            output = model(tokens, state=_rows(state, index), losses="last")
            assert output.logits is not None
            assert output.state is not None
            state = _put(state, index, output.state)
            if logits is None:
                logits = output.logits.new_empty(len(prompts), output.logits.shape[-1])
            logits[index] = output.logits[:, 0]
        for row in rows:
            done[row] += size
    assert logits is not None
    return logits, state


def _piece(left: list[int]) -> int:
    """Tokens of the next forward, from the numbers of tokens left: all of them if equal, else a power of two."""
    most = min(max(left), PIECE_TOKENS)
    return most if len(set(left)) == 1 else 1 << (most.bit_length() - 1)


def state_tensors(state: ModelState) -> list[Tensor]:
    """The tensors of a state, always in the same order."""
    recurrent = [tensor for block in [*state.blocks, state.inputs] for layer in block for tensor in layer]
    return [*recurrent, state.positions, state.document_ids]


def _with_tensors(state: ModelState, tensors: Sequence[Tensor]) -> ModelState:
    """The state with its tensors replaced, in the order of `state_tensors`."""
    rest = iter(tensors)
    blocks = [[tuple(next(rest) for _ in layer) for layer in block] for block in state.blocks]
    inputs = [tuple(next(rest) for _ in layer) for layer in state.inputs]
    return ModelState(blocks, inputs, next(rest), next(rest))


def _rows(state: ModelState, index: Tensor) -> ModelState:
    """The states of some sequences."""
    return _with_tensors(state, [tensor.index_select(0, index) for tensor in state_tensors(state)])


def _put(state: ModelState, index: Tensor, part: ModelState) -> ModelState:
    """The state with those of some sequences overwritten; caches of fewer tokens are padded with zeros at the start."""
    replaced = []
    for whole, own in zip(state_tensors(state), state_tensors(part), strict=True):
        if whole.dim() > 1:
            length = max(whole.shape[1], own.shape[1])
            whole, own = _padded(whole, length), _padded(own, length)
        replaced.append(whole.index_copy_(0, index, own.to(whole.dtype)))
    return _with_tensors(state, replaced)


def _padded(tensor: Tensor, length: int) -> Tensor:
    """[B, S, ...] -> [B, length, ...], zeros before the S entries."""
    missing = length - tensor.shape[1]
    return torch.cat([tensor.new_zeros(len(tensor), missing, *tensor.shape[2:]), tensor], dim=1) if missing else tensor
