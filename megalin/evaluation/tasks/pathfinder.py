"""Pathfinder: an image of dashed contours with two dots, which lie on one contour or on two."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pydantic

from megalin.errors import ConfigError
from megalin.evaluation.tasks.draws import ExampleDraws
from megalin.evaluation.tasks.sequence_task import LabelledSequence, SequenceTask, labelled

Points = npt.NDArray[np.float64]

EQUALS = 256
"""Id between the 256 grey levels and the answer."""
SEPARATE, CONNECTED = 257, 258
"""Ids of the answers."""

# In pixels:
_STEP = 1.0  # between the points of a contour
_GAP = 3  # between the dashes of a contour
_DOT_RADIUS = 1.7
_LINE_RADIUS = 0.7
_MARGIN = 2.0  # of all points from the edges
_MOST_TURNS = 24  # headings tried at a point
_MOST_STARTS = 40  # of one contour
_MOST_IMAGES = 400


class PathfinderImage(NamedTuple):
    """An image and the geometry that it was drawn from; coordinates are (row, column) in pixels."""

    pixels: npt.NDArray[np.uint8]
    """[size, size] grey levels, 0 being empty."""
    connected: bool
    """True where both dots are the ends of one contour."""
    dots: Points
    """[2, 2] centres of the dots."""
    contours: list[Points]
    """[points, 2] each: the two long contours, then the distractors. Neighbouring points are one pixel apart."""


class Pathfinder(SequenceTask):
    """The pixels of an image row by row, "=" and the label: are the two dots connected by a dashed contour?

    Two long contours and some distractors bend at random, and points of different contours have at least `clearance`
    pixels between them. With probability 1/2 the dots are the ends of the first contour, else an end of each of the two
    long ones. Ids: 0 to 255 are grey levels, 256 is "=", 257 is separate, 258 is connected.

    Source: Linsley et al., Learning long-range spatial dependencies (2018); Tay et al., Long Range Arena (2020). The
    generator is ours: the images have the kind and size of Pathfinder-32, not its pixels.
    """

    image_size: int = pydantic.Field(default=32, ge=16)
    """Rows and columns of the image."""
    contour_length: int = pydantic.Field(default=27, ge=6)
    """Length of the two long contours in pixels."""
    num_distractors: int = pydantic.Field(default=4, ge=0)
    """Number of contours without a dot, apart from the second long one."""
    distractor_length: int = pydantic.Field(default=7, ge=3)
    """Length of a distractor in pixels."""
    dash_length: int = pydantic.Field(default=2, ge=1)
    """Length of a dash in pixels; the gaps between them have 3."""
    clearance: float = pydantic.Field(default=4.5, ge=4.0)
    """Least distance in pixels between points of two contours, and between points of one that lie further apart than
    this along it. At least 4, so that no other contour is as near as the next dash."""
    max_turn_degrees: float = pydantic.Field(default=35.0, ge=0, le=60)
    """Largest change of direction from a point of a contour to the next."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        area = (self.image_size - 2 * _MARGIN) ** 2
        needed = self.clearance * (2 * self.contour_length + self.num_distractors * self.distractor_length)
        if needed > area:
            raise ValueError(
                f"image_size = {self.image_size} has {area:.0f} square pixels inside its margin, but the contours with "
                f"their clearance take {needed:.0f}; lower contour_length, num_distractors or distractor_length"
            )
        return self

    @property
    def num_ids(self) -> int:
        """Number of token ids."""
        return CONNECTED + 1

    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number`: image_size^2 + 2 tokens, the last one a label. Raises ConfigError as `image` does."""
        image = self.image(seed, number)
        answer = CONNECTED if image.connected else SEPARATE
        return labelled([*image.pixels.reshape(-1).tolist(), EQUALS], [answer])

    def image(self, seed: int, number: int) -> PathfinderImage:
        """Image `number`, a pure function of the task's fields, `seed` and `number`.

        Raises:
            ConfigError: the contours find no room in 400 attempts.
        """
        draws = ExampleDraws("pathfinder", seed, number)
        connected = draws.fraction() < 0.5
        lengths = [self.contour_length] * 2 + [self.distractor_length] * self.num_distractors
        for _ in range(_MOST_IMAGES):
            contours = self._contours(draws, lengths)
            if contours is not None:
                if draws.fraction() < 0.5:  # so that the dots are not always on the contour that was placed first
                    contours[:2] = contours[1::-1]
                dots = contours[0][[0, -1]] if connected else _separate_dots(contours[0], contours[1])
                return PathfinderImage(self._draw(contours, dots), connected, dots, contours)
        raise ConfigError(
            f"pathfinder: {_MOST_IMAGES} attempts to place {len(lengths)} contours in image_size = {self.image_size} "
            "failed; lower contour_length, num_distractors or clearance, or raise max_turn_degrees"
        )

    def _contours(self, draws: ExampleDraws, lengths: list[int]) -> list[Points] | None:
        contours: list[Points] = []
        for length in lengths:
            others = np.concatenate(contours) if contours else np.empty((0, 2))
            found = (self._contour(draws, length, others) for _ in range(_MOST_STARTS))
            contour = next((contour for contour in found if contour is not None), None)
            if contour is None:
                return None
            contours.append(contour)
        return contours

    def _contour(self, draws: ExampleDraws, length: int, others: Points) -> Points | None:
        """[length + 1, 2] points of a random walk that turns slowly; None where it has no room to go on."""
        last = self.image_size - 1 - _MARGIN
        span = last - _MARGIN
        taken = [tuple(point) for point in others.tolist()]
        points = [(_MARGIN + span * draws.fraction(), _MARGIN + span * draws.fraction())]
        heading = 2 * math.pi * draws.fraction()
        turn = math.radians(self.max_turn_degrees)
        recent = math.ceil(self.clearance * math.pi / 2)  # points along a bend that may be closer than the clearance
        if not self._is_free(points[0], taken):
            return None
        while len(points) <= length:
            distant = taken + points[:-recent]
            for _ in range(_MOST_TURNS):
                direction = heading + turn * (2 * draws.fraction() - 1)
                row, column = points[-1][0] + _STEP * math.sin(direction), points[-1][1] + _STEP * math.cos(direction)
                inside = _MARGIN <= row <= last and _MARGIN <= column <= last
                if inside and self._is_free((row, column), distant):
                    break
            else:
                return None
            points.append((row, column))
            heading = direction
        return np.array(points)

    def _is_free(self, point: tuple[float, float], taken: list[tuple[float, ...]]) -> bool:
        limit = self.clearance**2
        row, column = point
        return all((row - r) ** 2 + (column - c) ** 2 >= limit for r, c in taken)

    def _draw(self, contours: list[Points], dots: Points) -> npt.NDArray[np.uint8]:
        """[size, size] grey levels: the part of each pixel, from 0 to 255, within the radius of a dash or a dot."""
        period = self.dash_length + _GAP
        segments = [
            contour[step : step + 2]
            for contour in contours
            for step in range(len(contour) - 1)
            if step % period < self.dash_length
        ]
        starts, ends = np.stack(segments, axis=1)  # [S, 2] each
        centres = np.indices((self.image_size, self.image_size)).reshape(2, -1).T.astype(np.float64)  # [P, 2]
        lines = _distances(centres, starts, ends).min(axis=1) - _LINE_RADIUS
        discs = _distances(centres, dots, dots).min(axis=1) - _DOT_RADIUS
        level = np.clip(0.5 - np.minimum(lines, discs), 0, 1)
        return np.round(255 * level).astype(np.uint8).reshape(self.image_size, self.image_size)


def _separate_dots(first: Points, second: Points) -> Points:
    """[2, 2] an end of each contour. Of the four pairs, the one whose distance is nearest to that of the first
    contour's ends, so that the distance of the dots says little about the answer."""
    pairs = [np.stack((first[i], second[j])) for i in (0, -1) for j in (0, -1)]
    wanted = np.linalg.norm(first[0] - first[-1])
    return min(pairs, key=lambda pair: abs(np.linalg.norm(pair[0] - pair[1]) - wanted))


def _distances(centres: Points, starts: Points, ends: Points) -> npt.NDArray[np.float64]:
    """[P, S] distances of the points [P, 2] from the segments between `starts` and `ends`, [S, 2]."""
    along = ends - starts
    offset = centres[:, None] - starts
    square = np.maximum((along**2).sum(-1), 1e-12)
    position = np.clip((offset * along).sum(-1) / square, 0, 1)
    return np.sqrt(((offset - position[..., None] * along) ** 2).sum(-1))
