"""Slow, obviously right versions: the whole sequence goes through the model for every single token."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch

from ftk.models import build_model

SPECIAL = SimpleNamespace(sop=1, eop=2, mask=3, smask=4, gmask=5)
BLANKS = (3, 4, 5)


def small_model(vocab_size=20, seed=0, **options):
    """A random GLM whose distributions are far from flat, so that a wrong key or position shows."""
    torch.manual_seed(seed)
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 64} | options
    model = build_model("glm", vocab_size=vocab_size, **shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0 if "embedding" in name else 3.0)
        model.token_embedding.weight[SPECIAL.eop] *= 2.0  # or hardly any answer would end
    return model


def next_logprobs(model, context, filled, blank, answer):
    """log P(next token), [V], after the answers in `filled`, [(blank, tokens)], and the start of this one."""
    tokens, text, block = list(context), list(range(len(context))), [0] * len(context)
    in_blocks = model.config.block_positions
    for place, ids in [*filled, (blank, answer)]:
        tokens += [SPECIAL.sop, *ids]
        text += [place] * (len(ids) + 1)
        block += [step + 1 if in_blocks else 1 for step in range(len(ids) + 1)]
    with torch.no_grad():
        logits = model(
            torch.tensor([tokens]),
            position_ids=torch.tensor([[text, block]]),
            context_length=torch.tensor([len(context)]),
        )
    return logits[0, -1].log_softmax(-1)


def greedy(model, context, max_len, ends=(2,), min_len=0):
    """[(tokens, token_logprobs)] of each blank, left to right."""
    filled, logprobs = [], []
    for blank in (index for index, token in enumerate(context) if token in BLANKS):
        answer, own = [], []
        while len(own) < max_len:
            scores = next_logprobs(model, context, filled, blank, answer)
            allowed = scores.clone()
            if len(answer) < min_len:
                allowed[list(ends)] = float("-inf")
            token = int(allowed.argmax())
            own.append(float(scores[token]))
            if token in ends:
                break
            answer.append(token)
        filled.append((blank, answer))
        logprobs.append(own)
    return [(tokens, own) for (_, tokens), own in zip(filled, logprobs, strict=True)]


def beam(model, context, blank, width, max_len, penalty, ends=(2,)):
    """Best (tokens, score) of one blank: fairseq's rules with Python lists."""
    live, done = [([], 0.0)], []
    for step in range(1, max_len + 1):
        candidates = []
        for tokens, total in live:
            scores = next_logprobs(model, context, [], blank, tokens).tolist()
            candidates += [(total + score, tokens, token) for token, score in enumerate(scores)]
        candidates.sort(key=lambda one: -one[0])
        for total, tokens, token in candidates[:width]:
            if token in ends and len(done) < width:
                done.append((tokens, total / step**penalty))
        live = [([*tokens, token], total) for total, tokens, token in candidates if token not in ends][:width]
        if len(done) >= width and step < max_len:
            return max(done, key=lambda one: one[1])
    return max(done + [(tokens, total / max_len**penalty) for tokens, total in live], key=lambda one: one[1])


def best_of_all(model, context, blank, vocab_size, max_len, penalty, end=2):
    """Best (tokens, score) of one blank among every answer there is."""
    words = [token for token in range(vocab_size) if token != end]
    found = []
    for length in range(max_len + 1):
        for tokens in itertools.product(words, repeat=length):
            whole = [*tokens, end] if length < max_len else list(tokens)
            total = sum(
                float(next_logprobs(model, context, [], blank, whole[:index])[token])
                for index, token in enumerate(whole)
            )
            found.append((list(tokens), total / len(whole) ** penalty))
    return max(found, key=lambda one: one[1])
