"""Command line of tools/import_config.py: its files, output, exit codes, and errors without a traceback."""

import io
import json
import tomllib

import pytest

from megalin.train.config import load_run_config
from megalin.train.deepspeed_settings import deepspeed_settings
from tests.interop.configs.test_deepspeed import ZERO3
from tests.interop.configs.test_megatron import SMALL
from tools import import_config

SCRIPT = f"""
ARGS=({SMALL} --bogus-flag)
torchrun --nproc_per_node 2 pretrain_gpt.py ${{ARGS[@]}} --save $1
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--data-path corpus", "--data-path $DATA"))
    return str(path)


def test_script_becomes_a_config_that_loads_and_names_what_it_left_out(tmp_path, script, capsys):
    output = tmp_path / "run.toml"
    assert import_config.main([script, str(output), "train.seed=3", "--variable", "DATA=shards/text"]) == 1
    config = load_run_config(output, [])
    assert (config.data.train, config.train.seed, config.train.global_batch_size) == (["shards/text"], 3, 8)
    head = output.read_text().split("\n\n")[0]
    assert head.startswith(f"# From {script}.")
    assert "#   --bogus-flag: Megatron-LM has no such flag" in head
    shown = capsys.readouterr().out
    assert "train.global_batch_size = 8  <-  --global-batch-size" in shown
    assert "Unknown:\n  --bogus-flag: " in shown
    assert shown.endswith("but not the same run; settings substituted, not available or unknown: 1\n")
    whole = [" ".join(SMALL.split()), str(tmp_path / "whole.toml")]
    assert import_config.main(whole) == 0
    assert capsys.readouterr().out.endswith(f"{whole[1]}: a complete config\n")


def test_missing_values_are_reported_by_the_exit_code(tmp_path, script, capsys):
    assert import_config.main([script, str(tmp_path / "run.toml")]) == 1
    shown = capsys.readouterr().out
    assert "data.train.0 = '${DATA}': give --variable DATA=VALUE, or write the value" in shown
    assert shown.endswith("values are missing; see above\n")


def test_keys_for_the_engine_are_written_to_a_json_next_to_the_config(tmp_path):
    source, output = tmp_path / "ds.json", tmp_path / "run.toml"
    source.write_text(json.dumps(ZERO3))
    data = f'data={{train = ["{tmp_path / "corpus"}"], sequence_length = 128}}'
    assert (
        import_config.main([str(source), str(output), "model.preset=llama-70m", data]) == 1
    )  # its warmup is logarithmic
    config = load_run_config(output, [])
    assert (config.train.engine, config.parallel.zero) == ("deepspeed", 3)
    kept = json.loads((tmp_path / "run.deepspeed.json").read_text())
    assert config.train.deepspeed_config == str(tmp_path / "run.deepspeed.json")
    assert kept["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    settings = deepspeed_settings(config, 64 // (4 * 2))  # the two files agree
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["zero_optimization"].items() >= {"stage": 3, **kept["zero_optimization"]}.items()


def test_overridden_values_are_not_to_be_filled_in(tmp_path, capsys):
    source, batch = tmp_path / "ds.json", "train.global_batch_size=64"
    source.write_text(json.dumps({**ZERO3, "train_batch_size": "auto"}))
    data = f'data={{train = ["{tmp_path / "corpus"}"], sequence_length = 128}}'
    arguments = [str(source), str(tmp_path / "a.toml"), "model.preset=llama-70m", data]
    assert import_config.main([*arguments, batch]) == 1  # its warmup is logarithmic
    assert "values are missing" not in capsys.readouterr().out
    samples = SMALL.replace("--global-batch-size 8", "").replace("--train-iters 100", "--train-samples 6400")
    arguments = [samples.replace("\n", " "), str(tmp_path / "b.toml"), batch]
    assert import_config.main([*arguments, "train.steps=100"]) == 0
    arguments[1] = str(tmp_path / "c.toml")
    assert import_config.main(arguments) == 1
    assert "--train-samples: it counts samples" in capsys.readouterr().out


def test_command_of_megatron_deepspeed_takes_its_json_along(tmp_path):
    source, output = tmp_path / "ds.json", tmp_path / "run.toml"
    source.write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}))
    command = f"deepspeed pretrain_gpt.py --deepspeed {SMALL}".replace("\n", " ")
    assert import_config.main([command, str(output), "--deepspeed-config", str(source)]) == 1
    config = load_run_config(output, [])
    assert (config.train.engine, config.parallel.zero, config.train.global_batch_size) == ("deepspeed", 2, 16)
    assert "--global-batch-size: gives train.global_batch_size = 8, but 16 was set before" in output.read_text()
    assert not (tmp_path / "run.deepspeed.json").exists()


def test_yaml_and_standard_input_are_read(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("MODEL_ARGS:\n  --num-layers: 2\n")
    import_config.main([str(tmp_path / "run.yaml"), str(tmp_path / "a.toml"), "model.hidden_size=8"])
    assert "hidden_size = 8" in (tmp_path / "a.toml").read_text()
    monkeypatch.setattr("sys.stdin", io.StringIO(SCRIPT))
    assert import_config.main(["-", str(tmp_path / "b.toml")]) == 1  # --bogus-flag
    for errors in ("strict", "surrogateescape"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"--lr 1 # \xff"), "utf-8", errors))
        assert import_config.main(["-", str(tmp_path / "c.toml")]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.sh"], 2, "nowhere.sh: not a readable text file"),
        (["big.sh"], 2, "big.sh: more than 16777216 bytes"),
        (["--num-layers 2", "--variable", "DATA"], 2, "--variable 'DATA' is not of the form NAME=VALUE"),
        (["--num-layers 2", "seed"], 2, "override 'seed' is not of the form key=value"),
    ],
)
def test_error_is_printed_without_a_traceback(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    with open("big.sh", "wb") as file:
        file.truncate((16 << 20) + 1)
    source, *more = arguments
    assert import_config.main([source, "o.toml", *more]) == code
    assert f"Error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "o.toml").exists()


def test_files_that_exist_are_kept(tmp_path, script, capsys):
    output = tmp_path / "run.toml"
    output.write_text("mine")
    assert import_config.main([script, str(output)]) == 2
    assert "exists already; remove it or give another name" in capsys.readouterr().err
    assert output.read_text() == "mine"


def test_null_takes_an_imported_key_back_to_its_default(tmp_path, capsys):
    output = tmp_path / "run.toml"
    overrides = ["optimizer.lr=null", "train.stop_after_steps=null"]
    assert import_config.main([" ".join(SMALL.split()), str(output), *overrides]) == 1
    written = tomllib.loads(output.read_text())
    assert "lr" not in written["optimizer"]
    assert "stop_after_steps" not in written["train"]
    assert "optimizer.lr: required, but missing" in capsys.readouterr().out
