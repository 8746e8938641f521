"""A training step and a decoding step of every preset at its true widths, without running: launches by chip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalin.model.config import EncoderConfig, ModelConfig
from megalin.model.encoder import Encoder
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset
from megalin.ops import documents
from megalin.ops.dispatch import backend as backends
from megalin.ops.documents import DocumentBounds
from megalin.parallel import sequence_documents

from .launch import CHIPS, KernelLaunch
from .recorder import Seen, launches_not_run

BATCH, LENGTH = 2, 2048
PREDICTED = 128
"""Masked tokens of an encoder's sequence."""


class OpsOnMeta(TorchDispatchMode):
    """Runs the launchers of megalin's ops on meta tensors, in place of their fakes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megalin":
            return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def faked_chip(chip: int) -> Iterator[None]:
    """Context in which torch reports a GPU of a compute capability (times ten)."""
    from megalin._triton.dispatch.dependent_launch import dependent_launch

    capability = divmod(chip, 10)
    dependent_launch.cache_clear()
    try:
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
            mock.patch.object(torch.cuda, "get_device_name", return_value=f"sm_{chip}"),
            mock.patch.dict("os.environ", {"MEGALIN_TUNE": "0"}),
        ):
            yield
    finally:
        dependent_launch.cache_clear()


def _two_documents(ids: Tensor) -> DocumentBounds:
    """Bounds of two documents a sequence, in place of counting those of ids without values."""
    return DocumentBounds(2 * ids.shape[0], ids.shape[1] // 2)


@contextmanager
def triton_kernels() -> Iterator[None]:
    """Context in which every op that has a Triton kernel takes it, without a self-test."""
    backends._register_all()
    kernels = backends._kernels.items()
    own = {op: kernel._replace(order=("triton",)) for op, kernel in kernels if "triton" in kernel.order}
    with mock.patch.dict(backends._kernels, own), backends.assume_kernels():
        yield


def launches_of_presets(names: Sequence[str], chips: Sequence[int] = CHIPS) -> dict[KernelLaunch, set[int]]:
    """Launches of a step of each preset in bf16, with the chips whose dispatcher makes them."""
    found: dict[KernelLaunch, set[int]] = defaultdict(set)
    for chip in chips:
        for name in names:
            run_on_meta(load_preset(name).model, chip, lambda launch, chip=chip: found[launch].add(chip))
    return found


def run_on_meta(config: ModelConfig | EncoderConfig, chip: int, seen: Seen) -> None:
    """Calls `seen` with the launches of the steps of a model, on one block of each entry of `layers`."""
    model = bf16_model(config)
    with ExitStack() as stack:
        for context in (faked_chip(chip), triton_kernels(), OpsOnMeta(), launches_not_run(seen)):
            stack.enter_context(context)
        for module in (documents, sequence_documents):
            stack.enter_context(mock.patch.object(module, "document_bounds", _two_documents))
        for inputs in batches(model.config, "meta"):
            model.loss_sums(inputs).sum().backward()
        if isinstance(model, LanguageModel):
            decode(model)


def bf16_model(config: ModelConfig | EncoderConfig) -> LanguageModel | Encoder:
    """One block of each entry of `layers` on meta, in the compute dtypes of training in bf16."""
    blocks = [block.model_copy(update={"repeat": 1}) for block in config.layers]
    config = config.model_copy(update={"layers": blocks})
    model = Encoder(config) if isinstance(config, EncoderConfig) else LanguageModel(config)
    model.to(torch.bfloat16)
    for module in model.full_precision_modules():
        module.to(torch.float32)
    return model


def batches(config: ModelConfig | EncoderConfig, device: str) -> list[dict[str, Tensor]]:
    """Inputs of a training step: a batch of one document a sequence, and for a decoder one of two."""
    length = LENGTH if isinstance(config, ModelConfig) else min(LENGTH, config.max_positions)
    tokens = torch.zeros(BATCH, length, dtype=torch.int64, device=device)
    if isinstance(config, ModelConfig):
        second = torch.arange(length, dtype=torch.int32, device=device) >= length // 2
        inputs = {"tokens": tokens, "labels": tokens}
        return [inputs, {**inputs, "document_ids": second.to(torch.int32).repeat(BATCH, 1)}]
    picked = tokens[:, :PREDICTED]
    return [{"tokens": tokens, "masked_positions": picked, "masked_labels": picked, "sequence_labels": tokens[:, 0]}]


@torch.no_grad()
def decode(model: LanguageModel) -> None:
    """Runs one decoding step."""
    model.eval()
    state = model.reserve(model.initial_state(BATCH), LENGTH)
    model.step(torch.zeros(BATCH, dtype=torch.int64, device=model.embedding.weight.device), state)
