"""Contrastive search (Su et al. 2022, arXiv:2202.06417)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_search.hidden_states import HiddenStates
from ftk.config.options import option
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.base import Processors
from ftk.generation.search.base import Answer, Lines, Move, Search, SearchTask
from ftk.generation.search.ranking import stable_topk
from ftk.registry import register_search


@dataclass(kw_only=True)
class ContrastiveConfig:
    candidates: int = option(4, "compare this many likeliest tokens", unit="tokens", min=1)
    alpha: float = option(0.6, "weight of being unlike what was read, against probability", "[0, 1]")


@register_search("contrastive", config=ContrastiveConfig)
class ContrastiveSearch(Search):
    """Likely tokens that do not repeat what is there already (Su et al. 2022, eq. 5).

    Of the `candidates` likeliest tokens v the one is taken that has the greatest

        (1 - alpha) p(v) - alpha max_j cos(h_v, h_j),

    h_v being the model's last hidden state when it reads v, h_j that of each token read so far: context, earlier
    answers, start tokens, this answer. p is the softmax of the processed scores. The candidates are W branches of
    the prompt, so a step costs what beam search costs; a token is settled one step after it was proposed, when
    its hidden state is there. `Answer.score` ranks nothing here: there is one answer.
    """

    lookahead = 1
    observer = HiddenStates

    def __init__(
        self, config: GenerationConfig, task: SearchTask, processors: Processors, options: ContrastiveConfig
    ) -> None:
        super().__init__(config, task, processors, options)
        self.lines = Lines(task, 1, config.max_len)
        self.tokens = torch.zeros(0)  # [N, W]: the candidates
        self.probabilities = torch.zeros(0)  # [N, W] of the candidates
        self.scores = torch.zeros(0)  # [N, W], as processed
        self.logprobs = torch.zeros(0)  # [N, W], the model's own
        self.written: list[Tensor] = []  # hidden states [N, H] of the tokens of the answer, of length 1

    @staticmethod
    def width(config: GenerationConfig, options: ContrastiveConfig) -> int:
        return options.candidates

    def advance(self, logits: Tensor) -> Move:
        if self.tokens.numel() == 0:  # nothing was proposed yet
            return self._propose(logits, None)
        best = self._settle()  # [N]
        rows = torch.arange(logits.size(0), device=logits.device)
        if self.step == self.config.max_len:
            return Move(self.tokens, None)
        return self._propose(logits[rows, best][:, None], best[:, None].expand_as(self.tokens))

    def _advance(self, scores: Tensor, logprobs: Tensor) -> Move:
        raise AssertionError("contrastive search chooses in `advance`")

    def _propose(self, logits: Tensor, sources: Tensor | None) -> Move:
        """The likeliest next tokens after logits [N, 1, V]."""
        scores, logprobs = self.scored(logits)
        width = min(self.options.candidates, scores.size(-1))
        probabilities, tokens = stable_topk(scores[:, 0].softmax(-1), width)  # [N, W]
        missing = self.options.candidates - width
        if missing > 0:  # more candidates than tokens: the first again, which changes nothing
            tokens = torch.cat((tokens, tokens[:, :1].expand(-1, missing)), dim=1)
            probabilities = torch.cat((probabilities, probabilities[:, :1].expand(-1, missing)), dim=1)
        self.tokens, self.probabilities = tokens, probabilities
        self.scores, self.logprobs = (part[:, 0].gather(-1, tokens) for part in (scores, logprobs))
        return Move(tokens, sources)

    def _settle(self) -> Tensor:
        """Takes the best candidate, now that their hidden states are known: its place, [N]."""
        states = self.task.states
        assert states is not None, "contrastive search needs hidden states"
        candidates = states.last  # [N, W, H], of length 1
        similarity = states.nearest  # [N, W]
        if self.written:
            similarity = torch.maximum(similarity, (candidates @ torch.stack(self.written, dim=2)).amax(-1))
        alpha = self.options.alpha
        merit = (1 - alpha) * self.probabilities - alpha * similarity
        # A token that is forbidden must not win by being unlike the rest.
        best = merit.masked_fill(self.probabilities == 0, float("-inf")).argmax(-1)  # [N]
        rows = torch.arange(best.size(0), device=best.device)
        tokens, scores, logprobs = (part[rows, best][:, None] for part in (self.tokens, self.scores, self.logprobs))
        self.lines.write(self.step, tokens, scores, logprobs, self.ends)
        self.written.append(candidates[rows, best])
        self.step += 1
        return best

    def finished(self) -> Tensor:
        return self.lines.ended[:, 0]

    def answers(self) -> list[list[Answer]]:
        return self.lines.answers(self.config.length_penalty)

    def tokens_so_far(self) -> Tensor:
        return self.lines.tokens[:, :, : self.step]

    def newest(self) -> Tensor | None:
        return self.lines.newest(self.step - 1) if self.step else None

    def keep(self, rows: Tensor) -> None:
        self.keep_task(rows)
        self.lines.keep(rows)
        for name in ("tokens", "probabilities", "scores", "logprobs"):
            setattr(self, name, getattr(self, name)[rows])
        self.written = [states[rows] for states in self.written]
