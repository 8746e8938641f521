"""Runs of NCCL ranks on GPUs that are stopped, killed or slow, or undisturbed."""

from __future__ import annotations

import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fault_matrix import changes, gpu_changes
from fault_matrix.lab import Lab, metrics
from fault_matrix.launch_rows import PHASES
from fault_matrix.processes import Change, Outcome, Running

SHARED_GPU = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""Variables of ranks that share a GPU, from NCCL 2.30 on."""
HANG_SECONDS = 10
"""Limit of a rank without progress in these runs."""
_START_SECONDS, _GONE_SECONDS, _POLL_SECONDS = 90.0, 5.0, 0.02
_STEP = 5
"""A step by which the results of two others without compilation are on the host: they set the limit of a step."""
_FIRST_SLOW, _LATEST = 3, 23
"""The first step that counts, as the first one compiles, and the latest one in which a slow rank is named."""


class CaseResult(NamedTuple):
    """Result of a case."""

    name: str
    passes: bool
    seen: str
    details: str = ""
    """Output of ranks, for the log."""

    def line(self) -> str:
        """The case as text."""
        return f"{'PASS' if self.passes else 'FAIL'}  {self.name}: {self.seen}"


def _small(lab: Lab, **train: Any) -> Path:
    sublayers = [{"type": "tnl", "num_heads": 2}, {"type": "glu", "intermediate_size": 128}]
    return lab.config(
        model={"vocab_size": 257, "hidden_size": 128, "init_std": 0.1, "layers": [{"sublayers": sublayers}] * 2},
        data={"validation": [str(lab.shard("held"))], "sequence_length": 64},
        train={"evaluate_every_steps": 3, "evaluate_batches": 1, "hang_timeout_seconds": HANG_SECONDS} | train,
    )


def _large(lab: Lab, *, steps: int, micro_batches: int, blocks: int = 6) -> Path:
    """79 million parameters in six blocks."""
    sublayers = [{"type": "tnl", "num_heads": 8}, {"type": "glu", "intermediate_size": 2816}]
    train = {"steps": steps, "micro_batch_size": 8, "global_batch_size": 16 * micro_batches, "dtype": "bfloat16"}
    return lab.config(
        shards=[lab.shard(num_documents=12000)],
        model={"vocab_size": 257, "hidden_size": 1024, "init_std": 0.02, "layers": [{"sublayers": sublayers}] * blocks},
        data={"validation": [str(lab.shard("held", num_documents=3000))], "sequence_length": 2048},
        train=train | {"evaluate_every_steps": max(50, steps // 20), "evaluate_batches": 1},
        checkpoint={"every_steps": max(50, steps // 4), "keep_latest": 1},
        optimizer={"lr": 1e-4},
    )


def clean_run(lab: Lab, name: str = "start of two ranks", environment: Mapping[str, str] | None = None) -> CaseResult:
    """A small run without a fault; it also fills the caches of kernels."""
    started = time.monotonic()
    variables = {} if environment is None else dict.fromkeys(range(2), environment)
    outcomes = lab.train_on_ranks(_small(lab), environment_of=variables, seconds=_START_SECONDS)
    seen = f"exit {[each.code for each in outcomes]} after {time.monotonic() - started:.0f} s; {outcomes[0].last_line}"
    return CaseResult(name, all(each.code == 0 for each in outcomes), seen, _texts(outcomes))


def shared_gpu(lab: Lab) -> CaseResult:
    """Two ranks on one GPU, which NCCL allows from 2.30 on."""
    return clean_run(lab, "two ranks of one GPU (needs NCCL 2.30)", SHARED_GPU)


class SignalledRun:
    """A small run of two ranks; one gets a signal."""

    def __init__(self, lab: Lab, *, victim: int, phase: str, number: int) -> None:
        self.name = f"{signal.Signals(number).name} of rank {victim} in {phase}"
        self._victim, self._phase, self._stops = victim, phase, number == signal.SIGSTOP
        change: dict[int, Change] = {victim: partial(changes.signal_in, phase, number, step=_STEP)}
        running: list[Running] = lab.start_ranks(_small(lab), change_of=change)
        self._hit, (self._other,) = running[victim], [each for each in running if each is not running[victim]]
        self._started = time.monotonic()
        self._hit_at = self._left_at = 0.0

    def ended(self) -> bool:
        """Looks at the processes; True once the run is over or takes too long."""
        now = time.monotonic()
        if not self._hit_at:
            if self._hit.state in ("T", "Z"):
                self._hit_at = now
            return now > self._started + _START_SECONDS
        if not self._left_at:
            if not self._other.is_alive:
                self._left_at = now
            return now > self._hit_at + _START_SECONDS
        return not self._hit.is_alive or now > self._left_at + _GONE_SECONDS

    def result(self) -> CaseResult:
        """The result; kills processes that are left."""
        gone = not self._hit.is_alive
        self._hit.kill()
        outcome = self._other.wait(seconds=0.0)
        took = self._left_at - self._hit_at if self._left_at else float("inf")
        code, longest, verb = (7, HANG_SECONDS + 5, "stalled") if self._stops else (6, 5, "died")
        place = rf"in step {_STEP} \(phase: step\)" if self._phase == "step" else f"phase:? {self._phase}"
        checks = {
            f"exit {outcome.code}": outcome.code == code,
            f"{took:.1f} s": took <= longest,
            "rank named": re.search(rf"rank {self._victim} {verb}", outcome.text),
            "phase named": re.search(place, outcome.text),
            "no process left": gone,
        }
        seen = ", ".join(text if holds else f"NOT {text}" for text, holds in checks.items())
        return CaseResult(self.name, all(checks.values()), seen, _texts([outcome]) + self._hit.text[-2000:])


def strikes(
    make_lab: Callable[[], Lab],
    *,
    at_once: int,
    numbers: Sequence[int] = (signal.SIGSTOP, signal.SIGKILL),
    phases: Sequence[str] = PHASES,
) -> Iterator[CaseResult]:
    """Both ranks, stopped and killed in every phase; so many runs share the GPUs at a time."""
    cells = [
        {"victim": victim, "phase": phase, "number": number}
        for number in numbers
        for phase in phases
        for victim in (0, 1)
    ]
    for first in range(0, len(cells), at_once):
        running = [SignalledRun(make_lab(), **cell) for cell in cells[first : first + at_once]]  # type: ignore[arg-type]
        while running:
            time.sleep(_POLL_SECONDS)
            for strike in [each for each in running if each.ended()]:
                running.remove(strike)
                yield strike.result()


class SlowRank(NamedTuple):
    """A rank that is slow in every step."""

    victim: int
    name: str
    change: Change


SLOW = {
    "slow_sleep": SlowRank(1, "whose GPU sleeps 25 ms in each block", partial(gpu_changes.slow_blocks, 25.0)),
    "slow_matmuls": SlowRank(0, "with 40 more matmuls a step", partial(gpu_changes.more_matmuls, 40)),
    "slow_host": SlowRank(1, "whose host sleeps 80 ms a step", partial(changes.slow_steps, 0.08)),
}


def slow_rank(lab: Lab, slow: SlowRank) -> CaseResult:
    """A rank is slow in every step; it must be named within 20 steps."""
    victim, config = slow.victim, _large(lab, steps=26, micro_batches=2)
    outcomes = lab.train_on_ranks(config, change_of={victim: slow.change}, seconds=_START_SECONDS)
    text = outcomes[0].text
    warned = [(int(step), int(rank)) for step, rank in re.findall(r"step (\d+): rank (\d+) is slow", text)]
    passes = [outcome.code for outcome in outcomes] == [0, 0] and len(warned) == 1
    passes = passes and warned[0][1] == victim and _FIRST_SLOW < warned[0][0] <= _LATEST
    seen = f"named (step, rank) {warned}, exit {[each.code for each in outcomes]}, {_ratios(lab)}"
    if found := re.search(r"a sleep takes .*", outcomes[victim].text):
        seen += f"; {found[0]}"
    return CaseResult(f"rank {victim} {slow.name}", passes, seen, _texts(outcomes))


def hang_in_replay(lab: Lab, victim: int) -> CaseResult:
    """The GPU of a rank hangs in a replay of a CUDA graph; the others' devices wait in a collective of it."""
    config = _small(lab, steps=40, cuda_graphs=True)
    change: dict[int, Change] = {victim: partial(gpu_changes.hang_before_replay, 3)}
    started = time.monotonic()
    outcomes = lab.train_on_ranks(config, change_of=change, seconds=_START_SECONDS)
    other = outcomes[1 - victim]
    checks = {
        f"exit {other.code}": other.code == 7,
        "rank named": re.search(rf"rank {victim} stalled: no progress for \d+ s in step \d+", other.text),
        "collective named": (
            found := re.search(rf"rank {1 - victim} waits in (.* in the CUDA graph of its step)", other.text)
        ),
    }
    seen = ", ".join(text if holds else f"NOT {text}" for text, holds in checks.items())
    seen += f", {time.monotonic() - started:.0f} s after the start{f': {found[1]}' if found else ''}"
    return CaseResult(f"GPU of rank {victim} hangs in a replay", all(checks.values()), seen, _texts(outcomes))


def clean_steps(lab: Lab, *, measured: int, unmeasured: int, seconds: float) -> CaseResult:
    """No rank is named in steps without a fault, with evaluations and saves; the last steps measure no waits, which
    shows the cost. The run is killed after so many seconds."""
    config = _large(lab, steps=measured + unmeasured, micro_batches=1, blocks=4)
    change = dict.fromkeys(range(2), partial(gpu_changes.measured_until, measured))
    outcomes = lab.train_on_ranks(config, change_of=change, seconds=seconds)
    text = outcomes[0].text
    named, stalls = len(re.findall(r"is slow: its own time", text)), text.count("stalled")
    durations = [line["step_seconds"] for line in _metrics(lab)]
    ends = (measured // 2, measured), (measured + 1, measured + unmeasured)
    medians = [1e3 * statistics.median(durations[first:last]) for first, last in ends if len(durations) >= last]
    cost = re.search(r"waits a step: .*", text)
    seen = (
        f"{named} named, {stalls} stalls in {len(durations)} steps, exit {[each.code for each in outcomes]}, "
        f"{_ratios(lab)}; median step with and without measurement {[round(each, 3) for each in medians]} ms; "
        f"{cost[0] if cost else 'no cost'}"
    )
    passes = named == stalls == 0 and [each.code for each in outcomes] == [0, 0] and "ratio" in seen
    return CaseResult(f"{measured} clean steps", passes, seen, _texts(outcomes))


def _metrics(lab: Lab) -> list[dict[str, Any]]:
    """The metrics of the run; none where it failed before its first step."""
    run = lab.folder / "run"
    return metrics(run) if (run / "metrics.jsonl").exists() else []


def _ratios(lab: Lab) -> str:
    """The ratios of the slowest rank's own time, from the metrics."""
    lines = _metrics(lab)
    ratios = sorted(line["slowest_rank_ratio"] for line in lines if "slowest_rank_ratio" in line)
    if not ratios:
        return f"no metric of own times in {len(lines)} steps"
    step = 1e3 * statistics.median(line["step_seconds"] for line in lines)
    middle = statistics.median(ratios)
    return f"ratio {ratios[0]:.2f} to {ratios[-1]:.2f}, median {middle:.2f}; median step {step:.0f} ms"


def _texts(outcomes: Sequence[Outcome]) -> str:
    return "\n".join(outcome.text[-6000:] for outcome in outcomes)
