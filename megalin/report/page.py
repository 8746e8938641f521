"""HTML report of a run as one file."""

from __future__ import annotations

import statistics
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from megalin.errors import StorageError
from megalin.files import write_atomically
from megalin.report.facts import run_facts
from megalin.report.html import Page, add, add_figure, section, table, thinned, time_text
from megalin.report.reading import RunRecord, read_run
from megalin.train.curves import Curve, draw, evaluated, held_out_curves, step_tokens
from megalin.train.identity_file import value_text

_ENDED_BY_ERROR = "error"
_MOST_CURVES = 10
"""Tasks of a suite whose results are drawn over steps."""


def write_report(folder: str | Path, output: str | Path) -> RunRecord:
    """Writes the report of the run in `folder` to the file `output`, atomically; returns the record of the run.

    Raises:
        ConfigError: `folder` contains no run.
        StorageError: `output` cannot be written.
    """
    run = read_run(folder)
    path = Path(output)
    try:
        write_atomically(path, page(run))
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); choose another --output") from None
    return run


def page(run: RunRecord) -> bytes:
    """The report's HTML in UTF-8. Every text goes through the serialiser, which escapes it."""
    html = Page(f"{_name(run)}: {status(run)}")
    body = html.body
    add(body, "h1", _name(run))
    add(body, "p", status(run), **({"class": "error"} if _ended_by_error(run) else {}))
    for problem in run.problems:
        add(body, "p", problem, **{"class": "error"})
    table(body, (), _summary(run))
    _curves(body, run)
    _evaluations(body, run)
    _tasks(body, run)
    _results(body, run)
    if run.identity is not None and run.identity.segments:
        rows = [
            (f"{segment.step:,}", name, value_text(before), value_text(now))
            for segment in run.identity.segments
            for name, (before, now) in segment.changes.items()
        ]
        section(body, "Changes during the run", ("after step", "value", "before", "since then"), rows, "")
    _incidents(body, run)
    shown = ("command", "working_directory", "commit", "device", "ranks", "mesh")  # in the first table
    environment = [(name, _value_text(value)) for name, value in run.environment.items() if name not in shown]
    section(body, "Environment", (), environment, "not recorded")
    kernels = [(op, *_choice(choice)) for op, choice in run.kernels.items()]
    section(body, "Kernels", ("op", "backend", "reason"), kernels, "no step has run")
    add(body, "h2", "Config")
    add(body, "pre", run.config_text or "not written: the run ended before its first step")
    return html.finish()


def status(run: RunRecord) -> str:
    """One line on the run's progress: steps done, and finished, stopped, failed or in progress."""
    step, total, stop = (
        int(run.progress.last.get("step", 0)),
        run.number("train", "steps"),
        run.number("train", "stop_after_steps"),
    )
    progress = f"step {step:,}" + (f" of {total:,.0f}" if total is not None else "")
    if _ended_by_error(run):
        return f"{progress}, ended by an error"
    if _last_kind(run) == "stopped":
        return f"{progress}, stopped by a signal"
    if total is not None and step >= total:
        return f"{progress}, finished"
    if stop is not None and step >= stop:
        return f"{progress}, stopped by train.stop_after_steps"
    if run.updated is None:
        return f"{progress}, no step logged yet"
    return f"{progress}, in progress or killed; last logged at {time_text(run.updated)}"


def _ended_by_error(run: RunRecord) -> bool:
    return _last_kind(run) == _ENDED_BY_ERROR


def _last_kind(run: RunRecord) -> str:
    """Kind of the last event that begins or ends a process of the run."""
    ends = ("started", "resumed", "stopped", _ENDED_BY_ERROR)
    return next((incident.kind for incident in reversed(run.incidents) if incident.kind in ends), "")


def _summary(run: RunRecord) -> list[tuple[str, str]]:
    progress = run.progress
    last, seconds, rates = progress.last, progress.sums["step_seconds"], progress.curves["tokens_per_second"]
    rows = [("Folder", str(run.path.absolute()))]
    rows += [(name.capitalize(), text) for name, text in run_facts(run).items()]
    if "loss" in last:
        rows.append(("Loss", f"{last['loss']:.4f} {_nats(run)}"))
    if progress.evaluations and "loss" in progress.evaluations[-1]:
        newest = progress.evaluations[-1]
        size = f", over {evaluated(newest)}" if evaluated(newest) else ""
        rows.append(("Held-out loss", f"{newest['loss']:.4f} {_nats(run)}{size}, after step {newest['step']:,.0f}"))
    if "tokens" in last:
        rows.append(("Tokens", f"{last['tokens']:,.0f}"))
    if rates:
        rows.append(("Throughput", f"{statistics.median(rate for _, rate in rates):,.0f} tokens/s, the median step"))
    if "model_flops_utilization" in last:
        rows.append(("MFU", f"{last['model_flops_utilization']:.1%} in the newest step"))
    if progress.peak_memory_bytes:
        rows.append(("Peak memory", f"{progress.peak_memory_bytes / 2**30:.2f} GiB, rank 0"))
    if seconds:
        wait = f"{progress.sums['data_wait_seconds'] / seconds:.1%} of it waiting for data"
        rows.append(("Time in steps", f"{timedelta(seconds=round(seconds))}, {wait}"))
    saved = run.checkpoint
    if saved is None:
        return [*rows, ("Newest checkpoint", "none")]
    size = f"{saved.num_files} files, {saved.num_bytes / 1e6:,.1f} MB"
    return [
        *rows,
        ("Newest checkpoint", f"{saved.name}, {size}, {time_text(saved.written)}; verified when it is loaded"),
    ]


def _nats(run: RunRecord) -> str:
    """The unit of the loss; an encoder's adds a loss a masked token and one a pair of sentences, or is of classes."""
    if run.progress.curves["mlm_loss"]:
        return "nats"
    classes = any("accuracy" in evaluation for evaluation in run.progress.evaluations)
    return "nats a sequence" if classes else "nats a token"


def _curves(body: Element, run: RunRecord) -> None:
    add(body, "h2", "Curves")
    names = {"loss": "training", "mlm_loss": "MLM", "nsp_loss": "NSP"}
    curves = run.progress.curves
    losses = [Curve(names[name], thinned(curves[name])) for name in names]
    held_out = held_out_curves(held_out_points(run), "held out")
    losses += [curve._replace(points=thinned(curve.points)) for curve in held_out]
    learning_rate = [Curve("learning rate", thinned(curves["learning_rate"]))]
    rate = [Curve("tokens/s", thinned(curves["tokens_per_second"]))]
    norm = [Curve("gradient norm", thinned(curves["grad_norm"]))]
    resumed = sorted({incident.step for incident in run.incidents if incident.kind == "resumed"})
    for caption, ylabel, drawn in (
        ("Loss", f"loss ({_nats(run)})", losses),
        ("Learning rate", "learning rate", learning_rate),
        ("Throughput", "tokens/s", rate),
        ("Gradient norm before clipping", "L2 norm", norm),
    ):
        drawn = [curve for curve in drawn if curve.points]
        if not drawn:
            add(body, "p", f"{caption}: no step with a finite value yet.")
            continue
        points = drawn[0].points
        alt = f"{caption} over steps {points[0][0]:,} to {points[-1][0]:,}: {points[0][1]:.4g} to {points[-1][1]:.4g}"
        figure = draw(ylabel, drawn, resumed=resumed, tokens_per_step=step_tokens(curves["tokens"]), size=(9.5, 4.0))
        add_figure(body, caption, figure, alt)


def held_out_points(run: RunRecord) -> list[tuple[int, float, str]]:
    """(step, held-out loss, size of the evaluation) of each evaluation in the loop."""
    evaluations = [evaluation for evaluation in run.progress.evaluations if "loss" in evaluation]
    return [(int(evaluation["step"]), evaluation["loss"], evaluated(evaluation)) for evaluation in evaluations]


def _evaluations(body: Element, run: RunRecord) -> None:
    evaluations = run.progress.evaluations
    columns = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation))
    rows = [[evaluation_number(name, evaluation.get(name)) for name in columns] for evaluation in evaluations]
    section(body, "Held-out evaluations", [name.replace("_", " ") for name in columns], rows, "none yet")


def _tasks(body: Element, run: RunRecord) -> None:
    tasks = run.progress.tasks
    if not tasks:  # a run without such tasks needs no section
        return
    metrics = list(dict.fromkeys(name for _, _, values in tasks for name in values))
    rows = [
        (f"{step:,}", task, *(evaluation_number(name, values.get(name)) for name in metrics))
        for step, task, values in tasks
    ]
    section(
        body, "Tasks during training", ["step", "task", *(name.replace("_", " ") for name in metrics)], rows, "none yet"
    )


def _results(body: Element, run: RunRecord) -> None:
    """Results of `megalin eval` and `megalin lm-eval`: a table a suite, and curves where there are several steps."""
    for suite in dict.fromkeys(result.suite for result in run.results):
        own = [result for result in run.results if result.suite == suite]
        metrics = list(dict.fromkeys(name for result in own for name in result.metrics))
        rows = [
            (f"{result.step:,}", result.task, *(evaluation_number(name, result.metrics.get(name)) for name in metrics))
            for result in own
        ]
        section(
            body,
            f"Results of the suite {suite}",
            ["step", "task", *(name.replace("_", " ") for name in metrics)],
            rows,
            "",
        )
        points: dict[str, list[tuple[int, float]]] = {}
        for result in own:
            points.setdefault(result.task, []).append((result.step, next(iter(result.metrics.values()))))
        curves = [Curve(task, values, True) for task, values in points.items() if len(values) > 1][:_MOST_CURVES]
        if curves:
            label = next(iter(own[0].metrics)).replace("_", " ")
            ends = (f"{curve.label} {curve.points[-1][1]:.4g}" for curve in curves)
            add_figure(body, f"{suite}: {label}", draw(label, curves, size=(9.5, 3.8)), f"{label}: {'; '.join(ends)}")


def _incidents(body: Element, run: RunRecord) -> None:
    rows = [(f"{step:,}", time[:19].replace("T", " "), kind, message) for step, time, kind, message in run.incidents]
    section(body, "Incidents", ("step", "time (UTC)", "kind", "message"), rows, "none recorded", marked=_ENDED_BY_ERROR)


def _value_text(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


def _choice(choice: Any) -> tuple[str, str]:
    values = choice if isinstance(choice, dict) else {}
    return str(values.get("backend", "")), str(values.get("reason", ""))


def evaluation_number(name: str, value: float | None) -> str:
    """Text of a number of an evaluation; accuracies in percent."""
    if value is None:
        return ""
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4f}"


def _name(run: RunRecord) -> str:
    return run.path.absolute().name
