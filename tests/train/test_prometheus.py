"""The newest metrics for Prometheus: its text format in a file and at an endpoint, and refusals."""

from __future__ import annotations

import io
import socket
import sys
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megalin.errors import ConfigError
from megalin.parallel.process_group import process_group
from megalin.train.metrics import Metrics
from megalin.train.prometheus import Prometheus
from megalin.train.weights_and_biases import LoggingConfig
from tests.model_runs import CPU, train_here, write_config

STEP = {"loss": 2.5, "grad_norm": 0.5, "tokens": 4096, "tokens_per_second": 1234.5, "label_tokens": 4000}


def _metrics(folder: Path, **logging: Any) -> Metrics:
    prometheus = partial(Prometheus, folder, LoggingConfig(**logging), total_steps=10, model='a"b')
    return Metrics(folder, total_steps=10, prometheus=prometheus, console=Console(file=io.StringIO()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_file_has_help_type_labels_and_the_newest_values(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    folder = tmp_path / "my run"
    folder.mkdir()
    with _metrics(folder, prometheus_file=True) as metrics:
        metrics.write(1, STEP | {"evaluation_loss": 3.25})
        assert "megalin_steps_total" in (folder / "metrics.prom").read_text()
        metrics.write(2, STEP | {"loss": float("nan"), "tokens": 8192})  # within a second: written at the end
    text = (folder / "metrics.prom").read_text()
    assert [path.name for path in folder.glob("metrics.prom*")] == ["metrics.prom"]
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    values = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert all(
        sample.labels == {"run": "my run", "model": 'a"b'} for family in families.values() for sample in family.samples
    )
    assert {name: family.type for name, family in families.items()} == {
        **dict.fromkeys(("megalin_steps", "megalin_tokens"), "counter"),
        **dict.fromkeys(
            (
                *("megalin_total_steps", "megalin_last_step_timestamp_seconds", "megalin_loss", "megalin_grad_norm"),
                *("megalin_tokens_per_second", "megalin_evaluation_loss"),
            ),
            "gauge",
        ),
    }
    assert all(family.documentation for family in families.values())
    assert values["megalin_loss"] != values["megalin_loss"]  # NaN
    assert values["megalin_evaluation_loss"] == 3.25
    assert (values["megalin_steps_total"], values["megalin_total_steps"]) == (2, 10)
    assert (values["megalin_tokens_total"], values["megalin_tokens_per_second"]) == (8192, 1234.5)


def test_endpoint_serves_this_host_while_the_run_trains(tmp_path):
    pytest.importorskip("prometheus_client")
    port = _free_port()
    with _metrics(tmp_path, prometheus_port=port) as metrics:
        metrics.write(3, STEP)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        with (
            pytest.raises(ConfigError, match=rf"logging.prometheus_port = {port} cannot be opened on 127.0.0.1 \(Addr"),
            _metrics(tmp_path, prometheus_port=port),
        ):
            pass
        with pytest.raises(OSError, match="refused"):  # another address of this host
            socket.create_connection(("127.0.0.2", port), timeout=20)
    assert f'megalin_steps_total{{model="a\\"b",run="{tmp_path.name}"}} 3.0' in text
    assert not (tmp_path / "metrics.prom").exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=20)


@pytest.mark.parametrize("key", ["prometheus_file = true", "prometheus_port = 9464"])
def test_missing_library_is_named_with_the_remedy(tmp_path, monkeypatch, key):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    name, _, value = key.partition(" = ")
    with pytest.raises(
        ConfigError,
        match=rf"logging.{key} needs the library prometheus_client; install it: pip install 'megalin\[prometheus\]'",
    ):
        _metrics(tmp_path, **{name: True if value == "true" else int(value)})


def test_key_of_the_config_opens_it(tmp_path):
    pytest.importorskip("prometheus_client")
    overrides = ["logging.prometheus_file=true", "train.stop_after_steps=1", "data.validation=[]"]
    with process_group(CPU):
        train_here(write_config(tmp_path), tmp_path / "run", *overrides)
    text = (tmp_path / "run" / "metrics.prom").read_text()
    assert 'megalin_steps_total{model="transnormer-glu-tnl",run="run"} 1.0' in text
