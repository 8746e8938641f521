"""Step rates of a run on a GPU, with an evaluation and a checkpoint after every second step."""

import json
import statistics

import pytest
import torch

from megalin.parallel.process_group import process_group
from megalin.train.config import load_run_config
from megalin.train.loop import train
from tests.model_runs import write_config


@pytest.mark.parametrize("graphs", ["false", "true"], ids=["eager", "cuda_graphs"])
def test_no_rate_is_raised_by_evaluations_and_checkpoints(tmp_path, graphs):
    # Enough work for the device: a step after a pause cannot overlap its host work with another step.
    config = write_config(
        tmp_path,
        model={"hidden_size": 512},
        data={"sequence_length": 512},
        train={
            "steps": 32,
            "global_batch_size": 128,
            "micro_batch_size": 64,
            "evaluate_every_steps": 2,
            "evaluate_batches": 1,
        },
        checkpoint={"every_steps": 2},
    )
    device = torch.device("cuda", torch.cuda.current_device())
    with process_group(device):
        train(load_run_config(config, [f"train.cuda_graphs={graphs}"]), device, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines]
    print([round(1e3 * line["step_seconds"], 2) for line in lines])  # ms
    assert len(rates) == 32
    assert max(rates) < 1.5 * statistics.median(rates)
