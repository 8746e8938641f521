"""Model card of an exported folder: architecture, data, tokens and losses of the run, and a place for the licence."""

from __future__ import annotations

from pathlib import Path

from megalin.errors import StorageError
from megalin.interop.weights.layout import CheckpointLayout
from megalin.model.config import ModelConfig
from megalin.train.config import RunConfig
from megalin.train.identity_file import read_identity
from megalin.train.jsonl import read_records

FILE = "README.md"
_LOSSES = {"loss": "training loss, nats a token", "evaluation_loss": "held-out loss, nats a token"}
_COPY_CODE = """
transformers has no such class: copy the Python files of the released TransNormerLLM (`configuration_transnormer.py`,
`modeling_transnormer.py` and those that they import) into this folder, and add the key `auto_map` of its `config.json`.
"""


def model_card(run: Path, config: RunConfig, layout: CheckpointLayout, *, step: int, num_parameters: int) -> str:
    """The card of a checkpoint after `step` steps, with the last losses that the run logged until then.

    Raises:
        StorageError: metrics.jsonl exists and cannot be read.
    """
    model, data = config.model, config.data
    assert isinstance(model, ModelConfig)
    mixers = dict.fromkeys(sublayer.type for _, block in model.blocks() for sublayer in block.sublayers)
    tokens = step * config.train.global_batch_size * data.sequence_length
    sources = [path for source in data.sources or [] for path in source.paths] or data.train or []
    rows = {
        "class": layout.title,
        "parameters": f"{num_parameters:,}",
        "layers": f"{model.num_layers}, of {', '.join(mixers)}",
        "hidden size, vocabulary": f"{model.hidden_size}, {model.vocab_size}",
        "training data": ", ".join(f"`{path}`" for path in sources),
        "tokenizer": "not set" if data.tokenizer is None else f"`{data.tokenizer}`",
        "steps": f"{step:,} of {config.train.steps:,}",
        "tokens": f"{tokens:,}, in sequences of {data.sequence_length}",
        "learning rate": f"{config.optimizer.lr:g}, schedule {config.schedule.type}",
        "compute dtype": config.train.dtype,
        **_losses(run / "metrics.jsonl", step),
        **_changes(run, step),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    code = _COPY_CODE if layout.format == "opennlplab" else ""
    return f"""---
license: other
license_name: to-be-chosen
tags: [megalin]
---
# {run.resolve().name}

Licence: **to be chosen** by the publisher, here and in the header above.

| | |
| --- | --- |
{table}
{code}
Exported by megalin from a checkpoint of its run.
"""


def _changes(run: Path, step: int) -> dict[str, str]:
    """The values that changed during the run; the rows above have the last ones."""
    identity = read_identity(run)
    return {
        f"since step {segment.step:,}": str(segment).partition(": ")[2]
        for segment in ([] if identity is None else identity.segments)
        if segment.step < step
    }


def _losses(path: Path, step: int) -> dict[str, str]:
    """The last value of each loss that was logged at or before `step`."""
    if not path.exists():
        return {}
    found: dict[str, str] = {}
    try:
        for record in read_records(path):
            for key, name in _LOSSES.items():
                if isinstance(record.get(key), float) and record.get("step", 0) <= step:
                    found[name] = f"{record[key]:.4f} (step {record.get('step', 0):,})"
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error}; fix the permissions") from None
    return found
