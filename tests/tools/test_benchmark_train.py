"""Parts of the training benchmark that need no GPU: recorded matmuls, roofline, baselines, engines and plots."""

import json
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalin.commands.base import model_from
from megalin.errors import ConfigError
from megalin.model.build import make_model
from megalin.ops.scans.fixed_decay import decay_scan
from megalin.parallel.collectives import Axis
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.config import load_run_config
from tests.model_runs import write_config
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("benchmark_tools")
TINY = ["model.hidden_size=64", "model.vocab_size=300"]
BLOCKS = "model.layers=[{repeat=3,sublayers=[{type='tnl',num_heads=4},{type='glu',intermediate_size=96}]}]"


@pytest.mark.parametrize(
    ("library", "preset", "message"),
    [
        (
            "fla",
            "llama-1b",
            "--baseline fla: it has no model of family 'softmax'; use a preset of hgrn2, mamba2, recurrence",
        ),
        ("transformers", "tnl-1b", "--baseline transformers: it has no model of family 'tnl'; use a preset of softmax"),
    ],
)
def test_a_family_that_a_library_lacks_is_named(library, preset, message):
    from train_benchmarks.baselines import build_baseline

    with pytest.raises(ConfigError, match=message):
        build_baseline(library, model_from(preset, []), device=torch.device("meta"))


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    from train_benchmarks import baselines

    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--baseline fla: fla is not installed; install it, or leave --baseline"):
        baselines.build_baseline("fla", model_from("tnl-1b", []), device=torch.device("meta"))


def test_a_baseline_has_the_sizes_of_our_model(monkeypatch):
    from train_benchmarks import baselines

    seen = {}

    def recipe(sizes, mixer):
        seen.update(sizes, num_heads=mixer.num_heads)
        return torch.nn.Linear(2, 2)

    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(baselines.RECIPES, ("fla", "tnl"), recipe)
    model = baselines.build_baseline("fla", model_from("tnl-1b", [*TINY, BLOCKS]), device=torch.device("meta"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert seen == {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 384,
        "tie_word_embeddings": True,
        "use_cache": False,
        "intermediate_size": 96,
        "num_heads": 4,
    }


def test_the_fastest_variant_of_a_library_is_its_baseline(monkeypatch):
    import benchmark_train

    run = benchmark_train.run_config("tnl-70m", ["data.sequence_length=64"], 1)
    seconds = {"slow": 3.0, "fast": 2.0}
    variants = dict.fromkeys(["slow", "broken", "fast"])
    monkeypatch.setitem(benchmark_train.VARIANTS, "fla", variants)

    def measure(arguments, run, mesh, variant):
        if variant not in seconds:
            raise RuntimeError("no kernel")
        return {"step_seconds_median": seconds[variant]}

    monkeypatch.setattr(benchmark_train, "measure_variant", measure)
    options = Namespace(**{**vars(OPTIONS), "baseline": "fla"})
    first, *_, found = benchmark_train.measure_baseline(options, run, None)
    assert (first["variant"], first["slower_variants"]) == ("slow", {})
    assert (found["variant"], found["step_seconds_median"]) == ("fast", 2.0)
    assert found["slower_variants"] == {"slow": 3.0}
    assert found["failed_variants"] == {"broken": "RuntimeError: no kernel"}
    seconds.clear()
    with pytest.raises(ConfigError, match=r"no variant runs.*no kernel.*leave --baseline out"):
        next(benchmark_train.measure_baseline(options, run, None))


def test_our_own_model_as_a_baseline_names_the_library_of_its_scan(monkeypatch):
    import benchmark_train

    run = benchmark_train.run_config("cosformer2-70m", ["data.sequence_length=64"], 1)
    timing = benchmark_train.Timing(2.0, [2.0], 1.0, [3.0])
    monkeypatch.setattr(benchmark_train, "measure_ours", lambda *_: SimpleNamespace(timing=timing))
    monkeypatch.setattr(benchmark_train.torch.cuda, "reset_peak_memory_stats", lambda: None)
    options, mesh = Namespace(**{**vars(OPTIONS), "baseline": "fla"}), SimpleNamespace(device=torch.device("cpu"))
    (found,) = benchmark_train.measure_baseline(options, run, mesh)
    assert (found["library"], found["class"], found["tokens_per_second"]) == (
        "fla",
        "our model on its scan",
        4 * 64 / 2,
    )


@pytest.mark.parametrize("replays", [False, True])
def test_the_roofline_is_of_eager_steps_and_the_step_of_its_own_form(monkeypatch, replays):
    """Of replays nothing is recorded: eager steps run after them."""
    import benchmark_train

    built = []

    def measure(arguments, run, mesh):
        graphs = replays and run.train.cuda_graphs is not False
        built.append(graphs)
        timing = benchmark_train.Timing(1.0 if graphs else 2.0, [2.0], 1.0, [3.0])
        recorded, moved = (None, 0) if graphs else ("ops", 7)
        return benchmark_train.Ours(timing, 1, 0, 1.0, recorded, moved, None, graphs, 0.1, None)

    roofline = SimpleNamespace(seconds=0.5, lower_bound=0.25, **dict.fromkeys(ROOFLINE, 0.1), mixing_seconds={})
    monkeypatch.setattr(benchmark_train, "check_options", lambda *_: None)
    monkeypatch.setattr(benchmark_train, "measure_ours", measure)
    monkeypatch.setattr(benchmark_train, "measure_roofline", lambda *given, **_: roofline if given else None)
    run = benchmark_train.run_config("tnl-70m", ["data.sequence_length=64", "train.cuda_graphs=auto"], 1)
    with process_group(torch.device("cpu")):
        options = Namespace(**{**vars(OPTIONS), "roofline": True, "document_length": None, "simulated_ranks": 1})
        found = benchmark_train.measure(options, run, Mesh(run.parallel, torch.device("cpu")))
    assert built == ([True, False] if replays else [False])
    assert (found["step_seconds_median"], found["eager_step_seconds_median"]) == (1.0 if replays else 2.0, 2.0)
    assert found["cuda_graphs"] == replays
    assert found["lower_bound_fraction"] == (0.25 if replays else 0.125)


ROOFLINE = ("matmuls", "matmuls_isolated", "matmuls_in_step", "mixing", "mixing_roofline", "bytes", "matmul_rows",
            "moved_bytes", "copy_bandwidth")  # fmt: skip


def test_encoders_train_on_padded_samples_and_predict_valid_tokens():
    from train_benchmarks.batches import random_batch

    config = model_from("danet-base", ["model.hidden_size=64", "model.vocab_size=300"])
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(config, 8, 64, generator)
    assert batch.masked_positions.shape == (8, 10)
    assert not batch.valid.all()
    assert batch.valid.gather(1, batch.masked_positions).all()
    assert batch.valid.sum(1).min() >= 32
    assert (batch.masked_positions.diff(dim=1) > 0).all()
    assert torch.equal(batch.masked_labels, batch.tokens.gather(1, batch.masked_positions))
    assert batch.label_counts().tolist() == [80, 8]
    classifier = config.model_copy(update={"num_classes": 3})
    assert random_batch(classifier, 8, 64, generator).label_counts().tolist() == [8]


OPTIONS = Namespace(
    roofline=False, baseline=None, device_time=False, document_length=None, config="a model", overrides=[]
)


@pytest.mark.parametrize(
    ("name", "overrides", "options", "device", "message"),
    [
        ("danet-base", [], {"baseline": "fla"}, "cuda", "--baseline fla: a model is an encoder, and no baseline has"),
        ("danet-base", [], {"document_length": 9}, "cpu", "--document-length 9: a model is an encoder, whose samples"),
        ("tnl-70m", [], {"roofline": True}, "cpu", "--roofline and --baseline need exactly one GPU; start one process"),
        ("tnl-70m", [], {"device_time": True}, "cpu", "--device-time measures a GPU; leave it out on a CPU"),
        ("tnl-70m", ["train.engine=deepspeed"], {"roofline": True}, "cuda", "support train.engine=fsdp2 only; leave"),
        ("tnl-70m", ["train.engine=deepspeed"], {"baseline": "fla"}, "cuda", "support train.engine=fsdp2 only; leave"),
    ],
)
def test_comparisons_that_cannot_run_are_refused(monkeypatch, name, overrides, options, device, message):
    import benchmark_train

    monkeypatch.setattr(benchmark_train.dist, "get_world_size", lambda: 1)
    run = benchmark_train.run_config(name, ["data.sequence_length=64", *overrides], 1)
    with pytest.raises(ConfigError, match=message):
        benchmark_train.measure(
            Namespace(**{**vars(OPTIONS), **options}), run, SimpleNamespace(device=torch.device(device))
        )


def test_a_preset_has_one_micro_batch_a_step_on_each_data_parallel_rank():
    from train_benchmarks.engine import run_config

    run = run_config("tnl-70m", ["parallel.tp=2", "train.micro_batch_size=3"], 8)
    assert (run.train.global_batch_size, run.train.dtype, run.data.sequence_length) == (12, "bfloat16", 8192)
    several = run_config("tnl-70m", ["train.global_batch_size=16"], 2)
    assert (several.train.global_batch_size, several.train.micro_batch_size) == (16, 4)


def test_a_run_s_config_keeps_its_batch_dtype_mesh_and_optimizer(tmp_path):
    from train_benchmarks.engine import run_config

    path = str(write_config(tmp_path, parallel={"tp": 2}))
    given = load_run_config(path, [])
    assert run_config(path, [], 2) == given
    assert run_config(path, ["optimizer.lr=0.5"], 2).optimizer == given.optimizer.model_copy(update={"lr": 0.5})


def test_examples_of_the_help_are_valid(tmp_path, monkeypatch):
    import benchmark_train

    monkeypatch.chdir(tmp_path)
    write_config(tmp_path).rename("run.toml")
    examples = re.findall(r"(?:--nproc-per-node (\d) |python )tools/benchmark_train.py (.*)", benchmark_train.__doc__)
    assert len(examples) == 9
    for ranks, command in examples:
        monkeypatch.setattr(sys, "argv", ["benchmark_train.py", *shlex.split(command)])
        arguments = benchmark_train.parse_arguments()
        benchmark_train.run_config(arguments.config, arguments.overrides, int(ranks or 1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=5"], "override 'train.steps=5': 'train.steps' is not read here; known: model.*, parallel.*"),
        (["parallel.tpp=2"], "parallel.tpp: unknown key; did you mean 'tp'?"),
        (["train.dtype=float64"], "train.dtype = 'float64': input should be 'float32', 'bfloat16' or 'float16'"),
        (["train.micro_batch_size=0"], "train.micro_batch_size = 0: input should be greater than or equal to 1"),
        (["parallel.tp=2"], "parallel.tp = 2 does not divide the number of ranks, 1"),
        (["train.deepspeed_config=ds.json"], 'but train.engine = "fsdp2" reads none'),
    ],
)
def test_wrong_keys_and_values_are_named(capsys, monkeypatch, overrides, message):
    import benchmark_train

    monkeypatch.setattr(sys, "argv", ["benchmark_train.py", "tnl-70m", *overrides])
    assert benchmark_train.main() == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--steps", "--document-length"])
def test_sizes_below_one_are_refused(capsys, monkeypatch, option):
    import benchmark_train

    monkeypatch.setattr(sys, "argv", ["benchmark_train.py", "tnl-70m", option, "0"])
    with pytest.raises(SystemExit):
        benchmark_train.main()
    assert f"{option} 0: use at least 1" in capsys.readouterr().err


def test_an_encoder_is_timed(capsys, monkeypatch):
    import benchmark_train

    sizes = ["model.layers.0.repeat=1", *TINY, "data.sequence_length=64", "train.micro_batch_size=2"]
    steps = ["--warmup", "1", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmark_train.py", "danet-base", *steps, *sizes])
    assert benchmark_train.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert (len(result["losses"]), result["batch"], result["micro_batches"]) == (3, 2, 1)


def _of_engines(tools: str, config: str) -> list[dict]:
    """JSON lines of the same steps with both engines and by a pipeline, which DeepSpeed's refuses."""
    sys.path.insert(0, tools)
    import benchmark_train

    def line(*overrides: str) -> dict:
        sizes = ["train.micro_batch_size=1", "train.global_batch_size=2", "data.sequence_length=32", "parallel.tp=2"]
        sizes += ["train.dtype=float32"]
        sys.argv = ["benchmark_train.py", "tnl-1b", "--warmup", "1", "--steps", "2"]
        arguments = benchmark_train.parse_arguments()
        run = benchmark_train.run_config("tnl-1b", [*TINY, BLOCKS, *sizes, *overrides], 2)
        return benchmark_train.measure(arguments, run, Mesh(run.parallel, torch.device("cpu")))

    engine = "train.engine=deepspeed"
    with pytest.raises(ConfigError, match=r'parallel\.pp = 2 with train\.engine = "deepspeed"'):
        line(engine, "parallel.tp=1", "parallel.pp=2")
    return [
        line("parallel.zero=2"),
        line(engine, "parallel.zero=2", "train.recompute=true"),
        line(engine, f"train.deepspeed_config={config}"),
        line("parallel.tp=1", "parallel.pp=2"),
    ]


def test_both_engines_are_timed_on_the_same_steps(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    for lines in run_ranks(2, _of_engines, str(ROOT / "tools"), str(path)):
        assert [line["engine"] for line in lines] == ["fsdp2", "deepspeed", "deepspeed", "fsdp2"]
        assert all(line["step_seconds_median"] > 0 for line in lines)
        for line in lines[1:]:
            assert line["losses"] == pytest.approx(lines[0]["losses"], rel=2e-6)


def test_context_parallel_ranks_hold_consecutive_shards_of_a_sample():
    from train_benchmarks.batches import random_batches
    from train_benchmarks.engine import run_config

    sizes = ["train.micro_batch_size=2", "data.sequence_length=12", "parallel.cp=3", "train.global_batch_size=8"]
    run = run_config("tnl-1b", [*TINY, BLOCKS, *sizes], 6)

    def of_rank(sample, rank):
        cp = ContextParallel(Axis("cp", 3, rank))
        mesh = SimpleNamespace(samples=SimpleNamespace(rank=sample, size=2), cp=cp, device=torch.device("cpu"))
        return random_batches(run, mesh, document_length=5)

    shards = [of_rank(0, rank) for rank in range(3)]
    assert [len(shard) for shard in shards] == [2, 2, 2]
    tokens, labels = (torch.cat([getattr(shard[0], name) for shard in shards], 1) for name in ("tokens", "labels"))
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert [shard[0].document_ids[0].tolist() for shard in shards] == [[0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 2, 2]]
    assert not torch.equal(shards[0][0].tokens, shards[0][1].tokens)
    assert not torch.equal(shards[0][0].tokens, of_rank(1, 0)[0].tokens)


def test_steps_are_plotted_with_and_without_roofline_and_baseline(tmp_path):
    from plot_training import plot

    first = {"model": "tnl-1b", "batch": 4, "length": 8192, "device": "a chip", "tokens_per_second": 80e3}
    baseline = {"library": "fla", "class": "RetNetForCausalLM", "tokens_per_second": 70e3}
    plot(
        [first, {**first, "model": "hgrn2-1b", "roofline_fraction": 0.9, "baseline": baseline}], tmp_path / "steps.png"
    )
    image = (tmp_path / "steps.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) < 150_000


def test_rates_of_several_ranks_are_plotted_next_to_those_of_one(tmp_path):
    from plot_parallel import mesh_name, plot, split_curves
    from train_benchmarks.pictures import draw_lines

    one = {"model": "tnl-1b", "ranks": 1, "parallel": {}, "device": "a chip", "tokens_per_second_per_rank": 80e3}
    one |= {"length": 8192, "recompute": False, "cuda_graphs": False}
    more = {**one, "ranks": 4, "parallel": {"cp": 4, "zero": 2}, "tokens_per_second_per_rank": 70e3}
    sharded = {**more, "parallel": {}}
    other = {**sharded, "engine": "deepspeed"}
    both = {**sharded, "parallel": {"tp": 2, "zero": 1}}
    names = [mesh_name(line) for line in (one, more, sharded, other, both)]
    assert names == ["one GPU", "cp 4, zero 2", "dp 4", "dp 4, deepspeed", "dp 2, tp 2, zero 1"]
    lines = "\n".join(["a line for people", *map(json.dumps, (one, more, sharded))])
    (tmp_path / "lines.jsonl").write_text(lines)
    draw_lines(plot, "", [str(tmp_path / name) for name in ("lines.jsonl", "parallel.png")])
    assert (tmp_path / "parallel.png").read_bytes().startswith(b"\x89PNG")

    sweep = [{**more, "length": length} for length in (16384, 8192, 4096)]
    again = {**more, "recompute": True}
    assert split_curves([one, *sweep, again]) == ([one, again], {"tnl-1b, cp 4, zero 2": sweep[::-1]})
    assert split_curves([one, *sweep[:2], again]) == ([one, *sweep[:2], again], {})
    plot([one, *sweep, again], tmp_path / "curves.png")
    assert len((tmp_path / "curves.png").read_bytes()) > len((tmp_path / "parallel.png").read_bytes())


def test_a_device_is_idle_where_no_kernel_or_copy_runs():
    from train_benchmarks.device_time import device_time

    kernels = [("kernel", 0.0, 3.0), ("kernel", 2.0, 2.0), ("gpu_memcpy", 10.0, 2.0), ("cpu_op", 4.0, 6.0)]
    found = device_time([{"cat": kind, "ts": start, "dur": length} for kind, start, length in kernels], 2)
    assert found == (pytest.approx(3e-6), 1.5)
    assert found.describe(4e-6)["device_idle_fraction"] == pytest.approx(0.25)


def test_cosformer2_is_compared_with_itself_on_another_scan(monkeypatch):
    from train_benchmarks import fla_scan
    from train_benchmarks.baselines import is_own_model

    block = "model.layers=[{sublayers=[{type='cosformer2',num_heads=4},{type='glu',intermediate_size=96}]}]"
    config = model_from("cosformer2-1b", [*TINY, block])
    assert is_own_model("fla", config)
    assert not is_own_model("fla", model_from("tnl-1b", []))
    scans = []

    def scan(q, k, v, slopes, **others):
        scans.append(slopes)
        return decay_scan(q, k, v, slopes, **others)

    model = make_model(config)
    model.to_empty(device="cpu")
    init_weights(model, 0)
    tokens = torch.randint(0, 300, (2, 9))
    expected = model(tokens).logits
    monkeypatch.setattr(fla_scan, "fla_decay_scan", scan)
    with fla_scan.scans_by_fla():
        assert torch.equal(model(tokens).logits, expected)
    model(tokens)
    assert scans == [None]
