"""Mismatches between the heads of an encoder and the samples of its data."""

from __future__ import annotations

from collections.abc import Iterator

from megalin.data.config import DataConfig
from megalin.model.config import EncoderConfig


def encoder_data_problems(model: EncoderConfig, data: DataConfig) -> Iterator[str]:
    """Mismatches between an encoder's heads and its samples."""
    classes, given = model.num_classes, data.classification
    if classes is None:
        if given is not None:
            yield (
                f"data.classification makes samples with a class, but model.num_classes is missing; set it to "
                f"{given.num_classes}"
            )
        elif data.masking is None:
            yield (
                "data.masking is missing: an encoder trains on masked tokens; add a table [data.masking], or "
                "model.num_classes and a table [data.classification] to train on classes"
            )
        return
    if data.masking is not None:
        yield f"data.masking makes samples without a class, but model.num_classes = {classes}; remove one of them"
    if given is None:
        yield (
            f"model.num_classes = {classes}, but data.classification is missing; add this table, or leave num_classes "
            "out to pretrain"
        )
        return
    if given.num_classes != classes:
        yield (
            f"data.classification.num_classes = {given.num_classes} differs from model.num_classes = {classes}; make "
            "them equal"
        )
    if (last := given.first_class_id + given.num_classes) > model.vocab_size:
        yield (
            f"data.classification: the classes have ids up to {last - 1}, but model.vocab_size = {model.vocab_size}; "
            f"raise it to {last}"
        )
