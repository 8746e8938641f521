"""Config of DenseAttention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.config import REPORTED
from megalin.layers.choices import NormKind
from megalin.layers.config import MixerConfig
from megalin.ops.choices import DenseForm, RelPEFrequencies


class DenseAttentionConfig(MixerConfig):
    """DANet's block body: attention and FFN in one, without a residual connection between them."""

    attends_to: ClassVar[Literal["earlier", "all", "itself"]] = "all"
    supports_context_parallel: ClassVar[bool] = True
    type: Literal["dense_attention"] = "dense_attention"
    """This mixer."""
    norm: NormKind = "maxnorm"
    """Norm of the sub-layer's input; its output always goes through maxnorm."""
    norm_eps: float = pydantic.Field(default=1e-3, gt=0)
    """Added to the magnitude by which the norms before and after the block divide."""
    num_heads: int = pydantic.Field(gt=0)
    """Heads; must divide the hidden size. parallel.tp must divide them; a single head is sharded along its width."""
    ffn_ratio: int = pydantic.Field(default=4, gt=0)
    """Inner width of the FFN, in hidden sizes."""
    kind: Literal["global", "local", "shifted_local"] = "global"
    """Tokens of its document that a token attends to. global: all. local: those of its window. shifted_local: those of
    its window, with windows shifted by half of one, so that the first has half a window."""
    window: int | None = pydantic.Field(default=None, gt=0)
    """Tokens of a window, for local kinds only; even for shifted_local."""
    form: Annotated[DenseForm, REPORTED] = "auto"
    """Order of the matmuls, which changes the result by rounding alone (section 3.1). linear: Q (K^T V), O(T D^2 / H).
    quadratic: (Q K^T) V, O(T^2 D), which context parallelism excludes. auto: the one with fewer operations."""
    relpe: Literal["cosine", "cosine_qk", "g2", "rope", "none"] = "cosine"
    """Relative positions (section 3.2 and appendix H.2, its Table 8). cosine: x_i cos(p theta_i) of X, and so of Q, K
    and V. cosine_qk: of Q and K alone. g2: q_i (cos(p theta_i) - sin(p theta_i)) and k_i cos(p theta_i). rope: rotated
    pairs of Q and K. none: the model's table of positions alone. Only cosine is fused with the norm."""
    relpe_frequencies: RelPEFrequencies = "released"
    """theta_i of the K channels of a head, radians a token. released: 10000^(-i / K), the released code, with rope
    RoFormer's. printed: 10000^(-2 i / K), the paper's eq. 6. constant: relpe_constant (section 3.2)."""
    relpe_constant: float | None = pydantic.Field(default=None, gt=0)
    """theta of all channels with relpe_frequencies = "constant", radians a token; the paper does not print its own."""
    local_relpe: bool = True
    """True: for local kinds, positions count from the start of each window; False: of the document."""
    scale_ffn_weights: bool = True
    """True: the FFN's matrices are scaled down to a largest magnitude of (2 ffn_ratio hidden_size)^(-1/2) where they
    exceed it."""

    @pydantic.model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if problems := [*self._window_problems(), *self._relpe_problems()]:
            raise ValueError("\n".join(problems))
        return self

    def _window_problems(self) -> Iterator[str]:
        if self.kind == "global" and self.window is not None:
            yield (
                f'window = {self.window} has no meaning with kind = "global", which attends to the whole document; '
                'leave it out, or use kind = "local"'
            )
        if self.kind != "global" and self.window is None:
            yield f'kind = "{self.kind}" needs a window, in tokens; give one, or use kind = "global"'
        if self.kind == "shifted_local" and self.window is not None and self.window % 2:
            yield f'window = {self.window} is odd, and kind = "shifted_local" shifts by half of it; use an even one'

    def _relpe_problems(self) -> Iterator[str]:
        given = f'relpe_frequencies = "{self.relpe_frequencies}"'
        if self.relpe == "none" and self.relpe_frequencies != "released":
            yield f'{given} has no meaning with relpe = "none"; leave it out'
        if self.relpe == "rope" and self.relpe_frequencies == "printed":
            yield f'{given} are those of rope already, so relpe = "rope" has only "released" and "constant"; use these'
        if self.relpe_frequencies == "constant" and self.relpe_constant is None:
            yield f"{given} needs relpe_constant, in radians a token; give it"
        if self.relpe_frequencies != "constant" and self.relpe_constant is not None:
            yield f'relpe_constant = {self.relpe_constant} has no meaning without relpe_frequencies = "constant"'

    @property
    def norms_input(self) -> bool:
        return self.norm == "maxnorm"

    @property
    def offset(self) -> int:
        """Tokens between the start of the first window and that of the document."""
        return self.window // 2 if self.kind == "shifted_local" and self.window is not None else 0

    @property
    def widest_window(self) -> int | None:
        return self.window

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        window = None if self.window is None else 16
        return self.model_copy(update={"num_heads": num_heads if self.num_heads > 1 else 1, "window": window})


CONFIG = DenseAttentionConfig
