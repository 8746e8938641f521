"""Block body of DANet against its equations, token by token: windows, padding, packed documents, weight scaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.layers.mixer_configs.dense_attention import DenseAttentionConfig
from megalin.layers.mixers.base import BuildContext, MixerContext, update_derived_buffers
from megalin.layers.mixers.dense_attention import DenseAttention
from megalin.parallel.collectives import Axis
from megalin.parallel.context_parallel import FullSequenceInfo
from megalin.parallel.initialisation import init_weights
from megalin.parallel.sequence_documents import DocumentView
from megalin.parallel.tensor_parallel import TensorParallel
from tests.numerics import Tensors, assert_close, errors

WIDTH, BOUND, WINDOW = 24, 1e-12, 8
KINDS: dict[str, dict[str, Any]] = {
    "global": {},
    "local": {"kind": "local", "window": WINDOW},
    "shifted": {"kind": "shifted_local", "window": WINDOW},
    "local-document-relpe": {"kind": "local", "window": WINDOW, "local_relpe": False},
    "shifted-document-relpe": {"kind": "shifted_local", "window": WINDOW, "local_relpe": False},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_head_case = pytest.mark.parametrize("heads", [1, 4])


def configured(setting: str = "global", heads: int = 1, **fields: Any) -> DenseAttentionConfig:
    values = {"type": "dense_attention", "num_heads": heads, "ffn_ratio": 2, **KINDS[setting], **fields}
    return parse(DenseAttentionConfig, values, "mixer")


def build(config: DenseAttentionConfig, dtype: torch.dtype = torch.float64) -> DenseAttention:
    """Builds a mixer whose weights are large against MaxNorm's eps, and large enough to be scaled down."""
    scope = BuildContext(WIDTH, 1, 3, TensorParallel(), 0.2, "place", 0.2)
    mixer = config.build(scope).to(dtype)
    mixer.to_empty(device="cpu")
    init_weights(mixer, 0)
    with torch.no_grad():
        for weight, factor in ((mixer.query.weight, 300.0), (mixer.up.weight, 5.0), (mixer.down.weight, 7.0)):
            weight.mul_(factor)
    update_derived_buffers([mixer])
    return mixer


def visible_to(config: DenseAttentionConfig, t: int, length: int) -> list[int]:
    """Tokens of a document that token t attends to."""
    if config.window is None:
        return list(range(length))
    shift = config.window // 2 if config.kind == "shifted_local" else 0
    return [s for s in range(length) if (s + shift) // config.window == (t + shift) // config.window]


def frequency(config: DenseAttentionConfig, i: int) -> float:
    """Radians a token of channel i of a head."""
    head = WIDTH // config.num_heads
    if config.relpe_frequencies == "constant":
        return config.relpe_constant
    return 10000.0 ** -((2 if config.relpe_frequencies == "printed" else 1) * (i % head) / head)


def encoded(config: DenseAttentionConfig, x: Tensor, place: int, form: str) -> Tensor:
    """Queries or keys [D] at a position in the form of DenseAttention section 3.2: f, g_1 or g_2."""
    angles = [place * frequency(config, i) for i in range(WIDTH)]
    if form == "rope":
        turned = []
        for i in range(0, WIDTH, 2):
            cos, sin = math.cos(angles[i]), math.sin(angles[i])
            turned += [x[i] * cos - x[i + 1] * sin, x[i] * sin + x[i + 1] * cos]
        return torch.stack(turned)
    minus = 1.0 if form == "g2" else 0.0
    return x * x.new_tensor([math.cos(angle) - minus * math.sin(angle) for angle in angles])


def max_normed(row: Tensor, eps: float) -> Tensor:
    """The row [D] over its largest magnitude."""
    return row / (row[row.abs().argmax()].abs() + eps)


def document(config: DenseAttentionConfig, weights: Tensors, x: Tensor, valid: Tensor) -> Tensor:
    """The block body over one document: x [T, D], valid [T] -> [T, D]."""
    length, head = len(x), WIDTH // config.num_heads
    if config.norm == "maxnorm":
        x = torch.stack([max_normed(row, config.norm_eps) for row in x])
    shift = config.window // 2 if config.kind == "shifted_local" else 0
    count = config.window or max(1, int(valid.sum()))
    places = [(t + shift) % config.window if config.window and config.local_relpe else t for t in range(length)]
    x = x * valid[:, None] / count ** (1 / 3)
    if config.relpe == "cosine":
        x = torch.stack([encoded(config, row, place, "cosine") for row, place in zip(x, places, strict=True)])
    q, k = x @ weights["query.weight"][0].T, x
    if config.relpe not in ("cosine", "none"):
        of_q, of_k = {"cosine_qk": ("g1", "g1"), "g2": ("g2", "g1"), "rope": ("rope", "rope")}[config.relpe]
        q = torch.stack([encoded(config, row, place, of_q) for row, place in zip(q, places, strict=True)])
        k = torch.stack([encoded(config, row, place, of_k) for row, place in zip(k, places, strict=True)])
    outputs = []
    for t in range(length):
        near = visible_to(config, t, length)
        heads = [(q[t, a] @ k[near][:, a].T) @ x[near][:, a] for a in torch.arange(WIDTH).split(head)]
        outputs.append(torch.cat(heads))
    up, down = weights["up.weight"][0], weights["down.weight"]
    bound = 1.0 / math.sqrt(2 * up.shape[0])
    if config.scale_ffn_weights:
        up, down = (w * min(1.0, bound / w.detach().abs().max().item()) for w in (up, down))
    z = (torch.stack(outputs) @ up.T).clamp(min=0.0) @ down.T
    return torch.stack([max_normed(row, config.norm_eps) for row in z])


def packed_documents(config: DenseAttentionConfig, weights: Tensors, x: Tensor, valid: Tensor, ids: Tensor) -> Tensor:
    """The block body over packed documents [T, D], one document at a time."""
    lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
    documents = zip(x.split(lengths), valid.split(lengths), strict=True)
    return torch.cat([document(config, weights, part, kept) for part, kept in documents])


def context(
    dtype: torch.dtype = torch.float64,
    *,
    document_ids: Tensor | None = None,
    valid: Tensor | None = None,
    full_sequence: FullSequenceInfo | None = None,
) -> MixerContext:
    """The context of one rank, or of a rank with a shard of `full_sequence`; the positions are unusable."""
    full_sequence = FullSequenceInfo(document_ids, valid) if full_sequence is None else full_sequence
    view = DocumentView(document_ids, valid, full_sequence=full_sequence)
    return MixerContext(torch.full((1,), 10**6), view, dtype, (), consecutive=True)


def inputs_of(length: int, *, padded: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x [3, T, D] with a largest magnitude of one, and valid tokens: all, some, and at most one if padded."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(3, length, WIDTH, generator=generator, dtype=torch.float64)
    valid = torch.ones(3, length, dtype=torch.bool)
    if padded:
        valid[1, length // 3 :: 3] = False
        valid[2, 1:] = False
    return (x / x.abs().amax(-1, keepdim=True)).to(dtype), valid


def outcome(mixer: DenseAttention, x: Tensor, known: MixerContext, dy: Tensor, run: Any = None) -> Tensors:
    """Output and gradients of `run`, by default the mixer itself."""
    x = x.clone().requires_grad_()
    mixer.zero_grad()
    y, state = (mixer if run is None else run)(x, known, None)
    assert state == ()
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: weight.grad.clone() for name, weight in mixer.named_parameters()}


def defined(mixer: DenseAttention, x: Tensor, valid: Tensor, ids: Tensor, dy: Tensor) -> Tensors:
    x = x.clone().requires_grad_()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in mixer.named_parameters()}
    rows = [packed_documents(mixer.config, weights, *row) for row in zip(x, valid, ids, strict=True)]
    y = torch.stack(rows)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: weight.grad for name, weight in weights.items()}


@every_kind
@every_head_case
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, *(pytest.param(length, marks=pytest.mark.slow) for length in (15, 16)), 17, 40])
def test_values_and_gradients_equal_the_equations(kind: str, heads: int, padded: bool, length: int):
    mixer, (x, valid) = build(configured(kind, heads)), inputs_of(length, padded=padded)
    dy, ids = torch.randn_like(x), torch.zeros(3, length, dtype=torch.int32)
    actual = outcome(mixer, x, context(valid=valid if padded else None), dy)
    assert 0.1 < actual["y"].abs().max() < 1.0
    assert_close(actual, defined(mixer, x, valid, ids, dy), BOUND)


@pytest.mark.parametrize("norm", ["srmsnorm", "uncentered_layernorm"])
def test_another_norm_of_the_input_is_applied_by_the_block(norm: str):
    """The mixer itself then does not norm its input."""
    assert configured().norms_input
    mixer, (x, valid) = build(configured("shifted", 4, norm=norm)), inputs_of(17, padded=True)
    assert not mixer.config.norms_input
    dy, ids = torch.randn_like(x), torch.zeros(3, 17, dtype=torch.int32)
    assert_close(outcome(mixer, x, context(valid=valid), dy), defined(mixer, x, valid, ids, dy), BOUND)


@every_kind
@every_head_case
@pytest.mark.parametrize("padded", [False, True])
def test_packed_documents_equal_each_by_itself(kind: str, heads: int, padded: bool):
    """Documents have 1, 7, 8, 9 and 15 tokens, and windows start with each document."""
    mixer, (x, valid) = build(configured(kind, heads)), inputs_of(40, padded=padded)
    lengths = torch.tensor([1, 7, 8, 9, 15])
    ids = torch.stack([torch.arange(5).repeat_interleave(lengths), torch.zeros(40), torch.arange(40) // 20]).int()
    dy = torch.randn_like(x)
    actual = outcome(mixer, x, context(valid=valid if padded else None, document_ids=ids), dy)
    assert_close(actual, defined(mixer, x, valid, ids, dy), BOUND)


@every_kind
@every_head_case
def test_other_documents_and_padding_move_no_bit(kind: str, heads: int):
    config = configured(kind, heads)
    mixer, (x, valid) = build(config, torch.float32), inputs_of(40, padded=True, dtype=torch.float32)
    ids = (torch.arange(40) >= 19).int().expand(3, -1)
    mine = (ids == 1) & valid
    dy = torch.randn_like(x) * mine[..., None]
    found = []
    for factor in (1.0, -0.3):
        changed = torch.where(mine[..., None], x, x * factor)
        found.append(outcome(mixer, changed, context(torch.float32, valid=valid, document_ids=ids), dy))
    assert torch.equal(found[0]["y"][mine], found[1]["y"][mine])
    for name in found[0].keys() - {"y"}:
        assert torch.equal(found[0][name], found[1][name]), name
    assert found[0]["x"][~mine].eq(0).all()


@every_kind
@every_head_case
@pytest.mark.parametrize("packed", [False, True])
def test_padding_gives_zeros_and_has_no_gradient(kind: str, heads: int, packed: bool):
    """Padded tokens and padded sequences give zeros; gradients of their outputs are dropped too."""
    mixer, (x, valid) = build(configured(kind, heads)), inputs_of(40, padded=True)
    valid[2] = False
    ids = (torch.arange(40) // 20).int().expand(3, -1) if packed else None
    dy = torch.randn_like(x)
    found = outcome(mixer, x, context(valid=valid, document_ids=ids), dy)
    assert found["y"][~valid].eq(0).all()
    assert found["x"][~valid].eq(0).all()
    assert_close(found, outcome(mixer, x, context(valid=valid, document_ids=ids), dy * valid[..., None]), 0.0)
    nothing = outcome(mixer, x, context(valid=torch.zeros_like(valid), document_ids=ids), dy)
    assert all(tensor.eq(0).all() for tensor in nothing.values())


@every_head_case
@pytest.mark.parametrize("kind", ["global", "shifted"])
def test_bf16_errs_at_most_twice_as_much_as_the_equations_in_bf16(kind: str, heads: int):
    """Values, and the only gradient that does not depend on decisions that rounding may change.

    Such are the index of a row's maximum (only rows with a clear one count) and the side of zero that ReLU is on.
    """
    mixer, wide = build(configured(kind, heads)).bfloat16(), build(configured(kind, heads))
    mixer.ratio = mixer.ratio.float()  # sharded data parallelism casts weights, not buffers
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            weight.copy_(mixer.get_parameter(name))
    update_derived_buffers([mixer, wide])
    (x, valid), ids = inputs_of(40, padded=True, dtype=torch.bfloat16), torch.zeros(3, 40)
    known = context(torch.bfloat16, valid=valid)
    largest = wide(x.double(), known, None).y.abs().topk(2).values
    dy = torch.randn_like(x) * (largest[..., :1] > 1.2 * largest[..., 1:])
    truth = defined(wide, x.double(), valid, ids, dy.double())
    found = errors(outcome(mixer, x, known, dy), truth)
    allowed = errors(defined(mixer, x, valid, ids, dy), truth)
    for name in ("y", "down.weight"):
        assert found[name] <= 2.0 * allowed[name], name


def test_the_ratio_follows_the_weights():
    mixer = build(configured())
    bound = 1.0 / math.sqrt(2 * 2 * WIDTH)
    for up, down in ((0.5, 0.25), (bound / 2, 0.25), (bound / 2, bound / 3), (0.0, 0.0)):
        with torch.no_grad():
            mixer.up.weight.fill_(-up)
            mixer.down.weight.fill_(down)
        update_derived_buffers([mixer])
        expected = min(1.0, bound / max(up, 1e-30)) * min(1.0, bound / max(down, 1e-30))
        assert mixer.ratio.item() == pytest.approx(expected, rel=1e-12)


def test_the_ratio_is_right_after_fill_and_absent_where_not_asked_for():
    scope = BuildContext(WIDTH, 0, 2, TensorParallel(), 0.02, "place", 0.02)
    mixer = configured().build(scope)
    mixer.to_empty(device="cpu")
    init_weights(mixer, 0)
    largest = [weight.detach().abs().max() for weight in (mixer.up.weight, mixer.down.weight)]
    bound = 1.0 / math.sqrt(2 * 2 * WIDTH)
    torch.testing.assert_close(mixer.ratio, (bound / largest[0]) * (bound / largest[1]))
    assert mixer.ratio.dtype == torch.float32
    assert mixer.state_dict().keys() == {"query.weight", "up.weight", "down.weight"}
    plain = build(configured(scale_ffn_weights=False))
    assert plain.norm_tracked_weights() == []
    assert not list(plain.buffers())
    x, valid = inputs_of(17, padded=False)
    dy, ids = torch.randn_like(x), torch.zeros(3, 17)
    assert_close(outcome(plain, x, context(), dy), defined(plain, x, valid, ids, dy), BOUND)


def test_initial_weights_have_the_published_spread():
    width, num_layers = 96, 5
    mixer = configured(ffn_ratio=4).build(BuildContext(width, 0, num_layers, TensorParallel(), 0.02, "place", 1.0))
    mixer.to_empty(device="cpu")
    init_weights(mixer, 0)
    assert mixer.query.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * num_layers * width), rel=0.05)
    for weight in (mixer.up.weight, mixer.down.weight):
        assert weight.std().item() == pytest.approx(1.0 / math.sqrt(2 * 4 * width), rel=0.05)
    assert sum(parameter.numel() for parameter in mixer.parameters()) == 9 * width**2


@pytest.mark.parametrize(
    ("length", "kind", "heads"), [(4, "global", 4), (48, "global", 4), (16, "global", 1), (48, "local", 1)]
)
def test_flops_are_counted(length: int, kind: str, heads: int):
    """With 6 features a head, 48 tokens use the linear form; 4 or 16 tokens and windows of 8 the quadratic one."""
    mixer, x = build(configured(kind, heads)), torch.randn(2, length, WIDTH, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        mixer(x, context(), None)
    assert counter.get_total_flops() == 2 * length * mixer.flops(length)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("global", "shifted-document-relpe")))
        for kind in KINDS
    ],
)
@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_one_compiled_graph_gives_the_same(kind: str, heads: int):
    mixer, (x, valid) = build(configured(kind, heads)), inputs_of(17, padded=True)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    for ids in (None, (torch.arange(17) // 6).expand(3, -1)):
        dy, known = torch.randn_like(x), context(valid=valid, document_ids=ids)
        assert_close(outcome(mixer, x, known, dy, compiled), outcome(mixer, x, known, dy), 1e-13)


def test_a_state_is_refused():
    mixer, (x, _) = build(configured()), inputs_of(5, padded=False)
    message = r"place: dense_attention attends to later tokens too, .* generate with a decoder"
    assert mixer.state_shapes() == []
    with pytest.raises(ConfigError, match=message):
        mixer(x, context(), ())
    with pytest.raises(ConfigError, match=message):
        mixer.step(x[:, :1], context(), ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "local"}, r'kind = "local" needs a window, in tokens'),
        ({"kind": "shifted_local"}, r'kind = "shifted_local" needs a window, in tokens'),
        ({"window": 8}, r'window = 8 has no meaning with kind = "global"'),
        ({"kind": "shifted_local", "window": 7}, r'window = 7 is odd, and kind = "shifted_local" shifts by half'),
    ],
)
def test_windows_that_do_not_fit_the_kind_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        configured(**fields)


@pytest.mark.parametrize(
    ("heads", "width", "tp", "message"),
    [
        (5, 24, 1, r"place\.num_heads = 5 does not divide model\.hidden_size = 24; choose a divisor"),
        (6, 24, 4, r"place\.num_heads = 6 is not divisible by parallel\.tp = 4; use tp 1, 2, 3, 6"),
        (1, 27, 2, r"model\.hidden_size = 27 is not divisible by parallel\.tp = 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(heads: int, width: int, tp: int, message: str):
    scope = BuildContext(width, 0, 1, TensorParallel(Axis("tp", tp)), 0.02, "place", 0.02)
    with pytest.raises(ConfigError, match=message):
        configured(heads=heads).build(scope)


def test_shrunk_keeps_one_head_and_its_kind():
    assert configured("shifted").shrink_for_verify(hidden_size=32, num_heads=4).num_heads == 1
    small = configured("shifted", heads=2, window=512).shrink_for_verify(hidden_size=32, num_heads=4)
    assert (small.num_heads, small.window, small.kind) == (4, 16, "shifted_local")
    assert configured().shrink_for_verify(hidden_size=32, num_heads=4).window is None
