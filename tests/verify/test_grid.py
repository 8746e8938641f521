"""The grid of `megalin verify`: its meshes, the result of each, and meshes that fail or cannot run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalin.__main__ import main
from megalin.commands import verify
from megalin.errors import ConfigError, RankFailedError
from megalin.model.presets import load_preset
from megalin.parallel.config import ParallelConfig
from megalin.verify.case import Case, make_case
from megalin.verify.comparison import TensorError
from megalin.verify.grid import GridMesh, layouts, print_grid, run_grid
from megalin.verify.run import mesh_name
from tests.ranks import run_ranks


def names(max_ranks: int) -> list[str]:
    return [mesh_name(*layout) for layout in layouts(max_ranks)]


def test_two_ranks_have_every_axis_and_every_way_to_run_it():
    assert names(2) == [
        "one rank",
        "dp 2",
        *(f"dp 2 (zero {stage})" for stage in (0, 1, 2)),
        *("pp 2", "pp 2 (interleaved)", "pp 2 (zero_bubble)"),
        *("cp 2", "cp 2 (ring)"),
        *("tp 2", "tp 2 (sequence parallel)"),
    ]


def test_four_ranks_have_every_pair_of_axes():
    found = set(names(4))
    axes = [f"{axis} 2" for axis in ("tp", "cp", "pp", "dp")]
    assert {f"{one} x {other}" for i, one in enumerate(axes) for other in axes[i + 1 :]} <= found
    assert {"cp 3", "cp 4 (ring)", "tp 2 (sequence parallel) x cp 2", "pp 2 x dp 2 (zero 0)"} <= found


def test_sixteen_ranks_have_triples_with_cp_3_and_4():
    assert {"tp 2 x cp 3 x dp 2", "tp 2 x cp 4 x pp 2", "cp 4 x pp 2 x dp 2", "tp 2 x cp 2 x pp 2 x dp 2"} <= set(
        names(16)
    )
    assert all(layout.world_size <= 16 for layout in layouts(16))
    assert len(set(names(16))) == len(names(16))


def test_command_runs_every_mesh_and_lists_what_the_model_cannot(capsys: pytest.CaptureFixture[str]):
    """HGRN2's blocks share parameters, whose gradients a split backward loses."""
    assert main(["verify", "hgrn2-70m", "--grid", "--world-size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["axes_not_run"]) == (True, [])
    meshes = {mesh_name(*layout): mesh for layout, mesh in zip(layouts(2), found["meshes"], strict=True)}
    refused = {name: mesh["refused"] for name, mesh in meshes.items() if mesh["refused"]}
    assert list(refused) == ["pp 2 (zero_bubble)"]
    # Before torch 2.13 no model has this schedule.
    reason = 'blocks of type "hgrn2" share parameters' if torch.__version__ >= (2, 13) else "(2.13 does not)"
    assert reason in refused["pp 2 (zero_bubble)"]
    ran = [mesh for mesh in meshes.values() if not mesh["refused"]]
    assert all(mesh["passed"] and mesh["tensors"] > 20 and mesh["seconds"] > 0 for mesh in ran)
    assert all(mesh["worst"]["error"] <= 1e-12 for mesh in ran)
    assert (meshes["dp 2 (zero 1)"]["dp"], meshes["dp 2 (zero 1)"]["zero"]) == (2, 1)


CASE: dict[str, Any] = {"data_size": 1, "dtype": "float64", "full": False, "length": None, "recompute": False}


def grid(errors: dict[int, list[TensorError]]) -> Any:
    """A grid of tp 1 to 3 whose comparisons give these errors; the ranks of a tp without errors fail."""

    def make(layout: GridMesh) -> Case:
        if layout.parallel.tp == 2:
            raise ConfigError("no half of a head")
        return make_case(load_preset("tnl-70m").model, layout.parallel, **CASE | {"data_size": layout.data_size})

    def compare(case: Case) -> list[TensorError]:
        if case.parallel.tp not in errors:
            raise RankFailedError("rank 1:\nTraceback\nKeyError: 'a'")
        return errors[case.parallel.tp]

    meshes = [GridMesh(ParallelConfig(tp=tp), 1) for tp in (1, 2, 3)]
    return run_grid(meshes, make, compare, new_ranks=True)


def _grid_of_a_launcher(port: int) -> str:
    """The output of a launched rank; the grid is reduced to two meshes and one of another size."""
    launch = {
        "RANK": dist.get_rank(),
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    dist.destroy_process_group()
    os.environ |= {name: str(value) for name, value in launch.items()}
    meshes = [GridMesh(ParallelConfig(), 1), GridMesh(ParallelConfig(tp=2), 1), GridMesh(ParallelConfig(pp=2), 1)]
    verify.layouts = lambda _: meshes  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["verify", "tnl-70m", "--grid", "--json"]) == 0
    return printed.getvalue()


def test_under_a_launcher_meshes_of_its_size_run_in_one_group_and_rank_0_prints():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, other = run_ranks(2, _grid_of_a_launcher, port)
    assert [(mesh["tp"], mesh["pp"], mesh["passed"]) for mesh in json.loads(first)["meshes"]] == [
        (2, 1, True),
        (1, 2, True),
    ]
    assert other == ""


def test_a_launcher_of_ranks_that_make_no_mesh_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 5, "LOCAL_RANK": 0, "MASTER_ADDR": "h", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["verify", "tnl-70m", "--grid"]) == 2
    assert (
        "no mesh with axes of 1 to 4 ranks has the 5 ranks that were started; start 4, 6 or 8"
        in capsys.readouterr().err
    )


def test_a_grid_that_compared_nothing_has_not_passed(capsys: pytest.CaptureFixture[str]):
    assert not print_grid(iter([]), as_json=False)
    assert not print_grid((result for result in grid({1: [GOOD], 3: [GOOD]}) if result.refused), as_json=False)
    assert capsys.readouterr().out.count("FAILED: 0 of 0 meshes agree with one process") == 2


def test_a_mesh_whose_ranks_fail_is_listed_with_the_others(capsys: pytest.CaptureFixture[str]):
    assert not print_grid(grid({3: [GOOD]}), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert [(mesh["tp"], mesh["passed"], mesh["failed"]) for mesh in found["meshes"]] == [
        (1, False, "rank 1:\nTraceback\nKeyError: 'a'"),
        (2, True, None),
        (3, True, None),
    ]
    assert not print_grid(grid({3: [GOOD]}), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    *row, seconds, rank, number = lines[1].split()
    assert (row, rank, number) == (["one", "rank", "FAILED"], "rank", "1:")
    assert float(seconds) >= 0
    assert lines[3] == "KeyError: 'a'"
    assert lines[-1].startswith("FAILED: 1 of 2 meshes agree with one process, 1 refused, ")


def test_axes_of_which_no_mesh_ran_are_printed(capsys: pytest.CaptureFixture[str]):
    """Axes that were not requested, that the model cannot use, and whose ranks failed."""
    assert print_grid(grid({1: [GOOD], 3: [GOOD]}), as_json=False)
    assert capsys.readouterr().out.endswith(" s; no mesh ran with cp or pp or dp above 1\n")
    print_grid(grid({1: [GOOD]}), as_json=True)
    assert json.loads(capsys.readouterr().out)["axes_not_run"] == ["tp", "cp", "pp", "dp"]


def test_ranks_of_all_meshes_that_fail_end_the_grid_and_name_their_mesh():
    def fail(_: Case) -> list[TensorError]:
        raise RankFailedError("rank 1 died: -9")

    meshes = [GridMesh(ParallelConfig(tp=2), 1)]
    with pytest.raises(RankFailedError, match="tp 2: rank 1 died: -9"):
        list(
            run_grid(
                meshes,
                lambda _: make_case(load_preset("tnl-70m").model, meshes[0].parallel, **CASE),
                fail,
                new_ranks=False,
            )
        )


GOOD, BAD = TensorError("loss", 1e-12, 1e-10), TensorError("gradient:a", float("nan"), 1e-10)


def test_a_mesh_that_exceeds_a_bound_fails_the_grid_and_the_others_are_still_run(capsys: pytest.CaptureFixture[str]):
    assert not print_grid(grid({1: [GOOD, BAD], 3: [GOOD]}), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["one", "rank", "FAILED"],
        ["tp", "2", "refused"],
        ["tp", "3", "ok"],
    ]
    assert lines[1].endswith("gradient:a")
    assert lines[2].endswith("no half of a head")
    assert lines[4].startswith("FAILED: 1 of 2 meshes agree with one process, 1 refused, ")
    assert print_grid(grid({1: [GOOD], 3: [GOOD]}), as_json=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "--world-size", "0"], "--world-size 0: a mesh has at least one rank"),
        (["--grid", "parallel.tp=2"], "parallel.* sets one mesh, but --grid runs all of them; remove one of the two"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "tnl-70m", *arguments]) == 2
    assert message in capsys.readouterr().err
