"""`megalin verify`: a model on a mesh against one process."""

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

_OF_ONE_MESH = (
    *("tp", "cp", "cp_exchange", "pp", "pp_schedule", "pp_stages_per_rank", "pp_transfer", "dp", "shard", "zero"),
    *("sequence_parallel", "tp_overlap", "self_test"),
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a preset or a config file")
    parser.add_argument("overrides", nargs="*", metavar="model.key=value", help="changes to the model")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the tensor-parallel axis (1)")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sample's tokens (1)")
    parser.add_argument(
        "--cp-exchange", choices=get_args(ExchangeName), default="auto", help="how states reach the ranks after (auto)"
    )
    parser.add_argument("--pp", type=int, default=1, help="ranks that share the layers (1)")
    parser.add_argument(
        "--pp-schedule", choices=get_args(ScheduleName), default="1f1b", help="how micro-batches pass the stages (1f1b)"
    )
    parser.add_argument("--pp-stages-per-rank", type=int, help="stages a rank (1, or 2 for interleaved)")
    parser.add_argument(
        "--pp-transfer",
        choices=get_args(PPTransferName),
        default="auto",
        help="how stages reach their neighbours (auto)",
    )
    parser.add_argument("--dp", type=int, default=1, help="groups of ranks that read different samples (1)")
    parser.add_argument("--shard", type=int, help="ranks of the data axis that share the weights (all)")
    parser.add_argument("--zero", type=int, choices=range(4), help="ZeRO's stage (3; with --pp 1)")
    parser.add_argument("--sequence-parallel", action="store_true", help="split activations inside the tp group")
    parser.add_argument(
        "--tp-overlap",
        choices=get_args(TPOverlapName),
        default="auto",
        help="how activations reach products and leave them with --sequence-parallel (auto)",
    )
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float64")
    parser.add_argument("--length", type=int, help="tokens a row (a few chunks and a rest)")
    parser.add_argument("--full", action="store_true", help="the model as it is, not shrunk")
    parser.add_argument(
        "--self-test", action="store_true", help="plant faults; each must be seen (tp, dp >= 2, cp >= 3 or pp >= 2)"
    )
    parser.add_argument("--grid", action="store_true", help="every mesh with axes of 1 to 4 ranks, --world at most")
    parser.add_argument("--world", type=int, help="ranks of the largest mesh of --grid (4, or those of the launcher)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.grid:
        return _run_grid(arguments)
    if arguments.world is not None:
        raise ConfigError("--world is the size of --grid; add --grid, or leave it out")
    case, started = _case(arguments), launched().world_size
    if started not in (1, case.world_size):
        raise ConfigError(
            f"--pp {case.parallel.pp} x --tp {case.parallel.tp} x --cp {case.parallel.cp} x --dp {case.data_size} "
            f"needs {case.world_size} ranks, but {started} were started; start as many, or none and let verify start "
            "them"
        )
    compare: Callable[[Case], list[Any]] = self_test if arguments.self_test else verify
    if started == 1 and case.world_size > 1:
        results = _on_new_ranks(compare, case)
    else:
        with process_group(compute_device()):
            results = compare(case)
    if not results:  # they are rank 0's
        return 0
    printed = print_faults if arguments.self_test else print_rows
    return 0 if printed(case, results, as_json=arguments.json) else 1


def _on_new_ranks(compare: Callable[[Case], list[Any]], case: Case) -> list[Any]:
    """The comparison on ranks of this machine's CPU."""
    check_device(case.parallel, "cpu")
    results: list[Any] = run_ranks(case.world_size, compare, case, timeout=None, preload=[verify.__module__])[0]
    return results


def _run_grid(arguments: argparse.Namespace) -> int:
    """Every mesh of as many ranks as are asked for and of fewer; under a launcher, of as many as it started."""
    defaults = argparse.ArgumentParser()
    _add_arguments(defaults)
    for name in _OF_ONE_MESH:
        if getattr(arguments, name) != defaults.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is about one mesh, and --grid runs them all; leave one of them out")
    started, world_size = launched().world_size, 4 if arguments.world is None else arguments.world
    if world_size < 1:
        raise ConfigError(f"--world {world_size}: a mesh has at least one rank")
    if started > 1 and arguments.world not in (None, started):
        raise ConfigError(f"--world {world_size}, but {started} ranks were started; leave --world out")
    model = model_from(arguments.model, arguments.overrides)

    def make(layout: GridMesh) -> Case:
        return _make_case(arguments, model, *layout)

    if started == 1:
        results = run_grid(layouts(world_size), make, lambda case: _on_new_ranks(verify, case), new_ranks=True)
        return 0 if print_grid(results, as_json=arguments.json) else 1
    whole = [layout for layout in layouts(started) if layout.world_size == started]
    if not whole:
        raise ConfigError(f"--grid: no mesh with axes of 1 to 4 ranks has {started}, as were started; start 4, 6 or 8")
    with process_group(compute_device()):
        results = run_grid(whole, make, verify, new_ranks=False)
        if launched().rank == 0:
            return 0 if print_grid(results, as_json=arguments.json) else 1
        for _ in results:
            continue
    return 0


def _case(arguments: argparse.Namespace) -> Case:
    tp, cp, pp, dp = arguments.tp, arguments.cp, arguments.pp, arguments.dp
    if arguments.self_test and pp == 1 and cp < 3 and (min(tp, dp) < 2 or cp == 2):
        raise ConfigError(
            f"--self-test with --tp {tp} --cp {cp} --dp {dp} cannot show its faults; use --tp 2 --dp 2, --cp 3 or "
            "--pp 2"
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


COMMAND = Command("prove that a mesh gives one process's answer", _add_arguments, _run)
