"""Launches of a training step and of a decoding step of every preset against the committed list."""

import pytest
import torch

from megalin.model.config import ModelConfig
from megalin.model.presets import load_preset, preset_names
from megalin.parallel.initialisation import init_weights
from tools.kernel_launches.launch import CHIPS, kernel_of
from tools.kernel_launches.launch_list import LaunchList
from tools.kernel_launches.preset_steps import batches, bf16_model, decode
from tools.kernel_launches.recorder import compiled_launches

DEVICE = "cuda"


@pytest.fixture(scope="module")
def launches():
    return LaunchList.read()


@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names())
def test_steps_of_a_preset_launch_what_is_listed(name, launches):
    """With one block of each kind: weights of a full model do not fit. The second steps, after all self-tests."""
    major, minor = torch.cuda.get_device_capability()
    chip = 10 * major + minor
    if chip not in CHIPS:
        pytest.skip(f"no launches are recorded for compute capability {major}.{minor}")
    model, seen = bf16_model(load_preset(name).model), set()
    model.to_empty(device=DEVICE)
    init_weights(model, 0)
    _run(model)
    for launch in launches.entries:
        kernel_of(launch).device_caches.clear()  # what was compiled before is seen again
    with compiled_launches(seen.add):
        _run(model)
    known = {launch.without_hints() for launch, entry in launches.entries.items() if chip in entry.chips}
    assert sorted({launch.without_hints() for launch in seen} - known) == []


def _run(model):
    """A training step, and a decoding step of a decoder."""
    for inputs in batches(model.config, DEVICE):
        model.loss_sums(inputs).sum().backward()
    if isinstance(model.config, ModelConfig):
        decode(model)
        model.train()
