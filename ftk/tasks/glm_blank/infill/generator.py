"""Fills blanks: token ids with blanks in, the answers of the blanks out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, overload

from torch import nn

from ftk.errors import UserError
from ftk.generation.config import checked_config
from ftk.generation.engine.engine import Engine, collect
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Event, Request
from ftk.generation.engine.scoring import score
from ftk.generation.processors.base import Processor, Processors
from ftk.generation.search import Answer, strategy
from ftk.generation.text import as_lists, is_single
from ftk.tasks.glm_blank.infill.blanks import blank_numbers, check_positions
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.infill.framing import BlankFraming
from ftk.tasks.glm_blank.infill.joint import fill_jointly
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from ftk.tasks.glm_blank.infill.scoring import given_answers, scored_answers


class BlankGenerator:
    """Answers the blanks of each context from left to right (Du et al. 2022, 2.1).

        generator = BlankGenerator(model, tokenizer.special, beam=4, max_len=64)
        generator.fill_ids([2, 17, 4, 3, 9])[0].tokens

    The context is read once. The start token and the answer of a filled blank stay visible to later blanks,
    its end token does not. An answer ends at the end-of-piece token, at the end-of-text token if `special`
    has one, or after max_len tokens.

    Args:
        model: a GLM, or what is called as one (`ftk.models.base`); if it has a `config` with `max_positions`, prompts
            are checked against it.
        special: has `sop`, `eop` and at least one of `mask`, `smask`, `gmask`; `eos` may be there.
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
        self.config = checked_config(FillConfig() if config is None else config, **options)
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

    @overload
    def fill_ids(
        self,
        contexts: Sequence[int],
        seeds: int | None = None,
        progress: Callable[[int], object] | None = None,
        processors: Processors | None = None,
    ) -> list[Answer]: ...

    @overload
    def fill_ids(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        processors: Sequence[Processors | None] | None = None,
    ) -> list[list[Answer]]: ...

    def fill_ids(
        self,
        contexts: Any,
        seeds: Any = None,
        progress: Callable[[int], object] | None = None,
        processors: Any = None,
    ) -> list[Any]:
        """The answers of a context's blanks, or of those of each of several contexts.

        Args:
            contexts: token ids with mask tokens as blanks, complete ([CLS] and end of text included); or a list of
                such lists.
            seeds: of the context, or one for each, for sampling; `config.seed` for all if None. A context's answers
                depend on its tokens and its seed alone, not on what else is in the batch.
            progress: called with the number of contexts that have been answered since the last call.
            processors: those of the context, or for each context its own; None: those of the generator.

        Returns:
            one answer per blank from left to right, the best one; of a list of contexts a list of such lists. With
            `nbest` its `others` are the further answers to the same blank, given the best ones to the blanks before
            it; with `nbest_over` "text" the answers are the best together, and the first `others` of all the next
            best, and so on (see `fillings_of`).

        Raises:
            UserError: a context is longer than the model's positions; nothing has been generated then.
        """
        requests = self.requests(*as_lists(contexts, seeds, processors))
        asked = [request for request in requests if request.prompt.order]
        answers = iter(collect(self.events(asked), len(asked), progress))
        found = [next(answers) if request.prompt.order else [] for request in requests]
        return found[0] if is_single(contexts) else found

    def stream_ids(
        self,
        contexts: Sequence[int] | Sequence[Sequence[int]],
        seeds: int | Sequence[int] | None = None,
        processors: Processors | Sequence[Processors | None] | None = None,
    ) -> Generator[Event, None, None]:
        """As `fill_ids`, but gives tokens as soon as they are there; closing the iterator ends the work.

        A blank's tokens come one by one where they are settled one by one: with greedy search and a single sample.
        Where hypotheses compete a blank has one event, its answer. Until the iterator has come to its end, or is
        closed, the model is in evaluation mode.

        Args, Raises:
            as for `fill_ids`; each context has a blank.

        Yields:
            see `events`.
        """
        return self.events(self.requests(*as_lists(contexts, seeds, processors)), stream=True)

    def request(
        self,
        context: Sequence[int],
        seed: int | None = None,
        processors: Processors | None = None,
        order: str | None = None,
    ) -> Request:
        """What the engine is asked for a context; arguments as for `fill_ids`, of one context.

        Its blanks have the `order` of the generator unless another one is given.

        Raises:
            UserError: the order is not allowed, or it is found while the blanks are filled.
        """
        prompt = self.framing.prompt(context, reencode=self.config.reencode)
        if order is not None:
            checked_config(self.config, blank_order=str(order))
            if "confident" in (order, self.config.blank_order):
                raise UserError("blank_order confident is for all prompts alike; give one of them no order of its own")
        order = order or ("left" if self.config.blank_order == "confident" else self.config.blank_order)
        return Request(
            replace(prompt, order=tuple(blank_numbers(order, len(prompt.places)))),
            self.config,
            self.processors if processors is None else processors,
            self.config.seed if seed is None else seed,
        )

    def requests(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        processors: Sequence[Processors | None] | None = None,
    ) -> list[Request]:
        """What the engine is asked for some contexts; arguments as for `fill_ids`.

        Raises:
            UserError: the numbers of contexts and seeds differ.
        """
        seeds = [self.config.seed] * len(contexts) if seeds is None else seeds
        if len(seeds) != len(contexts):
            raise UserError(f"{len(seeds)} seeds for {len(contexts)} contexts; give one for each")
        processors = [None] * len(contexts) if processors is None else processors
        return list(map(self.request, contexts, seeds, processors))

    def engine(self, requests: Sequence[Request]) -> Engine:
        """An engine of the generator's model that is large enough for some requests."""
        return engine_for(self.model, self.framing, requests, self.config.batch_size, self.language_model)

    def events(self, requests: Sequence[Request], *, stream: bool = False) -> Generator[Event, None, None]:
        """Answers requests; see `Engine.events`.

        Args:
            requests: each for one blank or more.
            stream: whether tokens are reported one by one.

        Yields:
            events, whose `number` is that of the blank from left to right.
        """
        if self.config.nbest_over == "blank":
            return self._by_blank(requests, stream)

        def fill(asked: Sequence[Request]) -> list[list[Answer]]:
            return collect(self._by_blank(asked, stream=False), len(asked))

        return fill_jointly(self.config, len(self.framing.ends), requests, fill)

    def score(
        self,
        contexts: Any,
        candidates: Any,
        orders: Any = None,
        end: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> list[Any]:
        """Log-probabilities of given answers, as the generator would have found them on the way to these answers.

        An answer is read behind those of the blanks that come before it, each as it is given. Processors are not used.

        Args:
            contexts: token ids with mask tokens as blanks, or a list of such lists.
            candidates: for a context any number of candidates, each with one list of ids for every blank, from left to
                right. Ids that finish with an end token are scored with it.
            orders: for a context the order in which its blanks are filled, numbers from 0; left to right if None.
            end: whether the end-of-piece token is scored behind answers that have no end token.
            progress: called with the number of contexts that have been scored since the last call.

        Returns:
            per candidate one answer per blank, from left to right; its tokens are without the end token, `score` is the
            sum of its log-probabilities / their number ** length_penalty. Of a list of contexts a list of such lists.

        Raises:
            UserError: numbers of contexts, candidates, blanks that do not fit; what the positions do not reach; a
                log-probability is NaN or infinite.
        """
        single = is_single(contexts)
        contexts, candidates, orders = as_lists(contexts, candidates, orders)
        if len(candidates) != len(contexts):
            raise UserError(
                f"answers for {len(candidates)} contexts, but there are {len(contexts)}; give some for each"
            )
        requests = list(map(self.request, contexts))
        every: Sequence[Sequence[int] | None] = [None] * len(contexts) if orders is None else orders
        given = [
            [given_answers(self.framing, request, answers, order, end=end) for answers in own]
            for request, own, order in zip(requests, candidates, every, strict=True)
        ]
        scored = score(self.model, self.framing, requests, given, progress)
        penalty = self.config.length_penalty
        answers = [
            [scored_answers(self.framing, *pair, penalty) for pair in zip(own, found, strict=True)]
            for own, found in zip(given, scored, strict=True)
        ]
        return answers[0] if single else answers

    def _by_blank(self, requests: Sequence[Request], stream: bool) -> Generator[Event, None, None]:
        """The answers to each blank, given the best ones to those before it."""
        if self.config.blank_order == "confident":
            return self._surest_first(requests, stream)
        return self.engine(requests).events(requests, stream=stream)

    def _surest_first(self, requests: Sequence[Request], stream: bool) -> Generator[Event, None, None]:
        """Round by round, since what was found decides which blank is next: the one that begins most surely."""
        going = dict(enumerate(requests))
        while going:
            places, asked = list(going), self._surest(list(going.values()))
            for event in self.engine(asked).events(asked, stream=stream):
                place = places[event.request]
                if event.answer is not None:
                    prompt = going[place].prompt.answered(event.number, event.answer.tokens)
                    going[place] = replace(going[place], prompt=prompt)
                if event.kind != "done":
                    yield event._replace(request=place)
                elif not going[place].prompt.order:
                    del going[place]
                    yield event._replace(request=place)

    def _surest(self, requests: Sequence[Request]) -> list[Request]:
        """Each for that of its blanks whose answer begins most surely; of equally sure ones the first in the text."""
        several = [request for request in requests if len(request.prompt.order) > 1]
        starts = [[{number: [self.framing.ends[0]]} for number in sorted(request.prompt.order)] for request in several]
        found = iter(score(self.model, self.framing, several, starts))
        asked = []
        for request in requests:
            number = request.prompt.order[0]
            if len(request.prompt.order) > 1:
                sure = [start.best[0] for start in next(found)]
                number = sorted(request.prompt.order)[max(range(len(sure)), key=sure.__getitem__)]
            asked.append(replace(request, prompt=replace(request.prompt, order=(number,))))
        return asked


def check_longest_answer(config: FillConfig, model_config: Any) -> None:
    """Raises UserError if answers of max_len tokens fit no prompt of a model with this config; needs no weights."""
    max_positions = getattr(model_config, "max_positions", None)
    if max_positions is not None:
        num_starts = 1 + strategy(config).target.lookahead
        check_positions(1, num_starts, config.max_len, max_positions, getattr(model_config, "block_positions", True))
