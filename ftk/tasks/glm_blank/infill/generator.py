"""Fills blanks: token ids with blanks in, the answers of the blanks out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ftk.errors import UserError
from ftk.generation.blanks import check_positions, end_ids, find_blanks, mask_ids
from ftk.generation.config import GenerationConfig, generation_config
from ftk.generation.decoder import CachedDecoder
from ftk.generation.fusion import FusedDecoder
from ftk.generation.hidden_states import HiddenStates
from ftk.generation.in_flight import InFlight, Prompt
from ftk.generation.language_model import LanguageModel
from ftk.generation.processors.base import Processor, Processors
from ftk.generation.search import Answer, strategy
from ftk.generation.token_stream import NewTokens, TokenStream, told_at_once
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.tasks.glm_blank.infill.joint import Filling, fill_jointly, filling
from ftk.tasks.glm_blank.infill.orders import blank_numbers, fill_in_rounds
from ftk.tasks.glm_blank.infill.scoring import score_ids


class BlankGenerator:
    """Answers the blanks of each context from left to right (Du et al. 2022, 2.1).

    The context is read once. The start token and the answer of a filled blank stay visible to later blanks,
    its end token does not. An answer ends at the end-of-piece token, at the end-of-text token if `special`
    has one, or after max_len tokens.

    Args:
        model: a module with `embed`, `layers`, `finish` and `head` (see `ftk.models.base.Backbone`); if it has a
            `config` with `max_positions`, prompts are checked against it.
        special: has `sop`, `eop` and at least one of `mask`, `smask`, `gmask`; `eos` may be there.
        config: options; the defaults if None.
        processors: what changes the scores of tokens, in the order of application (`build_processors`).
        language_model: has a say in which tokens come (shallow fusion).
        options: fields of `GenerationConfig`, instead of or on top of `config`.

    Raises:
        UserError: a special token is missing, an option is unknown or not allowed, the language model has another
            vocabulary or too few positions.
    """

    def __init__(
        self,
        model: nn.Module,
        special: Any,
        config: GenerationConfig | None = None,
        *,
        processors: Sequence[Processor] | Processors = (),
        language_model: LanguageModel | None = None,
        **options: Any,
    ) -> None:
        self.model: Any = model
        self.processors = processors if isinstance(processors, Processors) else Processors(processors)
        self.config = generation_config(config, **options)
        for name, meaning in (("sop", "start of piece"), ("eop", "end of piece")):
            if getattr(special, name, None) is None:
                raise UserError(f"the tokenizer has no {meaning} token ({name}); it cannot fill blanks")
        self.sop: int = special.sop
        self.ends = end_ids(special)
        self.masks = mask_ids(special)
        if not self.masks:
            raise UserError("the tokenizer has no [MASK], [sMASK] or [gMASK] token; it cannot fill blanks")
        self.strategy = strategy(self.config)
        model_config = getattr(model, "config", None)
        self.max_positions: int | None = getattr(model_config, "max_positions", None)
        self.in_blocks: bool = getattr(model_config, "block_positions", True)
        if self.config.lm_path is not None and language_model is None:
            raise UserError(
                f"lm_path is {self.config.lm_path}; ftk.load_generator opens it, here give language_model="
                "LanguageModel(...)"
            )
        self.language_model = language_model
        if language_model is not None:
            # What is read ahead takes a place behind the longest answer.
            longest = self.config.max_len + self.strategy.target.lookahead
            language_model.check(getattr(model_config, "vocab_size", None), longest)

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
        return _result(self._filled(contexts, seeds, progress, None, processors))

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
            own = [None] * len(contexts) if processors is None else processors
            return fill_jointly(self, contexts, self._checked(contexts, seeds), progress or (lambda count: None), own)
        penalty = self.config.length_penalty
        return [[filling(answers, penalty)] for answers in self.fill_ids(contexts, seeds, progress, processors)]

    def stream_ids(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        processors: Sequence[Processors | None] | None = None,
    ) -> Generator[NewTokens, None, list[list[Answer]]]:
        """As `fill_ids`, but gives tokens as soon as they are there; closing the iterator ends the work.

        A blank's tokens come one by one where they are settled one by one: with greedy search, a single sample and
        contrastive search. Where hypotheses compete a blank has one part, its answer. Until the iterator has come to
        its end, or is closed, the model is in evaluation mode.

        Args, Raises:
            as for `fill_ids`; what is wrong is said at once.

        Yields:
            parts of answers, those of contexts that are answered together in turn.

        Returns:
            what `fill_ids` returns.
        """
        return self._filled(contexts, seeds, progress, TokenStream(self.ends), processors)

    def _filled(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None,
        progress: Callable[[int], object] | None,
        stream: TokenStream | None,
        processors: Sequence[Processors | None] | None,
    ) -> Generator[NewTokens, None, list[list[Answer]]]:
        """What `fill_ids` returns, at the end of an iterator over what `stream` has; checks before that."""
        seeds = self._checked(contexts, seeds)
        progress = progress or (lambda count: None)
        processors = [None] * len(contexts) if processors is None else processors
        if self.config.nbest_over == "text":
            return self._filled_jointly(contexts, seeds, progress, stream, processors)
        if self.config.reencode or self.config.blank_order == "confident":
            return fill_in_rounds(self, contexts, seeds, progress, stream, processors)
        return self._filled_at_once(contexts, seeds, progress, stream, processors)

    def _checked(self, contexts: Sequence[Sequence[int]], seeds: Sequence[int] | None) -> Sequence[int]:
        """A seed for each context; UserError where the numbers differ or a context does not fit."""
        seeds = [self.config.seed] * len(contexts) if seeds is None else seeds
        if len(seeds) != len(contexts):
            raise UserError(f"{len(seeds)} seeds for {len(contexts)} contexts; give one for each")
        for context in contexts:
            self.check(context)
        return seeds

    def _filled_jointly(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        progress: Callable[[int], object],
        stream: TokenStream | None,
        processors: Sequence[Processors | None],
    ) -> Generator[NewTokens, None, list[list[Answer]]]:
        """The answers of the best filling of each context, which are known all at once."""
        best = [fillings[0].answers for fillings in fill_jointly(self, contexts, seeds, progress, processors)]
        if stream is not None:
            yield from told_at_once(best)
        return best

    def _filled_at_once(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        progress: Callable[[int], object],
        stream: TokenStream | None,
        processors: Sequence[Processors | None],
    ) -> Generator[NewTokens, None, list[list[Answer]]]:
        """As `fill_in_rounds`, but each context is read once, and its blanks follow one another by themselves."""
        prompts = []
        for index, (context, seed, own) in enumerate(zip(contexts, seeds, processors, strict=True)):
            order = blank_numbers(self.config.blank_order, len(find_blanks(context, self.masks)))
            prompts.append(Prompt(list(map(int, context)), self.masks, seed, order, index=index, processors=own))
        yield from self.fill_prompts(prompts, progress, stream)
        return [prompt.answers_in_text for prompt in prompts]

    def fill_prompts(
        self,
        prompts: Sequence[Prompt],
        progress: Callable[[int], object] | None = None,
        stream: TokenStream | None = None,
    ) -> Iterator[NewTokens]:
        """Fills the blanks that prompts ask for, in their order; each keeps its answers. Yields what `stream` has."""
        # The longest work first, so that few rows stand idle at the end; alike prompts together, so that without
        # `in_flight` little is padded.
        waiting = sorted((p for p in prompts if p.blanks), key=lambda p: (len(p.blanks), len(p.context)), reverse=True)
        models = [self.model, *([self.language_model.model] if self.language_model is not None else [])]
        with evaluation_mode(*models):
            if waiting:
                yield from self._fill(waiting, progress or (lambda count: None), stream)

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
        """Raises UserError, with the numbers, if a context does not fit the model's positions."""
        num_blanks = len(find_blanks(context, self.masks))
        if self.max_positions is not None and num_blanks:
            # What is read ahead takes the place that a further blank's start would.
            num_starts = num_blanks + self.strategy.target.lookahead
            check_positions(len(context), num_starts, self.config.max_len, self.max_positions, self.in_blocks)
            longest = self.longest_context(num_blanks)
            if self.config.reencode and longest is not None and len(context) > longest:
                raise UserError(
                    f"the prompt is {len(context)} tokens long; with {num_blanks} answers of up to "
                    f"{self.config.max_len} tokens written back the model has positions for {longest}; "
                    "shorten it, or cut it with truncate (--truncate)"
                )

    def longest_context(self, num_blanks: int) -> int | None:
        """Most tokens of a context with so many blanks; None where there is no limit.

        Raises:
            UserError: with `reencode`, if so many answers take all positions by themselves.
        """
        if self.max_positions is None:
            return None
        num_rows = self.max_positions + 1 if self.in_blocks else self.max_positions
        # With reencode each blank but the last grows to an answer before the context is read for the last time.
        growth = (num_blanks - 1) * (self.config.max_len - 1) if self.config.reencode and num_blanks else 0
        if growth and num_rows - growth < num_blanks:
            most = 1 + (num_rows - num_blanks) // (num_blanks - 1)
            lower = f"max_len (--max-len) can be at most {most}, or " if most >= 1 else ""
            raise UserError(
                f"{num_blanks} answers of up to {self.config.max_len} tokens, written back, do not fit the model's "
                f"{num_rows} positions; {lower}ask for fewer at once"
            )
        return num_rows - growth

    @torch.inference_mode()
    def _fill(
        self, prompts: list[Prompt], progress: Callable[[int], object], stream: TokenStream | None
    ) -> Iterator[NewTokens]:
        """Answers prompts that have blanks, `batch_size` at a time."""
        max_len = self.config.max_len
        num_rows = min(self.config.batch_size, len(prompts))
        capacity = max(prompt.capacity(max_len) for prompt in prompts)
        branch_capacity = self.strategy.num_steps - 1
        own = CachedDecoder(
            self.model,
            num_rows,
            self.strategy.width,
            capacity,
            branch_capacity,
            next(self.model.parameters()).device,
            self.in_blocks,
            HiddenStates(num_rows, capacity) if self.strategy.target.reads_states else None,
            # Prompts that enter together are of any lengths; a batch is sorted, and read as the usual way is.
            packed=self.config.in_flight,
        )
        decoder: CachedDecoder | FusedDecoder = own
        if self.language_model is not None:
            beside = max(self.language_model.capacity(prompt, max_len) for prompt in prompts)
            decoder = FusedDecoder(own, self.language_model, beside, branch_capacity)
        refill = self.config.in_flight
        in_flight = InFlight(decoder, self.strategy, self.processors, self.ends, self.sop, refill, stream)
        yield from in_flight.run(prompts, lambda prompt: progress(1))


def check_longest_answer(config: GenerationConfig, model_config: Any) -> None:
    """Raises UserError if answers of max_len tokens fit no prompt of a model with this config; needs no weights."""
    max_positions = getattr(model_config, "max_positions", None)
    if max_positions is not None:
        num_starts = 1 + strategy(config).target.lookahead
        check_positions(1, num_starts, config.max_len, max_positions, getattr(model_config, "block_positions", True))


def _result(steps: Generator[Any, None, list[list[Answer]]]) -> list[list[Answer]]:
    """What an iterator returns in the end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: list[list[Answer]] = end.value
            return found
