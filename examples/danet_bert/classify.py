"""Fine-tunes the pretrained encoder of a run to classify texts, and reports its accuracy on a test file.

python classify.py RUN --train labelled.jsonl --test others.jsonl --output FOLDER

Each line of a jsonl file is an object with two strings, "text" and "label".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.data.batch import EncoderBatch, batch_to, take_samples
from megalin.data.masking import SpecialTokens, resolve_tokens
from megalin.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalin.errors import ConfigError, DataError, MegalinError
from megalin.model.build import Model
from megalin.model.config import EncoderConfig
from megalin.optim.adamw import build_optimizer, set_learning_rate
from megalin.optim.config import OptimizerConfig
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.build import build_model
from megalin.train.open_run import open_run
from megalin.train.step import train_step
from megalin.train.validation import evaluating

NEW_HEAD = "sequence_head.classifier."
"""Prefix of the new weights; all others are loaded from the run."""


class Examples(NamedTuple):
    """Texts and their labels."""

    texts: list[str]
    labels: list[str]


def read(path: Path) -> Examples:
    """Reads the examples of a jsonl file. Raises DataError for an invalid line."""
    texts, labels = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            value = json.loads(line)
            text, label = value["text"], value["label"]
        except (ValueError, KeyError, TypeError):
            text = label = None
        if not isinstance(text, str) or not isinstance(label, str):
            raise DataError(f'{path}:{number}: expected an object with strings "text" and "label"')
        texts.append(text)
        labels.append(label)
    if not texts:
        raise DataError(f"{path}: has no examples")
    return Examples(texts, labels)


def encode(
    examples: Examples, classes: list[str], tokenizer: Tokenizer, special: SpecialTokens, *, length: int
) -> EncoderBatch:
    """All examples as one batch: [CLS] text [SEP], truncated or padded to `length` tokens."""
    tokens = np.full((len(examples.texts), length), special.pad, np.int64)
    sizes = []
    for row, ids in enumerate(tokenizer.encode_batch(examples.texts)):
        sample = [special.cls, *ids[: length - 2], special.sep]
        tokens[row, : len(sample)] = sample
        sizes.append(len(sample))
    unknown = sorted(set(examples.labels) - set(classes))
    if unknown:
        raise DataError(f"label {unknown[0]!r} of the test file is not in the training file, which has {classes}")
    none = torch.zeros(len(sizes), 0, dtype=torch.int64)
    return EncoderBatch(
        tokens=torch.from_numpy(tokens),
        token_types=torch.zeros(len(sizes), length, dtype=torch.int64),
        valid=torch.arange(length) < torch.tensor(sizes)[:, None],
        masked_positions=none,
        masked_labels=none,
        sequence_labels=torch.tensor([classes.index(label) for label in examples.labels]),
        sample_ids=torch.arange(len(sizes)),
    )


def fine_tune(model: Model, examples: EncoderBatch, mesh: Mesh, *, steps: int, batch_size: int, rate: float) -> None:
    """Trains with AdamW on random batches; the rate warms up over a tenth of the steps and decays to zero."""
    optimizer = build_optimizer(model, OptimizerConfig(lr=rate, weight_decay=0.0), model.no_decay_names())
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        set_learning_rate(optimizer, rate * min(1.0, 10 * (step + 1) / steps) * (1.0 - step / steps))
        rows = torch.randint(0, len(examples.tokens), (batch_size,), generator=generator)
        draw = step * batch_size + torch.arange(batch_size)  # keys dropout
        batch = batch_to(take_samples(examples, rows)._replace(draw=draw), mesh.device)
        result = train_step(model, optimizer, [batch], mesh, max_grad_norm=1.0, step=step + 1).wait()
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"step {step + 1}/{steps}  loss {result.loss:.4f}")


@torch.no_grad()
def accuracy(model: Model, examples: EncoderBatch, mesh: Mesh, *, batch_size: int) -> float:
    """Fraction of the examples whose most likely class is their label."""
    right = 0
    with evaluating(model):
        for first in range(0, len(examples.tokens), batch_size):
            batch = batch_to(take_samples(examples, slice(first, first + batch_size)), mesh.device)
            right += int((model(**batch.inputs()).sequence_logits.argmax(-1) == batch.sequence_labels).sum())
    return right / len(examples.tokens)


def classify(arguments: argparse.Namespace) -> None:
    """Fine-tunes the model, saves it, loads the saved checkpoint and prints its accuracy."""
    config, checkpoint = open_run(arguments.run)
    if not isinstance(config.model, EncoderConfig) or config.data.masking is None or config.data.tokenizer is None:
        raise ConfigError(f"{arguments.run}: expected the run of an encoder with a tokenizer")
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod_token)
    special = resolve_tokens(config.data.masking, tokenizer, config.model.vocab_size).special
    train, test = read(arguments.train), read(arguments.test)
    classes = sorted(set(train.labels))
    if len(classes) < 2:
        raise DataError(f"{arguments.train}: has one label, {classes[0]!r}; a classifier needs at least two")
    length = config.data.sequence_length
    rows, others = (encode(part, classes, tokenizer, special, length=length) for part in (train, test))
    model_config = config.model.model_copy(update={"num_classes": len(classes)})
    mesh = Mesh(ParallelConfig(), compute_device())

    def build() -> Model:
        return build_model(
            model_config, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=arguments.seed
        )

    model = build()
    body = {name: tensor for name, tensor in weights(model).items() if not name.startswith(NEW_HEAD)}
    load(checkpoint, body, ignore=(OPTIMIZER_PREFIX, NEW_HEAD, "masked_head."))
    model.after_optimizer_step()
    fine_tune(model, rows, mesh, steps=arguments.steps, batch_size=arguments.batch_size, rate=arguments.lr)
    state = {"step": arguments.steps, "model": model_config.model_dump(mode="json"), "classes": classes}
    save(arguments.output, step=arguments.steps, tensors=weights(model), state=state)
    saved = newest(arguments.output)
    assert saved is not None
    model = build()
    load(saved, weights(model))
    model.after_optimizer_step()
    fraction = accuracy(model, others, mesh, batch_size=arguments.batch_size)
    most = max(Counter(test.labels).values()) / len(test.labels)
    print(f"accuracy {fraction:.2%} on {len(test.texts)} texts; the most frequent label alone gives {most:.2%}")
    print(f"saved in {saved.path}")


def main() -> int:
    """Returns 0, or the exit code of the printed error."""
    parser = argparse.ArgumentParser(description="Fine-tune a pretrained encoder to classify texts.")
    parser.add_argument("run", type=Path, help="run folder of a pretrained encoder")
    parser.add_argument("--train", type=Path, required=True, help='jsonl with "text" and "label"')
    parser.add_argument("--test", type=Path, required=True, help="test file in the same format, for the accuracy")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint of the classifier")
    parser.add_argument("--steps", type=int, default=200, help="updates (200)")
    parser.add_argument("--batch-size", type=int, default=32, help="texts an update (32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (1e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the new head's weights (0)")
    arguments = parser.parse_args()
    try:
        with process_group(compute_device()):
            classify(arguments)
    except MegalinError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
