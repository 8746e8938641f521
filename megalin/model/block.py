"""A block: sub-layers x + f(norm(x)), with the residual rule of each."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalin.errors import ConfigError
from megalin.layers.mixers.base import BuildScope, Mixer, MixerConfig, SequenceContext, State
from megalin.layers.norms import build_norm
from megalin.model.config import BlockConfig


class BlockOutput(NamedTuple):
    """The residual stream [B, T or T/tp, D], and each sub-layer's state (empty where none was given)."""

    x: Tensor
    states: list[State]


class Sublayer(nn.Module):
    """A mixer with the norm of its input. Raises ConfigError for a mixer that cannot work on a split sequence."""

    def __init__(self, config: MixerConfig, scope: BuildScope) -> None:
        super().__init__()
        if scope.cp.size > 1 and not config.splits_sequence:
            raise ConfigError(
                f'{scope.path}.type = "{config.type}": this mixer needs the whole sequence on each rank, but '
                f"parallel.cp = {scope.cp.size} splits it; use parallel.cp = 1"
            )
        self.residual = config.residual
        norm = None if config.norms_input else build_norm(config.norm, scope.hidden_size, config.norm_eps, scope.tp)
        self.norm = nn.Identity() if norm is None else norm
        self.mixer: Mixer = config.build(scope)


class Block(nn.Module):
    """The sub-layers of one block.

    Each takes the rows in `parallel.interleave` equal parts, one after the other, so that a part's collectives can
    travel while another computes; all at once where their number does not divide, or with states.

    Args:
        recompute: whether the backward computes the block's activations again instead of keeping them.
    """

    def __init__(self, config: BlockConfig, scope: BuildScope, *, recompute: bool) -> None:
        super().__init__()
        self.recompute, self.parts = recompute, scope.tp.interleave
        self.sublayers = nn.ModuleList(
            Sublayer(sublayer, scope._replace(path=f"{scope.path}.sublayers.{index}"))
            for index, sublayer in enumerate(config.sublayers)
        )

    def forward(self, x: Tensor, contexts: list[SequenceContext], states: list[State] | None) -> BlockOutput:
        """x [B, T or T/tp, D]; one context a sub-layer, and one state where the caller wants the next ones."""
        if self.recompute and states is None:
            # No part of a block draws random numbers, so there is no generator state to restore.
            return checkpoint(self._run, x, contexts, states, use_reentrant=False, preserve_rng_state=False)
        return self._run(x, contexts, states)

    def step(self, x: Tensor, contexts: list[SequenceContext], states: list[State]) -> BlockOutput:
        """One token of decoding: x [B, 1, D]."""
        return self._run(x, contexts, states, step=True)

    def _run(
        self, x: Tensor, contexts: list[SequenceContext], states: list[State] | None, step: bool = False
    ) -> BlockOutput:
        parts = 1 if states is not None or x.shape[0] % self.parts else self.parts
        streams = list(x.chunk(parts))
        branches = list(streams)
        next_states: list[State] = []
        for index, (sublayer, context) in enumerate(zip(self._sublayers(), contexts, strict=True)):
            mixer, state = sublayer.mixer, None if states is None else states[index]
            for part, own in enumerate(context.parts(parts)):
                normed = sublayer.norm(branches[part]).to(context.compute_dtype)
                output = mixer.step(normed, own, state or ()) if step else mixer(normed, own, state)
                branches[part] = streams[part] + output.y
                if sublayer.residual == "add":
                    streams[part] = branches[part]
            next_states.append(output.state)
        return BlockOutput(torch.cat(streams) if parts > 1 else streams[0], next_states)

    def contexts(self, context: SequenceContext) -> list[SequenceContext]:
        """One context a sub-layer."""
        return [mixer.own_context(context) for mixer in self.mixers()]

    def mixers(self) -> list[Mixer]:
        """The mixers in order."""
        return [sublayer.mixer for sublayer in self._sublayers()]

    def _sublayers(self) -> list[Sublayer]:
        return cast(list[Sublayer], list(self.sublayers))
