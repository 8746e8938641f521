"""Report on a quickstart run; fails unless the held-out loss is clearly below the unigram entropy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

REQUIRED_MARGIN = 1.0
"""Nats a token. A model without context cannot go below the unigram entropy."""
MADE = {
    "checkpoints": "weights and optimizer state; they load on any mesh",
    "config.toml": "the resolved config",
    "evaluation.json": "this evaluation",
    "loss.png": "the loss curve",
    "metrics.jsonl": "loss, learning rate, tokens/s and more, one line a step",
    "tensorboard": "the same metrics for TensorBoard",
}


def main() -> int:
    """Prints the report; returns 1 if a file is missing or the loss is too high."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder with evaluation.json, from `megalin eval --json`")
    run = parser.parse_args().run
    evaluation = json.loads((run / "evaluation.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    margin = evaluation["unigram_entropy"] - evaluation["loss"]
    print(f"\ntraining loss    {lines[0]['loss']:7.3f} -> {lines[-1]['loss']:.3f} nats a token in {len(lines)} steps")
    print(f"held-out loss    {evaluation['loss']:7.3f} nats a token over {evaluation['tokens']:,} tokens")
    print(f"unigram entropy  {evaluation['unigram_entropy']:7.3f} nats a token, of the same tokens")
    print(f"margin           {margin:7.3f} nats a token; at least {REQUIRED_MARGIN} is required")
    print(f"perplexity       {evaluation['perplexity']:7.2f}")
    print(f"bits per byte    {evaluation['bits_per_byte']:7.3f}")
    print(f"\nMade in {run}:")
    for name, what in MADE.items():
        print(f"  {name:16} {what}")
    problems = [f"{run / name} is missing" for name in MADE if not (run / name).exists()]
    if steps != list(range(1, len(steps) + 1)):
        problems.append(f"{run / 'metrics.jsonl'} does not contain each step once: the run was not resumed correctly")
    if not margin >= REQUIRED_MARGIN:
        problems.append(f"held-out loss is {margin:.3f} nats below the unigram entropy, not {REQUIRED_MARGIN}")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
