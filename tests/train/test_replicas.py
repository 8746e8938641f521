"""Replica drift: a flipped bit in any copy is found on each axis, and ends a run; equal copies never do."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalin.checkpoint.tensors import training_tensors
from megalin.errors import ReplicaError
from megalin.model.config import ModelConfig
from megalin.optim.adamw import build_optimizer
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import local
from megalin.train import replicas
from megalin.train.build import build_model
from megalin.train.engine import FullyShardedEngine
from megalin.train.pipeline_model import Pipeline
from megalin.train.replicas import ReplicaCheck, distributed_tensors
from megalin.train.step import PendingStep
from tests.model_runs import CPU, DROPOUT, train_here, write_config
from tests.ranks import run_ranks
from tests.train.test_step import MODEL, OPTIMIZER

MESHES = {
    2: [
        ParallelConfig(tp=2),
        ParallelConfig(zero=3),
        ParallelConfig(pp=2, pp_stages_per_rank=2, pp_schedule="interleaved"),
        ParallelConfig(zero=0),
        ParallelConfig(cp=2, shard=1),
    ],
    3: [ParallelConfig(shard=1)],
    4: [ParallelConfig(shard=2), ParallelConfig(tp=2, shard=1)],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [0, 1, 37, 512, 1000])
@pytest.mark.parametrize("offset", [0, 1])
def test_checksum_is_the_sum_of_the_words_times_odd_factors(offset, elements, dtype, monkeypatch):
    monkeypatch.setattr(replicas, "_PERIOD", 16)
    monkeypatch.setattr(replicas, "_BLOCKS_AT_A_TIME", {"cpu": 2})
    check: Any = object.__new__(ReplicaCheck)
    check._factors = replicas._odd_factors(CPU)
    x = torch.randn(elements + offset).to(dtype)[offset:]
    data = bytes(x.clone().view(torch.uint8).tolist())
    words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8)]
    expected = sum((2 * (i % 16) + 1) * word for i, word in enumerate(words)) % 2**64
    assert int(check._checksum(x)) % 2**64 == expected


def _flip(x: Tensor, generator: random.Random) -> tuple[int, int]:
    """Flips a bit of an element in place; returns both places."""
    element, bit = generator.randrange(x.numel()), generator.randrange(32)
    _flip_at(x, element, bit)
    return element, bit


def _flip_at(x: Tensor, element: int, bit: int) -> None:
    assert x.is_contiguous()
    flipped = 1 << bit if bit < 31 else -(1 << 31)
    x.flatten().view(torch.int32)[element] ^= flipped


def _found(check: ReplicaCheck, tensors: Mapping[str, Tensor]) -> str:
    """The message of a comparison; empty if all copies are equal."""
    comparison = check.start(tensors, 7)
    assert comparison is not None
    try:
        comparison.wait()
    except ReplicaError as error:
        return str(error)
    return ""


def messages_on(meshes: Sequence[ParallelConfig], flips: int) -> list[tuple[str, int, str]]:
    """Flips bits, one at a time and each back again: name of the tensor, rank, and the message."""
    found = []
    for number, parallel in enumerate(meshes):
        mesh = Mesh(parallel, CPU)
        table = MODEL.model_dump(mode="json") | DROPOUT | {"tie_embeddings": True}
        config = ModelConfig.model_validate(table | {"layers": [*table["layers"], *table["layers"]]})
        model = build_model(config, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=0)
        constants = model.constants() if isinstance(model, Pipeline) else dict(model.named_buffers())
        assert {"seed", "site", "slopes"} == {name.partition(" ")[0].rpartition(".")[2] for name in constants}
        tensors = distributed_tensors(training_tensors(model, build_optimizer(model, OPTIMIZER, no_decay=())))
        tensors |= constants
        check, generator = ReplicaCheck(mesh, tensors), random.Random(number)
        assert _found(check, tensors) == ""
        names = sorted({name for copies in check._copies for name in copies.names})
        of_constants = [name for name in names if name in constants]
        for flip in range(flips):
            name = generator.choice(of_constants if flip % 3 == 0 and of_constants else names)
            victim = generator.randrange(torch.distributed.get_world_size())
            place = generator.getrandbits(32)
            if torch.distributed.get_rank() == victim:
                place = _flip(local(tensors[name]), random.Random(place))
            found.append((name, victim, _found(check, tensors)))
            if torch.distributed.get_rank() == victim:
                _flip_at(local(tensors[name]), *place)
        assert _found(check, tensors) == ""
    return found


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_each_flipped_bit_is_found_on_every_rank_with_its_tensor(world_size, with_slow):
    meshes, flips = (MESHES[world_size], 100) if with_slow else (MESHES[world_size][:2], 5)
    by_rank = run_ranks(world_size, messages_on, meshes, flips)
    assert all(found == by_rank[0] for found in by_rank)
    assert len(by_rank[0]) == flips * len(meshes)
    votes = 0
    for name, victim, message in by_rank[0]:
        assert re.search(rf"step 7: copies of .*\n  {re.escape(name)}: ranks? [\d, ]*{victim}", message)
        if "no copy has a majority" not in message:
            assert re.search(rf"rank {victim} differs from [23] others", message)
            votes += 1
    # Of two copies none is known to be wrong; on tp 2 x 2 replicas a tensor that tp does not divide has four, and
    # those that share an axis with the wrong one are compared with it.
    assert {2: votes == 0, 3: votes == flips, 4: 0 < votes < flips}[world_size]


def runs_with_another_slope(config: Path, root: Path) -> str:
    """Message of a run in which rank 1's slope of a layer changes after the first step."""
    launch = FullyShardedEngine.step

    def step(engine: FullyShardedEngine, *arguments: Any, **options: Any) -> PendingStep:
        pending = launch(engine, *arguments, **options)
        if options["step"] == 1 and torch.distributed.get_rank() == 1:
            slopes = next(each for name, each in engine.model.named_buffers() if name.endswith("slopes"))
            slopes[2] *= 1.5
        return pending

    with patch.object(FullyShardedEngine, "step", step):
        try:
            train_here(config, root, "train.compare_replicas_every_steps=2")
        except ReplicaError as error:
            return str(error)
    return ""


def test_a_run_ends_where_a_constant_of_a_rank_changes_though_every_weight_is_sharded(tmp_path):
    config = write_config(tmp_path, train={"steps": 4}, parallel={"zero": 3}, data={"validation": []})
    first, second = run_ranks(2, runs_with_another_slope, config, tmp_path / "run")
    assert first == second
    assert re.match(r"step 2: copies of a weight, a moment or a constant are .*\n  \S*slopes: ranks 0, 1 differ", first)
    assert ReplicaError.exit_code == 11


class _Flip:
    """Update hook that flips a bit of a weight of rank 1 after a step."""

    name = "flip"

    def __init__(self, at_step: int) -> None:
        self._at_step = at_step

    def memory_bytes(self, elements: int) -> int:
        return 0

    def start(self, weights: Mapping[str, Tensor]) -> None:
        pass

    def after_update(self, weights: Mapping[str, Tensor], *, applied: Tensor, step: int) -> None:
        if step == self._at_step and torch.distributed.get_rank() == 1:
            _flip_at(local(next(iter(weights.values()))), 0, 12)

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


def _train_with_flip(config: Path, folder: Path, at_step: int, *overrides: str) -> str:
    try:
        train_here(config, folder, *overrides, hooks=[_Flip(at_step)])
    except ReplicaError as error:
        return str(error)
    return ""


def runs_with_flips(config: Path, root: Path) -> list[tuple[str, list[str]]]:
    """Message and checkpoints of a run that compares every 2 steps, and of one that does before its save."""
    found = []
    for name, overrides in (("often", ["train.compare_replicas_every_steps=2"]), ("saves", [])):
        message = _train_with_flip(config, root / name, 1, *overrides)
        found.append((message, sorted(path.name for path in (root / name / "checkpoints").glob("step-*"))))
    return found


def test_a_run_ends_at_the_next_comparison_or_before_the_next_save(tmp_path):
    config = write_config(
        tmp_path, train={"steps": 5}, parallel={"shard": 1}, checkpoint={"every_steps": 3}, data={"validation": []}
    )
    by_rank = run_ranks(2, runs_with_flips, config, tmp_path)
    assert by_rank[0] == by_rank[1]
    (often, of_often), (saves, of_saves) = by_rank[0]
    assert often.startswith("step 2: copies of")
    assert saves.startswith("step 3: copies of")
    assert of_often == of_saves == []
