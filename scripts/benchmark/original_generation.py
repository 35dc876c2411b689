"""GLM's way to generate as its original code takes it, in plain PyTorch: what ftk's generator is measured against.

Written for this comparison after a reading of THUDM/GLM (generate_samples.py, generation_utils.py, mpu/transformer.py
with `mems`), for one prompt, one blank, greedily. What is kept of the original's way:

- what is remembered of the tokens read is the input of each layer, not keys and values: in every step the norm of all
  remembered states is taken again, and queries, keys and values are projected from all of them;
- the remembered states grow by concatenation, in every layer and every step;
- masks as floats, `scores * mask - 65504 * (1 - mask)`, GELU from small operators;
- the token is fetched from the device in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from original_way import gelu
from torch import Tensor, nn
from torch.nn import functional as F


@torch.inference_mode()
def original_fill(
    model: Any, context: list[int], special: Any, num_tokens: int, tick: Callable[[], object] = lambda: None
) -> list[int]:
    """The greedy answer, of exactly `num_tokens` tokens, to the one blank of a context.

    Args:
        model: an ftk GLM with block positions, whose weights are used.
        context: ids with one `special.mask`.
        special: `sop`, `eop`, `mask`.
        num_tokens: of the answer; no end before.
        tick: called before each pass through the model.
    """
    device = next(model.parameters()).device
    blank, length = context.index(special.mask), len(context)
    tokens = torch.tensor([[*context, special.sop]], device=device)
    position_ids = torch.tensor([[[*range(length), blank], [0] * length + [1]]], device=device)
    mask = torch.ones(length + 1, length + 1, device=device).tril()
    mask[:, :length] = 1.0
    tick()
    logits, mems = _pass(model, tokens, position_ids, mask[None, None], None)
    answer: list[int] = []
    while True:
        scores = logits[0, -1].float()
        scores[special.eop] = float("-inf")
        answer.append(int(scores.argmax()))
        if len(answer) == num_tokens:
            return answer
        tick()
        tokens = torch.tensor([[answer[-1]]], device=device)
        position_ids = torch.tensor([[[blank], [len(answer) + 1]]], device=device)
        mask = torch.ones(1, 1, 1, mems[0].size(1) + 1, device=device)
        logits, mems = _pass(model, tokens, position_ids, mask, mems)


def _pass(
    model: Any, tokens: Tensor, position_ids: Tensor, mask: Tensor, mems: list[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """Logits [1, T, V] of these tokens, and what is remembered: the input of each layer, [1, tokens so far, H]."""
    hidden = model.embed(tokens, position_ids)  # [1, T, H]
    mask = mask.to(hidden.dtype)
    remembered = []
    for number, layer in enumerate(model.layers):
        mem = None if mems is None else mems[number]
        remembered.append(hidden if mem is None else torch.cat((mem, hidden), dim=1))
        attended = _attention(layer, hidden, mem, mask)
        hidden = hidden + attended
        inner = F.linear(layer.feed_forward_norm(hidden), *_weights(layer.feed_forward.inner))
        hidden = hidden + F.linear(gelu(inner), *_weights(layer.feed_forward.output))
    return F.linear(model.final_norm(hidden), model.token_embedding.weight), remembered


def _attention(layer: Any, hidden: Tensor, mem: Tensor | None, mask: Tensor) -> Tensor:
    """hidden [1, T, H], mem [1, M, H] -> [1, T, H]"""
    normed = layer.attention_norm(hidden)
    if mem is not None:
        normed = torch.cat((layer.attention_norm(mem), normed), dim=1)
    mixed = F.linear(normed, *_weights(layer.attention.qkv))
    size = layer.attention.head_size
    query, key, value = mixed.unflatten(-1, (-1, 3, size)).permute(3, 0, 2, 1, 4)  # each [1, A, M + T, D]
    query = query[:, :, -hidden.size(1) :]
    scores = torch.matmul(query, key.transpose(-1, -2) / math.sqrt(size))
    scores = torch.mul(scores, mask) + (-65504.0) * (1.0 - mask)
    attended = torch.matmul(torch.softmax(scores, dim=-1), value).permute(0, 2, 1, 3).contiguous()
    return F.linear(attended.flatten(2), *_weights(layer.attention.output))


def _weights(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias
