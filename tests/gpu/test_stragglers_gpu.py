"""Slow ranks on GPUs, by the waits of the other ranks' compute streams for their collectives."""

import json
import re
from pathlib import Path

import pytest

from tests.gpu.ranks import needs_gpus, on_gpus
from tests.model_runs import write_config

pytestmark = needs_gpus(2)


def run(
    tmp_path: Path,
    *,
    steps: int,
    slow_rank: int,
    parallel: dict[str, int],
    width: int = 1024,
    length: int = 1024,
    graphs: bool = True,
) -> tuple[str, list[dict[str, float]]]:
    """Trains on two ranks; returns the output and the metrics."""
    block = [{"type": "tnl", "num_heads": width // 128}, {"type": "glu", "intermediate_size": width * 11 // 4}]
    config = write_config(
        tmp_path,
        model={"hidden_size": width, "layers": [{"sublayers": block}] * 6},
        data={"sequence_length": length, "validation": []},
        train={
            "steps": steps,
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "dtype": "bfloat16",
            "cuda_graphs": graphs,
        },
        optimizer={"lr": 1e-4},
        parallel=parallel,
        checkpoint={"every_steps": 100},
    )
    ended = on_gpus(2, "tests.gpu.straggler_runs", config, tmp_path / "run", str(slow_rank))
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return ended.stdout + ended.stderr, lines


@pytest.mark.parametrize("parallel", [{}, {"zero": 1}, {"shard": 1}], ids=["zero_3", "zero_1", "replicas"])
@pytest.mark.parametrize(("slow_rank", "graphs"), [(0, True), (1, False)])
def test_rank_whose_gpu_is_slow_is_named_within_20_steps(tmp_path, slow_rank, graphs, parallel):
    output, lines = run(tmp_path, steps=26, slow_rank=slow_rank, parallel=parallel, graphs=graphs)
    named = re.findall(r"step (\d+): rank (\d) is slow", output)
    assert len(named) == 1, output[-2000:]
    assert named[0][1] == str(slow_rank)
    assert int(named[0][0]) <= 23  # the first step compiles, the waits are measured from the second one on
    assert {line["slowest_rank"] for line in lines[20:]} == {slow_rank}


def test_no_rank_of_equal_gpus_is_named(tmp_path):
    """In steps that the GPU limits: the hosts' own times, which limit short ones, are not equal."""
    output, lines = run(tmp_path, steps=60, slow_rank=-1, parallel={}, width=3072, length=2048)
    assert "is slow" not in output
    ratios = [line["slowest_rank_ratio"] for line in lines if "slowest_rank_ratio" in line]
    assert len(ratios) > 40
    assert max(ratios) < 1.4, ratios


def test_ranks_that_wait_for_each_other_in_blocks_are_not_compared(tmp_path):
    output, lines = run(tmp_path, steps=26, slow_rank=1, parallel={"tp": 2}, graphs=False)
    assert "is slow" not in output
    assert not any("slowest_rank" in line for line in lines)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"cp": 2}], ids=str)
def test_ranks_that_wait_for_each_other_in_blocks_are_compared_in_graphs(tmp_path, parallel):
    output, _ = run(tmp_path, steps=30, slow_rank=1, parallel=parallel)
    assert re.findall(r"rank (\d) is slow", output) == ["1"]
