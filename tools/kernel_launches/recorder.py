"""Recording of launches while kernels run on a GPU, in the interpreter, or in place of running."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .launch import PREFIX, KernelLaunch, launch_of, launch_of_call

Seen = Callable[[KernelLaunch], None]


def _is_ours(kernel: Any) -> bool:
    return kernel.fn.__module__.startswith(PREFIX)


@contextmanager
def interpreted_launches(seen: Seen) -> Iterator[None]:
    """Calls `seen` with every launch in Triton's interpreter, before it runs."""
    run = InterpretedFunction.run

    def recorded(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        if _is_ours(self):
            seen(launch_of_call(self, arguments, keywords))
        return run(self, *arguments, grid=grid, warmup=warmup, **keywords)

    with mock.patch.object(InterpretedFunction, "run", recorded):
        yield


@contextmanager
def launches_not_run(seen: Seen) -> Iterator[None]:
    """Calls `seen` with every launch in place of compiling and running it: needs no GPU, and meta tensors will do."""

    def recorded(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        assert _is_ours(self), self
        seen(launch_of_call(self, arguments, keywords))

    with mock.patch.object(JITFunction, "run", recorded), mock.patch.object(InterpretedFunction, "run", recorded):
        yield


@contextmanager
def compiled_launches(seen: Seen) -> Iterator[None]:
    """Calls `seen` with every launch on a GPU at its first call in the process, before it is compiled."""
    earlier = knobs.runtime.jit_cache_hook

    def hook(*, fn: Any, compile: dict[str, Any], **rest: Any) -> bool | None:
        if fn.module.startswith(PREFIX):
            seen(_launch_of_compilation(fn, compile))
        return None if earlier is None else earlier(fn=fn, compile=compile, **rest)

    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = earlier


def _launch_of_compilation(fn: Any, compilation: dict[str, Any]) -> KernelLaunch:
    types, names = compilation["signature"], list(compilation["signature"])
    constants = {names[path[0]]: value for path, value in compilation["constants"].items()}
    aligned = {names[path[0]] for path, hints in compilation["configs"][0].items() if hints}
    options = json.loads(compilation["specialization_data"])["options"]
    return launch_of(f"{fn.module}.{fn.name}", types, constants, aligned, options)


def write_recorded(path: Path, launches: Iterable[KernelLaunch]) -> None:
    """Appends launches to a file, one a line: several processes may write to it."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{launch.kernel} {launch.text}\n" for launch in sorted(launches))


def read_recorded(path: Path) -> set[KernelLaunch]:
    """Launches of a file of `write_recorded`."""
    return {KernelLaunch(*line.split(" ", 1)) for line in path.read_text("utf-8").splitlines()}
