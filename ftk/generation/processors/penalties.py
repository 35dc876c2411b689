"""Penalties: tokens that are there already, and the unknown token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftk.generation.processors.base import Processor, SearchState


class RepetitionPenalty(Processor):
    """Tokens of the answer so far become less likely (Keskar et al. 2019, CTRL, 4.1).

    A positive logit is divided by the penalty, a negative one multiplied, and the softmax is taken anew. It is
    done to logits: log-probabilities are negative throughout, and would all be multiplied.

    Args:
        penalty: above 1 against repetition, below 1 in favour of it.
        prompt: whether the tokens of the prompt count, too. End tokens never do.
    """

    def __init__(self, penalty: float, prompt: bool = False) -> None:
        self.penalty = penalty
        self.prompt = prompt
        self._contexts: list[Sequence[int]] = []
        self._in_prompt: Tensor | None = None  # bool [N, 1, V]

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, state.tokens, True)  # [N, W, V]
        if self.prompt:
            seen |= self._prompt_tokens(state, scores)
        seen[..., state.end_index] = False
        logits = state.logits
        less = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        changed = torch.where(seen, less, logits).log_softmax(-1) - state.logprobs
        # -inf - -inf where the model itself gives no probability: such a token stays as it is.
        return scores + changed.masked_fill(state.logprobs.isneginf(), 0.0)

    def _prompt_tokens(self, state: SearchState, scores: Tensor) -> Tensor:
        """Which tokens each prompt holds; made anew when other prompts come."""
        same = len(self._contexts) == len(state.contexts) and all(map(_is, self._contexts, state.contexts))
        if self._in_prompt is None or not same:
            self._contexts = list(state.contexts)
            self._in_prompt = torch.zeros(len(self._contexts), 1, scores.size(-1), dtype=torch.bool)
            for row, context in zip(self._in_prompt, self._contexts, strict=True):
                row[0, torch.tensor(list(context), dtype=torch.int64)] = True
            self._in_prompt = self._in_prompt.to(scores.device)
        return self._in_prompt


def _is(one: object, other: object) -> bool:
    return one is other


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
