"""Fills blanks: token ids with blanks in, the answers of the blanks out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from ftk.errors import UserError
from ftk.generation.engine.engine import Engine, engine_for
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.generation.processors.base import Processor, Processors
from ftk.generation.search import Answer, strategy
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.tasks.glm_blank.infill.blanks import blank_numbers, check_positions
from ftk.tasks.glm_blank.infill.config import FillConfig, fill_config
from ftk.tasks.glm_blank.infill.framing import BlankFraming, BlankPrompt
from ftk.tasks.glm_blank.infill.joint import Filling, fill_jointly, filling
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from ftk.tasks.glm_blank.infill.scoring import score_ids


class NewTokens(NamedTuple):
    """A part of the answer to one blank. All parts of a blank, joined, are its answer.

    Attributes:
        prompt: number of the context, from 0 on, as they were given.
        blank: number of the blank, from 0 on, from left to right.
        tokens: ids, without the end token.
        token_logprobs: natural logarithms of their probabilities; the end token's comes with the last part.
        answer: the complete answer, with the last part. Where a stop string cuts it, tokens that came before it
            was seen may be missing in it.
    """

    prompt: int
    blank: int
    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    answer: Answer | None


class BlankGenerator:
    """Answers the blanks of each context from left to right (Du et al. 2022, 2.1).

        generator = BlankGenerator(model, tokenizer.special, beam=4, max_len=64)
        generator.fill_ids([[2, 17, 4, 3, 9]])[0][0].tokens

    The context is read once. The start token and the answer of a filled blank stay visible to later blanks,
    its end token does not. An answer ends at the end-of-piece token, at the end-of-text token if `special`
    has one, or after max_len tokens.

    Args:
        model: a GLM, or what is called as one (`ftk.models.base`); if it has a `config` with `max_positions`, prompts
            are checked against it.
        special: has `sop`, `eop` and at least one of `mask`, `smask`, `gmask`; `eos` may be there.
        config: options; the defaults if None.
        processors: what changes the scores of tokens, in the order of application (`build_processors`).
        language_model: its log-probabilities are added (shallow fusion).
        options: fields of `FillConfig`, instead of or on top of `config`.

    Raises:
        UserError: a special token is missing, an option is unknown or not allowed, the language model has another
            vocabulary or too few positions.
    """

    def __init__(
        self,
        model: nn.Module,
        special: Any,
        config: FillConfig | None = None,
        *,
        processors: Sequence[Processor] | Processors = (),
        language_model: LanguageModel | None = None,
        **options: Any,
    ) -> None:
        self.model: Any = model
        self.processors = processors if isinstance(processors, Processors) else Processors(processors)
        self.config = fill_config(config, **options)
        model_config = getattr(model, "config", None)
        self.framing = BlankFraming(special, model_config)
        target = strategy(self.config).target
        if self.config.lm_path is not None and language_model is None:
            raise UserError(
                f"lm_path is {self.config.lm_path}; ftk.load_generator opens it, here give language_model="
                "LanguageModel(...)"
            )
        self.language_model = language_model
        if language_model is not None:
            # What is read ahead takes a place behind the longest answer.
            language_model.check(getattr(model_config, "vocab_size", None), self.config.max_len + target.lookahead)

    def fill_ids(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        processors: Sequence[Processors | None] | None = None,
    ) -> list[list[Answer]]:
        """The answers of each context's blanks.

        Args:
            contexts: token ids with mask tokens as blanks, complete ([CLS] and end of text included).
            seeds: one per context, for sampling; `config.seed` for all if None. A context's answers depend on
                its tokens and its seed alone, not on what else is in the batch.
            progress: called with the number of contexts that have been answered since the last call.
            processors: for each context its own processors, or None for those of the generator; None: for none.

        Returns:
            per context, in the order given, one answer per blank from left to right, the best one. With `nbest`
            its `others` are the further answers to the same blank, given the best ones to the blanks before it; with
            `nbest_over` "text" there are none, and the answers are the best together (see `fill_texts`).

        Raises:
            UserError: a context is longer than the model's positions; nothing has been generated then.
        """
        requests = self.requests(contexts, seeds, processors)
        progress = progress or (lambda count: None)
        if self.config.nbest_over == "text":
            return [fillings[0].answers for fillings in fill_jointly(self, requests, progress)]
        return self.filled(requests, progress)

    def fill_texts(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        processors: Sequence[Processors | None] | None = None,
    ) -> list[list[Filling]]:
        """The ways to fill each context as a whole, best first.

        Args, Raises:
            as for `fill_ids`.

        Returns:
            per context up to `nbest` fillings with `nbest_over` "text"; else one, of the best answer to each blank.
        """
        if self.config.nbest_over == "text":
            return fill_jointly(self, self.requests(contexts, seeds, processors), progress or (lambda count: None))
        penalty = self.config.length_penalty
        return [[filling(answers, penalty)] for answers in self.fill_ids(contexts, seeds, progress, processors)]

    def stream_ids(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        processors: Sequence[Processors | None] | None = None,
    ) -> Generator[NewTokens, None, None]:
        """As `fill_ids`, but gives tokens as soon as they are there; closing the iterator ends the work.

        A blank's tokens come one by one where they are settled one by one: with greedy search and a single sample.
        Where hypotheses compete a blank has one part, its answer. Until the iterator has come to its end, or is closed,
        the model is in evaluation mode.

        Args, Raises:
            as for `fill_ids`; what is wrong is said at once.

        Yields:
            parts of answers, those of contexts that are answered together in turn.
        """
        requests = self.requests(contexts, seeds, processors, token_by_token=True)
        progress = progress or (lambda count: None)
        if self.config.nbest_over == "text":
            return self._filled_jointly(requests, progress)
        return self._parts(requests, progress)

    def requests(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        processors: Sequence[Processors | None] | None = None,
        token_by_token: bool = False,
    ) -> list[Request]:
        """What the engine is asked for some contexts; arguments as for `fill_ids`.

        Raises:
            UserError: the numbers of contexts and seeds differ, or a context does not fit.
        """
        config = self.config
        seeds = [config.seed] * len(contexts) if seeds is None else seeds
        if len(seeds) != len(contexts):
            raise UserError(f"{len(seeds)} seeds for {len(contexts)} contexts; give one for each")
        requests = []
        for context, seed, own in zip(contexts, seeds, processors or [None] * len(contexts), strict=True):
            prompt = self._prompt(context)
            chosen = self.processors if own is None else own
            requests.append(Request(prompt, config, chosen, seed, token_by_token))
            if prompt.order:  # else nothing is asked: there are no answers
                self.framing.check(requests[-1])
        return requests

    def engine(self, requests: Sequence[Request], batch_size: int | None = None) -> Engine:
        """An engine of the generator's model that is large enough for some requests."""
        size = self.config.batch_size if batch_size is None else batch_size
        return engine_for(self.model, self.framing, requests, size, self.language_model)

    def score(
        self,
        contexts: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[Sequence[Sequence[int]]]],
        orders: Sequence[Sequence[int]] | None = None,
        end: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> list[list[list[Answer]]]:
        """Log-probabilities of given answers; see `ftk.tasks.glm_blank.infill.scoring.score_ids`."""
        return score_ids(self, contexts, candidates, orders, end, progress)

    def check(self, context: Sequence[int]) -> None:
        """Raises UserError, with the numbers, if a context has no blank or does not fit the model's positions."""
        self.framing.check(Request(self._prompt(context), self.config))

    def longest_context(self, num_blanks: int) -> int | None:
        """Most tokens of a context with so many blanks, see `BlankFraming.longest_context`."""
        return self.framing.longest_context(num_blanks, self.config.max_len if self.config.reencode else None)

    def filled(
        self, requests: Sequence[Request], progress: Callable[[int], object] = lambda count: None
    ) -> list[list[Answer]]:
        """The answers to the blanks that each request asks for, from left to right."""
        found: list[dict[int, Answer]] = [{} for _ in requests]
        for part in self._parts(requests, progress):
            if part.answer is not None:
                found[part.prompt][part.blank] = part.answer
        return [[own[blank] for blank in sorted(own)] for own in found]

    def _prompt(self, context: Sequence[int]) -> BlankPrompt:
        prompt = self.framing.prompt(context, reencode=self.config.reencode)
        order = self.config.blank_order
        return replace(prompt, order=tuple(blank_numbers("left" if order == "confident" else order, len(prompt.order))))

    def models(self) -> list[nn.Module]:
        """All that answers are computed with."""
        return [self.model, *([self.language_model.model] if self.language_model is not None else [])]

    def _parts(
        self, requests: Sequence[Request], progress: Callable[[int], object]
    ) -> Generator[NewTokens, None, None]:
        """The answers to all blanks that requests ask for, as they come."""
        if self.config.blank_order == "confident":
            return self._surest_first(requests, progress)
        return self._in_order(requests, progress)

    def _in_order(
        self, requests: Sequence[Request], progress: Callable[[int], object]
    ) -> Generator[NewTokens, None, None]:
        """The loop of the engine."""
        order = longest_first(requests)
        if not order:
            return
        with evaluation_mode(*self.models()):
            engine = self.engine([requests[index] for index in order])
            numbers = [engine.submit(requests[index]) for index in order]
            index_of = dict(zip(numbers, order, strict=True))
            with closing(engine.drain(numbers)) as events:
                for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.kind == "done":
                        progress(1)
                    else:
                        part = (event.number, event.tokens, event.logprobs, event.answer)
                        yield NewTokens(index_of[event.request], *part)

    def _surest_first(
        self, requests: Sequence[Request], progress: Callable[[int], object]
    ) -> Generator[NewTokens, None, None]:
        """Round by round, since what was found decides which blank is next: the one that begins most surely."""
        going = [_Going(index, request) for index, request in enumerate(requests) if request.prompt.order]
        while going:
            self._choose(going)
            asked = [one.next_request() for one in going]
            for part in self._in_order(asked, lambda count: None):
                one = going[part.prompt]
                if part.answer is not None:
                    one.prompt = one.prompt.answered(part.blank, part.answer.tokens)
                yield part._replace(prompt=one.index)
            progress(sum(not one.prompt.order for one in going))
            going = [one for one in going if one.prompt.order]

    def _choose(self, going: Sequence[_Going]) -> None:
        """Of each the blank whose answer begins most surely; of equally sure ones the first in the text."""
        several = [one for one in going if len(one.prompt.order) > 1]
        starts = [[{number: [self.framing.ends[0]]} for number in sorted(one.prompt.order)] for one in several]
        with evaluation_mode(self.model):
            found = score(self.model, self.framing, [one.whole_request() for one in several], starts)
        for one in going:
            one.number = one.prompt.order[0]
        for one, scored in zip(several, found, strict=True):
            sure = [start.best[0] for start in scored]
            one.number = sorted(one.prompt.order)[max(range(len(sure)), key=sure.__getitem__)]

    def _filled_jointly(
        self, requests: Sequence[Request], progress: Callable[[int], object]
    ) -> Generator[NewTokens, None, None]:
        """The answers of the best filling of each context, which are known all at once."""
        for prompt, fillings in enumerate(fill_jointly(self, requests, progress)):
            yield from whole_answers(prompt, fillings[0].answers)


@dataclass
class _Going:
    """A context with some blanks filled, and the blank that is next."""

    index: int  # as contexts were given
    request: Request
    prompt: BlankPrompt = field(init=False)
    number: int = -1

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt

    def whole_request(self) -> Request:
        return replace(self.request, prompt=self.prompt)

    def next_request(self) -> Request:
        return replace(self.request, prompt=replace(self.prompt, order=(self.number,)))


def whole_answers(prompt: int, answers: Sequence[Answer]) -> Iterator[NewTokens]:
    """Answers of context number `prompt` that are all complete, from left to right, as parts of a stream."""
    for blank, answer in enumerate(answers):
        yield NewTokens(prompt, blank, answer.tokens, answer.token_logprobs, answer)


def check_longest_answer(config: FillConfig, model_config: Any) -> None:
    """Raises UserError if answers of max_len tokens fit no prompt of a model with this config; needs no weights."""
    max_positions = getattr(model_config, "max_positions", None)
    if max_positions is not None:
        num_starts = 1 + strategy(config).target.lookahead
        check_positions(1, num_starts, config.max_len, max_positions, getattr(model_config, "block_positions", True))


def longest_first(requests: Sequence[Request]) -> list[int]:
    """Places of the requests that ask for something, the longest work first: few rows stand idle at the end."""

    def work(index: int) -> tuple[int, int]:
        prompt = requests[index].prompt
        return len(prompt.order), len(prompt.context)

    return sorted((index for index, one in enumerate(requests) if one.prompt.order), key=work, reverse=True)
