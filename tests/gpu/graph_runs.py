"""Program of test_cuda_graphs_gpu.py: `torchrun -m tests.gpu.graph_runs` compares eager steps of every kind of mixer
with those for which a CUDA graph is chosen automatically, weights bit for bit."""

from __future__ import annotations

import os

import torch

from megalin.errors import ConfigError
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import compute_device, process_group
from megalin.parallel.tensor_parallel import local
from megalin.train.config import RunConfig
from megalin.train.cuda_graphs import WARM_UP_STEPS
from megalin.train.engine import FullyShardedEngine
from megalin.train.graph_choice import automatic_obstacle
from tools.train_benchmarks.batches import random_batches
from tools.train_benchmarks.engine import run_config

PRESETS = (
    *("tnl-70m", "transnormerllm-385m", "hgrn2-70m", "cosformer2-70m", "rodimus-125m", "mamba1-130m", "mamba2-410m"),
    *("gla-25m", "retnet-25m", "danet-small", "llama-70m", "rodimus_plus-125m"),
)
STEPS = WARM_UP_STEPS + 4
SIZES = ["data.sequence_length=256", "train.micro_batch_size=2", "train.global_batch_size=4", "model.layers.0.repeat=2"]
OTHER_SIZES = {"rodimus_plus-125m": ["model.layers.0.sublayers.1.window=50"]}
"""Sizes of single presets: no window is longer than a sequence."""


def train(run: RunConfig, graphs: str) -> tuple[dict[str, torch.Tensor], bool]:
    """Weights after a few steps of two micro-batches in packed documents, and whether the last ones were replays."""
    run = run.model_copy(update={"train": run.train.model_copy(update={"cuda_graphs": graphs})})
    mesh = Mesh(run.parallel, compute_device())
    engine = FullyShardedEngine(run, mesh)
    for step in range(STEPS):
        batches = random_batches(run, mesh, step=step, document_length=97)
        engine.step(batches, learning_rate=1e-3, step=step).wait()
    for line in engine.report_lines():
        print(f"  {line}")
    found = {name: local(tensor).detach().clone() for name, tensor in engine.tensors().items()}
    replays = engine.replays
    engine.close()
    return found, replays


def compare(name: str) -> bool:
    """Compares the runs of a preset; False where they differ, or no graph was captured without a reason."""
    run = run_config(name, [*SIZES, *OTHER_SIZES.get(name, [])], 1)
    eager, replays = train(run, False)
    assert not replays, name
    if reason := automatic_obstacle(run, device="cuda", world_size=1, environment=os.environ):
        print(f"{name}: {reason}")
        return True
    graph, replays = train(run, "auto")
    differing = [key for key, tensor in graph.items() if not torch.equal(tensor, eager[key])]
    again = train(run, False)[0] if differing else eager
    unstable = [key for key, tensor in again.items() if not torch.equal(tensor, eager[key])]
    print(
        f"{name}: replays {replays}, tensors that differ {differing[:3]}, of two eager runs {unstable[:3]}", flush=True
    )
    return replays and not differing


def main() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with process_group(compute_device()):
        failed = [name for name in PRESETS if not compare(name)]
    if failed:
        raise ConfigError(f"graphs change the steps of {', '.join(failed)}, or were not chosen")


if __name__ == "__main__":
    main()
