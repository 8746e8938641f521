"""The report of a run: complete and harmless for any content of the folder, also in a browser if one is installed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megalin.errors import ConfigError, StorageError
from megalin.report.html import POLICY
from megalin.report.page import page, status, write_report
from megalin.report.reading import read_run
from megalin.train.validation import EncoderEvaluation

HOSTILE = """</pre><script>document.title = 'ran'</script><img src=x onerror="alert(1)">&lt;\x1b[31m'"]]>"""
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Parser of a page: its tags, attributes and text; asserts that all tags are closed."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def sources(self) -> list[str]:
        return [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]


def write_run(folder: Path, steps: int = 3, *, lines: list[dict[str, Any]] | None = None, **incidents: str) -> Path:
    """Writes a run folder with a config, metrics of `steps` steps or these lines, and one incident per given kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text("[train]\nsteps = 3\n")
    values = {"loss": 2.5, "grad_norm": 0.5, "tokens_per_second": 1234.0, "step_seconds": 0.5, "data_wait_seconds": 0.1}
    lines = [{"step": step, **values} for step in range(1, steps + 1)] if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = [
        {"step": 0, "time": "2026-11-21T10:00:00+00:00", "kind": kind, "message": message}
        for kind, message in incidents.items()
    ]
    (folder / "incidents.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def assert_harmless(parsed: Page) -> None:
    """Asserts that the page has no active or external content, and its policy before the content it applies to."""
    assert {tag for tag, _ in parsed.tags} <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "h1",
            "h2",
            "p",
            "pre",
            "div",
            "figure",
            "figcaption",
            "img",
        ),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    assert {name for _, attributes in parsed.tags for name in attributes} <= {
        *("lang", "charset", "http-equiv", "content", "name", "class", "scope", "src", "alt"),
    }
    policies = [attributes for _, attributes in parsed.tags[:4] if "http-equiv" in attributes]
    assert policies == [{"http-equiv": "Content-Security-Policy", "content": POLICY}]
    for source in parsed.sources():
        assert source.startswith("data:image/svg+xml;base64,")
        svg = base64.b64decode(source.partition(",")[2]).decode()
        assert "<script" not in svg
        assert set(re.findall(r'\bhref="(.)', svg)) <= {"#"}
        assert set(re.findall(r"\w+://[^\"]*", svg)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
            "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd",
        }


def hostile_run(folder: Path) -> Path:
    """Writes a run folder in which every text is an attack."""
    run = write_run(folder / "<b>&amp;", started="on 1 x cpu", warning=HOSTILE)
    (run / "config.toml").write_text(f"[model]\nname = {json.dumps(HOSTILE)}\n")
    (run / "environment.json").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}, "list": [HOSTILE]}))
    (run / "kernels.json").write_text(json.dumps({HOSTILE: {"backend": HOSTILE, "reason": HOSTILE}, "x": HOSTILE}))
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "checkpoints" / "step-00000002" / "manifest.json").write_text(HOSTILE)
    return run


def test_hostile_texts_are_text(tmp_path):
    html = page(read_run(hostile_run(tmp_path)))
    parsed = Page(html)
    assert_harmless(parsed)
    shown = HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert parsed.text.count(shown) == 7
    assert "<b>&amp;: step 3" in parsed.text
    assert "checkpoints/step-00000002: " in parsed.text
    assert b"\x1b" not in html


def test_report_shows_the_content_of_the_folder(tmp_path):
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 4.0 - step / 100, "tokens_per_second": 1000.0 * (1 + step % 3), "tokens": 4096 * step}
        for step in range(1, 101)
    ]
    for line in lines:
        line["learning_rate"] = 1e-3 * line["step"]
    lines[49] |= {"evaluation_loss": 3.625, "evaluation_tokens": 5000, "evaluation_bits_per_byte": 1.25}
    lines[99] |= {"peak_memory_bytes": 3 * 2**30, "step_seconds": 90.0, "data_wait_seconds": 9.0, "loss": 3.125}
    run = write_run(tmp_path / "mine", lines=lines, started="on 2 x cpu", resumed="on 4 x cpu")
    (run / "kernels.json").write_text('{"decay_scan": {"backend": "triton", "reason": "cuda: is not installed"}}')
    record = write_report(run, tmp_path / "report.html")
    assert record.checkpoint is None
    parsed = Page((tmp_path / "report.html").read_bytes())
    assert_harmless(parsed)
    assert len(parsed.sources()) == 3
    for expected in (
        "step 100 of 3, finished",
        "3.1250 nats a token",
        "3.6250 nats a token, over 5,000 tokens, after step 50",
        "409,600",
        "2,000 tokens/s, the median step",
        "3.00 GiB, rank 0",
        "0:01:30, 10.0% of it waiting for data",
        "1.2500",
        "on 4 x cpu",
        "triton",
        "Gradient norm before clipping: no step with a finite value yet.",
        "steps = 3",
    ):
        assert expected in parsed.text, expected


def test_changes_during_the_run_are_listed(tmp_path):
    run = write_run(tmp_path / "run")
    identity = {"config": {}, "inputs": {}, "segments": [{"step": 2, "changes": {"optimizer.lr": [0.01, "<b>"]}}]}
    (run / "identity.json").write_text(json.dumps(identity))
    parsed = Page(page(read_run(run)))
    assert_harmless(parsed)
    assert "Changes during the run" in parsed.text
    assert "2optimizer.lr0.01<b>" in parsed.text
    (run / "identity.json").write_text("[]")
    assert "identity.json: not the identity of a run; restore it" in Page(page(read_run(run))).text


def test_losses_of_an_encoder_are_shown_separately(tmp_path):
    evaluation = EncoderEvaluation(3.0, 2.5, 0.125, 0.5, 0.75, 4.0, 1000, 50)
    lines = [{"step": 1, "loss": 3.5, "mlm_loss": 2.75, "nsp_loss": 0.75, **evaluation.metrics()}]
    run = read_run(write_run(tmp_path / "encoder", lines=lines))
    assert run.progress.curves["mlm_loss"] == [(1, 2.75)]
    parsed = Page(page(run))
    assert_harmless(parsed)
    for expected in (
        "mlm accuracy",
        "12.50%",
        "75.00%",
        "2.5000",
        "1,000",
        "3.5000 nats",
        "3.0000 nats, over 50 sequences, after",
    ):
        assert expected in parsed.text, expected
    assert "nats a token" not in parsed.text


def write_results(run: Path, step: int, suites: dict[str, Any]) -> None:
    (run / "evaluations").mkdir(exist_ok=True)
    (run / f"evaluations/step-{step}.json").write_text(json.dumps({"step": step, "suites": suites}))


def test_stored_results_are_shown_by_suite_and_drawn_over_steps(tmp_path):
    run = write_run(tmp_path / "run")
    for step, accuracy in ((2, 0.25), (10, 0.75)):
        metrics = {"accuracy": {"value": accuracy, "standard_error": 0.1}, "loss": {"value": 1.5, "standard_error": 0}}
        write_results(run, step, {"recall": {"mqar/64x4": {"metrics": metrics}}, "loss": {"validation": {"loss": 2.5}}})
    record = read_run(run)
    assert record.results == [
        (2, "recall", "mqar/64x4", {"accuracy": 0.25, "loss": 1.5}),
        (2, "loss", "validation", {"loss": 2.5}),
        (10, "recall", "mqar/64x4", {"accuracy": 0.75, "loss": 1.5}),
        (10, "loss", "validation", {"loss": 2.5}),
    ]
    parsed = Page(page(record))
    assert_harmless(parsed)
    assert len(parsed.sources()) == len(Page(page(record._replace(results=[]))).sources()) + 2
    for expected in ("Results of the suite recall", "mqar/64x4", "25.00%", "75.00%", "1.5000", "2.5000"):
        assert expected in parsed.text, expected


@pytest.mark.parametrize(
    "suites", [None, 3, {"x": 3}, {"x": {"y": 3}}, {"x": {"y": {"metrics": [1]}}}, {HOSTILE: {HOSTILE: {HOSTILE: 1.0}}}]
)
def test_results_of_another_content_are_harmless(tmp_path, suites):
    run = write_run(tmp_path / "run")
    write_results(run, 3, suites)
    (run / "evaluations/step-4.json").write_text("{")
    (run / "evaluations/step-5-needle.png").write_text("")
    record = read_run(run)
    assert len(record.results) == (isinstance(suites, dict) and HOSTILE in suites)
    assert record.problems == [
        "step-4.json: not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"
    ]
    assert_harmless(Page(page(record)))


@pytest.mark.parametrize(
    ("steps", "incidents", "expected"),
    [
        (3, ["started"], "step 3 of 3, finished"),
        (2, ["started", "error"], "step 2 of 3, ended by an error"),
        (2, ["error", "resumed"], r"step 2 of 3, in progress or killed; last logged at 20\d\d-.* UTC"),
        (2, ["started", "error", "warning"], "step 2 of 3, ended by an error"),
        (0, ["started"], "step 0 of 3, in progress or killed"),
    ],
)
def test_status_of_a_run(tmp_path, steps, incidents, expected):
    run = write_run(tmp_path / "run", steps, **dict.fromkeys(incidents, "NumericError: step 3: loss nan"))
    assert re.match(expected, status(read_run(run)))


def test_run_that_stopped_as_configured_has_its_own_status(tmp_path):
    run = write_run(tmp_path / "run", 2, started="on 1 x cpu")
    (run / "config.toml").write_text("[train]\nsteps = 3\nstop_after_steps = 2\n")
    assert status(read_run(run)) == "step 2 of 3, stopped by train.stop_after_steps"


def test_run_that_ended_before_its_first_step_is_reported(tmp_path):
    run = write_run(tmp_path / "run", error="DataError: shard.bin: expected 10 bytes")
    for name in ("metrics.jsonl", "config.toml"):
        (run / name).unlink()
    parsed = Page(page(read_run(run)))
    assert_harmless(parsed)
    assert "step 0, ended by an error" in parsed.text
    assert "DataError: shard.bin: expected 10 bytes" in parsed.text
    assert "not written: the run ended before its first step" in parsed.text
    (run / "incidents.jsonl").write_text("")
    assert status(read_run(run)) == "step 0, no step logged yet"


def test_torn_and_foreign_lines_are_left_out(tmp_path):
    run = write_run(tmp_path / "run", 2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": NaN}\nnull\n{"step": 3, "loss": NaN, "grad_norm": "x", "tokens": true}\n')
        file.write(f'{{"step": 4, "loss": {10**400}}}\n{"[" * 10**5}\n{{"step": {10**400}, "loss": 1.0}}\n')
        file.write('{"step": 5, "loss": 1.')
    found = read_run(run).progress
    assert found.curves["loss"] == [(1, 2.5), (2, 2.5)]
    assert found.last == {"step": 4.0}
    assert_harmless(Page(page(read_run(run))))


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("config.toml", "steps = ", "config.toml: not TOML"),
        ("kernels.json", "{", "kernels.json: not JSON"),
        ("kernels.json", "[" * 10**5, "kernels.json: not JSON"),
        ("environment.json", "[]", "environment.json: not a JSON object"),
        ("environment.json", None, "environment.json: cannot be read"),
        (
            "metrics.jsonl",
            None,
            "metrics.jsonl: cannot be read (expected a regular file, found a folder, pipe or device)",
        ),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, text, problem):
    run = write_run(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    if text is None:
        (run / name).mkdir()
    else:
        (run / name).write_text(text)
    assert problem in Page(page(read_run(run))).text


def test_long_curves_are_averaged_and_long_tables_cut(tmp_path):
    lines = [{"step": step, "loss": 5.0 + (-1) ** step, "evaluation_loss": step} for step in range(1, 6001)]
    run = read_run(write_run(tmp_path / "run", lines=lines))
    html = page(run)
    assert len(html) < 600_000
    assert "The newest 200 of 6,000." in Page(html).text


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no run in this folder \(none of config.toml, metrics.jsonl, incidents.jsonl\)"
    ):
        write_report(tmp_path, tmp_path / "report.html")


def test_file_that_cannot_be_written_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(StorageError, match=r"none/report.html: cannot be written \(No such file.*another --output"):
        write_report(run, tmp_path / "none" / "report.html")


@pytest.fixture
def requests() -> Iterator[tuple[int, list[str]]]:
    """The port of a local server, and the list of requested paths."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, paths
        server.shutdown()
        thread.join()


def test_browser_runs_no_script_and_sends_no_request(tmp_path, requests):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    port, requested = requests
    # Active content that escaping would keep out: the policy is the second line of defence.
    active = f"""<script>onload = () => document.title =
        `ran, ${{[...document.images].filter(image => image.naturalWidth > 500).length}} pictures`</script>
        <img src="http://127.0.0.1:{port}/picture"><link rel="stylesheet" href="http://127.0.0.1:{port}/style">
        <iframe src="http://127.0.0.1:{port}/frame"></iframe></body>""".encode()
    html = page(read_run(hostile_run(tmp_path))).replace(b"</body>", active)

    def title(html: bytes) -> str:
        (tmp_path / "report.html").write_bytes(html)
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        options += [
            "--no-first-run",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND,EXCLUDE 127.0.0.1",
        ]
        command = [browser, *options, "--dump-dom", (tmp_path / "report.html").as_uri()]
        dom = subprocess.run(command, capture_output=True, timeout=100, check=True).stdout.decode()
        return re.findall("<title>(.*?)</title>", dom)[0]

    assert title(html).startswith("&lt;b&gt;&amp;amp;: step 3")
    assert requested == []
    assert title(html.replace(POLICY.encode(), b"")) == "ran, 3 pictures"
    assert sorted(set(requested) - {"/favicon.ico"}) == ["/frame", "/picture", "/style"]
