"""Data of a run at its start: the splits, opened and verified, and the values that they add to the run's identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megalin.data.missing_files import check_files
from megalin.data.sources import Dataset, Training, open_dataset, open_training
from megalin.data.tokenizers.tokenizer import tokenizer_of
from megalin.parallel.agreement import on_every_rank
from megalin.parallel.mesh import Mesh
from megalin.slow_work import slow_work
from megalin.train.config import RunConfig
from megalin.train.identity import IdentityEntry, check_same_inputs, run_entries
from megalin.train.run_folder import RunFolder
from megalin.train.shard_check import VerifiedShards, verify_shards
from megalin.train.validation import TokenBytes, bytes_per_token


class RunData(NamedTuple):
    """Open splits of a run, equal on every rank."""

    training: Training
    validation: Dataset[Any] | None
    token_bytes: TokenBytes | None
    """As of `bytes_per_token`."""
    inputs: Mapping[str, IdentityEntry]
    """The run's identity besides its config and training samples."""
    shards: VerifiedShards


def open_run_data(config: RunConfig, run: RunFolder, mesh: Mesh) -> RunData:
    """Opens the splits of a run and compares their bytes and values with their manifests, with those that the run read
    earlier, and over the ranks; a collective.

    Raises:
        ConfigError, DataError, StorageError: on every rank, when shards or a tokenizer are bad or missing on any rank,
            or have other bytes than their manifest, the run before, or another rank.
    """
    opened: list[tuple[Training, Dataset[Any] | None, TokenBytes | None, Mapping[str, IdentityEntry]]] = []
    with slow_work("opening the data", shown=mesh.is_first_rank):
        on_every_rank(lambda: opened.append(_open(config, run, mesh)))  # hosts may have different disks
    ((training, validation, token_bytes, inputs),) = opened
    check_same_inputs(inputs, training)
    with slow_work("verifying the shards", shown=mesh.is_first_rank):
        shards = [*training.dataset.shards, *([] if validation is None else validation.shards)]
        verified = verify_shards(shards, config.data.verify, run.shard_digests)
    return RunData(training._replace(digests=verified.records), validation, token_bytes, inputs, verified)


def _open(
    config: RunConfig, run: RunFolder, mesh: Mesh
) -> tuple[Training, Dataset[Any] | None, TokenBytes | None, Mapping[str, IdentityEntry]]:
    data, vocab_size, train = config.data, config.model.vocab_size, config.train
    check_files(data)
    if data.order == "megatron":
        run.clean_if_refused(run.path / data.cache)
    training = open_training(
        data,
        vocab_size,
        seed=train.seed,
        steps=train.steps,
        global_batch_size=train.global_batch_size,
        folder=run.path,
    )
    validation = open_dataset(data, "validation", vocab_size, train.seed) if data.has("validation") else None
    tokenizer = tokenizer_of(data)
    return training, validation, bytes_per_token(tokenizer), run_entries(tokenizer, validation, mesh)
