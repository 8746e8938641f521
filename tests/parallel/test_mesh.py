"""The mesh: arrangement of ranks, process groups, and sizes that do not fit."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.parallel.collectives import all_gather
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh, check_world_size
from megalin.parallel.process_group import SHARED_GPUS, compute_device, process_group, refuse_shared_gpus
from tests.parallel.on_ranks import make_mesh
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        (
            {"tp": 3},
            4,
            r"parallel\.tp = 3 does not divide the number of ranks, 4; start a multiple of 3 ranks "
            r"\(torchrun --nproc-per-node\) or change parallel\.tp",
        ),
        ({"tp": 8}, 4, r"parallel\.tp = 8 does not divide the number of ranks, 4"),
        (
            {"tp": 2, "shard": 3},
            8,
            r"parallel\.shard = 3 does not divide the data axis of 4 ranks \(8 ranks / tp 2\); "
            r"use a divisor of 4, or leave it out to shard over all",
        ),
        (
            {"tp": 2, "cp": 3},
            8,
            r"parallel\.cp = 3 does not divide the data axis of 4 ranks \(8 ranks / tp 2\); "
            r"start a multiple of 6 ranks \(torchrun --nproc-per-node\) or change parallel\.cp",
        ),
        ({"shard": 4}, 2, r"parallel\.shard = 4 does not divide the data axis of 2 ranks"),
    ],
)
def test_axes_that_do_not_fit_the_world_are_refused(fields, world_size, message):
    with pytest.raises(ConfigError, match=message):
        check_world_size(ParallelConfig(**fields), world_size)


@pytest.mark.parametrize(
    ("fields", "world_size"), [({}, 1), ({"tp": 2}, 6), ({"tp": 2, "shard": 2}, 8), ({"cp": 3, "shard": 2}, 6)]
)
def test_axes_that_fit_are_accepted(fields, world_size):
    check_world_size(ParallelConfig(**fields), world_size)


@pytest.mark.parametrize(("field", "value"), [("tp", 0), ("tp", -2), ("cp", 0), ("shard", 0)])
def test_sizes_below_one_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"{field} = {value}: input should be greater than or equal to 1"):
        parse(ParallelConfig, {field: value}, "run.toml")


def _refused() -> str:
    with pytest.raises(ConfigError) as raised:
        make_mesh(3)
    return str(raised.value)


def test_every_rank_refuses_a_mesh_that_does_not_fit():
    assert len(set(run_ranks(2, _refused))) == 1


def _axes(tp: int, shard: int | None) -> tuple[dict[str, tuple[int, int, list[int]]], tuple[int, ...], bool]:
    mesh = make_mesh(tp, shard=shard)
    axes = {}
    for name, axis in (("tp", mesh.tp.axis), ("data", mesh.data)):
        members = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        members[dist.get_rank()] = 1
        group = dist.distributed_c10d._resolve_process_group(axis.group_name)
        dist.all_reduce(members, group=group)
        axes[name] = (axis.size, axis.rank, members.nonzero().flatten().tolist())
    total = mesh.sum_over_data(torch.tensor(float(dist.get_rank())))
    assert total.item() == sum(axes["data"][2])
    return axes, tuple(mesh.data_mesh.shape), mesh.is_first_rank


def test_tensor_parallel_ranks_are_neighbours():
    found = run_ranks(4, _axes, 2, None)
    assert [axes["tp"] for axes, _, _ in found] == [(2, 0, [0, 1]), (2, 1, [0, 1]), (2, 0, [2, 3]), (2, 1, [2, 3])]
    assert [axes["data"] for axes, _, _ in found] == [(2, 0, [0, 2]), (2, 0, [1, 3]), (2, 1, [0, 2]), (2, 1, [1, 3])]
    assert [first for _, _, first in found] == [True, False, False, False]
    assert all(shape == (1, 2) for _, shape, _ in found)


def _members() -> dict[str, list[int]]:
    """Global ranks on each axis of this rank, with cp 2 and tp 2."""
    mesh = Mesh(ParallelConfig(cp=2, tp=2, shard=2), torch.device("cpu"))
    members = {}
    for name, axis in (("tp", mesh.tp.axis), ("cp", mesh.cp.axis), ("samples", mesh.samples), ("data", mesh.data)):
        members[name] = all_gather(torch.tensor([dist.get_rank()]), axis, dim=0).tolist()
        assert members[name][axis.rank] == dist.get_rank()
    return members


def test_context_parallel_ranks_are_neighbours_on_the_data_axis():
    found = run_ranks(8, _members)
    assert found[0] == {"tp": [0, 1], "cp": [0, 2], "samples": [0, 4], "data": [0, 2, 4, 6]}
    assert found[7] == {"tp": [6, 7], "cp": [5, 7], "samples": [3, 7], "data": [1, 3, 5, 7]}


@pytest.mark.parametrize(("shard", "shape"), [(1, (4, 1)), (2, (2, 2)), (4, (1, 4))])
def test_sharding_groups_split_the_data_axis(shard, shape):
    found = run_ranks(4, _axes, 1, shard)
    assert [axes["data"] for axes, _, _ in found] == [(4, rank, [0, 1, 2, 3]) for rank in range(4)]
    assert all(got == shape for _, got, _ in found)


def _timeouts(axes: dict[str, int]) -> list[float]:
    """Timeout in seconds of each process group of a run, the default one's first."""
    mesh = Mesh(ParallelConfig(**axes), torch.device("cpu"))
    mesh.pp.axis_of_holders([0, mesh.pp.size - 2])
    backends = [group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map]
    return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.parametrize(("world_size", "axes"), [(4, {"tp": 2, "cp": 2}), (4, {"pp": 2, "tp": 2}), (6, {"pp": 3})])
def test_every_group_waits_as_long_as_the_default_one(world_size, axes):
    for timeouts in run_ranks(world_size, _timeouts, axes, collective_timeout=77.0):
        assert len(timeouts) > 3
        assert set(timeouts) == {77.0}


@pytest.fixture
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_launcher")
def test_without_a_launcher_there_is_one_rank():
    with process_group(compute_device()):
        assert dist.get_world_size() == 1
        mesh = Mesh(ParallelConfig(sequence_parallel=True), compute_device())
        assert (mesh.tp.size, mesh.data.size, mesh.is_first_rank) == (1, 1, True)
        assert not mesh.tp.sequence_parallel
    assert not dist.is_initialized()


def _refusal(gpus, allowed):
    os.environ[SHARED_GPUS] = allowed
    try:
        refuse_shared_gpus(gpus[dist.get_rank()])
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_share_a_gpu_are_refused_on_every_rank():
    messages = run_ranks(3, _refusal, ["a, GPU-1", "b, GPU-1", "a, GPU-1"], "0")
    assert set(messages) == {
        "ranks 0, 2 have the same GPU (a, GPU-1); start one rank a GPU, or, to try a mesh without its speed, set "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later)"
    }
    assert run_ranks(3, _refusal, ["a, GPU-1", "a, GPU-2", "b, GPU-1"], "0") == [""] * 3
    assert run_ranks(2, _refusal, ["a, GPU-1"] * 2, "1") == [""] * 2


@pytest.mark.usefixtures("_no_launcher")
def test_the_process_group_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), process_group(torch.device("cpu")):
        raise ZeroDivisionError
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"zero": 0, "shard": 2},
            "zero = 0 shards nothing, but shard = 2; use zero 1, 2 or 3, or leave one of them out",
        ),
        (
            {"zero": 3, "shard": 1},
            "zero = 3 with shard = 1, which keeps a replica on every rank; leave out shard or zero",
        ),
        (
            {"zero": 2, "pp": 2},
            "zero = 2 with pp = 2 would gather weights or reduce gradients of a stage in every micro-batch; use",
        ),
    ],
)
def test_zero_stages_that_the_other_axes_contradict_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        parse(ParallelConfig, fields, "test")


def _stages_and_shards() -> list[tuple[int, int]]:
    meshes = [
        make_mesh(1, **axes) for axes in ({}, {"zero": 0}, {"zero": 2}, {"shard": 1}, {"pp": 2}, {"cp": 2, "zero": 1})
    ]
    return [(mesh.zero, mesh.data_mesh.size(1)) for mesh in meshes]


def test_the_zero_stage_is_3_unless_nothing_is_sharded_or_stages_share_what_they_gather():
    assert run_ranks(4, _stages_and_shards)[0] == [(3, 4), (0, 1), (2, 4), (0, 1), (1, 2), (1, 4)]
