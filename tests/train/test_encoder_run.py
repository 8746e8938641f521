"""A tiny pretraining run of an encoder: equal on any mesh, exact resumption, evaluation, and refused configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from megalin.__main__ import main
from megalin.config import dumps
from megalin.data.batch import pad_samples, take_samples
from megalin.errors import ConfigError
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from megalin.train.config import load_run_config
from megalin.train.launch_checks import check_launch
from megalin.train.loop import TrainResult
from megalin.train.validation import evaluate
from tests.encoder_cases import CASES, build, make_batch
from tests.model_runs import checkpoint_tensors, documents, train_here, write_shard
from tests.numerics import assert_close
from tests.ranks import run_ranks

MASKING = {"cls_token": 257, "sep_token": 258, "mask_token": 259, "pad_token": 260, "max_predictions": 6}
METRICS = ("step", "loss", "mlm_loss", "nsp_loss", "label_tokens", "grad_norm")


def write_config(folder: Path, **tables: dict[str, Any]) -> Path:
    train = write_shard(folder / "train", documents(3000, seed=1))
    validation = write_shard(folder / "validation", documents(600, seed=2))
    block = {"sublayers": [{"type": "dense_attention", "num_heads": 2}]}
    values: dict[str, dict[str, Any]] = {
        "model": {
            "kind": "encoder",
            "vocab_size": 261,
            "hidden_size": 32,
            "max_positions": 24,
            "init_std": 0.1,
            "layers": [block, block],
        },
        "data": {
            "train": [str(train)],
            "validation": [str(validation)],
            "sequence_length": 24,
            "tokenizer": "bytes",
            "masking": MASKING,
        },
        "train": {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"lr": 3e-3, "max_grad_norm": 1.0},
        "checkpoint": {"every_steps": 6},
    }
    for name, table in tables.items():
        values[name] = values.get(name, {}) | table
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """Folder and result of a run on one rank."""
    folder = tmp_path_factory.mktemp("one_rank")
    (whole,) = run_ranks(1, train_here, write_config(folder), folder / "one")
    assert whole.step == 6
    for line in lines(folder / "one"):
        assert line["loss"] == pytest.approx(line["mlm_loss"] + line["nsp_loss"], rel=1e-12)
    return folder / "one", whole


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, []),
        pytest.param(
            2,
            ["parallel.tp=2", "parallel.sequence_parallel=true", "train.recompute=true"],
            marks=pytest.mark.slow,  # tests/verify/test_encoders.py compares a step
        ),
        (3, ["parallel.cp=3"]),
        pytest.param(4, ["parallel.tp=2", "train.micro_batch_size=1"], marks=pytest.mark.slow),
    ],
    ids=["dp2", "tp2", "cp3", "tp2dp2"],
)
def test_run_is_the_same_on_every_mesh(one_rank, tmp_path, world_size, overrides):
    folder, whole = one_rank
    result = run_ranks(world_size, train_here, write_config(tmp_path), tmp_path / "run", *overrides)[-1]
    for line, truth in zip(lines(tmp_path / "run"), lines(folder), strict=True):
        assert {key: line[key] for key in METRICS} == pytest.approx({key: truth[key] for key in METRICS}, rel=2e-4)
    assert result.evaluation._asdict() == pytest.approx(whole.evaluation._asdict(), rel=2e-3, abs=2e-3)


def test_interrupted_run_goes_on_bit_for_bit(tmp_path):
    config = write_config(tmp_path)
    run_ranks(1, train_here, config, tmp_path / "whole")
    run_ranks(1, train_here, config, tmp_path / "parts", "train.stop_after_steps=3")
    run_ranks(1, train_here, config, tmp_path / "parts")
    for line, truth in zip(lines(tmp_path / "parts"), lines(tmp_path / "whole"), strict=True):
        assert {key: line[key] for key in METRICS} == {key: truth[key] for key in METRICS}
    parts, whole = (checkpoint_tensors(tmp_path / name) for name in ("parts", "whole"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_other_masks_are_another_order_of_samples(tmp_path):
    run_ranks(1, train_here, write_config(tmp_path), tmp_path / "run", "train.stop_after_steps=2")
    message = _refused(tmp_path, "data.masking.predicted_share=0.3")
    assert "was made with other values, which a run must keep" in message
    assert "data.masking.predicted_share: 0.15 in the checkpoint, 0.3 now" in message


def _refused(folder: Path, override: str) -> str:
    with process_group(torch.device("cpu")), pytest.raises(ConfigError) as raised:
        train_here(folder / "tiny.toml", folder / "run", override)
    return str(raised.value)


def test_commands_know_encoders(tmp_path, capsys):
    config, run = write_config(tmp_path), tmp_path / "run"
    assert main(["train", str(config), "--folder", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "validation: MLM loss" in printed
    last = lines(run)[-1]
    assert main(["eval", str(run), "--json"]) == 0
    evaluation = json.loads(capsys.readouterr().out)
    assert evaluation["mlm_loss"] == pytest.approx(last["evaluation_mlm_loss"], rel=1e-6)
    assert evaluation["loss"] == pytest.approx(evaluation["mlm_loss"] + evaluation["nsp_loss"])
    assert 0.0 <= evaluation["mlm_accuracy"] <= 1.0
    assert 0.0 < evaluation["nsp_accuracy"] <= 1.0
    assert evaluation["tokens"] == last["evaluation_tokens"] > evaluation["sequences"]
    assert main(["eval", str(run)]) == 0
    assert "NSP accuracy" in capsys.readouterr().out
    assert main(["config", str(config)]) == 0
    assert 'kind = "encoder"' in capsys.readouterr().out
    assert main(["eval", str(run), "data.sequence_length=12", "--json"]) == 0
    shorter = json.loads(capsys.readouterr().out)
    assert shorter["tokens"] > 0
    assert shorter["sequences"] > evaluation["sequences"]
    assert shorter["mlm_loss"] != evaluation["mlm_loss"]
    assert main(["params", str(config), "--json"]) == 0
    assert "state_bytes" not in json.loads(capsys.readouterr().out)
    assert main(["generate", str(run), "--prompt", "x"]) == 2
    assert 'model.kind = "encoder" attends to full sequences and cannot continue one' in capsys.readouterr().err
    assert main(["eval", str(run), "--suite", "choices"]) == 2
    assert 'choice tasks need a decoder, but model.kind = "encoder"' in capsys.readouterr().err
    assert (run / "loss.png").exists()


def test_config_comes_back_from_its_own_text(tmp_path):
    config = load_run_config(write_config(tmp_path), [])
    (tmp_path / "again.toml").write_text(dumps(config))
    assert load_run_config(tmp_path / "again.toml", []) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_classes=3", "model.num_classes = 3, but data.classification is missing; add this table"),
        ("model.num_classes=3", "data.masking makes samples without a class, but model.num_classes = 3; remove one"),
        ("train.max_label_fraction=0.2", "train.max_label_fraction = 0.2 is for decoders; an encoder's head computes"),
        ("data.sequence_length=30", "data.sequence_length = 30 is more than model.max_positions = 24; lower it"),
        ("model.poolin='mean'", "model.poolin: unknown key; did you mean 'pooling'"),
        ("model.kind='decoder'", "model.max_positions: unknown key"),
        ("model=3", r"model: 3 is not a table; write it as \[model\]"),
        ("data.masking.maxpredictions=3", "data.masking.maxpredictions: unknown key"),
    ],
)
def test_config_that_cannot_work_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_run_config(write_config(tmp_path), [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.masking.cls_token=261"],
            "data.masking.cls_token = 261 has id 261, but model.vocab_size = 261; raise it",
        ),
        (["data.masking.cls_token=258"], "has the id 258 of another special token"),
        (["data.masking.cls_token=[CLS]"], "is not in the tokenizer; train one with it"),
        (["data.masking.cls_token=[CLS]", "data.tokenizer=null"], "is a name, but data.tokenizer is not set"),
        (["train.engine=deepspeed"], "ZeRO stage 3: after each step a mixer of this model reads whole weights"),
        (
            ["train.engine=deepspeed", "parallel.zero=1", "parallel.tp=2"],
            "with parallel.tp = 2 and ZeRO stage 1: after",
        ),
    ],
)
def test_special_tokens_and_engine_that_cannot_work_are_refused_before_any_data_are_read(tmp_path, overrides, message):
    config = load_run_config(write_config(tmp_path), overrides)
    for world_size in (None, 2):
        with pytest.raises(ConfigError) as raised:
            check_launch(config, world_size)
        assert message in str(raised.value)


def test_data_and_model_are_of_one_kind(tmp_path):
    values = load_run_config(write_config(tmp_path), []).model_dump(mode="json", exclude_none=True)
    without = {**values, "data": {key: value for key, value in values["data"].items() if key != "masking"}}
    (tmp_path / "a.toml").write_text(tomli_w.dumps(without))
    with pytest.raises(ConfigError, match=r"data.masking is missing: an encoder trains on masked tokens"):
        load_run_config(tmp_path / "a.toml", [])
    decoder = {"vocab_size": 261, "hidden_size": 32, "layers": [{"sublayers": [{"type": "tnl", "num_heads": 2}]}]}
    (tmp_path / "b.toml").write_text(tomli_w.dumps({**values, "model": decoder}))
    with pytest.raises(ConfigError, match=r'data.masking makes samples for an encoder, but model.kind = "decoder"'):
        load_run_config(tmp_path / "b.toml", [])


def test_sums_over_counts_are_the_mean_of_each_term():
    """Each mean is over the labels of its own term."""
    model, batch = build(CASES[0].model), make_batch(CASES[0].model)
    output = model(**batch.inputs())
    means = output.loss_sums() / batch.label_counts()
    masked = output.masked_losses[batch.masked_labels >= 0].mean()
    pairs = output.sequence_losses[batch.sequence_labels >= 0].mean()
    assert_close({"means": means}, {"means": torch.stack([masked, pairs])}, 1e-12)


def _evaluated() -> tuple[dict[str, float], dict[str, float]]:
    """Results of `evaluate` on two batches, one of them with padding samples, and the same computed by hand."""
    mesh = Mesh(ParallelConfig(), torch.device("cpu"))
    config = CASES[0].model
    options = {"compute_dtype": torch.float64, "recompute": False, "compile_blocks": False, "seed": 0}
    model = build_model(config, mesh, **options)
    batches = [make_batch(config), pad_samples(take_samples(make_batch(config, seed=8), slice(0, 2)), 4)]
    labels, likeliest, losses, pairs, guessed_pairs, pair_losses = [], [], [], [], [], []
    plain = build(config)
    for batch in batches:
        output = plain(**batch.inputs())
        kept, rows = batch.masked_labels >= 0, batch.sequence_labels >= 0
        labels.append(batch.masked_labels[kept])
        likeliest.append(output.masked_logits.argmax(-1)[kept])
        losses.append(output.masked_losses[kept])
        pairs.append(batch.sequence_labels[rows])
        guessed_pairs.append(output.sequence_logits.argmax(-1)[rows])
        pair_losses.append(output.sequence_losses[rows])
    wanted, guessed, classes, guesses = (torch.cat(tensors) for tensors in (labels, likeliest, pairs, guessed_pairs))
    frequency = torch.bincount(wanted).double() / len(wanted)
    expected = {
        "mlm_loss": torch.cat(losses).mean().item(),
        "mlm_accuracy": (wanted == guessed).double().mean().item(),
        "nsp_loss": torch.cat(pair_losses).mean().item(),
        "nsp_accuracy": (classes == guesses).double().mean().item(),
        "unigram_entropy": -torch.special.xlogy(frequency, frequency).sum().item(),
        "tokens": len(wanted),
        "sequences": len(classes),
    }
    expected["loss"] = expected["mlm_loss"] + expected["nsp_loss"]
    found = evaluate(model, batches, mesh)._asdict()
    # The predicted ids as labels: all predictions but one are correct.
    first = batches[0]
    sure = first._replace(masked_labels=torch.where(first.masked_labels >= 0, _guess(plain, first), -100))
    sure.masked_labels[0, 0] = (sure.masked_labels[0, 0] + 1) % 380
    found["all but one"] = evaluate(model, [sure], mesh)._asdict()["mlm_accuracy"]
    count = int((sure.masked_labels >= 0).sum())
    return found, expected | {"all but one": (count - 1) / count}


def _guess(model, batch):
    return model(**batch.inputs()).masked_logits.argmax(-1)


def test_evaluation_counts_each_prediction_and_pair_once():
    ((found, expected),) = run_ranks(1, _evaluated)
    assert found == pytest.approx(expected, rel=1e-10)
