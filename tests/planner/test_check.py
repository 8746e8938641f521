"""Memory check before a run: only a run that cannot fit is refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from megalin.errors import ConfigError
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.config import ParallelConfig
from megalin.planner.check import MARGIN, check_memory
from megalin.planner.estimate import Estimator
from megalin.planner.hardware import HARDWARE
from megalin.planner.workload import ParallelLayout, layout_of, workload_of
from megalin.train.config import RunConfig, load_run_config
from tests.cases import TOY
from tests.model_runs import write_config


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def config(path: Path) -> RunConfig:
    return load_run_config(path, ["train.micro_batch_size=4"])


@pytest.fixture(scope="module")
def needed(config: RunConfig) -> int:
    """The run's estimated memory on one rank."""
    assert isinstance(config.model, ModelConfig)
    estimator = Estimator(workload_of(config, config.model), HARDWARE["h200"])
    return estimator.estimate(layout_of(config, 1), refined=False).memory.total


def test_the_layout_and_the_workload_are_the_runs(path):
    overrides = [
        "parallel.tp=2",
        "parallel.cp=3",
        "parallel.zero=2",
        "train.recompute=true",
        "train.micro_batch_size=1",
    ]
    config = load_run_config(path, overrides)
    assert isinstance(config.model, ModelConfig)
    layout = layout_of(config, 12)
    assert layout == ParallelLayout(ParallelConfig(tp=2, cp=3, zero=2), 2, 1, 2, True)
    assert layout.name() == "tp 2, cp 3, dp 2, ZeRO 2, micro-batches 2 x 1, recompute"
    again = load_run_config(path, layout.overrides())
    assert layout_of(again, 12) == layout
    workload = workload_of(config, config.model)
    assert (workload.length, workload.global_batch_size, workload.compiled) == (36, 4, False)


def test_overrides_of_a_layout_replace_all_of_the_file(path):
    """Layouts without sequence parallelism and interleaving, applied to a config that has both."""
    own = ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.pp=2", "parallel.pp_stages_per_rank=2"]
    own += ['parallel.pp_schedule="interleaved"', "train.micro_batch_size=1", "parallel.tp_overlap=symmetric_memory"]
    assert load_run_config(path, own).parallel.pp_stages_per_rank == 2
    for parallel in (ParallelConfig(pp=2, zero=1), ParallelConfig(tp=2, zero=3)):
        offered = ParallelLayout(parallel, 2, 1, 2, False)
        assert load_run_config(path, [*own, *offered.overrides()]).parallel == offered.parallel


def test_a_run_that_fits_or_nearly_fits_starts(config, needed):
    check_memory(config, 1, needed)
    check_memory(config, 1, int(needed / MARGIN) + 1)


def test_symmetric_memory_of_the_config_is_counted(path):
    overrides = ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.tp_overlap=symmetric_memory"]
    config = load_run_config(path, [*overrides, "train.micro_batch_size=4"])
    assert isinstance(config.model, ModelConfig)
    estimator = Estimator(workload_of(config, config.model), HARDWARE["h200"])
    memory = estimator.estimate(layout_of(config, 2), refined=False).memory
    assert memory.symmetric_memory > 0
    check_memory(config, 2, memory.total)
    with pytest.raises(ConfigError, match=r"needs about .*symmetric memory"):
        check_memory(config, 2, int(memory.total / MARGIN) - 1)


def test_an_estimate_beyond_the_margin_is_refused_with_what_fits(config, needed):
    memory = int(needed / MARGIN) - 1
    with pytest.raises(
        ConfigError, match=r"train.micro_batch_size = 4 .*: needs about .* GiB \(weights .*activations"
    ) as caught:
        check_memory(config, 1, memory)
    assert "these layouts fit on 1 GPUs: parallel.tp=1 parallel.cp=1 parallel.pp=1 train.micro_batch_size=" in str(
        caught.value
    )
    assert str(caught.value).endswith("Pass --no-memory-check to start the run anyway")


def test_weights_and_moments_that_alone_do_not_fit_are_refused(config):
    with pytest.raises(ConfigError, match=r"weights, gradients and optimizer state alone need .* use more GPUs"):
        check_memory(config, 1, 100_000)


class Hook:
    """Update hook of 40 bytes a weight in a rank's shards."""

    name = "hook"

    def memory_bytes(self, elements: int) -> int:
        return 40 * elements

    def start(self, weights: Mapping[str, Tensor]) -> None:
        raise AssertionError("the memory check builds nothing")

    def after_update(self, weights: Mapping[str, Tensor], *, applied: Tensor, step: int) -> None:
        raise AssertionError("the memory check builds nothing")

    def tensors(self) -> Mapping[str, Tensor]:
        raise AssertionError("the memory check builds nothing")


def test_the_state_of_update_hooks_is_counted(config, needed):
    assert isinstance(config.model, ModelConfig)
    state = 40 * sum(parameter.numel() for parameter in LanguageModel(config.model).parameters())
    with pytest.raises(ConfigError, match="needs about"):
        check_memory(config, 1, int((needed + state) / MARGIN) - 1, [Hook()])
    check_memory(config, 1, int((needed + state) / MARGIN) + 1, [Hook()])
    with pytest.raises(ConfigError, match="optimizer state alone need"):
        check_memory(config, 1, state, [Hook()])


def test_the_sums_of_a_tree_reduction_are_counted(path):
    """Of four micro-batches: one sum for each level, the leaf, and two copies while ranks are added."""
    tree = ["train.reduction=tree", "train.micro_batch_size=1", "parallel.zero=1"]
    config, collective = load_run_config(path, tree), load_run_config(path, tree[1:])
    assert isinstance(config.model, ModelConfig)
    sums = 5 * 4 * sum(parameter.numel() for parameter in LanguageModel(config.model).parameters())
    estimator = Estimator(workload_of(collective, config.model), HARDWARE["h200"])
    needed = estimator.estimate(layout_of(collective, 1), refined=False).memory.total + sums
    assert check_memory(config, 1, needed) == needed
    with pytest.raises(ConfigError, match=r"needs about .* use more GPUs"):
        check_memory(config, 1, int(needed / MARGIN) - 1)


def test_external_mixers_are_not_traced_but_their_parameters_are_counted(config):
    table = {"vocab_size": 257, "hidden_size": 32, "layers": [{"sublayers": [TOY]}]}
    model = ModelConfig.model_validate(table)
    external = config.model_copy(update={"model": model})
    model_states = Estimator(workload_of(external, model), HARDWARE["h200"]).model_state_bytes(layout_of(external, 1))
    check_memory(external, 1, model_states)
    with pytest.raises(ConfigError, match=r"alone need .* use more GPUs"):
        check_memory(external, 1, model_states - 1)


def test_deepspeed_shards_in_its_own_way(path):
    check_memory(load_run_config(path, ["train.engine=deepspeed"]), 1, 1)
