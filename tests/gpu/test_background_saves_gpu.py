"""Saves in the background on a GPU: the copy is that of one step, while the host and the GPU go on."""

import pytest
import torch

from megalin.checkpoint.background import BackgroundSaver
from megalin.checkpoint.publishing import prepare
from megalin.checkpoint.save import save
from megalin.parallel.process_group import process_group
from megalin.train.config import load_run_config
from megalin.train.loop import train
from tests.checkpoint.test_background import contents
from tests.model_runs import losses, write_config


def test_copy_is_that_of_the_state_before_an_update_that_waits_for_it(tmp_path):
    state = {f"w{number}": torch.randn(1 << 24, device="cuda") for number in range(4)}  # 256 MiB
    state |= {"cut": torch.randn(300, 70, device="cuda").t(), "step": torch.tensor(3.0)}
    saver = BackgroundSaver(60.0)
    with saver.completing():
        for step in (1, 2):
            save(tmp_path / "front", step=step, tensors=state, state={})
            copied = saver.start(prepare(tmp_path / "back", step=step, tensors=state, state={}), state)
            torch.cuda.current_stream().wait_event(copied)
            for tensor in state.values():
                tensor.add_(1.0)
            assert saver.finish().step == step
        assert saver._buffer._memory.is_pinned()
    assert contents(tmp_path / "back") == contents(tmp_path / "front")


@pytest.mark.parametrize(
    "overrides",
    [[], ["train.cuda_graphs=true"], ["train.dtype=float16", "train.loss_scale.growth_interval=2"]],
    ids=str,
)
def test_checkpoints_are_those_of_a_run_in_the_foreground(tmp_path, overrides):
    config = write_config(tmp_path, checkpoint={"every_steps": 1})
    device = torch.device("cuda", torch.cuda.current_device())
    with process_group(device):
        for name, background in (("front", "false"), ("back", "true")):
            values = [*overrides, f"checkpoint.background={background}"]
            train(load_run_config(config, values), device, tmp_path / name)
    assert losses(tmp_path / "front") == losses(tmp_path / "back")
    front, back = (contents(tmp_path / name / "checkpoints") for name in ("front", "back"))
    assert front.keys() == back.keys()
    for name, data in front.items():
        if not name.endswith(("train_state.json", "manifest.json")):  # the config's value differs
            assert back[name] == data, name
