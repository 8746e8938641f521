"""Faults of shards and their caches: F47 to F52, F56."""

from __future__ import annotations

import os
import shutil
import struct

import numpy as np

from fault_matrix.lab import Lab, flip, ledger
from fault_matrix.table import fault

_COUNTS_PLACE = 9 + 8 + 1
"""Byte offset of the two counts in an .idx file."""


@fault("F47", "truncated .bin")
def _truncated(lab: Lab) -> None:
    config = lab.config()
    os.truncate(lab.folder / "data" / "train.bin", 2999)
    lab.expect_refusal(lab.train(config), 3, r"train\.bin", "expected 3000", "found 2999")


@fault("F48", "flipped byte in .idx or .bin")
def _flipped(lab: Lab) -> None:
    config = lab.config()
    size = (lab.folder / "data" / "train.idx").stat().st_size
    silent = []
    # The header, a length, a pointer, and a document boundary that stays in order.
    for place in (12, 40, 34 + 4 * 60 + 3, size - 8 * 30):
        lab.shard()
        flip(lab.folder / "data" / "train.idx", place, bit=0)
        if lab.train(config, "data.verify=full", folder=f"idx-{place}").code != 3:
            silent.append(f".idx byte {place}")
    lab.shard()
    flip(lab.folder / "data" / "train.bin", bit=0)
    outcome = lab.train(config, "data.verify=full", folder="bin")
    if outcome.code != 3:
        silent.append(f".bin (exit {outcome.code})")
    lab.check("refused", not silent, f"accepted: {', '.join(silent)}")
    lab.expect_refusal(outcome, 3, r"train\.bin")


@fault("F49", ".bin and .idx of different shards")
def _mixed(lab: Lab) -> None:
    config = lab.config()
    other = lab.shard("other", seed=2)
    shutil.copy(other.with_suffix(".bin"), lab.folder / "data" / "train.bin")
    lab.expect_refusal(lab.train(config, "data.verify=full"), 3, r"train\.bin")


@fault("F50", "negative and overflowing sizes")
def _overflowing(lab: Lab) -> None:
    config = lab.config()
    path = lab.folder / "data" / "train.idx"
    good = path.read_bytes()
    places = {"sequences": _COUNTS_PLACE, "documents": _COUNTS_PLACE + 8, "length": 34, "pointer": 34 + 4 * 60}
    for name, place in places.items():
        form, number = ("<i", -5) if name == "length" else ("<Q", 2**63)
        path.write_bytes(good[:place] + struct.pack(form, number) + good[place + struct.calcsize(form) :])
        outcome = lab.train(config, folder=name)
        lab.expect_refusal(outcome, 3, r"train\.idx")


@fault("F51", "no documents, no tokens")
def _empty(lab: Lab) -> None:
    empty = lab.shard("empty", num_documents=0)
    outcome = lab.train(lab.config(shards=[empty, lab.shard()]))
    lab.expect_success(outcome, "skipped where another shard has tokens")
    lab.check("a warning names it", "empty" in outcome.text.split("source ")[0], "no warning")
    lab.expect_refusal(lab.train(lab.config(shards=[empty]), folder="none"), 3, "empty")


@fault("F52", "token id beyond the vocabulary")
def _large_id(lab: Lab) -> None:
    config = lab.config()
    path = lab.folder / "data" / "train.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[700] = 65535
    tokens.tofile(path)
    outcome = lab.train(config, "train.steps=60")
    lab.expect_refusal(outcome, 3, "65535", "rank 0|sample")
    prefix = str(path.with_suffix(""))
    outcome = lab.run("data", "inspect", prefix, "--validate", "--vocab-size", "257")
    lab.expect_refusal(outcome, 3, r"train\.bin", "(document|sequence) 28", "65535")


@fault("F56", "half-written and reordered index cache")
def _cache(lab: Lab) -> None:
    config = lab.config(data={"order": "megatron"})
    undisturbed = lab.train(config, folder="expected")
    assert undisturbed.code == 0, undisturbed.text
    expected = ledger(lab.folder / "expected")
    for damage in (_reorder, _empty_file, _truncate):
        run = lab.folder / damage.__name__
        lab.train(config, "train.stop_after_steps=2", folder=run.name)
        files = sorted(run.glob("cache/*/shuffle*.npy" if damage is _reorder else "cache/*/*.npy"))
        assert files, "no cache was written"
        for path in files:
            damage(path)
        outcome = lab.train(config, folder=run.name)
        lab.check(f"{damage.__name__}: the same samples", ledger(run) == expected, "another order of samples")
        lab.check(f"{damage.__name__}: rebuilt", outcome.code == 0, f"exit {outcome.code}: {outcome.last_line}")
        lab.check(
            f"{damage.__name__}: logged", "rebuilt" in outcome.text or "built again" in outcome.text, "not logged"
        )


def _reorder(path: os.PathLike[str]) -> None:
    array = np.load(path)
    np.save(path, array[::-1].copy())


def _empty_file(path: os.PathLike[str]) -> None:
    os.truncate(path, 0)


def _truncate(path: os.PathLike[str]) -> None:
    os.truncate(path, os.stat(path).st_size - 3)
