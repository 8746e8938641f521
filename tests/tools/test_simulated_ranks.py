"""Simulated ranks of the training benchmark: collectives copy the rank's own tensors."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from megalin.data.batch import Batch
from megalin.parallel import collectives, cross_entropy
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import local
from megalin.train.config import RunConfig
from megalin.train.engine import FullyShardedEngine
from megalin.train.step import accumulate_gradients
from tests.model_runs import model_table

pytestmark = pytest.mark.usefixtures("benchmark_tools")
MODEL = [
    "model.hidden_size=64",
    "model.vocab_size=300",
    "model.layers=[{sublayers=[{type='hgrn2',num_heads=4},{type='glu',intermediate_size=96}]}]",
]


def test_collectives_copy_the_ranks_own_tensors():
    from train_benchmarks.simulated_ranks import simulated_ranks

    x = torch.arange(6.0)
    with simulated_ranks(3, torch.device("cpu")):
        group = dist.group.WORLD
        assert dist.get_world_size() == 3
        gathered = torch.empty(18)
        dist.all_gather_into_tensor(gathered, x)
        assert torch.equal(gathered, x.repeat(3))
        shard = torch.empty(2)
        dist.reduce_scatter_tensor(shard, x)
        assert torch.equal(shard, x[:2])
        received = torch.empty(6)
        dist.all_to_all_single(received, x)
        assert torch.equal(received, x)
        objects = [None] * 3
        dist.all_gather_object(objects, "word")
        assert objects == ["word"] * 3
        assert torch.equal(functional.all_reduce(x, "sum", group), x)
        assert torch.equal(functional.all_gather_tensor(x, 0, group), x.repeat(3))
        assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 0, group), x[:2])
        assert Mesh(ParallelConfig(cp=3), torch.device("cpu")).cp.size == 3
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["parallel.pp=2", "train.global_batch_size=8"], "pipeline stages wait .* leave out parallel.pp"),
        (["train.engine=deepspeed"], "the engine deepspeed creates its own process groups; leave out train.engine"),
        (["parallel.tp=2", "parallel.sequence_parallel=true"], "async .* add parallel.tp_overlap=none"),
    ],
)
def test_options_that_need_other_ranks_are_refused(options, message, capsys, monkeypatch):
    import benchmark_train

    monkeypatch.setattr("sys.argv", ["benchmark_train.py", "tnl-3b", "--simulated-ranks", "2", *options])
    assert benchmark_train.main() == 2
    assert re.search(f"--simulated-ranks 2: {message}", capsys.readouterr().err)


def test_fewer_than_one_rank_is_refused(capsys, monkeypatch):
    import benchmark_train

    monkeypatch.setattr("sys.argv", ["benchmark_train.py", "tnl-3b", "--simulated-ranks", "0"])
    with pytest.raises(SystemExit):
        benchmark_train.parse_arguments()
    assert "--simulated-ranks 0: use at least 2 ranks" in capsys.readouterr().err


def test_ranks_of_a_launcher_are_not_simulated(capsys, monkeypatch):
    import benchmark_train

    monkeypatch.setattr("sys.argv", ["benchmark_train.py", "tnl-3b", "--simulated-ranks", "2"])
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert benchmark_train.main() == 2
    assert "the launcher started 2; start one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "axes",
    [
        ["parallel.cp=2", "parallel.zero=2"],
        ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.tp_overlap=none"],
    ],
    ids=" ".join,
)
def test_a_simulated_rank_runs_the_benchmark(axes, capsys, monkeypatch):
    import benchmark_train

    # The head's kernels, as on GPUs: a label in another rank's slice of the vocabulary makes the loss infinite.
    monkeypatch.setattr(cross_entropy, "choose_backend", lambda *_: "triton")
    sizes = ["train.micro_batch_size=1", "data.sequence_length=64", "train.dtype=float32"]
    options = ["--simulated-ranks", "2", "--warmup", "1", "--steps", "1"]
    monkeypatch.setattr("sys.argv", ["benchmark_train.py", "tnl-3b", *options, *MODEL, *axes, *sizes])
    assert benchmark_train.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ranks"], result["simulated"], result["parallel"][axes[0][9:11]]) == (2, True, 2)
    assert all(5.0 < loss < 7.0 for loss in result["losses"]), result["losses"]


def test_gradients_are_no_pending_results_of_collectives(monkeypatch):
    """On GPUs, where nothing waits for a collective before its result is used: the update takes them by address."""
    from train_benchmarks.simulated_ranks import simulated_ranks

    monkeypatch.setattr(collectives, "SYNCHRONOUS_DEVICES", frozenset())
    train = {"steps": 1, "global_batch_size": 2, "micro_batch_size": 2}
    tables = {"data": {"train": ["shard"], "sequence_length": 36}, "train": train, "parallel": {"tp": 2}}
    run = RunConfig.model_validate({"model": model_table(), "optimizer": {"lr": 1e-2}, **tables})
    tokens = torch.arange(72).view(2, 36)
    batch = Batch(tokens, tokens, torch.zeros_like(tokens, dtype=torch.int32), tokens[:, 0], tokens[:, 0])
    with simulated_ranks(2, torch.device("cpu")):
        mesh = Mesh(run.parallel, torch.device("cpu"))
        model = FullyShardedEngine(run, mesh).model
        accumulate_gradients(model, [batch], mesh)
        gradients = {name: local(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
        assert any(name.endswith("gate.down") for name in gradients)  # a replicated weight of sharded activations
        pending = [name for name, each in gradients.items() if isinstance(each, functional.AsyncCollectiveTensor)]
        assert pending == []
