"""The committed list of launches: complete, and compiled ahead of time since the kernels last changed."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from megalin.model.presets import load_preset, preset_families, preset_names
from tests.listed_launches import listed_launches
from tools.kernel_launches import sources
from tools.kernel_launches.compilation import Compilation
from tools.kernel_launches.launch import CHIPS, KernelLaunch
from tools.kernel_launches.launch_list import LaunchList
from tools.kernel_launches.ops import OPS
from tools.kernel_launches.preset_steps import launches_of_presets, run_on_meta
from tools.kernel_launches.recorder import read_recorded
from tools.kernel_launches.self_tests import cases_of, run_self_test_on_meta

ROOT = Path(__file__).parents[2]
CPU_SECONDS = 120
"""Limit of the compilations of `make test`."""
TEXT = "x_ptr=*bf16/16 y=tensordesc<bf16[1,64]> rows=i32/16 one=1 N=64 FLAG=True num_warps=8"
SCAN = KernelLaunch("scans.x.kernel", TEXT)


@pytest.fixture(scope="module")
def launches():
    return LaunchList.read()


def test_every_kernel_has_a_launch_and_every_launch_a_kernel(launches):
    assert sources.kernels() == launches.kernels()


def test_every_kernel_and_only_one_name_belongs_to_an_op(launches):
    unnamed = [kernel for kernel in launches.kernels() if not any(kernel.startswith(names) for names in OPS.values())]
    assert unnamed == []
    benchmarks = {path.stem for path in (ROOT / "tools/benchmarks").glob("*.py")}
    # The matmul of one is torch's own, the other is a few marks of a CUDA graph.
    assert set(OPS) - benchmarks == {"scaled_linear", "step_record"}


def test_steps_of_presets_launch_what_is_listed(launches):
    """The first preset of each family on Hopper."""
    known = {launch.without_hints() for launch, entry in launches.entries.items() if 90 in entry.chips}
    for names in preset_families().values():
        seen = set()
        run_on_meta(load_preset(names[0]).model, 90, seen.add)
        assert {launch.without_hints() for launch in seen} <= known, names[0]


BY_BATCH = ("scans.fixed_decay_sweep", "scans.scalar_decay", "dispatch.column_sums", "scans.short_conv_gradient")
"""Kernels with sizes or branches that depend on the batch, which no self-test has, or on uses of gradients."""


IN_CI = ("hgrn2-70m", "bert-base")
"""A gated scan, and blocks with a norm after the addition."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(names[0], marks=[pytest.mark.slow] * (names[0] not in IN_CI))
        for names in preset_families().values()
    ],
)
def test_self_tests_launch_what_the_steps_launch(name):
    """So that a kernel is compiled once for both, and that the tested kernel is the one that runs."""
    steps, tests = set(), set()
    for op, case in cases_of(load_preset(name).model, 90, steps.add):
        run_self_test_on_meta(op, case, 90, tests.add)
    assert {launch for launch in tests - steps if not launch.kernel.startswith(BY_BATCH)} == set()
    untested = {launch.kernel for launch in steps} - {launch.kernel for launch in tests}
    assert untested <= {"scans.vector_decay_sweep.segment_kernel"}  # of sequences of 1024 tokens and more


@pytest.mark.slow
def test_steps_of_every_preset_on_every_chip_launch_what_is_listed(launches):
    listed = dict(launches.entries)
    launches.replace_steps(launches_of_presets(preset_names(), CHIPS))
    assert launches.entries == listed


def compile_changed(*options):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "tools/compile_kernels.py", "--changed", "--quiet", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


def test_changed_kernels_compile_for_two_chips(launches):
    """None where the seals are those of the present source, as in a commit."""
    if launches.changed(90) or launches.changed(100):
        result = compile_changed("--arch", "90", "100", "--cpu-seconds", str(CPU_SECONDS))
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_changed_kernels_compile_for_every_chip(launches):
    if any(map(launches.changed, CHIPS)):
        result = compile_changed()
        assert result.returncode == 0, result.stdout + result.stderr


def test_a_change_of_a_kernel_or_of_what_it_calls_changes_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    shared = "import triton\nSIZE = {size}\n\n@triton.jit\ndef helper(x):\n    {comment}\n    return x + SIZE\n"
    kernel = (
        "import triton\nfrom megalin._triton.shared import helper\n\n@triton.jit\ndef kernel(x):\n"
        '    """{text}"""\n    helper(x)\n\n\ndef launch():\n    {text}\n'
    )

    def source(size=1, comment="", text="pass"):
        (tmp_path / "shared.py").write_text(shared.format(size=size, comment=comment))
        (tmp_path / "kernels.py").write_text(kernel.format(text=text))
        sources._definitions.cache_clear()
        return sources.source_of("kernels.kernel")

    first = source()
    assert sources.kernels() == ["kernels.kernel"]
    assert source(comment="# one more") == source(text="return") == first
    assert source(size=2) != first
    sources._definitions.cache_clear()


def test_launches_of_a_form_differ_in_sizes_and_alignment_alone():
    other = "x_ptr=*bf16 y=tensordesc<bf16[1,32]> rows=i32 one=i32/16 N=32 FLAG=True num_warps=4"
    assert KernelLaunch(SCAN.kernel, other).form() == SCAN.form()
    for old, new in (("*bf16", "*fp32"), ("FLAG=True", "FLAG=False"), ("one=1", "one=None")):
        assert KernelLaunch(SCAN.kernel, SCAN.text.replace(old, new)).form() != SCAN.form()
    unhinted = SCAN.text.replace("i32/16", "i32").replace("one=1", "one=i32")
    assert KernelLaunch(SCAN.kernel, unhinted).without_hints() == SCAN.without_hints()
    assert KernelLaunch(SCAN.kernel, SCAN.text.replace("N=64", "N=32")).without_hints() != SCAN.without_hints()


def test_a_test_with_an_unlisted_launch_fails(tmp_path, monkeypatch):

    @contextmanager
    def watch(seen):
        yield
        seen(SCAN)

    with (
        pytest.raises(pytest.fail.Exception, match=r"launches of 1 forms .*\nscans.x.kernel x_ptr"),
        listed_launches(watch),
    ):
        pass
    monkeypatch.setenv("MEGALIN_RECORD_LAUNCHES", str(tmp_path / "seen.txt"))
    for _ in range(2):
        with listed_launches(watch):
            pass
    assert read_recorded(tmp_path / "seen.txt") == {SCAN}


def test_a_launch_fails_by_its_error_its_shared_memory_or_its_spills():
    sound = Compilation("", 101_376, 16, "")
    assert [sound.problem(chip, {}) for chip in CHIPS] == [""] * 5
    assert sound._replace(error="CompilationError: x").problem(90, {}) == "CompilationError: x"
    wide = sound._replace(shared=101_377)
    assert [bool(wide.problem(chip, {})) for chip in CHIPS] == [False, True, False, False, True]
    assert wide.problem(89, {}) == "101,377 bytes of shared memory; sm_89 has 101,376"
    spilled = sound._replace(stack=40)
    assert spilled.problem(90, {80: 40}) == "spills: 40 bytes of stack a thread, above 16"
    assert spilled.problem(90, {90: 40}) == ""
