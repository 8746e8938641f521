"""Parts of the training benchmark that need no GPU: recorded matmuls, roofline, baselines, engines and plots."""

import json
import sys
from argparse import Namespace
from collections import Counter
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
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("benchmark_tools")
TINY = ["model.hidden_size=64", "model.vocab_size=300"]
BLOCKS = "model.layers=[{repeat=3,sublayers=[{type='tnl',num_heads=4},{type='glu',intermediate_size=96}]}]"


def test_every_matmul_of_a_step_is_recorded_with_its_layout():
    from train_benchmarks.roofline import matmul_flops, record

    a, b = torch.randn(6, 8), torch.randn(5, 8)
    summand, batch = torch.randn(6, 5), torch.randn(2, 3, 8)

    def step():
        for _ in range(2):
            torch.nn.functional.linear(a, b)
        torch.addmm(summand, a, b.t())
        torch.bmm(batch, batch.mT)
        a + 1

    matmuls = record(step)[0].matmuls
    f32 = torch.float32
    left, right = ((6, 8), (8, 1), f32), ((8, 5), (1, 8), f32)
    assert matmuls == Counter(
        {
            ("aten::mm", (left, right)): 2,
            ("aten::addmm", (((6, 5), (5, 1), f32), left, right)): 1,
            ("aten::bmm", (((2, 3, 8), (24, 8, 1), f32), ((2, 8, 3), (24, 1, 8), f32))): 1,
        }
    )
    flops = {name: matmul_flops((name, operands)) for name, operands in matmuls}
    assert flops == {"aten::mm": 2 * 6 * 8 * 5, "aten::addmm": 2 * 6 * 8 * 5, "aten::bmm": 2 * 2 * 3 * 8 * 3}


def test_only_scans_and_attention_count_as_token_mixing():
    from train_benchmarks.roofline import MIXING

    mixing = ["megalin::decay_scan", "megalin::vector_decay_scan_backward", "aten::_cudnn_attention_backward"]
    others = ["megalin::linear_cross_entropy", "megalin::silu_lrpe", "aten::mm", "aten::_fused_adamw_"]
    assert [bool(MIXING.match(name)) for name in mixing + others] == [True] * 3 + [False] * 4


def test_unavoidable_bytes_of_a_step_follow_the_rule():
    from train_benchmarks.roofline import unavoidable_bytes

    model = make_model(model_from("tnl-1b", [*TINY, BLOCKS]))
    tokens, width, glu, compute = 1000, 64, 96, 2
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if ".0.mixer." in name and p.ndim > 1}
    mixer = sum(3 * torch.Size(shape[:-1]).numel() + 2 * shape[-1] for shape in shapes.values()) // 3
    assert mixer > 5 * 4 * width  # at least q, k, v and the output
    channels = 3 * 2 * glu + 2 * width + 3 * width + 2 * glu
    columns = 3 * (mixer + channels)
    hidden_states = (5 * 6 + 2) * width
    parameters = sum(p.numel() for p in model.parameters())
    expected = tokens * (columns + hidden_states + 2 * 300) * compute + parameters * (4 + compute + 8 + 24)
    assert unavoidable_bytes(model, tokens=tokens, compute_bytes=2, hidden_bytes=2) == expected
    wide = unavoidable_bytes(model, tokens=tokens, compute_bytes=2, hidden_bytes=4)
    assert wide - expected == tokens * hidden_states * 2


def test_depthwise_convolutions_have_no_wide_input():
    from train_benchmarks.roofline import unavoidable_bytes

    block = "model.layers=[{sublayers=[{type='mamba2',head_dim=16,state_size=16}]}]"
    model = make_model(model_from("mamba2-1b", [*TINY, block]))
    with_conv = unavoidable_bytes(model, tokens=1, compute_bytes=2, hidden_bytes=2)
    conv = [p for p in model.parameters() if p.ndim >= 2 and p.shape[-1] <= 4]
    assert sum(p.shape[:-1].numel() for p in conv) == 2 * 64 + 2 * 16
    conv_bytes = 3 * (2 * 64 + 2 * 16) * 2
    matrices = [p for p in model.block_list()[0].parameters() if p.ndim >= 2 and p.shape[-1] > 4]
    columns = sum(3 * p.shape[:-1].numel() + 2 * p.shape[-1] for p in matrices)
    rest = (columns + 600 + (5 + 2) * 64) * 2 + sum(p.numel() for p in model.parameters()) * 38
    assert with_conv == conv_bytes + rest


def test_the_roofline_takes_matmuls_at_the_lesser_of_their_times(monkeypatch):
    from train_benchmarks import roofline

    operand = roofline.Operand((4, 4), (4, 1), torch.float32)
    matmul = ("aten::mm", (operand, operand))
    monkeypatch.setattr(roofline, "_time_matmul", lambda matmul, count: 2.0)
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda: 10.0)
    for in_step, expected in ((5.0, 5.0), (7.0, 6.0)):
        recorded = roofline.Recorded(Counter({matmul: 3}), in_step, {"megalin::decay_scan": 4.0})
        found = roofline.measure_roofline(recorded, 20)
        assert found.seconds == expected + 4.0 + 2.0
        assert (found.matmuls_isolated, found.matmuls_in_step) == (6.0, in_step)


@pytest.mark.parametrize(
    ("library", "preset", "message"),
    [
        (
            "fla",
            "llama-1b",
            "--baseline fla: it has no model of family 'softmax'; use a preset of hgrn2, mamba2, rodimus",
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
        "vocab_size": 300,
        "tie_word_embeddings": True,
        "use_cache": False,
        "intermediate_size": 96,
        "num_heads": 4,
    }


def test_encoders_train_on_padded_samples_and_predict_valid_tokens():
    from train_benchmarks.batches import random_batch

    config = model_from("danet-base", ["model.hidden_size=64", "model.vocab_size=300"])
    arguments, generator = Namespace(batch=8, length=64), torch.Generator().manual_seed(0)
    batch = random_batch(arguments, config, generator)
    assert batch.masked_positions.shape == (8, 10)
    assert not batch.valid.all()
    assert batch.valid.gather(1, batch.masked_positions).all()
    assert batch.valid.sum(1).min() >= 32
    assert (batch.masked_positions.diff(dim=1) > 0).all()
    assert torch.equal(batch.masked_labels, batch.tokens.gather(1, batch.masked_positions))
    assert batch.label_counts().tolist() == [80, 8]
    classifier = config.model_copy(update={"num_classes": 3})
    assert random_batch(arguments, classifier, generator).label_counts().tolist() == [8]


def test_an_encoder_has_no_baseline(monkeypatch):
    import benchmark_train

    monkeypatch.setattr(benchmark_train.dist, "get_world_size", lambda: 1)
    mesh = SimpleNamespace(device=torch.device("cuda"))
    arguments = Namespace(
        roofline=False, baseline="fla", model="danet-base", overrides=[], engine="fsdp2", deepspeed_config=None
    )
    with pytest.raises(ConfigError, match="--baseline fla: danet-base is an encoder, and no baseline has one"):
        benchmark_train.measure(arguments, mesh)


def test_comparisons_need_a_gpu(monkeypatch):
    import benchmark_train

    monkeypatch.setattr(benchmark_train.dist, "get_world_size", lambda: 1)
    mesh = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="--roofline and --baseline need exactly one GPU; start one process"):
        benchmark_train.measure(Namespace(roofline=True, baseline=None, engine="fsdp2", deepspeed_config=None), mesh)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--engine", "deepspeed", "--roofline"], "--roofline and --baseline support --engine fsdp2 only; leave out"),
        (["--engine", "deepspeed", "--baseline", "fla"], "--roofline and --baseline support --engine fsdp2 only"),
        (["--deepspeed-config", "ds.json"], "--deepspeed-config has no effect on --engine fsdp2; leave it out, or"),
    ],
)
def test_options_of_the_other_engine_are_refused(monkeypatch, option, message):
    import benchmark_train

    monkeypatch.setattr(sys, "argv", ["benchmark_train.py", "tnl-1b", *option])
    with pytest.raises(ConfigError, match=message):
        benchmark_train.measure(benchmark_train.parse_arguments(), SimpleNamespace())


def _of_engines(tools: str, config: str) -> list[dict]:
    """JSON lines of the same steps with both engines; DeepSpeed's refuses a pipeline."""
    sys.path.insert(0, tools)
    import benchmark_train

    def line(*options: str) -> dict:
        sizes = ["--batch", "1", "--micro-batches", "2", "--length", "32", "--tp", "2", "--dtype", "float32"]
        sys.argv = ["benchmark_train.py", "tnl-1b", *TINY, BLOCKS, *sizes, "--warmup", "1", "--steps", "2", *options]
        arguments = benchmark_train.parse_arguments()
        return benchmark_train.measure(arguments, Mesh(benchmark_train.parallel_config(arguments), torch.device("cpu")))

    engine = ["--engine", "deepspeed"]
    with pytest.raises(ConfigError, match=r'parallel\.pp = 2 with train\.engine = "deepspeed"'):
        line(*engine, "--tp", "1", "--pp", "2")
    engine = ["--engine", "deepspeed"]
    return [
        line("--zero", "2"),
        line(*engine, "--zero", "2", "--recompute"),
        line(*engine, "--deepspeed-config", config),
    ]


def test_both_engines_are_timed_on_the_same_steps(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    for lines in run_ranks(2, _of_engines, str(ROOT / "tools"), str(path)):
        assert [line["engine"] for line in lines] == ["fsdp2", "deepspeed", "deepspeed"]
        assert all(line["step_seconds_median"] > 0 for line in lines)
        for line in lines[1:]:
            assert line["losses"] == pytest.approx(lines[0]["losses"], rel=2e-6)


def test_context_parallel_ranks_hold_consecutive_shards_of_a_sample():
    from train_benchmarks.batches import random_batches

    arguments = Namespace(batch=2, length=12, document_length=5, micro_batches=2)
    config = model_from("tnl-1b", TINY)

    def of_rank(sample, rank):
        cp = ContextParallel(Axis("cp", 3, rank))
        mesh = SimpleNamespace(samples=SimpleNamespace(rank=sample), cp=cp, device=torch.device("cpu"))
        return random_batches(arguments, config, mesh)

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
