"""The benchmark of many presets: a queue over GPUs, the limit of a process, and the tables."""

import argparse
import json
import os
import signal
import threading
import time

import pytest

pytestmark = pytest.mark.usefixtures("benchmark_tools")

FAKE = """
import json, os, subprocess, sys
name, *options = sys.argv[1:]
row = {"step_seconds_median": 0.4, "step_seconds_min_max": [0.3, 0.5], "cuda_graphs": True, "tokens_per_second": 5e4,
       "peak_memory_gib": 60.0, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "options": options}
if name == "danet-large":
    subprocess.run(["sleep", "61.7"])
row |= {"eager_step_seconds_median": 0.5, "lower_bound_milliseconds": 300.0, "roofline_milliseconds": 340.0,
        "roofline_parts_milliseconds": {"mixing": 50.0, "mixing_at_its_roofline": 10.0}}
print("a line\\n" + json.dumps(row), flush=True)
if "--baseline" in options:
    if name == "gla-1.3b":
        subprocess.run(["sleep", "61.7"])
    row["baseline"] = {"library": "fla", "class": "HGRN2", "variant": "compiled", "step_seconds_median": 0.6,
                       "peak_memory_gib": 50.0, "slower_variants": {"as it is": 0.7}}
    print(json.dumps(row), flush=True)
"""


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """The module with a benchmark that only prints, and its arguments."""
    import benchmark_presets

    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(benchmark_presets, "BENCHMARK", tmp_path / "fake.py")
    arguments = argparse.Namespace(
        folder=tmp_path, overrides=["a=b"], batch=2, steps=9, seconds=20.0, within=60.0, without_baselines=[]
    )
    return benchmark_presets, arguments


def _presets(module, *names):
    return [preset for preset in module.PRESETS if preset.name in names and preset.note != "LayerNorm"]


def test_presets_share_the_gpus_and_make_two_tables(benchmark):
    module, arguments = benchmark
    presets = _presets(module, "hgrn2-1b", "llama-1b", "transnormerllm-1b")
    measured = module.measure_all(presets, ["4", "7"], arguments)
    assert [each.preset for each in measured] == presets
    assert {each.result["gpu"] for each in measured} == {"4", "7"}
    options = ["train.micro_batch_size=2", "data.sequence_length=8192", "train.compile=true", "a=b"]
    options += ["--warmup", "4", "--steps", "9", "--roofline"]
    assert [each.result["options"] for each in measured[::2]] == [[*options, "--baseline", "fla"], options]
    lines = module.table(measured).splitlines()
    assert lines[2] == (
        "| hgrn2-1b | 400.0 ms (300.0 to 500.0), CUDA graph | 50.0k | 500.0 ms | 340.0 ms, 85% | 300.0 ms, 75% | "
        "50.0, 10.0 ms | 60.0 GiB |"
    )
    assert lines[3].startswith("| llama-1b, RMSNorm | ")
    assert lines[-2:] == [
        "| hgrn2-1b | fla's HGRN2, compiled | 600.0 ms (as it is 700.0) | 50.0 GiB | 1.50x |",
        "| llama-1b, RMSNorm | fla's HGRN2, compiled | 600.0 ms (as it is 700.0) | 50.0 GiB | 1.50x |",
    ]


@pytest.mark.parametrize("limit", ["seconds", "within"])
def test_a_process_beyond_a_limit_is_killed_with_its_children_and_keeps_what_it_measured(benchmark, tmp_path, limit):
    module, arguments = benchmark
    setattr(arguments, limit, 2.0)
    began = time.monotonic()
    gla, danet = module.measure_all(_presets(module, "gla-1.3b", "danet-large"), ["0"], arguments)
    assert time.monotonic() - began < 15.0
    assert _ends(_sleeping)
    assert gla.result["lower_bound_milliseconds"] == 300.0
    assert "baseline" not in gla.result
    assert danet.result == {}
    started = (tmp_path / "danet-large-64-x-512-tokens.txt").exists()
    assert started == (limit == "seconds"), "no process starts after the end of all"


def test_ctrl_c_kills_what_runs_and_starts_no_more(benchmark, tmp_path):
    module, arguments = benchmark
    threads, before = threading.active_count(), signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            module.measure_all(_presets(module, "gla-1.3b", "danet-large"), ["0"], arguments)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "gla-1.3b.txt").exists()
    assert _ends(_sleeping)
    assert _ends(lambda: threading.active_count() > threads)
    assert not (tmp_path / "danet-large-64-x-512-tokens.txt").exists()


def test_a_preset_without_a_result_is_a_row_and_fails_the_tool(benchmark, tmp_path, capsys):
    module, _ = benchmark
    page = tmp_path / "page"
    command = [str(page), "--gpus", "0", "--seconds", "2", "--presets"]
    assert module.main([*command, "tnl-1b", "danet-large"]) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[3] == "| danet-large, 64 x 512 tokens | - | - | - | - | - | - | - |"
    assert (page / "steps.md").read_text() == printed.removesuffix("\n")
    results = json.loads((page / "steps.json").read_text())
    assert results["tnl-1b"]["baseline"]["class"] == "HGRN2"
    assert results["danet-large, 64 x 512 tokens"] == {}
    assert (page / "danet-large-64-x-512-tokens.txt").exists()
    assert module.main([*command, "tnl-1b"]) == 0


@pytest.mark.parametrize("names", [["tnl-1b"], []], ids=["named", "all"])
def test_baselines_are_left_out(benchmark, tmp_path, names):
    module, _ = benchmark
    command = [str(tmp_path), "--gpus", "0", "--presets", "tnl-1b", "--without-baselines", *names]
    assert module.main(command) == 0
    assert "baseline" not in json.loads((tmp_path / "steps.json").read_text())["tnl-1b"]


def _sleeping():
    """Whether a process runs `sleep 61.7`."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if file.read() == b"sleep\x0061.7\x00":
                    return True
        except OSError:
            continue
    return False


def _ends(condition):
    """Whether it becomes false within two seconds: a killed process dies a moment later."""
    end = time.monotonic() + 2.0
    while condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
