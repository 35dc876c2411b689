"""Fills blanks: token ids with blanks in, the answers of the blanks out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ftk.errors import UserError
from ftk.generation.blanks import check_positions, end_ids, find_blanks, mask_ids
from ftk.generation.config import GenerationConfig, generation_config
from ftk.generation.decoder import CachedDecoder
from ftk.generation.hidden_states import HiddenStates
from ftk.generation.in_flight import InFlight, Prompt
from ftk.generation.orders import blank_numbers, fill_in_rounds
from ftk.generation.processors.base import Processor, Processors
from ftk.generation.scoring import score_ids
from ftk.generation.search import Answer, strategy


class SequenceGenerator:
    """Answers the blanks of each context from left to right (Du et al. 2022, 2.1).

    The context is read once. The start token and the answer of a filled blank stay visible to later blanks,
    its end token does not. An answer ends at the end-of-piece token, at the end-of-text token if `special`
    has one, or after max_len tokens.

    Args:
        model: a module with `embed`, `layers`, `final_norm`, `logits` (see `DecodableModel`); if it has a
            `config` with `max_positions`, prompts are checked against it.
        special: has `sop`, `eop` and at least one of `mask`, `smask`, `gmask`; `eos` may be there.
        config: options; the defaults if None.
        processors: what changes the scores of tokens, in the order of application (`build_processors`).
        options: fields of `GenerationConfig`, instead of or on top of `config`.

    Raises:
        UserError: a special token is missing, an option is unknown or not allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        special: Any,
        config: GenerationConfig | None = None,
        *,
        processors: Sequence[Processor] | Processors = (),
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

    def fill_ids(
        self,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[list[Answer]]:
        """The answers of each context's blanks.

        Args:
            contexts: token ids with mask tokens as blanks, complete ([CLS] and end of text included).
            seeds: one per context, for sampling; `config.seed` for all if None. A context's answers depend on
                its tokens and its seed alone, not on what else is in the batch.
            progress: called with the number of contexts that have been answered since the last call.

        Returns:
            per context, in the order given, one answer per blank from left to right, the best one. With `nbest`
            its `others` are the further answers to the same blank, given the best ones to the blanks before it.

        Raises:
            UserError: a context is longer than the model's positions; nothing has been generated then.
        """
        seeds = [self.config.seed] * len(contexts) if seeds is None else seeds
        if len(seeds) != len(contexts):
            raise UserError(f"{len(seeds)} seeds for {len(contexts)} contexts; give one for each")
        for context in contexts:
            self.check(context)
        progress = progress or (lambda count: None)
        if self.config.reencode or self.config.blank_order == "confident":
            return fill_in_rounds(self, contexts, seeds, progress)
        prompts = []
        for context, seed in zip(contexts, seeds, strict=True):
            order = blank_numbers(self.config.blank_order, len(find_blanks(context, self.masks)))
            prompts.append(Prompt(list(map(int, context)), self.masks, seed, order))
        self.fill_prompts(prompts, progress)
        return [prompt.answers_in_text for prompt in prompts]

    def fill_prompts(self, prompts: Sequence[Prompt], progress: Callable[[int], object] | None = None) -> None:
        """Fills the blanks that prompts ask for, in their order; each keeps its answers."""
        # The longest work first, so that few rows stand idle at the end; alike prompts together: little is padded.
        waiting = sorted((p for p in prompts if p.blanks), key=lambda p: (len(p.blanks), len(p.context)), reverse=True)
        was_training = self.model.training
        self.model.eval()
        try:
            if waiting:
                self._fill(waiting, progress or (lambda count: None))
        finally:
            self.model.train(was_training)

    def score(
        self,
        contexts: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[Sequence[Sequence[int]]]],
        orders: Sequence[Sequence[int]] | None = None,
        end: bool = True,
    ) -> list[list[list[Answer]]]:
        """Log-probabilities of given answers; see `ftk.generation.scoring.score_ids`."""
        return score_ids(self, contexts, candidates, orders, end)

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
                    f"{self.config.max_len} tokens written back the model has positions for {longest}; shorten it"
                )

    def longest_context(self, num_blanks: int) -> int | None:
        """Most tokens of a context with so many blanks; None where there is no limit."""
        if self.max_positions is None:
            return None
        num_rows = self.max_positions + 1 if self.in_blocks else self.max_positions
        # With reencode each blank but the last grows to an answer before the context is read for the last time.
        growth = (num_blanks - 1) * (self.config.max_len - 1) if self.config.reencode and num_blanks else 0
        return num_rows - growth

    @torch.inference_mode()
    def _fill(self, prompts: list[Prompt], progress: Callable[[int], object]) -> None:
        """Answers prompts that have blanks, `batch_size` at a time."""
        max_len = self.config.max_len
        num_rows = min(self.config.batch_size, len(prompts))
        capacity = max(prompt.capacity(max_len) for prompt in prompts)
        decoder = CachedDecoder(
            self.model,
            num_rows,
            self.strategy.width,
            capacity,
            self.strategy.num_steps - 1,
            next(self.model.parameters()).device,
            self.in_blocks,
            HiddenStates(num_rows, capacity) if self.strategy.target.reads_states else None,
        )
        in_flight = InFlight(decoder, self.strategy, self.processors, self.ends, self.sop, self.config.in_flight)
        in_flight.run(prompts, lambda prompt: progress(1))
