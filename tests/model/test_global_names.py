"""Global names and initial weights of a small model for each mixer, compared with tests/fixtures/global_names.json.

Checkpoints and exports find tensors by these names, and each name seeds the initial weights of its tensor: a renamed
attribute breaks both. After a deliberate change, write the file again and say in the commit how old checkpoints load:

    python -m tests.model.test_global_names > tests/fixtures/global_names.json
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalin.model.config import AnyModelConfig
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.parallel.tensor_parallel import full_tensor
from megalin.train.build import build_model
from tests import cases, encoder_cases
from tests.ranks import run_ranks

PATH = Path(__file__).parents[1] / "fixtures" / "global_names.json"
CPU = torch.device("cpu")
MODELS: dict[str, AnyModelConfig] = {case.name: case.model for case in cases.CASES}
MODELS |= {f"encoder-{case.name}": case.model for case in encoder_cases.CASES}
SAMPLER = "torch's generator"
"""The entry of torch's own random numbers, which differ between vectorised and other CPUs."""


def summaries() -> dict[str, Any]:
    """The entries of the file. Must run before the process first calls MKL, which computes exp and log differently on
    each kind of CPU unless it is asked for the results of all."""
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    mesh = Mesh(ParallelConfig(), CPU)
    return {SAMPLER: sampler()} | {name: summary(config, mesh) for name, config in MODELS.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_ranks(1, summaries)[0]


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return json.loads(PATH.read_text())


def summary(config: AnyModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Names of parameters and saved buffers, and the digest of their values, of the model that training builds."""
    model = build_model(config, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=0)
    weights = dict(model.named_parameters())
    tensors = weights | {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return {"parameters": list(weights), "buffers": list(tensors.keys() - weights.keys()), "sha256": digest(tensors)}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of names, shapes and fp32 values, in the order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        values = full_tensor(tensor.detach()).numpy()
        assert values.dtype == "float32", (name, values.dtype)
        found.update(f"{name} {values.shape} ".encode() + values.astype("<f4").tobytes())
    return found.hexdigest()


def sampler() -> str:
    """The digest of normal and uniform numbers from a seeded generator."""
    generator = torch.Generator().manual_seed(0)
    normal, uniform = (torch.empty(100).normal_, torch.empty(100).uniform_)
    return digest({"normal": normal(generator=generator), "uniform": uniform(generator=generator)})


def test_the_file_has_every_model(stored):
    assert list(stored) == [SAMPLER, *MODELS]


@pytest.mark.parametrize("name", MODELS)
def test_global_names_and_initial_weights_stay(name, found, stored):
    model, expected = found[name], stored[name]
    assert model["parameters"] == expected["parameters"]
    assert model["buffers"] == expected["buffers"]
    if found[SAMPLER] != stored[SAMPLER]:
        pytest.skip("torch draws other numbers on this CPU, so initial weights differ from the file's")
    assert model["sha256"] == expected["sha256"]


if __name__ == "__main__":
    with process_group(CPU):
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in summaries().items()]
    print("{\n" + ",\n".join(lines) + "\n}")
