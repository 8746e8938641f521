"""A training run from Python: in one process, or on the ranks that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from megalin.api.arguments import RunSource, read_run
from megalin.errors import ConfigError
from megalin.evaluation.in_loop import LoopTaskRunner, check_run
from megalin.launch import adopt_launcher, check_all_ranks_start, launched
from megalin.parallel.agreement import distributed
from megalin.parallel.mesh import check_device
from megalin.parallel.process_group import compute_device, process_group
from megalin.planner.check import DeviceType, check_memory
from megalin.train.config import RunConfig
from megalin.train.hardware import device_memory_bytes
from megalin.train.loop import TrainResult, train
from megalin.train.update_hooks import UpdateHook
from megalin.train.watched import collective_timeout


class Trainer:
    """A run of a config, as `megalin train` runs it: data order, checkpoints, metrics and resuming are the same.

    In a script or notebook it is one process; in a script that torchrun, deepspeed, srun or mpirun started, each rank
    makes one with the same arguments. It forks no process. The process group is its own, while `train` runs.

    Attributes:
        config: the run's config.
        folder: the run folder.
    """

    def __init__(self, config: RunSource, folder: str | os.PathLike[str] | None = None) -> None:
        """Reads the config; nothing is written.

        Args:
            config: a `RunConfig`, a dict with its keys (tables model, data, train, optimizer, ...; the model's
                `preset` names a preset), or the path of a config file.
            folder: the run folder; an existing run is resumed. None: runs/NAME of a config file NAME.toml, else a new
                folder runs/DATE-TIME.

        Raises:
            ConfigError: no such file, or an invalid config, with all problems; several ranks without a folder.
        """
        self.config = read_run(config)
        if folder is None:
            folder = Path("runs") / (_new_name() if isinstance(config, RunConfig | Mapping) else Path(config).stem)
        self.folder = Path(folder)

    def train(self, *, hooks: Sequence[UpdateHook] = (), memory_check: bool = True) -> TrainResult:
        """Runs the steps that are left, saving as configured and after the last one; on every rank.

        Args:
            hooks: called after each update of the weights, the same on every rank.
            memory_check: print an estimate of a rank's memory, and refuse a run that exceeds it.

        Returns:
            Finished steps, the last loss, the evaluation of the validation split, and the results of tasks.

        Raises:
            ConfigError: the config does not fit the ranks, the devices or their memory; this process has a process
                group already, or is the only one of a job of several ranks.
            MegalinError: as `megalin train`.
        """
        if distributed():
            raise ConfigError(
                "this process has a process group already, but Trainer makes its own; call "
                "torch.distributed.destroy_process_group() before"
            )
        check_all_ranks_start()
        world_size, device = adopt_launcher().world_size, compute_device()
        check_run(self.config, world_size)
        check_device(self.config.parallel, device.type)
        if memory_check:
            _check_memory(self.config, world_size, device, hooks)
        tasks = LoopTaskRunner() if self.config.evaluation.tasks else None
        with process_group(device, timeout=collective_timeout(self.config)):
            return train(self.config, device, self.folder, hooks=hooks, tasks=tasks)


def _check_memory(config: RunConfig, world_size: int, device: torch.device, hooks: Sequence[UpdateHook]) -> None:
    """Refuses a run that does not fit, and prints the estimate on rank 0 if there is one."""
    memory = device_memory_bytes(device)
    kind: DeviceType = "cpu" if device.type == "cpu" else "cuda"
    estimate = check_memory(config, world_size, memory, hooks, device=kind)
    if estimate is not None and launched().rank == 0:
        print(f"memory: about {estimate / 2**30:.1f} of {memory / 2**30:.1f} GiB a rank", flush=True)


def _new_name() -> str:
    """The name of a new run. Raises ConfigError on several ranks, which would not agree on it."""
    if launched().world_size > 1:
        raise ConfigError("folder is missing: the ranks of a launcher need one run folder; give folder='runs/NAME'")
    return datetime.now(UTC).strftime("%Y-%m-%d-%H%M%S")
