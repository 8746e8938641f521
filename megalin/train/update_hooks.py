"""Update hooks: state that follows the weights, such as their moving average, in steps, checkpoints and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX
from megalin.parallel.agreement import on_rank_zero, rank

HOOKS_PREFIX = f"{OPTIMIZER_PREFIX}hooks."
"""Prefix of the names of hooks' tensors, which a reader of weights ignores with those of the optimizer."""

_log = logging.getLogger(__name__)


class UpdateHook(Protocol):
    """A state that is updated after each optimizer step, on every rank: a moving average of the weights, statistics.

    Weights are passed by global name, as in a checkpoint: fp32, and on a mesh DTensors, of which this rank holds a
    shard (`parallel.tensor_parallel.local`); a rank of a pipeline has those of its stages. Their memory is the
    engine's: a hook neither writes to it nor keeps it. It computes on the device and never makes the host wait (no
    `item`, no branch on a tensor), because the host launches the next step before the device has finished this one. So
    it works with both engines and with CUDA graphs, which contain forwards and backwards only. Every rank has the same
    hooks in the same order.

    In a checkpoint its tensors are `optim.hooks.<name>.<key>`, and load on another mesh and with the other engine:

    - A run without the hook that resumes from such a checkpoint logs a warning, and its own checkpoints lack the
      tensors.
    - A run with the hook that resumes from a checkpoint without its tensors logs a warning and calls `start` with the
      loaded weights; after imported or initial weights it does so without a warning.
    - Of a checkpoint with the hook's tensors each must have the name, shape and dtype of `tensors`: else the run ends
      with a CheckpointError before anything is changed.
    """

    @property
    def name(self) -> str:
        """Name in checkpoints, without a dot; unique among the hooks of a run."""

    def memory_bytes(self, elements: int) -> int:
        """Bytes on the device of a rank that holds `elements` fp32 weights in its shards, with the temporaries of
        `after_update`; for the memory check before a run and the planner."""

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Creates the state for these weights; a second call replaces it. Called before the first step, and after
        weights were loaded from a checkpoint without this hook's tensors."""

    def after_update(self, weights: Mapping[str, Tensor], *, applied: Tensor, step: int) -> None:
        """Updates the state after the optimizer step number `step`, without gradients.

        Args:
            applied: [] bool on the device, equal on every rank: whether the weights were updated. If False (the loss
                or the gradient was not finite, in this step or in one whose error was not raised yet), the weights may
                contain NaN and the state must not change.
        """

    def tensors(self) -> Mapping[str, Tensor]:
        """The state for a checkpoint, which is saved from it and loaded into it: tensors placed as a weight, or equal
        on every rank. Called after `start`."""


class SavedHooks(NamedTuple):
    """Tensors of hooks to load from a checkpoint, and those that are not."""

    tensors: dict[str, Tensor]
    """Targets of the hooks that the checkpoint contains, by their names there."""
    ignored: tuple[str, ...]
    """Prefixes of the tensors of hooks that this run does not have."""
    missing: list[UpdateHook]
    """Hooks without tensors in the checkpoint."""


class UpdateHooks:
    """The hooks of an engine.

    Args:
        weights: returns the weights as `UpdateHook` describes them; a collective.
    """

    def __init__(self, hooks: Sequence[UpdateHook], weights: Callable[[], Mapping[str, Tensor]]) -> None:
        names = [hook.name for hook in hooks]
        assert len({*names}) == len(names), f"two update hooks have the same name: {names}"
        assert not any("." in name for name in names), f"the name of an update hook contains a dot: {names}"
        self._hooks, self._weights = list(hooks), weights
        self.restart()

    @torch.no_grad()
    def start(self, hooks: Sequence[UpdateHook]) -> None:
        """Starts these hooks from the present weights."""
        if hooks:
            weights = self._weights()
            for hook in hooks:
                hook.start(weights)

    def restart(self) -> None:
        """Starts every hook from the present weights."""
        self.start(self._hooks)

    @torch.no_grad()
    def after_update(self, *, applied: Tensor, step: int) -> None:
        """Calls each hook after an optimizer step."""
        if self._hooks:
            weights = self._weights()
            for hook in self._hooks:
                hook.after_update(weights, applied=applied, step=step)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all hooks by their names in a checkpoint."""
        return {name: tensor for hook in self._hooks for name, tensor in _named(hook).items()}

    def saved_in(self, checkpoint: Checkpoint) -> SavedHooks:
        """Compares the hooks with those of a checkpoint, and logs a warning for each that is in one of both only. One
        broadcast."""
        saved = set(on_rank_zero(partial(_saved_names, checkpoint)))
        present = [hook for hook in self._hooks if hook.name in saved]
        missing = [hook for hook in self._hooks if hook.name not in saved]
        ignored = sorted(saved - {hook.name for hook in present})
        if rank() == 0:
            for name in ignored:
                _log.warning(
                    "%s has the state of the update hook %s, which this run does not have; it is not loaded, and later "
                    "checkpoints will lack it",
                    checkpoint.path,
                    name,
                )
            for hook in missing:
                if hook.tensors():
                    _log.warning(
                        "%s lacks the state of the update hook %s, which starts from the weights of this checkpoint",
                        checkpoint.path,
                        hook.name,
                    )
        tensors = {name: tensor for hook in present for name, tensor in _named(hook).items()}
        return SavedHooks(tensors, tuple(f"{HOOKS_PREFIX}{name}." for name in ignored), missing)


def _named(hook: UpdateHook) -> dict[str, Tensor]:
    return {f"{HOOKS_PREFIX}{hook.name}.{key}": tensor for key, tensor in hook.tensors().items()}


def _saved_names(checkpoint: Checkpoint) -> list[str]:
    """Names of the hooks whose tensors are in the checkpoint."""
    names = checkpoint.index().tensors
    return sorted(
        {name.removeprefix(HOOKS_PREFIX).partition(".")[0] for name in names if name.startswith(HOOKS_PREFIX)}
    )
