"""Generation on gloo ranks: data and tensor parallelism complete every prompt as one process does, token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megalin.__main__ import main
from megalin.commands.arguments.parser import build_parser
from megalin.commands.generate import generate_on_ranks
from megalin.errors import ConfigError
from megalin.generation import Completion, Sampling, generate_batches, generate_on_mesh, open_for_generation
from megalin.generation.generate_on_mesh import num_rounds
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.config import ParallelConfig
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.parallel.tensor_parallel import full_tensor
from tests.cases import CASES, HYBRID, NAMES, REPRESENTATIVES, build
from tests.model_runs import CPU, train_here, write_config
from tests.ranks import run_ranks

PROMPTS = [[5, 17, 300, 2, 5, 9, 120], [3], list(range(21)), [9, 9], [5, 17, 300, 2, 5, 9, 120], [250], [7, 8]]
SAMPLED = Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=3, repetition_penalty=1.3)
OPTIONS: dict[str, Any] = {"max_tokens": 9, "batch_size": 2, "num_ids": 370, "stop_ids": [7]}


def completions(model: LanguageModel, sampling: Sampling) -> list[Completion]:
    return list(generate_batches(model, PROMPTS, sampling=sampling, **OPTIONS))


def _on_ranks(configs: Sequence[ModelConfig], meshes: Sequence[dict[str, int]]) -> list[Any]:
    """For each mesh and model: the greedy and the sampled completions."""
    results = []
    for axes in meshes:
        mesh = Mesh(ParallelConfig(**axes), CPU)
        for config in configs:
            model = LanguageModel(config, mesh.tp).to(torch.float64)
            model.to_empty(device=CPU)
            init_weights(model, 0)
            for sampling in (Sampling(), SAMPLED):
                results.append(list(generate_on_mesh(model, PROMPTS, mesh, sampling=sampling, **OPTIONS)))
    return results


def _compare(world_size: int, configs: Sequence[ModelConfig], meshes: Sequence[dict[str, int]]) -> None:
    models = [build(config) for config in configs]
    expected = [completions(model, sampling) for model in models for sampling in (Sampling(), SAMPLED)]
    assert expected[0] != expected[1]
    for found in run_ranks(world_size, _on_ranks, configs, meshes):
        assert found == expected * len(meshes)


def test_tensor_and_data_parallelism_complete_as_one_process_does():
    hgrn2, softmax = (CASES[NAMES.index(name)].model for name in ("hgrn2", "softmax-grouped"))
    _compare(2, [hgrn2], [{"tp": 2}, {}])
    _compare(4, [softmax], [{"tp": 2}])


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "axes"), [(4, {"tp": 4}), (3, {}), (3, {"tp": 3}), (4, {"tp": 2})])
def test_every_mixer_completes_on_larger_meshes_as_one_process_does(world_size: int, axes: dict[str, int]):
    _compare(world_size, [case.model for case in REPRESENTATIVES], [axes])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4, whose answers differ from prompt to prompt."""
    path = tmp_path_factory.mktemp("generate")
    with process_group(CPU):
        train_here(
            write_config(path, checkpoint={"every_steps": 2}),
            path / "run",
            "train.stop_after_steps=4",
            "model.init_std=0.3",
        )
    lines = [json.dumps({"prompt": text}) for text in ("!#%", "a", "longer than the others", "b", "a")]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


def _command(folder: Path, output: str) -> list[str]:
    command = ["generate", str(folder / "run"), "--prompts", str(folder / "prompts.jsonl"), "--all-steps"]
    return [*command, "--output", str(folder / output), "--max-tokens", "6", "--batch-size", "2"]


def _run_commands(folder: Path, meshes: dict[str, dict[str, int]]) -> None:
    for output, axes in meshes.items():
        arguments = build_parser().parse_args(_command(folder, output))
        generate_on_ranks(arguments, Sampling(temperature=0.8), Mesh(ParallelConfig(**axes), CPU))


def test_the_command_writes_the_file_of_one_process(folder: Path):
    assert main(_command(folder, "alone.jsonl")) == 0
    expected = (folder / "alone.jsonl").read_text()
    assert len(set(expected.splitlines())) == 10
    run_ranks(2, _run_commands, folder, {"dp.jsonl": {}, "tp.jsonl": {"tp": 2}})
    assert (folder / "dp.jsonl").read_text() == expected
    assert (folder / "tp.jsonl").read_text() == expected


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    mesh = Mesh(ParallelConfig(tp=2), CPU)
    model = open_for_generation(folder / "run").load_model(CPU, dtype="bfloat16", tp=mesh.tp)
    return {name: full_tensor(parameter.detach()) for name, parameter in model.named_parameters()}


def test_weights_on_ranks_are_those_of_one_process(folder: Path):
    expected = open_for_generation(folder / "run").load_model(CPU, dtype="bfloat16")
    for found in run_ranks(2, _weights, folder):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=0)


def _refused(prompts: list[list[int]]) -> None:
    mesh = Mesh(ParallelConfig(), CPU)
    with pytest.raises(ConfigError, match="prompt 1 has no tokens; give some text"):
        generate_on_mesh(build(HYBRID.model), prompts, mesh, sampling=Sampling(), **OPTIONS)


def test_a_prompt_that_cannot_be_continued_is_refused_by_every_rank():
    """Also by the rank that would complete the other one."""
    run_ranks(2, _refused, [[1], []])


@pytest.mark.parametrize(
    ("prompts", "batch_size", "ranks", "rounds"), [(7, 2, 1, 4), (7, 2, 2, 2), (8, 16, 4, 1), (1, 1, 3, 1)]
)
def test_batches_are_as_small_as_keeps_all_ranks_busy(prompts: int, batch_size: int, ranks: int, rounds: int):
    assert num_rounds(prompts, batch_size, Axis("samples", ranks)) == rounds
