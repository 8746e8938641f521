"""The file of results: nothing is lost by processes that write at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from megalin.errors import NumericError
from megalin.evaluation.results import add_results, read_results


def test_writers_at_the_same_time_lose_no_result(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_results(tmp_path, 3, "choices", {f"task{number}": number}), range(40)))
    assert read_results(tmp_path, 3) == {"choices": {f"task{number}": number for number in range(40)}}
    add_results(tmp_path, 3, "choices", {"task0": "new"})
    add_results(tmp_path, 3, "loss", {"test": {}})
    assert read_results(tmp_path, 3)["choices"]["task0"] == "new"
    assert read_results(tmp_path, 3)["loss"] == {"test": {}}
    assert read_results(tmp_path, 4) == {}


def test_number_that_is_not_finite_is_refused_and_earlier_results_stay(tmp_path):
    add_results(tmp_path, 3, "loss", {"test": {"loss": 2.0}})
    for value in (float("nan"), float("inf")):
        with pytest.raises(NumericError, match=r"step-3\.json: not written: a result of the suite loss is not finite"):
            add_results(tmp_path, 3, "loss", {"test": {"loss": value}})
    assert read_results(tmp_path, 3) == {"loss": {"test": {"loss": 2.0}}}
