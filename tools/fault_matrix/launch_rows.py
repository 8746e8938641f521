"""Faults of the ranks of `megalin launch`, and signals to it: F01, F04 to F08, F12, F15, F38."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fault_matrix import changes
from fault_matrix.lab import STEPS, Lab, ledger, step_folder
from fault_matrix.process_rows import reached
from fault_matrix.processes import Running, wait_until_ended
from fault_matrix.table import fault
from megalin.errors import StorageError
from megalin.parallel.heartbeats import HeartbeatFile

PHASES = ("start", "step", "save", "evaluation")
"""Phases in which ranks are killed and stopped."""
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


class Strike(NamedTuple):
    """A rank that gets a signal in a phase of the run."""

    world_size: int
    rank: int
    phase: str

    @classmethod
    def random(cls) -> Strike:
        """The first, a middle or the last of two or four ranks, in any phase."""
        world_size = random.choice((2, 4))
        return cls(world_size, random.choice((0, world_size // 2, world_size - 1)), random.choice(PHASES))

    def start(self, lab: Lab, number: int, *overrides: str) -> Running:
        """Starts a run and sends the signal."""
        config = lab.config(
            data={"validation": [str(lab.shard("validation", seed=2))]},
            train={"micro_batch_size": 1, "evaluate_every_steps": 3, "evaluate_batches": 1},
        )
        change = partial(changes.slow_phases, 1.0)
        running = lab.start_launch(config, *overrides, ranks=self.world_size, change=change)
        struck = running.wait_until(lambda: self._is_there(running.pid), seconds=60)
        lab.check(f"rank {self.rank} of {self.world_size} in {self.phase}", struck, running.text[-200:])
        os.kill(running.children[1 + self.rank], number)
        return running

    def _is_there(self, launcher: int) -> bool:
        for path in Path(f"/proc/{launcher}/fd").iterdir():
            with contextlib.suppress(OSError, StorageError):
                if "megalin-heartbeats" in os.readlink(path):
                    return HeartbeatFile.open(path, writable=False).slots()[self.rank].phase == self.phase
        return False


@fault("F01", "a rank is killed in a step")
def _killed_rank(lab: Lab) -> None:
    strike = Strike.random()
    restarts = random.choice((0, 1))
    running = strike.start(lab, signal.SIGKILL, "--max-restarts", str(restarts))
    message = f"rank {strike.rank} was killed by SIGKILL"
    named = running.wait_until(lambda: message in running.text, seconds=_SECONDS)
    lab.check("named within 5 s", named, running.text[-200:])
    if restarts:
        lab.expect_success(running.wait(seconds=60), "restarted")
    else:
        place = {"start": "at its start", "step": r"in step \d;"}.get(strike.phase, rf"in step \d, {strike.phase};")
        _ends(lab, running, 6, f"{message} .* {place}", seconds=_SECONDS)
        lab.expect_success(lab.train(lab.folder / "tiny.toml"), "resumed")
    done = [json.loads(line)["step"] for line in ledger(lab.folder / "run")]
    lab.check("no step lost or repeated", done == list(range(1, STEPS + 1)), f"{done}")


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


@fault("F08", "a rank is stopped")
def _stopped_rank(lab: Lab) -> None:
    strike = Strike.random()
    running = strike.start(lab, signal.SIGSTOP, "train.hang_timeout_seconds=10")
    place = {"start": "phase start", "step": r"step \d \(phase: step\)"}.get(strike.phase, strike.phase)
    _ends(lab, running, 7, rf"RankStalledError: rank {strike.rank} stalled: .*{place}.*SIGSTOP", seconds=15.0)
    lab.expect_success(lab.train(lab.folder / "tiny.toml"), "resumed")


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
    running = lab.start_launch(config, "checkpoint.every_steps=100", change=partial(changes.slow_steps, 1.0))
    running.wait_until(lambda: "step 3/6" in running.text, seconds=60)
    running.kill(signal.SIGINT)
    _ends(lab, running, 75, r"stopped: SIGINT after \d of 6 steps, all of them saved")
    lines = [line for line in running.text.splitlines() if re.search("Error|SIG|Traceback|File", line)]
    lab.check("Ctrl-C prints one line", len(lines) == 1, f"{lines}")


@fault("F38", "the port is taken")
def _taken_port(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        running = lab.start_launch(lab.config(), MASTER_PORT=port, MASTER_ADDR="127.0.0.1")
        lab.expect_success(running.wait(seconds=60), "a free port is chosen")
