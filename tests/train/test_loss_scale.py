"""Loss scaling of float16: its rule, skipped steps on every mesh, resumption, and the errors that still stop a run."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megalin.config import parse
from megalin.data.batch import split_tokens, take_samples
from megalin.errors import ConfigError, NumericError
from megalin.optim.adamw import build_optimizer
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor, local
from megalin.train.build import build_model
from megalin.train.config import load_run_config
from megalin.train.loss_scale import LossScale, StepScale, read_step
from megalin.train.precision import LARGEST_SCALE, LossScaleConfig
from megalin.train.step import StepResult, accumulate_gradients, apply_gradients
from tests.model_runs import CPU, checkpoint_tensors, late_results, train_here, write_config
from tests.numerics import assert_close
from tests.ranks import run_ranks
from tests.train.test_step import MODEL, OPTIMIZER, make_batch

FLOAT16 = "train.dtype=float16"
NUM_STEPS, OVERFLOWS = 8, (2, 3, 7)
"""Steps of the runs on a mesh, and those whose gradient overflows on the last rank."""
REPLICATED = "blocks.1.sublayers.0.mixer.gate.down"
"""Weight with the infinite gradient; tensor parallelism replicates it, so its norm is not reduced."""
POLICY = LossScaleConfig(initial=1024.0, growth_interval=2)
SCALES = [1024.0, 1024.0, 2048.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0]
"""The scale of each step: halved after an overflow, doubled after two other steps in a row."""


def one_rank_scale(config: LossScaleConfig) -> LossScale:
    mesh: Any = SimpleNamespace(device=CPU, is_true_anywhere=lambda flag: flag)
    return LossScale(config, mesh)


def test_scale_follows_its_rule():
    config = LossScaleConfig(initial=4096.0, growth_interval=3, minimum=16.0)
    scale, generator = one_rank_scale(config), random.Random(0)
    expected, clean_steps, overflows = 4096.0, 0, 0
    for chance in (0.0, 0.6, 0.3):
        for _ in range(60):
            overflow = generator.random() < chance
            overflows += overflow
            found = read_step(scale.update(torch.tensor(overflow)).tolist())
            assert found == StepScale(expected, overflow, overflows)
            clean_steps = 0 if overflow else clean_steps + 1
            if overflow:
                expected = max(expected / 2, 16.0)
            elif clean_steps == 3:
                expected, clean_steps = min(expected * 2, LARGEST_SCALE), 0
            assert scale.scale.item() == expected


def test_a_scale_that_a_checkpoint_lacks_starts_new(caplog):
    scale: Any = one_rank_scale(POLICY)
    new = {name: tensor.clone() for name, tensor in scale.tensors().items()}
    for overflow in (True, False):
        scale.update(torch.tensor(overflow))
    checkpoint = SimpleNamespace(path="step-00000006", index=lambda: SimpleNamespace(tensors={}))
    assert scale.saved_in(checkpoint) == {}
    assert scale.tensors() == new
    assert "step-00000006 has no loss scale, since its run was not in float16; it starts at 1024" in caplog.text


def test_an_overflow_is_no_reason_to_stop_unless_the_scale_is_at_its_minimum():
    finite, overflowing, broken = (True, 1.0), (True, math.inf), (False, math.nan)
    for minimum, stops in ((1.0, False), (8.0, True)):
        scale = one_rank_scale(LossScaleConfig(initial=8.0, minimum=minimum))
        for (loss_is_finite, norm), expected in (
            (finite, (True, False)),
            (overflowing, (not stops, True)),
            (broken, (False, False)),
        ):
            found = scale.judge(torch.tensor(loss_is_finite), torch.tensor(norm))
            assert tuple(map(bool, found)) == expected


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"initial": 1000.0}, "initial = 1000 is not a power of two; use 512"),
        ({"minimum": 3.0}, "minimum = 3 is not a power of two; use 2"),
        ({"initial": 8.0, "minimum": 16.0}, "minimum = 16 is above initial = 8; lower it, or raise initial"),
    ],
)
def test_scales_that_are_no_powers_of_two_are_refused(values, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(LossScaleConfig, values, "run.toml")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = {"train": {"steps": 6}, "checkpoint": {"every_steps": 100}, "data": {"validation": []}}
    return write_config(tmp_path_factory.mktemp("float16"), **tables)


def test_a_loss_scale_of_other_dtypes_is_refused(config):
    with pytest.raises(
        ConfigError, match=r'train.loss_scale has no effect with train.dtype = "bfloat16".*leave it out'
    ):
        load_run_config(config, ["train.dtype=bfloat16", "train.loss_scale.initial=1024.0"])


class Outcome(NamedTuple):
    """Steps with overflows on a mesh."""

    results: list[StepResult]
    weights: dict[str, Any]
    """Full weights after the last step, as arrays."""


def steps_on(parallel: ParallelConfig, overflows: Sequence[int], config: LossScaleConfig | None = POLICY) -> Outcome:
    """NUM_STEPS steps in fp64, so that meshes agree; without a config, only those that do not overflow, unscaled."""
    mesh = Mesh(parallel, CPU)
    model = build_model(MODEL, mesh, compute_dtype=torch.float64, recompute=False, compile_blocks=False, seed=0)
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=())
    scale = None if config is None else LossScale(config, mesh)
    results = []
    for step in range(NUM_STEPS):
        if scale is None and step in overflows:
            continue
        batch = take_samples(make_batch(), slice(step % 2 * 4, step % 2 * 4 + 4))
        size = 4 // mesh.samples.size
        own = take_samples(batch, slice(mesh.samples.rank * size, mesh.samples.rank * size + size))
        batches = [split_tokens(take_samples(own, slice(i * size // 2, (i + 1) * size // 2)), mesh.cp) for i in (0, 1)]
        found = accumulate_gradients(model, batches, mesh, None if scale is None else scale.scale)
        if step in overflows and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            local(dict(model.named_parameters())[REPLICATED].grad).view(-1)[0] = math.inf
        launched = apply_gradients(model, optimizer, *found, max_grad_norm=0.05, step=step, loss_scale=scale)
        results.append(launched.wait()._replace(seconds=0.0))
        assert launched.applied.item() == (step not in overflows)
    return Outcome(results, {name: full_tensor(p.detach()).numpy() for name, p in model.named_parameters()})


def outcomes_on(meshes: Sequence[ParallelConfig]) -> list[Outcome]:
    return [steps_on(mesh, OVERFLOWS) for mesh in meshes]


@pytest.fixture(scope="module")
def unscaled() -> Outcome:
    """One process without loss scaling, which leaves out the steps that overflow."""
    outcome: Outcome = run_ranks(1, steps_on, ParallelConfig(), OVERFLOWS, None)[0]
    return outcome


def as_tensors(weights: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in weights.items()}


MESHES = {
    1: [ParallelConfig()],
    2: [ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(), ParallelConfig(shard=1)],
    3: [ParallelConfig(cp=3)],
}


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_an_overflow_on_one_rank_skips_that_step_alone_on_every_rank(world_size, unscaled, with_slow):
    meshes = MESHES[world_size] if with_slow else MESHES[world_size][:1]
    for ranks in zip(*run_ranks(world_size, outcomes_on, meshes), strict=True):
        assert {name for rank in ranks for name in rank.weights} == unscaled.weights.keys()
        for results, weights in ranks:
            scaling = [result.scaling for result in results]
            assert [each.scale for each in scaling] == SCALES
            assert [step for step, each in enumerate(scaling) if each.skipped] == [*OVERFLOWS]
            assert scaling[-1].overflows == len(OVERFLOWS)
            kept = [result for result in results if not result.scaling.skipped]
            for result, expected in zip(kept, unscaled.results, strict=True):
                assert (result.loss, result.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-12)
            expected_weights = {name: unscaled.weights[name] for name in weights}  # a pipeline rank has its stages'
            assert_close(as_tensors(weights), as_tensors(expected_weights), 1e-10)
            if world_size == 1:  # a power of two changes no bit
                assert all((weights[name] == array).all() for name, array in expected_weights.items())


LARGE = "train.loss_scale.initial=4194304.0"
"""With it the first gradients of the run overflow."""


def _runs(config: Path, root: Path, runs: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Trains one run after the other, with results that are read one step later, as on a GPU."""
    for folder, overrides in runs:
        with late_results():
            train_here(config, root / folder, *overrides)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `whole` and `resumed`, whose run stopped while the scale still fell."""
    root = tmp_path_factory.mktemp("runs")
    overflowing = [FLOAT16, LARGE]
    stopped = [*overflowing, "train.stop_after_steps=2"]
    run_ranks(1, _runs, config, root, [("whole", overflowing), ("resumed", stopped), ("resumed", overflowing)])
    return root


def test_metrics_have_the_scale_and_skipped_steps(runs):
    found = [(line["loss_scale"], line["skipped"], line["grad_norm"] is None) for line in lines(runs / "whole")]
    skipped = sum(skip for _, skip, _ in found)
    assert 2 < skipped < 6
    assert found == [(2.0 ** (22 - min(step, skipped)), int(step < skipped), step < skipped) for step in range(6)]
    assert [line["tokens"] for line in lines(runs / "whole")] == [4 * 36 * step for step in range(1, 7)]


def test_a_run_that_stopped_inside_a_back_off_ends_with_the_same_bits(runs):
    whole, resumed = (checkpoint_tensors(runs / name) for name in ("whole", "resumed"))
    state = {key: whole[f"optim.loss_scale.{key}"].item() for key in ("scale", "clean_steps", "overflows")}
    skipped = sum(line["skipped"] for line in lines(runs / "whole"))
    assert state == {"scale": 2.0 ** (22 - skipped), "clean_steps": 6.0 - skipped, "overflows": skipped}
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    names = ("loss", "grad_norm", "loss_scale", "skipped")
    assert [[line[name] for name in names] for line in lines(runs / "whole")] == [
        [line[name] for name in names] for line in lines(runs / "resumed")
    ]


def _refused(config: Path, root: Path) -> list[str]:
    """The errors of a run at the lowest scale, and of one whose weight became NaN."""
    messages = []
    lowest = [LARGE, "train.loss_scale.minimum=2097152.0"]
    for name, overrides, hooks in (("lowest", lowest, []), ("nan", [], [_BreakWeight()])):
        with late_results(), pytest.raises(NumericError) as raised:
            train_here(config, root / name, FLOAT16, *overrides, hooks=hooks)
        messages.append(str(raised.value))
        assert not [*(root / name / "checkpoints").glob("step-*")]
    return messages


class _BreakWeight:
    """Update hook that makes a weight NaN after the second step."""

    name = "break"

    def memory_bytes(self, elements: int) -> int:
        return elements

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing to prepare."""

    def after_update(self, weights: Mapping[str, Tensor], *, applied: Tensor, step: int) -> None:
        if step == 2:
            local(weights["blocks.1.sublayers.0.mixer.out.weight"])[0, 0] = math.nan

    def tensors(self) -> Mapping[str, Tensor]:
        return {}


def test_an_overflow_at_the_lowest_scale_and_a_weight_that_is_nan_stop_the_run(config, tmp_path):
    lowest, broken = run_ranks(1, _refused, config, tmp_path)[0]
    assert lowest.startswith(
        "step 2: the gradient overflows float16 with the loss scale 2,097,152, and train.loss_scale.minimum allows no "
        'lower one (2 overflows in this run); train.dtype = "bfloat16" has a wider range; first in rank 0: '
    )
    assert re.search(r"first in rank 0: \S+ \(gradient\).*No weight was changed and nothing was saved", lowest)
    assert re.match(r"step 3: loss nan, gradient norm nan is not finite; first in rank 0: blocks.1.*\(weight\)", broken)


def _changed_dtype(config: Path, root: Path) -> None:
    for overrides in ([], [FLOAT16], []):
        stop = 1 + len(list((root / "checkpoints").glob("step-*")))
        train_here(config, root, *overrides, "checkpoint.every_steps=1", f"train.stop_after_steps={stop}")


@pytest.mark.slow
def test_a_run_may_change_its_dtype(config, tmp_path):
    run_ranks(1, _changed_dtype, config, tmp_path / "run")
    found = [line.get("loss_scale") for line in lines(tmp_path / "run")]
    assert found == [None, 65536.0, None]
    assert not [name for name in checkpoint_tensors(tmp_path / "run") if "loss_scale" in name]
