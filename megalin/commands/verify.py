"""`megalin verify`: compares a model on a mesh with the same model in one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from megalin.commands.base import read_values
from megalin.config import Config, parse
from megalin.errors import ConfigError
from megalin.launch import launched
from megalin.model.config import ModelField
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import check_device, check_world_size
from megalin.parallel.process_group import compute_device, process_group
from megalin.parallel.ranks import run_ranks
from megalin.train.config_file import own_mixers
from megalin.verify.case import Case, check_full_size, make_case
from megalin.verify.grid import GridMesh, layouts, print_grid, run_grid
from megalin.verify.run import print_faults, print_rows, self_test, verify


class _TrainConfig(Config):
    recompute: bool = False


class _VerifyConfig(Config):
    """The keys of the run config that a comparison reads."""

    model: ModelField
    parallel: ParallelConfig = ParallelConfig()
    train: _TrainConfig = _TrainConfig()


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    started, world_size = launched().world_size, arguments.world_size
    if world_size is not None and world_size < 1:
        raise ConfigError(f"--world-size {world_size}: a mesh has at least one rank")
    if world_size is not None and started not in (1, world_size):
        raise ConfigError(f"--world-size {world_size}, but {started} ranks were started; remove --world-size")
    config = _read_config(arguments)
    make = partial(_make_case, arguments, config)
    if arguments.grid:
        return _run_grid(arguments, started, lambda layout: make(layout.parallel, data_size=layout.data_size))
    parallel = config.parallel
    num_shards = parallel.tp * parallel.cp * parallel.pp
    world_size = world_size or (num_shards if started == 1 else started)
    check_world_size(parallel, world_size)
    case = make(parallel, data_size=world_size // num_shards)
    if arguments.self_test:
        _check_self_test(case)
    compare: Callable[[Case], list[Any]] = self_test if arguments.self_test else verify
    if started == 1 and world_size > 1:
        results = _on_new_ranks(compare, case)
    else:
        with process_group(compute_device()):
            results = compare(case)
    if not results:  # only rank 0 has results
        return 0
    printed = print_faults if arguments.self_test else print_rows
    return 0 if printed(case, results, as_json=arguments.json) else 1


def _read_config(arguments: argparse.Namespace) -> _VerifyConfig:
    values = read_values(arguments.config, arguments.overrides, keys=("model.*", "parallel.*", "train.recompute"))
    if arguments.grid and any(override.startswith("parallel.") for override in arguments.overrides):
        raise ConfigError("parallel.* sets one mesh, but --grid runs all of them; remove one of the two")
    read = {name: table for name, table in values.items() if name in _VerifyConfig.model_fields}
    if isinstance(train := read.get("train"), dict):
        read["train"] = {name: value for name, value in train.items() if name in _TrainConfig.model_fields}
    return parse(_VerifyConfig, read, arguments.config, context=own_mixers(arguments.config, read))


def _make_case(
    arguments: argparse.Namespace, config: _VerifyConfig, parallel: ParallelConfig, *, data_size: int
) -> Case:
    """Builds the comparison. Raises ConfigError as `check_full_size` and `make_case`."""
    check_full_size(config.model, parallel, arguments.dtype)
    return make_case(
        config.model,
        parallel,
        data_size=data_size,
        dtype=arguments.dtype,
        full=arguments.full,
        length=arguments.length,
        recompute=config.train.recompute,
    )


def _check_self_test(case: Case) -> None:
    """Raises ConfigError for a mesh that cannot show the planted faults."""
    tp, cp, dp = case.parallel.tp, case.parallel.cp, case.data_size
    if case.parallel.pp == 1 and cp < 3 and (min(tp, dp) < 2 or cp == 2):
        raise ConfigError(
            f"--self-test with tp {tp} x cp {cp} x dp {dp} cannot detect the planted faults; use parallel.tp=2 "
            "--world-size 4, parallel.cp=3 or parallel.pp=2"
        )


def _on_new_ranks(compare: Callable[[Case], list[Any]], case: Case) -> list[Any]:
    """Runs the comparison on ranks that it starts on this machine's CPU."""
    check_device(case.parallel, "cpu")
    results: list[Any] = run_ranks(case.world_size, compare, case, timeout=None, preload=[verify.__module__])[0]
    return results


def _run_grid(arguments: argparse.Namespace, started: int, make: Callable[[GridMesh], Case]) -> int:
    """Verifies every mesh of at most --world-size ranks; under a launcher, every mesh of exactly its ranks."""
    if started == 1:
        meshes = layouts(arguments.world_size or 4)
        results = run_grid(meshes, make, lambda case: _on_new_ranks(verify, case), new_ranks=True)
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
