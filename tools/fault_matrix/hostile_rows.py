"""Hostile input: F65, F67 to F72."""

from __future__ import annotations

import ast
import contextlib
import gzip
import json
import os
import shutil
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fault_matrix import changes
from fault_matrix.lab import STEPS, Lab, step_folder, write_shard
from fault_matrix.processes import Outcome, Running
from fault_matrix.table import fault

_ESCAPE = "\x1b"


@fault("F65", "paths out of a folder in a manifest or list")
def _traversal(lab: Lab) -> None:
    config, run = lab.finished_run()
    for name in ("../outside", "/etc/passwd"):
        directory = step_folder(run, STEPS)
        manifest = json.loads((directory / "manifest.json").read_text())
        manifest["files"][name] = {"size": 1, "sha256": "0" * 64}
        (directory / "manifest.json").write_text(json.dumps(manifest))
        outcome = lab.train(config)
        lab.check(f"{name} is refused", "checkpoint skipped" in outcome.text, outcome.last_line)
        lab.check("no traceback", "Traceback" not in outcome.text, outcome.last_line)
        shutil.rmtree(directory)
        lab.train(config)


def _tokenizer(lab: Lab, content: str) -> Outcome:
    path = lab.folder / "tokenizer.json"
    path.write_text(content)
    corpus = lab.folder / "corpus.jsonl"
    corpus.write_text('{"text": "' + "a" * 64 + '!"}\n')
    arguments = ["--input", corpus, "--output-prefix", lab.folder / "out", "--tokenizer-model", path]
    return lab.run("data", "preprocess", *arguments, "--append-eod", seconds=30)


def _regexp_tokenizer(pattern: str) -> str:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    added = {"id": 1, "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"}
    return json.dumps({"version": "1.0", "added_tokens": [added | flags], "pre_tokenizer": split, "model": model})


@fault("F67", "hostile tokenizer")
def _hostile_tokenizers(lab: Lab) -> None:
    contents = {
        "deep nesting": "[" * 200_000,
        "not a tokenizer": '{"model": {"type": "exec"}}',
        "regexp bomb": _regexp_tokenizer("(a|aa|a?)+$|" + "(a*)*" * 8 + "b"),
        "unbalanced regexp": _regexp_tokenizer("(((("),
    }
    for name, content in contents.items():
        outcome = _tokenizer(lab, content)
        lab.check(f"{name}: exit code 3", outcome.code == 3, f"exit {outcome.code}: {outcome.last_line}")
        lab.check(f"{name}: no traceback", "Traceback" not in outcome.text, outcome.last_line)
        lab.check(f"{name}: the file is named", "tokenizer.json" in outcome.text, outcome.last_line)
    path = lab.folder / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    outcome = lab.run("data", "inspect", lab.shard(), "--tokenizer-model", path)
    lab.expect_refusal(outcome, 3, r"tokenizer\.json", "at most", seconds=5)


_LIMIT_SECONDS = 30.0
"""Longest time of a command on a busy machine, whose start alone takes some; each needs at most a CPU second."""
_REPEAT = "[[model.layers]]\nrepeat = 999999999\n[[model.layers.sublayers]]\ntype = 'tnl'\nnum_heads = 2\n"
_HOSTILE_TOML = {
    "deep arrays": "x = " + "[" * 50_000,
    "deep tables": "x = " + "{a=" * 50_000,
    "deep keys": "a." * 50_000 + "b = 1",
    "many digits": "train.steps = " + "9" * 5_000,
    "repeat": "model.vocab_size = 257\nmodel.hidden_size = 16\n" + _REPEAT,
    "not text": "\0",
}


@fault("F68", "hostile config")
def _hostile_configs(lab: Lab) -> None:
    path = lab.folder / "hostile.toml"
    for name, content in _HOSTILE_TOML.items():
        path.write_text(content)
        _expect_one_line(lab, name, lab.run("train", path, "--folder", lab.folder / "run", seconds=_LIMIT_SECONDS))
    path.unlink()
    os.mkfifo(path)
    _expect_one_line(lab, "named pipe", lab.run("train", path, seconds=_LIMIT_SECONDS))
    good = lab.config()
    for override in ("train.steps=9**9**9", "train.steps=" + "9" * 5_000, "model.layers.0.repeat=999999999"):
        outcome = lab.run("train", good, override, "--folder", lab.folder / "run", seconds=_LIMIT_SECONDS)
        _expect_one_line(lab, override[:20], outcome)
    aliases = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 40))])
    foreign = {"alias bomb": aliases, "object": "a: !!python/object/apply:os.mkdir [ran]", "deep": "[" * 50_000}
    for name, content in foreign.items():
        neox = lab.folder / f"{name.split()[0]}.yml"
        neox.write_text(content)
        outcome = lab.run("data", "import-config", neox, lab.folder / "out.toml", seconds=_LIMIT_SECONDS)
        _expect_one_line(lab, f"YAML {name}", outcome)
        lab.check(f"YAML {name}: the file is named", str(neox) in outcome.text, outcome.last_line[:80])
    lab.check("no code runs", not Path("ran").exists())


def _expect_one_line(lab: Lab, name: str, outcome: Outcome) -> None:
    lab.check(f"{name}: exit code 2", outcome.code == 2, f"exit {outcome.code}: {outcome.last_line[:80]}")
    lab.check(f"{name}: no traceback", "Traceback" not in outcome.text, outcome.last_line[:80])
    lab.check(f"{name}: short", len(outcome.text) < 3000, f"{len(outcome.text)} characters")


@fault("F69", "archives")
def _archives(lab: Lab) -> None:
    import megalin

    openers = {"tarfile", "zipfile", "shutil.unpack_archive"}
    used = [
        f"{path.name}: {name}"
        for path in Path(megalin.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _imported(node)
        if name in openers and path.name != "wheel.py"
    ]
    lab.check("no archive is opened but a wheel whose digest is fixed", not used, ", ".join(used))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [f"{node.value.id}.{node.attr}"]
    return []


@fault("F70", "markup and escapes in names and logs")
def _markup(lab: Lab) -> None:
    name = f"<script>alert(1)</script>{_ESCAPE}[31m".replace("/", "-")
    shards = [write_shard(lab.folder / "data" / f"{_ESCAPE}[31mred")]
    config = lab.config(shards=shards)
    outcome = lab.train(config, "train.steps=2", folder=name)
    lab.expect_success(outcome, "trained")
    lab.check("no escape on the terminal", _ESCAPE not in outcome.text, "ESC in the output of train")
    report = lab.folder / "report.html"
    outcome = lab.run("report", lab.folder / name, "--output", report)
    lab.check("report has no script", report.exists() and "<script>alert" not in report.read_text(), outcome.last_line)
    shards[0].with_suffix(".bin").write_bytes(b"x")
    outcome = lab.train(config, folder="other")
    lab.check("no escape in an error", _ESCAPE not in outcome.text, "ESC in the error")
    outcome = lab.run("train", config, f"train.{_ESCAPE}[31m=1")
    lab.check("no escape of an argument", _ESCAPE not in outcome.text, "ESC in the error")


def _listeners(processes: Sequence[Running]) -> set[tuple[str, int]]:
    """Addresses, in hex, and ports of the listening sockets of these processes."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(os.readlink(link))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def _own_address() -> str:
    """An address of this host that others reach, or that of loopback on a host without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@fault("F71", "a stranger at the ports of a run")
def _stranger(lab: Lab) -> None:
    config = lab.config()
    name = _own_address()
    change = partial(changes.rename_host_in_steps_of, name, 0.4)
    variables = {"MASTER_ADDR": name, "LOCAL_WORLD_SIZE": "2"}  # as torchrun and mpirun set them on one host
    alone = [lab.start("train", config, "--folder", lab.folder / "alone", change=change)]
    ranks = lab.start_ranks(
        config, change_of=dict.fromkeys((0, 1), change), environment_of={0: variables, 1: variables}
    )
    for run, processes in (("alone", alone), ("run", ranks)):
        ledger = lab.folder / run / "ledger.jsonl"
        processes[0].wait_until(ledger.exists, seconds=60)
        opened = _listeners(processes)
        public = sorted(f"{address}:{port}" for address, port in opened if address not in _LOOPBACK)
        for _, port in opened:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                stranger.sendall(os.urandom(200))
        codes = [process.wait(seconds=60).code for process in processes]
        lab.check(f"{run}: garbage is ignored", not any(codes), f"exit {codes}")
        lab.check(f"{run}: sockets were open", opened)
        lab.check(f"{run}: no socket off loopback", not public, ", ".join(public))


@fault("F72", "decompression bomb")
def _bomb(lab: Lab) -> None:
    path = lab.folder / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b'{"text": "a"}\n{"text": "')
        for _ in range(600):
            file.write(bytes(1 << 20))
        file.write(b'"}\n{"text": "b"}\n')
    arguments = ["--input", path, "--output-prefix", lab.folder / "out", "--tokenizer-type", "ByteTokenizer"]
    outcome = lab.run("data", "preprocess", *arguments, seconds=60)
    lab.expect_success(outcome, "the long document is skipped")
    lab.check("counted", "too long" in outcome.text, outcome.last_line)
