"""The search over layouts, on models of a few layers."""

import math
import random

import pytest
import torch

from megalin.model.config import ModelConfig
from megalin.model.presets import load_preset
from megalin.parallel.config import ParallelConfig
from megalin.parallel.float8_layers import Float8Settings
from megalin.planner.block_traces import LossCost, Trace, scaled_cost
from megalin.planner.estimate import Estimate, Estimator
from megalin.planner.graph_cost import COPY, CollectiveCost
from megalin.planner.hardware import (
    COPY_EFFICIENCY,
    FLOAT8_SPEEDUP,
    HARDWARE,
    HOST_SECONDS,
    MATRIX_EFFICIENCY,
    SIGNAL_SECONDS,
)
from megalin.planner.memory import Memory
from megalin.planner.parameters import Elements, StageParameters
from megalin.planner.search import Limits, Plan, by_preference, search
from megalin.planner.step_time import MicroBatchWork, Sent, StepTime, micro_batch_traffic, step_time
from megalin.planner.tracing import RunCost
from megalin.planner.workload import ParallelLayout, Workload
from tests.cases import HYBRID

MIB = 2**20
FIRST, SECOND, *_ = HYBRID.model.layers
MODEL = HYBRID.model.model_copy(update={"layers": [FIRST, SECOND.model_copy(update={"repeat": 7})]})


def workload(*, samples: int = 8, length: int = 4096) -> Workload:
    return Workload(MODEL, length, samples, torch.bfloat16, compiled=False)


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    """One estimator for all tests, which share its traces."""
    return Estimator(workload(), HARDWARE["h200"])


def reasons(found: Plan) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for refusal in found.refusals:
        kinds.setdefault(refusal.kind, []).append(f"{refusal.layout}: {refusal.reason}")
    return kinds


def refused(gpus: int, *, sequence_parallel: bool = False, **sizes: int) -> dict[str, list[str]]:
    """Layouts that the rules alone refuse: none fits one byte, so no block is traced."""
    limits = Limits(gpus, 1, sequence_parallel)
    return reasons(search(Estimator(workload(**sizes), HARDWARE["h200"]), limits, count=1))


def layout(parallel: ParallelConfig = ParallelConfig(), **fields: int) -> ParallelLayout:  # noqa: B008
    values = {"dp": 4, "micro_batch_size": 1, "num_micro_batches": 2, "recompute": False}
    return ParallelLayout(parallel, **(values | fields))


def test_with_memory_to_spare_every_mesh_is_offered_once_and_fastest_first(estimator):
    found = search(estimator, Limits(2, 10**12), count=100)
    meshes = [(e.layout.parallel.tp, e.layout.parallel.cp, e.layout.parallel.pp) for e in found.best]
    assert sorted(meshes) == [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert found.best == by_preference(found.best)
    for estimate in found.best:
        parallel, each = estimate.layout.parallel, estimate.layout
        assert each.dp * parallel.tp * parallel.cp * parallel.pp == 2
        assert each.dp * each.micro_batch_size * each.num_micro_batches == 8
        assert estimate.tokens_per_second == pytest.approx(8 * 4096 / estimate.time.total)


def simplicity(estimate: Estimate) -> tuple[int, int, bool, int]:
    parallel, each = estimate.layout.parallel, estimate.layout
    axes = (parallel.tp, parallel.cp, parallel.pp)
    return sum(size > 1 for size in axes), math.prod(axes), each.recompute, each.zero


def test_the_simplest_of_equally_fast_layouts_comes_first():
    """Random layouts and times: no later one is simpler and within 2 % of the fastest that were left."""
    draw = random.Random(0)
    for _ in range(200):
        estimates = [
            Estimate(
                layout(
                    ParallelConfig(tp=draw.choice((1, 2, 4)), cp=draw.choice((1, 2)), zero=draw.choice((0, 1, 3))),
                    recompute=draw.random() < 0.5,
                ),
                Memory(*(draw.randint(1, 9) for _ in Memory._fields)),
                StepTime(draw.choice((1.0, 1.015, 1.0199, 1.021, 1.05)), *(0.0,) * 6),
                Sent(0, 0, 0, 0),
                1.0,
            )
            for _ in range(draw.randint(1, 12))
        ]
        ordered = by_preference(estimates)
        assert sorted(map(id, ordered)) == sorted(map(id, estimates))
        for place, chosen in enumerate(ordered):
            fastest = min(each.time.total for each in ordered[place:])
            close = [each for each in ordered[place:] if each.time.total <= 1.02 * fastest]
            assert chosen.time.total <= 1.02 * fastest
            assert simplicity(chosen) == min(map(simplicity, close))
            assert chosen.time.total == min(e.time.total for e in close if simplicity(e) == simplicity(chosen))


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("name", ["transnormerllm-tiny", "rodimus_plus-tiny", "llama-tiny"])
def test_a_tiny_model_is_data_parallel_without_recomputation(name, gpus):
    """The host launches it as slowly on every mesh, so that memory, which it does not need, decided."""
    model = load_preset(name).model
    assert isinstance(model, ModelConfig)
    tiny = Estimator(Workload(model, 128, 8, torch.float32, compiled=False), HARDWARE["h100"])
    (best,) = search(tiny, Limits(gpus, 10**10), count=1).best
    assert simplicity(best) == (0, 1, False, 0)
    assert best.layout.dp == gpus
    assert best.layout.num_micro_batches == 1


def test_recomputation_launches_the_forward_again(estimator):
    """Short sequences, for which the device waits for the host."""
    short = Estimator(workload(length=128), HARDWARE["h200"])
    kept, again = (short.estimate(layout(recompute=recompute), refined=False).time for recompute in (False, True))
    assert again.total - kept.total == pytest.approx(2 * HOST_SECONDS * MODEL.num_layers / 3, rel=1e-3)


def test_each_refusal_has_its_reason():
    found = refused(36, samples=36, length=6150)
    assert any("tp above 8" in kind for kind in found)
    assert any("cp would leave a rank fewer than 1024 of the 6150 tokens" in kind for kind in found)
    assert any("a sequence of 6150 tokens is not divisible by parallel.cp = 4" in kind for kind in found)
    assert any("needs at least" in reason for reason in found["the pipeline needs more micro-batches"])
    assert any("sub-layers can be partitioned" in kind for kind in found)
    uneven = refused(4, samples=6)["samples a step are not divisible by dp"]
    assert uneven == ["tp 1, cp 1, pp 1: 6 samples a step are not divisible by dp = 4"]


def test_sizes_that_do_not_divide_are_refused_by_the_models_own_rule():
    (kind,) = [kind for kind in refused(8) if "not divisible by parallel.tp = 8" in kind]
    assert "use tp 1, 2, 3, 4" in kind


def test_meshes_with_tp_are_tried_with_and_without_sequence_parallelism():
    kind = "memory, most of it weights and optimizer"
    both, only = refused(2)[kind], refused(2, sequence_parallel=True)[kind]
    tp = [name for name in both if name.startswith("tp 2")]
    assert len(tp) == 2 * len([name for name in tp if "sequence parallel, " in name]) > 0
    assert [name for name in only if name.startswith("tp 2")] == [name for name in tp if "sequence parallel, " in name]
    assert [name for name in only if not name.startswith("tp")] == [name for name in both if not name.startswith("tp")]


def test_lengths_that_sequence_parallelism_cannot_shard_keep_the_mesh_without_it():
    found = refused(4, length=4098)
    expected = (
        "tp 4, cp 1, pp 1, sequence parallel: a sequence of 4098 tokens is not divisible by parallel.tp = 4, as "
        "parallel.sequence_parallel needs; use 4096 or 4100"
    )
    assert expected in found["the sequence length is not divisible as sequence parallelism needs"]
    assert any(reason.startswith("tp 4, dp 1") for reason in found["memory, most of it weights and optimizer"])


def test_overlap_of_tensor_parallelism_is_the_configs(estimator):
    found = search(estimator, Limits(2, 10**12, True, "none"), count=100)
    (tp,) = [estimate for estimate in found.best if estimate.layout.parallel.tp == 2]
    assert tp.layout.parallel.tp_overlap == "none"
    assert tp.memory.symmetric_memory == 0


def test_memory_refuses_and_reports_the_missing_bytes(estimator):
    found = search(estimator, Limits(2, 100 * MIB), count=100)
    assert found.best
    assert max(estimate.memory.total for estimate in found.best) <= 100 * MIB
    missing = [refusal for refusal in found.refusals if refusal.kind.startswith("memory")]
    assert all(refusal.missing_bytes > 0 for refusal in missing)
    assert {refusal.kind for refusal in missing} >= {"memory, most of it activations"}


def test_a_layout_is_offered_only_after_its_compiled_blocks_were_traced():
    one_block = MODEL.model_copy(update={"layers": [FIRST]})
    estimator = Estimator(Workload(one_block, 512, 1, torch.bfloat16, compiled=True), HARDWARE["h200"])
    least = layout(dp=1, num_micro_batches=1, recompute=True)
    close = estimator.estimate(least, refined=True).memory.total
    assert close < estimator.estimate(least, refined=False).memory.total  # eager blocks are no reason to refuse
    (best,) = search(estimator, Limits(1, close), count=1).best
    assert best.layout == least
    found = search(estimator, Limits(1, close - 1), count=1)
    assert found.best == []
    assert (least.name(), "lacks 0.1 GiB") in [refusal[:2] for refusal in found.refusals]  # one byte, rounded up


def test_nothing_fits_where_the_weights_do_not():
    assert set(refused(1)) == {"memory, most of it weights and optimizer"}


def test_what_a_layout_shards_and_recomputes_shows_in_its_memory(estimator):
    def memory(parallel: ParallelConfig, **fields: int) -> Memory:
        return estimator.estimate(layout(parallel, **fields), refined=False).memory

    zero = [memory(ParallelConfig(zero=stage)) for stage in (0, 1, 2, 3)]
    buffers = _buffers(estimator)
    # Whole weights take 4 bytes an element; of four ranks' shards with copies in bf16 each takes 6 a quarter.
    assert 6 * (zero[0].weights - buffers) == 4 * 4 * (zero[1].weights - buffers)
    assert zero[1].gradients > zero[2].gradients
    assert zero[2].gathered > zero[3].gathered
    assert zero[1].optimizer == zero[3].optimizer == 4 * (zero[3].weights - buffers) / 3
    kept, formed = memory(ParallelConfig()), memory(ParallelConfig(), recompute=True)
    assert formed.activations < kept.activations / 2
    assert formed.total < kept.total
    assert memory(ParallelConfig(), micro_batch_size=3).activations > 2.5 * kept.activations
    assert memory(ParallelConfig(tp=2)).activations < 0.7 * kept.activations
    assert memory(ParallelConfig(cp=2)).activations < 0.7 * kept.activations


def test_symmetric_memory_is_counted_for_overlapped_transfers(estimator):
    def symmetric_memory_bytes(dp: int = 1, **axes: object) -> int:
        parallel = ParallelConfig.model_validate(axes)
        each = layout(parallel, dp=dp, num_micro_batches=4, micro_batch_size=3)
        return estimator.estimate(each, refined=False).memory.symmetric_memory

    hidden_bytes = 3 * 4096 * MODEL.hidden_size * 2
    sharded = {"tp": 2, "sequence_parallel": True}
    assert symmetric_memory_bytes() == symmetric_memory_bytes(tp=2) == 0
    assert (
        symmetric_memory_bytes(**sharded)
        == symmetric_memory_bytes(**sharded, tp_overlap="symmetric_memory")
        == 2 * hidden_bytes
    )
    assert symmetric_memory_bytes(**sharded, tp_overlap="none") == 0
    # Two slots for activations and two for gradients per stage, if all ranks of the pipeline are on one host.
    assert symmetric_memory_bytes(pp=2) == symmetric_memory_bytes(pp=2, dp=4) == 4 * hidden_bytes
    assert symmetric_memory_bytes(pp=2, pp_schedule="interleaved", pp_stages_per_rank=2) == 8 * hidden_bytes
    assert symmetric_memory_bytes(pp=2, pp_transfer="p2p") == symmetric_memory_bytes(pp=2, dp=8) == 0
    assert symmetric_memory_bytes(**sharded, pp=2) == 2 * hidden_bytes + 4 * hidden_bytes // 2
    assert symmetric_memory_bytes(**sharded, pp=2, pp_schedule="zero_bubble") == 4 * hidden_bytes // 2


def test_hidden_states_gathered_again_for_the_backward_are_sent_again(estimator):
    synchronous, overlapped = (
        estimator.estimate(layout(ParallelConfig(tp=2, sequence_parallel=True, tp_overlap=way)), refined=False).sent.tp
        for way in ("none", "symmetric_memory")
    )
    # Most sub-layers have five transfers instead of four.
    assert 1.1 * synchronous < overlapped < 1.25 * synchronous


def test_overlapped_matmuls_scale_with_the_micro_batch(estimator):
    each = layout(ParallelConfig(tp=2, sequence_parallel=True), micro_batch_size=3)
    rough, close = (estimator._trace(each, refined=refined) for refined in (False, True))
    assert any(collective.overlapped_flops for collective in close.blocks[0].forward)
    assert [cost.forward + cost.backward for cost in rough.blocks] == [
        cost.forward + cost.backward for cost in close.blocks
    ]


def test_a_refined_estimate_has_a_trace_of_its_own_micro_batch(estimator, monkeypatch):
    """Of eager blocks too, whose rough estimate of three samples is extrapolated and kept."""
    each = layout(micro_batch_size=3)
    rough = estimator.estimate(each, refined=False)
    own = estimator._trace(each, refined=True)
    larger = own._replace(entry=own.entry._replace(saved_bytes=own.entry.saved_bytes + MIB))
    monkeypatch.setattr(estimator, "_traces", dict(estimator._traces))  # the other tests keep theirs
    monkeypatch.setitem(estimator._traces, (*estimator._trace_key(each.parallel, refined=True), 3), larger)
    assert estimator.estimate(each, refined=True).memory.activations != rough.memory.activations


def _buffers(estimator: Estimator) -> int:
    (parameters,) = estimator.parameters(layout())
    return parameters.buffer_bytes


def test_bytes_by_axis_are_those_of_the_collectives(estimator):
    (parameters,) = estimator.parameters(layout())
    sent = estimator.estimate(layout(), refined=False).sent
    # ZeRO 3 over 4 ranks, 2 micro-batches: each gathers bf16 weights twice and reduces fp32 gradients once.
    assert sent == (0, 0, (2 * 2 * 2 + 2 * 4) * parameters.whole * 3 // 4, 0)
    hidden_bytes = 4096 * MODEL.hidden_size * 2
    tp = estimator.estimate(layout(ParallelConfig(tp=2), dp=1), refined=False).sent.tp
    sublayers = sum(len(block.sublayers) * block.repeat for block in MODEL.layers)
    # One all-reduce per sub-layer and direction, one of the embedding, one of the head; two micro-batches.
    assert tp >= 2 * (2 * sublayers + 2) * hidden_bytes
    assert tp < 1.3 * 2 * (2 * sublayers + 2) * hidden_bytes
    pp = estimator.estimate(layout(ParallelConfig(pp=2, zero=1)), refined=False).sent.pp
    assert pp == 2 * 2 * hidden_bytes


def test_a_deeper_pipeline_keeps_more_micro_batches_and_waits_longer(estimator):
    assert [layout(ParallelConfig(pp=4), num_micro_batches=9).in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert layout(ParallelConfig(pp=4), num_micro_batches=2).in_flight(0) == 2
    stages = ParallelConfig(pp=2, pp_schedule="interleaved", pp_stages_per_rank=2)
    assert [layout(stages, num_micro_batches=8).in_flight(rank) for rank in range(2)] == [5, 3]
    two, interleaved = (
        estimator.estimate(layout(parallel, num_micro_batches=8), refined=False)
        for parallel in (ParallelConfig(pp=2), stages)
    )
    assert two.time.pipeline > 0
    assert interleaved.time.pipeline < two.time.pipeline
    assert two.memory.total > 0


def test_parts_of_blocks_add_up_to_the_model(estimator):
    """Four ranks, some of which hold parts of the same block."""
    alone, parallel = ParallelConfig(), ParallelConfig(pp=4)
    whole = estimator._work(layout(), estimator._own_blocks(alone, 0), 0)
    blocks = [estimator._own_blocks(parallel, rank) for rank in range(4)]
    works = [estimator._work(layout(parallel), own, rank) for rank, own in enumerate(blocks)]
    assert [sum(each) for each in zip(*works, strict=True)] == pytest.approx(whole)
    assert any(estimator._fraction(part) < 1 for own in blocks for part in own.parts)


def test_part_of_a_block_costs_its_fraction():
    collective = CollectiveCost(COPY, "tp", 40, 8)
    assert scaled_cost(RunCost(100, 300, 200, [collective], [collective]), 0.25) == RunCost(
        25, 75, 50, [CollectiveCost(COPY, "tp", 10, 2)], [CollectiveCost(COPY, "tp", 10, 2)]
    )


def test_embedding_and_last_norm_count_on_the_ranks_that_have_them():
    entry, block, exit_ = (RunCost(0, 0, size, [CollectiveCost("all_reduce", "tp", size)], []) for size in (10, 100, 1))
    trace = Trace([block], entry, exit_, LossCost(0, 0, 0), 0)
    nothing = StageParameters([], Elements(0, 0), Elements(0, 0), 0, 0)
    each = layout(ParallelConfig(tp=2, pp=3), dp=1, num_micro_batches=3)
    times, sent = zip(
        *(
            step_time(
                MicroBatchWork(0, 0, 0, 1),
                nothing,
                micro_batch_traffic(trace, [0], each.parallel, HARDWARE["h200"], recompute=False, rank=rank),
                each,
                HARDWARE["h200"],
                itemsize=2,
            )
            for rank in range(3)
        ),
        strict=True,
    )
    assert [of.tp for of in sent] == [3 * 110, 3 * 100, 3 * 101]
    assert [of.kernels / times[1].kernels for of in times] == pytest.approx([1.1, 1.0, 1.01])


@pytest.mark.parametrize("overlapped", [0.0, 0.25, 1.0, 4.0])
def test_a_copy_is_waited_for_as_far_as_matmuls_do_not_hide_it(overlapped):
    hardware, hidden_bytes = HARDWARE["h200"], 10**9
    wire = hidden_bytes * 3 // 4 / (hardware.link_bandwidth * COPY_EFFICIENCY)
    copy = CollectiveCost(COPY, "tp", hidden_bytes, int(overlapped * wire * hardware.matrix_flops * MATRIX_EFFICIENCY))
    block = RunCost(0, 0, 0, [copy], [])
    trace = Trace([block], RunCost(0, 0, 0, [], []), RunCost(0, 0, 0, [], []), LossCost(0, 0, 0), 0)
    nothing = StageParameters([], Elements(0, 0), Elements(0, 0), 0, 0)
    each = layout(ParallelConfig(tp=4, sequence_parallel=True), dp=1, num_micro_batches=1)
    traffic = micro_batch_traffic(trace, [0], each.parallel, hardware, recompute=False, rank=0)
    time, sent = step_time(MicroBatchWork(0, 0, 0, 1), nothing, traffic, each, hardware, itemsize=2)
    assert sent.tp == hidden_bytes * 3 // 4
    assert time.collectives == pytest.approx(SIGNAL_SECONDS + wire * max(0.0, 1 - overlapped))


def test_an_axis_that_leaves_the_host_waits_for_the_network(estimator):
    inside = estimator.estimate(layout(dp=8), refined=False)
    outside = estimator.estimate(layout(dp=16), refined=False)
    assert outside.time.data_parallel > 4 * inside.time.data_parallel


def test_fp8_matmuls_save_time_in_the_layers_and_passes_that_run_in_fp8():
    block = {"sublayers": [{"type": "hgrn2", "num_heads": 2}, {"type": "glu", "intermediate_size": 128}]}
    model = ModelConfig.model_validate({"vocab_size": 257, "hidden_size": 64, "layers": [block]})
    bf16 = Workload(model, 1024, 8, torch.bfloat16, compiled=False)
    flops = 2 * (4 * 64 * 64 + 3 * 64 * 128) * 1024  # a token of a sample, forward
    each = layout(dp=1)

    def difference(settings: Float8Settings) -> float:
        plans = (Estimator(bf16._replace(float8=chosen), HARDWARE["h200"]) for chosen in (None, settings))
        plain, float8 = (plan.estimate(each, refined=False) for plan in plans)
        assert float8.time.update > plain.time.update
        assert float8.time.kernels > plain.time.kernels, "casts"
        return plain.time.matmuls - float8.time.matmuls

    one_pass = 2 * flops / (HARDWARE["h200"].matrix_flops * MATRIX_EFFICIENCY) * (1 - 1 / FLOAT8_SPEEDUP)
    assert difference(Float8Settings(min_width=64)) == pytest.approx(2 * one_pass)
    assert difference(Float8Settings(min_width=64, weight_gradient=True)) == pytest.approx(3 * one_pass)
    found = search(
        Estimator(bf16._replace(float8=Float8Settings(min_width=64)), HARDWARE["h200"]), Limits(2, 1), count=1
    )
    assert not [kind for kind in reasons(found) if "multiples of 16" in kind]
    narrow = model.model_copy(update={"hidden_size": 48})
    found = search(
        Estimator(bf16._replace(model=narrow, float8=Float8Settings(48)), HARDWARE["h200"]), Limits(2, 1), count=1
    )
    (refusals,) = (lines for kind, lines in reasons(found).items() if "multiples of 16" in kind)
    assert [line.split(":")[0] for line in refusals] == ["tp 2, cp 1, pp 1"]
