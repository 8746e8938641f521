"""Interface of mixers: the config that builds one, the context of its forward, and its recurrent state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from megalin.layers.gates import MixerGates
from megalin.ops.dispatch.overrides import bypasses, has_hooks, ignored_override
from megalin.ops.dropout import DropoutKeys
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.sequence_documents import DocumentView, SequenceDocuments
from megalin.parallel.tensor_parallel import TensorParallel, largest_magnitudes

State = tuple[Tensor, ...]
"""The recurrent state or cache after the tokens so far, each tensor [B, ...]; empty for a mixer without one."""

DecodingPath = Literal["add_step", "step", "forward", "block"]
"""Method that decodes a token: of the mixer, or of its block for all mixers, which is then the block's `forward`."""


class SequenceContext(NamedTuple):
    """The context of a forward, the same for all mixers; each takes its `MixerContext` from it outside of its block."""

    positions: Tensor
    """[T] or [B, T] token positions, integers."""
    documents: SequenceDocuments
    shared: Mapping[str, Tensor]
    """The output of the model-level module of each mixer type that has one (`MixerConfig.shared_module`)."""
    compute_dtype: torch.dtype
    """Dtype of the mixers' inputs; the residual stream may be wider."""
    consecutive: bool = True
    """True where positions increase by one from token to token, across documents and ranks too."""
    dropout: DropoutKeys | None = None
    """Keys of dropout masks; None in eval mode and for a model without dropout."""


class MixerContext(NamedTuple):
    """The context of one mixer, which enters its compiled block: tensors, dtypes and flags."""

    positions: Tensor
    """[T] or [B, T] token positions, integers."""
    documents: DocumentView
    compute_dtype: torch.dtype
    """Dtype of the mixer's input; the residual stream may be wider."""
    full_precision: tuple[Tensor, ...]
    """Parameters that compute in fp32: the output of the mixer's `full_precision` module, empty without one."""
    consecutive: bool
    """True where positions increase by one from token to token, across documents and ranks too."""
    in_place: bool = False
    """True where `step` may write the next state over the given one; it then returns the same tensors. A cache needs
    room for the token (`Mixer.reserve`)."""
    dropout: DropoutKeys | None = None
    """Keys of the dropout masks of the block, which drops the mixer's output; None without dropout."""
    decoding: DecodingPath = "add_step"
    """Method of decoding steps (`Mixer.decoding_path`)."""


class MixerOutput(NamedTuple):
    """y in the layout of the residual stream, and the state after the last token (empty where none was given)."""

    y: Tensor
    state: State


class BuildContext(NamedTuple):
    """The place in a model where a mixer is built, and the axes that shard it."""

    hidden_size: int
    layer: int
    """Index of the block, from 0."""
    num_layers: int
    """Number of blocks."""
    tp: TensorParallel
    init_std: float
    path: str
    """Dotted path of the sub-layer in the config, for error messages."""
    output_std: float
    """Initial standard deviation of the matrix that writes to the residual stream."""
    cp: ContextParallel = ContextParallel()
    sublayer: int = 0
    """Number of the sub-layer in the full model; for a block, of its first one."""
    hidden_dropout: float = 0.0
    """Dropout rate of the sub-layer's output."""


class FullPrecision(nn.Module):
    """Parameters that compute in fp32, in a module of their own because FSDP casts by module."""

    def forward(self) -> tuple[Tensor, ...]:
        """This rank's tensors."""
        raise NotImplementedError


class Mixer(nn.Module):
    """A sub-layer of a block: f in x + f(norm(x)). Token mixers and channel mixers (GLUs) are both mixers.

    Attributes:
        full_precision: the parameters that feed exponentials, positions or gates and therefore compute in fp32. The
            model calls it outside of the block, so that a block compiles as one graph, and passes its output to the
            mixer as `MixerContext.full_precision`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full_precision: FullPrecision | None = None

    @classmethod
    def build(cls, config: Any, scope: BuildContext) -> Mixer:
        """The mixer of a config of its type, on the meta device. A class with several forms chooses one."""
        built: Mixer = cast(Any, cls)(config, scope)
        return built

    @classmethod
    def shared_module(cls, config: Any, scope: BuildContext) -> nn.Module | None:
        """A model-level module that all mixers of this type share; its output reaches them as context.shared[type]."""
        return None

    @classmethod
    def input_layer(cls, config: Any, scope: BuildContext) -> Mixer | None:
        """A mixer that replaces the model's embedded tokens by its output, once (no norm, no residual)."""
        return None

    def build_mixer_context(self, context: SequenceContext) -> MixerContext:
        """This mixer's context; called outside of the block."""
        return MixerContext(
            context.positions,
            self.document_view(context.documents),
            context.compute_dtype,
            self.full_precision_tensors(context),
            context.consecutive,
            dropout=context.dropout,
        )

    def document_view(self, documents: SequenceDocuments) -> DocumentView:
        """The documents that this mixer reads; recurrent mixers read `local_view`."""
        return documents.local_view()

    def full_precision_tensors(self, context: SequenceContext) -> tuple[Tensor, ...]:
        """This rank's tensors of the parameters that compute in fp32."""
        return () if self.full_precision is None else self.full_precision()

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        """x [B, T or T/tp, D] -> y of the same layout, and the next state where one is given.

        x is normed by the block unless `MixerConfig.norms_input`.
        """
        raise NotImplementedError

    @bypasses("forward")
    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        """One token of decoding: x [B, 1, D], positions [B, 1]; equals `forward` on the full sequence."""
        raise NotImplementedError

    @bypasses("forward", "step")
    def add_step(
        self, residual: Tensor, x: Tensor, norm: nn.Module, context: MixerContext, state: State
    ) -> MixerOutput:
        """residual + f(norm(x)) for one token of decoding, by `decode`: residual, x [B, 1, D], and the next state.

        A mixer overrides it where kernels join the norm and the addition with its own operations.
        """
        output = self.decode(norm(x).to(context.compute_dtype), context, state)
        return MixerOutput(residual + output.y, output.state)

    def decode(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        """One token of decoding by `step`, or by `forward` where `step` would ignore an override."""
        return self(x, context, state) if context.decoding == "forward" else self.step(x, context, state)

    def decoding_path(self, norm: nn.Module | None = None) -> DecodingPath:
        """The fastest method of decoding steps that ignores no override and no forward hook.

        Args:
            norm: the norm of its input, whose hooks `add_step` might ignore.
        """
        if ignored_override(self, "step"):
            return "forward"
        if ignored_override(self, "add_step") or (norm is not None and has_hooks(norm)):
            return "step"
        return "add_step"

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates | None:
        """The decay and gates with which `forward` of the same x and context, without a state, computes.

        None for a mixer whose state has no decay to choose: attention to keys and values, and channel mixers.
        """
        return None

    def flops(self, length: int) -> int:
        """Forward floating-point operations a token at `length` tokens, summed over the tensor-parallel axis."""
        raise NotImplementedError

    def state_shapes(self) -> list[tuple[int, ...]]:
        """This rank's shape of each state tensor, for one sequence."""
        return []

    def initial_state(self, batch_size: int, *, dtype: torch.dtype, device: torch.device) -> State:
        """The state before the first token, zeros in `dtype` (at least fp32)."""
        return tuple(torch.zeros(batch_size, *shape, dtype=dtype, device=device) for shape in self.state_shapes())

    def reserve(self, state: State, num_tokens: int) -> State:
        """The state for decoding in place: a cache gets room for `num_tokens` tokens in all, so that its size is fixed,
        as that of other states is, which are returned unchanged."""
        return state

    def norm_tracked_weights(self) -> list[nn.Parameter]:
        """The weights whose largest magnitude `update_from_weights` reads."""
        return []

    def update_from_weights(self, largest: Tensor) -> None:
        """Updates buffers that are derived from the weights; called after these changed (`update_derived_buffers`).

        Args:
            largest: [len(norm_tracked_weights())], max |w| of each full weight, equal on every rank, at least fp32.
        """


@torch.no_grad()
def update_derived_buffers(mixers: Sequence[Mixer]) -> None:
    """Updates the buffers that mixers derive from their weights, with one collective for all of them.

    Called on every rank with the same mixers, after an optimizer step and after loading weights.
    """
    tracked = [mixer.norm_tracked_weights() for mixer in mixers]
    largest = largest_magnitudes([weight for weights in tracked for weight in weights])
    for mixer, values in zip(mixers, largest.split([len(weights) for weights in tracked]), strict=True):
        mixer.update_from_weights(values)
