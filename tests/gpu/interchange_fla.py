"""Exports loaded by flash-linear-attention and transformers: logits and greedy text against megalin.

    python tests/gpu/interchange_fla.py [--device cuda] [--only llama-tiny ...]

A program and no test, for it needs those packages and the test suite does not. It prints one line per comparison and
exits with 1 if one exceeds its bound. Logits are compared as ||a - b|| / ||b||, b being the logits of megalin's
reference ops on the CPU in fp64, without any kernel of megalin. In bf16 both systems are compared with them. The error
of the other system, whose gates run in bf16 too, may be at most twice that of megalin plus 1e-2.

flash-linear-attention computes the attention of Rodimus+ by flash-attn, in bf16. If that package is not installed, the
same attention by torch replaces it, which also allows fp32.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.config import parse
from megalin.generation import Sampling, generate
from megalin.interop.weights.exporting import export_hf
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.model.presets import preset_table
from tests.interop.weights.models import write_run

LENGTH, PROMPT, NEW_TOKENS = 300, 48, 32
EXACT, TENSOR_CORES, LOW = 5e-5, 5e-3, 1e-1
"""Bounds: fp32 token by token; fp32 in chunks, whose matmuls run in TF32; megalin in bf16."""


class Case(NamedTuple):
    """A model, its class in the other package, and the modes in which that class evaluates it."""

    package: str
    name: str
    table: dict[str, Any]
    modes: tuple[str | None, ...]


def _norms(table: dict[str, Any], eps: float = 1e-5) -> dict[str, Any]:
    return table | {"norm": "rmsnorm", "norm_eps": eps}


def _model(width: int, layers: int, vocabulary: int, sublayers: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    blocks = [{"sublayers": [_norms(sublayer) for sublayer in sublayers], "repeat": layers}]
    return _norms({"vocab_size": vocabulary, "hidden_size": width, "layers": blocks}) | fields


def _hgrn2(width: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    mixer = {"output_norm": "rmsnorm", "output_norm_eps": 1e-5, "scan_scale": "inverse_sqrt"}
    glu = {"type": "glu", "intermediate_size": width * 8 // 3 // 64 * 64, "activation": "silu"}
    sublayers = [{"type": "hgrn2", "num_heads": heads} | mixer, glu]
    return _model(width, layers, vocabulary, sublayers, tie_embeddings=False)


def _rodimus(width: int, layers: int, vocabulary: int, *, heads: int | None = None) -> dict[str, Any]:
    sublayers: list[dict[str, Any]] = [{"type": "rodimus", "state_size": 32}]
    if heads is not None:
        sublayers.append({"type": "shared_key_attention", "num_heads": heads, "window": 50, "residual": "two_hop"})
        sublayers.append({"type": "glu", "intermediate_size": width, "activation": "silu"})
    return _model(width, layers, vocabulary, sublayers, residual_dtype="float32", init_std=0.1)


def _llama(width: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    attention = {"type": "softmax", "num_heads": heads, "num_key_value_heads": heads // 2}
    glu = {"type": "glu", "intermediate_size": width * 3, "activation": "silu"}
    return _model(width, layers, vocabulary, [attention, glu], tie_embeddings=False)


def _mamba(width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    return _model(width, layers, vocabulary, [{"type": "mamba1"}], residual_dtype="float32", init_std=0.1)


def _mamba2(width: int, layers: int, vocabulary: int, groups: int) -> dict[str, Any]:
    mixer = {"type": "mamba2", "num_groups": groups, "head_dim": 16}
    return _model(width, layers, vocabulary, [mixer], residual_dtype="float32", init_std=0.1)


def _recurrence(width: int, layers: int, vocabulary: int, **fields: Any) -> dict[str, Any]:
    glu = {"type": "glu", "intermediate_size": width * 3, "activation": "silu"}
    sublayers = [{"type": "recurrence", "num_heads": 4, **fields}, glu]
    return _model(width, layers, vocabulary, sublayers, tie_embeddings=False)


GLA = {"decay": "vector", "decay_rank": 16, "expand_k": 0.5, "conv_width": 4}
RETNET = {"decay": "fixed", "positions": "rope", "expand_v": 2.0}
STEPWISE = ("fused_recurrent",)
FLA_MODES = ("fused_recurrent", "chunk")
"""Modes of the small models alone: tuning the chunk kernels takes two minutes a shape."""
CASES = {
    "llama-tiny": Case("transformers", "LlamaForCausalLM", _llama(128, 2, 4, 300), (None,)),
    "mamba-tiny": Case("transformers", "MambaForCausalLM", _mamba(128, 2, 300), (None,)),
    "mamba-130m": Case("transformers", "MambaForCausalLM", _mamba(768, 24, 50280), (None,)),
    "mamba2-tiny": Case("transformers", "Mamba2ForCausalLM", _mamba2(128, 2, 300, 1), (None,)),
    "mamba2-groups": Case("transformers", "Mamba2ForCausalLM", _mamba2(128, 2, 300, 4), (None,)),
    "llama-125m": Case("transformers", "LlamaForCausalLM", _llama(768, 12, 12, 32000), (None,)),
    "hgrn2-tiny": Case("fla.models", "HGRN2ForCausalLM", _hgrn2(128, 2, 4, 300), FLA_MODES),
    "hgrn2-125m": Case("fla.models", "HGRN2ForCausalLM", _hgrn2(768, 12, 6, 32000), STEPWISE),
    "rodimus-tiny": Case("fla.models", "RodimusForCausalLM", _rodimus(64, 2, 300), FLA_MODES),
    "rodimus-125m": Case("fla.models", "RodimusForCausalLM", preset_table("rodimus-125m"), STEPWISE),
    "rodimus_plus-tiny": Case("fla.models", "RodimusForCausalLM", _rodimus(128, 2, 300, heads=4), FLA_MODES),
    "rodimus_plus-125m": Case("fla.models", "RodimusForCausalLM", preset_table("rodimus_plus-125m"), STEPWISE),
    "gla-tiny": Case("fla.models", "GLAForCausalLM", _recurrence(128, 2, 300, **GLA), FLA_MODES),
    "retnet-tiny": Case("fla.models", "RetNetForCausalLM", _recurrence(128, 2, 300, **RETNET), FLA_MODES),
}


def stand_in_flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """softmax(q k^T / sqrt(K)) v of [B, T, H, K], last query aligned with last key, over `window_size[0]` keys back."""
    assert causal
    assert window_size[1] == 0
    place = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
    distance = place[:, None] - torch.arange(k.shape[1], device=q.device)
    visible = (distance >= 0) & (distance <= window_size[0])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)


def provide_flash_attention() -> None:
    """Gives flash-linear-attention the stand-in if flash-attn is not installed."""
    layer = importlib.import_module("fla.layers.rodimus")
    if layer.flash_attn_func is None:
        layer.flash_attn_func = stand_in_flash_attention
        layer.autocast_to_fp16 = lambda x: x
        print("flash-attn is not installed: attention by torch replaces it, in the dtype of the model")


def load_exported(case: Case, folder: Path, dtype: torch.dtype, device: str, mode: str | None) -> Any:
    """The exported folder, loaded by the class of the other package."""
    cls = getattr(importlib.import_module(case.package), case.name)
    settings = {} if mode is None else {"attn_mode": mode}
    model, found = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **settings)
    wrong = {key: value for key, value in found.items() if value}
    assert not wrong, wrong
    return model.to(device).eval()


def megalin_in(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """A copy in `dtype`, with gates, positions and bounds in at least fp32, as in training."""
    model = copy.deepcopy(model).to(dtype)
    for module in model.full_precision_modules():
        module.to(torch.promote_types(dtype, torch.float32))
    return model


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.cpu().double() - expected).norm() / expected.norm()).item()


@torch.no_grad()
def greedy(model: Any, prompt: Tensor) -> list[int]:
    """Greedy tokens, one by one, with the class's own cache."""
    output = model(prompt, use_cache=True)
    cache = "cache_params" if "cache_params" in output else "past_key_values"  # Mamba's name
    tokens = [int(output.logits[0, -1].argmax())]
    while len(tokens) < NEW_TOKENS:
        last = torch.tensor([tokens[-1:]], device=prompt.device)
        output = model(last, use_cache=True, **{cache: output[cache]})
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens


@torch.no_grad()
def compare(case: Case, folder: Path, device: str) -> Iterator[tuple[str, float, float]]:
    """Yields (comparison, relative error or number of differing tokens, bound)."""
    config = parse(ModelConfig, case.table, case.name)
    model = write_run(folder / "run", config.model_dump(), noise=0.02)
    export_hf(folder / "run", folder / "out")
    vocabulary = config.vocab_size
    tokens = torch.randint(0, vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    truth = megalin_in(model, torch.float64)(tokens).logits[..., :vocabulary]
    megalin_low = error(megalin_in(model, torch.bfloat16)(tokens).logits[..., :vocabulary], truth)
    prompt = tokens[:1, :PROMPT]
    text = list(generate(model, prompt[0].tolist(), max_tokens=NEW_TOKENS, sampling=Sampling()))
    tokens, prompt = tokens.to(device), prompt.to(device)
    for mode in case.modes:
        theirs = load_exported(case, folder / "out", torch.float32, device, mode)
        bound = TENSOR_CORES if mode == "chunk" else EXACT
        yield f"{mode or 'forward'} fp32 logits", error(theirs(tokens, use_cache=False).logits, truth), bound
        if mode != "chunk":
            again = greedy(theirs, prompt)
            yield "greedy tokens that differ", float(sum(a != b for a, b in zip(text, again, strict=True))), 0.0
            if case.name != "RodimusForCausalLM":  # its generate needs other entry points of flash-attn
                output = theirs.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
                made = output[0, PROMPT:].tolist()
                yield "generate() tokens that differ", float(sum(a != b for a, b in zip(text, made, strict=True))), 0.0
        theirs = load_exported(case, folder / "out", torch.bfloat16, device, mode)
        logits = theirs(tokens, use_cache=False).logits
        yield f"{mode or 'forward'} bf16 logits", error(logits, truth), 2 * megalin_low + 1e-2
    yield "megalin, bf16 logits", megalin_low, LOW


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if any(CASES[name].package != "transformers" for name in arguments.only):
        provide_flash_attention()
    failed = 0
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            for what, value, bound in compare(CASES[name], Path(folder), arguments.device):
                good = value <= bound
                failed += not good
                print(f"{name:18} {what:40} {value:10.2e}  bound {bound:.0e}  {'ok' if good else 'ABOVE'}", flush=True)
    print("all within their bounds" if not failed else f"{failed} above their bounds")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
