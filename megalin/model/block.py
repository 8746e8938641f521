"""A block: sub-layers x + dropout(f(norm(x))) or norm(x + dropout(f(x))), with the residual rule of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalin.errors import ConfigError
from megalin.layers.config import MixerConfig
from megalin.layers.dropout import apply_dropout, dropout_at, output_site
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, SequenceContext, State
from megalin.layers.norms import add_and_norm, build_norm, norm_of_sum
from megalin.model.config import BlockConfig
from megalin.ops.dispatch.overrides import bypasses, ignored_override


class BlockOutput(NamedTuple):
    """The residual stream [B, T or T/tp, D], and each sub-layer's state (empty where none was given)."""

    x: Tensor
    states: list[State]


class Sublayer(nn.Module):
    """A mixer with the norm of its input, or of its sum with the residual stream (`residual = "add_norm"`), and the
    dropout of its output.

    Raises:
        ConfigError: a mixer without context parallelism on a context-parallel axis.
    """

    def __init__(self, config: MixerConfig, scope: BuildContext) -> None:
        super().__init__()
        if scope.cp.size > 1 and not config.supports_context_parallel:
            raise ConfigError(
                f'{scope.path}.type = "{config.type}": this mixer needs the full sequence on each rank, but '
                f"parallel.cp = {scope.cp.size} shards it; use parallel.cp = 1"
            )
        self.residual = config.residual
        norm = None if config.norms_input else build_norm(config.norm, scope.hidden_size, config.norm_eps, scope.tp)
        self.norm = nn.Identity() if norm is None else norm
        self.mixer: Mixer = config.build(scope)
        self.dropout = dropout_at(scope.hidden_dropout, output_site(scope.sublayer))


class Block(nn.Module):
    """The sub-layers of one block, or some of them where a pipeline stage begins or ends inside of it.

    Args:
        recompute: recompute the block's activations in the backward instead of keeping them.
        own: indices of the sub-layers to build; they keep the names of the complete block. None: all.
    """

    def __init__(
        self, config: BlockConfig, scope: BuildContext, *, recompute: bool, own: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self._compiled: Callable[..., BlockOutput] | None = None
        self.sublayers = nn.ModuleList()
        for index, sublayer in enumerate(config.sublayers):
            if own is None or index in own:
                path, number = f"{scope.path}.sublayers.{index}", scope.sublayer + index
                self.sublayers.add_module(str(index), Sublayer(sublayer, scope._replace(path=path, sublayer=number)))

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles the forward, with `torch.compile`'s arguments.

        Hooks and recomputation stay outside of the graph. Inside of it torch would choose what to recompute, and it
        keeps the results of collectives (2.11, and of every `autograd.Function`) or fails on their groups (2.13).
        """
        self._compiled = torch.compile(self._run, *args, **options)

    def forward(self, x: Tensor, contexts: list[MixerContext], states: list[State] | None) -> BlockOutput:
        """x [B, T or T/tp, D]; one context a sub-layer, and one state a sub-layer where next states are wanted."""
        run = self._compiled or self._run
        if self.recompute and states is None:
            # A block draws no random numbers (dropout masks are functions of keys): no generator state to restore.
            return checkpoint(run, x, contexts, states, use_reentrant=False, preserve_rng_state=False)
        return run(x, contexts, states)

    @bypasses("forward", "_run")
    def step(self, x: Tensor, contexts: list[MixerContext], states: list[State]) -> BlockOutput:
        """One token of decoding: x [B, 1, D]; contexts of `step_contexts`."""
        if contexts[0].decoding == "block":
            output: BlockOutput = self(x, contexts, states)
            return output
        branch = x
        next_states: list[State] = []
        for sublayer, context, state in zip(self._sublayers(), contexts, states, strict=True):
            if sublayer.residual == "add_norm":
                y, next_state = sublayer.mixer.decode(branch.to(context.compute_dtype), context, state)
                branch = sublayer.norm(x + y)
            elif context.decoding == "add_step":
                branch, next_state = sublayer.mixer.add_step(x, branch, sublayer.norm, context, state)
            else:
                branch, next_state = Mixer.add_step(sublayer.mixer, x, branch, sublayer.norm, context, state)
            next_states.append(next_state)
            if sublayer.residual != "two_hop":
                x = branch
        return BlockOutput(x, next_states)

    def _run(self, x: Tensor, contexts: list[MixerContext], states: list[State] | None) -> BlockOutput:
        addend: Tensor | None = None  # the last output, which the next norm adds to the residual stream in its pass
        two_hop = False
        next_states: list[State] = []
        for index, (sublayer, context) in enumerate(zip(self._sublayers(), contexts, strict=True)):
            mixer, state = sublayer.mixer, None if states is None else states[index]
            norm_last = sublayer.residual == "add_norm"
            norm = None if norm_last else sublayer.norm
            if two_hop:
                entering = norm_of_sum(norm, x, addend)
            else:
                entering, x = add_and_norm(norm, x, addend)
            output = mixer(entering.to(context.compute_dtype), context, state)
            next_states.append(output.state)
            addend, two_hop = apply_dropout(output.y, sublayer.dropout, context.dropout), sublayer.residual == "two_hop"
            if norm_last:
                x, addend = norm_of_sum(sublayer.norm, x, addend), None
        return BlockOutput(x if addend is None else x + addend, next_states)

    def contexts(self, context: SequenceContext) -> list[MixerContext]:
        """One context a sub-layer."""
        return [mixer.build_mixer_context(context) for mixer in self.mixers()]

    def step_contexts(self, context: SequenceContext, *, in_place: bool) -> list[MixerContext]:
        """One context a sub-layer for decoding steps, each with the fastest method that ignores no override."""
        overridden = ignored_override(self, "step")
        paths = ["block" if overridden else each.mixer.decoding_path(each.norm) for each in self._sublayers()]
        return [
            own._replace(in_place=in_place, decoding=path)
            for own, path in zip(self.contexts(context), paths, strict=True)
        ]

    def mixers(self) -> list[Mixer]:
        """The mixers in order."""
        return [sublayer.mixer for sublayer in self._sublayers()]

    def _sublayers(self) -> list[Sublayer]:
        return cast(list[Sublayer], list(self.sublayers))
