"""Global names and initial weights of a small model for each mixer, compared with tests/fixtures/global_names.json.

Checkpoints and exports find tensors by these names, and each name seeds the initial weights of its tensor: a renamed
attribute breaks both. After a deliberate change, write the file again and say in the commit how old checkpoints load:

    python -m tests.model.test_global_names > tests/fixtures/global_names.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
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

PATH = Path(__file__).parents[1] / "fixtures" / "global_names.json"
CPU = torch.device("cpu")
MODELS: dict[str, AnyModelConfig] = {case.name: case.model for case in cases.CASES}
MODELS |= {f"encoder-{case.name}": case.model for case in encoder_cases.CASES}
SAMPLER = "torch's generator"
"""The entry of torch's own random numbers, which differ between vectorised and other CPUs."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with process_group(CPU):
        yield Mesh(ParallelConfig(), CPU)


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
def test_global_names_and_initial_weights_stay(name, mesh, stored):
    found, expected = summary(MODELS[name], mesh), stored[name]
    assert found["parameters"] == expected["parameters"]
    assert found["buffers"] == expected["buffers"]
    if sampler() != stored[SAMPLER]:
        pytest.skip("torch draws other numbers on this CPU, so initial weights differ from the file's")
    assert found["sha256"] == expected["sha256"]


if __name__ == "__main__":
    with process_group(CPU):
        built = {name: summary(config, Mesh(ParallelConfig(), CPU)) for name, config in MODELS.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in {SAMPLER: sampler(), **built}.items()]
    print("{\n" + ",\n".join(lines) + "\n}")
