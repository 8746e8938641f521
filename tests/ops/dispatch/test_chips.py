"""Choices by the compute capability of the GPU, which is faked."""

from types import SimpleNamespace

import pytest
import torch

from megalin._triton.dispatch import chips
from megalin._triton.norms import rms_norm
from megalin._triton.scans import fixed_decay_state, scalar_decay, scalar_decay_gradient, tpe_blocks, vector_decay
from megalin.ops.scans import fixed_decay_cuda
from tools.kernel_launches.compilation import SHARED_LIMIT
from tools.kernel_launches.launch import CHIPS
from tools.kernel_launches.preset_steps import faked_chip

BF16 = torch.bfloat16


def on_gpu(*shape):
    return SimpleNamespace(shape=shape, dtype=BF16, is_cuda=True)


def test_shared_memory_and_tensor_memory_of_each_chip():
    found = {}
    for chip in CHIPS:
        with faked_chip(chip):
            found[chip] = chips.shared_bytes(), chips.has_tensor_memory()
    assert found == {chip: (SHARED_LIMIT[chip], chip == 100) for chip in CHIPS}
    assert chips.capability() == chips.MEASURED_ON or torch.cuda.is_available()
    with faked_chip(75):
        assert chips.shared_bytes() == 101_376


def test_wide_scans_in_cuda_run_on_hopper_alone():
    q, v = on_gpu(1, 2, 1, 256), on_gpu(1, 2, 1, 128)
    for chip in CHIPS:
        with faked_chip(chip):
            reason = fixed_decay_cuda.unsupported(q, q, v)
            assert bool(reason) == (chip != 90), chip
            assert fixed_decay_cuda.unsupported(v, v, v) == ""
    assert reason == "heads of 256 keys and 128 values, above 128, except on compute capability 9.0"


@pytest.mark.parametrize("setting", ["", "decay_scan=cuda"])
def test_auto_takes_the_scan_in_cuda_on_hopper_alone(setting, monkeypatch):
    """An explicit backend, and one of MEGALIN_KERNELS, may take it elsewhere."""
    monkeypatch.setenv("MEGALIN_KERNELS", setting)
    v = on_gpu(1, 2, 1, 128)
    for chip in CHIPS:
        with faked_chip(chip):
            assert bool(fixed_decay_cuda.unmeasured("decay_scan", "auto", v)) == (chip != 90 and not setting), chip
            assert fixed_decay_cuda.unmeasured("decay_scan", "cuda", v) == ""
    assert fixed_decay_cuda.unmeasured("decay_scan", "auto", torch.ones(1)) == ""


def test_tiles_of_the_final_state_fit_the_chip():
    tiles = {}
    for chip in CHIPS:
        with faked_chip(chip):
            tiles[chip] = fixed_decay_state.gradient_tile(256, 128)["C"], fixed_decay_state.gradient_tile(128, 128)["C"]
    assert tiles == {80: (32, 64), 89: (32, 64), 90: (64, 64), 100: (64, 64), 120: (32, 64)}


def test_kept_states_are_stored_outside_of_stages_with_tensor_memory():
    for chip in CHIPS:
        with faked_chip(chip):
            assert scalar_decay._wide_state_tiles(128, 64, BF16).stages == (1 if chip == 100 else 3), chip


def test_stages_of_the_scalar_scan_fit_the_chip():
    stages = {}
    for chip in CHIPS:
        with faked_chip(chip):
            stages[chip] = scalar_decay_gradient._carried_tiles(128, 64, BF16).stages
    assert stages == {80: 3, 89: 2, 90: 3, 100: 3, 120: 2}


def test_rows_in_flight_of_rms_norm_fit_the_chip():
    """Stages of the backward at 16,384 columns, by bytes of an element."""
    stages = {}
    for chip in CHIPS:
        with faked_chip(chip):
            stages[chip] = [rms_norm._backward_constants(16384, size)["STAGES"] for size in (2, 4)]
            assert rms_norm._backward_constants(8192, 4)["STAGES"] == (2 if chips.shared_bytes() < 2**17 else 3)
    assert stages == {80: [3, 2], 89: [2, 1], 90: [3, 2], 100: [3, 2], 120: [2, 1]}


def test_stages_of_the_vector_scan_in_fp32_fit_the_chip():
    stages = {}
    for chip in CHIPS:
        with faked_chip(chip):
            stages[chip] = [vector_decay._sweep_constants(key, 128, torch.float32)["num_stages"] for key in (64, 128)]
            assert vector_decay._sweep_constants(128, 128, BF16)["num_stages"] == 3
    assert stages == {80: [2, 2], 89: [2, 1], 90: [2, 2], 100: [2, 2], 120: [2, 1]}


def test_large_tiles_of_tpe_are_those_of_bf16_on_hopper_alone():
    """They spill with other dtypes, and on other chips."""
    for chip in CHIPS:
        with faked_chip(chip):
            for dtype in (BF16, torch.float16, torch.float32):
                tiles = tpe_blocks.tiles_of(torch.empty(1, dtype=dtype))
                assert (tiles == tpe_blocks.LARGE_TILES) == (chip == 90 and dtype == BF16), (chip, dtype)
