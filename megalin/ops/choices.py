"""Options of ops that configs name too; without torch, so that a config is read at once."""

from __future__ import annotations

from typing import Literal

AttentionBackend = Literal["auto", "sdpa", "flash_attn", "flash_attn_4", "mask"]
"""sdpa: PyTorch's own. flash_attn, flash_attn_4: the packages flash-attn and flash-attn-4 (see check_backend). auto:
flash_attn_4 on GPUs where it was measured, else sdpa, and flash_attn for packed sequences and windows that PyTorch has
no kernel for. mask: PyTorch's fused attention, for packed sequences and windows with a T x S mask."""
DenseForm = Literal["auto", "linear", "quadratic"]
"""linear: Q (K^T V). quadratic: (Q K^T) V. auto: the one with fewer operations."""
DecayForm = Literal["sigmoid", "double_exp", "step", "power"]
"""sigmoid: A = sigmoid(g)^(1/tau) (GLA, gRetNet). double_exp: A = exp(-exp(g)) (RWKV6). step: A = exp(-a softplus(g))
(Mamba-2). power: A = exp(-a sigmoid(g)) (Hawk)."""
TiedGate = Literal["none", "complement", "root_complement", "selection"]
"""none: B = 1. complement: B = 1 - A (HGRN2). root_complement: B = sqrt(1 - A^2) (Hawk). selection: B = softplus(g), of
the form step (Mamba-2)."""
Activation = Literal["none", "silu"]
QueryKeyActivation = Literal["silu", "none", "1+elu"]
LRPEForm = Literal["cosine", "rotation"]
RelPEForm = Literal["cosine", "g2", "rope"]
RelPEFrequencies = Literal["released", "printed", "constant"]
ALIGNMENT = 16
"""FP8 matmuls of a GPU need inner and output sizes that are multiples of this."""
