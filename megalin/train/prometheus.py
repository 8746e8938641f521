"""Prometheus as an optional destination of a run's newest metrics: a text file, and an endpoint on this host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalin.errors import ConfigError
from megalin.optional import require
from megalin.train.jsonl import BestEffortWriter
from megalin.train.weights_and_biases import LoggingConfig

FILE_NAME = "metrics.prom"
"""File of a run folder in the format of node exporter's textfile collector."""
_ADDRESS = "127.0.0.1"
_FILE_SECONDS = 1.0
"""Least time between two writes of the file."""
_COUNTERS = {"steps": "Finished steps (optimizer updates)", "tokens": "Training tokens so far"}
_GAUGES = {
    "total_steps": "Steps of the whole run",
    "last_step_timestamp_seconds": "Unix time at which the newest step was logged",
    "loss": "Training loss of the newest step in nats a token",
    "evaluation_loss": "Held-out loss of the newest evaluation in nats a token",
    "learning_rate": "Learning rate of the newest step",
    "grad_norm": "L2 norm of the newest step's gradient before clipping",
    "tokens_per_second": "Training tokens a second over all ranks",
    "step_seconds": "Duration of the newest step",
    "data_wait_seconds": "Part of the newest step for which a rank waited for data, of the rank that waited longest",
    "peak_memory_bytes": "Peak memory of rank 0, allocated on a GPU or resident on a CPU",
    "model_flops_utilization": "The model's FLOPs as a fraction of the GPUs' dense bf16 rate",
}


class Prometheus:
    """The newest value of each metric with the labels run and model, on rank 0; a sink of `Metrics`."""

    def __init__(self, folder: Path, logging: LoggingConfig, *, total_steps: int, model: str) -> None:
        """Opens the endpoint if the config has a port.

        Args:
            model: the label that names the model.

        Raises:
            ConfigError: prometheus_client is not installed, or the port is in use.
        """
        key = "prometheus_file = true" if logging.prometheus_file else f"prometheus_port = {logging.prometheus_port}"
        self._library = require("prometheus_client", f"logging.{key}", extra="prometheus")
        self._families = require("prometheus_client.core", f"logging.{key}", extra="prometheus")
        self._labels = {"run": folder.absolute().name, "model": model}
        self._total_steps = total_steps
        self._values: dict[str, float] = {}
        self._registry = self._library.CollectorRegistry()
        self._registry.register(self)
        self._file = folder / FILE_NAME if logging.prometheus_file else None
        self._writer, self._next_write = BestEffortWriter(str(self._file)), 0.0
        self._server = None if logging.prometheus_port is None else self._serve(logging.prometheus_port)

    def _serve(self, port: int) -> Any:
        try:
            server, _ = self._library.start_http_server(port, addr=_ADDRESS, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"logging.prometheus_port = {port} cannot be opened on {_ADDRESS} ({error.strerror}); give each run of "
                "a host a port of its own"
            ) from None
        return server

    def collect(self) -> Iterator[Any]:
        """Yields the families of metrics, as prometheus_client reads them."""
        values, labels = self._values, self._labels
        for make, helps in (
            (self._families.CounterMetricFamily, _COUNTERS),
            (self._families.GaugeMetricFamily, _GAUGES),
        ):
            for name in (name for name in helps if name in values):
                family = make(f"megalin_{name}", helps[name], labels=list(labels))
                family.add_metric(list(labels.values()), values[name])
                yield family

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Takes the values of a step; the file has them within a second, or when the run ends."""
        run = {"steps": step, "total_steps": self._total_steps, "last_step_timestamp_seconds": time.time()}
        self._values = {**self._values, **values, **run}  # one assignment: the endpoint's thread reads old or new ones
        if time.monotonic() >= self._next_write:
            self._write_file()

    def _write_file(self) -> None:
        path = self._file
        if path is not None:
            self._next_write = time.monotonic() + _FILE_SECONDS
            self._writer.attempt(lambda: self._library.write_to_textfile(str(path), self._registry))

    def close(self) -> None:
        """Writes the file once more, which stays, and closes the endpoint."""
        if self._values:
            self._write_file()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
