"""Missing shards of a run whose config says how to make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalin.__main__ import main
from megalin.config import parse
from megalin.data.config import DataConfig
from megalin.data.missing_files import check_files
from megalin.errors import DataError
from tests.model_runs import write_config

COMMANDS = ["python tools/first.py", "python tools/second.py"]


def data(folder: Path, **keys: object) -> DataConfig:
    return parse(
        DataConfig, {"train": [str(folder / "a")], "sequence_length": 8, "preparation": COMMANDS, **keys}, "test"
    )


def test_every_missing_file_is_named_with_the_commands(tmp_path: Path):
    (tmp_path / "a.bin").touch()
    config = data(tmp_path, validation=[str(tmp_path / "b")], tokenizer=str(tmp_path / "t.json"))
    with pytest.raises(DataError) as raised:
        check_files(config)
    missing = ", ".join(str(tmp_path / name) for name in ("a.idx", "b.bin", "b.idx", "t.json"))
    assert str(raised.value).splitlines() == [
        f"no such file: {missing}; a run reads them from the working folder. Make them with",
        "  python tools/first.py",
        "  python tools/second.py",
    ]


def test_a_long_list_is_cut(tmp_path: Path):
    with pytest.raises(DataError, match=r"/c\.idx and 2 more; "):
        check_files(data(tmp_path, train=[str(tmp_path / name) for name in "abcd"]))


def test_files_that_exist_pass(tmp_path: Path):
    for name in ("a.bin", "a.idx"):
        (tmp_path / name).touch()
    check_files(data(tmp_path, tokenizer="bytes"))
    check_files(data(tmp_path, train=["none"], preparation=[]))


def test_a_run_names_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = write_config(tmp_path, data={"validation": [str(tmp_path / "none")], "preparation": COMMANDS})
    assert main(["train", str(config), "--folder", str(tmp_path / "run")]) == DataError.exit_code
    assert f"no such file: {tmp_path}/none.bin, {tmp_path}/none.idx; " in (error := capsys.readouterr().err)
    assert "Make them with\n  python tools/first.py\n  python tools/second.py" in error
