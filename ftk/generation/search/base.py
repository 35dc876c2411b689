"""What a search strategy is: from the logits of each step to the tokens of the next, and at the end to answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.base import Processors, SearchState, forbid_ends, index_of
from ftk.generation.search.alternatives import LikeliestTokens
from ftk.generation.search.answer import Answer


class Fusion(NamedTuple):
    """How a language model's log-probabilities count.

    Attributes:
        weight: what they are multiplied by.
        ends: whether those of end tokens count. If not, an end token gets what a word gets on average, so that whether
            an answer ends stays as likely as the model alone says.
    """

    weight: float
    ends: bool = True

    def scores(self, logprobs: Tensor, language: Tensor, ends: Tensor) -> Tensor:
        """Shallow fusion: log p + weight * log p_lm.

        Args:
            logprobs: float32 [..., V], of the model.
            language: float32 [..., V], of the language model.
            ends: int64 [E], ids of the end tokens.

        Returns:
            float32 [..., V]; `logprobs` itself where the weight is 0.
        """
        if self.weight == 0:  # 0 * -inf would be NaN
            return logprobs
        scores = torch.add(logprobs, language, alpha=self.weight)
        if not self.ends:
            words, fused = (part.index_fill(-1, ends, float("-inf")).logsumexp(-1, True) for part in (logprobs, scores))
            on_average = (fused - words).nan_to_num(nan=0.0, neginf=0.0)  # [..., 1]; no word is possible: nothing
            scores[..., ends] = logprobs[..., ends] + on_average
        return scores


class Span(NamedTuple):
    """Where an answer stands in its search, and its limits.

    Attributes:
        start: steps of the search before its first token.
        min_len, max_len: tokens.
    """

    start: int
    min_len: int
    max_len: int


class SearchTask(NamedTuple):
    """The input of a search: one answer for each of N prompts.

    Attributes:
        num_prompts: N.
        end_ids: tokens that end an answer.
        device: where the logits are.
        uniforms: float64 [N, max_len, D], the prompts' random numbers, where the strategy draws D a step.
        contexts: per prompt its token ids, for processors.
        numbers: per prompt the number of the answer, for processors.
        states: what the decoder's observer gives, for strategies that have one.
        fusion: with the language model, whose part stands beside the logits; None where there is none.
        spans: per prompt that of its answer; none where all begin with the search and have the limits of its options.
    """

    num_prompts: int
    end_ids: tuple[int, ...]
    device: torch.device
    uniforms: Tensor | None = None
    contexts: Sequence[Sequence[int]] = ()
    numbers: Sequence[int] = ()
    states: Any = None
    fusion: Fusion | None = None
    spans: Sequence[Span] = ()


class Move(NamedTuple):
    """Next tokens [N, W], and the hypothesis [N, W] that each continues (None: the one in its own place)."""

    tokens: Tensor
    sources: Tensor | None


class Search(ABC):
    """One search for the answers of N prompts, W hypotheses of each; all its state is on the device.

    The engine gives it the logits of the first token, carries out the move that it answers with, gives it the logits
    that the decoder answers with, and so on: at most max_len + lookahead times.

    Args:
        task: prompts, end tokens, random numbers.
        processors: change the scores before a token is chosen.
        options: the strategy's own options, if it is registered with a config of its own.
    """

    lookahead = 0  # tokens that are read beyond those of the longest answer
    observer: ClassVar[Callable[[int, int], Any] | None] = None
    """Makes what looks at hidden states for `task.states` (`engine.decoder.Observer`), of num_rows and capacity."""

    def __init__(
        self, config: GenerationConfig, task: SearchTask, processors: Processors | None = None, options: Any = None
    ) -> None:
        self.config = config
        self.task = task
        self.processors = Processors() if processors is None else processors
        self.options = options
        self.step = 0  # tokens that every answer has
        self.likeliest = LikeliestTokens(config.alternatives)
        self.ends = index_of(task.end_ids, task.device)

    @staticmethod
    @abstractmethod
    def width(config: GenerationConfig, options: Any = None) -> int:
        """W, hypotheses per prompt."""

    @staticmethod
    def draws(config: GenerationConfig, num_ends: int) -> int:
        """D, random numbers that a step takes for each prompt; 0 where nothing is drawn."""
        return 0

    def advance(self, logits: Tensor) -> Move:
        """Takes the logits of a step: [N, 1, V] at first, [N, W, V] later; 2 V with a language model's part."""
        scores, logprobs = self.scored(logits)
        move = self._advance(scores, logprobs)
        self.step += 1
        if move.sources is not None:
            self.processors.reorder(move.sources)
        return move

    @abstractmethod
    def _advance(self, scores: Tensor, logprobs: Tensor) -> Move:
        """Chooses: processed scores and the model's own log-probabilities, each float32 [N, 1 or W, V]."""

    @abstractmethod
    def finished(self) -> Tensor:
        """bool [N]: prompts whose answers no further step can change."""

    @abstractmethod
    def answers(self) -> list[list[Answer]]:
        """For each prompt its answers, best first, `nbest` at most; moves them to the host.

        Those of prompts that are not finished are not read and may be anything; a finished one has none only if no
        token ever had a probability above 0.
        """

    def answers_of(self, places: Sequence[int]) -> list[list[Answer]]:
        """The answers of the prompts at these places, which are finished."""
        found = self.answers()
        return [found[place] for place in places]

    @abstractmethod
    def tokens_so_far(self) -> Tensor:
        """int64 [N, W, step]: the hypotheses. W may be anything before the first step."""

    def newest(self) -> Tensor | None:
        """The token that this step has settled in each prompt's only answer, and its log-probability under the model.

        Returns:
            float64 [2, N]; None where no token is settled yet, as long as hypotheses compete, or several answers.
        """
        return None

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Of the prompts only `rows`, int64 [R], stay, in this order. Overridden with a call of `keep_task`."""

    def keep_task(self, rows: Tensor) -> None:
        """`keep` for the tensors of the task; the engine does it for what lies on the host, and for processors."""
        task = self.task
        self.task = task._replace(
            num_prompts=len(rows),
            uniforms=None if task.uniforms is None else task.uniforms[rows],
            states=None if task.states is None else task.states.keep(rows),
        )
        self.likeliest.keep(rows)

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Processed scores and the model's own log-probabilities; not to be changed in place.

        Args:
            logits: [N, W, V] of any dtype; [N, W, 2 V] with the log-probabilities of a language model, which count as
                `task.fusion` says.

        Returns:
            float32 [N, W, V] twice; the same tensor where nothing is processed.
        """
        fusion, language = self.task.fusion, None
        if fusion is not None:
            logits, language = logits.chunk(2, dim=-1)
        logits = logits.float()
        logprobs = logits.log_softmax(-1)
        scores = logprobs
        if fusion is not None and language is not None:
            scores = fusion.scores(logprobs, language, self.ends)
        if self.config.alternatives:
            self.likeliest.add(self.tokens_so_far()[:, : logits.size(1)], logprobs)
        task = self.task
        spans = task.spans or [Span(0, self.config.min_len, self.config.max_len)] * task.num_prompts
        steps = [self.step - span.start for span in spans]
        early = [place for place, (step, span) in enumerate(zip(steps, spans, strict=True)) if step < span.min_len]
        if not self.processors:
            return forbid_ends(scores.clone(), early, self.ends) if early else scores, logprobs
        state = SearchState(
            self.tokens_so_far()[:, : logits.size(1)],
            task.contexts,
            task.numbers,
            task.end_ids,
            spans[0].max_len,
            logits,
            logprobs,
            scores,
            self.ends,
            early,
            steps,
            [span.max_len for span in spans],
        )
        return self.processors(state, state.fresh_scores()), logprobs


class Lines:
    """W answers of each of N prompts as they are written, token by token.

    Attributes:
        tokens: int64 [N, W, max_len].
        logprobs: float32 [N, W, max_len], the model's own.
        scores: float32 [N, W, max_len], as processed.
        lengths: int64 [N, W], the end token counted.
        ended: bool [N, W].
    """

    def __init__(self, task: SearchTask, width: int, max_len: int) -> None:
        shape = (task.num_prompts, width, max_len)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=task.device)
        self.logprobs = torch.zeros(shape, device=task.device)
        self.scores = torch.zeros(shape, device=task.device)
        self.lengths = torch.zeros(shape[:2], dtype=torch.int64, device=task.device)
        self.ended = torch.zeros(shape[:2], dtype=torch.bool, device=task.device)

    def write(self, step: int | Tensor, tokens: Tensor, scores: Tensor, logprobs: Tensor, ends: Tensor) -> None:
        """Token number `step` of each answer: tokens, its scores and log-probabilities, each [N, W].

        `step` is the same for all prompts, or int64 [N].
        """
        for part, values in ((self.tokens, tokens), (self.scores, scores), (self.logprobs, logprobs)):
            if isinstance(step, int):
                part[:, :, step] = values
            else:
                part.scatter_(2, step[:, None, None].expand(-1, part.size(1), 1), values[:, :, None])
        self.lengths += ~self.ended
        self.ended |= (tokens[:, :, None] == ends).any(-1)  # `isin` takes several kernels

    def newest(self, step: int | Tensor) -> Tensor:
        """float64 [2, N]: token number `step` of each prompt's first answer, and its log-probability; see `write`."""
        parts = (self.tokens[:, 0], self.logprobs[:, 0])  # [N, max_len]
        if isinstance(step, int):
            return torch.stack([part[:, step].double() for part in parts])
        return torch.stack([part.gather(1, step[:, None])[:, 0].double() for part in parts])

    def keep(self, rows: Tensor, max_len: int | None = None) -> None:
        """Of the prompts only `rows`, int64 [R], stay, in this order, which need no more than `max_len` tokens."""
        for name in ("tokens", "logprobs", "scores"):
            setattr(self, name, getattr(self, name)[rows, :, :max_len])
        self.lengths, self.ended = self.lengths[rows], self.ended[rows]

    def join(self, others: Lines) -> None:
        """Adds those of further prompts, W of each."""
        for name in ("tokens", "logprobs", "scores", "lengths", "ended"):
            own, further = getattr(self, name), getattr(others, name)
            setattr(self, name, joined(own, further, 2) if own.dim() == 3 else torch.cat((own, further)))

    def answers(self, length_penalty: float, places: Sequence[int] | None = None) -> list[list[Answer]]:
        """Of the prompts at `places`, or of all, the W answers, best first."""
        parts = [self.tokens, self.logprobs, self.scores, self.lengths, self.ended]
        if places is not None:
            rows = index_of(places, self.tokens.device)
            parts = [part[rows] for part in parts]
        longest = int(parts[3].max()) if parts[3].numel() else 0
        columns = [(part[..., :longest] if part.dim() == 3 else part).tolist() for part in parts]
        return [
            ranked(
                [
                    answer_of(tokens, logprobs, sum(scores[:length]) / length**length_penalty, length, ended)
                    for tokens, logprobs, scores, length, ended in zip(*prompt, strict=True)
                ]
            )
            for prompt in zip(*columns, strict=True)
        ]


def joined(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """One behind the other, [N + M, ...]; the one that is shorter in `dim` gets zeros behind it."""
    longest = max(first.size(dim), second.size(dim))
    behind = (0, 0) * (first.dim() - 1 - dim)  # of the dimensions after `dim`, from the last one on
    return torch.cat([F.pad(part, (*behind, 0, longest - part.size(dim))) for part in (first, second)])


def not_finite() -> UserError:
    """The error for a log-probability that is NaN or infinite."""
    return UserError("the model's logits are not finite; its weights may hold NaN")


def ranked(answers: list[Answer]) -> list[Answer]:
    """Best first; of equals the earlier one."""
    return sorted(answers, key=lambda answer: -answer.score)


def answer_of(tokens: list[int], logprobs: list[float], score: float, length: int, ended: bool) -> Answer:
    """An answer of the first `length` of its tokens, of which the last is the end token if it `ended`."""
    words, end = (tokens[: length - 1], tokens[length - 1]) if ended else (tokens[:length], None)
    return Answer(words, logprobs[:length], score, end=end)
