"""Which of the launched ranks this process is, whoever launched it. Needs no torch, so a bad launch ends at once.

torchrun and deepspeed set what torch.distributed reads: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
srun and mpirun set numbers of their own, of which `adopt_launcher` makes those five.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from megalin.errors import ConfigError


class Launch(NamedTuple):
    """The place of this process among the ranks."""

    rank: int
    world_size: int
    local_rank: int


class _Variables(NamedTuple):
    """What a launcher calls the numbers. It is the launcher where `marker` is set."""

    launcher: str
    marker: str
    rank: str
    world_size: str
    local_rank: str


_TORCH = _Variables("torchrun", "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK")
# mpirun may start its daemons by srun, whose variables the ranks then inherit: they come last. SLURM_PROCID is set in a
# batch script too, which is no rank; SLURM_STEP_NUM_TASKS is not.
_LAUNCHERS = (
    _TORCH,
    _Variables(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    _Variables("MPICH's mpirun", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    _Variables("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_REMEDY = "start the ranks with torchrun, deepspeed, srun or mpirun"
_FIRST_PORT, _PORTS = 20000, 10000
"""Below the ports that Linux hands out by itself."""


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """The place that the launcher gave this process; without a launcher it is the only rank.

    Raises:
        ConfigError: a variable of the launcher that is missing, no number or out of range.
    """
    names = _launcher(environment)
    if names is None:
        if _number(environment, "WORLD_SIZE", "1") != 1:
            raise ConfigError(f"WORLD_SIZE = {environment['WORLD_SIZE']}, but RANK is not set; {_REMEDY}")
        return Launch(0, 1, _number(environment, "LOCAL_RANK", "0"))
    rank, world_size, local_rank = (_number(environment, name, None, names.launcher) for name in names[2:])
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
    """`launched`, and sets the five variables that torch.distributed reads.

    MASTER_ADDR and MASTER_PORT are kept where they are set. Else under srun they are the step's first host and a port
    made of the job's number; under mpirun rank 0 chooses them and tells the others through mpi4py.

    Raises:
        ConfigError: as `launched`; no address or port to meet at.
    """
    place = launched(environment)
    names = _launcher(environment)
    if names is None:
        return place
    if place.world_size > 1:
        _find_meeting_point(names, environment)
    environment.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    return place


def _launcher(environment: Mapping[str, str]) -> _Variables | None:
    return next((names for names in _LAUNCHERS if names.marker in environment), None)


def _number(environment: Mapping[str, str], name: str, default: str | None, launcher: str = "") -> int:
    text = environment.get(name, default)
    if text is None:
        raise ConfigError(f"{launcher} started this process, but {name} is not set; {_REMEDY}")
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name} = {text!r} is not a number; {_REMEDY}")
    return int(text)


def _find_meeting_point(names: _Variables, environment: MutableMapping[str, str]) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing and names.launcher == "srun":
        found = {"MASTER_ADDR": _first_host(environment), "MASTER_PORT": str(_port_of_the_step(environment))}
        environment.update({name: found[name] for name in missing})
    elif len(missing) == 2 and names is not _TORCH:
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = _agree_by_mpi(names.launcher)
    elif missing:
        raise ConfigError(
            f"{names.launcher} started this process, but {missing[0]} is not set; set it to the "
            + ("host of rank 0" if missing[0] == "MASTER_ADDR" else "number of a port that is free there")
        )
    port = _number(environment, "MASTER_PORT", None)
    if not 1 <= port <= 65535:
        raise ConfigError(f"environment variable MASTER_PORT = {port} is no port; use 1 to 65535")


def _first_host(environment: Mapping[str, str]) -> str:
    """The first of SLURM_STEP_NODELIST, as in `gpu[07-09,12],login` or `rack[0-1]n[2-3]`: that of rank 0."""
    hosts = environment.get("SLURM_STEP_NODELIST", "")
    match = re.match(r"(?:[^\[,]|\[\d[^\]]*\])+", hosts)
    if match is None:
        raise ConfigError(
            f"srun started this process, but SLURM_STEP_NODELIST = {hosts!r} names no host; set MASTER_ADDR"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _port_of_the_step(environment: Mapping[str, str]) -> int:
    """Ranks of a step agree, and steps of a job or jobs that share a host seldom do."""
    job, step = (_number(environment, name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 131 + step) % _PORTS


def _agree_by_mpi(launcher: str) -> tuple[str, str]:
    """Rank 0's host and a free port of it, through MPI in a process of its own: the one that trains may then leave
    without the interpreter's teardown, which mpirun would take for a failure of a rank that had used MPI."""
    command = [sys.executable, "-m", "megalin.launch"]
    done = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=False)
    match = re.search(r"^meet at (\S+) (\d+)$", done.stdout, re.MULTILINE)
    if match is None:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ConfigError(
            f"{launcher} started this process, MASTER_ADDR and MASTER_PORT are not set, and the ranks cannot agree on "
            f"them by mpi4py ({last}); install mpi4py for this MPI, or set both"
        )
    return match[1], match[2]


def _agree() -> None:
    from mpi4py import MPI

    with socket.socket() as probe:
        probe.bind(("", 0))
        chosen = socket.gethostname(), probe.getsockname()[1]
    address, port = MPI.COMM_WORLD.bcast(chosen, root=0)
    print(f"meet at {address} {port}")


if __name__ == "__main__":
    _agree()
