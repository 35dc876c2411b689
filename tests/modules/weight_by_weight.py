"""What the kernels for a prefix give, slowly and in float64: each weight is made, and dropped by its two words."""

from __future__ import annotations

import torch
from torch import Tensor

from ftk.modules.attention import separate_heads
from ftk.modules.prefix_attention import prefix_attention


def attended(query, key, value, prefix, words, dropout, scale):
    num_tokens, group = query.size(2), query.size(1) // key.size(1)
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    place = torch.arange(num_tokens)
    seen = (place <= place[:, None]) | (place < prefix[:, None, None])  # [B, T, T]
    weights = (query @ key.mT * scale).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    if words is not None:
        mixed = words[:, :, 0, :, None].long() ^ words[:, :, 1, None, :].long()
        hashes = (mixed % 2**32 * 0x9E3779B1) % 2**32
        weights = weights * (hashes >= round(dropout * 2**32)) / (1 - dropout)
    return weights @ value


def errors(
    size: int,
    key_heads: int,
    num_tokens: int,
    lengths: list[int],
    dropout: float,
    dtype: torch.dtype,
    device: str = "cpu",
) -> list[float]:
    """Of the values and of the gradients of query, key and value, relative to their norms."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(lengths), num_tokens, key_heads, 4 // key_heads + 2, size)
    joint = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    slow = joint.detach().cpu().double().requires_grad_()
    words, prefix = None, torch.tensor(lengths)
    if dropout:
        shape = (len(lengths), 4, 2, num_tokens)
        words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
    on_device = None if words is None else words.to(device)
    found = prefix_attention(joint, prefix.to(device), on_device, dropout, size**-0.5)[0].transpose(1, 2)
    expected = attended(*separate_heads(slow), prefix, words, dropout, size**-0.5)
    gradient = torch.randn(found.shape, generator=generator).to(device, dtype)
    found.backward(gradient)
    expected.backward(gradient.cpu().double())
    own, other = separate_heads(joint.grad), separate_heads(slow.grad)
    return [_distance(*pair) for pair in ((found, expected), *zip(own, other, strict=True))]


def _distance(own: Tensor, other: Tensor) -> float:
    return float((own.detach().cpu().double() - other).norm() / other.norm())
