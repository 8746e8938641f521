"""Recorded matmuls and token mixing of a step, and its roofline."""

from collections import Counter

import pytest
import torch

from megalin.commands.base import model_from
from megalin.model.build import make_model
from tests.tools.test_benchmark_train import BLOCKS, TINY

pytestmark = pytest.mark.usefixtures("benchmark_tools")


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


def test_operations_in_no_matmul_bound_the_mixing_where_they_take_longer_than_its_bytes(monkeypatch):
    from train_benchmarks import roofline

    operand = roofline.Operand((4, 4), (4, 1), torch.float32)
    monkeypatch.setattr(roofline, "_time_matmul", lambda matmul, count: 2.0)
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda: 10.0)
    recorded = roofline.Recorded(Counter({("aten::mm", (operand, operand)): 3}), 6.0, {"megalin::decay_scan": 9.0}, 30)
    found = roofline.measure_roofline(recorded, 20, step_flops=3 * 128 + 5 * 64)  # 64 operations a second
    assert (found.mixing, found.mixing_roofline, found.lower_bound) == (9.0, 5.0, 6.0 + 5.0 + 2.0)


@pytest.mark.parametrize(
    ("sublayer", "visible"),
    [
        ("type='softmax'", lambda t, s: s <= t),
        ("type='softmax',window=9", lambda t, s: t - 9 < s <= t),
        ("type='softmax',window=99", lambda t, s: s <= t),
        ("type='softmax',block_size=8", lambda t, s: t // 8 * 8 <= s <= t),
        ("type='shared_key_attention',residual='add',window=9", lambda t, s: t - 9 < s <= t),
        ("type='tnl'", None),
    ],
    ids=["causal", "window", "wide_window", "blocks", "shared_key", "scan"],
)
def test_operations_behind_a_mask_are_those_that_no_kernel_needs(sublayer, visible):
    """Attention has 12 H K operations left for each visible pair of tokens."""
    from train_benchmarks.roofline import masked_flops

    length = 24
    blocks = f"model.layers=[{{repeat=3,sublayers=[{{{sublayer},num_heads=4}}]}}]"
    model = make_model(model_from("tnl-70m", [*TINY, blocks]))
    masked = masked_flops(model, length)
    if visible is None:
        assert masked == 0
        return
    pairs = sum(visible(t, s) for t in range(length) for s in range(length))
    projections = sum(2 * p.numel() for mixer in model.mixers() for p in mixer.parameters())
    assert 3 * model.stack_flops(length) - masked == round(3 * projections + 3 * 12 * 64 * pairs / length)


def test_bytes_of_scans_and_attention_are_those_of_inputs_outputs_and_gradients():
    from train_benchmarks.roofline import _mixing_bytes

    q, v, gate = [2, 64, 4, 16], [2, 64, 4, 32], [2, 64, 4]

    def event(name, *arguments):
        shapes, types = zip(*arguments, strict=True)
        return {"cat": "cpu_op", "name": name, "args": {"Input Dims": list(shapes), "Input type": list(types)}}

    half, none, ids = "c10::BFloat16", ([], ""), ([2, 64], "int")
    scan = [(v, half), none, (q, half), (q, half), (v, half), (gate, "float"), ids, ([2, 4, 16, 32], "float")]
    attention = [(q, half), (q, half), (q, half), (q, half), (q, half), ([], "Scalar")]
    numbers = {"q": 2 * 64 * 4 * 16, "v": 2 * 64 * 4 * 32, "gate": 2 * 64 * 4}
    scanned = 3 * (2 * (2 * numbers["q"] + numbers["v"]) + 4 * numbers["gate"]) + 2 * 2 * numbers["v"]
    assert _mixing_bytes([event("megalin::scalar_decay_scan_finish_backward", *scan)]) == scanned
    assert _mixing_bytes([event("aten::_flash_attention_backward", *attention)]) == 11 * 2 * numbers["q"]
    others = ["megalin::vector_decay_scan_begin_backward", "megalin::decay_scan_finish", "aten::mm"]
    assert _mixing_bytes([event(name, *scan) for name in others]) == 0


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
    expected = tokens * (columns + hidden_states + 2 * 300) * compute + parameters * (3 * compute + 24)
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
    rest = (columns + 600 + (5 + 2) * 64) * 2 + sum(p.numel() for p in model.parameters()) * 30
    assert with_conv == conv_bytes + rest


def test_the_roofline_takes_matmuls_at_the_lesser_of_their_times(monkeypatch):
    from train_benchmarks import roofline

    operand = roofline.Operand((4, 4), (4, 1), torch.float32)
    matmul = ("aten::mm", (operand, operand))
    monkeypatch.setattr(roofline, "_time_matmul", lambda matmul, count: 2.0)
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda: 10.0)
    for in_step, expected in ((5.0, 5.0), (7.0, 6.0)):
        recorded = roofline.Recorded(Counter({matmul: 3}), in_step, {"megalin::decay_scan": 4.0}, 30)
        found = roofline.measure_roofline(recorded, 20, step_flops=3 * 128)
        assert found.seconds == expected + 4.0 + 2.0
        assert found.lower_bound == expected + 3.0 + 2.0
        assert (found.matmuls_isolated, found.matmuls_in_step) == (6.0, in_step)
