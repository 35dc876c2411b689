"""Penalties: tokens that are there already, the unknown token, and tokens that are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ftk.batch import sent
from ftk.generation.processors.base import Processor, SearchState, index_of

_MOST_PROMPTS = 512  # whose tokens are remembered: one byte for each of the vocabulary


class RepetitionPenalty(Processor):
    """Tokens of the answer so far become less likely (Keskar et al. 2019, CTRL, 4.1).

    A positive logit is divided by the penalty, a negative one multiplied, and the softmax is computed again. It is
    done to logits: log-probabilities are negative throughout, and would all be multiplied.

    Args:
        penalty: above 1 against repetition, below 1 in favour of it.
        prompt: whether the tokens of the prompt count, too. End tokens never do.
    """

    def __init__(self, penalty: float, prompt: bool = False) -> None:
        self.penalty = penalty
        self.prompt = prompt
        # Of the prompts met last, by identity: the context itself, and bool [V], which tokens it holds.
        self._known: dict[tuple[int, int, torch.device], tuple[Sequence[int], Tensor]] = {}

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, state.tokens, True)  # [N, W, V]
        if self.prompt:
            seen |= torch.stack([self._prompt_tokens(context, scores) for context in state.contexts])[:, None]
        seen[..., state.end_index] = False
        logits = state.logits
        less = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return _with_logits(state, scores, torch.where(seen, less, logits))

    def _prompt_tokens(self, context: Sequence[int], scores: Tensor) -> Tensor:
        """bool [V] on the device: the tokens of a prompt, which many searches under way may ask for in turn."""
        key = (id(context), scores.size(-1), scores.device)
        known = self._known.pop(key, None)
        if known is None:
            row = torch.zeros(scores.size(-1), dtype=torch.bool, device=scores.device)
            known = (context, row.index_fill_(0, index_of(list(context), scores.device), True))
            while len(self._known) >= _MOST_PROMPTS:
                del self._known[next(iter(self._known))]  # the one that was not asked for the longest
        self._known[key] = known  # holds the context, so that its id means no other
        return known[1]


class LogitDifferences(Processor):
    """Numbers that are added to logits, before the softmax is computed again: OpenAI's penalties and `logit_bias`.

    Args:
        frequency: taken off the logit of a token once for each time that the answer has it.
        presence: taken off the logit of each token that the answer has.
        bias: id -> what is added to its logit.
    """

    def __init__(self, frequency: float = 0.0, presence: float = 0.0, bias: Mapping[int, float] | None = None) -> None:
        self.frequency, self.presence, self.bias = frequency, presence, dict(bias or {})

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores).scatter_add_(
            -1, state.tokens, torch.ones_like(state.tokens, dtype=scores.dtype)
        )
        logits = state.logits - self.frequency * counts - self.presence * (counts > 0)  # [N, W, V]
        if self.bias:
            values = sent(torch.tensor([*self.bias.values()], dtype=logits.dtype), logits.device)
            logits.index_add_(-1, index_of([*self.bias], logits.device), values.expand(*logits.shape[:2], -1))
        return _with_logits(state, scores, logits)


class UnknownPenalty(Processor):
    """Takes a number off the log-probability of the unknown token; inf forbids it.

    Args:
        unk: id of the unknown token.
        penalty: what is taken off.
    """

    reads_answers = False

    def __init__(self, unk: int, penalty: float) -> None:
        self.unk = unk
        self.penalty = penalty

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        scores[..., self.unk] -= self.penalty
        return scores


def _with_logits(state: SearchState, scores: Tensor, logits: Tensor) -> Tensor:
    """The scores if the model had given other logits [N, W, V]."""
    changed = logits.log_softmax(-1) - state.logprobs
    # -inf - -inf where the model itself gives no probability: such a token stays as it is.
    return scores + changed.masked_fill(state.logprobs.isneginf(), 0.0)
