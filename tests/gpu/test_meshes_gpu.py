"""Meshes of NCCL ranks against one process, in dtypes that kernels run in."""

import pytest

from tests.gpu.ranks import needs_gpus, on_gpus


def check(ranks: int, model: str, options: str) -> None:
    run = on_gpus(ranks, "megalin", "verify", model, *options.split())
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


@needs_gpus(3)
@pytest.mark.parametrize("model", ["transnormerllm-1b-64k", "hgrn2-1b", "rodimus_plus-1.6b", "mamba2-1b"])
def test_three_ranks_of_a_sequence(model):
    check(3, model, "parallel.cp=3 --dtype float32")


@needs_gpus(3)
def test_windows_of_three_ranks():
    check(3, "rodimus_plus-1.6b", "parallel.cp=3 --dtype bfloat16")


@needs_gpus(4)
@pytest.mark.parametrize("model", ["transnormerllm-1b-64k", "hgrn2-1b", "rodimus-1.3b", "mamba2-1b"])
def test_sharded_layers_and_sequences(model):
    check(4, model, "parallel.tp=2 parallel.cp=2 parallel.sequence_parallel=true --dtype bfloat16")


@needs_gpus(8)
@pytest.mark.parametrize("model", ["transnormerllm-1b-64k", "hgrn2-1b"])
def test_three_axes(model):
    check(8, model, "parallel.tp=2 parallel.cp=2 parallel.pp=2 --dtype float32")
