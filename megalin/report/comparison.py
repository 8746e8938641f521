"""Comparison of runs: their losses by tokens and by FLOPs, evaluations and decoding states, as HTML and PNG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megalin.errors import ConfigError, StorageError
from megalin.files import write_atomically
from megalin.report.facts import FACTS, flat, run_facts, state_text
from megalin.report.html import Page, add, add_figure, section, thinned
from megalin.report.page import evaluation_number, held_out_points, status
from megalin.report.reading import RunRecord, read_run
from megalin.train.curves import Curve, Points, draw, evaluated, held_out_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEAN_STEPS = 1000
"""Steps at the end of a run whose mean loss is shown, as in the TransNormerLLM paper (section 4)."""
Axis = Literal["tokens", "flops"]
_AXES: dict[Axis, tuple[str, Literal["linear", "log"]]] = {
    "tokens": ("training tokens", "linear"),
    "flops": ("training FLOPs, forward and backward", "log"),
}


def write_comparison(folders: Sequence[str | Path], output: str | Path) -> list[Path]:
    """Compares runs, finished or in progress: writes `output` (HTML), and each of its pictures as a PNG of that name.

    Returns:
        The files: the page, then `<output without suffix>-loss-by-tokens.png` and `-loss-by-flops.png`, of those that
        have a curve.

    Raises:
        ConfigError: fewer than two different folders, or one that contains no run.
        StorageError: a file cannot be written.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < 2 or len(set(paths)) < len(paths):
        raise ConfigError(
            f"--compare {' '.join(map(str, folders))}: needs at least two different runs; give each folder once"
        )
    names = run_names(paths)
    runs = dict(zip(names, map(read_run, paths), strict=True))
    page, figures = _page(runs)
    path, written = Path(output), []
    try:
        write_atomically(path, page)
        written.append(path)
        for axis, figure in figures.items():
            picture = path.with_name(f"{path.stem}-loss-by-{axis}.png")
            figure.savefig(picture, format="png")
            written.append(picture)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); choose another --output") from None
    return written


def run_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ from each other, of equally many components."""
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [str(Path(*path.parts[-depth:])) for path in paths]


def _page(runs: dict[str, RunRecord]) -> tuple[bytes, dict[Axis, Figure]]:
    html = Page(f"{len(runs)} runs compared")
    body = html.body
    add(body, "h1", f"{len(runs)} runs")
    for name, run in runs.items():
        for problem in run.problems:
            add(body, "p", f"{name}: {problem}", **{"class": "error"})
    columns = [_summary(run) for run in runs.values()]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    section(body, "Runs", ("", *runs), rows, "", wrap=True)
    figures: dict[Axis, Figure] = {}
    add(body, "h2", "Loss")
    for axis, (xlabel, scale) in _AXES.items():
        curves = [curve for name, run in runs.items() for curve in _loss_curves(name, run, axis)]
        if missing := [name for name, run in runs.items() if not _loss_curves(name, run, axis)]:
            add(body, "p", f"No loss by {axis}: {', '.join(missing)}.")
        if curves:
            figures[axis] = draw(
                "loss (nats a token)", curves, xlabel=xlabel, xscale=scale, size=(9.5, 4.8), top=_top(curves)
            )
            add_figure(body, f"Loss by {axis}; marks are held-out losses", figures[axis], _alternative(curves, axis))
    _evaluations(body, runs)
    _results(body, runs)
    _differences(body, runs)
    return html.finish(), figures


def _summary(run: RunRecord) -> dict[str, str]:
    """A run's column by the rows' names; losses are in nats a token. The TransNormerLLM paper prints its losses in
    bits, with 2^bits as perplexity."""
    last, facts = run.progress.last, run_facts(run)
    losses = [loss for _, loss in run.progress.curves["loss"][-MEAN_STEPS:]]
    means: tuple[float, ...] = ()
    if losses:
        mean = statistics.fmean(losses)
        means = mean, mean / math.log(2), math.exp(min(mean, 700.0))
    nats, bits, perplexity = [f"{value:.4f}" for value in means] or [""] * 3
    held_out, size = _newest_held_out(run, "loss")
    return {
        "status": status(run),
        **{name: facts.get(name, "") for name in FACTS if name != "command"},
        "tokens": f"{last['tokens']:,.0f}" if "tokens" in last else "",
        "FLOPs": f"{last['flops']:.3e}" if "flops" in last else "",
        f"loss, mean of the last {MEAN_STEPS:,} steps": nats,
        "in bits a token": bits,
        "perplexity, e^nats = 2^bits": perplexity,
        "held-out loss": held_out,
        "held-out loss over": size,
        "held-out bits per byte": _newest_held_out(run, "bits_per_byte")[0],
        "state of a sequence in decoding": state_text(run.config),
    }


def _newest_held_out(run: RunRecord, name: str) -> tuple[str, str]:
    """A number of the newest evaluation of the validation split, and the size of the evaluation: in the loop, or by
    `megalin eval`, which comes first at the same step because it reads the whole split."""
    stored = [result for result in run.results if (result.suite, result.task) == ("loss", "validation")]
    found = {int(evaluation["step"]): evaluation for evaluation in run.progress.evaluations if name in evaluation}
    found |= {result.step: result.metrics for result in stored if name in result.metrics}
    if not found:
        return "", ""
    newest = found[max(found)]
    return f"{newest[name]:.4f}", evaluated(newest)


def _loss_curves(name: str, run: RunRecord, axis: Axis) -> list[Curve]:
    """Training and held-out loss of a run over tokens or FLOPs; none for lines without that number."""
    places = dict(run.progress.curves[axis])

    def over_axis(metric: str) -> Points:
        return [(places[step], value) for step, value in run.progress.curves[metric] if step in places]

    curves = [
        Curve(name, thinned(over_axis("loss")), run=name),
        *held_out_curves(
            ((places[step], loss, size) for step, loss, size in held_out_points(run) if step in places),
            f"{name}, held out",
            run=name,
        ),
    ]
    return [curve for curve in curves if curve.points]


def _top(curves: Sequence[Curve]) -> float:
    """The largest loss after a twentieth of a run: the fall from the first loss would flatten the rest."""
    return max(max(value for _, value in curve.points[len(curve.points) // 20 :]) for curve in curves)


def _alternative(curves: Sequence[Curve], axis: Axis) -> str:
    ends = (f"{curve.label} {curve.points[-1][1]:.4g} at {curve.points[-1][0]:.4g}" for curve in curves)
    return f"Loss by {axis}: {'; '.join(ends)}"


def _evaluations(body: Any, runs: dict[str, RunRecord]) -> None:
    """The newest value of each number that an evaluation in the loop logged: a row a number, a column a run."""
    newest: dict[str, dict[str, tuple[int, float]]] = {name: {} for name in runs}
    for name, run in runs.items():
        for evaluation in run.progress.evaluations:
            values = {key: (int(evaluation["step"]), value) for key, value in evaluation.items() if key != "step"}
            newest[name] |= values
    keys = list(dict.fromkeys(key for values in newest.values() for key in values))
    rows = [[key.replace("_", " "), *(_with_step(key, newest[name].get(key)) for name in runs)] for key in keys]
    section(body, "Newest evaluations", ("metric", *runs), rows, "none yet")


def _results(body: Any, runs: dict[str, RunRecord]) -> None:
    """The newest result of every suite, task and metric that is stored in a run folder: a column a run."""
    newest: dict[tuple[str, str, str], dict[str, tuple[int, float]]] = {}
    for name, run in runs.items():
        for result in run.results:
            for metric, value in result.metrics.items():
                newest.setdefault((result.suite, result.task, metric), {})[name] = (result.step, value)
    for suite in dict.fromkeys(suite for suite, _, _ in newest):
        rows = [
            (task, metric.replace("_", " "), *(_with_step(metric, values.get(name)) for name in runs))
            for (own, task, metric), values in newest.items()
            if own == suite
        ]
        section(body, f"Results of the suite {suite}", ("task", "metric", *runs), rows, "")


def _with_step(key: str, found: tuple[int, float] | None) -> str:
    return "" if found is None else f"{evaluation_number(key, found[1])} (step {found[0]:,})"


def _differences(body: Any, runs: dict[str, RunRecord]) -> None:
    """The keys of the configs, and the other values that decide numbers, that differ between the runs: a column a
    run."""
    configs = {name: dict(flat(run.config)) for name, run in runs.items()}
    if all(run.identity is not None for run in runs.values()):
        for name, run in runs.items():
            configs[name] |= {} if run.identity is None else dict(flat(run.identity.inputs))
    keys = list(dict.fromkeys(key for config in configs.values() for key in config))
    rows = [(key, *(config.get(key, "") for config in configs.values())) for key in keys]
    section(
        body, "Differences of the configs", ("key", *runs), [row for row in rows if len(set(row[1:])) > 1], "all equal"
    )
