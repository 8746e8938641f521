"""Tuning on a GPU without a measured table: the candidates that are timed, the winner, and its cache."""

import json
import logging
from typing import NamedTuple

import pytest
import torch

from megalin._triton.dispatch import tuning


class Tile(NamedTuple):
    chunk: int
    warps: int


RECORDED = Tile(64, 8)
SMALL, FAST, BROKEN, WRONG = Tile(16, 4), Tile(32, 4), Tile(128, 8), Tile(64, 4)
MILLISECONDS = {SMALL: 3.0, FAST: 1.0, WRONG: 0.5}


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Records launches on an unknown GPU: each tile has its own time, and the largest does not fit."""
    recorded = []

    def milliseconds(call):
        call()
        return MILLISECONDS[recorded[-1]]

    monkeypatch.setenv("MEGALIN_CACHE", str(tmp_path / "new"))
    monkeypatch.delenv("MEGALIN_TUNE", raising=False)
    monkeypatch.setattr(tuning, "_found", {})
    monkeypatch.setattr(tuning, "_rejected", set())
    monkeypatch.setattr(tuning, "current_gpu", lambda: "a GPU 8.6 triton 3.6.0")
    monkeypatch.setattr(tuning, "milliseconds", milliseconds)
    monkeypatch.setattr(tuning.torch.cuda, "is_current_stream_capturing", lambda: False)
    return recorded


def choose(launches, shape="128", candidates=(SMALL, BROKEN, FAST)):
    def launch(tile):
        launches.append(tile)
        if tile == BROKEN:
            raise RuntimeError("out of resource: shared memory")
        return torch.ones(100) - 0.2 * (tile == WRONG)

    return tuning.choose("scan", shape, RECORDED, candidates, launch)


def restart():
    tuning._found.clear()


def test_the_measured_gpu_takes_its_table_and_times_nothing(launches, monkeypatch):
    monkeypatch.setattr(tuning, "current_gpu", lambda: None)
    assert choose(launches) == RECORDED
    assert launches == []


def test_another_gpu_times_each_candidate_once_a_shape_class_and_takes_the_fastest(launches):
    assert choose(launches) == FAST
    assert launches == [SMALL, BROKEN, FAST]
    assert choose(launches) == FAST
    assert len(launches) == 3
    choose(launches, shape="256")
    assert len(launches) == 6


def test_the_winner_is_kept_on_disk_by_gpu(launches, monkeypatch):
    choose(launches)
    assert json.loads(tuning.cache_path().read_text()) == {"a GPU 8.6 triton 3.6.0": {"scan 128": [32, 4]}}
    restart()
    assert choose(launches) == FAST
    assert len(launches) == 3
    monkeypatch.setattr(tuning, "current_gpu", lambda: "another GPU")
    choose(launches)
    assert len(launches) == 6
    assert set(tuning.read_cache()) == {"a GPU 8.6 triton 3.6.0", "another GPU"}


def test_a_kept_winner_that_is_no_candidate_any_more_is_searched_again(launches):
    choose(launches)
    restart()
    assert choose(launches, candidates=(SMALL, BROKEN)) == SMALL
    assert len(launches) == 5


@pytest.mark.parametrize("text", ["{", "[1]", '{"a GPU 8.6 triton 3.6.0": 3}'])
def test_a_corrupt_file_is_reported_and_tuned_again(launches, caplog, text):
    tuning.cache_path().parent.mkdir()
    tuning.cache_path().write_text(text)
    with caplog.at_level(logging.WARNING):
        assert choose(launches) == FAST
    assert "configurations will be tuned again" in caplog.text
    assert tuning.read_cache()


def test_a_folder_that_cannot_be_written_is_reported(launches, caplog, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGALIN_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert choose(launches) == FAST
    assert "tuned again at the next start" in caplog.text


def test_a_candidate_with_another_result_than_the_first_is_left_out(launches, caplog):
    assert choose(launches, candidates=(SMALL, WRONG, FAST)) == FAST
    assert "candidate Tile(chunk=64, warps=4) is off by 2.0e-01; it is left out" in caplog.text


def test_a_self_test_searches_nothing_and_a_configuration_that_fails_it_is_not_chosen_again(launches, caplog):
    with tuning.without_search():
        assert choose(launches) == SMALL
        assert not tuning.reject("scan")
    assert launches == []
    assert choose(launches) == FAST
    restart()
    with tuning.without_search():
        assert choose(launches) == FAST
        assert not tuning.reject("another kernel")
        assert tuning.reject("scan")
        assert choose(launches) == SMALL
    assert "scan 128: configuration Tile(chunk=32, warps=4) fails the self-test; the next one is taken" in caplog.text


def test_tuning_can_be_turned_off(launches, monkeypatch):
    monkeypatch.setenv("MEGALIN_TUNE", "0")
    assert choose(launches) == SMALL
    assert launches == []


def test_nothing_is_timed_while_a_graph_is_captured(launches, monkeypatch):
    monkeypatch.setattr(tuning.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(launches) == SMALL
    assert launches == []


def test_without_a_candidate_that_runs_the_first_is_chosen_and_its_launch_raises(launches):
    assert choose(launches, candidates=(BROKEN,)) == BROKEN
    assert not tuning.cache_path().exists()


def test_the_search_is_bounded(launches):
    with pytest.raises(AssertionError):
        choose(launches, candidates=[Tile(n, 1) for n in range(tuning.MAX_CANDIDATES + 1)])
