"""Runs whose steps are one CUDA graph, bit for bit equal to runs without it."""

from pathlib import Path

import pytest
import torch

from megalin.parallel.process_group import process_group
from megalin.train import cuda_graphs, graph_choice
from megalin.train.config import load_run_config
from megalin.train.cuda_graphs import WARM_UP_STEPS, GradientGraph
from megalin.train.loop import train
from tests.gpu.graph_runs import PRESETS
from tests.gpu.ranks import needs_gpus, on_gpus
from tests.model_runs import STEPS, checkpoint_tensors, metrics, write_config

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


def automatic_and_eager(tmp_path: Path, *overrides: str) -> tuple[Path, Path]:
    """Folders of a run with the default of train.cuda_graphs and of one without."""
    config = write_config(tmp_path, train={"evaluate_every_steps": 5}, checkpoint={"every_steps": 4})
    device = torch.device("cuda", torch.cuda.current_device())
    folders = tmp_path / "auto", tmp_path / "eager"
    with process_group(device):
        for folder, settings in zip(folders, ([], ["train.cuda_graphs=false"]), strict=True):
            train(load_run_config(config, [*overrides, *settings]), device, folder)
    return folders


def assert_equal_runs(automatic: Path, eager: Path) -> None:
    assert metrics(automatic) == metrics(eager)
    expected = checkpoint_tensors(eager)
    for name, tensor in checkpoint_tensors(automatic).items():
        assert torch.equal(tensor, expected[name]), name


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph)))
    return replays


@pytest.mark.parametrize(
    "overrides",
    [[], ["checkpoint.background=true", 'train.on_spike="skip"'], ["train.dtype=float16"]],
    ids=["defaults", "background_saves_and_spikes", "float16"],
)
def test_one_gpu_replays_steps_by_default(tmp_path, monkeypatch, capsys, overrides):
    replays = count_replays(monkeypatch)
    assert_equal_runs(*automatic_and_eager(tmp_path, *overrides))
    assert len(replays) == STEPS - WARM_UP_STEPS
    output = capsys.readouterr().out
    assert "CUDA graphs: after three steps, if memory allows" in output
    assert "CUDA graphs: one launch a step from here on" in output


def test_a_graph_without_room_for_evaluations_is_captured_again_after_each(tmp_path, monkeypatch, capsys):
    replays, captures, record = count_replays(monkeypatch), [], GradientGraph._record
    monkeypatch.setattr(graph_choice, "EVALUATION_RATIO", 1e9)
    monkeypatch.setattr(GradientGraph, "_record", lambda *given: (captures.append(1), record(*given))[1])
    assert_equal_runs(*automatic_and_eager(tmp_path, "checkpoint.background=true"))
    assert len(replays) == STEPS - WARM_UP_STEPS
    assert len(captures) == 1 + (STEPS - 1) // 5
    assert "dropped before an evaluation" in capsys.readouterr().out


@pytest.mark.parametrize("refused", ["memory_obstacle", "growth_obstacle"])
def test_a_run_whose_graph_is_refused_goes_on_eagerly(tmp_path, monkeypatch, capsys, refused):
    replays = count_replays(monkeypatch)
    monkeypatch.setattr(cuda_graphs, refused, lambda *_: "a planted reason")
    assert_equal_runs(*automatic_and_eager(tmp_path))
    assert replays == []
    assert "CUDA graphs: none: a planted reason" in capsys.readouterr().out


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_wait_of_the_host_keeps_a_run_eager(tmp_path, monkeypatch, capsys, in_backward):
    accumulate = cuda_graphs.accumulate_gradients

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    def waiting(*arguments):
        if in_backward:
            x = torch.ones(2, device="cuda", requires_grad=True)
            y = x * 1.0
            y.register_hook(read)
            y.sum().backward()
        else:
            read(torch.ones(2, device="cuda"))
        return accumulate(*arguments)

    monkeypatch.setattr(cuda_graphs, "accumulate_gradients", waiting)
    assert_equal_runs(*automatic_and_eager(tmp_path))
    assert "CUDA graphs: none: the host waits for the device in a step, at " in capsys.readouterr().out


def test_graphs_of_every_mixer_change_no_bit():
    run = on_gpus(1, "tests.gpu.graph_runs")
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert all(f"{name}: " in run.stdout for name in PRESETS)


@needs_gpus(2)
@pytest.mark.parametrize(
    "axes",
    [
        *({"zero": zero} for zero in range(4)),
        *({"cp": 2, "zero": 2}, {"cp": 2, "cp_exchange": "ring"}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_graphs_change_no_bit_on_two_gpus(tmp_path, axes):
    config = write_config(tmp_path, parallel=axes, checkpoint={"every_steps": 6})
    folders = {graphs: tmp_path / graphs for graphs in ("false", "true")}
    for graphs, folder in folders.items():
        run = on_gpus(2, "megalin", "train", config, "--folder", folder, f"train.cuda_graphs={graphs}")
        assert run.returncode == 0, (graphs, run.stderr[-4000:])
    assert_equal_runs(folders["true"], folders["false"])
