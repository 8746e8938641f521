"""Identity of a run: each value that decides its numbers is compared between hosts, at a resume and at a branch."""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist

import megalin._index
from megalin.config import Config
from megalin.data.datasets import packed
from megalin.data.shards.label_mask import LabelMaskWriter
from megalin.data.tokenizers.tokenizer import load_tokenizer
from megalin.errors import ConfigError, MegalinError
from megalin.layers.config import config_class, mixer_types
from megalin.parallel.agreement import rank
from megalin.parallel.process_group import process_group
from megalin.train import identity
from megalin.train.config import RunConfig, load_run_config
from megalin.train.identity import check_same_start, code_digest, config_entries
from tests.model_runs import CPU, documents, train_here, write_config, write_shard
from tests.ranks import run_ranks

STOP = "train.stop_after_steps=2"


def _tokenizer(path: Path, *, first: str, second: str) -> None:
    """A tokenizer.json of 257 words, of which two have the ids 0 and 1 in the given order."""
    words = [first, second, *(f"w{number}" for number in range(254)), "<|endoftext|>"]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    path.write_text(tokenizers.Tokenizer(model).to_str())


def _mask(prefix: Path, *, every: int) -> None:
    """A label mask of a shard of 2-byte tokens that leaves out each `every`-th one."""
    count = prefix.with_suffix(".bin").stat().st_size // 2
    writer = LabelMaskWriter(prefix)
    writer.add(np.arange(count) % every != 0)
    writer.publish()


def _run(config: Path, folder: Path, *overrides: str) -> str:
    """The error of a run; empty without one."""
    try:
        train_here(config, folder, *overrides)
    except MegalinError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- the keys of the config


def _tables() -> set[type[Config]]:
    """The config classes that a run's config has."""
    found, left = set[type[Config]](), list[Any]([RunConfig, *map(config_class, mixer_types())])
    while left:
        each = left.pop()
        if isinstance(each, type) and issubclass(each, Config) and each not in found:
            found.add(each)
            left += [field.annotation for field in each.model_fields.values()]
        left += getattr(each, "__args__", ())
    return found


def test_every_key_declares_the_consequence_of_another_value():
    undeclared = [
        f"{table.__name__}.{key}"
        for table in _tables()
        for key, field in table.model_fields.items()
        if table is not RunConfig
        and table.on_change is None
        and not any(isinstance(mark, identity.OnChange) for mark in field.metadata)
    ]
    assert undeclared == []
    assert len(_tables()) > 30


def test_entries_have_the_consequences_of_their_keys(tmp_path):
    found = config_entries(load_run_config(write_config(tmp_path), ["model.layers.0.repeat=2"]))
    assert found["model.blocks.1.0.num_heads"] == (4, "refused")
    assert found["model.blocks.1.0.chunk_size"] == (16, "reported")
    assert found["optimizer.betas"] == ([0.9, 0.95], "reported")
    assert found["train.seed"] == (0, "refused")
    assert found["data.train"].change == "silent"


# --- one host of two


def _host_files(folder: Path) -> None:
    """The files of one host: shards with masks, tokenizer, and a run to branch from."""
    write_config(folder)
    write_shard(folder / "data/packed", documents(3000, seed=3))
    (folder / "data/train.manifest.json").unlink()  # it has the digest of the mask, and refuses another one by itself
    _tokenizer(folder / "tokenizer.json", first="[SEP]", second="[MASK]")


MUTATIONS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any] | None], list[str], str]] = {
    "nothing": (lambda: None, [], ""),
    "a mask": (lambda: _mask(Path("data/train"), every=3), [], "label masks of the sources"),
    "a mask, not verified": (lambda: _mask(Path("data/train"), every=3), ["data.verify=off"], "label masks of the"),
    "tokenizer": (
        lambda: _tokenizer(Path("tokenizer.json"), first="[MASK]", second="[SEP]"),
        ["data.tokenizer=tokenizer.json"],
        "ids of the tokenizer",
    ),
    "validation split": (
        lambda: write_shard(Path("data/validation"), documents(600, seed=5)) and None,
        ["data.verify=off"],
        "some samples of the validation split",
    ),
    "packing of the extension": (
        lambda: patch.object(packed, "pack_window", _other_packing),
        ["data.train=['data/packed']", "data.packing=best_fit"],
        "some samples of the sources",
    ),
    "sources of the extension": (
        lambda: patch.object(identity, "_built_from", lambda name: "0" * 64),
        [],
        "sources of megalin._index = sha256 000000000000..., rank 0",
    ),
    "trunk": (lambda: _other_trunk(Path("trunk")), ["train.branch_from=trunk"], "trunk/checkpoints/step-00000002 diff"),
    "initial weights": (
        lambda: _other_trunk(Path("trunk")),
        ["train.initial_weights=trunk"],
        "trunk/checkpoints/step-00000002 differs between ranks: on rank 1, ",
    ),
}


def _other_packing(lengths: Any, **options: Any) -> Any:
    pieces, first_pieces = megalin._index.pack_window(lengths, **options)
    return pieces[::-1].copy(), first_pieces[-1] - first_pieces[::-1]


def _other_trunk(run: Path) -> None:
    """Puts the run's older checkpoint in place of its newest one, with every file as large as before."""
    for name in ("step-00000001", "step-00000002"):
        assert (run / "checkpoints" / name).is_dir()
    for file in (run / "checkpoints/step-00000001").glob("*.safetensors"):
        shutil.copy(file, run / "checkpoints/step-00000002" / file.name)


def _on_hosts(config: Path, folder: Path, run: Path) -> dict[str, str]:
    """The error of a run for each mutation of the second host's files."""
    found = {}
    for name, (mutate, overrides, _) in MUTATIONS.items():
        own = folder / f"host{rank()}"
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(folder / "files", own)
        paths = ["data.train=['data/train']", "data.validation=['data/validation']", "data.verify=full"]
        with contextlib.chdir(own):
            changed = mutate() if rank() else None
            with changed if changed is not None else contextlib.nullcontext():
                dist.barrier()
                found[name] = _run(config, run / name, *paths, STOP, *overrides)
    return found


def test_files_of_one_host_that_differ_are_refused(tmp_path):
    _host_files(files := tmp_path / "files")
    with process_group(CPU):
        train_here(files / "tiny.toml", files / "trunk", "checkpoint.keep_steps=[1]", STOP)
    found = run_ranks(2, _on_hosts, files / "tiny.toml", tmp_path, tmp_path / "runs")
    assert found[0] == found[1]
    unseen = {name: found[0][name] for name, (_, _, message) in MUTATIONS.items() if message not in found[0][name]}
    assert unseen == {}
    assert found[0]["nothing"] == ""


# --- a run that goes on

_SOURCES = (
    "data.sources=[{name='train', paths=['data/train'], weight=1.0}, {name='b', paths=['data/other'], weight=1.0}]"
)
REPORTED = {
    "optimizer": (["optimizer.lr=0.001", "optimizer.betas=[0.9, 0.98]"], "optimizer.lr 0.01 -> 0.001"),
    "decay": (["optimizer.weight_decay=0.0"], "optimizer.weight_decay 0.1 -> 0.0"),
    "batch of a rank": (["train.micro_batch_size=4"], "train.micro_batch_size 2 -> 4"),
    "steps": (["train.steps=14"], "train.steps 12 -> 14"),
    "recomputation": (["train.recompute=true"], "train.recompute false -> true"),
    "validation split": (["data.validation=['data/other']"], "some samples of the validation split sha256"),
    "scan": (["model.layers.0.sublayers.0.chunk_size=8"], "model.blocks.0.0.chunk_size 16 -> 8"),
}
REFUSED = {
    "seed": (["train.seed=1"], "train.seed: 0 in the checkpoint, 1 now"),
    "batch": (["train.global_batch_size=8"], "train.global_batch_size: 4 in the checkpoint, 8 now"),
    "tokenizer": (["data.tokenizer=other.json"], "ids of the tokenizer: sha256"),
    "sequence": (["data.sequence_length=18"], "data.sequence_length: 36 in the checkpoint, 18 now"),
    "documents": (["data.isolate_documents=false"], "data.isolate_documents: true in the checkpoint, false now"),
    "shares": (["data.train=[]", _SOURCES], "shares of the sources: "),
    "packing": (["data.packing=best_fit"], "data.packing: concatenate in the checkpoint, best_fit now"),
    "branch of another run": (["train.branch_from=run"], "train.branch_from: not set in the checkpoint, run now"),
    "schedule": (
        ["schedule.type=cosine", "train.steps=20"],
        "is 0.9755 of it with this schedule over train.steps = 20",
    ),
}
OF_A_RESUME = ("branch of another run", "schedule")
"""Of a run that goes on alone: a branch has a trunk and a schedule of its own."""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run of twelve steps, of which two are done, with a constant learning rate."""
    folder = tmp_path_factory.mktemp("started")
    config = write_config(folder, schedule={"type": "constant", "warmup_steps": 0})
    _tokenizer(folder / "other.json", first="a", second="b")
    write_shard(folder / "data/other", documents(600, seed=6))
    with process_group(CPU):
        train_here(config, folder / "run", STOP)
    return config, folder / "run"


def _incidents(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "incidents.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("place", ["resume", "branch"])
@pytest.mark.parametrize("name", REPORTED)
def test_values_that_may_change_are_reported(started, tmp_path, name, place, monkeypatch):
    config, run = started
    overrides, message = REPORTED[name]
    if place == "resume":
        shutil.copytree(run, tmp_path / "run")
    else:
        overrides = [*overrides, f"train.branch_from={run}"]
    monkeypatch.chdir(run.parent)
    with process_group(CPU):
        assert _run(config, tmp_path / "run", *overrides, "train.stop_after_steps=3") == ""
    (line,) = _incidents(tmp_path / "run", "changed")
    assert line["step"] == 2
    assert line["message"].startswith("changed since step 2: ")
    assert message in line["message"]
    record = json.loads((tmp_path / "run/identity.json").read_text())
    assert [segment["step"] for segment in record["segments"]] == [2]


@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, "resume") for name in REFUSED), *((name, "branch") for name in REFUSED if name not in OF_A_RESUME)],
)
def test_values_that_a_run_must_keep_are_refused(started, tmp_path, name, place, monkeypatch):
    config, run = started
    overrides, message = REFUSED[name]
    monkeypatch.chdir(run.parent)
    if place == "resume":
        shutil.copytree(run, tmp_path / "run")
    else:
        overrides = [*overrides, f"train.branch_from={run}"]
    with process_group(CPU):
        error = _run(config, tmp_path / "run", *overrides, "train.stop_after_steps=3")
    assert error.startswith("ConfigError")
    assert message in error


def test_another_build_of_the_extension_is_reported_and_another_packing_refused(tmp_path):
    config, run = write_config(tmp_path, data={"packing": "best_fit"}), tmp_path / "run"
    with process_group(CPU):
        train_here(config, run, STOP)
        with patch.object(packed, "pack_window", _other_packing):
            assert "some samples of the sources, by sha256: " in _run(config, run)
        with patch.object(identity, "_built_from", lambda name: "0" * 64):
            assert _run(config, run, "train.stop_after_steps=3") == ""
    (line,) = _incidents(run, "changed")
    assert "sources of megalin._index sha256" in line["message"]


def test_changes_accumulate_over_starts_and_branches(started, tmp_path):
    config, run = started
    shutil.copytree(run, tmp_path / "run")
    libraries = identity.versions()
    with process_group(CPU):
        assert _run(config, tmp_path / "run", "optimizer.lr=0.001", "train.stop_after_steps=3") == ""
        with patch.object(identity, "versions", lambda: libraries | {"torch": "9.9"}):
            branch = [f"train.branch_from={tmp_path / 'run'}", "optimizer.lr=0.001", "train.stop_after_steps=4"]
            assert _run(config, tmp_path / "branch", *branch) == ""
            branch[-1] = "train.stop_after_steps=5"
            assert _run(config, tmp_path / "branch", *branch) == ""
            branch[0] = f"train.branch_from={run}"
            assert "train.branch_from: " in _run(config, tmp_path / "branch", *branch)
    segments = json.loads((tmp_path / "branch/identity.json").read_text())["segments"]
    assert [(each["step"], each["changes"]) for each in segments] == [
        (2, {"optimizer.lr": [0.01, 0.001]}),
        (3, {"version of torch": [torch.__version__, "9.9"]}),
    ]


def test_a_schedule_that_would_jump_goes_on_where_the_run_says_so(started, tmp_path):
    config, run = started
    shutil.copytree(run, tmp_path / "run")
    overrides = ["schedule.type=cosine", "schedule.allow_jump=true", "train.stop_after_steps=3"]
    with process_group(CPU):
        assert _run(config, tmp_path / "run", *overrides) == ""
    (line,) = _incidents(tmp_path / "run", "changed")
    assert line["message"] == "changed since step 2: schedule.type constant -> cosine"


# --- the installation


def _differing(config: Path, rank_of_change: int) -> list[str]:
    """Messages of all kinds of differences, of which rank `rank_of_change` is the only one to differ."""
    found, run = [], load_run_config(config, [])
    other = rank() == rank_of_change
    known = identity.versions()
    for environment, versions, digest in (
        ({"MEGALIN_CACHE": "elsewhere"}, {}, "def"),
        ({"MEGALIN_KERNELS": "reference"}, {}, "def"),
        ({}, {"torch": "1.0"}, "def"),
        ({}, {}, "abc"),
    ):
        with (
            patch.dict(os.environ, environment if other else {}),
            patch.object(identity, "versions", lambda: known | (versions if other else {})),  # noqa: B023
            patch.object(identity, "code_digest", lambda: digest if other else "def"),  # noqa: B023
        ):
            try:
                check_same_start(run)
                found.append("")
            except ConfigError as error:
                found.append(str(error).partition("\n  ")[2])
    return found


def test_difference_between_ranks_is_named_with_its_values(tmp_path):
    host = socket.gethostname()
    for messages in run_ranks(3, _differing, write_config(tmp_path), 2):
        assert messages == [
            "",
            f"rank 2 ({host}) has MEGALIN_KERNELS = reference, rank 0 ({host}) not set",
            f"rank 2 ({host}) has version of torch = 1.0, rank 0 ({host}) {torch.__version__}",
            f"rank 2 ({host}) has code of megalin = abc, rank 0 ({host}) def",
        ]


def test_tokenizers_that_differ_in_form_alone_are_the_same(tmp_path):
    _tokenizer(tmp_path / "a.json", first="a", second="b")
    text = (tmp_path / "a.json").read_text()
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "a"}  # which no run applies
    (tmp_path / "b.json").write_text(json.dumps(json.loads(text) | {"padding": padding}, indent=2))
    _tokenizer(tmp_path / "c.json", first="b", second="a")
    same, other, swapped = (load_tokenizer(str(tmp_path / f"{name}.json")) for name in "abc")
    assert same.digest != other.digest
    digests = [identity.tokenizer_digest(each) for each in (same, other, swapped)]
    assert digests[0] == digests[1] != digests[2]


def test_digest_of_the_code_follows_names_and_contents(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cu").write_text("x")
    monkeypatch.setattr("megalin.__file__", str(tmp_path / "__init__.py"))
    found = set()
    for change in (
        lambda: None,
        lambda: Path(tmp_path, "kernels", "a.cu").write_text("y"),
        lambda: Path(tmp_path, "kernels", "a.cu").rename(tmp_path / "b.cu"),
        lambda: Path(tmp_path, "b.py").write_text(""),
    ):
        change()
        found.add(code_digest.__wrapped__())
    assert len(found) == 4
    (tmp_path / "notes.txt").write_text("no code")
    assert code_digest.__wrapped__() in found
