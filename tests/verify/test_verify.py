"""`megalin verify`: a mesh agrees with one process, and every planted fault is detected."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from megalin.__main__ import main
from megalin.errors import ConfigError
from megalin.layers.mixers.base import Mixer, MixerOutput
from megalin.layers.mixers.transnormer import TransNormer
from megalin.model.config import ModelConfig
from megalin.model.presets import load_preset
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.verify import comparison, outcome, rounding, run
from megalin.verify.case import Case, DtypeName, make_batches, make_case, shrink
from megalin.verify.comparison import TensorError, compare
from megalin.verify.faults import FAULTS
from megalin.verify.outcome import Outcome, run_reference, run_step
from megalin.verify.run import print_rows, self_test
from tests.cases import HYBRID
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

PRESET = load_preset("transnormerllm-385m-64k").model
MODELS = {"preset": PRESET, "hybrid": HYBRID.model}


def case(
    model: ModelConfig, *, dp: int = 1, dtype: DtypeName = "float64", recompute: bool = False, **axes: Any
) -> Case:
    parallel = ParallelConfig(**axes)
    return make_case(model, parallel, data_size=dp, dtype=dtype, full=False, length=None, recompute=recompute)


MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"dp": 2, "shard": 1}, {"tp": 2}],
    3: [{"dp": 3}, {"tp": 3}],
    4: [
        {"tp": 2, "dp": 2},
        {"tp": 4, "sequence_parallel": True},
        {"tp": 2, "dp": 2, "dtype": "float32", "recompute": True, "sequence_parallel": True},
    ],
}
HALF: list[dict[str, Any]] = [{"tp": 2, "dp": 2, "dtype": dtype} for dtype in ("bfloat16", "float16")]
"""With the hybrid model only, among the slow tests; tests/verify/test_encoders.py has a fast one."""


@pytest.mark.parametrize(
    ("model", "world_size"),
    [
        pytest.param(model, size, marks=[pytest.mark.slow] * (model == "hybrid" and size > 2))
        for model in MODELS
        for size in MESHES
    ],
)
def test_every_mesh_agrees_with_one_process(model, world_size):
    # The hybrid's weights are large: the gradient of its rotations loses half of fp32's digits even in one process.
    meshes = [mesh for mesh in MESHES[world_size] if model == "preset" or mesh.get("dtype") != "float32"]
    meshes += HALF if model == "hybrid" and world_size == 4 else []
    by_rank = run_ranks(world_size, verify_all, [case(MODELS[model], **mesh) for mesh in meshes])
    for mesh, rows in zip(meshes, by_rank[0], strict=True):
        kinds = {row.name.partition(":")[0].partition(".")[0] for row in rows}
        assert kinds == {"logits", "token_losses", "loss", "grad_norm", "gradient", "weight", "decoding"}
        decoded = [row.name for row in rows if comparison.kind(row.name) == "decoding"]
        assert decoded == ["decoding.mesh"] * ("tp" in mesh) + ["decoding.one_process"]
        assert [row for row in rows if not row.passed] == [], mesh
    assert all(rows == [] for rank in by_rank[1:] for rows in rank)


@pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, id="", marks=pytest.mark.slow), pytest.param(True, id="sequence_parallel")],
)
def test_every_planted_fault_is_seen(sequence_parallel):
    results = run_ranks(4, self_test, case(PRESET, tp=2, dp=2, sequence_parallel=sequence_parallel))[0]
    planted = [fault.name for fault in FAULTS if fault.axis in ("tp", "data", "any") and not fault.float8]
    assert [result.fault for result in results] == planted
    assert [result.fault for result in results if not result.seen] == []
    assert all(result.worst.error > 100 * result.worst.bound for result in results)


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_planted_fault_is_seen_in_a_model_without_what_some_of_them_need(dp):
    results = run_ranks(2 * dp, self_test, case(load_preset("llama-70m").model, tp=2, dp=dp))[0]
    assert [result.fault for result in results if not result.seen] == []
    assert results


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_planted_fault_is_seen_in_half_precision(dtype):
    results = run_ranks(4, self_test, case(PRESET, tp=2, dp=2, dtype=dtype), timeout=240.0)[0]
    assert [result.fault for result in results if not result.seen] == []
    # Of the initial weights the prompt's state changes the logits by some percent.
    assert all(r.worst.error > 10 * r.worst.bound for r in results if r.fault != "forgotten_prompt")


def test_shrunk_preset_keeps_what_hides_faults():
    for tp in (1, 2, 3, 4, 8):
        small = shrink(PRESET, tp)
        assert small.num_layers > 2
        assert [[s.type for s in block.sublayers] for block in small.layers] == [
            [s.type for s in block.sublayers] for block in PRESET.layers
        ]
        mixer, glu = small.layers[0].sublayers
        assert mixer.num_heads / tp >= 2
        assert glu.intermediate_size not in (small.hidden_size, small.vocab_size)
        shrunk = case(PRESET, tp=tp, sequence_parallel=tp > 1)
        assert shrunk.length % mixer.chunk_size
        assert shrunk.length > 3 * mixer.chunk_size


def test_micro_batches_have_unequal_counts_and_documents_at_chunk_edges():
    first, second = make_batches(case(PRESET, dp=2))
    counts = [(batch.labels >= 0).sum(1) for batch in (first, second)]
    assert counts[1].sum() < 0.8 * counts[0].sum()
    assert counts[0][:2].sum() != counts[0][2:].sum()
    starts = [torch.nonzero(row.diff()).flatten() + 1 for row in first.document_ids]
    assert [list(map(int, row)) for row in starts] == [[], [16], [15, 33], [17, 18, 47]]


CPU = torch.device("cpu")


def test_bf16_bound_is_twice_the_largest_rounding_of_one_process(monkeypatch):
    monkeypatch.setattr(rounding, "NUM_DRAWS", 3)
    bf16, largest = case(PRESET, dtype="bfloat16"), {}
    wide = run_reference(bf16, torch.float32, CPU)
    for dither in (None, torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)):
        narrow = run_reference(bf16, torch.bfloat16, CPU, dither=dither)
        for row in compare(bf16, narrow, wide, {}, CPU):
            largest[comparison.role(row.name)] = max(largest.get(comparison.role(row.name), 0.0), row.error)
    assert 1e-3 < largest["logits"] < 3e-2
    for row in compare(bf16, wide, wide, rounding.measure_rounding(bf16, wide, CPU), CPU):
        if comparison.kind(row.name) == "weight":
            assert row.bound == 1e-3
        else:
            of_bf16 = 0.0 if row.name == "grad_norm" else 2 * largest[comparison.role(row.name)]
            assert row.bound == pytest.approx(max(2e-5, of_bf16)), row.name


def test_fp32_beyond_its_bound_is_held_against_one_process_in_fp64(monkeypatch):
    one = case(PRESET, dtype="float32")
    narrow, exact = (run_reference(one, dtype, CPU) for dtype in (torch.float32, torch.float64))
    name = "gradient:embedding.weight"
    rounded = narrow[name].double() - exact[name]
    # 1.5 times the error of one process with the opposite sign, and 2.5 times it with the same sign.
    opposite, too_far = {name: exact[name] - 1.5 * rounded}, {name: exact[name] + 2.5 * rounded}
    monkeypatch.setitem(comparison.RELATIVE_BOUND, "float32", 1e-9)
    assert not all(row.passed for row in compare(one, exact, narrow, None, CPU))
    with process_group(CPU):
        for changed, failing in (({}, []), (opposite, []), (too_far, [name])):
            monkeypatch.setattr(run, "run_on_mesh", lambda *_, changed=changed: exact | changed)
            rows = run.verify(one)
            assert [row.name for row in rows if not row.passed] == failing
    logits = next(row for row in rows if row.name == "logits.0")
    largest = max(comparison.error(name, narrow[name], exact[name], CPU) for name in ("logits.0", "logits.1"))
    assert logits.bound == pytest.approx(2 * largest)


def test_a_reference_that_recomputes_has_the_same_bits():
    one = case(PRESET)
    kept, again = (run_reference(one, torch.float64, CPU, recompute=recompute) for recompute in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_where_one_process_in_fp64_does_not_fit_the_bound_stays(monkeypatch, caplog):
    one = case(PRESET, dtype="float32")
    exact = run_reference(one, torch.float64, CPU)

    def too_large(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setitem(comparison.RELATIVE_BOUND, "float32", 1e-9)
    monkeypatch.setattr(run, "run_on_mesh", lambda *_: exact)
    monkeypatch.setattr(run, "measure_fp32", too_large)
    with process_group(CPU):
        assert {row.bound for row in run.compare_models(one, Mesh(one.parallel, CPU))} == {1e-9, 2e-2}
    assert "float32 bounds stay unchanged" in caplog.text


def test_dithered_weights_go_to_either_neighbour_and_stay_right_on_average():
    bf16 = torch.tensor([1.0 + 2**-9, -3.0 - 2**-8 * 1.5, 2.0**-30 * (1.125 + 2**-10), 5.0, 0.0])
    fp16 = torch.tensor([1.0 + 2**-12, -3.0 - 2**-11 * 1.5, 2.0**-16 * (1 + 2**-9.5), 5.0, 0.0])
    units = {
        torch.bfloat16: [2**-7, 2**-6, 2**-37, 2**-5, 2**-7],
        torch.float16: [2**-10, 2**-9, 2**-24, 2**-8, 2**-10],  # the third is subnormal
    }
    for x, (dtype, places) in zip((bf16, fp16), units.items(), strict=True):
        dithered = outcome._dithered(x.expand(20_000, -1), dtype, torch.Generator().manual_seed(0))
        rows, unit = dithered.to(dtype).to(torch.float64), torch.tensor(places, dtype=torch.float64)
        assert ((rows - x).abs() < unit).all()
        assert [len(column.unique()) for column in rows.T] == [2, 2, 2, 1, 1]
        assert ((rows.mean(0) - x).abs() <= 0.02 * unit).all()


def test_likes_in_other_blocks_and_micro_batches_share_a_role():
    names = {
        "logits.1": "logits",
        "token_losses.0": "token_losses",
        "loss": "loss",
        "gradient:embedding.weight": "gradient:embedding.weight",
        "gradient:blocks.12.sublayers.0.norm.weight": "gradient:blocks.*.sublayers.0.norm.weight",
        "gradient:input_layers.cosformer2.coefficients": "gradient:input_layers.cosformer2.coefficients",
    }
    assert {name: comparison.role(name) for name in names} == names


def bf16_weight_errors(narrow: Outcome, wide: Outcome) -> list[TensorError]:
    """Errors of weights and gradient norm of a bf16 outcome, as `verify` compares them."""
    truth = wide | run_step(case(PRESET, dtype="bfloat16"), narrow, CPU)
    rows = compare(case(PRESET, dtype="bfloat16"), narrow, truth, {}, CPU)
    return [row for row in rows if comparison.kind(row.name) in ("weight", "grad_norm")]


def test_bf16_weights_are_those_that_the_gradients_make():
    """A gradient whose sign changes by rounding moves its weight by twice the learning rate, which is correct."""
    wide, narrow = (
        run_reference(case(PRESET, dtype="bfloat16"), dtype, CPU) for dtype in (torch.float32, torch.bfloat16)
    )
    flipped = [
        row for row in compare(case(PRESET, dtype="bfloat16"), narrow, wide, {}, CPU) if row.name[:6] == "weight"
    ]
    assert max(row.error for row in flipped) > 2e-2
    assert max(row.error for row in bf16_weight_errors(narrow, wide)) < 1e-4
    name = "weight:blocks.0.sublayers.1.mixer.down.weight"
    stale = narrow[name].clone()
    stale.view(-1)[0] += 2e-3 * 4  # one of 1280 elements
    for changed in ({name: stale}, {"grad_norm": narrow["grad_norm"] * (1 + 1e-4)}):
        rows = bf16_weight_errors(narrow | changed, wide)
        assert [row.name for row in rows if not row.passed] == list(changed)


def test_a_step_from_gradients_is_the_step_of_one_process():
    wide = run_reference(case(PRESET, dtype="float32"), torch.float32, CPU)
    step = run_step(case(PRESET, dtype="float32"), wide, CPU)
    assert {comparison.kind(name) for name in step} == {"weight", "grad_norm"}
    assert all(torch.equal(tensor, wide[name]) for name, tensor in step.items())


def test_error_that_is_nan_or_of_another_shape_does_not_pass():
    truth = {"loss": torch.ones(()), "weight:a": torch.ones(2)}
    wrong = {"loss": torch.tensor(float("nan")), "weight:a": torch.ones(3)}
    assert [row.passed for row in compare(case(PRESET), wrong, truth, None, CPU)] == [False, False]


def test_exceeded_bound_is_printed_and_fails(capsys):
    rows = [
        TensorError("loss", 1e-12, 1e-10),
        TensorError("gradient:a", 1e-3, 1e-10),
        TensorError("gradient:b", float("nan"), 1e-10),
    ]
    assert not print_rows(case(PRESET), rows, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is False
    assert [row["passed"] for row in result["rows"]] == [True, False, False]
    assert result["rows"][2]["error"] is None
    assert not print_rows(case(PRESET), rows, as_json=False)
    text = capsys.readouterr().out
    assert re.search(r"gradient:a .*1.00e-03 .*FAILED", text)
    assert "FAILED: 3 tensors on 1 ranks" in text


def test_command_starts_its_own_ranks_and_answers_in_json(capsys):
    assert main(["verify", "transnormerllm-385m", "parallel.tp=2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["passed"], result["tp"], result["dp"], result["dtype"]) == (True, 2, 1, "float64")
    assert max(row["error"] for row in result["rows"] if not row["name"].startswith("weight")) < 1e-10


def test_command_in_one_process_ends_with_1_when_a_bound_is_exceeded(capsys, monkeypatch):
    assert main(["verify", "transnormerllm-385m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    monkeypatch.setitem(comparison.RELATIVE_BOUND, "float64", 1e-18)
    assert main(["verify", "transnormerllm-385m", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_command_ends_with_1_when_a_fused_step_is_wrong(capsys, monkeypatch):
    def without_next_state(mixer, residual, x, norm, context, state):
        y, _ = Mixer.add_step(mixer, residual, x, norm, context, state)
        return MixerOutput(y, state)

    monkeypatch.setattr(TransNormer, "add_step", without_next_state)
    assert main(["verify", "transnormerllm-385m", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows if not row["passed"]] == ["decoding.one_process"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--self-test parallel.tp=2", "--self-test with tp 2 x cp 1 x dp 1 cannot detect the planted faults; use"),
        ("--self-test --world-size 2", "--self-test with tp 1 x cp 1 x dp 2 cannot detect the planted faults; use"),
        ("--self-test parallel.cp=2", "--self-test with tp 1 x cp 2 x dp 1 cannot detect the planted faults; use"),
        ("parallel.tp=0", "parallel.tp = 0: input should be greater than or equal to 1"),
        ("parallel.shard=0", "parallel.shard = 0: input should be greater than or equal to 1"),
        ("parallel.shard=2 --world-size 3", "parallel.shard = 2 does not divide the data axis of 3 ranks"),
        ("parallel.tp=2 --world-size 3", "parallel.tp = 2 does not divide the number of ranks, 3"),
        ("--world-size 0", "--world-size 0: a mesh has at least one rank"),
        ("--length 0", "--length 0: a sequence has at least 1 token"),
        (
            "parallel.tp=2 parallel.sequence_parallel=true --length 33",
            "--length 33 is not divisible by parallel.tp = 2",
        ),
        ("parallel.cp=3 --length 32", "--length 32 is not divisible by parallel.cp = 3; use 30 or 33"),
        ("parallel.tp=3", "model.layers.0.sublayers.0.num_heads = 8, model.hidden_size = 1024 and model.layers.0."),
        ("parallel.tp=3 --full", "are not divisible by parallel.tp = 3; use tp 1, 2, 4"),
        ("parallel.tpp=2", "parallel.tpp: unknown key; did you mean 'tp'?"),
        (
            "train.dtype=bfloat16",
            "'train.dtype' is not read here; known: model.*, parallel.*, train.recompute",
        ),
    ],
)
def test_command_refuses(arguments, message, capsys):
    assert main(["verify", "transnormerllm-385m-64k", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_command_under_a_launcher_with_other_ranks_is_refused(monkeypatch, capsys):
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    for arguments, message in (
        (["parallel.tp=2"], "parallel.tp = 2 does not divide the number of ranks, 3"),
        (["--world-size", "2"], "--world-size 2, but 3 ranks were started; remove --world-size"),
        (["--world-size", "2", "--grid"], "--world-size 2, but 3 ranks were started; remove --world-size"),
    ):
        assert main(["verify", "transnormerllm-385m", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_sequences_shorter_than_a_window_of_the_shrunk_model_are_refused(capsys):
    assert main(["verify", "rodimus_plus-125m", "parallel.cp=4", "--length", "4"]) == 2
    assert (
        "--length 4: the shrunk model has a window of 11 tokens, more than the length; use --length 12 or more"
        in capsys.readouterr().err
    )
    case = {"data_size": 1, "dtype": "float64", "recompute": False}
    model = load_preset("rodimus_plus-125m").model
    make_case(model, ParallelConfig(cp=4), full=False, length=12, **case)
    with pytest.raises(ConfigError, match=r"--length 504: the model has a window of 1024 .* use --length 1026 or more"):
        make_case(model, ParallelConfig(cp=3), full=True, length=504, **case)


def test_length_that_sequence_parallelism_cannot_split_is_refused():
    parallel = ParallelConfig(tp=4, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"--length 50 is not divisible by parallel\.tp = 4.*use 48 or 52"):
        make_case(PRESET, parallel, data_size=1, dtype="float64", full=False, length=50, recompute=False)
