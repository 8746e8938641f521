"""Stops, kills and slows ranks of runs on two GPUs (NCCL), and prints a line about what a user sees.

python tools/gpu_faults.py LOG

Ranks 0 and 1 are stopped and killed at the start, in a step, a save and an evaluation: the rank must be named, and the
other one leave with 7 within 15 s, or with 6 within 5 s. The GPU of a rank hangs in a replay of its CUDA graph: the
rank and the collective must be named. A rank made slow in three ways must be named within 20 steps, and none in 1,000
clean steps. LOG receives the lines and the output of the ranks. Exit code 1 if a case fails.

python tools/gpu_faults.py LOG --only kill_in_step slow_sleep clean

runs these groups alone, in this order.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from fault_matrix.gpu_runs import (
    SHARED_GPU,
    SLOW,
    CaseResult,
    SlowRank,
    clean_run,
    clean_steps,
    hang_in_replay,
    shared_gpu,
    slow_rank,
    strikes,
)
from fault_matrix.lab import Lab
from fault_matrix.processes import stop_server

_GROUPS = ("start", "signals", "replay", *SLOW, "clean", "shared")


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 if every case passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="file for the lines and the output of all ranks")
    parser.add_argument(
        "--only", nargs="+", choices=(*_GROUPS, "kill_in_step"), default=list(_GROUPS), help="groups of cases (all)"
    )
    parser.add_argument("--at-once", type=int, default=8, help="signalled runs at a time (8)")
    parser.add_argument("--steps", type=int, default=1000, help="clean steps (1000)")
    parser.add_argument("--seconds", type=float, default=230.0, help="the end: no group starts after it (230)")
    parser.add_argument("--shared", action="store_true", help="both ranks on the first GPU (needs NCCL 2.30)")
    args = parser.parse_args(arguments)
    if args.shared:
        os.environ |= SHARED_GPU
    # A check that starts CUDA in the process from which ranks are forked would keep them from using it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with args.log.open("w") as log, tempfile.TemporaryDirectory() as temporary:
        numbers = itertools.count()
        lab = partial(_lab, Path(temporary), numbers)
        kills = partial(strikes, numbers=[signal.SIGKILL], phases=["step"])
        groups: dict[str, Callable[[], Iterable[CaseResult]]] = {
            "start": lambda: [clean_run(lab())],
            "signals": lambda: strikes(lab, at_once=args.at_once),
            "replay": lambda: (hang_in_replay(lab(), victim) for victim in (0, 1)),
            "kill_in_step": lambda: kills(lab, at_once=args.at_once),
            **{name: partial(_slow, lab, slow) for name, slow in SLOW.items()},
            "clean": lambda: [_clean(lab(), args.steps, started + args.seconds)],
            "shared": lambda: [shared_gpu(lab())],
        }
        started, results = time.monotonic(), list[CaseResult]()

        def write(line: str, details: str = "") -> None:
            print(f"{time.monotonic() - started:6.1f} s  {line}", flush=True)
            log.write(f"{line}\n{details}\n")
            log.flush()

        write(f"torch {torch.__version__}, {torch.cuda.device_count()} GPUs, {_nccl()}")
        try:
            for name in args.only:
                if time.monotonic() - started > args.seconds:
                    write(f"SKIP  {name}: after {args.seconds:g} s")
                    continue
                for result in _results(name, groups[name]):
                    results.append(result)
                    write(result.line(), result.details)
        finally:
            stop_server()
        write(f"{sum(result.passes for result in results)} of {len(results)}")
    return int(not all(result.passes for result in results))


def _results(name: str, run: Callable[[], Iterable[CaseResult]]) -> Iterable[CaseResult]:
    """The results of a group; an error of this program is one too, so that the other groups run."""
    try:
        yield from run()
    except (AssertionError, LookupError, OSError, RuntimeError, ValueError):
        text = traceback.format_exc()
        yield CaseResult(name, False, text.strip().splitlines()[-1], text)


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return "no NCCL"
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]


def _lab(folder: Path, numbers: itertools.count[int]) -> Lab:
    return Lab(folder / str(next(numbers)), folder)


def _slow(lab: Callable[[], Lab], slow: SlowRank) -> list[CaseResult]:
    return [slow_rank(lab(), slow)]


def _clean(lab: Lab, steps: int, end: float) -> CaseResult:
    return clean_steps(lab, measured=steps, unmeasured=steps // 10, seconds=end - time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
