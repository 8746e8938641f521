"""`megalin launch`: one run on several ranks of this host."""

from __future__ import annotations

import argparse
import os

from megalin.errors import ConfigError
from megalin.launch import launched
from megalin.launcher.signals import RecordedSignals


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    world_size = arguments.nproc_per_node
    if world_size < 1 or arguments.max_restarts < 0:
        raise ConfigError(
            f"--nproc-per-node {world_size} --max-restarts {arguments.max_restarts}: use at least 1 rank and 0 restarts"
        )
    if (outer := launched().world_size) > 1:
        raise ConfigError(
            f"megalin launch starts the ranks itself, but a launcher started {outer} of it; run it once, or "
            "`megalin train` under that launcher"
        )
    if world_size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun; also, no thread of a library runs at the fork
    with RecordedSignals() as signals:
        # Loaded once for all ranks; imported here, so that a signal meanwhile is recorded.
        from megalin.commands import train
        from megalin.evaluation.in_loop import check_run
        from megalin.launcher.launcher import launch
        from megalin.parallel.diagnosis import StallLimits
        from megalin.train.config import load_run_config

        config = load_run_config(arguments.config, arguments.overrides)
        check_run(config, world_size)
        return launch(
            lambda: train.run(arguments),
            world_size,
            train.run_folder(arguments),
            signals=signals.received,
            limits=StallLimits(config.train.hang_timeout_seconds, config.train.phase_timeout_seconds),
            max_restarts=arguments.max_restarts,
        )
