"""The comparison of a training with an ordinary PyTorch loop, on a plain LLaMA in place of transformers' class."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare_training
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.model_runs import write_config

LAYER = [
    {"type": "softmax", "num_heads": 2, "norm": "rmsnorm", "norm_eps": 1e-5},
    {"type": "glu", "intermediate_size": 48, "activation": "silu", "norm": "rmsnorm", "norm_eps": 1e-5},
]
MODEL = {"embedding_scale": 1.0, "norm": "rmsnorm", "norm_eps": 1e-5, "layers": [{"repeat": 2, "sublayers": LAYER}]}


class Block(nn.Module):
    """A block of LLaMA with transformers' names."""

    def __init__(self, width: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(width, width, bias=False) for name in "qkvo"})
        self.mlp = nn.ModuleDict({f"{name}_proj": nn.Linear(width, inner, bias=False) for name in ("gate", "up")})
        self.mlp["down_proj"] = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        normed, own = self.input_layernorm(x), self.self_attn
        q, k, v = (own[f"{name}_proj"](normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv")
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + own["o_proj"](mixed.transpose(1, 2).flatten(-2))
        normed = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed))


class Llama(nn.Module):
    """A decoder of such blocks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        width, eps = settings["hidden_size"], settings["rms_norm_eps"]
        blocks = [
            Block(width, settings["intermediate_size"], settings["num_attention_heads"], eps)
            for _ in range(settings["num_hidden_layers"])
        ]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(settings["vocab_size"], width)
        self.model.layers = nn.ModuleList(blocks)
        self.model.norm = nn.RMSNorm(width, eps)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """[B, T] -> logits [B, T, V]."""
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        return SimpleNamespace(logits=self.model.norm(x) @ self.model.embed_tokens.weight.T)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the weights."""
        save_file({name: tensor.clone() for name, tensor in self.state_dict().items()}, folder / "model.safetensors")


def rotate(x: Tensor) -> Tensor:
    """Rotary positions, pairs half a head apart."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


@pytest.fixture
def config(tmp_path):
    return str(write_config(tmp_path, model=MODEL, train={"steps": 6}, data={"isolate_documents": False}))


@pytest.fixture
def library(monkeypatch):
    read = SimpleNamespace(from_pretrained=lambda folder: json.loads((folder / "config.json").read_text()))
    build = SimpleNamespace(from_config=lambda settings, dtype: Llama(settings).to(dtype))
    module = SimpleNamespace(AutoConfig=read, AutoModelForCausalLM=build)
    monkeypatch.setattr(compare_training, "_library", lambda _: module)


@pytest.mark.usefixtures("library")
def test_losses_are_those_of_an_ordinary_loop(tmp_path, config, capsys):
    folder = tmp_path / "compared"
    assert compare_training.main([config, "--folder", str(folder), "--tolerance", "1e-5"]) == 0
    losses = json.loads((folder / "losses.json").read_text())
    assert [len(each) for each in losses.values()] == [6, 6]
    assert losses["Llama"][-1] < 0.9 * losses["Llama"][0]
    assert "largest relative difference" in capsys.readouterr().out


def test_difference_above_the_tolerance_is_reported(capsys):
    assert compare_training.differ([2.0, 3.3], [2.0, 3.0], 0.05)
    assert "largest relative difference 1.00e-01 at step 2 of 2" in capsys.readouterr().out
    assert not compare_training.differ([2.0, 3.3], [2.0, 3.0], 0.2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "the comparison needs the library transformers; install it: pip install transformers"),
        (["data.isolate_documents=true"], "data.isolate_documents = true: other classes read a sample as one"),
        (["parallel.tp=2"], "parallel.tp"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, config, capsys, monkeypatch, overrides, message):
    monkeypatch.setitem(compare_training.sys.modules, "transformers", None)
    assert compare_training.main([config, *overrides, "--folder", str(tmp_path / "compared")]) == 2
    assert message in capsys.readouterr().err
