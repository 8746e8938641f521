"""Import of a DeepSpeed JSON: the tables of a run, the keys left for the engine, and the reported ones."""

import json

import pytest

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.interop.configs import deepspeed
from megalin.interop.configs.deepspeed import add_deepspeed, read_json
from megalin.interop.configs.imported import ImportedConfig
from megalin.optim.config import OptimizerConfig, ScheduleConfig
from megalin.optim.schedule import learning_rate
from megalin.train.deepspeed_config import KNOWN, Owned, resolve_deepspeed
from tests.train.test_deepspeed_config import REFUSED

ZERO3 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 100,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-9, "weight_decay": 0.2}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 1000, "warmup_max_lr": 3e-4, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "activation_checkpointing": {"partition_activations": True},
    "tensorboard": {"enabled": False},
    "wall_clock_breakdown": False,
}

PEAKS = {
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_min_lr": 1e-5}},
}


def _read(document):
    imported = ImportedConfig("ds.json")
    return imported, add_deepspeed(document, imported)


def _notes(imported, verdict):
    return {note.key: note.text for note in imported.notes if note.verdict == verdict}


def test_zero3_json_becomes_tables_and_what_the_engine_keeps():
    imported, rest = _read(ZERO3)
    assert imported.values == {
        "train": {
            "engine": "deepspeed",
            "global_batch_size": 64,
            "micro_batch_size": 4,
            "dtype": "bfloat16",
            "steps": 1000,
        },
        "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-9, "weight_decay": 0.2, "max_grad_norm": 0.5},
        "schedule": {"type": "linear", "warmup_steps": 100},
        "parallel": {"zero": 3},
    }
    assert rest == {
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "overlap_comm": True,
            "sub_group_size": 1e9,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    assert {note.key for note in imported.notes} == {"gradient_accumulation_steps 2", "activation_checkpointing"}


def test_missing_tables_are_to_be_filled_in():
    imported, _ = _read(ZERO3)
    imported.check()
    assert set(_notes(imported, "fill in")) == {"model", "data"}
    imported.override(["model.preset=llama-70m", 'data={train = ["corpus"], sequence_length = 128}'])
    imported.notes.clear()
    imported.check()
    assert imported.complete, imported.report()


def test_auto_is_to_be_filled_in():
    document = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    imported, _ = _read(document)
    imported.check()
    assert set(_notes(imported, "fill in")) >= {"train_batch_size", "bf16.enabled", "optimizer.params.lr"}


def test_defaults_are_those_of_deepspeed():
    imported, _ = _read(
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupCosineLR"}}
    )
    assert imported.values["optimizer"] == {
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    assert imported.values["schedule"] == {"type": "cosine", "warmup_steps": 1000, "min_lr_ratio": 0.0001}
    assert "scheduler.params.warmup_type" in _notes(imported, "differs")


@pytest.mark.parametrize(
    ("document", "verdict", "key"),
    [
        ({"fp16": {"enabled": True}}, "differs", "fp16.hysteresis (default)"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "differs", "fp16.loss_scale 128"),
        ({"fp16": {"enabled": True, "initial_scale_power": 32}}, "differs", "fp16.initial_scale_power 4.29497e+09"),
        ({"fp16": {"enabled": True, "min_loss_scale": 3}}, "differs", "fp16.min_loss_scale 3"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "not available", "fp16.auto_cast"),
        ({"optimizer": {"type": "Lamb"}}, "differs", "optimizer.type Lamb"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "differs", "optimizer.params.adam_w_mode"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "not available", "optimizer.params.amsgrad"),
        ({"scheduler": {"type": "OneCycle"}}, "not available", "scheduler.type OneCycle"),
        (PEAKS, "differs", "scheduler.params.warmup_max_lr"),
        ({"tensor_parallel": {"autotp_size": 2}}, "not available", "tensor_parallel.autotp_size"),
        ({"sparse_gradients": True}, "not available", "sparse_gradients"),
        ({"sequence_parallel_size": 1}, "no effect", "sequence_parallel_size"),
        ({"bf16": {"enabled": True}}, "differs", "zero_optimization.stage 0"),
        ({"wandb": {"enabled": True, "team": "x"}}, "differs", "wandb.team"),
    ],
)
def test_key_without_a_counterpart_is_reported(document, verdict, key):
    assert key in _notes(_read(document)[0], verdict)


def test_loss_scaling_of_fp16_becomes_that_of_the_run():
    section = {"enabled": True, "initial_scale_power": 12, "min_loss_scale": 4, "hysteresis": 1, "loss_scale": 0}
    imported, rest = _read({"fp16": section, "zero_optimization": {"stage": 2}})
    assert imported.get("train.dtype") == "float16"
    assert imported.get("train.loss_scale") == {"growth_interval": 1000, "initial": 4096.0, "minimum": 4.0}
    assert not _notes(imported, "differs")
    assert "fp16" not in rest


def _settings(path, imported, rest):
    """The engine's settings from the remaining JSON."""
    path.write_text(json.dumps(rest))
    sections = {"bf16": "bfloat16", "fp16": "float16"}
    owned = [Owned(f"{key}.enabled", "", imported.get("train.dtype") == dtype) for key, dtype in sections.items()]
    return resolve_deepspeed(str(path), owned, stage=imported.get("parallel.zero"))


@pytest.mark.parametrize("document", [*(document for document, _ in REFUSED), {"bf16": {"enabled": True}}], ids=str)
def test_key_that_the_engine_refuses_is_reported_and_left_out(tmp_path, document):
    before = json.dumps(document)
    imported, rest = _read(document)
    assert imported.notes
    _settings(tmp_path / "ds.json", imported, rest)
    assert json.dumps(document) == before


def test_engine_takes_every_key_that_is_kept(tmp_path):
    document = {**dict.fromkeys(deepspeed._KEPT, True), "data_types": {}, "gradient_allreduce_op": "mean"}
    imported, rest = _read(document)
    assert rest == document
    assert _settings(tmp_path / "ds.json", imported, rest).items() >= document.items()


def test_warmup_alone_stays_at_its_peak():
    imported, _ = _read({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 5}}})
    assert imported.values["schedule"] == {"type": "constant", "warmup_steps": 5}
    assert imported.get("parallel.zero") == 0
    assert imported.get("optimizer.lr") == 2e-4


def _decay_rate(done, *, least, peak, warmup, total):
    """Learning rate of DeepSpeed's WarmupDecayLR with a linear warmup after `done` steps."""
    ratio = done / warmup if done < warmup else max(0.0, (total - done) / (total - warmup))
    return least + (peak - least) * ratio


def test_linear_decay_starts_and_ends_at_its_least_rate():
    parameters = {"warmup_num_steps": 10, "total_num_steps": 50, "warmup_max_lr": 2e-3, "warmup_min_lr": 4e-4}
    imported, _ = _read({"scheduler": {"type": "WarmupDecayLR", "params": {**parameters, "warmup_type": "linear"}}})
    assert not imported.notes
    optimizer = parse(OptimizerConfig, {"lr": imported.get("optimizer.lr")}, "ds.json")
    schedule = parse(ScheduleConfig, imported.values["schedule"], "ds.json")
    for done in (1, 5, 10, 11, 30, 50):
        rate = learning_rate(optimizer, schedule, done - 1, imported.get("train.steps"))
        assert rate == pytest.approx(_decay_rate(done, least=4e-4, peak=2e-3, warmup=10, total=50), rel=1e-12)


def test_start_of_the_warmup_is_a_ratio():
    parameters = {"warmup_num_steps": 5, "total_num_steps": 9, "warmup_min_ratio": 0.01, "warmup_type": "linear"}
    imported, _ = _read({"scheduler": {"type": "WarmupCosineLR", "params": parameters}})
    assert imported.get("schedule.warmup_start_ratio") == 0.01
    imported, _ = _read(PEAKS)
    assert imported.get("schedule.warmup_start_ratio") == 1e-5 / 1e-3


@pytest.mark.parametrize("start", ["auto", [1e-5], 1e-5])
def test_start_of_the_warmup_without_a_ratio_is_to_be_filled_in(start):
    parameters = {"warmup_num_steps": 5, "warmup_max_lr": "auto", "warmup_min_lr": start}
    imported, _ = _read({"scheduler": {"type": "WarmupLR", "params": parameters}})
    imported.check()
    note = f"{start!r} is no ratio to the peak, optimizer.lr"
    assert _notes(imported, "fill in")["scheduler.params.warmup_min_lr"] == note


@pytest.mark.parametrize(
    "document",
    [
        {"fp16": {"enabled": True, "initial_scale_power": float("nan"), "loss_scale_window": float("inf")}},
        {"scheduler": {"type": ["WarmupLR"]}},
        {"optimizer": {"type": "Adam", "params": {"lr": 0}}, "scheduler": PEAKS["scheduler"]},
    ],
)
def test_odd_values_do_not_end_the_import(document):
    imported, _ = _read(document)
    imported.check()
    assert not imported.complete


@pytest.mark.parametrize(("zero", "stage"), [(True, 1), ({"stage": 2}, 2), ({}, 0)])
def test_stage_is_read_from_three_forms(zero, stage):
    imported, rest = _read({"zero_optimization": zero})
    assert imported.get("parallel.zero") == stage
    assert rest == {}


def test_unknown_key_is_reported_with_the_nearest_one():
    imported, _ = _read({"gradient_cliping": 1.0, "my_key": 1})
    assert _notes(imported, "unknown") == {
        "gradient_cliping": "DeepSpeed has no such key; did you mean gradient_clipping?",
        "my_key": "DeepSpeed has no such key",
    }


@pytest.mark.parametrize(("text", "message"), [("{", "invalid JSON"), ("[1]", "must be a JSON object, not list")])
def test_bad_json_is_refused(text, message):
    with pytest.raises(ConfigError, match=f"ds.json: {message}"):
        read_json(text, "ds.json")


def test_older_name_of_bf16_is_known():
    imported, _ = _read(json.loads('{"bfloat16": {"enabled": true}}'))
    assert imported.get("train.dtype") == "bfloat16"


@pytest.mark.parametrize(
    ("table", "project"),
    [({"enabled": True, "project": "x"}, "x"), ({"enabled": True}, "deepspeed"), ({"enabled": False}, None)],
)
def test_wandb_keeps_its_project(table, project):
    assert _read({"wandb": table})[0].get("logging.wandb_project") == project


def test_no_key_of_deepspeed_is_unknown():
    document = {key: {"enabled": True} for key in KNOWN - {"bfloat16"}}
    imported = ImportedConfig("ds.json")
    add_deepspeed(document, imported)
    assert [note for note in imported.notes if note.verdict == "unknown"] == []
