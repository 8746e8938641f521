"""Metrics on disk and on the terminal: valid JSON, no step twice after a resume, a full disk, the loss curve."""

import contextlib
import io
import json
import math
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from matplotlib.image import imread
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalin.errors import StorageError
from megalin.train.curves import write_loss_curve
from megalin.train.metrics import Metrics
from tests.ranks import run_ranks


def _values(step: int) -> dict[str, float | int]:
    return {"loss": 9.0 / step, "tokens_per_second": 12345.6, "learning_rate": 3e-4, "tokens": 4096 * step}


def _metrics(folder: Path, **options) -> Metrics:
    options = {"total_steps": 10, "console": Console(file=io.StringIO()), **options}
    return Metrics(folder, **options)


def _lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_line_is_on_disk_before_the_next_step(tmp_path):
    with _metrics(tmp_path) as metrics:
        for step in (1, 2):
            metrics.write(step, _values(step))
            assert _lines(tmp_path)[-1] == {"step": step, **_values(step)}


def test_values_that_are_not_finite_keep_the_file_valid_json(tmp_path):
    with _metrics(tmp_path) as metrics:
        metrics.write(1, {"loss": math.nan, "grad_norm": math.inf, "logit_min": -math.inf, "tokens": 8})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == {
        "step": 1,
        "loss": None,
        "loss_nonfinite": "nan",
        "grad_norm": None,
        "grad_norm_nonfinite": "inf",
        "logit_min": None,
        "logit_min_nonfinite": "-inf",
        "tokens": 8,
    }


def test_no_step_appears_twice_after_a_resume(tmp_path):
    with _metrics(tmp_path) as metrics:
        for step in range(1, 7):
            metrics.write(step, _values(step))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "lo')
    with _metrics(tmp_path, resumed_step=4) as metrics:
        assert [line["step"] for line in _lines(tmp_path)] == [1, 2, 3, 4]
        for step in (5, 6):
            metrics.write(step, {"loss": 0.5})
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in _lines(tmp_path)][3:] == [2.25, 0.5, 0.5]
    assert _scalars(tmp_path, "loss") == [(1, 9.0), (2, 4.5), (3, 3.0), (4, 2.25), (5, 0.5), (6, 0.5)]


def test_steps_that_a_rollback_undid_are_replaced(tmp_path):
    with _metrics(tmp_path) as metrics:
        for step in range(1, 7):
            metrics.write(step, _values(step))
        metrics.rewind(4)
        assert [line["step"] for line in _lines(tmp_path)] == [1, 2, 3, 4]
        metrics.write(5, {"loss": 0.5})
    assert [line["loss"] for line in _lines(tmp_path)][3:] == [2.25, 0.5]
    assert _scalars(tmp_path, "loss") == [(1, 9.0), (2, 4.5), (3, 3.0), (4, 2.25), (5, 0.5)]


def test_a_run_from_the_start_keeps_nothing_of_an_earlier_one(tmp_path):
    for loss in (1.0, 2.0):
        with _metrics(tmp_path) as metrics:
            metrics.write(1, {"loss": loss})
    assert _lines(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_an_interrupted_cut_leaves_the_lines_alone(tmp_path, monkeypatch):
    with _metrics(tmp_path) as metrics:
        metrics.write(1, _values(1))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(StorageError, match=r"metrics.jsonl: cannot be written: No space left.*the free space"):
        _metrics(tmp_path, resumed_step=0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_steps_out_of_order_are_our_bug(tmp_path):
    with _metrics(tmp_path, resumed_step=3) as metrics, pytest.raises(AssertionError, match="step 3 after step 3"):
        metrics.write(3, _values(3))


def _write_on_ranks(folder: Path, rank_folders: bool) -> str:
    """Writes a step on this rank; returns the error, if any."""
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder / str(dist.get_rank()))
    try:
        with _metrics(Path.cwd() if rank_folders else folder / "none") as metrics:
            metrics.write(1, _values(1))
    except StorageError as error:
        return str(error)
    return ""


def test_other_ranks_write_nothing_and_raise_the_error_too(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    assert run_ranks(2, _write_on_ranks, tmp_path, True) == ["", ""]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["metrics.jsonl", "tensorboard"]
    assert list((tmp_path / "1").iterdir()) == []
    first, second = run_ranks(2, _write_on_ranks, tmp_path, False)
    assert first == second
    assert "none/metrics.jsonl: cannot be written (No such file" in first


def test_full_disk_warns_once_and_training_goes_on(tmp_path, caplog):
    with _metrics(tmp_path) as metrics, Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), metrics._sinks[0]._file._descriptor)
        for step in (1, 2, 3):
            metrics.write(step, _values(step))
    assert len(caplog.messages) == 1
    assert "metrics.jsonl cannot be written (No space left" in caplog.messages[0]
    assert [step for step, _ in _scalars(tmp_path, "loss")] == [1, 2, 3]


@pytest.mark.parametrize("kept_bytes", [0, 5])
def test_step_that_does_not_fit_is_taken_back_whole(tmp_path, monkeypatch, caplog, kept_bytes):
    from megalin.train import jsonl as module

    real_write, room = module.os.write, [10**6]

    def write(descriptor: int, data: memoryview) -> int:
        if len(data) > room[0] and room[0] == 0:
            raise OSError(28, "No space left on device")
        written = real_write(descriptor, bytes(data[: room[0]]))
        room[0] -= written
        return written

    with _metrics(tmp_path) as metrics:
        monkeypatch.setattr(module.os, "write", write)
        metrics.write(1, {"loss": 1.0})
        room[0] = kept_bytes
        metrics.write(2, {"loss": 2.0})
        assert "steps are missing there until it can" in caplog.text
        room[0] = 10**6
        metrics.write(3, {"loss": 3.0})
    assert _lines(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 3, "loss": 3.0}]
    assert _scalars(tmp_path, "loss") == [(1, 1.0), (3, 3.0)]


def test_events_that_cannot_be_written_are_a_warning(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file, where a folder belongs")
    with _metrics(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.0})
    assert "tensorboard cannot be written (File exists); training continues" in caplog.text
    assert _lines(tmp_path) == [{"step": 1, "loss": 1.0}]


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.jsonl.tmp"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_metrics_are_never_written_through_a_link_or_a_pipe(tmp_path, name, kind):
    with _metrics(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.0})
    (tmp_path / "outside").write_text("precious\n")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "outside") if kind == "link" else os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError, match=rf"{name}: cannot be written"):
        _metrics(tmp_path)
    assert (tmp_path / "outside").read_text() == "precious\n"


def test_plain_lines_come_every_interval_and_at_the_edges(tmp_path):
    output = io.StringIO()
    with _metrics(tmp_path, log_interval=4, console=Console(file=output, width=20)) as metrics:
        for step in range(1, 11):
            metrics.write(step, _values(step) | ({"evaluation_loss": 1.5} if step == 6 else {}))
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "6/10", "8/10", "10/10"]
    assert lines[0].startswith("step 1/10  loss 9.0000  lr 3.00e-04  12,346 tokens/s  0:00:0")
    assert lines[0].endswith(" left")
    assert "evaluation loss 1.5000" in lines[2]


def test_loss_curve_is_drawn_from_a_run(tmp_path):
    with _metrics(tmp_path, total_steps=400) as metrics:
        for step in range(1, 401):
            evaluated = {"evaluation_loss": 5.1} if step % 100 == 0 else {}
            metrics.write(step, {"loss": math.nan if step == 7 else 4 + 5 / step, **evaluated})
    write_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png", unigram_entropy=6.5)
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[:2] == (720, 1200)
    assert len({tuple(pixel) for pixel in picture.reshape(-1, picture.shape[2]).tolist()}) > 50


def test_loss_curve_without_a_loss_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    with pytest.raises(StorageError, match=r"no step with a finite loss; there is nothing to draw"):
        write_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_loss_curve_without_metrics_is_refused(tmp_path):
    with pytest.raises(StorageError, match=r"cannot be read \(No such file"):
        write_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_loss_curve_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    with pytest.raises(StorageError, match=r"loss.png: cannot be written"):
        write_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "no" / "loss.png")
