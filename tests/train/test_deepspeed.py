"""DeepSpeed as the engine: the other engine's losses, norms, weights and moments, saved and gone on with by either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.model_runs import checkpoint_tensors, losses, metrics, train_here, write_config
from tests.numerics import assert_close
from tests.ranks import run_ranks
from tests.train.test_resume import assert_same_end

STEPS = 4


class Case(NamedTuple):
    """A run on the engine, beside the run of the same name with the other engine."""

    world_size: int
    overrides: tuple[str, ...]
    json: Mapping[str, Any] | None = None


CASES = {
    "zero0": Case(2, ("parallel.zero=0",)),
    "zero1": Case(2, ("parallel.zero=1",)),
    "zero2": Case(2, ("parallel.zero=2",)),
    "zero3": Case(2, ("parallel.zero=3",)),
    "zero2_accumulating": Case(2, ("parallel.zero=2", "train.micro_batch_size=1")),
    "zero3_recomputing": Case(2, ("parallel.zero=3", "train.micro_batch_size=1", "train.recompute=true")),
    "zero2_offloaded": Case(
        2, (), {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": "auto"}
    ),
    "zero3_offloaded": Case(
        2,
        (),
        {
            "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": "auto"}},
        },
    ),
    "zero0_tp2": Case(4, ("parallel.tp=2", "parallel.zero=0")),
    "zero1_tp2": Case(4, ("parallel.tp=2", "parallel.zero=1", "parallel.sequence_parallel=true")),
    "zero2_tp2": Case(4, ("parallel.tp=2", "parallel.zero=2")),
    "zero3_tp2": Case(4, ("parallel.tp=2", "parallel.zero=3")),
    "zero2_tp2_cp2": Case(4, ("parallel.tp=2", "parallel.cp=2", "parallel.zero=2")),
    # Weights that three ranks cannot share evenly.
    "zero3_cp3": Case(3, ("parallel.cp=3", "parallel.zero=3")),
    "zero1_bf16": Case(2, ("parallel.zero=1", "train.dtype=bfloat16", "train.micro_batch_size=1")),
    "zero2_tp2_bf16": Case(4, ("parallel.tp=2", "parallel.zero=2", "train.dtype=bfloat16")),
    "zero3_bf16": Case(2, ("parallel.zero=3", "train.dtype=bfloat16")),
}
STOPPED = ("zero0", "zero1_bf16", "zero2_offloaded", "zero3_bf16", "zero2_tp2", "zero3_cp3")
"""Cases that stop after half of their steps, and go on."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = {"train": {"steps": STEPS}, "checkpoint": {"every_steps": 100}}
    return write_config(tmp_path_factory.mktemp("deepspeed"), **tables)


def _runs(config: Path, calls: list[tuple[Path, list[str]]]) -> None:
    """Several runs one after the other, each from its folder alone; nothing may be compiled for them."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def refuse(self: OpBuilder, verbose: bool = True) -> None:
        raise AssertionError(f"{self.name} is compiled")

    OpBuilder.jit_load = refuse
    for folder, overrides in calls:
        train_here(config, folder, *overrides)


def overrides_of(case: Case, folder: Path) -> list[str]:
    """How the engine is asked for."""
    overrides = ["train.engine=deepspeed", *case.overrides]
    if case.json is None:
        return overrides
    path = folder / "ds.json"
    path.write_text(json.dumps(case.json))
    return [*overrides, f"train.deepspeed_config={path}"]


@pytest.fixture(scope="module")
def folders(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each case: `deepspeed`, the same as `fsdp2`, and for some `stopped`, which paused in the middle."""
    made: dict[str, Path] = {}
    calls: dict[int, list[tuple[Path, list[str]]]] = {2: [], 3: [], 4: []}
    for name, case in CASES.items():
        folder = made[name] = tmp_path_factory.mktemp(name)
        overrides = overrides_of(case, folder)
        ours = [item for item in case.overrides if "zero" not in item]
        calls[case.world_size] += [(folder / "deepspeed", overrides), (folder / "fsdp2", ours)]
        if name in STOPPED:
            stop = [*overrides, "train.stop_after_steps=2"]
            calls[case.world_size] += [(folder / "stopped", stop), (folder / "stopped", overrides)]
    for world_size, of_world in calls.items():
        run_ranks(world_size, _runs, config, of_world)
    return made


@pytest.mark.parametrize("name", list(CASES))
def test_both_engines_take_the_same_steps(folders, name):
    actual, expected = metrics(folders[name] / "deepspeed"), metrics(folders[name] / "fsdp2")
    assert min(line["grad_norm"] for line in expected) > 1.0  # what the norm is clipped to
    low = "bf16" in name
    assert len(actual) == len(expected) == STEPS
    for mine, other in zip(actual, expected, strict=True):
        assert mine == pytest.approx(other, rel=2e-3 if low else 2e-6)
    if not low:
        assert_close(checkpoint_tensors(folders[name] / "deepspeed"), checkpoint_tensors(folders[name] / "fsdp2"), 2e-5)


@pytest.mark.parametrize("name", STOPPED)
def test_a_run_that_paused_ends_with_the_same_bits(folders, name):
    assert_same_end(folders[name] / "stopped", folders[name] / "deepspeed")


def test_the_run_folder_keeps_what_the_engine_got(folders):
    settings = json.loads((folders["zero2_tp2_cp2"] / "deepspeed" / "deepspeed.json").read_text())
    assert settings["zero_optimization"] == {"stage": 2}
    # With context parallelism the ranks that share a sample count too.
    assert (settings["train_batch_size"], settings["gradient_accumulation_steps"]) == (8, 2)


def test_either_engine_goes_on_from_the_other_on_another_mesh(config, folders, tmp_path):
    folder = tmp_path / "run"
    ways = [
        ["train.engine=deepspeed", "parallel.zero=3"],
        ["parallel.tp=2"],
        ["train.engine=deepspeed", "parallel.tp=2", "parallel.zero=1"],
        ["train.engine=deepspeed", "parallel.zero=0"],
    ]
    stops = [[*way, f"train.stop_after_steps={step}"] for step, way in enumerate(ways, start=1)]
    run_ranks(2, _runs, config, [(folder, overrides) for overrides in stops])
    expected = folders["zero0"] / "fsdp2"
    assert losses(folder) == pytest.approx(losses(expected), rel=2e-6)
    assert_close(checkpoint_tensors(folder), checkpoint_tensors(expected), 2e-5)
