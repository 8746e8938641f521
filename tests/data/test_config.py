"""The table [data]: splits of a shard, and every refused setting of sources, phases, orders and packing."""

import os

import pytest

from megalin.config import parse
from megalin.data.config import DataConfig
from megalin.errors import ConfigError

WEB = {"name": "web", "paths": ["w"], "weight": 3.0}
CODE = {"name": "code", "paths": ["c"], "weight": 1.0}
PHASE = {"from_step": 5, "weights": {"web": 1.0}}


def _config(**values):
    return parse(DataConfig, {"sequence_length": 8, **values}, "test")


def test_split_is_megatrons():
    config = _config(train=["a"], split=[969.0, 30.0, 1.0])
    assert [config.sequences(split, 1000) for split in ("train", "validation", "test")] == [
        (0, 969),
        (969, 999),
        (999, 1000),
    ]
    assert [config.sequences(split, 77) for split in ("train", "validation", "test")] == [(0, 75), (75, 77), (77, 77)]
    assert [_config(train=["a"], split=[9.0, 1.0, 0.0]).has(split) for split in ("validation", "test")] == [True, False]


def test_each_split_has_its_own_shards_or_a_part_of_the_training_shards():
    config = _config(sources=[WEB, CODE], validation=["v"], test=["t"])
    assert [config.paths(split) for split in ("train", "validation", "test")] == [["w", "c"], ["v"], ["t"]]
    assert (
        config.sequences("validation", 10) == config.sequences("test", 10) == config.sequences("train", 10) == (0, 10)
    )
    held_out = _config(train=["a", "b"], validation_fraction=0.25, test=["t"])
    assert held_out.paths("validation") == ["a", "b"]
    assert (held_out.sequences("train", 8), held_out.sequences("validation", 8)) == ((0, 6), (6, 8))
    assert held_out.sequences("test", 8) == (0, 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": ["a"], "sources": [WEB]}, "train has no effect with sources; list its shards in a source"),
        ({"sources": [WEB, {**WEB, "paths": ["x"]}]}, "sources has the name web more than once; give each source"),
        (
            {"sources": [{**WEB, "weight": 0.0}]},
            "sources.weight = 0 everywhere; give at least one source a positive weight",
        ),
        ({"sources": [WEB, {"name": "x", "paths": ["x"]}]}, "sources: x has no weight, but others have; give a weight"),
        ({"sources": [WEB, {**CODE, "paths": ["w"]}]}, "sources lists the shard w more than once; list each shard"),
        ({"sources": [WEB], "test": ["w"]}, "test lists the training shard w; a held-out split needs other data"),
        ({"train": ["a", "./a"]}, r"train lists the shard a more than once, also as \./a; list each shard once"),
        (
            {"train": ["x/a", "b", "x//y/../a"]},
            "train lists the shard x/a more than once, also as x//y/../a; list each",
        ),
        (
            {"sources": [WEB, {**CODE, "paths": [os.path.abspath("w")]}]},
            r"sources lists the shard w more than once, also as /.*/w; list each shard once",
        ),
        ({"train": ["a"], "validation": ["v", "./a"]}, r"validation lists the training shard \./a; a held-out split"),
        ({"sources": [{**WEB, "weight": -1.0}]}, r"sources.0.weight = -1.0: .*greater than or equal to 0"),
        ({"sources": [{**WEB, "weight": float("inf")}]}, r"sources.0.weight = inf: .*finite"),
        ({"sources": [{**WEB, "name": "a b"}]}, r"sources.0.name = 'a b'"),
        ({"sources": [{**WEB, "wieght": 1.0}]}, r"sources.0.wieght: unknown key; did you mean 'weight'"),
        (
            {"sources": [WEB], "phases": [PHASE, PHASE]},
            r"phases.1.from_step = 5 must be above 5, that of the previous phase",
        ),
        (
            {"sources": [WEB], "phases": [{"from_step": 5, "weights": {"wep": 1.0}}]},
            r"phases.0.weights.wep: no such source; did you mean 'web'",
        ),
        (
            {"sources": [WEB], "phases": [{"from_step": 5, "weights": {"web": 0.0}}]},
            r"phases.0.weights = .*: give at least one source a positive weight",
        ),
        ({"train": ["a"], "split": [0.0, 1.0, 1.0]}, r"split = .* leaves nothing to train on"),
        ({"train": ["a"], "split": [1.0, 1.0]}, r"split = .*at least 3 items"),
        ({"train": ["a"], "split": [1.0, 1.0, 0.0], "validation": ["v"]}, "validation has no effect with split"),
        ({"train": ["a"], "split": [1.0, 1.0, 0.0], "test": ["v"]}, "test has no effect with split"),
        (
            {"train": ["a"], "split": [1.0, 1.0, 0.0], "validation_fraction": 0.1},
            "validation_fraction has no effect with split",
        ),
        ({"sources": [WEB], "phases": [PHASE], "order": "megatron"}, 'phases: not supported with order = "megatron"'),
        (
            {"train": ["a"], "packing": "best_fit", "order": "megatron"},
            'packing = "best_fit": order = "megatron" only supports packing = "concatenate"',
        ),
        (
            {"train": ["a"], "order": "megatron", "masking": {"max_predictions": 2}},
            'masking: order = "megatron" gives next-token samples only',
        ),
        (
            {"sources": [{**WEB, "paths": ["a", "b"]}], "order": "megatron"},
            'sources: web has 2 shards; order = "megatron" takes one shard per source',
        ),
        (
            {"sources": [WEB, {**CODE, "weight": 0.0}], "order": "megatron"},
            'sources: code has weight 0; order = "megatron" reads every source',
        ),
        ({"train": ["a"], "cache": "elsewhere"}, 'cache = "elsewhere" has no effect with order = "megalin"'),
        (
            {"train": ["a"], "packing": "first_fit", "isolate_documents": False},
            'isolate_documents = false: packing = "first_fit" keeps documents apart',
        ),
        (
            {"train": ["a"], "packing": "first_fit", "masking": {"max_predictions": 2}},
            'packing = "first_fit" has no effect with masking',
        ),
        ({"train": ["a"], "workers": 0}, "workers = 0"),
    ],
)
def test_table_that_cannot_work_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        _config(**values)
