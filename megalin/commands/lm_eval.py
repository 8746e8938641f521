"""`megalin lm-eval`: tasks of the harness lm-eval on a saved run."""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from megalin.commands.base import Command, generation_mesh
from megalin.errors import ConfigError
from megalin.evaluation.results import add_results
from megalin.files import storage_errors, write_atomically
from megalin.generation import open_for_generation
from megalin.launch import launched
from megalin.model.build import check_divisions
from megalin.parallel.agreement import on_rank_zero
from megalin.parallel.mesh import Mesh, check_world_size
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.build import COMPUTE_DTYPES

SUITE = "lm-eval"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, help="a run folder")
    add("overrides", nargs="*", metavar="key=value", help="parallel.tp=2: ranks that share the weights (1)")
    add("--tasks", nargs="+", required=True, metavar="TASK", help="lm-eval's tasks or groups, or patterns")
    add("--include-path", type=Path, metavar="FOLDER", help="folder with further task files (YAML)")
    add("--no-default-tasks", action="store_true", help="know the tasks of --include-path only, which starts at once")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (the task's)")
    add("--limit", type=int, metavar="N", help="only the first N questions of each task")
    add("--gen-kwargs", metavar="K=V,...", help="generation arguments in place of the tasks'")
    add("--batch-size", type=int, default=16, help="texts that are generated together (16)")
    add("--max-length", type=int, metavar="N", help="tokens read at once (the run's data.sequence_length)")
    add("--step", type=int, metavar="N", help="the checkpoint after N steps (the newest one)")
    add("--dtype", choices=sorted(COMPUTE_DTYPES), help="dtype of the weights (the run's train.dtype)")
    add("--output", type=Path, metavar="FILE", help="write lm-eval's results and every question's answers as JSON")
    add("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    parallel = generation_mesh(arguments.overrides)
    check_world_size(parallel, launched().world_size)
    device = compute_device()
    with process_group(device):
        evaluate_on_ranks(arguments, Mesh(parallel, device))
    return 0


def evaluate_on_ranks(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Runs the command on a mesh, all ranks of which call it; rank 0 prints and stores the results."""
    try:
        from megalin.evaluation.lm_eval_adapter import LmEvalOptions, MegalinModel, evaluate_tasks
    except ImportError as error:
        if (error.name or "").partition(".")[0].startswith("megalin"):
            raise
        raise ConfigError(
            f"lm-eval needs a package that is not installed ({error.name}): pip install megalin[eval]"
        ) from None
    run = open_for_generation(arguments.folder, step=arguments.step)
    check_divisions(run.model, mesh.tp.size)
    model = MegalinModel(
        run, mesh, dtype=arguments.dtype, batch_size=arguments.batch_size, max_length=arguments.max_length
    )
    options = LmEvalOptions(
        [task for names in arguments.tasks for task in names.split(",") if task],
        arguments.include_path,
        not arguments.no_default_tasks,
        arguments.num_fewshot,
        arguments.limit,
        arguments.gen_kwargs,
    )
    results = evaluate_tasks(model, options)
    settings = {
        "max_length": model.max_length,
        "limit": arguments.limit,
        "dtype": arguments.dtype or run.config.train.dtype,
    }
    on_rank_zero(partial(_report, arguments, run.checkpoint.step, results, settings))


def _report(arguments: argparse.Namespace, step: int, results: dict[str, Any], settings: dict[str, Any]) -> None:
    """Prints the results and adds them to the run folder."""
    from lm_eval.utils import handle_non_serializable, make_table

    limit = "" if arguments.limit is None else f"[:{arguments.limit}]"
    found = {f"{task}{limit}": _entry(results, task, settings) for task in results["results"]}
    print(json.dumps({str(step): found}) if arguments.json else make_table(results))
    if arguments.output is not None:
        text = json.dumps(results, indent=1, default=handle_non_serializable, ensure_ascii=False)
        with storage_errors(arguments.output):
            write_atomically(arguments.output, text.encode())
    add_results(arguments.folder, step, SUITE, found)


def _entry(results: dict[str, Any], task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A task's finite numbers by lm-eval's names, and the settings that they depend on."""
    numbers = {name: value for name, value in results["results"][task].items() if isinstance(value, float | int)}
    metrics = {name: value for name, value in numbers.items() if math.isfinite(value)}
    version, shots = results["versions"].get(task), results["n-shot"].get(task)
    questions = results.get("n-samples", {}).get(task, {}).get("effective")
    return {
        "metrics": metrics,
        "settings": settings | {"version": version, "num_fewshot": shots, "questions": questions},
    }


COMMAND = Command("evaluate a run by tasks of the harness lm-eval", _add_arguments, _run)
