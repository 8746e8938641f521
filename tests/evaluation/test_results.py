"""The file of results: nothing is lost by processes that write at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

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
