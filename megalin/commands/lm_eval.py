"""`megalin lm-eval`: tasks of the harness lm-eval on a saved run."""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from megalin.commands.base import generation_mesh
from megalin.errors import ConfigError
from megalin.evaluation.results import add_results
from megalin.files import storage_errors, write_atomically
from megalin.generation import open_for_generation
from megalin.launch import launched
from megalin.model.build import check_divisions
from megalin.parallel.agreement import on_rank_zero
from megalin.parallel.mesh import Mesh, check_world_size
from megalin.parallel.process_group import compute_device, process_group

SUITE = "lm-eval"


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    _check_trust(arguments)
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
        if (error.name or "").partition(".")[0] == "megalin":
            raise
        raise ConfigError(
            f"lm-eval needs a package that is not installed ({error.name}): pip install megalin[eval]"
        ) from None
    on_rank_zero(partial(_check_output, arguments.output))
    run = open_for_generation(arguments.folder, step=arguments.step)
    check_divisions(run.model, mesh.tp.size)
    model = MegalinModel(
        run,
        mesh,
        dtype=arguments.dtype,
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        special_tokens=arguments.special_tokens,
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
        "special_tokens": model.special_tokens.added,
    }
    on_rank_zero(partial(_report, arguments, run.checkpoint.step, results, settings))


def _check_trust(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for task files whose code the user has not allowed to run."""
    if (arguments.include_path is not None) == arguments.trust_task_code:
        return
    if arguments.trust_task_code:
        raise ConfigError("--trust-task-code has no effect without --include-path; leave it out")
    raise ConfigError(
        f"--include-path {arguments.include_path}: task files run code, by !function, by templates, which lm-eval "
        "renders without a sandbox, and by data sets of pickles; if you trust the folder, add --trust-task-code"
    )


def _check_output(output: Path | None) -> None:
    """Raises ConfigError where the output's folder is missing."""
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it")


def _report(arguments: argparse.Namespace, step: int, results: dict[str, Any], settings: dict[str, Any]) -> None:
    """Prints the results and adds them to the run folder."""
    from lm_eval.utils import handle_non_serializable, make_table

    limit = "" if arguments.limit is None else f"[:{arguments.limit}]"
    found = {f"{task}{limit}": _entry(results, task, settings) for task in results["results"]}
    print(json.dumps({str(step): found}) if arguments.json else make_table(results))
    add_results(arguments.folder, step, SUITE, found)
    if arguments.output is not None:
        text = json.dumps(results, indent=1, default=handle_non_serializable, ensure_ascii=False)
        with storage_errors(arguments.output):
            write_atomically(arguments.output, text.encode())


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
