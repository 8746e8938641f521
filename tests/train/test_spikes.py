"""Guard against spikes: its rule, updates left out on every rank, resumption, and what a run writes about them."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalin.data.batch import split_tokens, take_samples
from megalin.errors import ConfigError
from megalin.optim.adamw import build_optimizer
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor, local
from megalin.train import spikes
from megalin.train.build import build_model
from megalin.train.config import load_run_config
from megalin.train.spikes import WARM_UP, WINDOW, SpikeGuard, SpikeReading
from megalin.train.step import accumulate_gradients, apply_gradients
from tests.model_runs import CPU, checkpoint_tensors, late_results, ledger, train_here, write_config
from tests.numerics import assert_close
from tests.ranks import run_ranks
from tests.train.test_loss_scale import REPLICATED, as_tensors, lines
from tests.train.test_step import MODEL, OPTIMIZER, make_batch

SPIKE_STEP, NUM_STEPS = 5, 8


def one_rank_guard() -> SpikeGuard:
    mesh: Any = SimpleNamespace(device=CPU, is_true_anywhere=lambda flag: flag)
    return SpikeGuard(mesh, skips=True)


def judged(guard: SpikeGuard, loss: float, norm: float) -> SpikeReading:
    flag, values = guard.judge(torch.tensor(loss), torch.tensor(norm))
    reading = guard.read(values.tolist())
    assert bool(flag) == reading.found
    return reading


def deviation(values: Sequence[float]) -> tuple[float, float]:
    """Lower median and median absolute deviation."""
    middle = statistics.median_low(values)
    return middle, statistics.median_low([abs(value - middle) for value in values])


def test_a_spike_is_far_above_the_median_of_the_last_steps():
    guard, generator = one_rank_guard(), random.Random(0)
    losses, norms, found = list[float](), list[float](), 0
    for step in range(3 * WINDOW):
        loss = generator.gauss(3.0, 0.05) + (0.7 if generator.random() < 0.05 else 0.0)
        norm = generator.lognormvariate(0.0, 0.5) * (80.0 if generator.random() < 0.05 else 1.0)
        loss, norm = (torch.tensor(value).item() for value in (loss, norm))  # rounded to fp32
        reading = judged(guard, loss, norm)
        if step >= WARM_UP:
            of_losses, of_norms = deviation(losses[-WINDOW:]), deviation(norms[-WINDOW:])
            loss_spike = loss > of_losses[0] + max(10 * of_losses[1], 0.1)
            norm_spike = norm > max(of_norms[0] + 100 * of_norms[1], 50 * of_norms[0])
            assert reading.found == (loss_spike or norm_spike)
            assert reading[2:] == pytest.approx((of_losses[0], of_norms[0], of_losses[1], of_norms[1]), rel=1e-12)
            found += loss_spike + 2 * norm_spike
        else:
            assert not reading.found
        losses.append(loss)
        norms.append(norm)
    assert found > 20


def test_a_guard_that_a_checkpoint_lacks_starts_new():
    guard: Any = one_rank_guard()
    for _ in range(WARM_UP + 1):
        judged(guard, 2.0, 1.0)
    assert guard.saved_in(SimpleNamespace(index=lambda: SimpleNamespace(tensors=guard.tensors()))) == guard.tensors()
    assert judged(guard, 9.0, 1.0).found
    assert guard.saved_in(SimpleNamespace(index=lambda: SimpleNamespace(tensors={}))) == {}
    assert not judged(guard, 9.0, 1.0).found
    assert guard.tensors()["optim.spikes.count"] == 1
    assert guard.tensors()["optim.spikes.history"].count_nonzero() == 2


def test_a_loss_that_stays_high_is_no_spike_after_half_the_window():
    guard = one_rank_guard()
    for _ in range(WINDOW):
        judged(guard, 2.0, 1.0)
    found = [judged(guard, 3.0, 1.0).found for _ in range(WINDOW)]
    assert found == [True] * (WINDOW // 2 + 1) + [False] * (WINDOW // 2 - 1)
    assert not judged(guard, 2.0, 1.0).found  # below


def test_small_changes_of_a_learnt_task_are_no_spikes_and_infinite_norms_do_not_count():
    guard = one_rank_guard()
    for _ in range(WINDOW):
        judged(guard, 1e-4, 1e-3)
        judged(guard, 1e-4, torch.inf)  # a float16 step that overflows
    before = guard.tensors()["optim.spikes.history"].clone()
    assert not judged(guard, 0.09, 1e-3).found
    assert judged(guard, 0.11, 1e-3).found
    assert judged(guard, 1e-4, 0.051).found
    assert before.unique().numel() == 2


def steps_on(parallel: ParallelConfig, *, spike: bool) -> dict[str, Any]:
    """Steps in fp64, one with a gradient whose norm is a spike on the last rank alone; without `spike` that step is
    left out. Returns the full weights as arrays."""
    mesh = Mesh(parallel, CPU)
    model = build_model(MODEL, mesh, compute_dtype=torch.float64, recompute=False, compile_blocks=False, seed=0)
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=())
    guard = SpikeGuard(mesh, skips=True)
    for step in range(NUM_STEPS):
        if step == SPIKE_STEP and not spike:
            continue
        size = 4 // mesh.samples.size
        batch = take_samples(make_batch(), slice(mesh.samples.rank * size, mesh.samples.rank * size + size))
        batches = [
            split_tokens(take_samples(batch, slice(i * size // 2, (i + 1) * size // 2)), mesh.cp) for i in (0, 1)
        ]
        found = accumulate_gradients(model, batches, mesh)
        if step == SPIKE_STEP and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            local(dict(model.named_parameters())[REPLICATED].grad).mul_(1e6)
        launched = apply_gradients(model, optimizer, *found, max_grad_norm=None, step=step, spikes=guard)
        assert launched.applied.item() == (step != SPIKE_STEP)
        assert launched.wait().skipped == (step == SPIKE_STEP)
    return {name: full_tensor(p.detach()).numpy() for name, p in model.named_parameters()}


def outcomes_on(meshes: Sequence[ParallelConfig]) -> list[dict[str, Any]]:
    with patch.object(spikes, "WARM_UP", 3):
        return [steps_on(mesh, spike=True) for mesh in meshes]


MESHES = {2: [ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig()], 3: [ParallelConfig(cp=3)]}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_spike_on_one_rank_is_left_out_on_every_rank(world_size, with_slow):
    meshes = MESHES[world_size] if with_slow else MESHES[world_size][:1]
    expected: dict[str, Any] = run_ranks(1, _expected)[0]
    for ranks in zip(*run_ranks(world_size, outcomes_on, meshes), strict=True):
        assert {name for rank in ranks for name in rank} == expected.keys()
        for weights in ranks:
            assert_close(as_tensors(weights), as_tensors({name: expected[name] for name in weights}), 1e-10)


def _expected() -> dict[str, Any]:
    return steps_on(ParallelConfig(), spike=False)


_judge = SpikeGuard.judge


def _judge_spike(guard: SpikeGuard, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Adds 10 to the loss of a step of the run."""
    is_spike = guard.tensors()["optim.spikes.count"] == SPIKE_STEP
    return _judge(guard, torch.where(is_spike, loss + 10.0, loss), norm)


def _runs(config: Path, root: Path) -> None:
    skip = "train.on_spike=skip"
    runs = [("warned", []), ("whole", [skip]), ("stopped", [skip, "train.stop_after_steps=6"]), ("stopped", [skip])]
    with patch.object(spikes, "WARM_UP", 3), patch.object(SpikeGuard, "judge", _judge_spike), late_results():
        for name, overrides in runs:
            train_here(config, root / name, *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `warned`, `whole` and `stopped`, whose run was resumed right after the spike."""
    root: Path = tmp_path_factory.mktemp("spikes")
    train = {"steps": NUM_STEPS}
    config = write_config(root, train=train, checkpoint={"every_steps": 100}, data={"validation": []})
    run_ranks(1, _runs, config, root)
    return root


def test_a_spike_is_in_the_metrics_the_ledger_and_the_events_with_its_samples(runs):
    for name, skipped in (("warned", 0), ("whole", 1)):
        found = [(line["step"], line["skipped"]) for line in lines(runs / name) if "spike" in line]
        assert found == [(SPIKE_STEP + 1, skipped)]
        assert [line["step"] for line in ledger(runs / name) if "skipped" in line] == [SPIKE_STEP + 1] * skipped
        events = [json.loads(line) for line in (runs / name / "incidents.jsonl").read_text().splitlines()]
        (message,) = [event["message"] for event in events if "spike" in event["message"]]
        assert message.startswith(f"step {SPIKE_STEP + 1}: spike: loss ")
        assert ("its update was left out" if skipped else "its update was applied") in message
        assert "Its samples, by data-parallel rank: 0: " in message


def test_a_run_that_stopped_after_a_spike_ends_with_the_same_bits(runs):
    whole, resumed, warned = (checkpoint_tensors(runs / name) for name in ("whole", "stopped", "warned"))
    assert whole["optim.spikes.count"] == NUM_STEPS
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(whole[name], warned[name]) for name in whole if not name.startswith("optim."))


def test_deepspeed_cannot_leave_updates_out(tmp_path):
    config = write_config(tmp_path)
    with pytest.raises(ConfigError, match=r'train.on_spike = "skip" with train.engine = "deepspeed".*leave it out'):
        load_run_config(config, ["train.engine=deepspeed", "train.on_spike=skip"])
