"""`megalin plan`, and the memory check of `megalin train`."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from megalin.__main__ import main
from megalin.planner.search import usable_bytes

SMALL = ["transnormerllm-385m-64k", "--gpus", "2", "--length", "1024", "--global-batch-size", "4", "--eager"]

REFUSED = [
    (["data.validation=[]", "train.evaluate_batches=2"], "train.evaluate_batches = 2: no effect without a validation"),
    (["model.vocab_size=200"], "bytes: has 257 token ids, but the model's vocab_size is 200; raise vocab_size"),
    (["data.order=megatron", f"train.seed={2**32}"], 'data.order = "megatron" needs a seed below 4294967296'),
    (
        ['model.layers.1.sublayers.0={type = "shared_key_attention", num_heads = 4, window = 37}'],
        "model.layers.1.sublayers.0.window = 37 is wider than the 36 tokens of a sequence",
    ),
    (['evaluation.tasks=["recall"]', "evaluation.limit=2"], "no task of the suite recall fits the run"),
    (['evaluation.tasks=["recal:mqar"]'], "task 'recal:mqar': 'recal' is no suite with tasks"),
    (['evaluation.tasks=["arc_easy"]', "data.tokenizer=null"], "choice tasks need data.tokenizer, which is not set"),
    (["train.engine=deepspeed", "train.deepspeed_config=none.json"], "train.deepspeed_config = 'none.json' is not a"),
]
"""Overrides of a run that a start refuses, whatever its data and its ranks are, and the error."""


def test_a_plan_names_meshes_and_why_others_fail(capsys):
    assert main(["plan", *SMALL, "--memory", "7GB", "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "399.0 million parameters, 4 samples of 1024 tokens a step, eager blocks" in text
    assert "2 x h200 with 6.5 GiB, 6.0 of it for tensors" in text
    assert "\n1. " in text
    assert "\n2. " in text
    assert "parallel.tp=1 parallel.cp=1 parallel.pp=1 parallel.zero=" in text
    assert "memory, most of it" in text
    assert "the pipeline needs more micro-batches" in text
    (best,) = re.findall(r"\n1\. .*?\n   (parallel[^\n]*)\n\n", text, re.DOTALL)
    train = f"-m megalin train RUN.toml model.preset=transnormerllm-385m-64k {best}"
    assert text.endswith(f"\n\nTo train on the first: torchrun --nproc-per-node 2 {train}\n")


def test_json_has_every_refusal_and_all_parts(capsys):
    assert main(["plan", *SMALL, "--gpu", "a100", "--memory", "20GB", "--top", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (best,) = plan["best"]
    assert best["memory_bytes"]["total"] == sum(best["memory_bytes"].values()) - best["memory_bytes"]["total"]
    assert best["memory_bytes"]["total"] <= usable_bytes(plan["memory_bytes"]) == 18_400_000_000
    assert best["step_seconds"]["total"] > best["step_seconds"]["matmuls"] > 0
    assert {"tp", "cp", "data", "pp"} == best["sent_bytes"].keys()
    assert (plan["gpus"], plan["gpu"], plan["length"], plan["global_batch_size"]) == (2, "a100", 1024, 4)
    assert {"layout", "reason", "kind", "missing_bytes"} == plan["refused"][0].keys()


def test_a_run_config_sets_the_length_and_batch_of_the_plan(config, capsys):
    arguments = ["plan", str(config), "train.micro_batch_size=1", "--gpus", "1", "--memory", "1GB", "--json"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["length"], plan["global_batch_size"], plan["compiled"]) == (36, 4, False)


def test_fp8_is_planned_from_the_run_config_for_gpus_that_have_it(config, capsys, fails):
    arguments = ["plan", str(config), "train.micro_batch_size=1", "--gpus", "1", "train.dtype=bfloat16"]
    float8 = [*arguments, "train.matmul_dtype=float8", "model.hidden_size=256"]
    message = fails(2, *float8, "--gpu", "a100")
    assert "needs a GPU of compute capability 8.9 or above" in message
    assert "a100 has 8.0" in message
    assert main([*float8, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]
    message = fails(2, *arguments, "train.matmul_dtype=float8")
    assert "no linear layer of the blocks has at least 256 inputs and outputs" in message


@pytest.mark.parametrize("command", [["config"], ["plan", "--gpus", "1"], ["launch", "--nproc-per-node", "2"]])
@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_every_command_refuses_what_train_refuses_without_data(config, fails, command, override, message):
    """`config` and `plan` would pass a run that ends at its start."""
    name, *options = command
    assert message in fails(2, "train", config, *override)
    assert message in fails(2, name, config, *override, *options)


def test_a_mesh_that_train_would_refuse_is_planned_anew(config, capsys):
    assert main(["plan", str(config), "--gpus", "1", "parallel.tp=3"]) == 0
    assert "parallel.tp=1" in capsys.readouterr().out


def test_a_run_config_sets_the_overlap_of_tensor_parallelism(config, capsys):
    arguments = [
        "plan",
        str(config),
        "train.micro_batch_size=1",
        "--gpus",
        "2",
        "--memory",
        "1GB",
        "--top",
        "9",
        "--json",
    ]
    assert main([*arguments, "--sequence-parallel", 'parallel.tp_overlap="none"']) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    (overrides,) = (layout["overrides"] for layout in best if layout["tp"] == 2)
    assert {"parallel.sequence_parallel=true", "parallel.tp_overlap=none"} <= set(overrides)


def test_mixers_that_share_a_module_may_be_in_several_entries(tmp_path, capsys):
    """HGRN2's bounds are shared by all layers, and the first backward frees their graph."""
    entry = '[[model.layers]]\nsublayers = [{ type = "hgrn2", num_heads = 4, chunk_size = 16 }]\n'
    model = "[model]\nvocab_size = 257\nhidden_size = 32\n"
    path = tmp_path / "model.toml"
    path.write_text(model + 2 * entry)
    assert main(["plan", str(path), "--gpus", "1", "--length", "64", "--global-batch-size", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]


def test_longest_samples_of_a_mesh(config, capsys):
    arguments = ["plan", str(config), "train.micro_batch_size=1", "--gpus", "1", "--longest"]
    assert main([*arguments, "--memory", "20GB"]) == 0
    text = capsys.readouterr().out
    assert "27,200 parameters, 4 samples a step, eager blocks" in text
    assert "meshes tried: 1; the longest samples that fit, one a micro-batch:" in text
    (length,) = re.findall(r"^1\. ([\d,]+) tokens: dp 1, ZeRO 0, micro-batches 4 x 1, recompute: ", text, re.MULTILINE)
    assert f" data.sequence_length={length.replace(',', '')}\n" in text
    command = f"To train on the first: megalin train {config} train.micro_batch_size=1 parallel.tp=1"
    assert text.splitlines()[-1].startswith(command)
    assert text.endswith(f" data.sequence_length={length.replace(',', '')}\n")
    assert main([*arguments, "--memory", "0.001GB", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert (plan["longest"], plan["num_meshes"], plan["global_batch_size"]) == ([], 1, 4)
    assert plan["refused"][0]["missing_bytes"] > 0


def test_meshes_are_printed_fastest_first_and_another_gpu_by_its_figures(capsys):
    def seconds(*figures: str) -> list[float]:
        assert main(["plan", *SMALL, "--gpu-memory", "40GB", *figures]) == 0
        text = capsys.readouterr().out
        assert ("2 x GPU with 5 TFLOP/s, 900 GB/s of memory" in text) is bool(figures)
        return [float(found) for found in re.findall(r" ([\d.]+) s a step", text)]

    h200, slow = seconds(), seconds("--gpu-tflops", "5", "--bandwidth", "900")
    assert len(h200) > 1
    for found in (h200, slow):  # rounded, and a simpler one may come first
        assert all(time <= 1.03 * later for time, later in itertools.pairwise(found))
    assert slow[0] > 2 * h200[0]


def test_a_length_and_a_search_for_one_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        main(["plan", *SMALL, "--longest"])
    assert "argument --longest: not allowed with argument --length" in capsys.readouterr().err


def test_nothing_fits(capsys):
    assert main(["plan", *SMALL, "--memory", "1GB"]) == 1
    assert "No layout fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-1b", "--gpus", "0"], "--gpus 0: use at least 1"),
        (["llama-1b", "--gpus", "1", "--global-batch-size", "0"], "--global-batch-size 0: use at least 1"),
        (["llama-1b", "--gpus", "1", "--memory", "80"], "--gpu-memory 80: not an amount of memory; write it as 80GB"),
        (["llama-1b", "--gpus", "1", "--memory", "0GB"], "--gpu-memory 0GB: not an amount of memory"),
        (
            ["llama-1b", "--gpus", "1", "--gpu", "h20"],
            "--gpu h20: unknown GPU model; did you mean 'h200'",
        ),
        (["llama-1b", "--gpus", "1", "--gpu-tflops", "0"], "--gpu-tflops 0: use a positive number"),
        (["danet-base", "--gpus", "1"], 'danet-base: model.kind = "encoder", but only decoders can be planned'),
    ],
)
def test_invalid_plans_are_refused(arguments, message, fails):
    assert message in fails(2, "plan", *arguments)


def test_train_refuses_a_run_that_cannot_fit_before_it_makes_anything(config, tmp_path, fails, monkeypatch):
    monkeypatch.setattr("megalin.api.trainer.device_memory_bytes", lambda device: 100_000)
    folder = tmp_path / "run"
    message = fails(2, "train", config, "--folder", folder)
    assert "weights, gradients and optimizer state alone need" in message
    assert not folder.exists()
    assert main(["train", str(config), "--folder", str(folder), "--no-memory-check", "train.stop_after_steps=1"]) == 0
