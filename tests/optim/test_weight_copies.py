"""Weight copies of the update: the bits of a cast at each gather, none of them stale, on meshes too."""

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalin.checkpoint.manifest import Checkpoint, read_manifest
from megalin.checkpoint.save import save
from megalin.data.batch import Batch
from megalin.ops.dispatch import backend
from megalin.optim import adamw
from megalin.parallel.data_parallel import reshard
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.parallel.tensor_parallel import assign, full_tensor, local
from megalin.parallel.weight_copies import WeightCopy, refresh_weight_copies, weight_copy_bytes
from megalin.train.config import load_run_config
from megalin.train.engine import FullyShardedEngine
from megalin.train.step import accumulate_gradients
from megalin.train.tree_gradients import accumulate_by_tree
from tests.model_runs import CPU, write_config
from tests.ranks import run_ranks

KERNEL = "adamw_update=triton"
LENGTH, SIZE, STEPS = 36, 4, 3
ONE_MICRO_BATCH = "train.global_batch_size=2"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("copies"), train={"dtype": "bfloat16"})


@pytest.fixture(autouse=True)
def _one_process(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv(backend.VARIABLE, KERNEL)
    with process_group(CPU):
        yield


def make_engine(config: Path, *overrides: str) -> FullyShardedEngine:
    run = load_run_config(config, list(overrides))
    return FullyShardedEngine(run, Mesh(run.parallel, CPU))


def make_batch(mesh: Mesh | None = None) -> Batch:
    """One for each rank that reads samples."""
    generator = torch.Generator().manual_seed(7 if mesh is None else 7 + mesh.samples.rank)
    ids = torch.randint(0, 257, (SIZE, LENGTH + 1), generator=generator)
    documents = torch.zeros(SIZE, LENGTH, dtype=torch.int32)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), documents, torch.arange(SIZE))


def steps(
    engine: FullyShardedEngine, count: int = STEPS, *, mesh: Mesh | None = None, micro_batches: int = 2
) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    batches = [make_batch(mesh)] * micro_batches
    results = [engine.step(batches, learning_rate=1e-2, step=i + 1).wait() for i in range(count)]
    return [(result.loss, result.grad_norm) for result in results]


@torch.no_grad()
def loss_of(engine: FullyShardedEngine) -> float:
    """Loss of an evaluation."""
    loss = float(engine.model.loss_sums(make_batch().inputs()))
    reshard(engine.model)
    return loss


def full_weights(engine: FullyShardedEngine) -> dict[str, Any]:
    return {name: full_tensor(p.detach()).clone().numpy() for name, p in engine.model.named_parameters()}


class Run(NamedTuple):
    losses: list[tuple[float, float]]
    weights: Mapping[str, Any]
    copy_bytes: int


def run(config: Path, overrides: tuple[str, ...], *, copies: bool) -> Run:
    import tests.interpreter  # noqa: F401

    os.environ[backend.VARIABLE] = KERNEL
    with patch.object(adamw, "add_weight_copies", adamw.add_weight_copies if copies else lambda _: {}):
        engine = make_engine(config, *overrides)
    losses = steps(engine, mesh=engine._mesh, micro_batches=1 if ONE_MICRO_BATCH in overrides else 2)
    assert backend.used()["adamw_update"].backend == "triton"
    return Run(losses, full_weights(engine), weight_copy_bytes(engine.model))


def both_runs(config: Path, overrides: tuple[tuple[str, ...], ...]) -> list[tuple[Run, Run]]:
    return [(run(config, each, copies=True), run(config, each, copies=False)) for each in overrides]


def assert_same_bits(found: Run, expected: Run) -> None:
    assert found.losses == expected.losses
    assert all((found.weights[name] == weight).all() for name, weight in expected.weights.items())
    assert found.copy_bytes > 0 == expected.copy_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_give_the_bits_of_casts(config, dtype):
    ((found, expected),) = both_runs(config, ((f"train.dtype={dtype}",),))
    assert_same_bits(found, expected)
    assert len(set(found.losses)) == STEPS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_one_micro_batch_stays_in_the_compute_dtype(config, dtype):
    """With the bits of a gradient that is cast to fp32."""
    ((found, expected),) = both_runs(config, ((f"train.dtype={dtype}", ONE_MICRO_BATCH),))
    assert_same_bits(found, expected)
    engine = make_engine(config, f"train.dtype={dtype}", ONE_MICRO_BATCH)
    accumulate_gradients(engine.model, [make_batch()], engine._mesh)
    precise = {id(p) for module in engine.model.full_precision_modules() for p in module.parameters()}
    for parameter in engine.model.parameters():
        assert parameter.grad.dtype == (torch.float32 if id(parameter) in precise else getattr(torch, dtype))


def test_a_tree_of_micro_batches_gives_fp32_gradients_to_weights_with_copies(config):
    tree = ("train.reduction=tree", "parallel.zero=1")
    ((found, expected),) = both_runs(config, (tree,))
    assert_same_bits(found, expected)
    engine = make_engine(config, *tree)
    accumulate_by_tree(engine.model, [make_batch()] * 2, engine._mesh)
    assert {parameter.grad.dtype for parameter in engine.model.parameters()} == {torch.float32}


def test_steps_of_more_micro_batches_than_the_config_s_are_our_bug(config):
    engine = make_engine(config, ONE_MICRO_BATCH)
    with pytest.raises(AssertionError, match="the model was built for steps of one micro-batch"):
        steps(engine, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (3, (("train.global_batch_size=6",), ("train.global_batch_size=6", "parallel.shard=1"))),
        (4, (("parallel.tp=2",), ("parallel.zero=2",), ("parallel.shard=2",), ("parallel.pp=2", "parallel.tp=2"))),
    ],
)
def test_copies_give_the_bits_of_casts_on_meshes(config, world_size, overrides):
    overrides = tuple(("train.micro_batch_size=1", *each) for each in overrides)
    for outcome in run_ranks(world_size, both_runs, config, overrides):
        for found, expected in outcome:
            assert_same_bits(found, expected)


class _Casts(TorchDispatchMode):
    """Counts reads of the given tensors that write another dtype."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._addresses, self.count = {tensor.data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if function is torch.ops.aten.copy_.default else args[0]
            self.count += source.data_ptr() in self._addresses and result.dtype != source.dtype
        return result


def test_only_a_first_gather_casts_weights(config):
    engine = make_engine(config)
    wide = [local(p.detach()) for p in engine.model.parameters()]
    found = []
    for _ in range(2):
        with _Casts(wide) as casts:
            steps(engine, 1)
        found.append(casts.count)
    assert found == [len(adamw_copies(engine)), 0]


def adamw_copies(engine: FullyShardedEngine) -> list[WeightCopy]:
    return list(engine._optimizer._copies.values())


def saved_after_a_step(config: Path, folder: Path) -> tuple[Checkpoint, float]:
    """A checkpoint after one step, and the loss of its weights."""
    engine = make_engine(config)
    steps(engine, 1)
    path = save(folder, step=1, tensors=engine.tensors(), state={})
    return Checkpoint(path, read_manifest(path)), loss_of(engine)


def test_no_copy_is_stale_after_a_rollback(config, tmp_path):
    checkpoint, expected = saved_after_a_step(config, tmp_path)
    engine = make_engine(config)
    steps(engine, 2)
    assert loss_of(engine) != expected
    engine.load(checkpoint)
    assert loss_of(engine) == expected
    again = make_engine(config)
    again.load(checkpoint)
    assert steps(engine, 2) == steps(again, 2)


def test_no_copy_is_stale_after_weights_are_set(config):
    engine, other = make_engine(config), make_engine(config)
    before = loss_of(engine)

    @torch.no_grad()
    def fill(weights, *, foreach):
        values = [weight.detach() for weight in weights.values()]
        if foreach:  # autograd counts no write
            torch._foreach_mul_(values, 2.0)
        else:
            for value in values:
                value.mul_(2.0)
        return weights.keys()

    engine.set_weights(partial(fill, foreach=True))
    other.set_weights(partial(fill, foreach=False))
    assert loss_of(engine) == loss_of(other) != before
    assert steps(engine, 1) == steps(other, 1)


def test_no_copy_is_stale_after_a_skipped_update(config):
    engine = make_engine(config)
    steps(engine, 1)
    expected = loss_of(engine)
    for parameter in engine.model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    with torch.no_grad():
        assert not adamw.step_or_skip(torch.tensor(True), engine._optimizer, skip=torch.tensor(True))
    assert loss_of(engine) == expected
    engine.model.zero_grad(set_to_none=True)
    with _Casts([local(p.detach()) for p in engine.model.parameters()]) as casts:
        steps(engine, 1)
    assert casts.count == 0


def test_evaluations_change_no_step(config):
    engine, expected = make_engine(config), steps(make_engine(config))
    found = []
    for _ in range(STEPS):
        loss_of(engine)
        found += steps(engine, 1)
        loss_of(engine)
    assert found == expected


WRITES = {
    "distributed": lambda parameter: parameter.mul_(2.0),
    "detached": lambda parameter: parameter.detach().mul_(2.0),
    "local": lambda parameter: local(parameter).mul_(2.0),
    "assigned": lambda parameter: assign(parameter, 2.0 * full_tensor(parameter)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_refresh_makes_the_copies_of_written_weights_alone(config, write):
    engine = make_engine(config)
    steps(engine, 1)
    first, second, *_ = adamw_copies(engine)
    with torch.no_grad():
        WRITES[write](first.parameter)
        second.shard.zero_()
    refresh_weight_copies(engine.model)
    assert torch.equal(first.shard, local(first.parameter.detach()).bfloat16())
    assert not second.shard.any()


def test_a_model_that_has_run_gets_no_copies(config):
    engine = make_engine(config)
    loss_of(engine)
    with pytest.raises(AssertionError, match="the model has run before its optimizer was built"):
        adamw.build_optimizer(engine.model, load_run_config(config, []).optimizer, no_decay=())
