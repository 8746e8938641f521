"""float16 with loss scaling on NCCL ranks: meshes against one process, and the same skipped steps on every mesh."""

import json

import pytest

from tests.gpu.ranks import needs_gpus, on_gpus
from tests.model_runs import write_config

pytestmark = needs_gpus(2)


@pytest.mark.parametrize("mesh", [[], ["parallel.tp=2"], ["parallel.cp=2"], ["parallel.pp=2"]], ids=str)
def test_meshes_agree_with_one_process(mesh):
    run = on_gpus(2, "megalin", "verify", "tnl-1b", *mesh, "--dtype", "float16")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


@pytest.mark.parametrize("mesh", [{"zero": 1}, {}, {"tp": 2}], ids=["zero_1", "zero_3", "tp"])
def test_steps_that_overflow_are_the_same_on_two_ranks_as_on_one(tmp_path, mesh):
    scale = {"initial": 2.0**24, "growth_interval": 4}
    metrics = []
    for ranks, parallel in ((1, {}), (2, mesh)):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        train = {"steps": 40, "global_batch_size": 8, "micro_batch_size": 4, "dtype": "float16", "loss_scale": scale}
        config = write_config(folder, train=train, parallel=parallel, checkpoint={"every_steps": 100})
        ended = on_gpus(ranks, "megalin", "train", config, "--folder", folder / "run")
        assert ended.returncode == 0, ended.stderr[-4000:]
        metrics.append([json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()])
    one, two = ([line for line in lines if "loss_scale" in line] for lines in metrics)
    assert [line["skipped"] for line in one].count(1) >= 2
    assert [line["skipped"] for line in one].count(0) >= 20
    for key in ("loss_scale", "skipped"):
        assert [line[key] for line in one] == [line[key] for line in two]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=2e-3)
