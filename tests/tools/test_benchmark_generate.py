"""Benchmark of decoding on a CPU: its cases, its bytes, and what it refuses."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

TINY = ["model.hidden_size=64", "model.vocab_size=300"]
BLOCKS = "model.layers=[{repeat=3,sublayers=[{type='%s',num_heads=4},{type='glu',intermediate_size=96}]}]"


@pytest.fixture
def tool(monkeypatch):
    import benchmark_generate

    monkeypatch.setitem(benchmark_generate.COPY_BYTES, "cpu", 2**16)
    return benchmark_generate


def arguments(tool, kind: str, *more: str) -> argparse.Namespace:
    sizes = ["--prompt-length", "6", "--new-tokens", "5", "--passes", "1", "--dtype", "float32"]
    return tool.parse_arguments(["tnl-410m", *TINY, BLOCKS % kind, *sizes, *more])


def test_a_line_a_case_with_its_rate_and_its_bound(tool, capsys):
    tool.benchmark(arguments(tool, "tnl", "--batch", "1", "3"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [(line["batch"], line["sampling"] == "greedy", line["mode"]) for line in lines]
    assert cases == [(1, True, "eager"), (1, False, "eager"), (3, True, "eager"), (3, False, "eager")]
    for line in lines:
        assert line["tokens_per_second"] == pytest.approx(line["batch"] * 1e3 / line["step_milliseconds"])
        assert line["bound_fraction"] == pytest.approx(line["tokens_per_second"] / line["bound_tokens_per_second"])


def test_bytes_are_weights_once_and_states_twice(tool):
    args = arguments(tool, "tnl", "--batch", "3")
    model = tool.build(args, torch.device("cpu"))
    state = [torch.zeros(3, 4, 16, 16)] * 3
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert tool.traffic(model, state, args, 3) == (weights, 2 * 4 * 3 * 3 * 4 * 16 * 16)
    softmax = tool.build(arguments(tool, "softmax"), torch.device("cpu"))
    cache = [torch.zeros(1, 6 + 5, 4, 16)] * 6  # keys and values of three layers, with room for all tokens
    assert tool.traffic(softmax, cache, args, 1).state == 4 * 6 * 4 * 16 * (6 + 5 / 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--modes", "graph"], "--modes graph: needs a GPU; use --modes eager"),
        (["--profile"], "--profile: needs a GPU; leave it out"),
        (["--top-k", "0"], "top-k = 0 keeps no token; use at least 1"),
        (["--temperature", "-1"], "temperature = -1.0 is not in"),
    ],
)
def test_cases_that_cannot_run_are_refused(tool, more, message):
    with pytest.raises(ValueError, match=message):
        tool.benchmark(arguments(tool, "tnl", *more))


def test_encoders_and_empty_sizes_are_refused(tool, capsys):
    with pytest.raises(ValueError, match="danet-small is an encoder, which generates no text"):
        tool.benchmark(tool.parse_arguments(["danet-small"]))
    with pytest.raises(SystemExit):
        tool.parse_arguments(["tnl-410m", "--batch", "0"])
    assert "--batch 0: use at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.parse_arguments(["tnl-410m", "--new-tokens", "1"])
    assert "--new-tokens 1: use at least 2" in capsys.readouterr().err
