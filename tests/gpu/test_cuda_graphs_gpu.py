"""Runs whose steps are one CUDA graph, bit for bit equal to runs without it."""

import pytest
import torch

from megalin.parallel.process_group import process_group
from megalin.train.config import load_run_config
from megalin.train.cuda_graphs import WARM_UP_STEPS
from megalin.train.loop import train
from tests.gpu.ranks import needs_gpus, on_gpus
from tests.model_runs import checkpoint_tensors, metrics, write_config

ATTENTION = """model.layers.0.sublayers=[{type = "softmax", num_heads = 2, backend = "mask"},
    {type = "shared_key_attention", num_heads = 2, window = 7, residual = "two_hop", backend = "mask"},
    {type = "glu", intermediate_size = 32}]"""


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.hidden_dropout=0.1", "model.embedding_dropout=0.1"],
        ["train.compile=true", "train.dtype=bfloat16", "train.recompute=true", "model.hidden_dropout=0.1"],
        [ATTENTION, "train.dtype=bfloat16"],
        ["train.dtype=float16", "train.loss_scale.initial=4194304.0", "train.loss_scale.growth_interval=2"],
    ],
    ids=["eager", "eager_dropout", "compiled_bf16_recomputed_dropout", "attention_by_masks", "float16_overflows"],
)
def test_graphs_change_no_bit_of_a_run_that_accumulates_and_evaluates(tmp_path, overrides):
    config = write_config(tmp_path, train={"evaluate_every_steps": 5}, checkpoint={"every_steps": 6})
    device = torch.device("cuda", torch.cuda.current_device())
    folders = {graphs: tmp_path / graphs for graphs in ("false", "true")}
    with process_group(device):
        for graphs, folder in folders.items():
            torch.compiler.reset()
            train(load_run_config(config, [*overrides, f"train.cuda_graphs={graphs}"]), device, folder)
    assert metrics(folders["true"]) == metrics(folders["false"])
    expected = checkpoint_tensors(folders["false"])
    assert "train.dtype=float16" not in overrides or expected["optim.loss_scale.overflows"] > WARM_UP_STEPS
    for name, tensor in checkpoint_tensors(folders["true"]).items():
        assert torch.equal(tensor, expected[name]), name


@needs_gpus(2)
@pytest.mark.parametrize(
    "axes",
    [{"cp": 2, "zero": 2}, {"cp": 2, "cp_exchange": "ring"}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {}],
    ids=str,
)
def test_graphs_change_no_bit_on_two_gpus(tmp_path, axes):
    config = write_config(tmp_path, parallel=axes, checkpoint={"every_steps": 6})
    folders = {graphs: tmp_path / graphs for graphs in ("false", "true")}
    for graphs, folder in folders.items():
        run = on_gpus(2, "megalin", "train", config, "--folder", folder, f"train.cuda_graphs={graphs}")
        assert run.returncode == 0, run.stderr[-4000:]
    assert metrics(folders["true"]) == metrics(folders["false"])
    expected = checkpoint_tensors(folders["false"])
    for name, tensor in checkpoint_tensors(folders["true"]).items():
        assert torch.equal(tensor, expected[name]), name
