"""A small ladder for tests: two mixers, rungs of 20k and 60k parameters, on generated documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from tests.model_runs import documents, write_shard

GLU = {"type": "glu", "intermediate_size": 64}
LADDER: dict[str, Any] = {
    "config": "base.toml",
    "sizes": [20e3, 60e3],
    "tokens": [2.0, 4.0],
    "warmup": 0.2,
    "mixers": {
        "TNL": [],
        "LLaMA": ['model.layers.0.sublayers=[{type="softmax",num_heads=2},{type="glu",intermediate_size=64}]'],
    },
    "shape": {"aspect": 16.0, "width_multiple": 16, "tolerance": 0.15},
    "batch": {"value": 1024.0, "parameters": 20e3, "exponent": 0.667},
    "rate": {"value": 0.01, "parameters": 20e3, "exponent": -0.333},
}


def base_config(folder: Path) -> dict[str, Any]:
    """The config of the runs, with shards in `folder`."""
    sublayers = [{"type": "tnl", "num_heads": 2, "chunk_size": 16}, GLU]
    return {
        "model": {"vocab_size": 257, "hidden_size": 32, "layers": [{"repeat": 2, "sublayers": sublayers}]},
        "data": {
            "train": [str(folder / "data" / "train")],
            "validation": [str(folder / "data" / "validation")],
            "sequence_length": 64,
            "tokenizer": "bytes",
        },
        "train": {"micro_batch_size": 16},
        "optimizer": {"max_grad_norm": 1.0},
    }


def write_ladder(folder: Path, *, num_tokens: int = 3000, base: dict[str, Any] | None = None, **fields: Any) -> Path:
    """Writes shards of so many tokens, the base config with changed tables, and the ladder with changed fields."""
    if not (folder / "data").exists():
        write_shard(folder / "data" / "train", documents(num_tokens, seed=1))
        write_shard(folder / "data" / "validation", documents(600, seed=2))
    values = base_config(folder)
    for name, table in (base or {}).items():
        values[name] = {**values.get(name, {}), **table}
    (folder / "base.toml").write_text(tomli_w.dumps(values))
    path = folder / "ladder.toml"
    given = {key: value for key, value in {**LADDER, **fields}.items() if value is not None}
    path.write_text(tomli_w.dumps(given))
    return path
