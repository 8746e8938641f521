"""Checks before the first step: ranks with another environment, library or code are named with their values."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from megalin.errors import ConfigError, KernelError
from megalin.ops.dispatch.backend import Choice
from megalin.parallel.agreement import rank
from megalin.train import run_log, start_checks
from megalin.train.run_log import RunLog
from megalin.train.start_checks import check_same_start, code_digest
from megalin.train.step import apply_gradients
from tests.ranks import run_ranks


def _differing(rank_of_change: int) -> list[str]:
    """Messages of all kinds of differences, of which rank `rank_of_change` is the only one to differ."""
    found = []
    other = rank() == rank_of_change
    for environment, versions, digest in (
        ({"MEGALIN_CACHE": "elsewhere"}, {}, None),
        ({"MEGALIN_KERNELS": "reference"}, {}, None),
        ({}, {"torch": "1.0"}, None),
        ({}, {}, "abc"),
    ):
        with patch.dict(os.environ, environment if other else {}):
            known = start_checks.versions()
            with (
                patch.object(start_checks, "versions", lambda: known | (versions if other else {})),  # noqa: B023
                patch.object(start_checks, "code_digest", lambda: digest if other and digest else "def"),  # noqa: B023
            ):
                try:
                    check_same_start()
                    found.append("")
                except ConfigError as error:
                    found.append(str(error).partition("\n  ")[2])
    return found


def test_difference_between_ranks_is_named_with_its_values():
    for messages in run_ranks(3, _differing, 2):
        assert messages == [
            "",
            "rank 2 has MEGALIN_KERNELS = reference, rank 0 not set",
            f"rank 2 has the version of torch = 1.0, rank 0 {torch.__version__}",
            "rank 2 has the sha256 of megalin's code = abc, rank 0 def",
        ]


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


def test_digest_of_the_code_follows_names_and_contents(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cu").write_text("x")
    monkeypatch.setattr("megalin.__file__", str(tmp_path / "__init__.py"))
    found = set()
    for change in (
        lambda: None,
        lambda: Path(tmp_path, "kernels", "a.cu").write_text("y"),
        lambda: Path(tmp_path, "kernels", "a.cu").rename(tmp_path / "b.cu"),
        lambda: Path(tmp_path, "b.py").write_text(""),
    ):
        change()
        found.add(code_digest.__wrapped__())
    assert len(found) == 4
    (tmp_path / "notes.txt").write_text("no code")
    assert code_digest.__wrapped__() in found


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
