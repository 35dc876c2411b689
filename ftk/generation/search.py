"""Search strategies: from the logits of each step to the tokens of the next, and at the end to answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.sampling import draw, token_probabilities


@dataclass(frozen=True)
class Answer:
    """What fills one blank.

    Attributes:
        tokens: ids without the end token.
        token_logprobs: natural logarithm of each token's probability under the model (before temperature and
            filters); the end token's stands last if it came.
        score: sum of token_logprobs / their number ** length_penalty.
    """

    tokens: list[int]
    token_logprobs: list[float]
    score: float

    @property
    def ended(self) -> bool:
        """Whether the end token came, that is, the answer was not cut at the greatest length."""
        return len(self.token_logprobs) > len(self.tokens)


class Task(NamedTuple):
    """What is to be searched: one answer for each of N prompts.

    Attributes:
        num_prompts: N.
        end_ids: tokens that end an answer.
        device: where the logits are.
        uniforms: float64 [N, max_len], the prompts' random numbers; None where the strategy draws nothing.
    """

    num_prompts: int
    end_ids: tuple[int, ...]
    device: torch.device
    uniforms: Tensor | None = None


class Move(NamedTuple):
    """Next tokens [N, W], and the hypothesis [N, W] that each continues (None: the one in its own place)."""

    tokens: Tensor
    sources: Tensor | None


class Search(ABC):
    """One search for the answers of N prompts, W hypotheses of each; all its state is on the device.

    Args:
        config: options.
        task: prompts, end tokens, random numbers.
    """

    draws = False  # whether `task.uniforms` is needed

    def __init__(self, config: GenerationConfig, task: Task) -> None:
        self.config = config
        self.task = task
        self.step = 0
        self.ends = torch.tensor(task.end_ids, device=task.device)

    @staticmethod
    @abstractmethod
    def width(config: GenerationConfig) -> int:
        """W, hypotheses per prompt."""

    def advance(self, logits: Tensor) -> Move:
        """Takes the logits of a step: [N, 1, V] at first, [N, W, V] later."""
        logits = logits.float()
        move = self._advance(logits, logits.log_softmax(-1))
        self.step += 1
        return move

    @abstractmethod
    def _advance(self, logits: Tensor, logprobs: Tensor) -> Move: ...

    @abstractmethod
    def finished(self) -> Tensor:
        """bool [N]: prompts whose answers no further step can change."""

    @abstractmethod
    def answers(self) -> list[list[Answer]]:
        """For each prompt its answers, best first, at least one. Moves them to the host."""

    def _without_early_ends(self, scores: Tensor) -> Tensor:
        """scores [..., V] with -inf for the end tokens while the answer is shorter than min_len."""
        if self.step >= self.config.min_len:
            return scores
        return scores.index_fill(-1, self.ends, float("-inf"))


class _OneHypothesis(Search):
    """Keeps one hypothesis per prompt; subclasses choose its next token."""

    def __init__(self, config: GenerationConfig, task: Task) -> None:
        super().__init__(config, task)
        shape = (task.num_prompts, config.max_len)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=task.device)
        self.logprobs = torch.zeros(shape, device=task.device)
        self.lengths = torch.zeros(task.num_prompts, dtype=torch.int64, device=task.device)  # end included
        self.ended = torch.zeros(task.num_prompts, dtype=torch.bool, device=task.device)

    @staticmethod
    def width(config: GenerationConfig) -> int:
        return 1

    @abstractmethod
    def _choose(self, logits: Tensor) -> Tensor:
        """logits [N, V] -> tokens [N]"""

    def _advance(self, logits: Tensor, logprobs: Tensor) -> Move:
        token = self._choose(self._without_early_ends(logits[:, 0]))  # [N]
        self.tokens[:, self.step] = token
        self.logprobs[:, self.step] = logprobs[:, 0].gather(-1, token[:, None])[:, 0]
        self.lengths += ~self.ended
        self.ended |= torch.isin(token, self.ends)
        return Move(token[:, None], None)

    def finished(self) -> Tensor:
        return self.ended

    def answers(self) -> list[list[Answer]]:
        columns = (self.tokens.tolist(), self.logprobs.tolist(), self.lengths.tolist(), self.ended.tolist())
        return [[_answer(*row, self.config.length_penalty)] for row in zip(*columns, strict=True)]


class GreedySearch(_OneHypothesis):
    """Always the likeliest token; of equally likely ones the first in the vocabulary."""

    def _choose(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


class SamplingSearch(_OneHypothesis):
    """Tokens drawn from the distribution of `token_probabilities`, with the prompt's own random numbers."""

    draws = True

    def _choose(self, logits: Tensor) -> Tensor:
        assert self.task.uniforms is not None, "sampling needs random numbers"
        config = self.config
        probabilities = token_probabilities(logits, config.temperature, config.top_k, config.top_p)
        return draw(probabilities, self.task.uniforms[:, self.step])


class BeamSearch(Search):
    """Beam search as in fairseq: of the best candidates those that end are set aside, the others go on.

    An end token counts only among the best W candidates of its prompt. A prompt is finished when W answers
    are set aside; at the greatest length the hypotheses that have not ended compete as they are. The best
    answer has the greatest sum of log-probabilities / length ** length_penalty, the end token included in
    both. Candidates of equal score are taken in the order of hypothesis and token.
    """

    def __init__(self, config: GenerationConfig, task: Task) -> None:
        super().__init__(config, task)
        num, width, length = task.num_prompts, config.beam, config.max_len
        self.scores = torch.zeros(num, 1, device=task.device)  # [N, W]: sums of log-probabilities
        self.tokens = torch.zeros(num, width, length, dtype=torch.int64, device=task.device)
        self.logprobs = torch.zeros(num, width, length, device=task.device)
        # Answers that have ended; one place more than W takes what is not wanted, without asking the device.
        self.done_count = torch.zeros(num, dtype=torch.int64, device=task.device)
        self.closed = self.finished()  # [N] prompts that were finished before the last step
        self.done_lengths = torch.zeros(num, width + 1, dtype=torch.int64, device=task.device)
        self.done_tokens = torch.zeros(num, width + 1, length, dtype=torch.int64, device=task.device)
        self.done_logprobs = torch.zeros(num, width + 1, length, device=task.device)

    @staticmethod
    def width(config: GenerationConfig) -> int:
        return config.beam

    def _advance(self, logits: Tensor, logprobs: Tensor) -> Move:
        self.closed = self.finished()
        candidates = self._candidates(logprobs)
        self._set_aside(candidates)
        return self._go_on(candidates)

    def _candidates(self, logprobs: Tensor) -> _Candidates:
        """The best continuations of each prompt; so many that, whatever ends, W are left that go on."""
        totals = self.scores[:, :, None] + self._without_early_ends(logprobs)  # [N, W, V]
        totals = totals.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        count = min((1 + len(self.task.end_ids)) * self.config.beam, totals[0].numel())
        scores, indices = _stable_topk(totals.flatten(1), count)  # [N, C]
        sources, tokens = indices // logprobs.size(-1), indices % logprobs.size(-1)
        rows = torch.arange(sources.size(0), device=sources.device)[:, None]  # [N, 1]
        tokens_so_far = self.tokens[rows, sources, : self.step + 1]  # [N, C, step + 1], a copy
        tokens_so_far[:, :, -1] = tokens
        logprobs_so_far = self.logprobs[rows, sources, : self.step + 1]
        logprobs_so_far[:, :, -1] = logprobs[rows, sources, tokens]
        ends = torch.isin(tokens, self.ends)
        return _Candidates(scores, sources, ends, tokens_so_far, logprobs_so_far)

    def _set_aside(self, candidates: _Candidates) -> None:
        """Keeps those of the best W candidates that end, as far as the prompt has room for them."""
        width, steps = self.config.beam, self.step + 1
        scores, _, ends, tokens, logprobs = (part[:, :width] for part in candidates)
        ends = ends & scores.isfinite()
        slots = self.done_count[:, None] + ends.cumsum(-1) - 1
        slots = torch.where(ends, slots, width).clamp(max=width)
        rows = torch.arange(ends.size(0), device=ends.device)[:, None]
        self.done_lengths[rows, slots] = steps
        self.done_tokens[rows, slots, :steps] = tokens
        self.done_logprobs[rows, slots, :steps] = logprobs
        self.done_count = (self.done_count + ends.sum(-1)).clamp(max=width)

    def _go_on(self, candidates: _Candidates) -> Move:
        """The best W candidates that do not end become the hypotheses; missing ones are dead, at -inf."""
        width, steps = self.config.beam, self.step + 1
        alive = candidates.scores.masked_fill(candidates.ends, float("-inf"))  # [N, C]
        self.scores, chosen = _stable_topk(alive, min(width, alive.size(1)))
        missing = width - chosen.size(1)
        if missing > 0:  # a beam wider than the vocabulary
            chosen = torch.cat((chosen, chosen[:, :1].expand(-1, missing)), dim=1)
            self.scores = nn.functional.pad(self.scores, (0, missing), value=float("-inf"))
        rows = torch.arange(chosen.size(0), device=chosen.device)[:, None]
        self.tokens[:, :, :steps] = candidates.tokens[rows, chosen]
        self.logprobs[:, :, :steps] = candidates.logprobs[rows, chosen]
        return Move(self.tokens[:, :, self.step].clone(), candidates.sources.gather(1, chosen))

    def finished(self) -> Tensor:
        return self.done_count >= self.config.beam

    def answers(self) -> list[list[Answer]]:
        penalty = self.config.length_penalty
        is_cut = ~self.closed[:, None] & (self.step == self.config.max_len)
        live = (is_cut & self.scores.isfinite()).tolist()  # [N, W]
        done_lengths, done_tokens, done_logprobs, tokens, logprobs = (
            part.tolist()
            for part in (self.done_lengths, self.done_tokens, self.done_logprobs, self.tokens, self.logprobs)
        )
        results: list[list[Answer]] = []
        for row, is_live in enumerate(live):
            ended = [
                _answer(done_tokens[row][slot], done_logprobs[row][slot], length, True, penalty)
                for slot, length in enumerate(done_lengths[row][:-1])
                if length > 0
            ]
            cut = [
                _answer(tokens[row][slot], logprobs[row][slot], self.step, False, penalty)
                for slot, alive in enumerate(is_live)
                if alive
            ]
            results.append(self._best(ended + cut))
        return results

    def _best(self, answers: list[Answer]) -> list[Answer]:
        if not answers:
            raise UserError("the model gives no token a probability above 0; its weights may hold NaN")
        return sorted(answers, key=lambda one: -one.score)[: self.config.beam]


class _Candidates(NamedTuple):
    """The best continuations of the hypotheses of each prompt, best first."""

    scores: Tensor  # [N, C] sums of log-probabilities
    sources: Tensor  # [N, C] the hypothesis that each continues
    ends: Tensor  # [N, C] bool: the last token is an end token
    tokens: Tensor  # [N, C, step + 1] all tokens
    logprobs: Tensor  # [N, C, step + 1] their log-probabilities


def search_class(config: GenerationConfig) -> type[Search]:
    """The strategy that the options ask for."""
    if config.sampling:
        return SamplingSearch
    return BeamSearch if config.beam > 1 else GreedySearch


def _answer(tokens: list[int], logprobs: list[float], length: int, ended: bool, length_penalty: float) -> Answer:
    """An answer of the first `length` of its tokens, of which the last is the end token if it `ended`."""
    logprobs = logprobs[:length]
    score = sum(logprobs) / length**length_penalty
    return Answer(tokens[: length - 1 if ended else length], logprobs, score)


def _stable_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of [N, X], greatest first, equal ones in order; `torch.topk` promises no order."""
    values, indices = scores.topk(count, dim=-1)
    # What topk takes among those equal to the last value is open too, but its own choice never depends on the
    # batch; the order of what it took is settled here.
    indices = indices.sort(dim=-1).values
    values, order = scores.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, order)
