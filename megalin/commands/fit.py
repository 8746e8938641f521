"""`megalin fit`: scaling laws of measured losses, and predictions from them."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from megalin.errors import ConfigError

if TYPE_CHECKING:
    from megalin.scaling_laws.budget import Answer, Candidate
    from megalin.scaling_laws.fit import Fit
    from megalin.scaling_laws.points import Point


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    from megalin.scaling_laws.budget import answer_lines
    from megalin.scaling_laws.figures import figures
    from megalin.scaling_laws.fit import fit_points
    from megalin.scaling_laws.page import write_page, write_pictures
    from megalin.scaling_laws.points import by_mixer
    from megalin.scaling_laws.text import report_lines

    _check(arguments)
    points, candidates = _read(arguments)
    fits = {name: fit_points(own, arguments.resamples) for name, own in by_mixer(points).items()}
    answers = _answers(arguments, fits, candidates)
    lines = list(report_lines(fits))
    lines += ["", *answer_lines(arguments.ask, answers)] if answers else []
    if arguments.json:
        objects = {
            name: fit.as_json() | ({"ask": answers[name].as_json()} if answers else {}) for name, fit in fits.items()
        }
        print(json.dumps({"mixers": objects} if len(objects) > 1 else next(iter(objects.values()))))
    else:
        print("\n".join(lines))
    drawn = figures(fits) if arguments.png or arguments.html else {}
    written = write_pictures(drawn, arguments.png) if arguments.png else []
    if arguments.html:
        write_page(drawn, lines, arguments.html)
        written.append(arguments.html)
    for path in written:
        print(path, file=sys.stderr)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.resamples < 20:
        raise ConfigError(f"--resamples {arguments.resamples}: the ends of a 90 % band need at least 20")
    if bool(arguments.runs) == (arguments.points is not None):
        raise ConfigError("give folders of runs, or --points CSV, to fit; one of them")
    if arguments.points is not None and (arguments.force or arguments.counts != "model"):
        raise ConfigError("--force and --counts have no effect with --points; leave them out")
    if arguments.mfu is not None and not 0 < arguments.mfu <= 1:
        raise ConfigError(f"--mfu {arguments.mfu}: a fraction of the GPU's matrix rate is above 0 and at most 1")


def _read(arguments: argparse.Namespace) -> tuple[list[Point], dict[str, list[Candidate]]]:
    """The points, and by mixer the runs' models, whose utilisation the planner can estimate."""
    from megalin.model.config import ModelConfig
    from megalin.scaling_laws.budget import Candidate
    from megalin.scaling_laws.points import read_points
    from megalin.scaling_laws.runs import read_runs

    if arguments.points is not None:
        read = read_points(arguments.points)
        if not read.has_flops:
            print(f"{arguments.points}: no column flops; C = 6 N D", file=sys.stderr)
        return read.points, {}
    runs = read_runs(arguments.runs, counts=arguments.counts, force=arguments.force)
    candidates: dict[str, list[Candidate]] = {}
    for run in runs:
        if isinstance(run.config.model, ModelConfig):
            found = Candidate(f"run {run.path.name}", run.config.model, run.config.data.sequence_length)
            candidates.setdefault(run.mixer, []).append(found)
    return [point for run in runs for point in run.points], candidates


def _answers(
    arguments: argparse.Namespace, fits: dict[str, Fit], candidates: dict[str, list[Candidate]]
) -> dict[str, Answer]:
    """The answer of each mixer to --ask; empty without it."""
    from megalin.scaling_laws.budget import Utilisation, answer, parse_budget

    if arguments.ask is None:
        return {}
    budget = parse_budget(arguments.ask)
    given = None if arguments.mfu is None else Utilisation(arguments.mfu, "--mfu")
    return {
        mixer: answer(fit, budget, mixer=mixer, candidates=candidates.get(mixer, ()), utilisation=given)
        for mixer, fit in fits.items()
    }
