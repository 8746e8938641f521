"""Checks before the first update: kernels that fail or differ on some ranks are named."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.dispatch.backend import Choice
from megalin.parallel.agreement import rank
from megalin.train import run_log, start_checks
from megalin.train.run_log import RunLog
from megalin.train.step import apply_gradients
from tests.ranks import run_ranks


def _updated_weights(failing: dict[int, dict[str, str]]) -> tuple[bool, str]:
    """Whether a step whose kernels failed on some ranks has changed a weight, and its error."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    model, optimizer = torch.nn.ParameterList([weight]), torch.optim.AdamW([weight], lr=0.1)
    tested = {"srmsnorm=triton D=64": "", "decay_scan=triton K=128 V=64": ""}
    losses = torch.zeros(1, dtype=torch.float64)
    with patch.object(start_checks, "self_tests", lambda: tested | failing.get(rank(), {})):
        try:
            apply_gradients(model, optimizer, losses, losses, max_grad_norm=None, step=1, compare_kernels=True)
        except KernelError as error:
            return bool(weight.ne(1.0).any()), str(error)
    return bool(weight.ne(1.0).any()), ""


def test_a_kernel_that_fails_on_some_ranks_stops_every_rank_before_the_first_update():
    wrong = {"decay_scan=triton K=128 V=64": "self-test: output 0 is off by 3.0e-01 (bound 1e-02)"}
    for changed, error in run_ranks(3, _updated_weights, {1: wrong}):
        assert not changed
        assert error == (
            "the kernel decay_scan=triton K=128 V=64 fails on rank 1 (self-test: output 0 is off by 3.0e-01 (bound "
            "1e-02)), 1 of 3 ranks with this call, but passes on rank 0; all ranks must compute with the same kernels: "
            "replace or restart the failing GPU, or set MEGALIN_KERNELS=decay_scan=reference on all ranks"
        )


def test_a_kernel_that_fails_on_all_ranks_with_the_call_stops_none(monkeypatch):
    """Stages of a pipeline have other calls."""
    every, own = {"srmsnorm=triton D=64": "off"}, {"tpe=triton E=8": "off"}
    found = [every, every | own, every | own]
    monkeypatch.setattr(start_checks, "world_size", lambda: 3)
    monkeypatch.setattr(start_checks, "on_every_rank", lambda work, kind: found)
    start_checks.check_same_self_tests()
    found[0] = {"srmsnorm=triton D=64": ""}
    with pytest.raises(
        KernelError, match=r"fails on rank 1 \(off\), 2 of 3 ranks with this call, but passes on rank 0"
    ):
        start_checks.check_same_self_tests()


def _warnings() -> list[str]:
    kept: list[str] = []
    run = SimpleNamespace(write_json=lambda path, used: kept.append(str(used)), kernels="kernels.json")
    choices = {"shared": Choice("triton" if rank() else "cuda", "why"), f"of rank {rank()}": Choice("cuda", "")}
    with patch("megalin.ops.dispatch.backend.used", lambda: choices), patch.object(run_log, "_log") as log:
        RunLog.write_kernels(SimpleNamespace(print_line=kept.append, _run=run))
        return [*kept, *(call.args[0] % call.args[1:] for call in log.warning.call_args_list)]


def test_other_kernels_on_a_rank_are_warned_about():
    first, second = run_ranks(2, _warnings)
    assert first[:2] == second
    assert first[0] == "kernels: shared cuda, of rank 0 cuda, of rank 1 cuda"
    assert first[2:] == [
        "shared: rank 1 uses triton (why), lower ranks cuda (why); their rounding and speed may differ"
    ]
