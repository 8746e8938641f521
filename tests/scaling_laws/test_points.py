"""Files of points, and `megalin fit` on them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from megalin.__main__ import main
from megalin.errors import DataError
from megalin.scaling_laws.points import by_mixer, read_points
from tests.scaling_laws.designs import CHINCHILLA, SMALL, ladder, write_csv

COLUMNS = ("parameters", "tokens", "loss", "flops", "mixer", "state_bytes", "run")


def test_file_gives_its_points(tmp_path):
    points = ladder(SMALL, mixer="tnl", state=2.0, run_noise=0.0)
    read = read_points(write_csv(tmp_path / "points.csv", points, COLUMNS))
    assert read == (points, True)
    (own,) = by_mixer(read.points).values()
    assert own.groups.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    bare = read_points(write_csv(tmp_path / "bare.csv", points))
    assert not bare.has_flops
    assert [point.flops for point in bare.points] == [point.flops for point in points]  # 6 N D
    assert by_mixer(bare.points)[""].groups.tolist() == list(range(12))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "lacks the column parameters, tokens, loss"),
        ("parameters,tokens\n1,2\n", "lacks the column loss"),
        ("parameters,tokens,loss,flop\n1,2,3,4\n", "'flop' is unknown; did you mean"),
        ("parameters,tokens,loss,loss\n1,2,3,4\n", "'loss' stands twice"),
        ("parameters,tokens,loss\n", "no points"),
        ("parameters,tokens,loss\n1,2,3\n\n1,2\n", r"line 4: 2 cells, but 3 columns"),
        ("parameters,tokens,loss\n1,2,nan\n", r"line 2: loss = nan is not a finite positive number"),
        ("parameters,tokens,loss\n1,-2,3\n", r"tokens = -2 is not"),
        ("parameters,tokens,loss\n1,2,\n", r"loss = nothing is not"),
        ("parameters,tokens,loss,flops\n1,2,3,1e999\n", r"flops = 1e999 is not"),
        ('parameters,tokens,loss\n1,2,"3\n', "not a CSV file"),
    ],
)
def test_broken_file_is_refused(text, expected, tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=expected):
        read_points(path)


def test_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "points.csv"
    path.write_bytes(b"parameters,\xff\n")
    with pytest.raises(DataError, match="not a CSV file in UTF-8"):
        read_points(path)


def test_command_prints_the_fit(tmp_path, capsys):
    path = write_csv(tmp_path / "points.csv", ladder(SMALL, seed=2))
    assert main(["fit", "--points", str(path), "--resamples", "20", "--ask", "1e18"]) == 0
    printed = capsys.readouterr()
    assert "no column flops; C = 6 N D" in printed.err
    for expected in (
        "12 losses",
        "alpha",
        "90%, parametric bootstrap",
        "largest size from the others",
        "L(C)",
        "best models for 1e18",
    ):
        assert expected in printed.out


def test_command_prints_json(tmp_path, capsys):
    points = [*ladder(SMALL, noise=1e-4, mixer="a"), *ladder(SMALL, noise=1e-4, mixer="b")]
    path = write_csv(tmp_path / "points.csv", points, COLUMNS[:5])
    options = ["--resamples", "20", "--ask", "1000 h100-hours", "--mfu", "0.4"]
    assert main(["fit", "--points", str(path), *options, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    values = json.loads(printed.out)
    assert set(values) == {"mixers"}
    assert set(values["mixers"]) == {"a", "b"}
    assert values["mixers"]["a"]["alpha"] == pytest.approx(CHINCHILLA.alpha, abs=0.01)
    assert values["mixers"]["b"]["ask"]["flops"] == pytest.approx(1000 * 3600 * 989e12 * 0.4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "give folders of runs, or --points CSV"),
        (["--resamples", "19"], "at least 20"),
        (["--points", "no-such-file.csv"], "no-such-file.csv"),
    ],
)
def test_command_without_input_is_refused(options, expected, capsys):
    assert main(["fit", *options]) > 0
    assert expected in capsys.readouterr().err


def test_missing_scipy_is_named(tmp_path, capsys, monkeypatch):
    path = write_csv(tmp_path / "points.csv", ladder(SMALL))

    def missing(name):
        raise ModuleNotFoundError(name="scipy")

    monkeypatch.setattr("megalin.optional.importlib", SimpleNamespace(import_module=missing))
    assert main(["fit", "--points", str(path)]) == 2
    assert "pip install 'megalin[scaling]'" in capsys.readouterr().err
