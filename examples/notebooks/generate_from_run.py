"""A run from Python, and text from it: token shards, `Trainer`, `load`, `generate`.

Cells start with "# %%": run the file as a script, or cell by cell in an editor or notebook. A folder as the only
argument names the run; else it is runs/notebook, and a second call reads the finished run.
"""

# %% Shards of bytes: a document a file of Python's own library
import argparse
import sys
from pathlib import Path

import numpy as np

import megalin

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/notebook")
tokenizer = megalin.datasets.load_tokenizer("bytes")
shards = {"train": sorted(Path(argparse.__file__).parent.glob("*.py"))[:20], "validation": [Path(argparse.__file__)]}
folder.mkdir(parents=True, exist_ok=True)
for name, files in shards.items():
    if not (folder / f"{name}.bin").exists():
        with megalin.datasets.ShardWriter(str(folder / name), np.dtype("uint16")) as writer:
            for file in files:
                ids = [*tokenizer.encode(file.read_text(encoding="utf-8")), tokenizer.eod_id]
                writer.add_sequence(np.asarray(ids, np.uint16))
                writer.end_document()
            writer.publish()

# %% A run, as `megalin train` runs it: checkpoints, metrics, a report; a second call resumes
config = {
    "model": {"preset": "transnormerllm-tiny", "vocab_size": 257},
    "data": {
        "train": [str(folder / "train")],
        "validation": [str(folder / "validation")],
        "tokenizer": "bytes",
        "sequence_length": 128,
    },
    "train": {"steps": 40, "global_batch_size": 4, "micro_batch_size": 4, "evaluate_batches": 4},
    "optimizer": {"lr": 3e-3, "max_grad_norm": 1.0},
    "schedule": {"warmup_steps": 5},
}
result = megalin.Trainer(config, folder).train()
print(f"step {result.step}: loss {result.loss}, held out {result.evaluation}")

# %% Its model and tokenizer
model = megalin.load(folder)
print(model.generate("def ", max_tokens=40))
print(model.generate(["import ", "class "], max_tokens=20, temperature=0.5, seed=1))

# %% The held-out loss by hand
with megalin.datasets.open_split(config["data"], "validation", vocab_size=257) as dataset:
    batch = dataset.batch(np.arange(4))
output = model(batch.tokens, targets=batch.labels, document_ids=batch.document_ids)
print(f"loss of four samples: {output.loss.item():.3f} nats a byte")
assert output.loss.item() < 4.0
