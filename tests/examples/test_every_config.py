"""Every config of examples/: the checks of a start at full size, and a step of each kind of run at a small size."""

from __future__ import annotations

import gc
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megalin.config import parse, read_toml
from megalin.data.shards.label_mask import label_mask_path
from megalin.errors import MegalinError
from megalin.evaluation.generated.sequences import SEQUENCE_SUITES
from megalin.evaluation.in_loop import LoopTaskRunner, check_run
from megalin.ladder.config import parse_ladder
from megalin.parallel.process_group import process_group
from megalin.sweep.order import all_cells, parse_sweep
from megalin.train.config import RunConfig, load_run_config
from megalin.train.evaluation_config import EvaluationConfig
from megalin.train.loop import train
from megalin.verify.case import shrink_to
from tests.data.shard_files import mask_bytes
from tests.model_runs import CPU, documents, write_shard

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.toml"))
NOT_RUNS = {"common.toml", "corpus.toml", "scaling_laws/base.toml", "scaling_laws/tiny_base.toml"}
"""Files that others complete, which are checked with them, and sources of a corpus."""
RUNS = [file for file in FILES if not {file.name, str(file)} & NOT_RUNS]
FIRST_CLASS = 257
"""Token id of the first class, the only one in the shards."""


@cache
def example(file: Path) -> RunConfig:
    """The run of a config, that of the first combination of a sweep, or that of the first mixer of a ladder with
    numbers in place of those that the ladder computes."""
    path, values = EXAMPLES / file, read_toml(EXAMPLES / file)
    if "axes" in values:
        sweep = parse_sweep(path)
        return load_run_config(sweep.run_config, next(all_cells(sweep)).overrides)
    if "mixers" not in values:
        return load_run_config(path, [])
    ladder = parse_ladder(path)
    table = ladder.values(next(iter(ladder.config.mixers)))
    numbers = {"steps": 9, "global_batch_size": 2, "micro_batch_size": 2}
    return parse(RunConfig, table | {"train": {**table["train"], **numbers}, "optimizer": {"lr": 1e-3}}, str(path))


def shrunk(config: RunConfig) -> RunConfig:
    """The run with each kind of block once and small: one step of two samples on a CPU, on the shards of
    `write_shards`. Its keys stay, but those that depend on the sizes, and choice tasks, which need data."""
    model, shard = shrink_to(config.model, num_heads=4, repeat=1, vocab_size=300, max_positions=48), "text"
    data: dict[str, Any] = {"sources": [], "phases": [], "split": None, "test": [], "tokenizer": None}
    data |= {"sequence_length": min(config.data.sequence_length, 48), "preparation": [], "validation_fraction": 0.0}
    if (classes := config.data.classification) is not None:
        data["classification"] = classes.model_copy(update={"first_class_id": FIRST_CLASS})
    if classes is not None or config.train.max_label_fraction < 1.0:
        shard = "labels"
    if config.data.masking is not None:
        ids = {name: 257 + i for i, name in enumerate(("cls_token", "sep_token", "mask_token", "pad_token"))}
        data["masking"] = config.data.masking.model_copy(update={**ids, "max_predictions": 4})
    data |= {"train": [shard], "validation": [f"held-out-{shard}"] if config.data.has("validation") else []}
    loop = {"steps": 2, "global_batch_size": 2, "micro_batch_size": 1, "stop_after_steps": 1, "compile": False}
    loop |= {"dtype": "float32", "initial_weights": None, "cuda_graphs": "auto"}
    loop |= {name: 1 for name in ("evaluate_every_steps", "evaluate_batches") if getattr(config.train, name)}
    schedule = {"warmup_steps": min(config.schedule.warmup_steps, 1)}
    schedule |= {"decay_steps": None if config.schedule.decay_steps is None else 1}
    tasks = [name for name in config.evaluation.tasks if name.partition(":")[0] in SEQUENCE_SUITES]
    if tasks:
        data["sequence_length"] = config.data.sequence_length
    return RunConfig(
        model=model,
        data=config.data.model_copy(update=data),
        train=config.train.model_copy(update=loop),
        optimizer=config.optimizer,
        schedule=config.schedule.model_copy(update=schedule),
        checkpoint=config.checkpoint.model_copy(update={"every_steps": None}),
        evaluation=EvaluationConfig(tasks=tasks, every_steps=1, limit=1) if tasks else EvaluationConfig(),
    )


def write_shards() -> None:
    """Shards of text, and of documents with one label, their last token."""
    for place, num_tokens in (("", 600), ("held-out-", 300)):
        made = documents(num_tokens, seed=num_tokens)
        write_shard(Path(f"{place}text"), made)
        made = [[*each[:40], FIRST_CLASS] for each in made]
        write_shard(Path(f"{place}labels"), made)
        last = [place == len(each) - 1 for each in made for place in range(len(each))]
        label_mask_path(f"{place}labels").write_bytes(mask_bytes(last))
        Path(f"{place}labels.manifest.json").unlink()  # by which the shard has no mask


def test_every_file_is_a_run_a_sweep_or_a_ladder():
    assert len(RUNS) > 180
    assert {path.parent.name for path in RUNS} >= {"tasks", "language_modelling", "scaling_laws", "rodimus"}


def test_every_config_passes_the_checks_of_a_start():
    """On as many ranks as the mesh has; on one of a sweep, whose runs are single processes."""
    refused = {}
    for file in RUNS:
        parallel = example(file).parallel
        try:
            check_run(example(file), parallel.tp * parallel.cp * parallel.pp)
        except MegalinError as error:
            refused[str(file)] = str(error)
    assert refused == {}


def test_every_kind_of_run_trains_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One run of those that differ in more than sizes, rates and schedules, each with its evaluations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megalin.train.loop.write_loss_curve", lambda *args, **kwargs: None)
    write_shards()
    kinds: dict[str, Path] = {}
    for file in RUNS:
        values = shrunk(example(file)).model_dump(mode="json", exclude={"optimizer", "schedule", "checkpoint"})
        kinds.setdefault(json.dumps(values), file)
    losses, failed = {}, {}
    with process_group(CPU):
        for file in kinds.values():
            run = shrunk(example(file))
            gc.freeze()  # as in a process with one run: garbage collection skips the objects of other runs
            try:
                check_run(run, 1)
                result = train(run, CPU, Path("runs", file), tasks=LoopTaskRunner() if run.evaluation.tasks else None)
                losses[str(file)] = result.loss
                if run.evaluation.tasks and not result.tasks:
                    failed[str(file)] = "no result of a task"
            except MegalinError as error:
                failed[str(file)] = str(error)
    assert failed == {}
    assert [file for file, loss in losses.items() if loss is None or not math.isfinite(loss)] == []
    assert len(losses) > 60
