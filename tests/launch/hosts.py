"""Two simulated hosts on one machine: network namespaces with their own addresses, names and processes, connected."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

BIN = Path(sys.executable).parent
RSH = Path(__file__).with_name("host.sh")
"""Script that starts a command on another of the hosts, as rsh does."""

# Everything belongs to one process and ends with it; the machine is unchanged. The addresses are reserved for
# documentation.
_CABLE = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/netns
printf '127.0.0.1 localhost\\n192.0.2.1 node1\\n192.0.2.2 node2\\n' >/run/hosts
mount --bind /run/hosts /etc/hosts
ip netns add node1
ip netns add node2
ip link add eth0 netns node1 type veth peer name eth0 netns node2
for number in 1 2; do
    ip -n node$number address add 192.0.2.$number/24 dev eth0
    ip -n node$number link set lo up
    ip -n node$number link set eth0 up
done
for number in 1 2; do  # the link is up after at most a second; MPI ignores interfaces that are down
    until ip -n node$number -br link show eth0 | grep -q ' UP '; do sleep 0.02; done
done
echo up
read -r _
"""


class Hosts:
    """The hosts "node1" and "node2", which share only the file system."""

    names = ("node1", "node2")

    def __init__(self, cable: subprocess.Popen[str]) -> None:
        self._cable = cable
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, host: str, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host and appends its stdout and stderr to `log`. Killing the returned process kills
        all processes of the command on that host, as a host failure does."""
        into = ["nsenter", "--target", str(self._cable.pid), "--user", "--preserve-credentials", "--net", "--mount"]
        words = [f"--wd={Path.cwd()}", str(RSH), host, shlex.join(map(str, command))]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*into, *words],
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def end(self) -> None:
        """Kills all commands that still run."""
        for process in self._started:
            process.kill()
            process.wait()


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Context manager of the hosts. Root may create them, and any user if user namespaces are allowed.

    Raises:
        OSError: this machine refuses to create them; with its message.
    """
    command = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c", _CABLE]
    cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert cable.stdin is not None
    assert cable.stdout is not None
    with cable:
        try:
            if cable.stdout.readline() != "up\n":
                raise OSError(cable.communicate()[1].strip())
            hosts = Hosts(cable)
            try:
                yield hosts
            finally:
                hosts.end()
        finally:
            cable.kill()


def slurm_job(folder: Path, *, nodes: int = 1) -> dict[str, str]:
    """Environment of a job script with one task per node; ids of requeued jobs are written to `folder`."""
    return {
        "PATH": f"{RSH.parent / 'slurm'}:{BIN}:{os.environ['PATH']}",
        "RSH": str(RSH),
        "REQUEUED": str(folder / "requeued"),
        "RANKS": str(folder / "ranks"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]" if nodes == 2 else "node1",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
