"""Config of HGRN2's token mixer in both directions."""

from __future__ import annotations

from typing import ClassVar, Literal

from megalin.layers.mixer_configs.hgrn2 import HGRN2Config


class TwoWayHGRN2Config(HGRN2Config):
    """HGRN2's token mixer in both directions, for encoders."""

    attends_to: ClassVar[Literal["earlier", "all", "itself"]] = "all"
    type: Literal["two_way_hgrn2"] = "two_way_hgrn2"  # type: ignore[assignment]  # the base names its own module
    """This mixer."""


CONFIG = TwoWayHGRN2Config
