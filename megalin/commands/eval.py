"""`megalin eval`: the held-out loss of a saved run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megalin.commands.base import Command
from megalin.config import apply_overrides, parse
from megalin.data.config import SPLITS
from megalin.errors import ConfigError
from megalin.evaluation.held_out import evaluate_run
from megalin.launch import launched
from megalin.parallel.mesh import Mesh, ParallelConfig, check_world_size
from megalin.parallel.process_group import compute_device, process_group

_AXES = ("parallel.tp", "parallel.cp")
"""What an evaluation reads of [parallel]."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as parallel.cp=2, data.validation=['a']")
    parser.add_argument("--split", choices=SPLITS, default="validation", help="which split to read (validation)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    parallel, overrides = _mesh_of(arguments.overrides)
    device = compute_device()
    check_world_size(parallel, launched().world_size)
    with process_group(device):
        mesh = Mesh(parallel, device)
        evaluation = evaluate_run(arguments.folder, mesh, overrides, split=arguments.split)
        if not mesh.is_first_rank:
            return 0
    if arguments.json:
        print(json.dumps(evaluation._asdict()))
        return 0
    print("\n".join(evaluation.report_lines()))
    return 0


def _mesh_of(overrides: Sequence[str]) -> tuple[ParallelConfig, list[str]]:
    """The mesh that overrides ask for, whatever the run was trained on, and the other overrides."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    axes = [override for override, key in zip(overrides, keys, strict=True) if key in _AXES]
    others = [override for override, key in zip(overrides, keys, strict=True) if key not in _AXES]
    for override in others:
        if override.strip().startswith(("parallel.", "parallel=")):
            raise ConfigError(
                f"override {override!r}: an evaluation is shared out by {' and '.join(_AXES)}, and by samples over the "
                "ranks that these leave; leave it out"
            )
    return parse(ParallelConfig, apply_overrides({"parallel": {}}, axes)["parallel"], "command line"), others


COMMAND = Command("held-out loss of a run, and what goes with its kind of model", _add_arguments, _run)
