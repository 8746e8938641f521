"""A sweep's files as they were at its first start: every start trains from this copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tomli_w

from megalin.errors import ConfigError, DataError
from megalin.files import read_input, storage_errors, write_atomically
from megalin.sweep.config import Sweep
from megalin.sweep.order import all_cells
from megalin.sweep.plan_file import refuse_changes
from megalin.train.config_file import read_config

PLAN = "sweep.json"
"""The settings, the config with its base, and the overrides of each run."""
CONFIG = "sweep-config.toml"
"""The config of the runs with its base, which they read."""
_LIMIT_BYTES = 1 << 26
_REMEDY = "move it away together with results.json and the folders of the runs, to begin the sweep again"
_SETTINGS = ("goal", "better", "stop", "search", "evaluations")
"""Keys of the sweep that decide its results, besides the overrides of the runs."""


def freeze(sweep: Sweep, folder: Path, *, restart_changed: bool) -> tuple[Sweep, set[str]]:
    """Writes the plan of a sweep into its folder at the first start, and compares it with the plan of earlier ones.
    Runs may be added; those of the plan stay as they were.

    Args:
        restart_changed: removes the folders of runs that an edited file changes, which start from scratch.

    Returns:
        The sweep, whose runs read the copy of their config, and the names of the runs that start from scratch.

    Raises:
        ConfigError: a run of the plan would change, without `restart_changed`.
        DataError, StorageError: the plan cannot be read or written.
    """
    path, restarted = folder / PLAN, set[str]()
    now: dict[str, Any] = json.loads(json.dumps(_plan(sweep), default=str))
    if path.exists():
        before = _read(path)
        shared = before["runs"].keys() & now["runs"].keys()
        kept = {**before, "runs": {name: before["runs"][name] for name in sorted(shared)}}
        found = {**now, "runs": {name: now["runs"][name] for name in sorted(shared)}}
        try:
            remedy = f"give another --folder than {folder}, or restart what it changes with --restart-changed"
            refuse_changes(kept, found, sweep.path, f"sweep in {folder}", remedy)
        except ConfigError:
            if not restart_changed:
                raise
            every = any(before[key] != now[key] for key in ("settings", "config"))
            restarted = {name for name in shared if every or before["runs"][name] != now["runs"][name]}
        now["runs"] = before["runs"] | now["runs"]
    with storage_errors(path):
        for name in restarted:
            shutil.rmtree(folder / name, ignore_errors=True)
        write_atomically(folder / CONFIG, tomli_w.dumps(now["config"]).encode())
        write_atomically(path, json.dumps(now, indent=1).encode())
    return sweep._replace(frozen=folder / CONFIG), restarted


def _plan(sweep: Sweep) -> dict[str, Any]:
    settings = sweep.config.model_dump(mode="json", include={*_SETTINGS})
    runs = {cell.name: cell.overrides for cell in all_cells(sweep)}
    return {"settings": settings, "config": read_config(sweep.run_config), "runs": runs}


def _read(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(read_input(path, limit_bytes=_LIMIT_BYTES, remedy=_REMEDY))
        if all(isinstance(plan[key], dict) for key in ("settings", "config", "runs")):
            return dict(plan)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
    raise DataError(f"{path}: not the plan of a sweep; {_REMEDY}")
