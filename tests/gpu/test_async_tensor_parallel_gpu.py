"""Async tensor parallelism on two GPUs: values and gradients, random delays, and whole models."""

import pytest

from tests.gpu.ranks import needs_gpus, on_gpus

pytestmark = needs_gpus(2)


@pytest.mark.parametrize("what", ["values", "delays"])
def test_ops(what):
    run = on_gpus(2, "tests.gpu.async_tp_runs", what)
    assert run.returncode == 0, run.stderr[-4000:]


def test_a_rank_that_stalls_is_named():
    run = on_gpus(2, "tests.gpu.async_tp_runs", "stall")
    assert run.returncode != 0
    assert "rank 0: a collective failed, no response from rank 1" in run.stderr, run.stderr[-4000:]


@pytest.mark.parametrize("model", ["transnormerllm-1b-64k", "hgrn2-1b", "rodimus-1.3b"])
def test_models_give_the_answer_of_one_process(model):
    options = ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.tp_overlap=symmetric_memory"]
    run = on_gpus(2, "megalin", "verify", model, *options)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
