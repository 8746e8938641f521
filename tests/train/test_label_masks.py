"""Runs on a shard with a label mask: label counts, steps with few or no labels, resuming, and parity on a mesh."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalin.checkpoint.load import newest
from megalin.data.batch import split_tokens
from megalin.data.config import DataConfig
from megalin.data.datasets.token import TokenDataset
from megalin.data.loader import ValidationLoader
from megalin.data.shards.label_mask import label_mask_path
from megalin.data.shards.supervised import write_supervised_shard
from megalin.data.sources import LABEL_MASKS
from megalin.data.tokenizers.tokenizer import ByteTokenizer
from megalin.errors import ConfigError, DataError
from megalin.model.language_model import LanguageModel
from megalin.parallel.config import ParallelConfig
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.step import accumulate_gradients
from megalin.train.validation import TokenBytes, evaluate
from tests.model_runs import CPU, documents, ledger, losses, metrics, train_here, write_config
from tests.numerics import Tensors, assert_close
from tests.ranks import run_ranks
from tests.train.test_step import MODEL, as_arrays, as_tensors, build, full

SAMPLES, LENGTH = 6, 24
STOP = 5


def masked_windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [samples, T + 1] of a shard's windows, and the labels [samples, T] that its mask leaves.

    Tokens 9 to 16 of each window are never labels, so the second of three ranks has none; samples 2 and 3 have none.
    """
    generator = torch.Generator().manual_seed(3)
    flat = torch.randint(0, 256, (SAMPLES * LENGTH + 1,), generator=generator)
    windows = flat.unfold(0, LENGTH + 1, LENGTH)
    counted = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.5
    counted[:, 8:16] = False
    counted[2:4] = False
    return windows, torch.where(counted, windows[:, 1:], IGNORED_LABEL)


def write_windows(prefix: Path) -> Path:
    """Writes the shard of `masked_windows`, one document."""
    windows, labels = masked_windows()
    ids = [int(windows[0, 0]), *windows[:, 1:].flatten().tolist()]
    write_supervised_shard(prefix, [(ids, [True, *(labels.flatten() >= 0).tolist()])], vocab_size=257)
    return prefix


def _results(
    prefix: Path, axes: dict[str, Any], size: int, max_label_fraction: float
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Labels on this rank, the step's loss and gradients, and the evaluation, in micro-batches of `size` samples."""
    mesh = Mesh(ParallelConfig(**axes), CPU)
    config = DataConfig(train=[str(prefix)], sequence_length=LENGTH)
    model = build(mesh, dtype=torch.float64, max_label_fraction=max_label_fraction)
    with TokenDataset.open(config, "train", 257) as dataset:
        own = np.arange(mesh.samples.rank, SAMPLES // size, mesh.samples.size)
        numbers = [np.arange(place * size, (place + 1) * size) for place in own]
        batches = [split_tokens(dataset.batch(samples), mesh.cp) for samples in numbers]
        losses, counts = accumulate_gradients(model, batches, mesh)
        outcome = as_arrays({"loss": losses, "labels": counts.double()} | full(model, "gradient"))
        loader = ValidationLoader(dataset, micro_batch_size=size, dp_rank=mesh.samples.rank, dp_size=mesh.samples.size)
        token_bytes = TokenBytes(torch.from_numpy(ByteTokenizer().token_bytes()))
        evaluation = evaluate(model, loader, mesh, token_bytes=token_bytes)
    numbers = {name: value for name, value in evaluation._asdict().items() if isinstance(value, float | int)}
    return sum(int(batch.label_counts()) for batch in batches), outcome, numbers


def truth() -> tuple[Tensors, dict[str, float]]:
    """The same step by plain autograd on the labels, and the evaluation by hand."""
    model = LanguageModel(MODEL).to(torch.float64)
    model.to_empty(device="cpu")
    init_weights(model, 0)
    windows, labels = masked_windows()
    token_losses = model(windows[:, :-1], labels=labels).token_losses
    assert token_losses is not None
    kept = labels[labels >= 0]
    loss = token_losses[labels >= 0].sum() / len(kept)
    loss.backward()
    outcome = {"loss": loss.detach().view(1), "labels": torch.tensor([float(len(kept))], dtype=torch.float64)}
    frequencies = torch.unique(kept, return_counts=True)[1].double() / len(kept)
    evaluation = {
        "loss": loss.item(),
        "perplexity": math.exp(loss.item()),
        "bits_per_byte": loss.item() / math.log(2),  # every id is one byte
        "unigram_entropy": -(frequencies * frequencies.log()).sum().item(),
        "tokens": len(kept),
    }
    return outcome | full(model, "gradient"), evaluation


MESHES = {
    "single": (1, {}, 2, 0.4),
    "tp2_cp3": (6, {"tp": 2, "cp": 3}, 2, 0.7),
}
"""By name: ranks, axes, samples of a micro-batch, and the fraction of a rank's tokens that the head computes."""
SLOW_MESHES = {
    "all_tokens": (1, {}, 2, 1.0),
    "dp3": (3, {}, 2, 1.0),
    "tp2_sp_cp3": (6, {"tp": 2, "cp": 3, "sequence_parallel": True}, 1, 0.8),
    "cp4_dp2": (8, {"cp": 4}, 1, 1.0),
    "cp3_pp2": (6, {"cp": 3, "pp": 2}, 1, 0.8),
}


@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_MESHES)])
def test_masked_samples_give_the_same_step_and_evaluation_on_every_mesh(tmp_path, name):
    world_size, axes, size, max_label_fraction = (MESHES | SLOW_MESHES)[name]
    results = run_ranks(world_size, _results, write_windows(tmp_path / "x"), axes, size, max_label_fraction)
    expected, evaluation = truth()
    for _, outcome, evaluated in results:
        wanted = {key: tensor for key, tensor in expected.items() if key in outcome}
        assert_close(as_tensors(outcome), wanted, 1e-10)
        assert evaluated == pytest.approx(evaluation, rel=1e-9)
    if axes.get("cp") == 3:
        assert 0 in {labels for labels, _, _ in results}


def _masked_config(folder: Path, num_tokens: int = 3000, **tables: dict[str, Any]) -> tuple[Path, int]:
    """Config of a run whose training shard has a mask, and the number of its labels in an epoch.

    The samples are 36 tokens of consecutive documents; a tenth of the documents has labels, the others have none.
    """
    config = write_config(folder, **tables)
    rng, made, flat = np.random.default_rng(0), [], []
    for number, ids in enumerate(documents(num_tokens, seed=1)):
        counted = rng.random(len(ids)) < (0.7 if number % 10 == 0 else 0.0)
        made.append((ids, counted))
        flat += [(number, bool(bit)) for bit in counted]
    write_supervised_shard(folder / "data" / "train", made, vocab_size=257)
    used = flat[: (len(flat) - 1) // 36 * 36 + 1]
    return config, sum(after[1] and before[0] == after[0] for before, after in itertools.pairwise(used))


def test_run_logs_its_labels_and_survives_steps_without_any(tmp_path):
    samples = (sum(map(len, documents(1500, seed=1))) - 1) // 36
    steps = {"steps": samples, "global_batch_size": 1, "micro_batch_size": 1}  # one epoch
    config, labels = _masked_config(tmp_path, 1500, train=steps, checkpoint={"every_steps": samples})
    with process_group(CPU):
        train_here(config, tmp_path / "run")
    counts = [line["label_tokens"] for line in metrics(tmp_path / "run")]
    assert sum(counts) == labels
    assert 0 in counts
    assert [loss for loss, count in zip(losses(tmp_path / "run"), counts, strict=True) if not count] == [
        0.0
    ] * counts.count(0)
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run"))


def test_head_of_labelled_tokens_gives_the_same_run(tmp_path):
    config, _ = _masked_config(tmp_path, train={"steps": 6})
    with process_group(CPU):
        train_here(config, tmp_path / "all")
        train_here(config, tmp_path / "labelled", "train.max_label_fraction=0.9")
        with pytest.raises(
            DataError,
            match=r"\d+ of the 72 tokens of a micro-batch \(samples \d+, \d+, ...\) have a label, more than "
            r"train.max_label_fraction = 0.01; use at least 0.\d+, or leave it out",
        ):
            train_here(config, tmp_path / "few", "train.max_label_fraction=0.01")
    assert losses(tmp_path / "labelled") == pytest.approx(losses(tmp_path / "all"), rel=1e-6)


def test_mask_that_changes_between_start_and_resume_is_refused(tmp_path):
    config, _ = _masked_config(tmp_path)
    mask = label_mask_path(tmp_path / "data" / "train")
    original = mask.read_bytes()
    changed = original[:-9] + bytes([original[-9] ^ 1]) + original[-8:]
    message = (
        r"step-00000005 was made with other values, which a run must keep; restore them, or start in a new run folder "
        r"\(from these weights with train.initial_weights=\S+/run\):\n  label masks of the sources, by sha256: {} in "
        r"the checkpoint, {} now"
    )
    some, none = r'{"train": \["[0-9a-f]{64}"\]}', "not set"
    with process_group(CPU):
        train_here(config, tmp_path / "run", f"train.stop_after_steps={STOP}")
        mask.write_bytes(changed)
        with pytest.raises(DataError, match=r"train\.mask\.bin: has sha256 \w+, but \S+train\.manifest\.json has"):
            train_here(config, tmp_path / "new")
        Path(f"{tmp_path}/data/train.manifest.json").unlink()
        with pytest.raises(ConfigError, match=message.format(some, some)):
            train_here(config, tmp_path / "run")
        mask.unlink()
        with pytest.raises(ConfigError, match=message.format(some, none)):
            train_here(config, tmp_path / "run")
        mask.write_bytes(original)
        train_here(config, tmp_path / "run")
        train_here(config, tmp_path / "whole")
    assert metrics(tmp_path / "run")[-1] == metrics(tmp_path / "whole")[-1]
    assert ledger(tmp_path / "run") == ledger(tmp_path / "whole")


def test_mask_that_appears_is_refused_and_none_is_saved_without_one(tmp_path):
    config = write_config(tmp_path)
    with process_group(CPU):
        train_here(config, tmp_path / "run", f"train.stop_after_steps={STOP}")
        checkpoint = newest(tmp_path / "run" / "checkpoints")
        assert checkpoint is not None
        assert LABEL_MASKS not in checkpoint.state()["order"]
        _masked_config(tmp_path)
        with pytest.raises(
            ConfigError, match=r'label masks of the sources, by sha256: not set in the checkpoint, {"train": \["'
        ):
            train_here(config, tmp_path / "run")
