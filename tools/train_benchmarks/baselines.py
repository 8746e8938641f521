"""Training step of another library's model of the same family and sizes: bf16 weights, fused AdamW, no clipping.

| ours | fla | transformers |
| transnormer, tnl, recurrence with a fixed decay | RetNet | |
| recurrence with a decay per key (GLA) | GLA | |
| hgrn2, rodimus | the same | |
| mamba2 | the same, on causal_conv1d and mamba_ssm's fused path | |
| softmax | | LLaMA, on SDPA and on flash-attn-4 |
| cosformer2 | our own model on fla's scan, for want of a public implementation | |

Each model is timed in several variants (`VARIANTS`), with a CUDA graph of its forward and backward too; the fastest one
is the baseline. Its vocabulary is padded as ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalin.errors import ConfigError
from megalin.layers.config import MixerConfig
from megalin.model.config import ModelConfig
from megalin.parallel.embedding import padded_rows
from megalin.train.step import AsyncScalars
from train_benchmarks.clock import StartedStep, end_on

OWN_MODEL = ("fla", "cosformer2")
"""Library and family for which only the op exists, not the model."""
BASELINES = {"fla": "fla.models", "transformers": "transformers"}
"""Module of each library with its models."""
WARM_UP_STEPS = 3
"""Eager steps before a capture, as ours has."""
_MAMBA2_PACKAGES = ("mamba_ssm", "causal_conv1d")


def build_baseline(library: str, config: ModelConfig, *, device: torch.device, variant: str = "as it is") -> nn.Module:
    """Builds the library's model with its initial weights in bf16, in one of its `VARIANTS`.

    Raises:
        ConfigError: the library, or a package that its model needs to be fast, is not installed, or it has no model of
            this family.
    """
    mixer, *others = config.layers[0].sublayers
    recipe = RECIPES.get((library, mixer.type)) if len(others) < 2 else None
    if recipe is None:
        families = ", ".join(sorted(family for name, family in RECIPES if name == library))
        family = " + ".join([mixer.type, *(other.type for other in others if len(others) > 1)])
        raise ConfigError(f"--baseline {library}: it has no model of family {family!r}; use a preset of {families}")
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"--baseline {library}: {library} is not installed; install it, or leave --baseline out")
    if mixer.type == "mamba2":
        for package in _MAMBA2_PACKAGES:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"--baseline {library}: its model of family 'mamba2' is fast on mamba_ssm and causal_conv1d only, "
                    f"and {package} is not installed; install it, or leave --baseline out"
                )
    sizes = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "vocab_size": padded_rows(config.vocab_size),
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": False,
    }
    if others:
        sizes["intermediate_size"] = others[0].intermediate_size
    with torch.device(device):
        model = recipe(sizes, mixer).to(torch.bfloat16)
    VARIANTS[library][variant].prepare(model)
    return model


class _Gradients:
    """Forward and backward of a model: eager, or after three steps the replay of a CUDA graph."""

    def __init__(self, model: nn.Module, *, graph: bool) -> None:
        self._model, self._eager_steps = model, WARM_UP_STEPS if graph else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Sets the gradients of the parameters, which have none; returns the loss."""
        if self._eager_steps is None:
            return self._run(tokens)
        if self._eager_steps > 0:
            return self._warm_up(tokens)
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._tokens.copy_(tokens)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss

    def _run(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def _warm_up(self, tokens: Tensor) -> Tensor:
        """Runs on another stream, as a capture does."""
        if self._eager_steps == WARM_UP_STEPS:
            self._stream, self._tokens = torch.cuda.Stream(), tokens.clone()
        assert self._eager_steps is not None
        self._eager_steps -= 1
        outside = torch.cuda.current_stream()
        self._tokens.copy_(tokens)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            loss = self._run(self._tokens)
        outside.wait_stream(self._stream)
        return loss

    def _capture(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._run(self._tokens)
        self._gradients = [(x, x.grad) for x in self._model.parameters() if x.grad is not None]
        self._graph = graph


def baseline_step(
    model: nn.Module, tokens: Sequence[Tensor], *, lr: float, graph: bool = False
) -> Callable[[int], StartedStep]:
    """Training step that predicts each next token of `tokens[step]` [B, T]; `graph`: by a CUDA graph, from the fourth
    step on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    gradients = _Gradients(model, graph=graph)

    def step(index: int) -> StartedStep:
        loss = gradients(tokens[index])
        scalars = AsyncScalars(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StartedStep(not loss.is_cuda, lambda: scalars.read().item(), end_on(loss.device))

    return step


def is_own_model(library: str, config: ModelConfig) -> bool:
    """True where the baseline is our own model on the library's op."""
    return (library, config.layers[0].sublayers[0].type) == OWN_MODEL


def _compile_blocks(model: nn.Module) -> None:
    for layer in (model.backbone if hasattr(model, "backbone") else model.model).layers:
        layer.compile()


def _compile_blocks_with_liger(model: nn.Module) -> None:
    """Blocks compiled, and the head with the loss by Liger's op."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ImportError("liger_kernel is not installed")
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    others = dict.fromkeys(("rope", "swiglu", "rms_norm", "cross_entropy"), False)
    apply_liger_kernel_to_llama(**others, fused_linear_cross_entropy=True, model=model)
    _compile_blocks(model)


def _compile_blocks_with_liger_and_flash_attn_4(model: nn.Module) -> None:
    model.set_attn_implementation("flash_attention_4")
    _compile_blocks_with_liger(model)


class Variant(NamedTuple):
    """A form of a model."""

    prepare: Callable[[nn.Module], None]
    graph: bool = False
    """Whether its steps are replays of a CUDA graph."""


VARIANTS: dict[str, dict[str, Variant]] = {
    "fla": {
        "as it is": Variant(lambda model: None),
        "blocks compiled": Variant(_compile_blocks),
        "blocks compiled, CUDA graph": Variant(_compile_blocks, graph=True),
    },
    "transformers": {
        "blocks compiled": Variant(_compile_blocks),
        "blocks compiled, Liger's loss": Variant(_compile_blocks_with_liger),
        "blocks compiled, Liger's loss, flash-attn-4": Variant(_compile_blocks_with_liger_and_flash_attn_4),
        # Last: after a capture that failed, nothing that draws random numbers runs in the process.
        "blocks compiled, Liger's loss, CUDA graph": Variant(_compile_blocks_with_liger, graph=True),
    },
}
"""Forms of each library's models that are timed."""


def _retnet(sizes: dict[str, object], mixer: MixerConfig) -> nn.Module:
    from fla.models import RetNetConfig, RetNetForCausalLM

    return RetNetForCausalLM(RetNetConfig(**sizes, num_heads=mixer.num_heads, expand_k=1.0, expand_v=1.0))


def _recurrence(sizes: dict[str, object], mixer: MixerConfig) -> nn.Module:
    """RetNet for a fixed decay, GLA for one per key."""
    from fla.models import GLAConfig, GLAForCausalLM, RetNetConfig, RetNetForCausalLM

    config, model = {"fixed": (RetNetConfig, RetNetForCausalLM), "vector": (GLAConfig, GLAForCausalLM)}[mixer.decay]
    return model(config(**sizes, num_heads=mixer.num_heads, expand_k=mixer.expand_k, expand_v=mixer.expand_v))


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

    return Mamba2ForCausalLM(Mamba2Config(**sizes, head_dim=mixer.head_dim, state_size=mixer.state_size))


def _llama(sizes: dict[str, object], mixer: MixerConfig) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": mixer.num_heads, "num_key_value_heads": mixer.key_value_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa"))


RECIPES: dict[tuple[str, str], Callable[[dict[str, object], MixerConfig], nn.Module]] = {
    ("fla", "transnormer"): _retnet,
    ("fla", "tnl"): _retnet,
    ("fla", "recurrence"): _recurrence,
    ("fla", "hgrn2"): _hgrn2,
    ("fla", "rodimus"): _rodimus,
    ("fla", "mamba2"): _mamba2,
    ("transformers", "softmax"): _llama,
}
