"""FP8 matmuls of a run: training, the record of what runs in FP8, and the refused settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megalin.errors import ConfigError
from megalin.parallel.config import ParallelConfig
from megalin.parallel.float8_layers import Float8Settings, float8_linears
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.parallel.tensor_parallel import local
from megalin.train.build import build_model
from megalin.train.config import load_run_config
from megalin.train.float8 import check_float8_device
from megalin.train.launch_checks import check_launch
from tests.model_runs import CPU, checkpoint_tensors, losses, train_here, write_config

FLOAT8 = ["train.dtype=bfloat16", "train.matmul_dtype=float8"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a wide and a narrow layer in each block."""
    sublayers = [{"type": "tnl", "num_heads": 8, "chunk_size": 16}, {"type": "glu", "intermediate_size": 272}]
    model = {"hidden_size": 256, "init_std": 0.05, "layers": [{"sublayers": sublayers}]}
    return write_config(
        tmp_path_factory.mktemp("float8"), model=model, optimizer={"lr": 2e-3}, checkpoint={"every_steps": 50}
    )


def message(path: Path, *overrides: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as raised:
        check_launch(load_run_config(path, [*FLOAT8, *overrides]), world_size)
    return str(raised.value)


def run(config: Path, folder: Path, *overrides: str) -> list[float]:
    with process_group(CPU):
        train_here(config, folder, *overrides)
    return losses(folder)


def test_a_run_learns_and_records_its_fp8_layers_and_resumes_with_the_same_bits(config, tmp_path, capsys):
    fast = [*FLOAT8, "optimizer.lr=0.02"]  # scales of many rows change
    found = run(config, tmp_path, *fast)
    assert found[-1] < found[0] - 0.5
    layers = (
        "4 linear layers in FP8 (sublayers.0.mixer.out, sublayers.0.mixer.qkv, sublayers.1.mixer.up, "
        "sublayers.1.mixer.down; gradients of weights in bfloat16); in bfloat16: low-rank maps, the head"
    )
    assert f"matmuls: {layers}" in capsys.readouterr().out
    kernels = json.loads((tmp_path / "kernels.json").read_text())
    assert kernels["scaled_matmul"] == {"backend": "reference", "reason": layers}
    assert kernels["quantize_rows"]["backend"] == "reference"
    resumed = tmp_path / "resumed"
    assert len(run(config, resumed, *fast, "train.stop_after_steps=5")) == 5
    assert run(config, resumed, *fast) == found
    whole, tensors = checkpoint_tensors(tmp_path), checkpoint_tensors(resumed)
    assert whole.keys() == tensors.keys()
    assert all(torch.equal(whole[name], tensors[name]) for name in whole)


@pytest.mark.slow
def test_fp8_learns_as_bf16_does_compiled_recomputed_and_with_fp8_gradients_of_weights(config, tmp_path):
    plain = run(config, tmp_path / "bf16", "train.dtype=bfloat16")
    eager = run(config, tmp_path / "eager", *FLOAT8)
    assert eager != plain
    assert eager[-1] == pytest.approx(plain[-1], abs=0.05)
    assert run(config, tmp_path / "recomputed", *FLOAT8, "train.recompute=true") == eager
    compiled = run(config, tmp_path / "compiled", *FLOAT8, "train.compile=true")
    assert compiled[-1] == pytest.approx(eager[-1], abs=0.05)
    size = ["train.micro_batch_size=4"]  # 144 tokens, a multiple of 16
    weights = run(config, tmp_path / "weights", *FLOAT8, "train.float8_weight_gradient=true", *size)
    assert weights != eager
    assert weights[-1] == pytest.approx(plain[-1], abs=0.05)


def test_scales_follow_the_weights(config):
    with process_group(CPU):
        settings = Float8Settings(min_width=16)
        options = {"compute_dtype": torch.bfloat16, "recompute": False, "compile_blocks": False, "seed": 0}
        run_config, mesh = load_run_config(config, []), Mesh(ParallelConfig(), CPU)
        model = build_model(run_config.model, mesh, float8=settings, **options)
        for factor in (1.0, 3.0):
            with torch.no_grad():
                for parameter in model.parameters():
                    local(parameter).mul_(factor)
            model.after_optimizer_step()
            for name, linear in float8_linears(model):
                weight, matmuls = local(linear.weight).flatten(0, -2), linear.float8
                assert torch.equal(matmuls.out_magnitudes, weight.abs().amax(1)), name
                assert torch.equal(matmuls.in_magnitudes, weight.abs().amax(0)), name
    assert len(float8_linears(model)) == 4


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.dtype=float32"], 'with train.dtype = "float32": results of FP8 matmuls are bf16 numbers; use dtype ='),
        (["train.engine=deepspeed"], 'with train.engine = "deepspeed": scales of weights are computed from the fp32'),
        (
            ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.tp_overlap=symmetric_memory"],
            'with parallel.tp_overlap = "symmetric_memory", whose matmuls run in chunks of bf16 numbers; use',
        ),
        (
            ["parallel.pp=2", "parallel.pp_schedule=zero_bubble", "train.global_batch_size=8"],
            'with parallel.pp_schedule = "zero_bubble", which computes the gradients of weights and of activations',
        ),
        (
            ["train.float8_weight_gradient=true"],
            "72 tokens on a rank (train.micro_batch_size = 2 times data.sequence_length = 36 / parallel.cp = 1), over",
        ),
        (["model.hidden_size=240"], "the widest has 240 of both); use a wider model, or leave matmul_dtype out"),
        (["model.layers.0.sublayers.1.intermediate_size=260"], "has 520 outputs and 256 inputs; use widths that are"),
    ],
)
def test_settings_that_fp8_does_not_support_are_refused(config, overrides, problem):
    assert problem in message(config, *overrides)


def test_gradients_of_weights_in_fp8_need_fp8_matmuls(config):
    with pytest.raises(ConfigError, match=r"float8_weight_gradient = true has no effect without train\.matmul_dtype"):
        load_run_config(config, ["train.float8_weight_gradient=true"])


def test_sizes_are_those_of_a_rank(config):
    overrides = ["parallel.tp=2", "model.layers.0.sublayers.1.intermediate_size=264"]
    assert "with parallel.tp = 2 the matrix of blocks.0.sublayers.1.mixer.up on a rank has 264 outputs" in message(
        config, *overrides, world_size=2
    )


def test_a_gpu_without_fp8_is_refused_before_the_model_is_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_float8_device(CPU)
    with pytest.raises(ConfigError, match=r"but NVIDIA A100 has 8\.0; leave matmul_dtype out"):
        check_float8_device(torch.device("cuda"))
