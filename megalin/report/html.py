"""HTML pages without scripts, links or external content, in which every text is escaped."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, tostring

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG

import megalin
from megalin.train.curves import Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content security policy of the page: a browser may show its inline styles and pictures and nothing else."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { margin-bottom: 0; overflow-wrap: anywhere; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5dae1; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
td:last-child { overflow-wrap: anywhere; } td:not(:last-child) { white-space: nowrap; }
td:last-child:not(:first-child) { min-width: 8rem; }
tbody tr { border-top: 1px solid #e8ebef; } thead th { color: #5b6675; }
.wrap td, .wrap td:not(:last-child) { white-space: normal; min-width: 7rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } .long { max-height: 32rem; overflow-y: auto; } .error, .error td { color: #b3261e; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; } img { max-width: 100%; height: auto; }
pre { background: #f4f6f8; padding: 1rem; overflow: auto; max-height: 40rem; font-size: 13px; }
"""
_MOST_POINTS = 1500
"""Curves with more points are drawn as means of neighbouring points."""
_MOST_ROWS = 200
"""Tables with more rows show the newest ones only."""
_ROWS_WITHOUT_SCROLLING = 20


class Page:
    """A page under construction.

    Attributes:
        body: its body, to which the functions of this module add elements.
    """

    def __init__(self, title: str) -> None:
        self._html = Element("html", lang="en")
        head = SubElement(self._html, "head")
        SubElement(head, "meta", charset="utf-8")
        SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": POLICY})
        SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
        add(head, "title", title)
        SubElement(head, "style").text = STYLE
        self.body = SubElement(self._html, "body")

    def finish(self) -> bytes:
        """The page in UTF-8, with a last line on its date. Every text goes through the serialiser, which escapes it."""
        add(self.body, "p", f"Written {time_text(datetime.now(UTC))} by megalin {megalin.__version__}.")
        return b"<!DOCTYPE html>\n" + tostring(self._html, encoding="unicode", method="html").encode()


def section(
    body: Element,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    none: str,
    *,
    marked: str | None = None,
    wrap: bool = False,
) -> None:
    """Adds a titled table of the newest rows; the text `none` if there are none."""
    add(body, "h2", title)
    if not rows:
        add(body, "p", f"{none}.")
        return
    if len(rows) > _MOST_ROWS:
        add(body, "p", f"The newest {_MOST_ROWS} of {len(rows):,}.")
    table(body, head, rows[-_MOST_ROWS:], marked=marked, wrap=wrap)


def table(
    body: Element,
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    marked: str | None = None,
    wrap: bool = False,
) -> None:
    """Adds a table; without a head the first column is one. Rows that hold `marked` are shown as errors; with `wrap`
    the columns after the first are of equal rank and their texts wrap."""
    box = SubElement(body, "div", {"class": "scroll long" if len(rows) > _ROWS_WITHOUT_SCROLLING else "scroll"})
    element = SubElement(box, "table", {"class": "wrap"} if wrap else {})
    if head:
        row = SubElement(SubElement(element, "thead"), "tr")
        for name in head:
            add(row, "th", name, scope="col")
    rows_element = SubElement(element, "tbody")
    for values in rows:
        row = SubElement(rows_element, "tr", {"class": "error"} if marked is not None and marked in values else {})
        for number, value in enumerate(values):
            if number or head:
                add(row, "td", value)
            else:
                add(row, "th", value, scope="row")


def add(parent: Element, tag: str, text: object, **attributes: str) -> None:
    """Adds an element with a text; unprintable characters are shown as the replacement character."""
    shown = (
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in str(text)
    )
    SubElement(parent, tag, attributes).text = "".join(shown)


def add_figure(body: Element, caption: str, figure: Figure, alt: str) -> None:
    """Adds a picture with its caption."""
    element = SubElement(body, "figure")
    add(element, "figcaption", caption)
    SubElement(element, "img", src=f"data:image/svg+xml;base64,{base64.b64encode(_svg(figure)).decode()}", alt=alt)


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Equal runs give equal bytes; metadata would hold URLs.
    with mpl.rc_context({"svg.hashsalt": "megalin"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue()


def thinned(points: Points) -> Points:
    """At most _MOST_POINTS points, each the mean of equally many neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def time_text(time: datetime) -> str:
    """The time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC")
