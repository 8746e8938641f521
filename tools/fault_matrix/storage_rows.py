"""Faults of storage: F40 to F46."""

from __future__ import annotations

import os
import resource
import shutil
from functools import partial

from fault_matrix import changes
from fault_matrix.lab import STEPS, Lab, step_folder
from fault_matrix.processes import become, limit
from fault_matrix.table import fault

_NOBODY = 65534


@fault("F40", "the disk is full in a save")
def _disk_full(lab: Lab) -> None:
    config, run = lab.config(), lab.folder / "run"
    outcome = lab.train(config, change=partial(changes.fail_writes_of_steps, 4, 4))
    lab.check("the checkpoint before stays", step_folder(run, 2).is_dir(), outcome.last_line)
    lab.expect_refusal(outcome, 5, "step-00000004|checkpoints", "No space left", "needs about", "free")
    lab.expect_success(lab.train(config), "resumed")


@fault("F41", "a rank reaches its file size limit in a save")
def _file_size_limit(lab: Lab) -> None:
    # Above the files of a log, below the tensors of rank 1.
    small = partial(limit, resource.RLIMIT_FSIZE, 8192)
    outcomes = lab.train_on_ranks(lab.config(), change_of={1: small})
    for outcome in outcomes:
        lab.expect_refusal(outcome, 5, "rank 1", "File too large")


@fault("F42", "outputs for people cannot be written")
def _outputs(lab: Lab) -> None:
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
