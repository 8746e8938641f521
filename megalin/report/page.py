"""HTML report of a run: one file without scripts, links or external content, in which every text is escaped."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

import megalin
from megalin.errors import StorageError
from megalin.files import write_atomically
from megalin.report.reading import RunRecord, read_run
from megalin.train.curves import Curve, Points, draw

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content security policy of the page: a browser may show its inline styles and pictures and nothing else."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { margin-bottom: 0; overflow-wrap: anywhere; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5dae1; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
td:last-child { overflow-wrap: anywhere; } td:not(:last-child) { white-space: nowrap; }
td:last-child:not(:first-child) { min-width: 8rem; }
tbody tr { border-top: 1px solid #e8ebef; } thead th { color: #5b6675; }
.scroll { overflow-x: auto; max-height: 32rem; overflow-y: auto; } .error, .error td { color: #b3261e; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; } img { max-width: 100%; height: auto; }
pre { background: #f4f6f8; padding: 1rem; overflow: auto; max-height: 40rem; font-size: 13px; }
"""
_MOST_POINTS = 1500
"""Curves with more points are drawn as means of neighbouring points."""
_MOST_ROWS = 200
"""Tables with more rows show the newest ones only."""
_ENDED_BY_ERROR = "error"


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
    html = Element("html", lang="en")
    head = SubElement(html, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": POLICY})
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "title", f"{_name(run)}: {status(run)}")
    SubElement(head, "style").text = _STYLE
    body = SubElement(html, "body")
    _add(body, "h1", _name(run))
    _add(body, "p", status(run), **({"class": "error"} if _ended_by_error(run) else {}))
    for problem in run.problems:
        _add(body, "p", problem, **{"class": "error"})
    _table(body, (), _summary(run))
    _curves(body, run)
    _evaluations(body, run)
    _tasks(body, run)
    _incidents(body, run)
    _section(
        body, "Environment", (), [(name, _value_text(value)) for name, value in run.environment.items()], "not recorded"
    )
    kernels = [(op, *_choice(choice)) for op, choice in run.kernels.items()]
    _section(body, "Kernels", ("op", "backend", "reason"), kernels, "no step has run")
    _add(body, "h2", "Config")
    _add(body, "pre", run.config_text or "not written: the run ended before its first step")
    _add(body, "p", f"Written {_time(datetime.now(UTC))} by megalin {megalin.__version__}.")
    return b"<!DOCTYPE html>\n" + tostring(html, encoding="unicode", method="html").encode()


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
    if total is not None and step >= total:
        return f"{progress}, finished"
    if stop is not None and step >= stop:
        return f"{progress}, stopped by train.stop_after_steps"
    if run.updated is None:
        return f"{progress}, no step logged yet"
    return f"{progress}, in progress or killed; last logged at {_time(run.updated)}"


def _ended_by_error(run: RunRecord) -> bool:
    kinds = [incident.kind for incident in run.incidents if incident.kind in ("started", "resumed", _ENDED_BY_ERROR)]
    return kinds[-1:] == [_ENDED_BY_ERROR]


def _summary(run: RunRecord) -> list[tuple[str, str]]:
    progress = run.progress
    last, seconds, rates = progress.last, progress.sums["step_seconds"], progress.curves["tokens_per_second"]
    rows = [("Folder", str(run.path.absolute()))]
    if "loss" in last:
        rows.append(("Loss", f"{last['loss']:.4f} {_nats(run)}"))
    if progress.evaluations and "loss" in progress.evaluations[-1]:
        newest = progress.evaluations[-1]
        rows.append(("Held-out loss", f"{newest['loss']:.4f} {_nats(run)}, after step {newest['step']:,}"))
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
    return [*rows, ("Newest checkpoint", f"{saved.name}, {size}, {_time(saved.written)}; verified when it is loaded")]


def _nats(run: RunRecord) -> str:
    """The unit of the loss; an encoder's adds a loss per masked token and one per pair of sentences."""
    return "nats" if run.progress.curves["mlm_loss"] else "nats a token"


def _curves(body: Element, run: RunRecord) -> None:
    _add(body, "h2", "Curves")
    names = {"loss": "training", "mlm_loss": "MLM", "nsp_loss": "NSP", "evaluation_loss": "held out"}
    curves = run.progress.curves
    losses = [Curve(names[name], _thinned(curves[name]), name == "evaluation_loss") for name in names]
    rate = [Curve("tokens/s", _thinned(curves["tokens_per_second"]))]
    norm = [Curve("gradient norm", _thinned(curves["grad_norm"]))]
    resumed = sorted({incident.step for incident in run.incidents if incident.kind == "resumed"})
    for caption, ylabel, drawn in (
        ("Loss", f"loss ({_nats(run)})", losses),
        ("Throughput", "tokens/s", rate),
        ("Gradient norm before clipping", "L2 norm", norm),
    ):
        drawn = [curve for curve in drawn if curve.points]
        if not drawn:
            _add(body, "p", f"{caption}: no step with a finite value yet.")
            continue
        figure = SubElement(body, "figure")
        svg = _svg(draw(ylabel, drawn, resumed=resumed, size=(9.5, 3.8)))
        points = drawn[0].points
        alt = f"{caption} over steps {points[0][0]:,} to {points[-1][0]:,}: {points[0][1]:.4g} to {points[-1][1]:.4g}"
        _add(figure, "figcaption", caption)
        SubElement(figure, "img", src=f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}", alt=alt)


def _evaluations(body: Element, run: RunRecord) -> None:
    evaluations = run.progress.evaluations
    columns = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation))
    rows = [[_number(name, evaluation.get(name)) for name in columns] for evaluation in evaluations]
    _section(body, "Held-out evaluations", [name.replace("_", " ") for name in columns], rows, "none yet")


def _tasks(body: Element, run: RunRecord) -> None:
    tasks = run.progress.tasks
    if not tasks:  # a run without such tasks needs no section
        return
    metrics = list(dict.fromkeys(name for _, _, values in tasks for name in values))
    rows = [(f"{step:,}", task, *(_number(name, values.get(name)) for name in metrics)) for step, task, values in tasks]
    _section(body, "Choice tasks", ["step", "task", *(name.replace("_", " ") for name in metrics)], rows, "none yet")


def _incidents(body: Element, run: RunRecord) -> None:
    rows = [(f"{step:,}", time[:19].replace("T", " "), kind, message) for step, time, kind, message in run.incidents]
    _section(body, "Incidents", ("step", "time (UTC)", "kind", "message"), rows, "none recorded")


def _section(body: Element, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], none: str) -> None:
    _add(body, "h2", title)
    if not rows:
        _add(body, "p", f"{none}.")
        return
    if len(rows) > _MOST_ROWS:
        _add(body, "p", f"The newest {_MOST_ROWS} of {len(rows):,}.")
    _table(body, head, rows[-_MOST_ROWS:])


def _table(body: Element, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = SubElement(SubElement(body, "div", {"class": "scroll"}), "table")
    if head:
        row = SubElement(SubElement(table, "thead"), "tr")
        for name in head:
            _add(row, "th", name, scope="col")
    table_body = SubElement(table, "tbody")
    for values in rows:
        row = SubElement(table_body, "tr", {"class": "error"} if _ENDED_BY_ERROR in values else {})
        for number, value in enumerate(values):
            if number or head:
                _add(row, "td", value)
            else:
                _add(row, "th", value, scope="row")


def _add(parent: Element, tag: str, text: object, **attributes: str) -> None:
    """Adds an element with a text; unprintable characters are shown as the replacement character."""
    shown = (
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in str(text)
    )
    SubElement(parent, tag, attributes).text = "".join(shown)


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Equal runs give equal bytes; metadata would hold URLs.
    with mpl.rc_context({"svg.hashsalt": "megalin"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue()


def _thinned(points: Points) -> Points:
    """At most _MOST_POINTS points, each the mean of equally many neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def _value_text(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


def _choice(choice: Any) -> tuple[str, str]:
    values = choice if isinstance(choice, dict) else {}
    return str(values.get("backend", "")), str(values.get("reason", ""))


def _number(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4f}"


def _time(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC")


def _name(run: RunRecord) -> str:
    return run.path.absolute().name
