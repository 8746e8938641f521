"""Strict configs: every problem reported with its key, overrides, and text that parses to the same config."""

import os
import tomllib
from types import NoneType
from typing import Any, get_args

import pydantic
import pytest

from megalin.config import Config, apply_overrides, dumps, parse, read_toml
from megalin.errors import ConfigError
from megalin.layers.config import config_class, mixer_types
from megalin.model.config import ModelConfig, parse_model
from megalin.model.presets import load_preset, preset_names, preset_table
from megalin.train.config import RunConfig
from tests.cases import CASES, HYBRID, NAMES


class Schedule(Config):
    """A nested table."""

    warmup_steps: int = 10
    """Steps."""


class Run(Config):
    """A run as a user writes it."""

    model: ModelConfig
    """The model."""
    schedule: Schedule = Schedule()
    """The schedule."""
    learning_rate: float = pydantic.Field(default=0.1, gt=0)
    """Peak."""
    name: str | None = None
    """Name."""


def config_classes(cls: type[Config]) -> set[type[Config]]:
    return {cls}.union(*(config_classes(each) for each in cls.__subclasses__()))


def values(**changes: Any) -> dict[str, Any]:
    glu = {"type": "glu", "intermediate_size": 36}
    layers = [{"sublayers": [{"type": "transnormer", "num_heads": 4}, glu], "repeat": 2}]
    return {"model": {"vocab_size": 100, "hidden_size": 16, "layers": layers}} | changes


def message(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(Run, table, "run.toml", context=["tests.mixers"])
    return str(raised.value)


def with_override(override: str) -> dict[str, Any]:
    return apply_overrides(values(), [override])


def test_valid_values_parse():
    run = parse(Run, values(), "run.toml")
    assert run.model.num_layers == 2
    assert run.model.layers[0].sublayers[1].type == "glu"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learning_rat=0.5", "learning_rat: unknown key; did you mean 'learning_rate'?"),
        ("qqq=1", "qqq: unknown key; known: learning_rate, model, name, schedule"),
        ("schedule.warmup_step=1", "schedule.warmup_step: unknown key; did you mean 'warmup_steps'?"),
        ("model.hiden_size=3", "model.hiden_size: unknown key; did you mean 'hidden_size'?"),
        ("model.layers.0.repeats=3", "model.layers.0.repeats: unknown key; did you mean 'repeat'?"),
        (
            "model.layers.0.sublayers.1.intermediate_sise=3",
            "model.layers.0.sublayers.1.intermediate_sise: unknown key; did you mean 'intermediate_size'?",
        ),
        (
            "model.layers.0.sublayers.1.num_heads=4",
            "model.layers.0.sublayers.1.num_heads: unknown key; known: activation, bias, intermediate_size, norm, "
            "norm_eps, residual, type",
        ),
        (
            "model.layers.0.sublayers.0.window=4",
            "model.layers.0.sublayers.0.window: unknown key; known: absolute_positions, activation, "
            "chunk_size, decay, gate, lrpe, max_positions, norm, norm_eps, num_heads, output_norm, residual, type",
        ),
        (
            "model.layers.0.sublayers.0.type=transnormr",
            "model.layers.0.sublayers.0.type = 'transnormr': there is no such mixer; did you mean 'transnormer'?",
        ),
        (
            "model.layers.0.sublayers.0.type=zzz",
            f"model.layers.0.sublayers.0.type = 'zzz': there is no such mixer; known: {', '.join(mixer_types())}",
        ),
        (
            "model.layers.0.sublayers.0.type=tests.mixers.absent",
            "model.layers.0.sublayers.0.type = 'tests.mixers.absent': No module named 'tests.mixers.absent'; "
            "give a module that can be imported",
        ),
        (
            "model.layers.0.sublayers.0.type=3",
            f"model.layers.0.sublayers.0.type: required, the name of a mixer; known: {', '.join(mixer_types())}",
        ),
        ('model.hidden_size="16"', "model.hidden_size = '16': input should be a valid integer"),
        ("model.hidden_size=16.0", "model.hidden_size = 16.0: input should be a valid integer"),
        ("model.hidden_size=0", "model.hidden_size = 0: input should be greater than 0"),
        ("model.layers.0.repeat=10001", "model.layers.0.repeat = 10001: input should be less than or equal to 10000"),
        (
            f"model.hidden_size={'9' * 5000}",
            f"model.hidden_size = '{'9' * 199}... (5,002 characters): input should be a valid integer",
        ),
        (
            "model.layers=[{sublayers=[{type='tnl',num_heads=4}],repeat=6000},{sublayers=[{type='tnl',num_heads=4}],repeat=6000}]",
            "model.layers: 12000 blocks with their repetitions; use at most 10000",
        ),
        ("learning_rate=-1.0", "learning_rate = -1.0: input should be greater than 0"),
        ("model.layers=[]", "model.layers = []: list should have at least 1 item after validation, not 0"),
        (
            'model.layers.0.sublayers.0.lrpe="cosin"',
            "model.layers.0.sublayers.0.lrpe = 'cosin': input should be 'cosine' or 'rotation'",
        ),
        (
            'model.layers.0.sublayers.1.residual="two_hop"',
            'model.layers.0: the last sub-layer has residual = "two_hop", which drops its result; '
            'use residual = "add" there',
        ),
    ],
)
def test_a_problem_is_named_with_its_place_rule_and_remedy(override: str, expected: str):
    assert message(with_override(override)) == f"run.toml: 1 problem(s)\n  {expected}"


def test_a_missing_value_is_named():
    table = values()
    del table["model"]["hidden_size"]
    del table["model"]["layers"][0]["sublayers"][1]["intermediate_size"]
    text = message(table)
    assert "run.toml: 2 problem(s)" in text
    remedy = "required, but missing; set it in the file or as an override"
    assert f"  model.hidden_size: {remedy}" in text
    assert f"  model.layers.0.sublayers.1.intermediate_size: {remedy}" in text


def test_a_sublayer_that_is_no_table_is_named():
    assert "model.layers.0.sublayers.0" in message(with_override("model.layers.0.sublayers.0=glu"))


def test_all_problems_are_reported_at_once():
    table = apply_overrides(
        values(),
        [
            "model.hidden_size=-1",
            "model.layers.0.sublayers.0.num_heads=x",
            "model.layers.0.sublayers.1.intermediate_size=0",
            "model.layers.0.sublayers.1.activatoin=silu",
            "schedule.warmup_steps=1.5",
            "nome=x",
        ],
    )
    lines = message(table).splitlines()
    assert lines[0] == "run.toml: 6 problem(s)"
    fields = [
        "model.hidden_size",
        "model.layers.0.sublayers.0.num_heads",
        "model.layers.0.sublayers.1.intermediate_size",
        "model.layers.0.sublayers.1.activatoin",
        "schedule.warmup_steps",
        "nome",
    ]
    assert sorted(line.split()[0].rstrip(":") for line in lines[1:]) == sorted(fields)


def test_configs_are_frozen():
    run = parse(Run, values(), "run.toml")
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        run.learning_rate = 1.0


@pytest.mark.parametrize(
    ("override", "place", "expected"),
    [
        ("learning_rate=0.5", ["learning_rate"], 0.5),
        ("schedule.warmup_steps=7", ["schedule", "warmup_steps"], 7),
        ("name=plain text", ["name"], "plain text"),
        ('name="3"', ["name"], "3"),
        ("name=a=b", ["name"], "a=b"),
        ("model.tie_embeddings=false", ["model", "tie_embeddings"], False),
        (" model . vocab_size =300", ["model", "vocab_size"], 300),
        (
            "model.layers.0.sublayers.1.intermediate_size=8",
            ["model", "layers", 0, "sublayers", 1, "intermediate_size"],
            8,
        ),
        ("model.layers.0.sublayers=[{type='glu'}]", ["model", "layers", 0, "sublayers"], [{"type": "glu"}]),
    ],
)
def test_an_override_sets_a_value(override: str, place: list[Any], expected: Any):
    original = values()
    result: Any = apply_overrides(original, [override])
    for part in place:
        result = result[part]
    assert result == expected
    assert original == values()


@pytest.mark.parametrize(
    "override", ["learning_rate=null", "schedule.warmup_steps= null", "schedule=null", "name=null"]
)
@pytest.mark.parametrize("given", [{}, {"learning_rate": 0.5, "schedule": {"warmup_steps": 3}, "name": "null"}])
def test_null_takes_a_key_back_to_its_default(override: str, given: dict[str, Any]):
    path = override.partition("=")[0].split(".")
    changed: Any = parse(Run, apply_overrides(values(**given), [override]), "run.toml")
    default: Any = parse(Run, values(), "run.toml")
    for part in path:
        changed, default = getattr(changed, part), getattr(default, part)
    assert changed == default


def test_null_takes_a_key_of_a_block_and_of_a_preset_back():
    table = {"model": preset_table("rodimus-125m")}
    norm = apply_overrides(table, ["model.norm_eps=null", "model.layers.0.sublayers.0.norm_eps=null"])["model"]
    assert "norm_eps" in table["model"]
    assert parse_model(norm, "x").norm_eps == ModelConfig.model_fields["norm_eps"].default


def test_null_spares_no_typing_error_and_is_a_text_in_quotes():
    assert "learning_rat: unknown key; did you mean 'learning_rate'" in message(with_override("learning_rat=null"))
    assert "scedule: unknown key; did you mean 'schedule'" in message(with_override("scedule.warmup_steps=null"))
    assert "model.vocab_size: required, but missing" in message(with_override("model.vocab_size=null"))
    assert "model.layers.0 = None: " in message(with_override("model.layers.0=null"))
    assert parse(Run, with_override('name="null"'), "run.toml").name == "null"


def test_fields_that_may_be_none_are_none_by_default():
    """Else None would be lost in TOML, which has no null: the run folder's config would be another one."""
    classes = {config_class(name) for name in mixer_types()} | config_classes(RunConfig) | config_classes(Config)
    for cls in classes:
        optional = {name: field for name, field in cls.model_fields.items() if not field.is_required()}
        values = {
            name: field.get_default(call_default_factory=True, validated_data={}) for name, field in optional.items()
        }
        bad = [name for name, x in values.items() if x is not None and NoneType in get_args(optional[name].annotation)]
        assert bad == [], cls


def test_later_overrides_win():
    assert apply_overrides(values(), ["learning_rate=1.0", "learning_rate=2.0"])["learning_rate"] == 2.0


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learning_rate", "override 'learning_rate' is not of the form key=value, for example train.steps=100"),
        ("=3", "override '=3' is not of the form key=value"),
        ("model..x=3", r"override 'model\.\.x=3' is not of the form key=value"),
        ("model.layers.1.repeat=3", r"override 'model\.layers\.1\.repeat=3': '1' is not an index into 1 elements"),
        ("model.layers.first.repeat=3", "'first' is not an index into 1 elements"),
        ("model.layers.-1.repeat=3", "'-1' is not an index into 1 elements"),
        ("model.layers.².repeat=3", "'²' is not an index into 1 elements"),
        (".".join(["a"] * 102) + "=3", r"override 'a\.a.*\.\.\.: its key has more than 100 parts"),
        ("model.hidden_size.x=3", r"override 'model\.hidden_size\.x=3': model\.hidden_size is a value, not a table"),
    ],
)
def test_a_bad_override_is_refused(override: str, expected: str):
    with pytest.raises(ConfigError, match=expected):
        with_override(override)


@pytest.mark.parametrize("name", preset_names())
def test_presets_come_back_from_their_own_text(name: str):
    config = load_preset(name).model
    assert parse_model(tomllib.loads(dumps(config)), name) == config


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_models_come_back_from_their_own_text(case):
    assert parse(ModelConfig, tomllib.loads(dumps(case.model)), case.name) == case.model


def test_a_run_comes_back_from_its_own_text():
    run = Run(model=HYBRID.model, learning_rate=1e-7)
    text = dumps(run)
    assert "name" not in tomllib.loads(text)  # None is left out
    assert parse(Run, tomllib.loads(text), "text") == run


def test_files_are_read_or_named(tmp_path):
    good, bad, binary = tmp_path / "good.toml", tmp_path / "bad.toml", tmp_path / "binary.toml"
    good.write_text("a = 1\n[b]\nc = 'x'\n")
    bad.write_text("a = \n")
    binary.write_bytes(b"\xff\xfe")
    assert read_toml(good) == {"a": 1, "b": {"c": "x"}}
    with pytest.raises(ConfigError, match=r"absent\.toml: no such config file; give the path of a \.toml file"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"bad\.toml: not a readable TOML file: Invalid value"):
        read_toml(bad)
    with pytest.raises(ConfigError, match=r"binary\.toml: not a readable TOML file: .*utf-8"):
        read_toml(binary)
    with pytest.raises(ConfigError, match="not a readable TOML file"):
        read_toml(tmp_path)
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match=r"not a readable TOML file: .*expected a regular file"):
        read_toml(tmp_path / "pipe.toml")
    good.write_text("x = " + "[" * 50_000)
    with pytest.raises(ConfigError, match="not a readable TOML file: nested more than 100 deep"):
        read_toml(good)


def test_many_problems_are_cut():
    text = message({f"key{number}": 1 for number in range(60)})
    assert len(text.splitlines()) == 52
    assert text.endswith("more")
