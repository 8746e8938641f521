"""What a mixer is: the config that builds it, the context it runs in, and the state it carries between tokens."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import pydantic
import torch
from torch import Tensor, nn

from megalin import layers
from megalin.config import Config, NestedConfigError, problems, suggest
from megalin.layers.norms import NormKind
from megalin.ops.documents import Documents
from megalin.ops.scans.context_parallel import ShardDocuments
from megalin.parallel.context_parallel import ContextParallel, FullSequenceInfo
from megalin.parallel.data_parallel import largest_magnitudes
from megalin.parallel.tensor_parallel import TensorParallel

State = tuple[Tensor, ...]
"""What a mixer remembers of the tokens so far, each tensor [B, ...]; empty for a mixer without memory."""


class SequenceContext(NamedTuple):
    """What every mixer of a forward knows about its tokens."""

    positions: Tensor
    """[T] or [B, T] token positions, integers."""
    document_ids: Tensor | None
    """[B, T], non-decreasing; None where each row is one document."""
    shared: Mapping[str, Tensor]
    """The output of the model-level module of each mixer type that has one (`MixerConfig.shared_module`)."""
    compute_dtype: torch.dtype
    """Dtype of what mixers read; the residual stream may be wider."""
    full_precision: tuple[Tensor, ...] = ()
    """The output of this mixer's own `full_precision` module."""
    valid: Tensor | None = None
    """[B, T] bool, False where a token is padding; None where all tokens count. Causal mixers, whose padding comes
    last and without labels, do not read it."""
    borders: ShardDocuments | None = None
    """How the documents lie on the ranks that share the sequence; None where this rank has all of it."""
    row: FullSequenceInfo | None = None
    """What is known of the whole rows, given where a mixer reads it (`MixerConfig.reads_row`) and ranks share them."""

    documents: Documents | None = None
    """The documents of the whole rows, given where a mixer reads them (`MixerConfig.reads_documents`)."""
    windows: Mapping[int, Documents] = MappingProxyType({})
    """Where ranks share the rows, by the width of a window: the documents of the tokens that this rank's see through it
    (`ContextParallel.seen_documents`), given where a mixer with such a window reads documents and rows have several."""

    counted: bool = True
    """Whether positions count on from token to token, over documents and ranks too."""

    def known_documents(self) -> Documents:
        """The documents of the whole rows, with as much as is known of them."""
        return Documents(self.whole_row().document_ids) if self.documents is None else self.documents

    def whole_row(self) -> FullSequenceInfo:
        """What is known of the whole rows, on however many ranks they lie."""
        return FullSequenceInfo(self.document_ids, self.valid) if self.row is None else self.row


class MixerOutput(NamedTuple):
    """y in the layout of the residual stream, and the state after the last token (empty where none was given)."""

    y: Tensor
    state: State


class BuildContext(NamedTuple):
    """Where in a model a mixer is built."""

    hidden_size: int
    layer: int
    """Index of the block, from 0."""
    num_layers: int
    """Number of blocks."""
    tp: TensorParallel
    init_std: float
    path: str
    """The sub-layer's place in the config, for messages."""
    output_std: float
    """Initial standard deviation of a mixer's last matrix, the one that writes to the residual stream."""
    cp: ContextParallel = ContextParallel()


class FullPrecision(nn.Module):
    """Parameters that compute in fp32, as a module of their own: sharded data parallelism casts by module."""

    def forward(self) -> tuple[Tensor, ...]:
        """This rank's tensors."""
        raise NotImplementedError


class Mixer(nn.Module):
    """A sub-layer of a block: f in x + f(norm(x)). Token mixers and channel mixers (GLUs) are both mixers.

    Attributes:
        full_precision: holds the parameters that feed exponentials, positions or gates and therefore compute in fp32,
            whatever the rest computes in. The model calls it outside the block, so that blocks compile as one graph,
            and hands its output to the mixer as `context.full_precision`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full_precision: FullPrecision | None = None

    def build_mixer_context(self, context: SequenceContext) -> SequenceContext:
        """`context` with the tensors of this mixer's full-precision module; called outside the block."""
        return context._replace(full_precision=() if self.full_precision is None else self.full_precision())

    def forward(self, x: Tensor, context: SequenceContext, state: State | None) -> MixerOutput:
        """x [B, T or T/tp, D], normed unless `MixerConfig.norms_input`, -> y of the same layout. A state is returned
        where one is given."""
        raise NotImplementedError

    def step(self, x: Tensor, context: SequenceContext, state: State) -> MixerOutput:
        """One token of decoding: x [B, 1, D], positions [B, 1]; the same function as `forward` on longer input."""
        raise NotImplementedError

    def flops(self, length: int) -> int:
        """Forward floating-point operations a token at `length` tokens, over the whole tensor-parallel axis."""
        raise NotImplementedError

    def state_shapes(self) -> list[tuple[int, ...]]:
        """This rank's shape of each state tensor, for one sequence."""
        return []

    def initial_state(self, batch_size: int, *, dtype: torch.dtype, device: torch.device) -> State:
        """The state before the first token, zeros in `dtype` (at least fp32)."""
        return tuple(torch.zeros(batch_size, *shape, dtype=dtype, device=device) for shape in self.state_shapes())

    def norm_tracked_weights(self) -> list[nn.Parameter]:
        """The weights whose largest magnitude `update_from_weights` needs."""
        return []

    def update_from_weights(self, largest: Tensor) -> None:
        """Renews what this mixer derives from its weights; called where they changed (`renew_derived`).

        Args:
            largest: [len(norm_tracked_weights())], max |w| over the whole of each, on every rank, at least fp32.
        """


@torch.no_grad()
def renew_derived(mixers: Sequence[Mixer]) -> None:
    """Updates what every mixer derives from its weights, with one collective for all of them.

    A collective: called on every rank with the same mixers, after an optimizer step and after weights were loaded.
    """
    watched = [mixer.norm_tracked_weights() for mixer in mixers]
    largest = largest_magnitudes([weight for weights in watched for weight in weights])
    for mixer, part in zip(mixers, largest.split([len(weights) for weights in watched]), strict=True):
        mixer.update_from_weights(part)


class MixerConfig(Config):
    """Base of the config of a sub-layer. `type` is the name of its module in megalin.layers.mixers."""

    causal: ClassVar[bool] = True
    """Whether no token sees those after it. Decoders take only mixers of which it holds, encoders only the others."""
    splits_sequence: ClassVar[bool] = False
    """Whether the mixer works on a part of the sequence (parallel.cp), beside what `SequenceContext.borders` tells."""
    reads_row: ClassVar[bool] = False
    """Whether it then needs `SequenceContext.row`, which costs an exchange of a few bytes a token, once a batch."""
    reads_documents: ClassVar[bool] = False
    """Whether it reads `SequenceContext.documents` or `windows`, for which the host waits for the device once a
    batch."""
    type: str
    """Module in megalin.layers.mixers, or the dotted path of a module elsewhere, whose CONFIG is the class."""
    norm: NormKind = "srmsnorm"
    """Norm of the sub-layer's input."""
    norm_eps: float = pydantic.Field(default=1e-6, gt=0)
    """Added, here and in norms inside the mixer, to the mean square or the variance inside the root; in maxnorm and
    uncentered_layernorm, to the magnitude that they divide by."""
    residual: Literal["add", "two_hop"] = "add"
    """How the result joins the stream x. add: x <- x + f(norm(input)). two_hop: only the next sub-layer's input
    becomes x + f(norm(input)); the stream itself is left as it was (Rodimus+ eq. 13)."""

    @property
    def widest_window(self) -> int | None:
        """Tokens that a token sees at most, itself included; None where it may see all of its document."""
        return None

    @property
    def norms_input(self) -> bool:
        """Whether the mixer applies `norm` itself, in one pass with what it does next: its block then does not."""
        return False

    def build(self, scope: BuildContext) -> Mixer:
        """The mixer on the meta device. Raises ConfigError where sizes do not fit the mesh."""
        raise NotImplementedError

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        """The same mixer at a size that answers in seconds, for `megalin verify`: many chunks, uneven widths."""
        return self

    def shared_module(self, scope: BuildContext) -> nn.Module | None:
        """A model-level module that all mixers of this type share; its output reaches them as context.shared[type]."""
        return None

    def input_layer(self, scope: BuildContext) -> Mixer | None:
        """A mixer that the model applies once to its embedded tokens, in place of them (no norm, no residual)."""
        return None


def mixer_types() -> list[str]:
    """The names of the mixers that megalin has."""
    path = [f"{folder}/mixers" for folder in layers.__path__]
    return sorted(module.name for module in pkgutil.iter_modules(path) if module.name != "base")


def _resolve(values: Any) -> Any:
    """A table with a `type` -> an instance of that mixer's config class; an instance is passed on."""
    if not isinstance(values, Mapping):
        return values
    name = values.get("type")
    if not isinstance(name, str):
        raise NestedConfigError([f"type: required, the name of a mixer; known: {', '.join(mixer_types())}"])
    if name not in mixer_types() and "." not in name:
        raise NestedConfigError([f"type = {name!r}: there is no such mixer; {suggest(name, mixer_types())}"])
    try:
        module = importlib.import_module(name if "." in name else f"megalin.layers.mixers.{name}")
    except ModuleNotFoundError as error:
        raise NestedConfigError([f"type = {name!r}: {error}; give a module that can be imported"]) from None
    try:
        return module.CONFIG.model_validate(dict(values))
    except pydantic.ValidationError as error:
        raise NestedConfigError(problems(module.CONFIG, error)) from None


SublayerConfig = Annotated[pydantic.SerializeAsAny[MixerConfig], pydantic.BeforeValidator(_resolve)]
"""A field that holds the config of any mixer, chosen by its `type`."""
