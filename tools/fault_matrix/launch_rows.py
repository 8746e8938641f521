"""Faults of the ranks of `megalin launch`, and signals to it: F01, F04 to F07, F12, F15, F38."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
from functools import partial

from fault_matrix import changes
from fault_matrix.lab import STEPS, Lab, ledger, step_folder
from fault_matrix.process_rows import reached
from fault_matrix.processes import Running, wait_until_ended
from fault_matrix.table import fault

_SECONDS = 5.0
"""Longest time from the failure of a rank to the end of all."""


def _ends(lab: Lab, running: Running, code: int, *patterns: str, seconds: float = 60.0) -> None:
    """Records that a launch, whose ranks have just failed or been signalled, ends with this code and message."""
    processes = running.children if running.is_alive else []
    outcome = running.wait(seconds=seconds)
    lab.check(f"exit {code}", outcome.code == code, f"exit {outcome.code}: {outcome.last_line}")
    lacking = [pattern for pattern in patterns if not re.search(pattern, outcome.text)]
    lab.check("message", not lacking, f"lacks {', '.join(lacking)}: {outcome.last_line}")
    lab.check("no text of gloo", "gloo" not in outcome.text and "frame #" not in outcome.text, outcome.last_line)
    lab.check("no process is left", wait_until_ended(processes, seconds=_SECONDS), f"{processes}")


@fault("F01", "a rank is killed in a step")
def _killed_rank(lab: Lab) -> None:
    _, expected = lab.finished_run("expected")
    config, run = lab.config(), lab.folder / "run"
    world_size, restarts = random.choice([(2, 1), (4, 0)])
    rank = random.randrange(world_size)
    options = ["--max-restarts", str(restarts), "train.micro_batch_size=1"]
    running = lab.start_launch(config, *options, ranks=world_size, change=partial(changes.slow_steps, 0.2))
    running.wait_until(lambda: reached(run, 2), seconds=60)
    os.kill(running.children[1 + rank], signal.SIGKILL)
    named = running.wait_until(lambda: f"rank {rank} was killed by SIGKILL" in running.text, seconds=_SECONDS)
    lab.check("named within 5 s", named, running.text[-200:])
    if restarts:
        lab.expect_success(running.wait(seconds=60), "restarted")
    else:
        _ends(lab, running, 6, rf"rank {rank} was killed by SIGKILL .* in step \d", seconds=_SECONDS)
        lab.expect_success(lab.train(config), "resumed")
    lab.check("no step lost or repeated", ledger(run) == ledger(expected), f"{len(ledger(run))} lines")


@fault("F04", "the launcher is killed")
def _killed_launcher(lab: Lab) -> None:
    config, run = lab.config(), lab.folder / "run"
    running = lab.start_launch(config, change=partial(changes.slow_steps, 0.2))
    running.wait_until(lambda: reached(run, 2), seconds=60)
    processes = running.children
    running.kill()
    lab.check("no process is left", wait_until_ended(processes, seconds=_SECONDS), f"{processes}")
    running.wait(seconds=10)
    lab.expect_success(lab.train(config), "the folder is free")


def _failing(lab: Lab, kind: str, code: int, *patterns: str) -> None:
    rank = random.randrange(2)
    change = partial(changes.fail_on_rank, rank, 4, kind)
    running = lab.start_launch(lab.config(), change=change)
    reports = [pattern.format(rank=rank) for pattern in patterns]
    running.wait_until(lambda: reached(lab.folder / "run", 2), seconds=60)
    _ends(lab, running, code, *reports, seconds=2 * _SECONDS)


@fault("F05", "a rank raises")
def _raising_rank(lab: Lab) -> None:
    _failing(lab, "raises", 1, r"KeyError: 'planted'\nrank {rank} ended with exit code 1 in step 4")
    texts = [path.read_text() for path in lab.folder.glob("output-*")]
    lab.check("one traceback", sum(text.count("Traceback") for text in texts) == 1, texts[-1][-200:])


@fault("F06", "a rank leaves early with 0")
def _leaving_rank(lab: Lab) -> None:
    _failing(lab, "leaves", 6, r"rank {rank} left before its end, with exit code 0 in step 4")


@fault("F07", "a rank is out of memory")
def _full_memory(lab: Lab) -> None:
    _failing(lab, "memory", 10, r"rank {rank} is out of host memory: .* GiB resident, limits: address space")


@fault("F12", "SIGTERM to the launcher")
def _terminated_launcher(lab: Lab) -> None:
    _, expected = lab.finished_run("expected")
    config, run = lab.config(), lab.folder / "run"
    running = lab.start_launch(config, change=partial(changes.slow_steps, 0.3))
    running.wait_until(lambda: reached(run, 2), seconds=60)
    running.kill(signal.SIGTERM)
    _ends(lab, running, 75, r"SIGTERM after \d of 6 steps, all of them saved")
    done = len(ledger(run))
    lab.check("all steps are saved", step_folder(run, done).is_dir(), f"no checkpoint of step {done}")
    lab.check("before the end", 2 <= done < STEPS, f"{done} steps")
    lab.expect_success(lab.start_launch(config).wait(seconds=60), "resumed")
    lab.check("no step lost or repeated", ledger(run) == ledger(expected), f"{len(ledger(run))} lines")


@fault("F15", "a second SIGTERM, Ctrl-C")
def _signalled_twice(lab: Lab) -> None:
    config, run = lab.config(), lab.folder / "run"
    running = lab.start_launch(config, change=partial(changes.slow_operations, 0.2))
    running.wait_until(lambda: any((run / "checkpoints").glob(".tmp-step-00000004-*")), seconds=60)
    running.kill(signal.SIGTERM)
    running.wait_until(lambda: False, seconds=0.4)
    running.kill(signal.SIGTERM)
    _ends(lab, running, 143, "SIGTERM again: the ranks were ended", seconds=2.0)
    lab.check("the checkpoint before stays", step_folder(run, 2).is_dir())
    running = lab.start_launch(config, change=partial(changes.slow_steps, 0.3))
    running.wait_until(lambda: reached(run, 5), seconds=60)
    before = len(running.text)
    running.kill(signal.SIGINT)
    _ends(lab, running, 75, r"SIGTERM after \d of 6 steps, all of them saved")
    errors = [line for line in running.text[before:].splitlines() if not line.startswith("step ")]
    lab.check("Ctrl-C prints one line", len(errors) == 1, f"{errors}")


@fault("F38", "the port is taken")
def _taken_port(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        running = lab.start_launch(lab.config(), MASTER_PORT=port, MASTER_ADDR="127.0.0.1")
        lab.expect_success(running.wait(seconds=60), "a free port is chosen")
