"""Weight initialisation: every value is a function of (seed, global name, part), never of the mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalin.parallel.agreement import rank
from megalin.parallel.tensor_parallel import assign
from megalin.slow_work import slow_work

FillFunction = Callable[[Tensor, torch.Generator], object]
"""Fills a full fp32 tensor in place from a generator."""


def normal(std: float) -> FillFunction:
    """Normal distribution N(0, std^2)."""
    return lambda full, generator: full.normal_(0.0, std, generator=generator)


def uniform(bound: float) -> FillFunction:
    """Uniform distribution on [-bound, bound]."""
    return lambda full, generator: full.uniform_(-bound, bound, generator=generator)


def constant(value: Tensor | float) -> FillFunction:
    """A given tensor (or number), the same on every mesh."""
    return lambda full, generator: full.copy_(torch.as_tensor(value))


class Initializer:
    """Draws the parameters of one module; the only source of randomness in a model's initialisation.

    The full tensor is drawn in fp32 on the parameter's device from a generator seeded by (seed, name, part), then
    each rank keeps its shard. A fused parameter [parts, out, in] is drawn part by part. Peak memory: one parameter.
    """

    def __init__(self, seed: int, prefix: str = "") -> None:
        self.seed, self.prefix = seed, prefix

    def child(self, prefix: str) -> Initializer:
        """The initializer of the module whose global name is `prefix`."""
        return Initializer(self.seed, f"{prefix}." if prefix else "")

    def __call__(self, parameter: nn.Parameter, name: str, initialise: FillFunction) -> None:
        """Fills the module's parameter `name` by `initialise`."""
        full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        for part, matrix in enumerate(full if full.dim() == 3 else full[None]):
            initialise(matrix, self._generator(f"{self.prefix}{name}", part, full.device))
        assign(parameter, full)

    def _generator(self, name: str, part: int, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}/{part}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def init_weights(model: nn.Module, seed: int) -> None:
    """Fills all parameters and buffers of a materialised `model` by the `init_weights(initializer)` of its modules.

    Children come before their parents, which may derive buffers from the children's weights. The first rank prints
    its progress if that takes more than two seconds.
    """
    initializer = Initializer(seed)
    modules = list(model.named_modules())
    elements = sum(parameter.numel() for parameter in model.parameters())
    filled = 0
    with slow_work("initialising the weights", shown=rank() == 0) as report:
        for name, module in reversed(modules):
            if hasattr(module, "init_weights"):
                module.init_weights(initializer.child(name))
            filled += sum(parameter.numel() for parameter in module.parameters(recurse=False))
            report(filled / max(elements, 1))
