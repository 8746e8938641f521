"""Config of Rodimus' token mixer."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.config import REPORTED
from megalin.layers.choices import NormKind
from megalin.layers.config import MixerConfig

Gate = Literal["selection", "temperature", "input"]


class RodimusConfig(MixerConfig):
    """Rodimus' token mixer."""

    supports_context_parallel: ClassVar[bool] = True
    type: Literal["rodimus"] = "rodimus"
    """This mixer."""
    norm: NormKind = "rmsnorm"
    """Norm of the sub-layer's input."""
    norm_eps: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the mean square inside the root, here and in the norm before the output projection."""
    state_size: int = pydantic.Field(default=64, gt=0)
    """n, key channels of the state, which has n x m numbers; m is twice the hidden size, rounded up to 8."""
    gates: list[Gate] = pydantic.Field(default=["selection", "temperature", "input"])
    """Gates of the recurrence (Table 15). selection: g, which decays the state by exp(-g) and scales the keys; without
    it the state never decays. temperature: tau, which makes these exp(-g tau) and g^tau; needs selection. input:
    beta-hat of the values."""
    input_gate_rank: int | None = pydantic.Field(default=None, gt=0)
    """Rank of the gate of the values; left out: the hidden size / 64, at least 16."""
    query_key_input: Literal["convolved", "projected"] = "convolved"
    """Input of queries and keys. convolved: x', after the short convolution, as in the released code. projected: x,
    before it, as in the text (section 3.1.3)."""
    conv_width: int = pydantic.Field(default=4, ge=2)
    """Taps of the short convolution, the current token included."""
    chunk_size: Annotated[int, REPORTED] = pydantic.Field(default=64, gt=0)
    """Tokens a chunk of the scan; the result does not depend on it."""

    @pydantic.model_validator(mode="after")
    def _gates_agree(self) -> Self:
        problems = []
        if len(set(self.gates)) < len(self.gates):
            problems.append(f"gates = {self.gates} names a gate twice; name each once")
        if "temperature" in self.gates and "selection" not in self.gates:
            problems.append('gates has "temperature", which tempers the selection; add "selection", or leave it out')
        if self.input_gate_rank is not None and "input" not in self.gates:
            problems.append(
                f'input_gate_rank = {self.input_gate_rank} has no meaning without "input" in gates; leave it out'
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def scale(self) -> float:
        """Factor on the scan's output, n^(-1/2); the feed-through is added before the norm, which so keeps it."""
        return 1.0 / math.sqrt(self.state_size)

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        rank = 5 if "input" in self.gates else None
        return self.model_copy(update={"state_size": 6, "input_gate_rank": rank, "chunk_size": 16})


CONFIG = RodimusConfig
