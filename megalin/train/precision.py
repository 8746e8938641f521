"""Settings of a run's compute dtypes: loss scaling of float16, and FP8 matmuls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Self

import pydantic

from megalin.config import Change, Config
from megalin.ops.choices import ALIGNMENT
from megalin.parallel.config import ParallelConfig

if TYPE_CHECKING:
    from megalin.train.config import TrainConfig

LARGEST_SCALE = 2.0**24
"""Bound of the scale, so that gradients that are all zero do not let it grow without end."""


class LossScaleConfig(Config):
    """Dynamic loss scaling of dtype = "float16": the backward starts from the loss times a scale, so that small
    gradients do not become zero, and gradients are divided by it before their norm. A step whose gradients overflow
    does not change the weights, and halves the scale."""

    on_change: ClassVar[Change | None] = "reported"
    initial: float = pydantic.Field(default=65536.0, ge=1.0, le=LARGEST_SCALE)
    """Scale of the first step, a power of two, so that the division is exact."""
    growth_interval: int = pydantic.Field(default=2000, ge=1, le=2**24)
    """Steps in a row without an overflow after which the scale doubles, up to 2^24."""
    minimum: float = pydantic.Field(default=1.0, ge=1.0, le=LARGEST_SCALE)
    """Lowest scale, a power of two. Gradients that overflow with it end the run."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        for name, value in (("initial", self.initial), ("minimum", self.minimum)):
            if math.frexp(value)[0] != 0.5:
                raise ValueError(
                    f"{name} = {value:g} is not a power of two; use {2.0 ** math.floor(math.log2(value)):g}"
                )
        if self.minimum > self.initial:
            raise ValueError(
                f"minimum = {self.minimum:g} is above initial = {self.initial:g}; lower it, or raise initial"
            )
        return self


def loss_scale_problems(train: TrainConfig) -> list[str]:
    """Settings that contradict the compute dtype."""
    if train.loss_scale is None or train.dtype == "float16":
        return []
    return [
        f'train.loss_scale has no effect with train.dtype = "{train.dtype}", whose gradients do not underflow; use '
        'dtype = "float16", or leave it out'
    ]


def float8_problems(train: TrainConfig, parallel: ParallelConfig, length: int) -> list[str]:
    """Settings that contradict FP8 matmuls on any number of ranks."""
    if train.matmul_dtype is None:
        if not train.float8_weight_gradient:
            return []
        return [
            "train.float8_weight_gradient = true has no effect without train.matmul_dtype; set matmul_dtype = "
            '"float8", or leave it out'
        ]
    name = 'train.matmul_dtype = "float8"'
    problems = []
    if train.dtype != "bfloat16":
        problems.append(
            f'{name} with train.dtype = "{train.dtype}": results of FP8 matmuls are bf16 numbers; use dtype = '
            '"bfloat16", or leave matmul_dtype out'
        )
    if train.engine == "deepspeed":
        problems.append(
            f'{name} with train.engine = "deepspeed": scales of weights are computed from the fp32 weights after each '
            'update, which DeepSpeed keeps inside of its optimizer; use engine = "fsdp2", or leave matmul_dtype out'
        )
    problems += mesh_problems(parallel)
    tokens = train.micro_batch_size * length // parallel.cp
    if train.float8_weight_gradient and tokens % ALIGNMENT:
        problems.append(
            f"train.float8_weight_gradient = true with {tokens} tokens on a rank (train.micro_batch_size = "
            f"{train.micro_batch_size} times data.sequence_length = {length} / parallel.cp = {parallel.cp}), over "
            f"which it multiplies; use a multiple of {ALIGNMENT}"
        )
    return problems


def mesh_problems(parallel: ParallelConfig) -> list[str]:
    """Settings of a mesh that FP8 matmuls do not support."""
    name, problems = 'train.matmul_dtype = "float8"', []
    if parallel.tp_overlap == "symmetric_memory" and parallel.may_use_async_tp:
        problems.append(
            f'{name} with parallel.tp_overlap = "symmetric_memory", whose matmuls run in chunks of bf16 numbers; use '
            'tp_overlap = "auto" or "none", or leave matmul_dtype out'
        )
    if parallel.pp > 1 and parallel.pp_schedule == "zero_bubble":
        problems.append(
            f'{name} with parallel.pp_schedule = "zero_bubble", which computes the gradients of weights and of '
            'activations separately, but an FP8 layer gives both; use pp_schedule = "interleaved" or "1f1b"'
        )
    return problems
