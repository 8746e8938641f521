"""Operators on DTensors of a model's start: torch derives their placements in milliseconds for each new shape."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalin.checkpoint.tensors import training_tensors
from megalin.model.config import parse_model
from megalin.optim.adamw import build_optimizer
from megalin.optim.config import OptimizerConfig
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import local, with_layout
from megalin.train.build import build_model
from tests.model_runs import CPU, model_table
from tests.ranks import run_ranks


class _Operators(TorchDispatchMode):
    """Records the names of the operators on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def _start(parallel: ParallelConfig, compute_dtype: torch.dtype) -> set[str]:
    mesh = Mesh(parallel, CPU)
    with _Operators() as operators:
        model = build_model(
            parse_model(model_table(), "the test"),
            mesh,
            compute_dtype=compute_dtype,
            recompute=False,
            compile_blocks=False,
            seed=1,
        )
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3), no_decay=())
        training_tensors(model, optimizer)
        for parameter in model.parameters():
            assert parameter.dtype == torch.promote_types(compute_dtype, torch.float32)
            parameter.grad = with_layout(torch.ones_like(local(parameter.detach())), parameter)
        optimizer.state.clear()
        optimizer.step()
    return operators.names


def test_a_start_calls_no_operator_on_dtensors_but_detach() -> None:
    for names in run_ranks(2, _start, ParallelConfig(tp=2), torch.float64) + run_ranks(
        2, _start, ParallelConfig(), torch.float32
    ):
        assert names <= {"aten.detach.default"}, names
