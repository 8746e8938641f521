"""Diagnosis of a run from its folder: why it ended or does not go on, and what to do next."""

from __future__ import annotations

import re
import shutil
import socket
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from megalin.errors import StorageError
from megalin.files import LockOwner, read_owner
from megalin.parallel.heartbeat_copies import read_heartbeats
from megalin.parallel.heartbeats import RankSlot, start_ticks
from megalin.report.page import status
from megalin.report.reading import Incident, RunRecord, read_run

_RESUME = "run the same command: it continues from the newest valid checkpoint"
_FIRST_KINDS = ("started", "resumed")
_NEXT = {
    "PreemptedError": _RESUME,
    "KeyboardInterrupt": _RESUME,
    "NumericError": "the same steps would fail again: look at loss and grad_norm before that (megalin report), then "
    "lower optimizer.lr or optimizer.max_grad_norm",
    "ConfigError": "change what the message names, then run the same command",
    "DataError": "repair the file that the message names, then run the same command",
    "CheckpointError": "remove or repair the checkpoint that the message names, then run the same command",
    "StorageError": "free space or repair the file system, then run the same command",
    "ReplicaError": "test the memory of the hosts of these ranks, leave them out, then run the same command",
    "KernelError": 'use the backend "auto" or "reference" for that op, then run the same command',
    "HostMemoryError": "use more ranks or hosts, a smaller train.micro_batch_size, or a higher limit",
    "OutOfMemoryError": "use a smaller train.micro_batch_size, train.recompute, or more ranks (megalin plan)",
    "RankFailedError": f"look at the end of that rank's output, then {_RESUME}",
    "RankStalledError": f"look at the stacks, and at the host or GPU of that rank, then {_RESUME}",
}
"""Next step by the name of the error that ended the run."""
_KILLED = (
    "SIGKILL (by the kernel, where memory runs out: see dmesg; by a scheduler, at its time limit), or a host that went "
    "down"
)
_STALL_SECONDS, _STALL_STEPS = 15.0, 20.0
"""A run without a new line of metrics for this time, and for so many steps, may be stalled."""
_MOST_RANKS = 8
_ERROR_NAME = re.compile(r"([A-Za-z_.]*?)(\w+): ")
_LIBRARY_ERROR = re.compile(r"(?i)error|fatal|warn|abort|killed")


class Diagnosis(NamedTuple):
    """Cause and next step of a run."""

    cause: str
    next_step: str
    details: list[str]
    """Further facts, one a line."""


def examine(folder: str | Path) -> tuple[RunRecord, Diagnosis]:
    """Reads a run folder and names the cause of its end; the run may be in progress.

    Raises:
        ConfigError: `folder` contains no run.
    """
    run = read_run(folder)
    owner = read_owner(run.path / ".lock")
    last = _last_start(run.incidents)
    error = last[-1] if last and last[-1].kind == "error" else None
    slots = _slots(run.path)
    if last and last[-1].kind == "stopped":
        found = Diagnosis(f"{last[-1].message} ({last[-1].time})", _RESUME, [])
    elif error is not None:
        found = _ended_by(run, error)
    elif owner is not None and _is_alive(owner):
        found = _running(run, owner)
    elif _is_complete(run):
        found = Diagnosis("it is finished", "nothing: to train on, raise train.steps", [])
    elif owner is not None:
        found = _without_end(owner)
    else:
        found = Diagnosis("it ended in order before its last step", _RESUME, [])
    return run, found._replace(details=[*found.details, *_details(run, last, slots)])


def lines(run: RunRecord, diagnosis: Diagnosis) -> list[str]:
    """The diagnosis for people."""
    head = [f"{run.path}: {status(run)}", f"cause: {diagnosis.cause}", f"next: {diagnosis.next_step}"]
    return [*head, *diagnosis.details]


def _last_start(incidents: list[Incident]) -> list[Incident]:
    """The incidents since the last start that began the run."""
    first = max((place for place, each in enumerate(incidents) if each.kind in _FIRST_KINDS), default=0)
    return incidents[first:]


def _ended_by(run: RunRecord, error: Incident) -> Diagnosis:
    name = _error_name(error.message)
    next_step = _NEXT.get(name, f"an unexpected error: its traceback is in the output of the run; {_RESUME}")
    if error.message.startswith("rank "):  # the launcher's
        next_step = _NEXT["RankFailedError"]
    details = []
    if name == "StorageError" or "No space left" in error.message or "ENOSPC" in error.message:
        next_step = _NEXT["StorageError"]
        details.append(_space(run))
    same = [each for each in run.incidents if each.kind == "error" and _error_name(each.message) == name]
    again = [each for each in same if each.step == error.step]
    if len(again) > 1 and name not in ("PreemptedError", "KeyboardInterrupt"):
        details.append(f"again: {len(again)} starts ended with this error after step {error.step}: a cause that stays")
    return Diagnosis(f"{error.message} ({error.time})", next_step, details)


def _error_name(message: str) -> str:
    match = _ERROR_NAME.match(message)
    return match[2] if match else ""


def _running(run: RunRecord, owner: LockOwner) -> Diagnosis:
    who = f"process {owner.pid} runs it since {owner.since}"
    rates = run.progress.curves["tokens_per_second"][-50:]
    tokens = [value for _, value in run.progress.curves["tokens"][-2:]]
    if run.updated is None or not rates or len(tokens) < 2:
        return Diagnosis(
            f"{who}; no step is logged yet", "wait for the first steps: kernels and graphs may compile", []
        )
    step = (tokens[-1] - tokens[0]) / statistics.median(rate for _, rate in rates)
    idle = (datetime.now(UTC) - run.updated).total_seconds()
    if idle < max(_STALL_SECONDS, _STALL_STEPS * step):
        return Diagnosis(f"{who}; the last step was logged {idle:.0f} s ago", "nothing: it is in progress", [])
    return Diagnosis(
        f"{who}, but logged no step for {idle:.0f} s, and a step takes about {step:.3g} s",
        "look at the ranks below: the run evaluates, saves or compiles, or it stalls",
        [],
    )


def _without_end(owner: LockOwner) -> Diagnosis:
    if owner.host == socket.gethostname():
        return Diagnosis(f"process {owner.pid} was killed, and logged nothing: {_KILLED}", _RESUME, [])
    return Diagnosis(
        f"process {owner.pid} on {owner.host} runs it since {owner.since}, or was killed there: {_KILLED}",
        f"look for that process on {owner.host}; if it has ended, {_RESUME}",
        [],
    )


def _is_complete(run: RunRecord) -> bool:
    limits = [run.number("train", "steps"), run.number("train", "stop_after_steps")]
    ends = [limit for limit in limits if limit is not None]
    return bool(ends) and run.progress.last.get("step", 0) >= min(ends)


def _is_alive(owner: LockOwner) -> bool:
    return owner.host == socket.gethostname() and start_ticks(owner.pid) > 0


def _slots(folder: Path) -> list[RankSlot]:
    try:
        return read_heartbeats(folder / "heartbeats").slots()
    except StorageError:
        return []


def _details(run: RunRecord, last: list[Incident], slots: list[RankSlot]) -> list[str]:
    found = [_steps(run)]
    found += _divergence(run)
    warnings = [each for each in last if each.kind == "warning"]
    if warnings:
        newest = warnings[-1]
        found.append(f"warnings: {len(warnings)}, the newest after step {newest.step}: {_one_line(newest.message)}")
        if any("No space left" in each.message for each in warnings):
            found.append(_space(run))
    found += _ranks(slots)
    stacks = sorted((run.path / "stacks").glob("rank-*.txt"))
    if stacks:
        found.append(f"stacks: of {len(stacks)} ranks in {run.path / 'stacks'}")
    found += _output(run.path / "ranks.log")
    found += [f"unreadable: {problem}" for problem in run.problems]
    return found


def _steps(run: RunRecord) -> str:
    done = int(run.progress.last.get("step", 0))
    if run.checkpoint is None:
        return f"steps: {done} finished, no checkpoint"
    lost = max(0, done - run.checkpoint.step)
    repeated = f"; resuming repeats {lost}" if lost else ""
    return f"steps: {done} finished, {run.checkpoint.step} in the newest checkpoint{repeated}"


def _divergence(run: RunRecord) -> list[str]:
    """A line if the loss of the last steps is far above its lowest, or the last gradient above the usual ones."""
    losses, norms = (run.progress.curves[name] for name in ("loss", "grad_norm"))
    found = []
    count = max(1, min(20, len(losses) // 5))
    means = [
        (losses[start][0], statistics.fmean(value for _, value in losses[start : start + count]))
        for start in range(0, max(0, len(losses) - count + 1), count)
    ]
    if len(means) > 1:
        (step, lowest), (_, newest) = min(means, key=lambda mean: mean[1]), means[-1]
        if newest > 1.1 * lowest + 0.1:
            found.append(f"loss: {newest:.4f} at the end, {lowest:.4f} around step {step}: it rises")
    if len(norms) > 10:
        usual = statistics.median(value for _, value in norms[-100:-1])
        step, newest = norms[-1]
        if newest > 10 * usual:
            found.append(f"grad_norm: {newest:.3g} in step {step}, {usual:.3g} usually: it explodes")
    return found


def _ranks(slots: list[RankSlot]) -> list[str]:
    """The place of each rank, those with the longest silence first."""
    present = [slot for slot in slots if slot.pid]
    if len(present) < 2 or all(slot.state == "done" for slot in present):
        return []
    newest = max(slot.seconds for slot in present)
    found = []
    for slot in sorted(present, key=lambda slot: slot.seconds)[:_MOST_RANKS]:
        silent = newest - slot.seconds
        last = f", {silent:.1f} s before the last of all" if silent > 1.0 else ""
        found.append(f"rank {slot.rank}: step {slot.step}, {slot.phase}, {slot.state}{last}")
    if len(present) > _MOST_RANKS:
        found.append(f"and {len(present) - _MOST_RANKS} ranks more")
    return found


def _output(path: Path) -> list[str]:
    """The last line of the ranks' output that looks like an error."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            text = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    last = next((line for line in reversed(text) if _LIBRARY_ERROR.search(line)), None)
    return [f"output: {path}" + ("" if last is None else f", for example {_one_line(last)}")]


def _space(run: RunRecord) -> str:
    free = shutil.disk_usage(run.path).free
    need = "" if run.checkpoint is None else f"; a checkpoint takes {run.checkpoint.num_bytes / 2**30:.3g} GiB"
    return f"space: {free / 2**30:.3g} GiB free for {run.path}{need}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 240 else f"{line[:240]}..."
