"""Faults of a corpus: F57 to F63."""

from __future__ import annotations

import gzip
import json
import resource
from functools import partial
from pathlib import Path

from fault_matrix import changes
from fault_matrix.lab import Lab
from fault_matrix.processes import Outcome, limit
from fault_matrix.table import fault

_GOOD = b'{"text": "first"}\n'
_MEMORY_BYTES = 2 << 30


def _preprocess(lab: Lab, data: bytes, *options: str, name: str = "corpus.jsonl", seconds: float = 60.0) -> Outcome:
    path = lab.folder / name
    path.write_bytes(data)
    prefix = lab.folder / path.stem
    arguments = ["--input", str(path), "--output-prefix", str(prefix), "--tokenizer-type", "ByteTokenizer"]
    return lab.run("data", "preprocess", *arguments, *options, seconds=seconds)


def _documents(lab: Lab, name: str = "corpus") -> int:
    """Number of documents of a shard that was written; -1 without one."""
    path = lab.folder / f"{name}_text_document.manifest.json"
    return int(json.loads(path.read_text())["documents"]) if path.exists() else -1


@fault("F57", "invalid UTF-8")
def _invalid_utf8(lab: Lab) -> None:
    data = _GOOD + b'{"text": "\xff"}\n' + _GOOD
    lab.expect_success(_preprocess(lab, data), "counted and skipped")
    lab.check("the others are kept", _documents(lab) == 2, f"{_documents(lab)} documents")
    outcome = _preprocess(lab, data, "--on-bad-line", "fail", name="strict.jsonl")
    lab.expect_refusal(outcome, 3, r"strict\.jsonl:2", "UTF-8", "byte 10")


@fault("F58", "empty lines and files")
def _empty(lab: Lab) -> None:
    outcome = _preprocess(lab, b"\n" + _GOOD + b"\n\n" + _GOOD)
    lab.expect_success(outcome, "blank lines")
    lab.check("counted", "blank line" in outcome.text and _documents(lab) == 2, outcome.last_line)
    outcome = _preprocess(lab, b"", name="empty.jsonl")
    lab.check(
        "an empty file is no crash", "Traceback" not in outcome.text and outcome.code in (0, 3), outcome.last_line
    )


@fault("F59", "a very long line")
def _long_line(lab: Lab) -> None:
    path = lab.folder / "corpus.jsonl"
    with path.open("wb") as file:
        file.write(_GOOD + b'{"text": "')
        file.truncate(4 << 30)  # sparse: zeros
        file.seek(0, 2)
        file.write(b'"}\n' + _GOOD)
    arguments = ["--input", path, "--output-prefix", lab.folder / "corpus", "--tokenizer-type", "ByteTokenizer"]
    few = partial(limit, resource.RLIMIT_DATA, _MEMORY_BYTES)
    outcome = lab.run("data", "preprocess", *arguments, change=few, seconds=180)
    lab.expect_success(outcome, "skipped in bounded memory")
    lab.check("counted", "too long" in outcome.text and _documents(lab) == 2, outcome.last_line)
    path.unlink()


@fault("F60", "NUL, control characters, lone surrogates")
def _control_characters(lab: Lab) -> None:
    lines = [json.dumps({"text": text}).encode() for text in ("a\x00b", "\x1b[31mred", "\u2028")]
    outcome = _preprocess(lab, b"\n".join([*lines, b'{"text": "a\\ud800"}', b""]))
    lab.expect_success(outcome, "kept or counted")
    lab.check("surrogate counted, the rest kept", "lone surrogate" in outcome.text and _documents(lab) == 3)
    lab.check("no escape on the terminal", "\x1b[31mred" not in outcome.text)


@fault("F61", "not JSON, not an object, no key, NaN, deep nesting")
def _not_json(lab: Lab) -> None:
    lines = [b"text", b'["text"]', b'{"body": 1}', b'{"text": "a", "n": NaN}', b"[" * 200_000]
    outcome = _preprocess(lab, b"\n".join([_GOOD.strip(), *lines, _GOOD]))
    lab.expect_success(outcome, "counted by kind")
    kinds = ("not JSON", "not an object", "key missing", "nested too deeply")
    lacking = [kind for kind in kinds if kind not in outcome.text]
    lab.check("every kind is counted", not lacking, ", ".join(lacking))
    lab.check("the others are kept", _documents(lab) == 2, f"{_documents(lab)} documents")


@fault("F62", "CRLF, byte order mark, truncated .gz")
def _line_ends(lab: Lab) -> None:
    lab.expect_success(_preprocess(lab, b"\xef\xbb\xbf" + _GOOD.replace(b"\n", b"\r\n") * 2), "CRLF and BOM")
    lab.check("right text", _documents(lab) == 2, f"{_documents(lab)} documents")
    data = gzip.compress(_GOOD * 1000)
    lab.expect_refusal(_preprocess(lab, data[:-20], name="cut.jsonl.gz"), 3, r"cut\.jsonl\.gz")


@fault("F63", "preprocessing is killed")
def _killed(lab: Lab) -> None:
    path = lab.folder / "corpus.jsonl"
    path.write_bytes(_GOOD * 20_000)
    arguments = ["--input", path, "--output-prefix", lab.folder / "corpus", "--tokenizer-type", "ByteTokenizer"]
    running = lab.start("data", "preprocess", *arguments, change=partial(changes.slow_operations, 0.3))
    running.wait_until(lambda: any(lab.folder.glob("corpus_text*")), seconds=60)
    running.kill()
    running.wait(seconds=10)
    lab.check("no shard that looks whole", not _shard_exists(lab.folder), str(sorted(lab.folder.glob("corpus_*"))))
    lab.expect_success(lab.run("data", "preprocess", *arguments), "run again")
    lab.check("complete", _documents(lab) == 20_000, f"{_documents(lab)} documents")
    lab.check("no temporary file stays", not list(lab.folder.glob("corpus_*.tmp*")))


def _shard_exists(folder: Path) -> bool:
    return (folder / "corpus_text_document.idx").exists()
