"""Faults of processes, preemption, numbers and speed: F02, F03, F11, F13, F14, F16, F17, F18, F19, F20, F21, F23,
F24."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

from fault_matrix import changes
from fault_matrix.lab import STEPS, Lab, ledger, metrics, step_folder, weights
from fault_matrix.processes import Running
from fault_matrix.table import fault
from megalin.train.jsonl import read_records


def _same_end(lab: Lab, run: Path, expected: Path) -> None:
    lab.check("no step lost or repeated", ledger(run) == ledger(expected), f"{len(ledger(run))} lines in the ledger")
    lab.check("same final weights", weights(run) == weights(expected), "weights differ")


def reached(run: Path, step: int) -> bool:
    """Whether a run has finished a step."""
    path = run / "ledger.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= step


@fault("F02", "a rank is killed while it writes a checkpoint")
def _killed_in_save(lab: Lab) -> None:
    _, expected = lab.finished_run("expected")
    config, run = lab.config(), lab.folder / "run"
    slow = partial(changes.slow_operations, 0.1)
    running = lab.start("train", config, "--folder", run, change=slow)
    writing = running.wait_until(lambda: any((run / "checkpoints").glob(".tmp-step-00000004-*/*")), seconds=60)
    running.kill()
    running.wait(seconds=10)
    lab.check("killed while it wrote", writing, running.text[-200:])
    lab.expect_success(lab.train(config), "resumed")
    _same_end(lab, run, expected)
    lab.check("no temporary folder stays", not list((run / "checkpoints").glob(".tmp-*")))


@fault("F03", "power fails at an operation of publishing")
def _killed_while_publishing(lab: Lab) -> None:
    from crashpoints import crash_points

    found = crash_points(lab.folder / "points", every=7)
    lab.check("a verified checkpoint after each", found.lost == 0, f"{found.lost} of {found.points} lost")
    lab.check("points were tried", found.points >= 3, f"{found.points}")


@fault("F11", "a shard is a named pipe")
def _pipe(lab: Lab) -> None:
    config = lab.config()
    (lab.folder / "data" / "train.bin").unlink()
    os.mkfifo(lab.folder / "data" / "train.bin")
    lab.expect_refusal(lab.train(config, seconds=20), 3, r"train\.bin", "regular file")


def _terminate(running: Running, run: Path, step: int) -> None:
    running.wait_until(lambda: reached(run, step), seconds=60)
    running.kill(signal.SIGTERM)


@fault("F13", "SIGTERM to one rank")
def _terminated_rank(lab: Lab) -> None:
    _, expected = lab.finished_run("expected")
    config, run = lab.config(), lab.folder / "run"
    slow = dict.fromkeys((0, 1), partial(changes.slow_steps, 0.3))
    ranks = lab.start_ranks(config, change_of=slow)
    _terminate(ranks[1], run, 2)
    codes = [rank.wait(seconds=60).code for rank in ranks]
    lab.check("every rank exits with 75", codes == [75, 75], f"exit {codes}")
    done = len(ledger(run))
    lab.check("all steps are saved", step_folder(run, done).is_dir(), f"no checkpoint of step {done}")
    lab.check("before the end", 2 <= done < STEPS, f"{done} steps")
    outcome = lab.train_on_ranks(config)[0]
    lab.expect_success(outcome, "resumed")
    lab.check("no step lost or repeated", ledger(run) == ledger(expected), f"{len(ledger(run))} lines")


@fault("F14", "SIGTERM during a save")
def _terminated_in_save(lab: Lab) -> None:
    _, expected = lab.finished_run("expected")
    config, run = lab.config(), lab.folder / "run"
    running = lab.start("train", config, "--folder", run, change=partial(changes.slow_operations, 0.1))
    writing = running.wait_until(lambda: any((run / "checkpoints").glob(".tmp-step-00000004-*")), seconds=60)
    running.kill(signal.SIGTERM)
    outcome = running.wait(seconds=60)
    lab.check("exits with 75", outcome.code == 75, f"exit {outcome.code}: {outcome.last_line}")
    lab.check("signal during the save", writing)
    saved = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    lab.check("the save completed once", saved == ["step-00000002", "step-00000004"], f"{saved}")
    lab.expect_success(lab.train(config), "resumed")
    _same_end(lab, run, expected)


@fault("F16", "grace is shorter than the save")
def _short_grace(lab: Lab) -> None:
    _, expected = lab.finished_run("expected")
    config, run = lab.config(), lab.folder / "run"
    running = lab.start("train", config, "--folder", run, change=partial(changes.slow_operations, 0.2))
    running.wait_until(lambda: any((run / "checkpoints").glob(".tmp-step-00000004-*")), seconds=60)
    running.kill(signal.SIGTERM)
    running.wait_until(lambda: False, seconds=0.3)
    running.kill()
    running.wait(seconds=10)
    lab.check("the checkpoint before stays", step_folder(run, 2).is_dir())
    lab.expect_success(lab.train(config), "resumed")
    _same_end(lab, run, expected)


@fault("F17", "a gradient is NaN on one rank")
def _nan_on_one_rank(lab: Lab) -> None:
    config, run = lab.config(), lab.folder / "run"
    broken = {1: partial(changes.break_gradients, 3, 3, float("nan"))}
    outcomes = lab.train_on_ranks(config, change_of=broken)
    codes = [outcome.code for outcome in outcomes]
    lab.check("every rank stops with 8", codes == [8, 8], f"exit {codes}: {outcomes[0].last_line}")
    text = outcomes[0].text
    lab.check("step, rank and parameter are named", "step 3" in text and "rank 1" in text, outcomes[0].last_line)
    lab.check("sample ids are named", "sample" in outcomes[0].last_line, outcomes[0].last_line)
    saved = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    lab.check("nothing is saved after it", saved == ["step-00000002"], f"{saved}")


@fault("F18", "gradients are infinite for five steps")
def _infinite(lab: Lab) -> None:
    config, run = lab.config(), lab.folder / "run"
    outcome = lab.train(config, change=partial(changes.break_gradients, 2, 6, float("inf")))
    lab.expect_refusal(outcome, 8, "step 2")
    lab.check("no bad save", not list((run / "checkpoints").glob("step-*")))
    lab.expect_success(lab.train(config), "started again")


@fault("F19", "loss spike")
def _spike(lab: Lab) -> None:
    spike, steps = 110, 120
    tables = {"train": {"steps": steps}, "checkpoint": {"every_steps": steps}}
    config = lab.config(shards=[lab.shard(largest=4, num_documents=400)], **tables)
    corrupt = partial(changes.corrupt_batch, spike)
    warned = lab.train(config, folder="warned", change=corrupt)
    lab.expect_success(warned, "the run goes on")
    found = [line["step"] for line in metrics(lab.folder / "warned") if "spike" in line]
    lab.check("the spike alone is found", found == [spike], f"{found}")
    named = re.search(rf"step {spike}: spike: loss .* update was applied\. Its samples, .*: 0: \d+", warned.text)
    lab.check("a warning with loss, median and samples", named, warned.last_line)
    outcomes = lab.train_on_ranks(config, "train.on_spike=skip", change_of=dict.fromkeys(range(2), corrupt))
    lab.check("with skip too", [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].last_line)
    skipped = [record["step"] for record in read_records(lab.folder / "run" / "ledger.jsonl") if "skipped" in record]
    lab.check("the ledger has the skipped step", skipped == [spike], f"{skipped}")
    after = [[line["loss"] for line in metrics(lab.folder / name)[spike:]] for name in ("warned", "run")]
    lab.check("the loss after it is lower with skip", sum(after[1]) < sum(after[0]), f"{after}")
    _roll_back(lab, config, spike, steps)


def _roll_back(lab: Lab, config: Path, spike: int, steps: int) -> None:
    """Two ranks roll back and are killed inside of the window; one process goes on."""
    saved, folder = spike - 10, lab.folder / "rolled"
    rollback = ("train.on_spike=rollback", f"checkpoint.every_steps={saved}")
    killed = partial(changes.corrupt_batch, spike, killed_at=spike + 5)
    outcomes = lab.train_on_ranks(config, *rollback, folder="rolled", change_of=dict.fromkeys(range(2), killed))
    codes = [outcome.code for outcome in outcomes]
    lab.check("killed after the rollback", codes == [-signal.SIGKILL] * 2, f"exit {codes}: {outcomes[0].last_line}")
    said = f"rolled back from step {spike} to the checkpoint of step {saved}: batches {saved + 1} to {spike} of"
    lab.check("a warning with the batches", said in outcomes[0].text, outcomes[0].last_line)
    lab.expect_success(lab.train(config, *rollback, folder="rolled"), "one process goes on")
    read = [record.get("batch", record["step"]) for record in read_records(folder / "ledger.jsonl")]
    without = [*range(1, saved + 1), *range(spike + 1, steps + spike - saved + 1)]
    lab.check("the ledger has every other batch once", read == without, f"{read[saved - 1 :]}")
    stopped = lab.train(config, *rollback, "train.max_rollbacks=0", folder="limited", change=killed)
    lab.expect_refusal(
        stopped, 8, rf"step {spike}: a spike after 0 rollbacks .* train.max_rollbacks = 0 allows no more"
    )
    lab.check("the checkpoint stays", [*(lab.folder / "limited" / "checkpoints").glob("step-*")] != [], "no checkpoint")


@fault("F20", "fp16 scale at its lower limit")
def _lowest_scale(lab: Lab) -> None:
    config, run = lab.config(train={"dtype": "float16", "loss_scale": {"initial": 4.0}}), lab.folder / "run"
    broken = {1: partial(changes.break_gradients, 2, 9, float("inf"))}
    outcomes = lab.train_on_ranks(config, change_of=broken)
    codes = [outcome.code for outcome in outcomes]
    lab.check("every rank stops with 8", codes == [8, 8], f"exit {codes}: {outcomes[0].last_line}")
    found = [(step["loss_scale"], step["skipped"]) for step in metrics(run)]
    lab.check("two updates are skipped before", found == [(4.0, 0), (4.0, 1), (2.0, 1)], f"{found}")
    text = outcomes[0].text
    named = re.search(r"step 4: .*loss scale 1, .*\(3 overflows in this run\).*first in rank 1: \S+ \(gradient\)", text)
    lab.check("scale, overflows, rank and parameter are named", named, outcomes[0].last_line)
    saved = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    lab.check("nothing is saved after it", saved == ["step-00000002"], f"{saved}")


@fault("F21", "flipped bit in a replica")
def _drift(lab: Lab) -> None:
    config = lab.config(parallel={"shard": 1})
    for suffix in ("embedding.weight", ".exp_avg", ".exp_avg_sq"):
        folder = f"run{suffix}"
        outcomes = lab.train_on_ranks(config, folder=folder, change_of={1: partial(changes.flip_bit, 3, suffix)})
        codes, text = [outcome.code for outcome in outcomes], outcomes[0].text
        lab.check(f"{suffix}: every rank stops with 11", codes == [11, 11], f"exit {codes}: {outcomes[0].last_line}")
        named = re.search(rf"step 4: copies of .*\n  \S*{suffix}: ranks 0, 1 differ", text, re.DOTALL)
        lab.check("step, tensor and ranks are named", named, outcomes[0].last_line)
        saved = sorted(path.name for path in (lab.folder / folder / "checkpoints").glob("step-*"))
        lab.check("no drifted weight is saved", saved == ["step-00000002"], f"{saved}")
    again = [outcome.code for outcome in lab.train_on_ranks(config, folder=folder)]
    lab.check("started again, it ends", again == [0, 0], f"exit {again}")


@fault("F23", "slow data reader on one rank")
def _slow_reader(lab: Lab) -> None:
    config, run = lab.config(train={"steps": 24}, checkpoint={"every_steps": 24}), lab.folder / "run"
    outcomes = lab.train_on_ranks(config, change_of={1: partial(changes.slow_reads, 0.3)})
    text = outcomes[0].text
    warned = re.search(r"waited for data for \d+% of their time, longest on rank 1", text)
    lab.check("a warning names the fraction and the rank", warned, outcomes[0].last_line)
    lab.check("the run goes on", [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].last_line)
    longest = [step["data_wait_rank"] for step in metrics(run)[1:]]
    lab.check("metrics name the rank", longest.count(1) > 0.8 * len(longest), f"{longest}")
    waited = sum(step["data_wait_seconds"] for step in metrics(run))
    lab.check("metrics have its seconds", waited > 0.3, f"{waited:.2f} s")


@fault("F24", "slow storage")
def _slow_storage(lab: Lab) -> None:
    config, run = lab.config(train={"steps": 9}, checkpoint={"every_steps": 2}), lab.folder / "run"
    running = lab.start("train", config, "--folder", run, change=partial(changes.slow_operations, 0.1))
    most = 0

    def count_saves() -> bool:
        nonlocal most
        most = max(most, len(list((run / "checkpoints").glob(".tmp-*"))))
        return False

    running.wait_until(count_saves, seconds=60)
    outcome = running.wait(seconds=10)
    lab.expect_success(outcome, "the run goes on")
    lab.check("a warning of slow saves", "saves took" in outcome.text, outcome.last_line)
    lines = metrics(run)
    saves = [line["save_seconds"] for line in lines if "save_seconds" in line]
    lab.check("metrics have their seconds", len(saves) == 4 and min(saves) > 1, f"{saves}")
    slowest = max(line["step_seconds"] for line in lines[1:])
    lab.check("they count for no step", slowest < 1, f"a step of {slowest:.1f} s")
    lab.check("one save at a time", most == 1, f"{most}")
