"""A DeepSpeed JSON and the run's config: completed settings, and errors that name both places of a contradiction."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from megalin.errors import ConfigError
from megalin.train.config import load_run_config
from megalin.train.deepspeed_config import KNOWN
from megalin.train.deepspeed_settings import deepspeed_settings
from megalin.train.launch_checks import check_launch
from tests.model_runs import write_config

ENGINE = "train.engine=deepspeed"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("deepspeed_config"))


def settings(path: Path, document: object, *overrides: str, world_size: int = 2) -> dict[str, Any]:
    """DeepSpeed settings of a run whose config names this JSON."""
    file = path.with_name("ds.json")
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    config = load_run_config(path, [ENGINE, f"train.deepspeed_config={file}", *overrides])
    return deepspeed_settings(config, world_size)


def message(path: Path, document: object, *overrides: str, world_size: int = 2) -> str:
    with pytest.raises(ConfigError) as raised:
        settings(path, document, *overrides, world_size=world_size)
    return str(raised.value)


def test_without_a_json_the_config_says_everything(path):
    config = load_run_config(path, [ENGINE, "train.micro_batch_size=1", "train.dtype=bfloat16"])
    assert deepspeed_settings(config, 2) == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "log_level": "warning",
    }


def test_a_json_that_agrees_is_taken_as_it_is(path):
    document = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False, "loss_scale_window": 500},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
        "activation_checkpointing": {"partition_activations": False},
        "sequence_parallel_size": 1,
        "amp": {"enabled": "auto", "opt_level": "O1"},
        "log_level": "info",
        "wall_clock_breakdown": True,
    }
    resolved = settings(path, document)
    assert resolved["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert (resolved["log_level"], resolved["wall_clock_breakdown"]) == ("info", True)
    assert resolved["bf16"] == {"enabled": False}
    assert "optimizer" not in resolved


def test_unknown_keys_are_refused_with_the_nearest_one(path):
    text = message(path, {"zero_optimisation": {"stage": 1}, "train_batch_siz": 4, "my_comment": "x"})
    assert "3 problem(s)" in text
    assert "zero_optimisation: DeepSpeed has no such key and would ignore it; did you mean zero_optimization?" in text
    assert "did you mean train_batch_size?" in text
    assert "my_comment: DeepSpeed has no such key and would ignore it; remove it" in text


@pytest.mark.slow
def test_every_key_that_deepspeed_reads_is_known():
    config = pytest.importorskip("deepspeed.runtime.config")
    read: set[str] = set()

    class Recorder(dict[str, Any]):
        """Records the keys that are asked for."""

        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

    config.DeepSpeedConfig(Recorder(train_batch_size=1))
    assert "zero_optimization" in read
    assert len(read) > 40
    assert read <= KNOWN


def test_ranks_that_share_samples_count_in_the_batch_of_the_engine(path):
    resolved = settings(path, {"train_batch_size": 4}, "parallel.cp=3", world_size=6)
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [resolved[key] for key in keys] == [12, 2, 1]


def test_every_contradiction_is_reported_at_once_with_both_places(path):
    document = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "bias_correction": False}},
    }
    lines = message(path, document, "parallel.zero=2").splitlines()
    assert lines[0].endswith("ds.json: 8 problem(s)")
    ending = '; make them equal, remove the key, or write "auto"'
    assert [line.strip().removesuffix(ending) for line in lines[1:]] == [
        "train_batch_size = 8, but train.global_batch_size = 4",
        "gradient_accumulation_steps = 3, but train.global_batch_size = 4 over 2 groups of ranks that read different "
        "samples, 2 at a time, takes 1",
        "gradient_clipping = 0.5, but optimizer.max_grad_norm = 1.0",
        'bf16.enabled = True, but train.dtype = "float32"',
        "optimizer.params.lr = 0.001, but optimizer.lr = 0.01",
        "optimizer.params.bias_correction = False, but AdamW corrects its moments",
        "zero_optimization.stage = 1, but parallel.zero = 2",
        "optimizer.type = 'Lamb' is not the AdamW of [optimizer]; use 'AdamW', or remove the key",
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": {"auto_cast": True}}, "the model's inputs are token ids"),
    ({"fp16": {"fp16_master_weights_and_grads": True}}, "weights at rest are fp32"),
    ({"zero_optimization": {"cpu_offload": True}}, "it was renamed to offload_optimizer.device"),
    ({"zero_optimization": {"cpu_offload_param": True}}, "it was renamed to offload_param.device"),
    ({"amp": {"enabled": True}}, "train.dtype is the compute dtype"),
    ({"torch_autocast": {"enabled": True}}, "train.dtype is the compute dtype"),
    ({"scheduler": {"type": "WarmupLR"}}, r"the table \[schedule\] sets the learning rate"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, "train.recompute = true recomputes"),
    ({"tensor_parallel": {"autotp_size": 2}}, "parallel.tp shards layers"),
    ({"sequence_parallel_size": 2}, "parallel.cp shards sequences"),
    ({"elasticity": {"enabled": True}}, "on any number of ranks"),
    ({"data_efficiency": {"enabled": True}}, "data.phases sets the data of each step"),
    ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "with parts of a step's gradient"),
    ({"bf16": {"bf16_optimizer_states": True}}, "moments are fp32"),
    ({"checkpoint": {"load_universal": True}}, "do not load into tensor parallelism"),
    ({"gradient_allreduce_op": "sum"}, "the loss is scaled for a mean"),
    ({"managed_gradient_accumulation": False}, "train.global_batch_size determines the end of a step"),
    ({"bf16": {"check_grad_overflow": False}}, "an update with a non-finite gradient"),
    ({"zero_optimization": {"compute_grad_norm": False}}, "an update with a non-finite gradient"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "is not the AdamW"),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
        "checkpoints are saved from host memory only; use 'cpu'",
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "it has no effect at stage 0; use stage 1 or more",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "it has no effect at stage 2; use stage 3 or more",
    ),
]


@pytest.mark.parametrize(
    ("document", "problem"),
    [*REFUSED, ({"zero_optimization": {"stage": 4}}, "stage = 4 is not one of 0, 1, 2, 3")],
)
def test_what_a_run_cannot_have_is_refused_with_the_reason(path, document, problem):
    with pytest.raises(ConfigError, match=problem):
        settings(path, document)


@pytest.mark.parametrize("document", [{}, {"zero_optimization": {"stage": 0}}])
@pytest.mark.parametrize(("dtype", "tp"), [("bfloat16", 1), ("float16", 2)])
def test_half_precision_without_zero_is_refused(path, document, dtype, tp):
    overrides = [f"train.dtype={dtype}", f"parallel.tp={tp}", *([] if document else ["parallel.zero=0"])]
    assert (
        f"stage = 0 in {dtype}: this engine would accumulate gradients in that dtype and, with tensor parallelism, clip"
        in (message(path, document, *overrides))
    )


FLOAT16 = ("train.dtype=float16", "train.loss_scale.initial=4096.0", "train.loss_scale.growth_interval=500")


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"enabled": "auto", "loss_scale": 0, "hysteresis": 1},
        {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 1},
    ],
)
def test_float16_has_the_scale_of_the_config(path, section):
    resolved = settings(path, {"fp16": section}, *FLOAT16)
    assert (resolved["fp16"], resolved["bf16"]) == ({"enabled": True, "loss_scale": 4096.0}, {"enabled": False})
    assert (resolved["communication_data_type"], resolved["data_types"]) == ("fp32", {"grad_accum_dtype": "fp32"})


def test_another_loss_scaling_than_that_of_the_config_is_a_contradiction(path):
    section = {
        "enabled": True,
        "loss_scale": 128,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
    }
    lines = message(path, {"fp16": section | {"min_loss_scale": 2}}, *FLOAT16).splitlines()[1:]
    assert [line.strip().partition(";")[0] for line in lines] == [
        "fp16.loss_scale = 128, but train.loss_scale is dynamic",
        "fp16.initial_scale_power = 16, but train.loss_scale.initial = 4096 = 2^12",
        "fp16.loss_scale_window = 1000, but train.loss_scale.growth_interval = 500",
        "fp16.min_loss_scale = 2, but train.loss_scale.minimum = 1",
        "fp16.hysteresis = 2, but train.loss_scale is halved at every overflow",
    ]


def test_compiled_blocks_share_graphs_over_weights_that_lie_alike(path):
    compiled = settings(path, {}, "train.compile=true")["zero_optimization"]
    assert compiled == {"stage": 3, "memory_efficient_linear": False, "parameter_alignment": True}
    problem = message(path, {"zero_optimization": {"parameter_alignment": False}}, "train.compile=true")
    assert "zero_optimization.parameter_alignment = False, but train.compile = true; make them equal" in problem


def test_clipping_that_the_config_leaves_out_is_a_contradiction(tmp_path):
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace("max_grad_norm = 1.0\n", ""))
    assert "gradient_clipping = 1.0, but optimizer.max_grad_norm is left out" in message(
        path, {"gradient_clipping": 1.0}
    )
    assert settings(path, {})["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", "is not a readable JSON file: Expecting property name"),
        ([1], "contains no JSON object, but list"),
        ({"zero_optimization": True}, "zero_optimization = True is not an object"),
        ({"data_types": None}, "data_types = None is not an object"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(path, document, problem):
    assert problem in message(path, document)


def test_a_file_that_is_missing_is_refused(path):
    config = load_run_config(path, [ENGINE, "train.deepspeed_config=nowhere.json"])
    with pytest.raises(ConfigError, match=r"'nowhere.json' is not a readable JSON file: .*No such file"):
        check_launch(config, 1)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.deepspeed_config=ds.json"], 'but train.engine = "fsdp2" reads none'),
        ([ENGINE, "parallel.pp=2"], 'parallel.pp = 2 with train.engine = "deepspeed"'),
        ([ENGINE, "parallel.shard=2"], "which shards over the whole data axis; leave it out"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(path, overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        load_run_config(path, overrides)


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, 'deepspeed is not installed; pip install "deepspeed<0.20,>=0.19"'),
        ("0.18.2", "works with deepspeed <0.20,>=0.19, not 0.18.2"),
    ],
)
def test_a_deepspeed_that_is_not_there_or_of_another_version_is_refused(path, monkeypatch, version, problem):
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    with pytest.raises(ConfigError) as raised:
        check_launch(load_run_config(path, [ENGINE]), 1)
    assert problem in str(raised.value)
