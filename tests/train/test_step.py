"""One optimizer step: equal loss, gradient and weights on every layout of its samples; precision; non-finite values."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megalin.config import parse
from megalin.data.batch import Batch, take_samples
from megalin.errors import NumericError
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.ops.dispatch.backend import VARIABLE, used
from megalin.optim.adamw import build_optimizer
from megalin.optim.config import OptimizerConfig
from megalin.parallel import collectives
from megalin.parallel.config import ParallelConfig
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor, local
from megalin.train.build import build_model
from megalin.train.step import PendingStep, accumulate_gradients, apply_gradients, train_step
from tests.model_runs import CPU, model_table
from tests.numerics import Tensors, assert_close
from tests.ranks import RankFailedError, run_ranks

MODEL = parse(ModelConfig, model_table(), "test")
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.05)
SAMPLES, LENGTH = 12, 24
Arrays = dict[str, Any]


class Layout(NamedTuple):
    """Distribution of the samples of a step over ranks and micro-batches."""

    name: str
    micro_batch_size: int
    tp: int = 1
    sequence_parallel: bool = False
    shard: int | None = None
    recompute: bool = False


LAYOUTS = {
    1: [
        Layout("single", 12),
        Layout("accumulate_3", 4),
        Layout("accumulate_12", 1),
        Layout("recompute", 4, 1, False, None, True),
    ],
    2: [Layout("dp2", 3), Layout("dp2_replicated", 6, shard=1), Layout("tp2", 12, 2), Layout("tp2_sp", 4, 2, True)],
    3: [Layout("dp3", 2), Layout("dp3_replicated", 4, shard=1)],
    4: [
        Layout("dp4", 1),
        Layout("dp4_rank_without_label", 3),
        Layout("dp4_hybrid", 1, shard=2),
        Layout("tp2_dp2", 3, 2),
        Layout("tp2_dp2_sp_replicated", 6, 2, True, 1, True),
        Layout("tp4", 6, 4),
        Layout("tp4_sp", 12, 4, True),
    ],
}
SLOW = ("accumulate_12", "dp2", "tp2", "dp3_replicated", "dp4", "tp2_dp2", "tp4", "tp4_sp")


def make_batch() -> Batch:
    """Packed documents; samples have different numbers of labels, the last three (all of a rank's) none."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, MODEL.vocab_size, (SAMPLES, LENGTH + 1), generator=generator)
    documents = (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.08).cumsum(1, dtype=torch.int32)
    labels = ids[:, 1:].clone()
    ignored = torch.rand(SAMPLES, LENGTH, generator=generator) < torch.linspace(0.0, 0.8, SAMPLES)[:, None]
    labels[ignored] = IGNORED_LABEL
    labels[-3:] = IGNORED_LABEL
    return Batch(ids[:, :-1].contiguous(), labels, documents, torch.arange(SAMPLES))


def micro_batches(batch: Batch, mesh: Mesh, size: int) -> list[Batch]:
    """This rank's micro-batches, in the loader's order."""
    global_size = size * mesh.data.size
    return [
        take_samples(batch, slice(first, first + size)) for first in range(mesh.data.rank * size, SAMPLES, global_size)
    ]


def build(mesh: Mesh, *, dtype: torch.dtype, recompute: bool = False, **options: Any) -> LanguageModel:
    return build_model(MODEL, mesh, compute_dtype=dtype, recompute=recompute, compile_blocks=False, seed=0, **options)


def full(model: LanguageModel, what: str) -> Tensors:
    """Full weights or full gradients, by name."""
    pairs = ((name, p if what == "weight" else p.grad) for name, p in model.named_parameters())
    return {f"{what}:{name}": full_tensor(tensor.detach()).clone() for name, tensor in pairs if tensor is not None}


def step_on(layout: Layout, dtype: torch.dtype) -> Tensors:
    """Loss, gradient and new weights of one step on the layout's mesh."""
    parallel = ParallelConfig(tp=layout.tp, sequence_parallel=layout.sequence_parallel, shard=layout.shard)
    mesh = Mesh(parallel, CPU)
    batches = micro_batches(make_batch(), mesh, layout.micro_batch_size)
    model = build(mesh, dtype=dtype, recompute=layout.recompute)
    accumulate_gradients(model, batches, mesh)
    outcome = full(model, "gradient")
    model.zero_grad(set_to_none=True)
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=())
    result = train_step(model, optimizer, batches, mesh, max_grad_norm=OPTIMIZER.max_grad_norm, step=1).wait()
    scalars = {"loss": result.loss, "grad_norm": result.grad_norm, "label_tokens": float(result.label_tokens)}
    outcome |= {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
    return outcome | full(model, "weight")


def steps_on(layouts: list[Layout]) -> dict[str, Arrays]:
    return {layout.name: as_arrays(step_on(layout, torch.float64)) for layout in layouts}


def as_arrays(tensors: Tensors) -> Arrays:
    """Converts tensors to arrays, because the memory of tensors from a rank ends with its process."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def as_tensors(arrays: Arrays) -> Tensors:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


def truth() -> Tensors:
    """The same step by plain autograd, clipping and AdamW on plain tensors."""
    model = LanguageModel(MODEL).to(torch.float64)
    model.to_empty(device="cpu")
    init_weights(model, 0)
    batch = make_batch()
    losses = model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids).token_losses
    assert losses is not None
    count = int((batch.labels >= 0).sum())
    loss = losses.sum() / count
    loss.backward()
    outcome = {"loss": loss.detach(), "label_tokens": torch.tensor(float(count))} | full(model, "gradient")
    outcome["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1, foreach=False).step()
    return outcome | full(model, "weight")


@pytest.fixture(scope="module")
def results(with_slow: bool) -> dict[str, list[Tensors]]:
    """Outcomes on each rank, by layout."""
    by_layout: dict[str, list[Tensors]] = {}
    for world_size, every_layout in LAYOUTS.items():
        layouts = [layout for layout in every_layout if with_slow or layout.name not in SLOW]
        ranks = run_ranks(world_size, steps_on, layouts)
        by_layout |= {layout.name: [as_tensors(rank[layout.name]) for rank in ranks] for layout in layouts}
    return by_layout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(layout.name, marks=[pytest.mark.slow] * (layout.name in SLOW))
        for layouts in LAYOUTS.values()
        for layout in layouts
    ],
)
def test_step_does_not_depend_on_how_its_samples_are_spread(results, name):
    expected = truth()
    for outcome in results[name]:
        assert_close(outcome, expected, 1e-10)


def test_recomputed_activations_give_the_same_bits(results):
    kept, recomputed = results["accumulate_3"][0], results["recompute"][0]
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def _fused_step(layout: Layout) -> Arrays:
    import tests.interpreter  # noqa: F401

    os.environ[VARIABLE] = "linear_cross_entropy=triton"
    outcome = step_on(layout, torch.float32)
    assert used()["linear_cross_entropy"].backend == "triton"
    return as_arrays(outcome)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, Layout("accumulate_2", 6)),
        (2, Layout("tp2_sp", 4, 2, True)),
        pytest.param(4, Layout("tp2_dp2_sp", 3, 2, True), marks=pytest.mark.slow),
    ],
)
def test_the_fused_loss_gives_the_same_gradients_on_a_mesh(world_size, layout):
    expected = {name: tensor for name, tensor in truth().items() if not name.startswith("weight:")}
    for outcome in map(as_tensors, run_ranks(world_size, _fused_step, layout)):
        assert_close({name: outcome[name] for name in expected}, expected, 2e-5)


def _step_without_labels() -> dict[str, Any]:
    mesh = Mesh(ParallelConfig(), CPU)
    batch = make_batch()
    batches = micro_batches(batch._replace(labels=torch.full_like(batch.labels, IGNORED_LABEL)), mesh, 3)
    model = build(mesh, dtype=torch.float32)
    before = full(model, "weight")
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=())
    result = train_step(model, optimizer, batches, mesh, max_grad_norm=1.0, step=1).wait()
    assert_close(full(model, "weight"), {name: weight * (1 - 1e-4) for name, weight in before.items()}, 1e-6)
    return {name: value for name, value in result._asdict().items() if name != "seconds"}


@patch.object(collectives, "SYNCHRONOUS_DEVICES", frozenset())  # as on a GPU
def _kinds_of_result() -> list[str]:
    mesh = Mesh(ParallelConfig(), CPU)
    model = build(mesh, dtype=torch.float32)
    return [type(value).__name__ for value in accumulate_gradients(model, micro_batches(make_batch(), mesh, 3), mesh)]


def test_no_collective_of_the_data_axis_is_pending_after_the_gradients():
    assert run_ranks(2, _kinds_of_result) == [["Tensor", "Tensor"]] * 2


def test_step_without_any_label_only_decays_the_weights():
    assert run_ranks(2, _step_without_labels)[1] == {
        "loss": 0.0,
        "grad_norm": 0.0,
        "label_tokens": 0,
        "terms": (0.0,),
        "scaling": None,
        "spike": None,
        "own_seconds": 0.0,
    }


def _bf16_gradients(micro_batch_size: int) -> Arrays:
    mesh = Mesh(ParallelConfig(), CPU)
    model = build(mesh, dtype=torch.bfloat16)
    accumulate_gradients(model, micro_batches(make_batch(), mesh, micro_batch_size), mesh)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    return as_arrays(full(model, "gradient"))


def bf16_gradients_by_sample() -> Tensors:
    """The fp64 sum of the samples' bf16 gradients, independent of accumulation and reduction."""
    model = LanguageModel(MODEL)
    in_fp32 = {parameter for module in model.full_precision_modules() for parameter in module.parameters()}
    for parameter in set(model.parameters()) - in_fp32:
        parameter.data = parameter.data.to(torch.bfloat16)
    model.to_empty(device="cpu")
    init_weights(model, 0)
    batch = make_batch()
    total: Tensors = {}
    for sample in range(SAMPLES):
        one = take_samples(batch, slice(sample, sample + 1))
        losses = model(one.tokens, labels=one.labels, document_ids=one.document_ids).token_losses
        assert losses is not None
        (losses.sum() / (batch.labels >= 0).sum()).backward()
        for name, gradient in full(model, "gradient").items():
            total[name] = total.get(name, torch.zeros(())) + gradient.double()
        model.zero_grad(set_to_none=True)
    return total


def test_bf16_gradients_are_accumulated_and_reduced_in_fp32():
    expected = bf16_gradients_by_sample()
    for gradients in run_ranks(2, _bf16_gradients, 1):
        assert_close(as_tensors(gradients), expected, 1e-5)


def _small_update() -> tuple[float, float]:
    mesh = Mesh(ParallelConfig(), CPU)
    model = build(mesh, dtype=torch.bfloat16)
    before = full(model, "weight")["weight:embedding.weight"]
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-6, weight_decay=0.0), no_decay=())
    train_step(model, optimizer, micro_batches(make_batch(), mesh, 4), mesh, max_grad_norm=None, step=1).wait()
    used = make_batch().tokens.unique()
    moved = (full(model, "weight")["weight:embedding.weight"] - before)[used].abs()
    assert optimizer.state[next(model.parameters())]["exp_avg"].dtype == torch.float32
    return moved.median().item(), moved.max().item()


def test_bf16_training_moves_weights_by_a_millionth():
    median, largest = run_ranks(1, _small_update)[0]
    assert median == pytest.approx(1e-6, rel=0.05)
    assert largest < 1.1e-6


def _poisoned_step(parallel: ParallelConfig, what: str, value: float, name: str) -> str:
    """Sets one element that only rank 1 holds to `value`; returns the message of the resulting error."""
    mesh = Mesh(parallel, CPU)
    model = build(mesh, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    rank = torch.distributed.get_rank()
    if what == "weight" and rank == 1:
        with torch.no_grad():
            local(parameters[name]).view(-1)[0] = value
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=())
    before = [local(parameter).detach().clone() for parameter in model.parameters()]
    losses, counts = accumulate_gradients(model, micro_batches(make_batch(), mesh, 3), mesh)
    if what == "gradient" and rank == 1:
        _poison(parameters[name].grad, value)
    with pytest.raises(NumericError) as raised:
        apply_gradients(model, optimizer, losses, counts, max_grad_norm=1.0, step=7).wait()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(0.5), local(parameter).detach().nan_to_num(0.5))
    return str(raised.value)


def _poison(gradient: Tensor | None, value: float) -> None:
    assert gradient is not None
    local(gradient).view(-1)[-1] = value


def _poisoned_steps(parallel: ParallelConfig) -> list[str]:
    return [_poisoned_step(parallel, *what) for what in POISONED]


POISONED = [
    ("weight", math.nan, "blocks.1.sublayers.0.mixer.out.weight"),
    ("gradient", math.inf, "blocks.0.sublayers.1.mixer.down.weight"),
    ("gradient", math.nan, "blocks.0.sublayers.1.mixer.down.weight"),
]


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig()], ids=["tp2", "dp2"])
def test_what_is_not_finite_on_one_rank_stops_every_rank_and_is_named(parallel):
    messages, others = run_ranks(2, _poisoned_steps, parallel)
    assert messages == others
    for message, (what, _, name) in zip(messages, POISONED, strict=True):
        assert f"first in rank 1: {name} ({what})." in message
        assert "No weight was changed and nothing was saved" in message
    assert messages[0].startswith("step 7: loss nan, gradient norm nan is not finite")
    assert "gradient norm inf is not finite" in messages[1]
    assert "gradient norm nan is not finite" in messages[2]


def _steps_after_one_that_is_not_finite() -> str:
    """Launches three steps, the second not finite; only the first may change weights. Returns the error."""
    mesh = Mesh(ParallelConfig(), CPU)
    model = build(mesh, dtype=torch.float32)
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=())

    def start(number: int) -> PendingStep:
        return train_step(model, optimizer, micro_batches(make_batch(), mesh, 3), mesh, max_grad_norm=1.0, step=number)

    def state() -> list[Tensor]:
        moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
        return [local(tensor).clone() for tensor in [*model.parameters(), *moments]]

    first, before = start(1), state()
    weight = next(model.parameters())
    hook = weight.register_post_accumulate_grad_hook(lambda p: _poison(p.grad, math.nan))
    second = start(2)
    hook.remove()
    third = start(3)
    assert first.wait().loss > third.wait().loss > 0
    assert all(map(torch.equal, state(), before))
    with pytest.raises(NumericError) as raised:
        second.wait()
    start(4).wait()  # after the error was raised
    assert not torch.equal(state()[0], before[0])
    return str(raised.value)


def test_no_step_started_after_one_that_is_not_finite_changes_anything():
    for message in run_ranks(2, _steps_after_one_that_is_not_finite):
        assert message.startswith("step 2: loss")
        assert "gradient norm nan is not finite; first in rank 0: embedding.weight (gradient)" in message


def test_loss_that_is_not_finite_without_a_parameter_is_an_error():
    with pytest.raises(RankFailedError, match=r"step 3: loss nan.*first in no parameter: the loss itself"):
        run_ranks(1, _apply_nan_loss)


def _apply_nan_loss() -> None:
    mesh = Mesh(ParallelConfig(), CPU)
    model = build(mesh, dtype=torch.float32)
    _, counts = accumulate_gradients(model, micro_batches(make_batch(), mesh, 3), mesh)
    losses = torch.tensor([float("nan")], dtype=torch.float64)
    apply_gradients(model, build_optimizer(model, OPTIMIZER, ()), losses, counts, max_grad_norm=1.0, step=3).wait()
