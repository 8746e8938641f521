"""Random kills of a run: SIGKILL again and again, resume, and compare with a run that nobody disturbed.

python tools/chaos.py --kills 10
python tools/chaos.py --kills 10 --background

Each kill comes at a random time after the start of training, at least one in four while a checkpoint is being written.
Fails if the ledger of the killed run has lost, repeated or changed a step, or if a final weight differs in one bit.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fault_matrix import changes
from fault_matrix.lab import Lab, ledger, weights
from fault_matrix.processes import Change, Running, stop_server

_LONGEST_SECONDS = 120.0
_STEP_SECONDS = 0.05
"""Added to each step, so that kills come within steps too."""


class Chaos(NamedTuple):
    """Result of the kills."""

    kills: int
    in_saves: int
    """Kills while a checkpoint was being written."""
    same_ledger: bool
    same_weights: bool


def torment(
    folder: Path, *, kills: int, seed: int, steps: int, change: Change | None = None, background: bool = False
) -> Chaos:
    """Trains `steps` steps twice, once with `kills` kills and with `change` in each killed process.

    Args:
        background: the killed run saves in the background.
    """
    lab = Lab(folder / "lab", folder)
    config = lab.config(train={"steps": steps, "stop_after_steps": steps}, checkpoint={"every_steps": 4})
    undisturbed = lab.train(config, folder="undisturbed", seconds=_LONGEST_SECONDS)
    if undisturbed.code != 0:
        raise RuntimeError(f"the undisturbed run ended with {undisturbed.code}: {undisturbed.last_line}")
    rng, in_saves, done, run = random.Random(seed), 0, 0, lab.folder / "run"
    slow = change or partial(changes.slow_steps, _STEP_SECONDS)
    overrides = ["checkpoint.background=true"] if background else []
    while done < kills:
        running = lab.start("train", config, *overrides, "--folder", run, change=slow)
        if not _wait_for_kill(running, run, in_save=done % 4 == 0, delay=rng.uniform(0.0, 1.0)):
            break  # the run has ended
        running.kill(signal.SIGKILL)
        running.wait(seconds=10)
        in_saves += any((run / "checkpoints").glob(".tmp-*"))
        done += 1
    outcome = lab.train(config, seconds=_LONGEST_SECONDS)
    if outcome.code != 0:
        raise RuntimeError(f"the run ended with {outcome.code} after {done} kills: {outcome.last_line}")
    expected = lab.folder / "undisturbed"
    return Chaos(done, in_saves, ledger(run) == ledger(expected), weights(run, steps) == weights(expected, steps))


def _wait_for_kill(running: Running, run: Path, *, in_save: bool, delay: float) -> bool:
    """Waits for the first new step and the random delay, or for the second save; False if the run has ended before."""
    metrics, saved = run / "metrics.jsonl", len(list(run.glob("checkpoints/step-*")))
    before = metrics.stat().st_size if metrics.exists() else 0

    def due() -> bool:
        if in_save:
            return len(list(run.glob("checkpoints/step-*"))) > saved and any(run.glob("checkpoints/.tmp-step-*"))
        return metrics.exists() and metrics.stat().st_size != before

    running.wait_until(due, seconds=_LONGEST_SECONDS)
    if not in_save:
        time.sleep(delay)
    return running.is_alive


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 if the killed run ended as the other one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="number of kills (10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills (0)")
    parser.add_argument("--steps", type=int, help="steps of the run (6 for each kill)")
    parser.add_argument("--background", action="store_true", help="save in the background")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            steps = args.steps or 6 * args.kills
            found = torment(Path(folder), kills=args.kills, seed=args.seed, steps=steps, background=args.background)
        finally:
            stop_server()
    print(
        f"{found.kills} kills, {found.in_saves} in a save: ledger {_word(found.same_ledger)}, final weights "
        f"{_word(found.same_weights)}"
    )
    return int(not (found.same_ledger and found.same_weights and found.kills == args.kills))


def _word(same: bool) -> str:
    return "equal" if same else "DIFFERENT"


if __name__ == "__main__":
    sys.exit(main())
