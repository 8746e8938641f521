"""`train.reduction = "tree"`: the gradient of the default reduction, and the same bits on every number of ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from compare_world_sizes import PartOfRun, TrainedRun, compare, read_metrics, train_part

from megalin.errors import ConfigError
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.train.config import load_run_config
from megalin.train.launch_checks import check_launch
from megalin.train.step import accumulate_gradients
from megalin.train.tree_gradients import accumulate_by_tree, check_tree_threads
from tests.model_runs import CPU, DROPOUT, write_config
from tests.numerics import assert_close
from tests.ranks import run_ranks
from tests.train.test_step import as_arrays, as_tensors, build, full, make_batch, micro_batches

TREE = {"reduction": "tree", "global_batch_size": 8, "micro_batch_size": 1}
STEPS = 3
RUNS = {"fp32": [], "bf16": ["train.dtype=bfloat16"]}


def message(path: Path, *overrides: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as raised:
        check_launch(load_run_config(path, overrides), world_size)
    return str(raised.value)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"), train=TREE, parallel={"zero": 1})


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["parallel.tp=2"], 2, "with parallel.tp = 2, whose ranks add parts of one micro-batch; use tp = 1"),
        (["parallel.cp=2"], 2, "with parallel.cp = 2, whose ranks add"),
        (["parallel.pp=2"], 2, "with parallel.pp = 2, whose ranks add"),
        (['train.engine="deepspeed"'], 1, 'with train.engine = "deepspeed", which reduces gradients itself'),
        (["parallel.shard=2"], 4, "with parallel.shard = 2, a division of the data axis that not every number of"),
        (["parallel.zero=3"], 2, "with parallel.zero = 3, but the gradient of a micro-batch is added whole"),
        (["train.micro_batch_size=2", "train.global_batch_size=12"], 1, "with 6 micro-batches a step"),
        (["train.cuda_graphs=true"], 1, 'use cuda_graphs = false, or reduction = "collective"'),
        ([], 16, "with 16 ranks, which do not divide the 8 micro-batches of a step in a tree; start 1, 2, 4, 8 ranks"),
        ([], 3, "with 3 ranks, which do not divide the 8 micro-batches of a step in a tree; start 1, 2, 4 ranks"),
    ],
)
def test_a_run_that_is_no_tree_is_refused_before_its_first_collective(path, overrides, world_size, expected):
    found = message(path, *overrides, world_size=world_size)
    assert expected in found
    assert 'train.reduction = "tree"' in found


def test_the_default_stage_is_refused_and_named(tmp_path):
    config = write_config(tmp_path, train=TREE)
    assert "with parallel.zero left out, which is stage 3, but" in message(config)


def test_a_global_batch_of_the_nearest_powers_of_two_is_the_remedy(path):
    found = message(path, "train.micro_batch_size=2", "train.global_batch_size=12")
    assert "use global_batch_size = 8 or 16, or train.reduction = " in found


def test_several_cpu_threads_are_refused():
    check_tree_threads(torch.device("cuda"))
    check_tree_threads(CPU)  # tests compute in one
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match=r"with 2 CPU threads a rank, .* set OMP_NUM_THREADS=1"):
            check_tree_threads(CPU)
    finally:
        torch.set_num_threads(1)


def _of_both_reductions() -> list[dict]:
    """Losses, counts, norm and whole gradients of a step, by the default reduction and by the tree."""
    mesh, found = Mesh(ParallelConfig(zero=1), CPU), []
    batches = micro_batches(make_batch(), mesh, 3)
    for reduces in (True, False):
        model = build(mesh, dtype=torch.float64, reduces=reduces)
        if reduces:
            losses, counts = accumulate_gradients(model, batches, mesh)
            norm = torch.stack([gradient.norm() for gradient in full(model, "gradient").values()]).norm()
        else:
            losses, counts, norm = accumulate_by_tree(model, batches, mesh)
        scalars = {"losses": losses, "counts": counts.double(), "norm": norm}
        found.append(as_arrays(scalars | full(model, "gradient")))
    return found


def test_the_tree_has_the_gradient_of_the_default_reduction():
    for expected, found in run_ranks(2, _of_both_reductions):
        first, second = as_tensors(expected), as_tensors(found)
        assert first.keys() == second.keys()
        assert_close(second, first, 1e-12)


def _parts(config: Path, calls: list[tuple[Path, list[str]]]) -> list[PartOfRun]:
    return [train_part(config, folder, overrides) for folder, overrides in calls]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TrainedRun, TrainedRun]]:
    """By dtype, a run on one rank and one of 1 -> 2 -> 4 ranks with a checkpoint at each change; the second has other
    ZeRO stages too. No width is a multiple of the elements of a CPU's instruction."""
    root = tmp_path_factory.mktemp("tree")
    config = write_config(
        root,
        model=DROPOUT | {"hidden_size": 36},
        train=TREE | {"steps": STEPS, "global_batch_size": 4},
        data={"validation": []},
        schedule={"min_lr_ratio": 0.1},
        checkpoint={"every_steps": STEPS},
    )
    digests = {(name, place): {} for name in RUNS for place in ("one", "several")}
    for number, (world_size, zero) in enumerate([(1, 1), (2, 0), (4, 1)], start=1):
        stop = number * STEPS // 3
        names = [(name, "several", stop) for name in RUNS]
        if world_size == 1:
            names += [(name, "one", STEPS) for name in RUNS]
        calls = [
            (root / name / place, [*RUNS[name], f"parallel.zero={zero}", f"train.stop_after_steps={last}"])
            for name, place, last in names
        ]
        parts = run_ranks(world_size, _parts, config, calls)[0]
        for (name, place, _), part in zip(names, parts, strict=True):
            digests[name, place] |= part.digests
    return {
        name: tuple(
            TrainedRun(read_metrics(root / name / place), digests[name, place], 0.0) for place in ("one", "several")
        )
        for name in RUNS
    }


@pytest.mark.parametrize("name", RUNS)
def test_losses_norms_and_weights_have_the_same_bits_on_any_number_of_ranks(trained, name):
    one, several = trained[name]
    found = compare(one, several)
    assert found.equal, found
    assert found.steps == STEPS
    assert found.tensors > 10
    losses = [loss for loss, _ in one.lines.values()]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert len({tuple(digests.values()) for digests in one.digests.values()}) == STEPS


def test_a_step_that_differs_is_counted(trained):
    one, _ = trained["fp32"]
    lines, digests = dict(one.lines), {step: dict(names) for step, names in one.digests.items()}
    lines[1] = (lines[1][0], lines[1][1] + 1e-7)
    lines[2] = (lines[2][0] + 1e-7, lines[2][1])
    lines[3] = (lines[3][0] + 1e-7, lines[3][1])
    digests[3] = trained["bf16"][0].digests[3]
    found = compare(one, TrainedRun(lines, digests, 0.0))
    assert not found.equal
    assert (found.steps, found.losses, found.norms, found.weights) == (STEPS, STEPS - 2, STEPS - 1, STEPS - 1)
