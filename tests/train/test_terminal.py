"""Progress of a run: a live view on a terminal, which keeps other output intact, and plain lines elsewhere."""

from __future__ import annotations

import errno
import io
import logging
import re
import sys

import pytest
from rich.console import Console

from megalin.train.events import EventLog
from megalin.train.metrics import Metrics

VALUES = {
    "loss": 3.25,
    "grad_norm": 0.5,
    "learning_rate": 3e-4,
    "tokens_per_second": 12345.6,
    "model_flops_utilization": 0.412,
    "step_seconds": 2.0,
    "data_wait_seconds": 0.05,
    "peak_memory_bytes": 3 * 2**30,
}
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences that colour text and move the cursor."""


def _console(output: io.StringIO, **options) -> Console:
    return Console(file=output, force_terminal=True, color_system=None, _environ={"TERM": "xterm"}, **options)


def _final(text: str) -> list[str]:
    """Lines of the final view: the text after the last erased line."""
    return CURSOR.sub("", text.rpartition("\x1b[2K")[2]).strip().splitlines()


def test_view_shows_losses_rates_memory_waits_and_the_time_left(tmp_path):
    output = io.StringIO()
    with Metrics(tmp_path, total_steps=10, resumed_step=4, console=_console(output, width=110)) as metrics:
        metrics.write(5, VALUES | {"evaluation_loss": 3.5})
        metrics.write(6, VALUES)
    head, learning, rates = _final(output.getvalue())
    assert re.match(r"step 6/10 ━{50,} +0:00:0\d left$", head)
    assert learning == "loss 3.2500  grad norm 0.500  lr 3.00e-04  evaluation loss 3.5000 at step 5"
    assert rates.rstrip() == "12,346 tokens/s  MFU 41.2%  memory 3.0 GiB at most  data wait 2.5%"
    assert "step 5/10  loss 3.2500  evaluation loss 3.5000  grad norm" in output.getvalue()


def test_losses_of_an_encoder_are_shown_separately(tmp_path):
    output = io.StringIO()
    with Metrics(tmp_path, total_steps=1, console=_console(output, width=110)) as metrics:
        metrics.write(1, {"loss": 3.5, "mlm_loss": 2.75, "nsp_loss": 0.75})
    head, learning, *_ = _final(output.getvalue())
    assert head.endswith("0:00:00 in all")
    assert learning == "loss 3.5000  MLM 2.7500  NSP 0.7500"


def test_newest_incident_is_shown_on_one_row_and_cannot_steer_the_terminal(tmp_path):
    output = io.StringIO()
    with (
        EventLog(tmp_path / "incidents.jsonl") as event_log,
        Metrics(tmp_path, total_steps=10, event_log=event_log, console=_console(output, width=60)) as metrics,
    ):
        metrics.write(1, VALUES)
        logging.getLogger("megalin").warning("[red]passed\x1b]0;title\x07 over: %s\nsecond line", "long " * 20)
        metrics.write(2, VALUES)
    row = _final(output.getvalue())[-1]
    assert re.match(r"\d\d:\d\d:\d\d warning: \[red\]passed\N{REPLACEMENT CHARACTER}\]0;title", row)
    assert len(row) <= 60
    assert "second line" not in output.getvalue()
    assert "\x07" not in output.getvalue()


def test_lines_above_the_view_stay_whole(tmp_path):
    output = io.StringIO()
    with Metrics(tmp_path, total_steps=10, console=_console(output, width=60)) as metrics:
        metrics.write(1, VALUES)
        metrics.print_line("kernels: " + ", ".join(f"op_{number} [triton]" for number in range(9)))
        metrics.write(2, VALUES)
    assert "kernels: op_0 [triton], op_1 [triton]" in output.getvalue()
    assert "op_8 [triton]\n" in output.getvalue()


@pytest.mark.parametrize(("terminal", "caught"), [(True, True), (False, False)])
def test_standard_error_in_a_file_stays_there(tmp_path, monkeypatch, terminal, caught):
    error, output = io.StringIO(), io.StringIO()
    monkeypatch.setattr(error, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", error)
    with Metrics(tmp_path, total_steps=10, console=_console(output, width=60)) as metrics:
        metrics.write(1, VALUES)
        print("from a library", file=sys.stderr)
    assert ("from a library" in output.getvalue()) == caught
    assert ("from a library" in error.getvalue()) != caught
    assert sys.stderr is error


def test_terminal_that_cannot_move_its_cursor_gets_lines(tmp_path):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, _environ={"TERM": "dumb"})
    with Metrics(tmp_path, total_steps=2, console=console) as metrics:
        metrics.write(1, VALUES)
    assert output.getvalue().startswith("step 1/2  loss 3.2500")
    assert "\x1b" not in output.getvalue()


class _Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("terminal", [True, False])
def test_output_that_is_gone_does_not_end_the_run(tmp_path, caplog, terminal):
    console = Console(file=_Gone(), force_terminal=terminal, _environ={"TERM": "xterm"})
    with Metrics(tmp_path, total_steps=3, log_interval=1, console=console) as metrics:
        metrics.print_line("kernels: reference")
        for step in (1, 2, 3):
            metrics.write(step, VALUES | {"evaluation_loss": 3.5})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    assert "cannot be written (No space left on device); training continues" in caplog.text
