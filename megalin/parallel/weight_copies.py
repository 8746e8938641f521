"""Copies of weights in the compute dtype, which the update writes and FSDP gathers in place of casting the weights.

A copy holds the number of the weight's version (autograd's counter of writes in place) that it was made from. FSDP's
all-gather, and `refresh_weight_copies`, make it again from a weight with another number: one that was loaded,
initialised, or set in any way but by the update, which writes both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from megalin.parallel.tensor_parallel import local

_COPIES = "_weight_copies"
"""Attribute of a model with its copies, in the order of FSDP's units."""


class WeightCopy:
    """Copy of a rank's shard of an fp32 weight, an all-gather extension of FSDP.

    On a shard axis of one rank the unsharded weight is the copy itself: nothing is gathered, freed or copied.

    Attributes:
        parameter: the weight.
        shard: the copy, in the shape of this rank's shard.
        keeps_gradient: FSDP leaves the gradient in the copy's dtype.
    """

    def __init__(self, weight: Any) -> None:
        """`weight`: an FSDPParam with a `param_dtype` of its policy below fp32, before its first all-gather."""
        assert not hasattr(weight, "_unsharded_param"), "the model has run before its optimizer was built"
        self.parameter: nn.Parameter = weight.sharded_param
        self._weight = weight._sharded_local_tensor
        size, dim = weight.padded_sharded_param_size, weight.fsdp_placement.dim
        self._padded = torch.zeros(size, dtype=weight.mp_policy.param_dtype, device=self._weight.device)
        self.shard = self._padded.narrow(dim, 0, self._weight.shape[dim]) if self._weight.numel() else self._padded[:0]
        self.keeps_gradient = weight.mp_policy.reduce_dtype == weight.mp_policy.param_dtype
        self._is_whole = weight.shard_mesh.size() == 1
        self._made_from: tuple[int, int] | None = None
        self._weight.fsdp_pre_all_gather = _with_signature(self._before_all_gather)
        self._weight.fsdp_post_all_gather = self._after_all_gather
        weight._init_extensions()

    def refresh(self) -> None:
        """Makes the copy from the weight if that was written since, on the current CUDA stream."""
        version = self._version()
        if self._made_from != version:
            with torch.no_grad():
                self.shard.copy_(self._weight)
            self._made_from = version

    def mark_written(self) -> None:
        """Declares that the copy was written with the weight, or neither of them."""
        self._made_from = self._version()

    def expire(self) -> None:
        """Makes the copy stale."""
        self._made_from = None

    def _version(self) -> tuple[int, int]:
        """A write through the distributed tensor does not count for its local tensor, nor the other way round."""
        return self.parameter._version, self._weight._version

    def _before_all_gather(
        self,
        mesh: object,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], None]:
        self.refresh()
        return (self._padded.new_empty(0) if self._is_whole else self._padded,), None

    def _after_all_gather(
        self, outputs: Sequence[Tensor], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The unsharded weight, for the first all-gather; later ones write the same memory."""
        assert param_dtype == self._padded.dtype, param_dtype
        return (self._padded if self._is_whole else outputs[0], ()) if out is None else None


def _with_signature(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as a function that stores its signature. FSDP asks for it before each gather of each weight; to find
    it takes ten times as long as to read it."""

    def call(*arguments: Any) -> Any:
        return method(*arguments)

    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return call


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The lowest precision in which FSDP's units of a model compute; fp32 for a model that is not sharded."""
    dtypes = (weight.mp_policy.param_dtype or weight.sharded_param.dtype for weight in _sharded_weights(model))
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


def add_weight_copies(model: nn.Module) -> dict[nn.Parameter, WeightCopy]:
    """Adds a copy to each fp32 weight that a sharded model computes with in a lower precision; before its first
    forward. Returns the copies by their weights. Where gradients are in that precision when the backward ends
    (`shard_model` without accumulation), the weights' `grad` keeps it."""
    copies = [
        WeightCopy(weight)
        for weight in _sharded_weights(model)
        if weight.sharded_param.dtype == torch.float32
        and weight.mp_policy.param_dtype in (torch.bfloat16, torch.float16)
    ]
    for copy in copies:
        if copy.keeps_gradient:
            copy.parameter.grad_dtype = copy.shard.dtype
    setattr(model, _COPIES, copies)
    return {copy.parameter: copy for copy in copies}


def refresh_weight_copies(model: nn.Module) -> None:
    """Makes the copies again whose weights were written since: before a CUDA graph, which reads copies without a check,
    is launched."""
    copies: list[WeightCopy] = getattr(model, _COPIES, [])
    for copy in copies:
        copy.refresh()


def expire_weight_copies(model: nn.Module) -> None:
    """Makes every copy stale, after weights were set by code that may use torch._foreach functions: on distributed
    tensors these do not count as writes."""
    copies: list[WeightCopy] = getattr(model, _COPIES, [])
    for copy in copies:
        copy.expire()


def weight_copy_bytes(model: nn.Module) -> int:
    """Memory of the copies on this rank."""
    copies: list[WeightCopy] = getattr(model, _COPIES, [])
    return sum(local(copy.shard).nbytes for copy in copies)


def _sharded_weights(model: nn.Module) -> Iterator[Any]:
    """FSDP's record of each weight of a model."""
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        yield from () if group is None else group.fsdp_params
