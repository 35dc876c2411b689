"""Slow, obviously right versions: the whole sequence goes through the model for every single token."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from ftk.models import build_model

SPECIAL = SimpleNamespace(sop=1, eop=2, mask=3, smask=4, gmask=5)
BLANKS = (3, 4, 5)


def small_model(vocab_size=20, seed=0, name="glm", **options):
    """A random model whose distributions are far from flat, so that a wrong key or position shows."""
    torch.manual_seed(seed)
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 64} | options
    model = build_model(name, vocab_size=vocab_size, **shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0 if "embedding" in name else 3.0)
        model.token_embedding.weight[SPECIAL.eop] *= 2.0  # or hardly any answer would end
    return model


def inputs_of(model, context, filled, blank, answer):
    """What a model reads of a context, the answers in `filled`, [(blank, tokens)], and the start of this one."""
    tokens, text, block = list(context), list(range(len(context))), [0] * len(context)
    in_blocks = model.config.block_positions
    runs_on = getattr(model.config, "gmask_runs_on", False)
    for place, ids in [*filled, (blank, answer)]:
        tokens += [SPECIAL.sop, *ids]
        if runs_on and context[place] == SPECIAL.gmask:
            text += range(len(text), len(tokens))
        else:
            text += [place] * (len(ids) + 1)
        block += [step + 1 if in_blocks else 1 for step in range(len(ids) + 1)]
    return {
        "tokens": torch.tensor([tokens]),
        "position_ids": torch.tensor([[text, block]]),
        "context_length": torch.tensor([len(context)]),
    }


def next_logprobs(model, *read):
    """log P(next token), [V], after what is read: the arguments of `inputs_of`."""
    with torch.no_grad():
        return model(**inputs_of(model, *read))[0, -1].log_softmax(-1)


def greedy(model, context, max_len, ends=(2,), min_len=0, logprobs=next_logprobs):
    """[(tokens, token_logprobs)] of each blank, left to right."""
    filled, found = [], []
    for blank in (index for index, token in enumerate(context) if token in BLANKS):
        found.append(greedy_answer(partial(logprobs, model, context, filled, blank), max_len, ends, min_len))
        filled.append((blank, found[-1][0]))
    return found


def greedy_answer(logprobs_behind, max_len, ends=(2,), min_len=0):
    """The tokens of one answer, and their log-probabilities with that of the end.

    Args:
        logprobs_behind: the answer so far -> log P(next token), [V].
    """
    answer, own = [], []
    while len(own) < max_len:
        scores = logprobs_behind(answer)
        allowed = scores.clone()
        if len(answer) < min_len:
            allowed[list(ends)] = float("-inf")
        token = int(allowed.argmax())
        own.append(float(scores[token]))
        if token in ends:
            break
        answer.append(token)
    return answer, own


def assert_answers(answers, expected, atol):
    """That answers are those expected, [(tokens, token_logprobs)]."""
    assert [answer.tokens for answer in answers] == [tokens for tokens, _ in expected]
    for answer, (_, logprobs) in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer.token_logprobs, logprobs, rtol=0, atol=atol)


def steps_of(context, answers):
    """Of each token of the answers to a context, filled from left to right, and of their n best: the answer, the step,
    the token, and what was read before it, as arguments of `inputs_of`."""
    filled = []
    for blank, answer in zip((index for index, token in enumerate(context) if token in BLANKS), answers, strict=True):
        for one in (answer, *answer.others):
            written = [*one.tokens, SPECIAL.eop][: len(one.token_logprobs)]
            for step, token in enumerate(written):
                yield one, step, token, (context, filled, blank, written[:step])
        filled.append((blank, answer.tokens))
