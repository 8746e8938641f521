"""Pipeline transfers through symmetric memory: the bits of sends and receives, and an error if a rank stalls."""

import torch

from tests.gpu.p2p_runs import SCHEDULES
from tests.gpu.ranks import needs_gpus, on_gpus
from tests.model_runs import checkpoint_tensors, metrics, model_table, write_config

PROGRAM = "tests.gpu.p2p_runs"
pytestmark = needs_gpus(2)


def test_every_tensor_arrives_in_order():
    run = on_gpus(2, PROGRAM, "send")
    assert run.returncode == 0, run.stderr[-4000:]


def test_runs_through_symmetric_memory_have_the_bits_of_runs_that_send(tmp_path):
    config = write_config(
        tmp_path, model={"layers": model_table()["layers"] * 2}, train={"micro_batch_size": 1, "dtype": "bfloat16"}
    )
    run = on_gpus(2, PROGRAM, "train", config, tmp_path)
    assert run.returncode == 0, run.stderr[-4000:]
    for schedule in SCHEDULES:
        by_copy, by_send = (tmp_path / f"{schedule}-{transfer}" for transfer in ("symmetric_memory", "p2p"))
        assert metrics(by_copy) == metrics(by_send)
        expected = checkpoint_tensors(by_send)
        for name, tensor in checkpoint_tensors(by_copy).items():
            assert torch.equal(tensor, expected[name]), name


def test_a_rank_that_does_not_send_is_named():
    run = on_gpus(2, PROGRAM, "stall")
    assert run.returncode != 0
    assert "rank 0: a collective failed, no response from rank 1" in run.stderr, run.stderr[-4000:]
