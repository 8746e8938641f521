"""Tensors of a training run by global name: weights and AdamW's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalin.parallel.tensor_parallel import sharded_zeros_like

OPTIMIZER_PREFIX = "optim."
"""Prefix of the names of optimizer tensors, which no weight has."""


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """References to all tensors that a step of AdamW reads and writes: saving reads them, loading writes them in place.

    `<name>` is a weight, `optim.state.<name>.{exp_avg,exp_avg_sq,step}` its moments (placed as the weight) and its
    step count (0-dim fp32). Tied weights appear once. If the optimizer has not stepped, zero state is created as in its
    first step, so that loading into a new optimizer works.
    """
    tensors: dict[str, Tensor] = dict(weights(model))
    names = {id(parameter): name for name, parameter in tensors.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert id(parameter) in names, f"the optimizer holds a parameter {tuple(parameter.shape)} not in the model"
            state = optimizer.state[parameter]
            if not state:
                state.update(initial_state(group, parameter))
            for key, tensor in state.items():
                tensors[optimizer_name(names[id(parameter)], key)] = tensor
    return tensors


def optimizer_name(name: str, key: str) -> str:
    """Name in a checkpoint of the entry `key` of the optimizer state of the parameter `name`."""
    return f"{OPTIMIZER_PREFIX}state.{name}.{key}"


def initial_state(group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter before its first step, placed according to the options of its group."""
    on_device = bool(group.get("fused") or group.get("capturable"))
    return {
        "step": torch.zeros((), device=parameter.device if on_device else "cpu"),
        "exp_avg": sharded_zeros_like(parameter),
        "exp_avg_sq": sharded_zeros_like(parameter),
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights by global name; tied ones once."""
    named = dict(model.named_parameters())
    assert not any(name.startswith(OPTIMIZER_PREFIX) for name in named), sorted(named)
    return dict(named)
