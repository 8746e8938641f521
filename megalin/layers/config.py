"""Base of the mixers' configs, and the field that holds any of them, chosen by its `type`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import pydantic

from megalin.config import Change, Config, NestedConfigError, problems, suggest
from megalin.errors import ConfigError
from megalin.layers import mixer_configs
from megalin.layers.choices import NormKind
from megalin.layers.external_mixers import external_module

if TYPE_CHECKING:
    from torch import nn

    from megalin.layers.mixers.base import BuildContext, Mixer


class MixerConfig(Config):
    """Base of the config of a sub-layer. `type` is the name of its module in megalin.layers.mixers."""

    on_change: ClassVar[Change | None] = "refused"
    attends_to: ClassVar[Literal["earlier", "all", "itself"]] = "earlier"
    """Tokens of its document on which a token's output depends. earlier: itself and those before it, for decoders. all:
    those after it too, for encoders. itself: no other one, for both (channel mixers)."""
    supports_context_parallel: ClassVar[bool] = False
    """True where the mixer runs on a shard of the sequence (parallel.cp)."""
    type: str
    """Module in megalin.layers.mixers, or the dotted path of a module elsewhere, whose CONFIG is the class."""
    norm: NormKind = "srmsnorm"
    """Norm of the sub-layer's input."""
    norm_eps: float = pydantic.Field(default=1e-6, gt=0)
    """Added, here and in norms inside the mixer, to the mean square or the variance inside the root; in maxnorm and
    uncentered_layernorm, to the magnitude that they divide by."""
    residual: Literal["add", "two_hop", "add_norm"] = "add"
    """Residual rule. add: x <- x + f(norm(input)). two_hop: only the next sub-layer's input becomes
    x + f(norm(input)); the residual stream x stays unchanged (Rodimus+ eq. 13). add_norm: x <- norm(x + f(input)), the
    norm after the addition (BERT)."""

    @property
    def host_reads_documents(self) -> bool:
        """True where the mixer reads the documents' offsets (`SequenceDocuments.packed`, `in_window`): the host reads
        the ids of each batch. CUDA graphs are then valid within bounds of the documents, and only on one rank."""
        return False

    @property
    def widest_window(self) -> int | None:
        """The most tokens that a token attends to, itself included; None where that is its whole document."""
        return None

    @property
    def norms_input(self) -> bool:
        """True where the mixer applies `norm` itself, fused with its next operation, so that its block does not."""
        return False

    def build(self, scope: BuildContext) -> Mixer:
        """The mixer on the meta device. Raises ConfigError where sizes do not fit the mesh."""
        return mixer_class(self.type).build(self, scope)

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        """The same mixer at a size that runs in seconds, for `megalin verify`: many chunks, uneven widths."""
        return self

    def shared_module(self, scope: BuildContext) -> nn.Module | None:
        """A model-level module that all mixers of this type share; its output reaches them as context.shared[type]."""
        return mixer_class(self.type).shared_module(self, scope)

    def input_layer(self, scope: BuildContext) -> Mixer | None:
        """A mixer that replaces the model's embedded tokens by its output, once (no norm, no residual)."""
        return mixer_class(self.type).input_layer(self, scope)


@functools.cache
def mixer_types() -> tuple[str, ...]:
    """Names of the mixers in megalin."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(mixer_configs.__path__)))


def config_class(name: str, mixers: Collection[str] = ()) -> type[MixerConfig]:
    """The config class of the mixer with this `type`: CONFIG of its module in megalin.layers.mixer_configs, or of the
    module elsewhere that the dotted path names.

    Raises:
        ConfigError: as `external_module`, of which `mixers` is an argument; a module without a CONFIG.
    """
    if "." in name:
        cls = vars(external_module(name, mixers)).get("CONFIG")
        if not (isinstance(cls, type) and issubclass(cls, MixerConfig)):
            raise ConfigError(f"type = {name!r}: this module has no CONFIG; set CONFIG to the class of its config")
        return cls
    found: type[MixerConfig] = importlib.import_module(f"megalin.layers.mixer_configs.{name}").CONFIG
    return found


def mixer_class(name: str) -> type[Mixer]:
    """The class of the mixer with this `type`: MIXER of its module in megalin.layers.mixers, or of the module elsewhere
    that the dotted path names. Imported here, since it needs torch and a config does not. Only configs of this type
    have this name, so the user named it, or this process imported it, when the first one was made."""
    module = external_module(name, [name]) if "." in name else importlib.import_module(f"megalin.layers.mixers.{name}")
    if not hasattr(module, "MIXER"):
        raise ConfigError(f"type = {name!r}: this module has no MIXER; set MIXER to the class of its mixer")
    cls: type[Mixer] = module.MIXER
    return cls


def _resolve(values: Any, info: pydantic.ValidationInfo) -> Any:
    """A table with a `type` -> an instance of that mixer's config class; an instance is returned unchanged.

    The validation's context: modules and packages of mixers that the user named, as for `external_module`.
    """
    if not isinstance(values, Mapping):
        return values
    name = values.get("type")
    if not isinstance(name, str):
        raise NestedConfigError([f"type: required, the name of a mixer; known: {', '.join(mixer_types())}"])
    if name not in mixer_types() and "." not in name:
        raise NestedConfigError([f"type = {name!r}: there is no such mixer; {suggest(name, mixer_types())}"])
    try:
        cls = config_class(name, info.context or ())
    except ConfigError as error:
        raise NestedConfigError([str(error)]) from None
    try:
        return cls.model_validate(dict(values), context=info.context)
    except pydantic.ValidationError as error:
        raise NestedConfigError(problems(cls, error)) from None


SublayerConfig = Annotated[pydantic.SerializeAsAny[MixerConfig], pydantic.BeforeValidator(_resolve)]
"""A field that holds the config of any mixer, chosen by its `type`."""
