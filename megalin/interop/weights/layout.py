"""What an outside layout is: a class, its config.json, and one table of which tensor holds which rows of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megalin.checkpoint.tensors import weights
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel

OUR_TABLES = ("embedding.weight", "head.weight")
"""The parameters whose padding rows stay at home."""


class Link(NamedTuple):
    """One parameter of ours and the tensors outside that hold it; read one way to export, the other way to import.

    Its rows, those of a fused [parts, out, in] one below the other, are len(order) slabs of equal height. The outside
    has slab order[0] first, then order[1], ...: each under a name of its own, or all in one tensor.
    """

    ours: str
    """Name, in a block's table relative to blocks.<i>.sublayers."""
    theirs: tuple[str, ...]
    """One name a slab, or one name; in a block's table relative to the layout's `layers`."""
    order: tuple[int, ...] = (0,)
    """Which slab of ours is at each of their places."""
    inner_one: bool = False
    """Whether their tensor has a dim of size 1 behind its rows."""
    absent: Literal["never", "ones", "skip"] = "never"
    """What our model may lack. ones: a weightless norm, whose weight out there is ones. skip: theirs lacks it too."""


def norm(ours: str, theirs: str) -> Link:
    """The weight of a norm; a weightless one has a weight of ones out there."""
    return Link(ours, (theirs,), absent="ones")


class CheckpointLayout(NamedTuple):
    """One class of one system."""

    format: str
    """The system."""
    architecture: str
    """The class, as config.json names it."""
    model_type: str
    sublayers: tuple[str, ...]
    """The mixer types of every block of ours."""
    marks: tuple[str, ...]
    """Keys of config.json that tell this layout from another of the same class name."""
    layers: str
    """Prefix of a block's tensors, with the block's index as {}."""
    block: tuple[Link, ...]
    model: tuple[Link, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    """Keys whose value our mixers imply: the values that mean it, the default and exported one first."""
    to_model: Callable[[Settings], dict[str, Any]]
    """config.json -> the model table. Raises CheckpointError."""
    to_settings: Callable[[ModelConfig], dict[str, Any]]
    """A model with these sub-layers -> config.json, as near as it comes (`refusal.check_expressible` compares)."""
    older_block: tuple[Link, ...] = ()
    """A block's table in folders of older versions."""
    ignored: tuple[str, ...] = ()
    """Ends of names of tensors that hold nothing learnt."""

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.architecture} ({self.format})"


class Placed(NamedTuple):
    """A link of one model: whole names and shapes."""

    link: Link
    rows: tuple[int, ...]
    """Shape of our parameter as rows, padding left out."""
    held: bool
    """Whether our model has the parameter; else it stands for ones."""

    def shapes(self) -> dict[str, list[int]]:
        """The shape of each of their tensors."""
        names, one = self.link.theirs, [1] if self.link.inner_one else []
        return {name: [self.rows[0] // len(names), *one, *self.rows[1:]] for name in names}

    def to_theirs(self, ours: Tensor) -> dict[str, Tensor]:
        """Our parameter -> their tensors, contiguous and apart in memory."""
        slabs = as_rows(ours)[: self.rows[0]].chunk(len(self.link.order))
        slabs = tuple(slabs[place] for place in self.link.order)
        if len(self.link.theirs) == 1:
            slabs = (torch.cat(slabs),)
        shapes = self.shapes()
        return {
            name: slab.reshape(shapes[name]).clone(memory_format=torch.contiguous_format)
            for name, slab in zip(self.link.theirs, slabs, strict=True)
        }

    @torch.no_grad()
    def to_ours(self, read: Callable[[str], Tensor], ours: Tensor) -> None:
        """Fills our parameter from their tensors, one at a time."""
        targets = as_rows(ours)[: self.rows[0]].chunk(len(self.link.order))
        if len(self.link.theirs) == 1:
            whole = read(self.link.theirs[0]).reshape(self.rows)
            parts = whole.chunk(len(self.link.order))
            for place, part in zip(self.link.order, parts, strict=True):
                targets[place].copy_(part)
            return
        for place, name in zip(self.link.order, self.link.theirs, strict=True):
            targets[place].copy_(read(name).reshape(targets[place].shape))


def as_rows(tensor: Tensor) -> Tensor:
    """A view [rows, ...]: the parts of a fused parameter one below the other."""
    return tensor.flatten(0, 1) if tensor.dim() == 3 else tensor


def place(layout: CheckpointLayout, model: LanguageModel, *, older: bool = False) -> list[Placed]:
    """Every link of `model`, which may lie on the meta device, in the order of the forward."""
    left = weights(model)
    placed = []
    for link in _links(layout, model, older):
        tensor = left.pop(link.ours, None)
        if tensor is not None:
            rows = list(as_rows(tensor).shape)
            if link.ours in OUR_TABLES:
                rows[0] = model.config.vocab_size
            placed.append(Placed(link, tuple(rows), held=True))
        elif link.absent == "ones":
            placed.append(Placed(link, (model.config.hidden_size,), held=False))
        else:
            assert link.absent == "skip", link
    assert not left, f"{layout.title} has no place for {sorted(left)}"
    return placed


def _links(layout: CheckpointLayout, model: LanguageModel, older: bool) -> Iterator[Link]:
    block = layout.older_block if older else layout.block
    first, *rest = layout.model
    yield first
    for index in range(model.config.num_layers):
        prefix = layout.layers.format(index)
        for link in block:
            names = tuple(f"{prefix}{name}" for name in link.theirs)
            yield link._replace(ours=f"blocks.{index}.sublayers.{link.ours}", theirs=names)
    yield from rest
