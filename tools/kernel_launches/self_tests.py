"""Self-tests of the ops that presets run, without running: their cases, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megalin.model.config import EncoderConfig, ModelConfig
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch import self_test
from megalin.ops.dispatch.operands import Case

from .preset_steps import OpsOnMeta, faked_chip, run_on_meta, triton_kernels
from .recorder import Seen, launches_not_run


def cases_of(config: ModelConfig | EncoderConfig, chip: int, seen: Seen) -> set[tuple[str, Case]]:
    """Ops with a Triton kernel in the steps of a model, and the cases of their self-tests; calls `seen` with the
    launches of the steps."""
    found = set()
    choose = backends.choose

    def recorded(op: str, *arguments: Any, case: Case = (), **options: Any) -> str:
        choice = choose(op, *arguments, case=case, **options)
        if choice == "triton":
            found.add((op, case))
        return choice

    with mock.patch.object(backends, "choose", recorded):
        run_on_meta(config, chip, seen)
    return found


def run_self_test_on_meta(op: str, case: Case, chip: int, seen: Seen) -> None:
    """Calls `seen` with the launches of a self-test."""
    run = self_test._run

    def kernels_alone(function: Any, inputs: Sequence[Tensor], differentiable: int | None) -> dict[str, Tensor]:
        return {} if inputs[0].dtype == torch.float64 else run(function, inputs, differentiable)

    with ExitStack() as stack:
        for context in (faked_chip(chip), triton_kernels(), OpsOnMeta(), launches_not_run(seen)):
            stack.enter_context(context)
        stack.enter_context(mock.patch.object(self_test, "_run", kernels_alone))
        backends._kernels[op].self_test("triton", "meta", dict(case))
