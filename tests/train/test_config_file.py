"""Config files that name a base, and overrides of keys inside lists and presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalin.commands.base import model_from
from megalin.config import dumps
from megalin.errors import ConfigError
from megalin.train.config import load_run_config
from megalin.train.config_file import read_config, resolve

BASE = """
[model]
preset = "rodimus-125m"
[data]
train = ["a", "b"]
sequence_length = 64
[train]
steps = 4
global_batch_size = 2
micro_batch_size = 1
[optimizer]
lr = 1e-3
"""


def write(folder: Path, **files: str) -> Path:
    """Writes each file NAME.toml; returns the path of the last one."""
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{list(files)[-1]}.toml"


def test_tables_change_the_base_key_by_key_and_lists_replace_it(tmp_path: Path):
    child = 'base = "base.toml"\n[data]\ntrain = ["c"]\n[train]\nsteps = 9\n[schedule]\ntype = "constant"\n'
    config = load_run_config(write(tmp_path, base=BASE, child=child), [])
    assert (config.data.train, config.data.sequence_length) == (["c"], 64)
    assert (config.train.steps, config.train.global_batch_size, config.schedule.type) == (9, 2, "constant")
    assert config.model.hidden_size == 768


def test_overrides_reach_into_the_preset_in_the_order_base_file_command_line(tmp_path: Path):
    key = "model.layers.0.sublayers.0.state_size"
    path = write(
        tmp_path,
        base=f'overrides = ["{key}=16", "model.layers.0.repeat=5", "train.steps=7"]\n{BASE}',
        child=f'base = "base.toml"\noverrides = ["{key}=32"]\n',
    )
    config = load_run_config(path, ["train.steps=8"])
    assert (config.model.layers[0].sublayers[0].state_size, config.model.num_layers, config.train.steps) == (32, 5, 8)
    assert load_run_config(path, [f"{key}=8"]).model.layers[0].sublayers[0].state_size == 8
    assert model_from(str(path), []) == config.model
    assert model_from("rodimus-125m", [f"{key}=32", "model.layers.0.repeat=5"]) == config.model


def test_a_preset_on_the_command_line_comes_before_the_overrides_of_its_blocks(tmp_path: Path):
    path = write(tmp_path, base=f'overrides = ["model.layers.0.repeat=5"]\n{BASE}')
    config = load_run_config(path, ["model.layers.0.sublayers.0.state_size=8", "model.preset=rodimus-350m"])
    assert (config.model.hidden_size, config.model.num_layers) == (1024, 5)
    assert config.model.layers[0].sublayers[0].state_size == 8


def test_the_resolved_config_needs_no_base(tmp_path: Path):
    path = write(tmp_path, base=BASE, child='base = "base.toml"\noverrides = ["model.layers.0.repeat=5"]\n')
    config = load_run_config(path, [])
    (tmp_path / "resolved.toml").write_text(dumps(config))
    assert load_run_config(tmp_path / "resolved.toml", []) == config


def test_reading_and_resolving_leave_their_arguments_unchanged(tmp_path: Path):
    values = read_config(write(tmp_path, base=f'overrides = ["model.layers.0.repeat=5"]\n{BASE}'))
    assert resolve(values, []) == resolve(values, [])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"base": 'base = "child.toml"', "child": 'base = "base.toml"'}, "child.toml: base: the file is its own base"),
        ({"child": 'base = "none.toml"'}, "none.toml: no such config file"),
        ({"child": "base = 3"}, "child.toml: base = 3 is not text; give the path of a config file"),
        ({"child": 'overrides = "a=1"'}, "child.toml: overrides = 'a=1' is not a list of texts"),
        ({"child": "overrides = [1]"}, "is not a list of texts"),
        ({"child": BASE + 'extra = 1\n'}, "optimizer.extra: unknown key"),
    ],
)  # fmt: skip
def test_invalid_files(tmp_path: Path, files: dict[str, str], message: str):
    with pytest.raises(ConfigError) as raised:
        load_run_config(write(tmp_path, **files), [])
    assert message in str(raised.value)
