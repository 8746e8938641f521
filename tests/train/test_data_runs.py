"""Data of runs across stops and ranks: sources, phases that change midway, Megatron-LM's order, packed sequences."""

import pytest

from megalin.errors import ConfigError
from tests.model_runs import STEPS, documents, ledger, losses, train_here, write_config, write_shard
from tests.ranks import run_ranks

STOP = 5
CHANGED = 8
SAVES = {"every_steps": 6}


def _overrides(folder, *, weights, from_step=CHANGED):
    """Overrides with the config's shard as a source, another source with weight 0, and a phase with `weights`."""
    extra = write_shard(folder / "data" / "extra", documents(1500, seed=7))
    train = f'{{name = "train", paths = ["{folder / "data" / "train"}"], weight = 1.0}}'
    other = f'{{name = "extra", paths = ["{extra}"], weight = 0.0}}'
    phase = f"{{from_step = {from_step}, weights = {weights}}}"
    return ["data.train=[]", f"data.sources=[{train}, {other}]", f"data.phases=[{phase}]"]


def _check(config, folder, whole, changed, message):
    train_here(config, whole)
    train_here(config, folder, f"train.stop_after_steps={STOP}")
    train_here(config, folder, *changed)
    with pytest.raises(ConfigError, match=message):
        train_here(config, folder, *_overrides(config.parent, weights="{train = 1.0, extra = 3.0}"))


def test_blend_that_changes_in_mid_run_leaves_what_was_read_before(tmp_path, capfd):
    config = write_config(tmp_path, checkpoint=SAVES)
    changed = _overrides(tmp_path, weights="{train = 1.0, extra = 1.0}")
    message = r"shares of the sources: .*\[8, {\"train\": 0.5.* in the checkpoint, .*\[8, {\"train\": 0.25"
    run_ranks(1, _check, config, tmp_path / "run", tmp_path / "whole", changed, message)
    whole, run = ledger(tmp_path / "whole"), ledger(tmp_path / "run")
    assert len(run) == STEPS
    same = [a == b for a, b in zip(whole, run, strict=True)]
    assert same == [True] * CHANGED + [False] * (STEPS - CHANGED)


def _refused(config, folder, changes):
    train_here(config, folder, f"train.stop_after_steps={STOP}")
    for change, message in changes:
        with pytest.raises(ConfigError, match=message):
            train_here(config, folder, *change)


def test_change_of_what_was_read_is_refused(tmp_path):
    config = write_config(tmp_path, checkpoint=SAVES)
    before = _overrides(tmp_path, weights="{train = 1.0, extra = 1.0}", from_step=STOP - 1)
    extra = write_shard(tmp_path / "data" / "more", documents(500, seed=8))
    changes = [
        (before, r'shares of the sources: \[\[0, {"train": 1.0}\]\] in the checkpoint, .*\[4, '),
        ([f'data.train=["{tmp_path}/data/train", "{extra}"]'], 'tokens of the sources: {"train": [0-9]+} in the'),
        (["data.packing=best_fit"], "data.packing: concatenate in the checkpoint, best_fit now"),
    ]
    run_ranks(1, _refused, config, tmp_path / "run", changes)


def _in_megatrons_order(config, folder, overrides, stop):
    train_here(config, folder, *overrides, *([f"train.stop_after_steps={STOP}"] if stop else []))
    if stop:
        message = r"train.steps, for this order: 12 in the checkpoint, 13 now"
        with pytest.raises(ConfigError, match=message):
            train_here(config, folder, *overrides, "train.steps=13")


def test_run_in_megatrons_order_goes_on_over_ranks(tmp_path):
    config = write_config(tmp_path, data={"order": "megatron"}, checkpoint=SAVES)
    run_ranks(1, _in_megatrons_order, config, tmp_path / "whole", [], False)
    run_ranks(1, _in_megatrons_order, config, tmp_path / "run", [], True)
    run_ranks(2, _in_megatrons_order, config, tmp_path / "run", ["parallel.shard=2"], False)
    assert ledger(tmp_path / "run") == ledger(tmp_path / "whole")
    assert len(ledger(tmp_path / "run")) == STEPS


def test_run_on_packed_sequences_goes_on_over_ranks(tmp_path):
    config = write_config(tmp_path, data={"packing": "best_fit"}, checkpoint=SAVES)
    run_ranks(1, train_here, config, tmp_path / "whole")
    run_ranks(1, train_here, config, tmp_path / "run", f"train.stop_after_steps={STOP}")
    run_ranks(2, train_here, config, tmp_path / "run", "data.workers=3")
    assert ledger(tmp_path / "run") == ledger(tmp_path / "whole")
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 1
