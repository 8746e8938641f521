"""Commands of megalin as processes of their own, forked from one that has imported the common modules."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_PRELOAD = (
    "encodings.ascii",  # not to be imported by a process without the right to read Python's files
    "encodings.idna",
    "numpy",
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed._composable",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "megalin.__main__",
    "megalin.commands.train",
    "megalin.data.tokenizers.tokenizer",
)
_POLL_SECONDS = 0.02
_context = multiprocessing.get_context("forkserver")
_numbers = itertools.count()

Change = Callable[[], None]
"""Change of the process before the command starts: a module-level function or a `functools.partial` of one."""


class Outcome(NamedTuple):
    """A process that has ended."""

    code: int
    """Exit code; -N after signal N."""
    text: str
    """Standard output and error together."""
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line of the output."""
        lines = self.text.strip().splitlines()
        return lines[-1] if lines else "no output"


class Running:
    """A started command.

    Attributes:
        pid: its process id.
    """

    def __init__(self, arguments: Sequence[str], output: Path, environment: Mapping[str, str], change: Change) -> None:
        self._output = output
        self._started = time.monotonic()
        _context.set_forkserver_preload(list(_PRELOAD))
        self._process = _context.Process(target=_child, args=(list(arguments), str(output), dict(environment), change))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def text(self) -> str:
        """Output until now."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.is_alive()

    @property
    def children(self) -> list[int]:
        """Process ids of its children, in the order of their start."""
        return [int(child) for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    @property
    def state(self) -> str:
        """State of the process as in /proc: R or S where it runs, T where it is stopped, Z where it has ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "Z"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; nothing happens to a process that has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait_until(self, condition: Callable[[], bool], *, seconds: float) -> bool:
        """Waits for a condition; False if it does not hold within the time or the process ends before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.is_alive:
            if condition():
                return True
            time.sleep(_POLL_SECONDS)
        return condition()

    def wait(self, *, seconds: float) -> Outcome:
        """Waits for the end; a process that takes longer is killed, and its output says so."""
        self._process.join(seconds)
        late = self._process.is_alive()
        if late:
            self.kill()
            self._process.join()
        assert self._process.exitcode is not None
        text = self.text + (f"\n[still running after {seconds:g} s: killed]" if late else "")
        return Outcome(self._process.exitcode, text, time.monotonic() - self._started)


def _child(arguments: list[str], output: str, environment: dict[str, str], change: Change) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    gc.freeze()
    import torch

    torch.set_num_threads(1)
    change()
    from megalin.__main__ import main

    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_until_ended(pids: Sequence[int], *, seconds: float) -> bool:
    """Waits for the end of processes that may not be this process's children; False if one does not end in time."""
    end = time.monotonic() + seconds
    while any(map(_is_running, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def unchanged() -> None:
    """Changes nothing."""


def start(arguments: Sequence[str], folder: Path, change: Change = unchanged, **environment: str) -> Running:
    """Starts `megalin ARGUMENTS`; its output goes to a file in `folder`."""
    return Running(arguments, folder / f"output-{next(_numbers)}.txt", environment, change)


def start_ranks(
    arguments: Sequence[str],
    folder: Path,
    *,
    ranks: int = 2,
    arguments_of: Mapping[int, Sequence[str]] | None = None,
    change_of: Mapping[int, Change] | None = None,
    environment_of: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Running]:
    """Starts `megalin ARGUMENTS` on gloo ranks, with other arguments, changes or variables for some of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        started.append(
            start(
                (arguments_of or {}).get(rank, arguments),
                folder,
                (change_of or {}).get(rank, unchanged),
                **(variables | dict((environment_of or {}).get(rank, {}))),
            )
        )
    return started


def limit(kind: int, amount: int) -> None:
    """Limits a resource of this process (`resource.RLIMIT_FSIZE`, ...)."""
    if kind == resource.RLIMIT_FSIZE:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(kind, (amount, amount))


def become(user: int) -> None:
    """Gives up root's rights: root may read and write any file."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def stop_server() -> None:
    """Ends the process that the commands were forked from."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()
