"""Rank and world size from any launcher's environment variables. Needs no torch, so a bad launch fails at once.

torchrun and deepspeed set what torch.distributed reads: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
srun and mpirun set other variables, from which `adopt_launcher` sets those five. LOCAL_WORLD_SIZE, the number of ranks
on this host, is set too where the launcher knows it.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

from megalin.errors import ConfigError


class Launch(NamedTuple):
    """Rank of this process, number of ranks, and rank within its host."""

    rank: int
    world_size: int
    local_rank: int


class _Variables(NamedTuple):
    """A launcher's names of these numbers. `marker` is set in every process that it starts."""

    launcher: str
    marker: str
    rank: str
    world_size: str
    local_rank: str
    local_sizes: tuple[str, ...]
    """Names of the number of ranks on this host."""
    job_sizes: tuple[str, ...] = ()
    """Names of numbers of which one above 1 means a job of several ranks, also in its script, which is no rank."""


# LOCAL_SIZE is deepspeed's.
_TORCH = _Variables("torchrun", "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
# srun comes last: mpirun may start its daemons with srun, and the ranks then inherit its variables. A batch script, no
# rank itself, has SLURM_PROCID too, but not SLURM_STEP_NUM_TASKS.
_LAUNCHERS = (
    _TORCH,
    _Variables(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("OMPI_COMM_WORLD_SIZE",),
    ),
    _Variables(
        "MPICH's mpirun",
        "MPI_LOCALRANKID",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        ("MPI_LOCALNRANKS",),
        ("PMI_SIZE",),
    ),
    _Variables(
        "srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        (),
        ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    ),
)
_REMEDY = "start the ranks with megalin launch, torchrun, deepspeed, srun or mpirun"
_FIRST_PORT, _PORTS = 20000, 10000
"""Below the ephemeral ports of Linux."""


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """Reads this process's rank from the launcher's variables; without a launcher it is the only rank.

    Raises:
        ConfigError: a variable of the launcher is missing, not a number or out of range; or a rank above 0 without the
            launcher's other variables.
    """
    names = _launcher(environment)
    if names is None:
        if _number(environment, "WORLD_SIZE", "1") != 1:
            raise ConfigError(f"WORLD_SIZE = {environment['WORLD_SIZE']}, but RANK is not set; {_REMEDY}")
        for launcher in _LAUNCHERS[1:]:
            _refuse_above(launcher, [launcher.rank], 0, environment)
        return Launch(0, 1, _number(environment, "LOCAL_RANK", "0"))
    rank, world_size, local_rank = (
        _number(environment, name, None, names.launcher) for name in (names.rank, names.world_size, names.local_rank)
    )
    if rank >= world_size:
        raise ConfigError(f"{names.rank} = {rank} is not below {names.world_size} = {world_size}; {_REMEDY}")
    if local_rank > rank:
        raise ConfigError(f"{names.local_rank} = {local_rank} is above {names.rank} = {rank}; {_REMEDY}")
    if environment.get("WORLD_SIZE", str(world_size)) != str(world_size):
        raise ConfigError(
            f"WORLD_SIZE = {environment['WORLD_SIZE']!r}, but {names.launcher} started {world_size} ranks "
            f"({names.world_size}); unset WORLD_SIZE"
        )
    return Launch(rank, world_size, local_rank)


def adopt_launcher(environment: MutableMapping[str, str] = os.environ) -> Launch:
    """Calls `launched` and sets the five variables that torch.distributed reads, and LOCAL_WORLD_SIZE if it is known.

    MASTER_ADDR and MASTER_PORT are kept if they are set. Otherwise, srun's ranks take the step's first host and a port
    derived from the job's number; under mpirun rank 0 chooses them and broadcasts them through mpi4py.

    Raises:
        ConfigError: as `launched`; or no address or port of the rendezvous.
    """
    place = launched(environment)
    names = _launcher(environment)
    if names is None:
        return place
    if place.world_size > 1:
        _set_rendezvous(names, environment)
    environment.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    if local_size := _local_world_size(names, environment):
        environment["LOCAL_WORLD_SIZE"] = local_size
    return place


def check_all_ranks_start(environment: Mapping[str, str] = os.environ) -> None:
    """Checks that a run of one rank is not one process of a job that was meant to start several.

    A batch script of several tasks has Slurm's variables of the job, but is no rank: called there without srun, the run
    would occupy all of the job and use one rank. In a job of one task, as an interactive one, a single process is all
    that was asked for.

    Raises:
        ConfigError: the job has several tasks or nodes, but its launcher started no rank.
    """
    if _launcher(environment) is None:
        for launcher in _LAUNCHERS[1:]:
            _refuse_above(launcher, launcher.job_sizes, 1, environment)


def is_on_one_host(environment: Mapping[str, str] = os.environ) -> bool | None:
    """Whether all ranks run on this host; None where the launcher does not say."""
    world_size, names = launched(environment).world_size, _launcher(environment)
    if world_size == 1 or names is None:
        return True
    local_size = _local_world_size(names, environment)
    return local_size == str(world_size) if local_size else None


def _local_world_size(names: _Variables, environment: Mapping[str, str]) -> str:
    """Number of ranks on this host; empty where the launcher does not say."""
    if names.launcher == "srun":  # gives a list of all hosts' numbers
        return environment[names.world_size] if environment.get("SLURM_STEP_NUM_NODES") == "1" else ""
    return next((environment[name] for name in names.local_sizes if name in environment), "")


def _launcher(environment: Mapping[str, str]) -> _Variables | None:
    return next((names for names in _LAUNCHERS if names.marker in environment), None)


def _refuse_above(launcher: _Variables, names: Sequence[str], limit: int, environment: Mapping[str, str]) -> None:
    """Raises ConfigError where a number of these is above the limit: a rank without the launcher's marker."""
    for name in names:
        value = environment.get(name, "")
        if value.isdecimal() and int(value) > limit:
            raise ConfigError(
                f"{name} = {value}, but {launcher.marker}, which {launcher.launcher} sets in every rank, is not set: "
                f"this process would run alone; {_REMEDY} (a single one with srun --ntasks 1), or unset {name}"
            )


def _number(environment: Mapping[str, str], name: str, default: str | None, launcher: str = "") -> int:
    text = environment.get(name, default)
    if text is None:
        raise ConfigError(f"{launcher} started this process, but {name} is not set; {_REMEDY}")
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name} = {text!r} is not a number; {_REMEDY}")
    return int(text)


def _set_rendezvous(names: _Variables, environment: MutableMapping[str, str]) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing and names.launcher == "srun":
        found = {"MASTER_ADDR": _first_host(environment), "MASTER_PORT": str(_step_port(environment))}
        environment.update({name: found[name] for name in missing})
    elif len(missing) == 2 and names is not _TORCH:
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = _broadcast_by_mpi(names.launcher)
    elif missing:
        raise ConfigError(
            f"{names.launcher} started this process, but {missing[0]} is not set; set it to the "
            + ("host of rank 0" if missing[0] == "MASTER_ADDR" else "number of a free port of rank 0's host")
        )
    port = _number(environment, "MASTER_PORT", None)
    if not 1 <= port <= 65535:
        raise ConfigError(f"environment variable MASTER_PORT = {port} is not a port; use 1 to 65535")


def _first_host(environment: Mapping[str, str]) -> str:
    """The first host of SLURM_STEP_NODELIST, for example `gpu[07-09,12],login` or `rack[0-1]n[2-3]`: rank 0's."""
    hosts = environment.get("SLURM_STEP_NODELIST", "")
    match = re.match(r"(?:[^\[,]|\[\d[^\]]*\])+", hosts)
    if match is None:
        raise ConfigError(
            f"srun started this process, but SLURM_STEP_NODELIST = {hosts!r} names no host; set MASTER_ADDR"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _step_port(environment: Mapping[str, str]) -> int:
    """A port that is equal on all ranks of a step, and rarely equal for two steps or jobs on one host."""
    job, step = (_number(environment, name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 131 + step) % _PORTS


def _broadcast_by_mpi(launcher: str) -> tuple[str, str]:
    """Rank 0's host and a free port there, broadcast through MPI in a subprocess: the training process may then exit
    without the interpreter's teardown, which mpirun would report as a failure of a rank that had used MPI."""
    command = [sys.executable, "-m", "megalin.launch"]
    done = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=False)
    match = re.search(r"^rendezvous at (\S+) (\d+)$", done.stdout, re.MULTILINE)
    if match is None:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ConfigError(
            f"{launcher} started this process, but MASTER_ADDR and MASTER_PORT are not set, and rank 0 could not "
            f"broadcast them through mpi4py ({last}); install mpi4py for this MPI, or set both{_abi_remedy(launcher)}"
        )
    return match[1], match[2]


def _abi_remedy(launcher: str) -> str:
    """Remedy for wheels of mpi4py, which load MPICH's library unless a variable names Open MPI's."""
    return "; for a wheel of mpi4py, set MPI4PY_MPIABI=openmpi" if launcher.startswith("Open MPI") else ""


def _broadcast() -> None:
    from mpi4py import MPI

    with socket.socket() as probe:
        probe.bind(("", 0))
        chosen = socket.gethostname(), probe.getsockname()[1]
    address, port = MPI.COMM_WORLD.bcast(chosen, root=0)
    print(f"rendezvous at {address} {port}")


if __name__ == "__main__":
    _broadcast()
