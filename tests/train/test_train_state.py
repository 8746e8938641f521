"""The schema of train_state.json: a forged one is one error that names the file and the field."""

import re

import pytest

from megalin.checkpoint.load import newest
from megalin.checkpoint.save import save
from megalin.data.sources import SHARD_DIGESTS
from megalin.errors import CheckpointError
from megalin.train.train_state import read_state
from tests.checkpoint.saved import tensors

STATE = {"step": 4, "order": {}, "config": {"model": {}, "train": {}}, "versions": {"torch": "2"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": None}, "step: Field required"),
        ({"step": 5}, "is of step 5, but the checkpoint is of step 4"),
        ({"step": -1}, "step: Input should be greater than or equal to 0"),
        ({"step": "4"}, "step: Input should be a valid integer"),
        ({"step": 4.0}, "step: Input should be a valid integer"),
        ({"step": 2**70}, "is of step 1180591620717411303424"),
        ({"order": []}, "order: Input should be a valid dictionary"),
        ({"order": {SHARD_DIGESTS: ["train"]}}, f"order: Value error, {SHARD_DIGESTS}: not the records of shards"),
        (
            {"order": {SHARD_DIGESTS: {"train": [{}]}}},
            f"order: Value error, {SHARD_DIGESTS}: not the records of shards",
        ),
        ({"config": 7}, "config: Input should be a valid dictionary"),
        ({"config": {"model": {}, "train": []}}, "config: Value error, train is not a table"),
        ({"config": {"train": {}}}, "config: Value error, model is not a table"),
        ({"versions": "x"}, "versions: Input should be a valid dictionary"),
        ({"versions": {"torch": 2}}, "versions.torch: Input should be a valid string"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
    ],
)
def test_forged_state_is_refused(tmp_path, changes, message):
    state = {name: value for name, value in (STATE | changes).items() if value is not None}
    save(tmp_path, step=4, tensors=tensors(4), state=state)
    with pytest.raises(CheckpointError, match=rf"train_state\.json: .*{re.escape(message)}"):
        read_state(newest(tmp_path))


def test_states_of_runs_and_imports_are_read(tmp_path):
    save(tmp_path, step=4, tensors=tensors(4), state=STATE)
    assert read_state(newest(tmp_path)).order == {}
    save(tmp_path, step=5, tensors=tensors(4), state=STATE | {"step": 5, "order": None, "source": {"class": "X"}})
    assert read_state(newest(tmp_path)).order is None
