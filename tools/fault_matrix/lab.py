"""The lab of an injection: a folder with small shards and configs, finished runs to damage, and recorded checks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from fault_matrix.processes import Change, Outcome, Running, start, start_ranks, unchanged
from megalin.checkpoint.manifest import MANIFEST_FILE, FileRecord
from megalin.data.shards.indexed_dataset import ShardWriter

STEPS = 6
_SECONDS = 60.0


class Check(NamedTuple):
    """A behaviour that a fault must show."""

    name: str
    holds: bool
    seen: str
    """The behaviour instead, in one line."""


def model_table(**changes: Any) -> dict[str, Any]:
    """One block of lightning attention and a GLU."""
    sublayers = [{"type": "tnl", "num_heads": 2, "chunk_size": 16}, {"type": "glu", "intermediate_size": 16}]
    table = {"vocab_size": 257, "hidden_size": 16, "init_std": 0.1, "layers": [{"sublayers": sublayers}]}
    return table | changes


def two_blocks() -> dict[str, Any]:
    """A model of two blocks, which a pipeline can split."""
    return model_table(layers=model_table()["layers"] * 2)


def write_shard(prefix: Path, *, seed: int = 1, num_documents: int = 60, largest: int = 256) -> Path:
    """Writes a uint16 shard of random bytes; its manifest names the tokenizer of bytes."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    with ShardWriter(str(prefix), np.dtype("uint16")) as writer:
        for _ in range(num_documents):
            writer.add_sequence(np.append(rng.integers(0, largest, 24), 256).astype(np.uint16))
            writer.end_document()
        writer.publish()
    return prefix


class Lab:
    """Folder of one injection and its checks. `template` is a folder that all injections share: finished runs."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder, self.checks = folder, list[Check]()
        self._template = template
        folder.mkdir(parents=True)

    def shard(self, name: str = "train", **options: Any) -> Path:
        """Writes a shard into this folder; returns its prefix."""
        return write_shard(self.folder / "data" / name, **options)

    def config(self, name: str = "tiny", shards: Sequence[Path] | None = None, **tables: Mapping[str, Any]) -> Path:
        """Writes the config of a run of six steps that saves every second; `tables` add keys."""
        prefixes = [self.shard()] if shards is None else shards
        values: dict[str, dict[str, Any]] = {
            "model": model_table(),
            "data": {"train": [str(prefix) for prefix in prefixes], "sequence_length": 16, "tokenizer": "bytes"},
            "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2},
            "optimizer": {"lr": 1e-2},
            "checkpoint": {"every_steps": 2},
        }
        for table, keys in tables.items():
            values[table] = values.get(table, {}) | dict(keys)
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(values))
        return path

    def run(
        self, *arguments: str | Path, change: Change = unchanged, seconds: float = _SECONDS, **environment: str
    ) -> Outcome:
        """Runs `megalin ARGUMENTS` to its end."""
        return self.start(*arguments, change=change, **environment).wait(seconds=seconds)

    def start(self, *arguments: str | Path, change: Change = unchanged, **environment: str) -> Running:
        """Starts `megalin ARGUMENTS`."""
        return start([str(argument) for argument in arguments], self.folder, change, **environment)

    def train(self, config: Path, *overrides: str, folder: str = "run", **options: Any) -> Outcome:
        """Trains in one process to the end, in the run folder `folder`."""
        return self.run("train", config, *overrides, "--folder", self.folder / folder, **options)

    def start_ranks(self, config: Path, *overrides: str, folder: str = "run", **options: Any) -> list[Running]:
        """Starts a run on two gloo ranks."""
        arguments = ["train", str(config), *overrides, "--folder", str(self.folder / folder)]
        return start_ranks(arguments, self.folder, **options)

    def start_launch(
        self, config: Path, *overrides: str, ranks: int = 2, folder: str = "run", **options: Any
    ) -> Running:
        """Starts `megalin launch` with some ranks; the change is that of the launcher and of all of them."""
        arguments = ["launch", "--nproc-per-node", str(ranks), config, *overrides, "--folder", self.folder / folder]
        return self.start(*arguments, **options)

    def train_on_ranks(self, config: Path, *overrides: str, seconds: float = _SECONDS, **options: Any) -> list[Outcome]:
        """Trains on two gloo ranks to the end."""
        return [running.wait(seconds=seconds) for running in self.start_ranks(config, *overrides, **options)]

    @contextmanager
    def small_disk(self, name: str = "disk") -> Iterator[Path]:
        """A folder of 2 MiB: a file system of its own, where this process may mount one, else as large as its disk."""
        folder = self.folder / name
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
        mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            yield folder
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)

    def finished_run(self, folder: str = "run") -> tuple[Path, Path]:
        """A config and the folder of its run of six steps, copied from one that all injections share."""
        source = self._template / "finished"
        if not source.exists():
            maker = Lab(source, self._template)
            maker.expect_success(maker.train(maker.config()), "the run to damage")
            assert all(check.holds for check in maker.checks), maker.checks
        shutil.copytree(source / "run", self.folder / folder)
        shutil.copytree(source / "data", self.folder / "data", dirs_exist_ok=True)
        return self.config(shards=[self.folder / "data" / "train"]), self.folder / folder

    def check(self, name: str, holds: object, seen: str = "") -> None:
        """Records a behaviour."""
        self.checks.append(Check(name, bool(holds), seen))

    def expect_success(self, outcome: Outcome, name: str) -> None:
        """Records that a command ends with 0."""
        self.check(name, outcome.code == 0, f"exit {outcome.code}: {outcome.last_line}")

    def expect_refusal(self, outcome: Outcome, code: int, *patterns: str, seconds: float | None = None) -> None:
        """Records that a command fails with this exit code and a message with all patterns, without a traceback."""
        self.check(f"refused with {code}", outcome.code == code, f"exit {outcome.code}: {outcome.last_line}")
        lacking = [pattern for pattern in patterns if not re.search(pattern, outcome.text)]
        self.check("message", not lacking, f"lacks {', '.join(lacking)}: {outcome.last_line}")
        self.check("no traceback", "Traceback" not in outcome.text, f"a traceback, {outcome.last_line}")
        if seconds is not None:
            self.check(f"within {seconds:g} s", outcome.seconds <= seconds, f"{outcome.seconds:.1f} s")


def flip(path: Path, place: int | None = None, bit: int = 4) -> None:
    """Flips one bit of a file, in its middle by default."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1 << bit
    path.write_bytes(data)


def seal(directory: Path) -> None:
    """Makes the manifest of a checkpoint fit its files, as a forger would."""
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    for name in manifest["files"]:
        manifest["files"][name] = FileRecord.of((directory / name).read_bytes()).model_dump()
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))


def step_folder(run: Path, step: int) -> Path:
    """Folder of a checkpoint of a run."""
    return run / "checkpoints" / f"step-{step:08d}"


def ledger(run: Path) -> list[str]:
    """Lines of a run's ledger."""
    return (run / "ledger.jsonl").read_text().splitlines()


def metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, step: int = STEPS) -> dict[str, str]:
    """sha256 of the tensor files of a checkpoint."""
    manifest = json.loads((step_folder(run, step) / MANIFEST_FILE).read_text())
    return {name: record["sha256"] for name, record in manifest["files"].items() if name.endswith(".safetensors")}
