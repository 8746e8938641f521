"""One part of a projection, with a gradient that is a part of the projection's."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ProjectionPart(NamedTuple):
    """Part `part` of a projection whose other parts have the op that made this as their only reader.

    The gradient of `whole` is defined in this part alone. That op writes the other parts into the same memory, so no
    pass concatenates them. A reader must return a gradient of `whole` in memory of its own: use `tensor()` or an op
    that takes a ProjectionPart.
    """

    whole: Tensor
    """[..., P, D]."""
    part: int

    def tensor(self) -> Tensor:
        """The part [..., D], a view."""
        return self.whole.select(-2, self.part)


def tensor_of(part: Tensor | ProjectionPart) -> Tensor:
    """A tensor as it is, or that of a part."""
    return part.tensor() if isinstance(part, ProjectionPart) else part
