"""Runs of DeepSpeed's engine with a stand-in for apex: losses of torch's AdamW and norms, recorded backends."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from megalin.ops.dispatch import backend
from tests.model_runs import metrics, train_here, write_config
from tests.ops.dispatch.apex_stand_in import write_apex
from tests.ranks import run_ranks

STEPS = 3


def _runs(config: Path, site: Path, kernels: dict[Path, str]) -> None:
    """Trains once in each folder, with its value of MEGALIN_KERNELS."""
    sys.path.insert(0, str(site))
    with patch.object(backend, "_missing", lambda name, device: "" if name == "apex" else "not here"):
        for folder, asked in kernels.items():
            with patch.dict(os.environ, MEGALIN_KERNELS=asked):
                train_here(config, folder, "train.engine=deepspeed", "parallel.zero=2")


def test_losses_with_apex_are_those_without(tmp_path):
    attention = {"type": "softmax", "num_heads": 4, "norm": "rmsnorm"}
    glu = {"type": "glu", "intermediate_size": 48, "norm": "layernorm"}
    model = {"norm": "layernorm", "layers": [{"sublayers": [attention, glu]}]}
    config = write_config(tmp_path, model=model, train={"steps": STEPS}, checkpoint={"every_steps": 100})
    asked = {"apex": "adamw=apex,layer_norm=apex,rms_norm=apex", "own": "reference"}
    run_ranks(1, _runs, config, write_apex(tmp_path / "site"), {tmp_path / kind: asked[kind] for kind in asked})
    losses = {kind: [step["loss"] for step in metrics(tmp_path / kind)] for kind in asked}
    assert losses["apex"] == pytest.approx(losses["own"], rel=1e-5)
    kernels = json.loads((tmp_path / "apex" / "kernels.json").read_text())
    backends = {op: choice["backend"] for op, choice in kernels.items()}
    assert backends.items() >= {"adamw": "apex", "layer_norm": "apex", "rms_norm": "apex"}.items()
    assert backends["softmax_attention of packed rows or windows"] == "sdpa"
