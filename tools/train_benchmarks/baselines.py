"""Training step of another library's model of the same family and sizes: bf16 weights, fused AdamW, no clipping.

| ours | fla | transformers |
| transnormer, tnl | RetNet | |
| hgrn2, rodimus | the same | |
| mamba2 | the same, on its own convolution and mamba_ssm's Triton scan | |
| softmax | | LLaMA, SDPA, each block compiled |
| cosformer2 | our own model on fla's scan, for want of a public implementation | |
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalin.errors import ConfigError
from megalin.layers.config import MixerConfig
from megalin.model.config import ModelConfig
from megalin.train.step import AsyncScalars
from train_benchmarks.clock import StartedStep, end_on

OWN_MODEL = ("fla", "cosformer2")
"""Library and family for which only the op exists, not the model."""
BASELINES = {"fla": "fla.models", "transformers": "transformers"}
"""Module of each library with its models."""


def build_baseline(library: str, config: ModelConfig, *, device: torch.device) -> nn.Module:
    """Builds the library's model with its initial weights in bf16, with compiled blocks if the library's ops allow it.

    Raises:
        ConfigError: the library, or a package that its model needs to be fast, is not installed, or it has no model of
            this family.
    """
    mixer, glu = _sublayers(config)
    recipe = RECIPES.get((library, mixer.type))
    if recipe is None:
        families = ", ".join(sorted(family for name, family in RECIPES if name == library))
        raise ConfigError(f"--baseline {library}: it has no model of family {mixer.type!r}; use a preset of {families}")
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"--baseline {library}: {library} is not installed; install it, or leave --baseline out")
    if mixer.type == "mamba2" and importlib.util.find_spec("mamba_ssm") is None:
        raise ConfigError(
            f"--baseline {library}: without mamba_ssm, its model of family 'mamba2' allocates tensors of [tokens, "
            "chunk, heads, state]; install mamba_ssm, or leave --baseline out"
        )
    sizes = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": False,
    }
    if glu is not None:
        sizes["intermediate_size"] = glu.intermediate_size
    with torch.device(device):
        return recipe(sizes, mixer).to(torch.bfloat16)


def baseline_step(model: nn.Module, tokens: Tensor, *, lr: float) -> Callable[[int], StartedStep]:
    """Training step that predicts each next token of `tokens` [B, T]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step(index: int) -> StartedStep:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        scalars = AsyncScalars(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StartedStep(not loss.is_cuda, lambda: scalars.read().item(), end_on(loss.device))

    return step


def is_own_model(library: str, config: ModelConfig) -> bool:
    """True where the baseline is our own model on the library's op."""
    return (library, config.layers[0].sublayers[0].type) == OWN_MODEL


def _sublayers(config: ModelConfig) -> tuple[MixerConfig, MixerConfig | None]:
    """Token mixer and GLU of the first block."""
    mixer, *others = config.layers[0].sublayers
    return mixer, others[0] if others else None


def _retnet(sizes: dict[str, object], mixer: MixerConfig) -> nn.Module:
    from fla.models import RetNetConfig, RetNetForCausalLM

    return RetNetForCausalLM(RetNetConfig(**sizes, num_heads=mixer.num_heads, expand_k=1.0, expand_v=1.0))


def _hgrn2(sizes: dict[str, object], mixer: MixerConfig) -> nn.Module:
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    return HGRN2ForCausalLM(HGRN2Config(**sizes, num_heads=mixer.num_heads, expand_ratio=None))


def _rodimus(sizes: dict[str, object], mixer: MixerConfig) -> nn.Module:
    from fla.models import RodimusConfig, RodimusForCausalLM

    # The second flag is the default of the blocks, but not of the model around them.
    wide = {"residual_in_fp32": True, "block_residual_in_fp32": True}
    return RodimusForCausalLM(RodimusConfig(**sizes, **wide, block_type="rodimus", expand_ratio=mixer.state_size))


def _mamba2(sizes: dict[str, object], mixer: MixerConfig) -> nn.Module:
    from fla.models import Mamba2Config, Mamba2ForCausalLM

    model = Mamba2ForCausalLM(Mamba2Config(**sizes, head_dim=mixer.head_dim, state_size=mixer.state_size))
    for layer in model.backbone.layers:
        # In training mode it requires the CUDA package causal_conv1d; in eval mode it uses its own convolution.
        layer.mixer.eval()
    return model


def _llama(sizes: dict[str, object], mixer: MixerConfig) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": mixer.num_heads, "num_key_value_heads": mixer.key_value_heads}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa"))
    for layer in model.model.layers:
        layer.compile()
    return model


RECIPES: dict[tuple[str, str], Callable[[dict[str, object], MixerConfig], nn.Module]] = {
    ("fla", "transnormer"): _retnet,
    ("fla", "tnl"): _retnet,
    ("fla", "hgrn2"): _hgrn2,
    ("fla", "rodimus"): _rodimus,
    ("fla", "mamba2"): _mamba2,
    ("transformers", "softmax"): _llama,
}
