"""Choice and refusal of CUDA graphs of steps; tests/gpu/test_cuda_graphs_gpu.py compares the bits of those that run."""

from __future__ import annotations

import re
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalin.data.batch import Batch
from megalin.errors import ConfigError
from megalin.parallel import sequence_documents
from megalin.train import cuda_graphs
from megalin.train.config import RunConfig
from megalin.train.cuda_graphs import WARM_UP_STEPS, GradientGraph, first_obstacle, recorded_waits
from megalin.train.graph_choice import (
    StepMemory,
    automatic_obstacle,
    choice_line,
    growth_obstacle,
    leaves_no_evaluation,
    memory_obstacle,
)
from tests.cases import TOY, build, model
from tests.model_runs import model_table
from tests.ranks import run_ranks


def graph_on(device: str) -> GradientGraph:
    mesh: Any = SimpleNamespace(device=torch.device(device))
    model: Any = None
    return GradientGraph(model, mesh)


def test_no_gpu_is_an_error():
    with pytest.raises(ConfigError, match=r"train.cuda_graphs = true, but this run computes on a cpu device"):
        graph_on("cpu")


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_whose_addresses_nccl_would_register_are_an_error(monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    with pytest.raises(ConfigError, match=r"expandable_segments:True.*set NCCL_GRAPH_REGISTER=0 in the environment"):
        graph_on("cuda")


ATTENTION = [
    {"type": "softmax", "num_heads": 12},
    {"type": "shared_key_attention", "num_heads": 12, "window": 7, "residual": "two_hop"},
    {"type": "glu", "intermediate_size": 36},
]


def test_host_does_not_read_documents_for_attention_by_masks(monkeypatch):
    packed = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [0] * 16], dtype=torch.int32)
    tokens = torch.randint(380, packed.shape)
    losses = {}
    for backend in ("auto", "mask"):
        sublayers = [{**each, "backend": backend} if "num_heads" in each else each for each in ATTENTION]
        built = build(model({"sublayers": sublayers}))
        if backend == "mask":
            monkeypatch.setattr(sequence_documents, "find_documents", None)
        losses[backend] = built(tokens, labels=tokens, document_ids=packed).token_losses
    assert torch.equal(losses["auto"], losses["mask"])


GIB = 2**30


def run_config(*sublayers: dict[str, Any], graphs: Any = "auto", **tables: Any) -> RunConfig:
    """Config of a run of one rank, by default of two mixers of megalin."""
    table = model_table()
    if sublayers:
        table["layers"] = [{"sublayers": [*sublayers, {"type": "glu", "intermediate_size": 48}]}]
    return RunConfig.model_validate(
        {
            "model": table,
            "data": {"train": ["shard"], "sequence_length": 36},
            "train": {"steps": 9, "global_batch_size": 64, "micro_batch_size": 2, "cuda_graphs": graphs}
            | tables.get("train", {}),
            "optimizer": {"lr": 1e-2},
            "parallel": tables.get("parallel", {}),
        }
    )


def obstacle(config: RunConfig, *, device: str = "cuda", world_size: int = 1, **environment: str) -> str | None:
    return automatic_obstacle(config, device=device, world_size=world_size, environment=environment)


def test_graphs_are_automatic_on_one_gpu():
    config = run_config()
    assert obstacle(config) is None
    assert obstacle(run_config({"type": "softmax", "num_heads": 2})) is None
    assert choice_line(config, device="cuda", world_size=1, environment={}) == (
        "CUDA graphs: after three steps, if memory allows"
    )
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}
    assert obstacle(config, **segments) is None
    assert "one launch a step" in (
        choice_line(run_config(graphs=True), device="cuda", world_size=8, environment={}) or ""
    )
    assert choice_line(run_config(graphs=False), device="cuda", world_size=1, environment={}) is None
    assert choice_line(config, device="cpu", world_size=1, environment={}) is None


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (run_config(), {"device": "cpu"}, "a cpu device"),
        (run_config(train={"engine": "deepspeed"}), {}, 'train.engine = "deepspeed"'),
        (run_config(parallel={"pp": 2}), {"world_size": 2}, "parallel.pp = 2"),
        (run_config(TOY), {}, f"the mixer {TOY['type']} of another package"),
        (run_config(), {"world_size": 2}, "2 ranks, whose graphs have not been .*; train.cuda_graphs = true overrides"),
        (run_config(train={"global_batch_size": 66}), {}, "33 micro-batches a step, more than 32"),
        (run_config(), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "remedy: NCCL_GRAPH_REGISTER=0"),
    ],
    ids=["cpu", "deepspeed", "pp", "plugin", "ranks", "micro_batches", "segments"],
)
def test_a_run_without_automatic_graphs_has_a_reason(config, options, reason):
    assert re.search(reason, obstacle(config, **options) or "")


def test_memory_of_a_step_and_a_tenth_must_be_free():
    assert memory_obstacle(StepMemory(11 * GIB, GIB, 11 * GIB)) is None
    reason = memory_obstacle(StepMemory(11 * GIB, GIB, 11 * GIB - 1))
    assert reason is not None
    assert "keeps the 10.00 GiB of a step, and 11.00 GiB are free, less than 1.1 times" in reason


def test_a_graph_stays_during_evaluations_where_memory_of_one_and_a_half_steps_is_free():
    assert not leaves_no_evaluation(StepMemory(11 * GIB, GIB, 15 * GIB))
    assert leaves_no_evaluation(StepMemory(11 * GIB, GIB, 15 * GIB - 1))


def test_a_graph_may_add_a_tenth_or_the_granularity_of_the_allocator():
    assert growth_obstacle(10 * GIB, 11 * GIB) is None
    assert growth_obstacle(GIB, GIB + 2**28) is None
    assert "reserves 11.00 GiB, more than 10% above the 10.00 GiB" in (growth_obstacle(10 * GIB, 11 * GIB + 1) or "")


class FakeDevice:
    """Stand-in for torch.cuda whose allocator reserves planted bytes; replays count."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, captured: int, free: int = 100 * GIB, documents: bool = False
    ) -> None:
        self.reserved, self.captured, self.replays, self.eager_calls = GIB, captured, 0, 0
        graph = SimpleNamespace(replay=self._replay, reset=lambda: None)
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Stream": lambda device: stream,
            "current_stream": lambda: stream,
            "stream": lambda stream: nullcontext(),
            "synchronize": lambda device: None,
            "empty_cache": self._release,
            "memory_reserved": lambda device: self.reserved,
            "mem_get_info": lambda device: (free, free),
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: None,
            "CUDAGraph": lambda: graph,
            "graph": lambda *_, **__: nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(cuda_graphs, "ordered_cuda_streams", lambda model: nullcontext())
        monkeypatch.setattr(cuda_graphs, "accumulate_gradients", self._accumulate)
        self.model = torch.nn.Linear(2, 2)
        mesh: Any = SimpleNamespace(device=torch.device("cuda"))
        self.graph = GradientGraph(self.model, mesh, automatic=True, reads_documents=documents)
        self.in_step = lambda: None

    def _release(self) -> None:
        self.reserved = GIB

    def _replay(self) -> None:
        self.replays += 1

    def _accumulate(self, model: torch.nn.Module, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.eager_calls += 1
        step = {1: 8 * GIB, WARM_UP_STEPS + 1: self.captured - GIB}.get(self.eager_calls, 3 * GIB)
        self.reserved = max(self.reserved, GIB + step)  # the first step compiles, the fourth is the capture
        self.in_step()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return torch.zeros(1), torch.ones(1)

    def run(self, steps: int) -> list[str]:
        """Runs steps and returns the lines on the choice."""
        batch = Batch(*(torch.zeros(1, 4, dtype=torch.int64) for _ in range(3)), torch.zeros(1, dtype=torch.int64))
        for _ in range(steps):
            self.model.zero_grad()
            self.graph.accumulate_gradients([batch])
            assert self.model.weight.grad is not None
        return self.graph.report_lines()


def test_an_automatic_graph_replays_after_the_eager_steps_and_one_capture(monkeypatch):
    device = FakeDevice(monkeypatch, captured=4 * GIB + 2**27)
    assert device.run(6) == ["CUDA graphs: one launch a step from here on; 4.12 GiB reserved, 4.00 GiB by eager steps"]
    assert (device.eager_calls, device.replays, device.graph.is_captured) == (WARM_UP_STEPS + 1, 3, True)
    assert device.run(1) == []


def test_a_graph_is_dropped_before_evaluations_where_they_need_its_memory(monkeypatch):
    device = FakeDevice(monkeypatch, captured=4 * GIB, free=4 * GIB)
    (line,) = device.run(WARM_UP_STEPS + 1)
    assert "dropped before an evaluation, to make room for it, and captured again after it" in line
    device.graph.before_evaluation()
    assert (device.reserved, device.graph.is_captured) == (GIB, False)
    assert all(parameter.grad is None for parameter in device.model.parameters())
    assert device.run(2) == []
    assert (device.reserved, device.eager_calls, device.replays) == (4 * GIB, WARM_UP_STEPS + 2, 3)


@pytest.mark.parametrize("free", [100 * GIB, int(4.5 * GIB)])
def test_a_graph_stays_during_evaluations_where_both_have_room(monkeypatch, free):
    device = FakeDevice(monkeypatch, captured=4 * GIB, free=free)
    device.run(WARM_UP_STEPS + 1)
    device.graph.before_evaluation()
    assert device.graph.is_captured


def test_steps_are_eager_where_memory_is_short(monkeypatch):
    device = FakeDevice(monkeypatch, captured=4 * GIB, free=3 * GIB)
    (line,) = device.run(6)
    assert "CUDA graphs: none: a graph keeps the 3.00 GiB of a step" in line
    assert (device.eager_calls, device.replays, device.graph.is_captured) == (6, 0, False)


def test_a_graph_that_adds_too_much_memory_is_dropped(monkeypatch):
    device = FakeDevice(monkeypatch, captured=5 * GIB)
    (line,) = device.run(6)
    assert "CUDA graphs: none: with a graph the run reserves 5.00 GiB" in line
    assert (device.eager_calls, device.replays, device.graph.is_captured) == (7, 0, False)


@pytest.mark.filterwarnings("ignore:called a synchronizing")
def test_steps_in_which_the_host_waits_are_eager(monkeypatch):
    device = FakeDevice(monkeypatch, captured=4 * GIB)
    device.in_step = lambda: warnings.warn("called a synchronizing CUDA operation (Triggered at x)", stacklevel=1)
    (line,) = device.run(WARM_UP_STEPS + 1)
    assert "CUDA graphs: none: the host waits for the device in a step, at " in line
    assert __file__ in line


def test_a_capture_that_fails_names_the_remedy(monkeypatch):
    device = FakeDevice(monkeypatch, captured=4 * GIB)
    device.run(WARM_UP_STEPS)

    def fail() -> None:
        raise RuntimeError("operation not permitted")

    device.in_step = fail
    with pytest.raises(ConfigError, match=r'"auto": a step cannot be captured.*not permitted.*; set it to false'):
        device.run(1)


def test_waits_of_any_thread_are_recorded_and_other_warnings_shown(monkeypatch):
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    places: list[str] = []
    with recorded_waits(places):
        warnings.warn("another warning", stacklevel=1)
        wait()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert len(places) == 2
    assert all(place.startswith(__file__) for place in places)
    assert (shown, modes) == (["another warning"], ["warn", 0])


def _on_two_ranks(own: list[str | None]) -> str | None:
    return first_obstacle(own[dist.get_rank()])


@pytest.mark.parametrize(
    ("own", "found"), [((None, "too large"), "rank 1: too large"), ((None, None), None), (("a", "b"), "rank 0: a")]
)
def test_ranks_choose_a_graph_together(own, found):
    assert run_ranks(2, _on_two_ranks, own) == [found] * 2
