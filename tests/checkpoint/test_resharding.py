"""Weights and moments saved on one mesh and loaded on others, equal to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.tensors import training_tensors
from tests.checkpoint.sharded_model import Layout, build, full_tensors, load_fresh, save_trained, step
from tests.ranks import run_ranks

_TARGETS = [Layout(1, 1), Layout(1, 4), Layout(1, 3), Layout(2, 2, shard=1)]
_MORE_TARGETS = [*_TARGETS, Layout(1, 2), Layout(2, 1), Layout(4, 1), Layout(2, 2)]


def _assert_equal(saved: dict[str, numpy.ndarray], loaded: dict[str, numpy.ndarray]) -> None:
    assert saved.keys() == loaded.keys()
    for name, array in saved.items():
        assert array.dtype == loaded[name].dtype, name
        assert numpy.array_equal(array, loaded[name]), name


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (Layout(2, 2), _TARGETS),
        *(
            pytest.param(source, _MORE_TARGETS, marks=pytest.mark.slow)
            for source in (Layout(2, 2), Layout(1, 3), Layout(2, 1), Layout(2, 2, shard=1))
        ),
    ],
)
def test_loads_bit_equal_on_other_meshes(tmp_path: Path, source: Layout, targets: list[Layout]) -> None:
    saved = run_ranks(source.world_size, save_trained, tmp_path, source)[0]
    assert "optim.state.blocks.0.fused.exp_avg_sq" in saved
    assert "head.weight" not in saved
    assert saved["optim.state.embedding.weight.step"] == 2.0
    for target in targets:
        if target == source:
            continue
        for loaded in run_ranks(target.world_size, load_fresh, tmp_path, target):
            _assert_equal(saved, loaded)


@pytest.mark.parametrize(("source", "target"), [((2, 2), (1, 3)), ((1, 3), (2, 2)), ((2, 2), (2, 1))])
def test_rows_cut_by_both_axes_unevenly(tmp_path: Path, source: tuple[int, int], target: tuple[int, int]) -> None:
    source_layout, target_layout = Layout(*source, rows=6), Layout(*target, rows=6)
    saved = run_ranks(source_layout.world_size, save_trained, tmp_path, source_layout)[0]
    _assert_equal(saved, run_ranks(target_layout.world_size, load_fresh, tmp_path, target_layout)[0])


def test_plain_tensors_without_a_process_group(tmp_path: Path) -> None:
    saved = run_ranks(4, save_trained, tmp_path, Layout(2, 2))[0]
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    tensors = {name: torch.full(array.shape, torch.nan) for name, array in saved.items() if name[:6] != "optim."}
    load(checkpoint, tensors, ignore=("optim.",))
    _assert_equal({name: saved[name] for name in tensors}, full_tensors(tensors))


def _continue(root: Path, layout: Layout, resume: bool) -> dict[str, numpy.ndarray]:
    model, optimizer = build(layout, seed=1)
    if resume:
        checkpoint = newest(root)
        assert checkpoint is not None
        load(checkpoint, training_tensors(model, optimizer))
    else:
        step(model, optimizer)
        step(model, optimizer)
    step(model, optimizer)
    return full_tensors(training_tensors(model, optimizer))


def test_the_step_after_loading_is_the_step_that_would_have_been(tmp_path: Path) -> None:
    layout = Layout(2, 2)
    run_ranks(4, save_trained, tmp_path, layout)
    _assert_equal(
        run_ranks(4, _continue, tmp_path, layout, False)[0], run_ranks(4, _continue, tmp_path, layout, True)[0]
    )


def test_each_replica_is_stored_once(tmp_path: Path) -> None:
    saved = run_ranks(4, save_trained, tmp_path, Layout(2, 2, shard=1))[0]
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    files = checkpoint.path.glob("*.safetensors")
    assert sum(file.stat().st_size for file in files) < 1.0 * sum(a.nbytes for a in saved.values()) + 4 * 8192
    assert len(checkpoint.index().tensors["blocks.0.norm"].chunks) == 1
