"""Layout of an external model class: its config.json, and a table that maps our parameters to its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megalin.checkpoint.tensors import weights
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel

PADDED_TABLES = ("embedding.weight", "head.weight")
"""Parameters with padding rows, which are not exported."""


class Link(NamedTuple):
    """Parameters of ours and the external tensors that store them; export and import use it in opposite directions.

    The rows of our parameter, with the parts of a fused [parts, out, in] stacked, are len(order) slabs of equal height.
    The external side has slab order[0] first, then order[1], ...: one tensor per slab, or all in one tensor.

    Several parameters of ours (`stacked`) lie in one external tensor, their rows one below the other.
    """

    ours: str
    """Our name, in a block's table relative to blocks.<i>.sublayers."""
    theirs: tuple[str, ...]
    """One external name per slab, or one name for all; in a block's table relative to the layout's `layers`."""
    order: tuple[int, ...] = (0,)
    """Index of our slab at each of their places."""
    extra_dim: bool = False
    """True if their tensor has an extra dim of size 1 after the first."""
    bias: bool = False
    """True for the biases of a fused parameter, [parts, out] here and [out] for each part there."""
    absent: Literal["never", "ones", "skip"] = "never"
    """Handling of a parameter that our model may lack. ones: a norm without weights, whose external weight is ones.
    skip: the external model lacks it too."""
    stacked: tuple[str, ...] = ()
    """Our names of the parameters whose rows follow those of `ours` in the same external tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of our names, in the order of their rows."""
        return (self.ours, *self.stacked)


def norm(ours: str, theirs: str) -> Link:
    """Link of a norm's weight; for a norm without weights the external weight is ones."""
    return Link(ours, (theirs,), absent="ones")


class CheckpointLayout(NamedTuple):
    """Layout of one model class of one system."""

    format: str
    """Name of the system."""
    architecture: str
    """Name of the class in config.json."""
    model_type: str
    sublayers: tuple[str, ...]
    """Mixer types of every block of ours."""
    required_keys: tuple[str, ...]
    """Keys of config.json that distinguish this layout from others of the same class name."""
    layers: str
    """Prefix of a block's tensors, with {} for the block's index."""
    block: tuple[Link, ...]
    model: tuple[Link, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    """Keys with only one supported meaning: the values for it, the default and exported one first."""
    to_model: Callable[[Settings], dict[str, Any]]
    """config.json -> the model table. Raises CheckpointError."""
    to_settings: Callable[[ModelConfig], dict[str, Any]]
    """A model with these sub-layers -> the closest config.json (`layouts.check_expressible` compares the two)."""
    older_block: tuple[Link, ...] = ()
    """A block's table in folders of older versions."""
    ignored: tuple[str, ...] = ()
    """Name endings of tensors without learned values."""
    defaults: Mapping[str, Any] = {}
    """Values of the class for keys that config.json lacks, where `to_model` has no default or another one."""
    fits: Callable[[ModelConfig], bool] = lambda _: True
    """Whether a model with these sub-layers belongs to this class, where other classes have the same sub-layers."""

    def complete(self, settings: Settings) -> Settings:
        """config.json with the class's defaults for the keys that it lacks; a null stays."""
        return Settings({**self.defaults, **settings.values}, settings.source)

    @property
    def title(self) -> str:
        """Name for messages."""
        return f"{self.architecture} ({self.format})"


class Placed(NamedTuple):
    """Link with the full names and shapes of one model."""

    link: Link
    rows: tuple[int, ...]
    """Shape of our parameters as rows, all of them stacked, without padding."""
    held: bool
    """True if our model has the parameter; otherwise the external tensor is ones."""

    def shapes(self) -> dict[str, list[int]]:
        """The shape of each of their tensors."""
        names, extra = self.link.theirs, [1] if self.link.extra_dim else []
        return {name: [self.rows[0] // len(names), *extra, *self.rows[1:]] for name in names}

    def to_theirs(self, ours: Sequence[Tensor]) -> dict[str, Tensor]:
        """Our parameters -> their tensors, contiguous and without shared memory."""
        stacked = torch.cat([as_rows(tensor, self.link) for tensor in ours]) if self.link.stacked else ours[0]
        slabs = as_rows(stacked, self.link)[: self.rows[0]].chunk(len(self.link.order))
        slabs = tuple(slabs[place] for place in self.link.order)
        if len(self.link.theirs) == 1:
            slabs = (torch.cat(slabs),)
        shapes = self.shapes()
        return {
            name: slab.reshape(shapes[name]).clone(memory_format=torch.contiguous_format)
            for name, slab in zip(self.link.theirs, slabs, strict=True)
        }

    @torch.no_grad()
    def to_ours(self, read: Callable[[str], Tensor], ours: Sequence[Tensor]) -> None:
        """Fills our parameters from their tensors, one at a time."""
        if self.link.stacked:
            targets = [as_rows(tensor, self.link) for tensor in ours]
            slabs = read(self.link.theirs[0]).reshape(self.rows).split([len(target) for target in targets])
            for target, slab in zip(targets, slabs, strict=True):
                target.copy_(slab)
            return
        targets = list(as_rows(ours[0], self.link)[: self.rows[0]].chunk(len(self.link.order)))
        if len(self.link.theirs) == 1:
            slabs = read(self.link.theirs[0]).reshape(self.rows).chunk(len(self.link.order))
            for place, slab in zip(self.link.order, slabs, strict=True):
                targets[place].copy_(slab)
            return
        for place, name in zip(self.link.order, self.link.theirs, strict=True):
            targets[place].copy_(read(name).reshape(targets[place].shape))


def as_rows(tensor: Tensor, link: Link) -> Tensor:
    """A view [rows, ...], with the parts of a fused parameter stacked."""
    return tensor.flatten(0, 1) if tensor.dim() == 3 or (link.bias and tensor.dim() == 2) else tensor


def place(layout: CheckpointLayout, model: LanguageModel, *, older: bool = False) -> list[Placed]:
    """Places every link of `model`, which may be on the meta device, in the order of the forward."""
    remaining = weights(model)
    placed = []
    for link in _links(layout, model, older):
        tensors = [remaining.pop(name) for name in link.names if name in remaining]
        if tensors:
            assert len(tensors) == len(link.names), link
            rows = list(as_rows(tensors[0], link).shape)
            rows[0] = sum(len(as_rows(tensor, link)) for tensor in tensors)
            if link.ours in PADDED_TABLES:
                rows[0] = model.config.vocab_size
            placed.append(Placed(link, tuple(rows), held=True))
        elif link.absent == "ones":
            placed.append(Placed(link, (model.config.hidden_size,), held=False))
        else:
            assert link.absent == "skip", link
    assert not remaining, f"{layout.title} has no place for {sorted(remaining)}"
    return placed


def _links(layout: CheckpointLayout, model: LanguageModel, older: bool) -> Iterator[Link]:
    block = layout.older_block if older else layout.block
    first, *rest = layout.model
    yield first
    for index in range(model.config.num_layers):
        prefix = layout.layers.format(index)
        for link in block:
            names = tuple(f"{prefix}{name}" for name in link.theirs)
            ours, *stacked = (f"blocks.{index}.sublayers.{name}" for name in link.names)
            yield link._replace(ours=ours, stacked=tuple(stacked), theirs=names)
    yield from rest
