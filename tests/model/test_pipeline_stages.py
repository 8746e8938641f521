"""Partition of a decoder into stages: costs, global names of parameters, and models that cannot be partitioned."""

from __future__ import annotations

import pytest
import torch

from megalin.errors import ConfigError
from megalin.model.base import Stage
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.model.pipeline_stages import DecoderStage, plan_stages
from megalin.model.presets import load_preset
from megalin.parallel.initialisation import init_weights
from tests.cases import CASES, make_inputs
from tests.cases import Case as MixerCase

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def cuts_in_two(config: ModelConfig) -> list[list[Stage]]:
    """All partitions into two stages that the residual rules allow."""
    sublayers = [sublayer for _, block in config.blocks() for sublayer in block.sublayers]
    ends = [end for end, sublayer in enumerate(sublayers[:-1], 1) if sublayer.residual == "add"]
    return [[Stage(0, 2, range(end)), Stage(1, 2, range(end, len(sublayers)))] for end in ends]


def decoder_stages(config: ModelConfig, stages: list[Stage]) -> list[DecoderStage]:
    """Initialised stages, in fp64."""
    made = []
    for stage in stages:
        module = DecoderStage(config, None, cp=None, recompute=False, stage=stage, compute_dtype=torch.float64)
        made.append(module.to(torch.float64).to_empty(device="cpu"))
        init_weights(made[-1], 0)
    return made


def test_head_takes_layers_from_the_last_stage():
    plan = plan_stages(load_preset("tnl-7b").model, 4, num_ranks=4, length=8192)
    assert [len(sublayers) for sublayers in plan.sublayers] == [17, 17, 17, 13]
    assert max(plan.costs) / sum(plan.costs) < 0.255
    whole = LanguageModel(load_preset("tnl-7b").model)
    head = whole.forward_flops(8192) - whole.stack_flops(8192)
    assert sum(plan.costs) == whole.forward_flops(8192) + round(0.15 * head)  # the embedding


def test_several_stages_a_rank_are_cut_for_their_schedule():
    """Even stages would leave the rank of the head with much less work than the others; stages with even sums a rank
    would wait for each other."""
    plan = plan_stages(load_preset("transnormerllm-1b-64k").model, 8, num_ranks=4, length=4096)
    assert [len(sublayers) for sublayers in plan.sublayers] == [4, 4, 5, 3, 5, 5, 5, 1]


def test_plan_reads_as_lines():
    """Layer 8.0 is the first sub-layer of layer 8."""
    lines = plan_stages(load_preset("tnl-7b").model, 4, num_ranks=4, length=8192).report_lines()
    assert lines[0].startswith("stage 0: layers 0 to 8.0 and the embedding, 2")
    assert lines[1].startswith("stage 1: layers 8.1 to 16, 2")
    assert lines[2].startswith("stage 2: layers 17 to 25.0, 2")
    assert lines[3].startswith("stage 3: layers 25.1 to 31 and the head, 2")


@by_case
def test_stages_together_hold_every_parameter_by_its_name(case: MixerCase):
    """For every partition: on one stage, except a tied table and parameters that sub-layers share."""
    whole = {name: tuple(parameter.shape) for name, parameter in LanguageModel(case.model).named_parameters()}
    for stages in cuts_in_two(case.model):
        held: dict[str, list[int]] = {}
        for stage in stages:
            for name, parameter in LanguageModel(case.model, stage=stage).named_parameters():
                assert tuple(parameter.shape) == whole[name]
                held.setdefault(name, []).append(stage.number)
        assert held.keys() == whole.keys()
        several = {name for name, numbers in held.items() if len(numbers) > 1}
        assert all(name == "embedding.weight" or name.startswith("shared.") for name in several), several


@by_case
def test_stages_one_after_the_other_are_the_model(case: MixerCase):
    """For every partition, to the last bit."""
    inputs = make_inputs()
    (model,) = decoder_stages(case.model, [Stage(0, 1, range(case.model.num_sublayers))])
    expected = model(inputs.tokens, document_ids=inputs.document_ids, labels=inputs.labels)
    for stages in cuts_in_two(case.model):
        x = inputs.tokens
        for stage in decoder_stages(case.model, stages):
            x = stage(x, document_ids=inputs.document_ids, labels=inputs.labels)
        torch.testing.assert_close(x, expected, rtol=0.0, atol=0.0, msg=str(stages))


def test_part_of_a_block_compiles():
    case = next(case for case in CASES if case.name == "glu-silu")
    inputs = make_inputs()
    stages = [Stage(0, 2, range(1)), Stage(1, 2, range(1, case.model.num_sublayers))]
    x, expected = inputs.tokens, inputs.tokens
    for stage, compiled in zip(decoder_stages(case.model, stages), decoder_stages(case.model, stages), strict=True):
        for block in compiled.block_list():
            block.compile(fullgraph=True, dynamic=False, backend="eager")
        x = compiled(x, document_ids=inputs.document_ids, labels=inputs.labels)
        expected = stage(expected, document_ids=inputs.document_ids, labels=inputs.labels)
    torch.testing.assert_close(x, expected)


def test_what_only_the_next_sublayer_reads_is_not_cut_off():
    """Only the residual stream is sent, never the result of a two_hop sub-layer of Rodimus+."""
    config = load_preset("rodimus_plus-1.3b").model
    assert [sublayer.residual for sublayer in config.layers[0].sublayers] == ["add", "two_hop", "add"]
    inside = False
    for num_stages in range(2, config.num_layers + 1):
        plan = plan_stages(config, num_stages, num_ranks=num_stages, length=4096)
        starts = {plan.places[part.start][1] for part in plan.sublayers}
        assert starts <= {0, 1}, plan.report_lines()
        inside |= 1 in starts
    assert inside


def test_tied_table_and_bounds_of_all_layers_are_held_by_several_stages():
    case = next(case for case in CASES if case.name == "hgrn2")
    bounds = "shared.hgrn2.rows.gamma"
    deep = case.model.model_copy(update={"layers": case.model.layers * 2})
    assert plan_stages(deep, 2, num_ranks=2, length=64).holders == {"embedding.weight": [0, 1], bounds: [0, 1]}
    assert list(plan_stages(deep.model_copy(update={"tie_embeddings": False}), 2, num_ranks=2, length=64).holders) == [
        bounds
    ]
    plan = plan_stages(case.model, 2, num_ranks=2, length=64)  # the second stage has a GLU alone
    assert (plan.sublayers, plan.holders) == ([range(3), range(3, 4)], {"embedding.weight": [0, 1]})


@pytest.mark.parametrize(
    ("name", "ranks", "stages_a_rank", "remedy"),
    [
        ("tnl", 5, 1, "parallel.pp = 4 or less"),
        (
            "tnl",
            3,
            2,
            'parallel.pp = 2 or less, or parallel.pp_stages_per_rank = 1 with another pp_schedule than "interleaved"',
        ),
        ("tnl", 2, 3, "parallel.pp_stages_per_rank = 2"),
        ("rodimus_plus", 2, 4, "parallel.pp_stages_per_rank = 2"),
        ("tnl", 5, 3, "parallel.pp = 1"),
    ],
)
def test_more_stages_than_the_model_has_parts_are_refused(name: str, ranks: int, stages_a_rank: int, remedy: str):
    """Two blocks of two sub-layers; Rodimus+ has three, two of which stay together: four parts."""
    model = next(case.model for case in CASES if case.name == name)
    two = model.model_copy(update={"layers": [model.layers[0].model_copy(update={"repeat": 2})]})
    times = f" times parallel.pp_stages_per_rank = {stages_a_rank}" if stages_a_rank > 1 else ""
    with pytest.raises(ConfigError) as raised:
        plan_stages(two, ranks * stages_a_rank, num_ranks=ranks, length=64)
    assert str(raised.value) == (
        f"parallel.pp = {ranks}{times} stages are more than the 4 into which the model's sub-layers can be "
        f"partitioned; use {remedy}"
    )
    assert len(plan_stages(two, 4, num_ranks=4, length=64).sublayers) == 4


def test_encoder_is_refused():
    with pytest.raises(ConfigError, match=r'model\.kind = "encoder": an encoder cannot be partitioned into stages'):
        plan_stages(load_preset("danet-small").model, 2, num_ranks=2, length=64)
