"""Penalties: tokens that are there already, and the unknown token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
        changed = torch.where(seen, less, logits).log_softmax(-1) - state.logprobs
        # -inf - -inf where the model itself gives no probability: such a token stays as it is.
        return scores + changed.masked_fill(state.logprobs.isneginf(), 0.0)

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


class UnknownPenalty(Processor):
    """Takes a number off the log-probability of the unknown token; inf forbids it.

    Args:
        unk: id of the unknown token.
        penalty: what is taken off.
    """

    def __init__(self, unk: int, penalty: float) -> None:
        self.unk = unk
        self.penalty = penalty

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        scores[..., self.unk] -= self.penalty
        return scores
