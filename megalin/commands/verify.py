"""`megalin verify`: compares a model on a mesh with the same model in one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

from megalin.commands.base import Command, model_from
from megalin.config import parse
from megalin.errors import ConfigError
from megalin.launch import launched
from megalin.model.config import AnyModelConfig
from megalin.parallel.async_tensor_parallel import TPOverlapName
from megalin.parallel.context_parallel import ExchangeName
from megalin.parallel.mesh import ParallelConfig, check_device, check_world_size
from megalin.parallel.pipeline_parallel import PPTransferName, ScheduleName
from megalin.parallel.process_group import compute_device, process_group
from megalin.parallel.ranks import run_ranks
from megalin.verify.case import Case, make_case
from megalin.verify.grid import GridMesh, layouts, print_grid, run_grid
from megalin.verify.run import print_faults, print_rows, self_test, verify

_SINGLE_MESH_ARGUMENTS = (
    *("tp", "cp", "cp_exchange", "pp", "pp_schedule", "pp_stages_per_rank", "pp_transfer", "dp", "shard", "zero"),
    *("sequence_parallel", "tp_overlap", "self_test"),
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a preset or a config file")
    parser.add_argument("overrides", nargs="*", metavar="model.key=value", help="changes to the model")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks (1)")
    parser.add_argument(
        "--cp-exchange", choices=get_args(ExchangeName), default="auto", help="method of the state exchange (auto)"
    )
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel ranks (1)")
    parser.add_argument(
        "--pp-schedule", choices=get_args(ScheduleName), default="1f1b", help="pipeline schedule (1f1b)"
    )
    parser.add_argument("--pp-stages-per-rank", type=int, help="stages per rank (1, or 2 for interleaved)")
    parser.add_argument(
        "--pp-transfer",
        choices=get_args(PPTransferName),
        default="auto",
        help="transfer between pipeline stages (auto)",
    )
    parser.add_argument("--dp", type=int, default=1, help="data-parallel groups: they read different samples (1)")
    parser.add_argument("--shard", type=int, help="ranks of the data axis that weights are sharded over (all)")
    parser.add_argument("--zero", type=int, choices=range(4), help="ZeRO stage (3; with --pp 1)")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard activations in the tp group")
    parser.add_argument(
        "--tp-overlap",
        choices=get_args(TPOverlapName),
        default="auto",
        help="overlap of matmuls with the communication of --sequence-parallel (auto)",
    )
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float64")
    parser.add_argument("--length", type=int, help="tokens per sequence (a few chunks and a remainder)")
    parser.add_argument("--full", action="store_true", help="verify the model at full size, not shrunk")
    parser.add_argument(
        "--self-test", action="store_true", help="plant faults; each must be found (tp, dp >= 2, cp >= 3 or pp >= 2)"
    )
    parser.add_argument("--grid", action="store_true", help="every mesh with axes of 1 to 4 ranks, --world at most")
    parser.add_argument("--world", type=int, help="most ranks of a mesh of --grid (4, or those of the launcher)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.grid:
        return _run_grid(arguments)
    if arguments.world is not None:
        raise ConfigError("--world applies to --grid only; add --grid, or remove --world")
    case, started = _case(arguments), launched().world_size
    if started not in (1, case.world_size):
        raise ConfigError(
            f"--pp {case.parallel.pp} x --tp {case.parallel.tp} x --cp {case.parallel.cp} x --dp {case.data_size} "
            f"needs {case.world_size} ranks, but {started} were started; start {case.world_size}, or "
            "run verify without a launcher and it starts them"
        )
    compare: Callable[[Case], list[Any]] = self_test if arguments.self_test else verify
    if started == 1 and case.world_size > 1:
        results = _on_new_ranks(compare, case)
    else:
        with process_group(compute_device()):
            results = compare(case)
    if not results:  # only rank 0 has results
        return 0
    printed = print_faults if arguments.self_test else print_rows
    return 0 if printed(case, results, as_json=arguments.json) else 1


def _on_new_ranks(compare: Callable[[Case], list[Any]], case: Case) -> list[Any]:
    """Runs the comparison on ranks that it starts on this machine's CPU."""
    check_device(case.parallel, "cpu")
    results: list[Any] = run_ranks(case.world_size, compare, case, timeout=None, preload=[verify.__module__])[0]
    return results


def _run_grid(arguments: argparse.Namespace) -> int:
    """Verifies every mesh of at most --world ranks; under a launcher, every mesh of as many ranks as it started."""
    defaults = argparse.ArgumentParser()
    _add_arguments(defaults)
    for name in _SINGLE_MESH_ARGUMENTS:
        if getattr(arguments, name) != defaults.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} sets one mesh, but --grid runs all of them; remove one of the two")
    started, world_size = launched().world_size, 4 if arguments.world is None else arguments.world
    if world_size < 1:
        raise ConfigError(f"--world {world_size}: a mesh has at least one rank")
    if started > 1 and arguments.world not in (None, started):
        raise ConfigError(f"--world {world_size}, but {started} ranks were started; remove --world")
    model = model_from(arguments.model, arguments.overrides)

    def make(layout: GridMesh) -> Case:
        return _make_case(arguments, model, *layout)

    if started == 1:
        results = run_grid(layouts(world_size), make, lambda case: _on_new_ranks(verify, case), new_ranks=True)
        return 0 if print_grid(results, as_json=arguments.json) else 1
    meshes = [layout for layout in layouts(started) if layout.world_size == started]
    if not meshes:
        raise ConfigError(
            f"--grid: no mesh with axes of 1 to 4 ranks has the {started} ranks that were started; start 4, 6 or 8"
        )
    with process_group(compute_device()):
        results = run_grid(meshes, make, verify, new_ranks=False)
        if launched().rank == 0:
            return 0 if print_grid(results, as_json=arguments.json) else 1
        for _ in results:
            continue
    return 0


def _case(arguments: argparse.Namespace) -> Case:
    tp, cp, pp, dp = arguments.tp, arguments.cp, arguments.pp, arguments.dp
    if arguments.self_test and pp == 1 and cp < 3 and (min(tp, dp) < 2 or cp == 2):
        raise ConfigError(
            f"--self-test with --tp {tp} --cp {cp} --dp {dp} cannot detect the planted faults; use --tp 2 --dp 2, "
            "--cp 3 or --pp 2"
        )
    if min(tp, cp, pp, dp) < 1:
        raise ConfigError(f"--pp {pp} --tp {tp} --cp {cp} --dp {dp}: an axis has at least one rank")
    axes = {"tp": tp, "cp": cp, "sequence_parallel": arguments.sequence_parallel, "shard": arguments.shard}
    axes |= {"cp_exchange": arguments.cp_exchange, "pp": pp, "pp_schedule": arguments.pp_schedule}
    axes |= {"pp_transfer": arguments.pp_transfer, "tp_overlap": arguments.tp_overlap, "zero": arguments.zero}
    least = 2 if arguments.pp_schedule == "interleaved" else 1
    axes["pp_stages_per_rank"] = least if arguments.pp_stages_per_rank is None else arguments.pp_stages_per_rank
    parallel = parse(ParallelConfig, axes, "command line")
    check_world_size(parallel, tp * cp * pp * dp)
    return _make_case(arguments, model_from(arguments.model, arguments.overrides), parallel, dp)


def _make_case(arguments: argparse.Namespace, model: AnyModelConfig, parallel: ParallelConfig, dp: int) -> Case:
    return make_case(
        model,
        parallel,
        data_size=dp,
        dtype=arguments.dtype,
        full=arguments.full,
        length=arguments.length,
        recompute=arguments.recompute,
    )


COMMAND = Command("compare a training step on a mesh with the same step in one process", _add_arguments, _run)
