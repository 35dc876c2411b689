"""The tied embedding's gradient is that of the textbook, without a second matrix."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ftk.modules.embeddings import TiedEmbedding


def test_a_tied_embedding_has_the_gradient_of_both_uses():
    torch.manual_seed(0)
    tied, plain = TiedEmbedding(50, 8), nn.Embedding(50, 8)
    plain.load_state_dict(tied.state_dict())
    for tokens in (torch.tensor([[3, 3, 7], [49, 0, 3]]), torch.tensor([[1, 3]])):  # gradients add up
        tied.logits(tied(tokens).tanh()).logsumexp(-1).sum().backward()
        (plain(tokens).tanh() @ plain.weight.T).logsumexp(-1).sum().backward()
    assert not tied.weight.grad.is_sparse
    torch.testing.assert_close(tied.weight.grad, plain.weight.grad)


def test_a_tied_embedding_without_its_output_layer_has_a_dense_gradient():
    embedding = TiedEmbedding(20, 4)
    tokens = torch.tensor([2, 2, 5])
    for _ in range(2):
        embedding(tokens).sum().backward()
    expected = torch.zeros(20, 4)
    expected[2], expected[5] = 4.0, 2.0
    assert torch.equal(embedding.weight.grad, expected)
    copied = copy.deepcopy(embedding)
    copied.zero_grad()
    copied(tokens).sum().backward()
    assert torch.equal(copied.weight.grad, expected / 2)
