"""Gradient of a mixer's LRPE frequencies, with positions in segments or over the whole sequence."""

import torch
from torch import Tensor

from megalin.layers.mixer_configs.transnormer import TransNormerConfig
from megalin.layers.mixers.base import BuildContext, SequenceContext
from megalin.layers.mixers.transnormer import TransNormer
from megalin.parallel.initialisation import init_weights
from megalin.parallel.sequence_documents import SequenceDocuments
from megalin.parallel.tensor_parallel import TensorParallel


def frequency_gradient(
    form: str, length: int, dtype: torch.dtype, *, whole_sequence: bool = False, device: str = "cpu"
) -> Tensor:
    """d theta [H, K/2] of the first of 24 layers, 8 heads of 64, for random inputs and output gradients."""
    scope = BuildContext(512, layer=0, num_layers=24, tp=TensorParallel(), init_std=0.05, path="", output_std=0.05)
    with torch.device("meta"):
        mixer = TransNormer(TransNormerConfig(num_heads=8, lrpe=form), scope)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mixer.to_empty(device=device).to(dtype)
    mixer.full_precision.to(wide)
    mixer.slopes = mixer.slopes.to(wide)
    init_weights(mixer, seed=1)
    generator = torch.Generator().manual_seed(2)
    x, gradient = (torch.randn(1, length, 512, generator=generator).bfloat16().to(device, dtype) for _ in range(2))
    positions = torch.arange(length, device=device)
    context = mixer.build_mixer_context(SequenceContext(positions, SequenceDocuments(mixer.cp, x), {}, dtype))
    state = mixer.initial_state(1, dtype=wide, device=torch.device(device)) if whole_sequence else None
    mixer(x, context, state).y.backward(gradient)
    return mixer.full_precision.theta.grad
