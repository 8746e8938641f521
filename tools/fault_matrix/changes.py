"""Changes of a process that inject a fault into it: kills, errors and signals at chosen places."""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

OPERATIONS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
"""Calls of `os` that change a file system or make a change durable."""

_NEW_HOST_NAME = 0x04000000
"""CLONE_NEWUTS of unshare(2): a host name of this process alone."""
_FOREVER = 600.0


def _count_calls(action: Callable[[str, int], None]) -> None:
    """Calls `action` with the name and the number of each operation before it runs."""
    count = 0

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            action(name, count)
            return original(*args, **options)

        return counted

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))


def die_at_operation(number: int) -> None:
    """Kills the process right before operation `number` on the file system."""

    def action(_: str, count: int) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _count_calls(action)


def fail_at_operation(number: int, code: int) -> None:
    """Operation `number` on the file system raises OSError with this errno."""

    def action(name: str, count: int) -> None:
        if count == number:
            raise OSError(code, os.strerror(code), f"{name} number {number}")

    _count_calls(action)


def fail_writes_of_steps(first: int, last: int) -> None:
    """Saves after these steps find a full disk."""
    from megalin.checkpoint import storage

    write = storage.write_file

    def full(path: Any, *args: Any) -> Any:
        if any(f"step-{step:08d}" in str(path) for step in range(first, last + 1)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args)

    storage.write_file = full


def count_operations(path: str) -> None:
    """Writes the number of operations until now to a file at each of them."""
    write = os.write
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def action(name: str, count: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        write(descriptor, f"{count:09d}".encode())

    _count_calls(action)


def at_step(step: int, action: Callable[[Any], None]) -> None:
    """Calls `action` with the engine, of either kind, right before it takes step `step`."""
    from megalin.train.deepspeed_engine import DeepSpeedEngine
    from megalin.train.engine import FullyShardedEngine

    def change(kind: Any) -> None:
        take = kind.step

        def changed(engine: Any, *args: Any, **options: Any) -> Any:
            if options["step"] == step:
                action(engine)
            return take(engine, *args, **options)

        kind.step = changed

    change(FullyShardedEngine)
    change(DeepSpeedEngine)


def break_gradients(first: int, last: int, value: float) -> None:
    """This rank's gradients of one parameter become `value` in steps `first` to `last`."""
    from megalin.train import step as steps

    apply = steps.apply_gradients

    def changed(model: Any, *args: Any, **options: Any) -> Any:
        if first <= options["step"] <= last:
            gradient = next(iter(model.parameters())).grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.view(-1)[0] = value
        return apply(model, *args, **options)

    steps.apply_gradients = changed


def flip_bit(step: int, suffix: str) -> None:
    """After `step`, a bit of this rank's copy of a tensor with this end of its name is another one."""
    from megalin.parallel.tensor_parallel import local
    from megalin.train.engine import FullyShardedEngine

    launch = FullyShardedEngine.step

    def changed(engine: FullyShardedEngine, *args: Any, **options: Any) -> Any:
        launched = launch(engine, *args, **options)
        if options["step"] == step:
            tensor = next(tensor for name, tensor in engine.tensors().items() if name.endswith(suffix))
            bits = local(tensor).view(torch.int32)
            bits.view(-1)[7] ^= 1 << 12
        return launched

    FullyShardedEngine.step = changed  # type: ignore[method-assign]


def corrupt_batch(corrupt: int, killed_at: int = 0) -> None:
    """The tokens and labels of a batch of the sample order are other ones on every rank. The process is killed when it
    reads the batch `killed_at`."""
    from megalin.train.step_data import StepReader

    read = StepReader.read

    def changed(reader: Any, number: int, **options: Any) -> Any:
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        data = read(reader, number, **options)
        if number != corrupt:
            return data
        shifted = [
            batch._replace(tokens=(batch.tokens + 97) % 256, labels=(batch.labels + 193) % 256)
            for batch in data.batches
        ]
        return data._replace(batches=shifted)

    StepReader.read = changed  # type: ignore[method-assign]


def slow_operations(seconds: float) -> None:
    """Every operation on the file system takes this time longer."""
    _count_calls(lambda name, count: time.sleep(seconds))


def slow_steps(seconds: float) -> None:
    """Every step takes this time longer."""
    from megalin.train.engine import FullyShardedEngine

    take = FullyShardedEngine.step

    def changed(engine: Any, *args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return take(engine, *args, **options)

    FullyShardedEngine.step = changed  # type: ignore[method-assign]


def slow_reads(seconds: float) -> None:
    """This rank's data workers take this time longer for every batch of samples."""
    from megalin.data.datasets.token import TokenDataset

    read = TokenDataset.batch

    def changed(dataset: Any, *args: Any) -> Any:
        time.sleep(seconds)
        return read(dataset, *args)

    TokenDataset.batch = changed  # type: ignore[method-assign]


def rename_host_in_steps_of(name: str, seconds: float) -> None:
    """This process's host has another name, to which gloo binds its sockets, and every step takes longer. Only the
    superuser may rename a host: without the right it keeps its name."""
    slow_steps(seconds)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_HOST_NAME) == 0:
        socket.sethostname(name)


def on_host(name: str, change: Callable[[], None] | None = None) -> None:
    """This process counts as one of another host for the watchdogs; then another change."""
    from megalin.train import watched

    watched._place = lambda: name
    if change is not None:
        change()


def fail_reads(name: str, times: int) -> None:
    """The first `times` reads of files whose path contains `name` raise EIO."""
    read = os.preadv
    left = times

    def failing(descriptor: int, *args: Any) -> int:
        nonlocal left
        if left and name in os.readlink(f"/proc/self/fd/{descriptor}"):
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, *args)

    os.preadv = failing


def pretend_version(version: str) -> None:
    """This process reports another version of torch."""
    import torch

    torch.__version__ = torch.torch_version.TorchVersion(version)


def shrink_at_step(step: int, path: str, size: int) -> None:
    """Truncates a file right before step `step`."""
    at_step(step, lambda engine: os.truncate(path, size))


def redirect(folder: str, other: str) -> None:
    """Files that are opened by path in `folder` are those of the same name in `other`, as on a host with another
    disk."""
    opened = os.open

    def elsewhere(path: Any, *args: Any, **options: Any) -> int:
        text = os.fspath(path)
        if os.path.dirname(text) == folder:
            path = os.path.join(other, os.path.basename(text))
        return opened(path, *args, **options)

    os.open = elsewhere


def refuse_engines() -> None:
    """A process that builds a model on the device says so and dies."""
    from megalin.train import loop

    def built(*_: Any) -> None:
        raise RuntimeError("the engine was built")

    loop.make_engine = built  # type: ignore[assignment]


def fail_on_rank(rank: int, step: int, kind: str) -> None:
    """This rank fails right before it takes step `step`: it is killed, leaves with 0, raises, or has no memory left."""

    def fail(_: Any) -> None:
        if int(os.environ.get("RANK", "0")) != rank:
            return
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "leaves":
            os._exit(0)
        if kind == "raises":
            raise KeyError("planted")
        assert kind == "memory", kind
        limit = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0]) + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.ones(1 << 30)

    at_step(step, fail)


def signal_in(phase: str, number: int, *, step: int = 3) -> None:
    """This rank gets a signal in a phase of its run: "start", "step" (this one), "save", "evaluation"."""
    from megalin.parallel.heartbeats import Heartbeat
    from megalin.train import loop

    if phase == "step":
        at_step(step, lambda engine: os.kill(os.getpid(), number))
        return
    if phase == "start":
        find = loop.find_checkpoint

        def found(*args: Any) -> Any:
            os.kill(os.getpid(), number)
            return find(*args)

        loop.find_checkpoint = found
        return
    enter = Heartbeat.enter

    def entered(heartbeat: Heartbeat, name: Any) -> None:
        enter(heartbeat, name)
        if name == phase:
            os.kill(os.getpid(), number)

    Heartbeat.enter = entered  # type: ignore[method-assign]


def sleep_in_step(step: int, place: str = "", *, after: bool = False) -> None:
    """This rank stops to make progress right before it takes a step; in the step before, or after, it calls a function
    of a module, as "torch.distributed:all_reduce" or "module:Class.method", if that is given."""

    def stop(_: Any) -> None:
        if not place:
            time.sleep(_FOREVER)
        module, _, path = place.partition(":")
        *classes, name = path.split(".")
        owner = functools.reduce(getattr, classes, importlib.import_module(module))
        call = getattr(owner, name)

        def sleeping(*args: Any, **options: Any) -> None:
            if after:
                call(*args, **options)
            time.sleep(_FOREVER)

        setattr(owner, name, sleeping)

    at_step(step, stop)


def other_collective(step: int) -> None:
    """This rank launches a collective of its own in a step, of another size than the others' next one."""
    import torch

    from megalin.parallel.agreement import gather_over_ranks

    at_step(step, lambda engine: gather_over_ranks(torch.zeros(1 << 20)))


def stuck_reads(after: int) -> None:
    """This rank's data workers never end a read, after so many."""
    from megalin.data.shards import indexed_dataset

    count = 0

    def wrap(read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > after:
                time.sleep(600)
            return read(*args, **options)

        return counted

    for name in ("read_range", "read_ranges"):
        setattr(indexed_dataset, name, wrap(getattr(indexed_dataset, name)))


def slow_phases(seconds: float) -> None:
    """Opening the data, every step, every evaluation and every save take this time longer."""
    from megalin.train import loop, run_data, saves

    slow_steps(seconds)
    for owner, name in ((run_data, "_open"), (loop, "evaluate"), (saves, "save_now")):
        setattr(owner, name, _delayed(getattr(owner, name), seconds))


def _delayed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def delayed(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **options)

    return delayed
