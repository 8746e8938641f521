"""Messages between ranks: JSON and tensors come back, other values need a kind, and nothing is unpickled."""

import math
import pickle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megalin.checkpoint.manifest import CheckpointManifest, FileRecord
from megalin.data.tokenizers.tokenizer import EndOfDocumentError
from megalin.errors import ConfigError, DataError, StorageError
from megalin.parallel.agreement import on_every_rank, on_rank_zero, rank
from megalin.parallel.messages import decode, encode, gather_tensors, gather_values
from tests.ranks import run_ranks


class Pair(NamedTuple):
    name: str
    values: list[float]


@pytest.mark.parametrize("value", [None, True, 2**70, 1.5, math.inf, "é🙂\n", [], [1, [None]], {"a": {"b": [1]}}])
def test_plain_values_come_back(value):
    assert decode(encode(value)) == value
    assert decode(encode((value, value))) == [value, value]


MANIFEST = CheckpointManifest(step=3, files={"x.safetensors": FileRecord(size=1, sha256="0" * 64)})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Pair("a", [1.0, math.inf, -0.0]), Pair),
        ([Pair("a", [])], list[Pair]),
        ({"a", "b"}, set[str]),
        ({1: (2, "x")}, dict[int, tuple[int, str]]),
        (Path("x"), Path | None),
        (None, Path | None),
        (MANIFEST, CheckpointManifest),
    ],
)
def test_values_with_a_kind_come_back(value, kind):
    found = decode(encode(value, kind), kind)
    assert found == value
    assert type(found) is type(value)


def test_numbers_that_are_not_finite_come_back():
    assert math.isnan(decode(encode(Pair("a", [math.nan]), Pair), Pair).values[0])
    assert math.isnan(decode(encode([math.nan]))[0])


@pytest.mark.parametrize("value", [Pair("a", []), {"a"}, {1: 2}, Path("x"), b"", [MANIFEST], {"a": torch.zeros(1)}])
def test_values_that_json_would_change_need_a_kind(value):
    with pytest.raises(TypeError, match="give the kind of the value"):
        encode(value)


def test_pickled_bytes_are_refused():
    for kind in (None, Pair):
        with pytest.raises(ValueError, match=r"decode|JSON"):
            decode(pickle.dumps([1]), kind)


def _raise(error):
    raise error


def _on_ranks():
    found = {
        "gathered": gather_values("x" * 10 * rank(), torch.distributed.group.WORLD),
        "tensors": gather_tensors({"a": torch.full((rank(), 2), 7.0)}, torch.distributed.group.WORLD),
        "zero": on_rank_zero(lambda: Pair("zero", [1.0]), Pair),
        "every": on_every_rank(lambda: {rank()}, set[int]),
    }
    errors = []
    for work in (
        lambda: on_rank_zero(lambda: _raise(EndOfDocumentError("no end"))),
        lambda: on_every_rank(lambda: _raise(PermissionError(13, "denied"))),
        lambda: on_every_rank(lambda: rank() == 1 and _raise(ConfigError("one"))),
    ):
        try:
            work()
        except ValueError as error:
            errors.append((type(error), str(error)))
    return found, errors


def test_every_rank_has_all_values_and_errors():
    for found, errors in run_ranks(3, _on_ranks):
        assert found["gathered"] == ["", "x" * 10, "x" * 20]
        assert [list(each["a"].shape) for each in found["tensors"]] == [[0, 2], [1, 2], [2, 2]]
        assert bool((found["tensors"][2]["a"] == 7.0).all())
        assert found["zero"] == Pair("zero", [1.0])
        assert found["every"] == [{0}, {1}, {2}]
        denied = (StorageError, "[Errno 13] denied")
        assert errors[1:] == [denied, (ConfigError, "rank 1: one")]
        assert issubclass(errors[0][0], DataError)
        assert errors[0][1] == "no end"


def test_no_object_collective_is_left():
    root = Path(__file__).parents[2] / "megalin"
    sources = {path: path.read_text() for path in root.rglob("*.py")}
    names = ("all_gather_object", "broadcast_object_list", "gather_object(", "send_object_list", "scatter_object")
    assert [str(path) for path, text in sources.items() if any(name in text for name in names)] == []
