"""Selection of labelled tokens against boolean indexing: any number of labels, gradients, and too many labels."""

import pytest
import torch

from megalin.model.language_model import LanguageModel
from megalin.ops.labelled_tokens import label_capacity, labelled_tokens
from megalin.parallel.embedding import VocabParallelEmbedding
from megalin.parallel.initialisation import init_weights
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import CASES

IGNORED = -100


def case(tokens, num_labels):
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.full((tokens,), IGNORED)
    labels[torch.randperm(tokens)[:num_labels]] = torch.randint(9, (num_labels,))
    return x, labels


@pytest.mark.parametrize("num_labels", [0, 1, 7, 8])
@pytest.mark.parametrize("tokens", [8, 65, 1000])
def test_labelled_rows_come_first_in_their_order(tokens, num_labels):
    x, labels = case(tokens, num_labels)
    chosen = labelled_tokens(x, labels, capacity=8, ignored_label=IGNORED)
    kept = labels != IGNORED
    assert torch.equal(chosen.x[:num_labels], x[kept])
    assert torch.equal(chosen.labels[:num_labels], labels[kept])
    assert not chosen.x[num_labels:].any()
    assert (chosen.labels[num_labels:] == IGNORED).all()
    assert not chosen.overflow
    upstream = torch.randn_like(chosen.x)
    (gradient,) = torch.autograd.grad(chosen.x, x, upstream)
    expected = torch.zeros_like(x)
    expected[kept] = upstream[:num_labels]
    assert torch.equal(gradient, expected)


def test_more_labels_than_rows_are_reported():
    x, labels = case(50, 9)
    chosen = labelled_tokens(x, labels, capacity=8, ignored_label=IGNORED)
    assert chosen.overflow
    assert torch.equal(chosen.labels, labels[labels != IGNORED][:8])


@pytest.mark.parametrize(("tokens", "fraction", "rows"), [(100, 0.07, 7), (3, 0.5, 2), (10, 1e-9, 0), (10, 1.0, 10)])
def test_capacity_is_the_fraction_rounded_up(tokens, fraction, rows):
    assert label_capacity(tokens, fraction) == rows


def test_loss_of_more_labels_than_the_head_computes_is_infinite():
    head = VocabParallelEmbedding(9, 3, tp=TensorParallel(), std=1.0).double()
    head.to_empty(device="cpu")
    init_weights(head, 0)
    x, labels = case(40, 10)
    x, labels = x.view(2, 20, 3), labels.view(2, 20)
    assert torch.isclose(head.loss_sum(x, labels, max_label_fraction=0.25), head.loss_sum(x, labels), rtol=1e-12)
    assert head.loss_sum(x, labels, max_label_fraction=0.2).isinf()


def test_operations_of_the_head_are_counted_for_labelled_tokens():
    config = CASES[0].model
    whole, part = LanguageModel(config), LanguageModel(config, max_label_fraction=0.25)
    head = 2 * config.vocab_size * config.hidden_size
    assert whole.forward_flops(64) - part.forward_flops(64) == 0.75 * head
