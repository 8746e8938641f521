"""Products beside copies of the stream on two GPUs: values and gradients, whatever waits, and whole models."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def on_two_gpus(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("what", ["values", "delays"])
def test_ops(what):
    run = on_two_gpus("tests.gpu.stream_products", what)
    assert run.returncode == 0, run.stderr[-4000:]


def test_a_rank_that_takes_no_part_is_named():
    run = on_two_gpus("tests.gpu.stream_products", "stall")
    assert run.returncode != 0
    assert "rank 0: an exchange failed, no word from rank 1" in run.stderr, run.stderr[-4000:]


@pytest.mark.parametrize("model", ["transnormerllm-1b-64k", "hgrn2-1b", "rodimus-1.3b"])
def test_models_give_the_answer_of_one_process(model):
    options = ["--tp", "2", "--sequence-parallel", "--tp-transfer", "copy"]
    run = on_two_gpus("megalin", "verify", model, *options)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
