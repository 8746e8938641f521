"""The graph path on a CPU: a traced step in place of the captured one, which runs no Python and so no host decision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from megalin.generation.decoder import BLOCK_TOKENS, WARM_UP_STEPS, Decoder, Step
from megalin.generation.sampling import Sampling
from tests.cases import CASES, NAMES, build

RAGGED = [[5, 17, 300, 2, 5, 9, 120], [3], [9, 9]]
SAMPLED = Sampling(temperature=1.0, top_k=50, seed=3, repetition_penalty=1.3)


class TracedGraph:
    """Stand-in for a CUDA graph: the step's operations on the tensors that it had when it was captured.

    As a capture does, tracing leaves those tensors unchanged.
    """

    captures = 0

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(self, step: Step, device: torch.device) -> Step:
        self.captures += 1
        tensors = [*self.decoder.state_tensors(), *(x for x in vars(self.decoder).values() if isinstance(x, Tensor))]
        before = [tensor.clone() for tensor in tensors]
        traced = make_fx(lambda: step())()
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        return traced


@pytest.mark.parametrize(
    ("case", "sampling"),
    [
        *(pytest.param(case, SAMPLED, id=case.name) for case in CASES if case.representative),
        pytest.param(CASES[NAMES.index("hgrn2")], Sampling(), id="hgrn2-greedy"),
    ],
)
def test_a_graph_decodes_what_eager_steps_decode_token_by_token(case, sampling):
    model = build(case.model, dtype=torch.float32)
    length = 7 + BLOCK_TOKENS + 8
    eager, graph = (Decoder(model, sampling, batch_size=4, max_length=length, stop_ids=[7]) for _ in range(2))
    graph._capture = traced = TracedGraph(graph)
    for first in (0, 3):  # the second batch uses the memory and the graph of the first
        for decoder in (eager, graph):
            decoder.start(RAGGED, range(first, first + 3))
        for expected, found in zip(eager.blocks(BLOCK_TOKENS + 8), graph.blocks(BLOCK_TOKENS + 8), strict=True):
            assert torch.equal(found, expected)
            assert (found[:, 3] == -1).all()  # the place that the batch leaves empty
        for expected, found in zip(eager.state_tensors(), graph.state_tensors(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert traced.captures == 1


def test_steps_before_the_capture_are_eager_and_count():
    model, captured = build(CASES[0].model, dtype=torch.float32), []
    capture = lambda step, _: captured.append(step) or step  # noqa: E731
    decoder = Decoder(model, Sampling(), batch_size=1, max_length=6, capture=capture)
    decoder.start([[1, 2]], [0])
    for _ in range(WARM_UP_STEPS):
        decoder.step()
        assert not captured
    decoder.step()
    decoder.step()
    assert len(captured) == 1


def test_no_step_goes_beyond_the_tokens_that_a_cache_has_room_for():
    decoder = Decoder(build(CASES[NAMES.index("softmax")].model), Sampling(), batch_size=2, max_length=4)
    for _ in range(2):
        decoder.start([[1, 2], [1]], [0, 1])
        decoder.step()
        decoder.step()
        with pytest.raises(AssertionError):
            decoder.step()
