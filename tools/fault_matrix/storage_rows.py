"""Faults of storage: F40 to F46."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from fault_matrix import changes
from fault_matrix.lab import STEPS, Lab, step_folder
from fault_matrix.processes import become, limit
from fault_matrix.table import fault

_NOBODY = 65534
_FULL_SAVE = partial(changes.fail_writes_of_steps, 4, 4)
"""A full disk where this process may mount none."""


def _fill_disk(first: int, folder: str, last: int = 0) -> None:
    """No byte is left on the disk of `folder` from before step `first` until before step `last`, or for good. An empty
    `folder`: this process can write no files in these steps."""
    ballast = Path(folder) / "ballast"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(_: Any) -> None:
        if not folder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            return
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def empty(_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if folder:
            ballast.unlink(missing_ok=True)

    changes.at_step(first, fill)
    if last:
        changes.at_step(last, empty)


@fault("F40", "the disk is full in a save")
def _disk_full(lab: Lab) -> None:
    with lab.small_disk() as disk:
        config, run = lab.config(), disk / "run"
        fill = partial(_fill_disk, 4, str(disk)) if os.path.ismount(disk) else _FULL_SAVE
        outcome = lab.train(config, folder=f"{disk.name}/run", change=fill)
        lab.check("the checkpoint before stays", step_folder(run, 2).is_dir(), outcome.last_line)
        lab.expect_refusal(outcome, 5, "step-00000004|checkpoints", "No space left", "needs about", "free")
        (disk / "ballast").unlink(missing_ok=True)
        lab.expect_success(lab.train(config, folder=f"{disk.name}/run"), "resumed")


@fault("F41", "a rank reaches its file size limit in a save")
def _file_size_limit(lab: Lab) -> None:
    # Above the files of a log, below the tensors of rank 1.
    small = partial(limit, resource.RLIMIT_FSIZE, 8192)
    outcomes = lab.train_on_ranks(lab.config(), change_of={1: small})
    for outcome in outcomes:
        lab.expect_refusal(outcome, 5, "rank 1", "File too large")


@fault("F42", "the disk is full between saves, and for outputs for people")
def _outputs(lab: Lab) -> None:
    _full_between_saves(lab)
    _full_output(lab)
    config, run = lab.finished_run()
    (run / "loss.png").unlink()
    (run / "loss.png").mkdir()
    outcome = lab.train(config)
    lab.expect_success(outcome, "a finished run, started again")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    outcome = lab.train(config)
    lab.expect_success(outcome, "a resumed run")
    lab.check("a warning names the file", "loss.png" in outcome.text, outcome.last_line)
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_text("")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    outcome = lab.train(config)
    lab.expect_success(outcome, "without tensorboard/")
    lab.check("a warning names tensorboard", "tensorboard" in outcome.text, outcome.last_line)


def _lose_output() -> None:
    """Standard output and error are files on a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    for number in (1, 2):
        os.dup2(full, number)


def _full_output(lab: Lab) -> None:
    config = lab.config("output")
    lab.expect_success(lab.train(config, folder="alone", change=_lose_output), "output on a full disk, process")
    lab.expect_success(lab.start_launch(config, folder="launched", change=_lose_output).wait(seconds=60), "launch")
    for name in ("alone", "launched"):
        events = (lab.folder / name / "incidents.jsonl").read_text()
        lab.check("an event says so", "standard output cannot be written" in events, events[-200:])
        lab.check("the last step is saved", step_folder(lab.folder / name, STEPS).is_dir())
    printed = lab.run("config", config, change=_lose_output)
    lab.check("a command whose result is its output fails", printed.code == 5, f"exit {printed.code}")


def _full_between_saves(lab: Lab) -> None:
    """The run goes on in one process, under the launcher and on ranks of another launcher, and saves its last step."""
    steps = 40  # more lines than fit into the last block of a file
    config = lab.config("full", train={"steps": steps}, checkpoint={"every_steps": steps})
    for launcher in ("process", "launch", "ranks"):
        with lab.small_disk(launcher) as disk:
            mounted = os.path.ismount(disk)
            fill = partial(_fill_disk, 2, str(disk) if mounted else "", steps - 1)
            folder = f"{launcher}/run"
            if launcher == "launch":
                outcomes = [lab.start_launch(config, folder=folder, change=fill).wait(seconds=60)]
            elif launcher == "ranks":
                outcomes = lab.train_on_ranks(config, folder=folder, change_of={0: fill, 1: fill})
            else:
                outcomes = [lab.train(config, folder=folder, change=fill)]
            for outcome in outcomes:
                lab.expect_success(outcome, f"full disk between saves, {launcher}")
            text = outcomes[0].text
            lab.check(
                "a warning names the metrics", not mounted or "metrics.jsonl cannot be written" in text, text[-200:]
            )
            lab.check("the last step is saved", step_folder(disk / "run", steps).is_dir())


def _owned_by_nobody(lab: Lab) -> None:
    for path in (lab.folder, lab.folder.parent):
        path.chmod(0o755)
    for folder, _, files in os.walk(lab.folder):
        for name in [".", *files]:
            os.chown(os.path.join(folder, name), _NOBODY, _NOBODY)


@fault("F43", "a shard or checkpoint is unreadable")
def _unreadable(lab: Lab) -> None:
    config, run = lab.finished_run()
    _owned_by_nobody(lab)
    shard = lab.folder / "data" / "train.bin"
    shard.chmod(0)
    nobody = partial(become, _NOBODY)
    lab.expect_refusal(lab.train(config, folder="new", change=nobody), 3, r"train\.bin", str(_NOBODY), "mode 000")
    shard.chmod(0o644)
    for path in step_folder(run, STEPS).parent.glob("step-*/manifest.json"):
        path.chmod(0)
    outcome = lab.train(config, change=nobody)
    lab.expect_refusal(outcome, 4, r"manifest\.json", "Permission denied")


@fault("F44", "folders of the run are read-only")
def _read_only(lab: Lab) -> None:
    config, run = lab.finished_run()
    _owned_by_nobody(lab)
    nobody = partial(become, _NOBODY)
    (run / "checkpoints").chmod(0o555)
    outcome = lab.train(config, "train.steps=8", change=nobody)
    lab.expect_refusal(outcome, 5, "checkpoints", seconds=20)
    lab.check("before the first step", "step 7/" not in outcome.text)
    (run / "checkpoints").chmod(0o755)
    run.chmod(0o555)
    outcome = lab.train(config, "train.steps=8", change=nobody)
    lab.expect_refusal(outcome, 5, "run", seconds=20)


@fault("F45", "a shard shrinks while it is open")
def _shrinking(lab: Lab) -> None:
    config = lab.config()
    for suffix in ("bin", "idx"):
        path = lab.folder / "data" / f"train.{suffix}"
        shrink = partial(changes.shrink_at_step, 2, str(path), 64)
        outcome = lab.train(config, folder=suffix, change=shrink)
        if suffix == "bin":
            # By the read, or by the comparison of the open file.
            lab.expect_refusal(outcome, 3, r"train\.bin", "expected 3000 bytes, as on open", "found (its end|64)")
        else:
            # Read at the start and not again, or refused; a signal is neither.
            lab.check("no signal for .idx", outcome.code >= 0, f"exit {outcome.code}: {outcome.last_line}")
        lab.shard()


@fault("F46", "a read fails with EIO")
def _read_error(lab: Lab) -> None:
    config = lab.config()
    outcome = lab.train(config, change=partial(changes.fail_reads, "train.bin", 1))
    lab.expect_success(outcome, "one error is tried again")
    outcome = lab.train(config, folder="other", change=partial(changes.fail_reads, "train.bin", 1000))
    lab.expect_refusal(outcome, 3, r"train\.bin", "byte", "Input/output error")
