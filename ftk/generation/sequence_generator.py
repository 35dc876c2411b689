"""Fills blanks: token ids with blanks in, the answers of the blanks out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.generation.blanks import (
    Chunk,
    check_positions,
    context_chunk,
    end_ids,
    find_blanks,
    mask_ids,
    next_chunk,
)
from ftk.generation.config import GenerationConfig, generation_config
from ftk.generation.decoder import CachedDecoder
from ftk.generation.hidden_states import HiddenStates
from ftk.generation.processors.base import Processor, Processors
from ftk.generation.sampling import prompt_key, step_numbers
from ftk.generation.search import Answer, Search, Task, strategy


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
        prompts = [
            _Prompt(list(map(int, context)), self.masks, seed) for context, seed in zip(contexts, seeds, strict=True)
        ]
        for prompt in prompts:
            self.check(prompt.context)
        # Alike prompts go together, so that little is padded and few wait for the last blank of another.
        waiting = sorted((p for p in prompts if p.blanks), key=lambda p: (len(p.blanks), len(p.context)))
        was_training = self.model.training
        self.model.eval()
        try:
            for first in range(0, len(waiting), self.config.batch_size):
                batch = waiting[first : first + self.config.batch_size]
                self._fill(batch)
                if progress is not None:
                    progress(len(batch))
        finally:
            self.model.train(was_training)
        return [prompt.answers for prompt in prompts]

    def check(self, context: Sequence[int]) -> None:
        """Raises UserError, with the numbers, if a context does not fit the model's positions."""
        num_blanks = len(find_blanks(context, self.masks))
        if self.max_positions is not None and num_blanks:
            # What is read ahead takes the place that a further blank's start would.
            num_starts = num_blanks + self.strategy.target.lookahead
            check_positions(len(context), num_starts, self.config.max_len, self.max_positions, self.in_blocks)

    @torch.inference_mode()
    def _fill(self, prompts: list[_Prompt]) -> None:
        """Answers a batch of prompts with blanks. Round r fills blank r of all that have it."""
        max_len = self.config.max_len
        device = next(self.model.parameters()).device
        capacity = max(len(p.context) + (len(p.blanks) - 1) * (max_len + 1) + 1 for p in prompts)
        states = HiddenStates(len(prompts), capacity) if self.strategy.target.reads_states else None
        decoder = CachedDecoder(
            self.model,
            [len(prompt.context) for prompt in prompts],
            self.strategy.width,
            capacity,
            self.strategy.num_steps - 1,
            device,
            states,
        )
        for number in range(max(len(prompt.blanks) for prompt in prompts)):
            active = [row for row, prompt in enumerate(prompts) if len(prompt.blanks) > number]
            if len(active) < len(prompts):
                decoder.keep(active)
                prompts = [prompts[row] for row in active]
            logits = decoder.read([self._chunk(prompt, number) for prompt in prompts])  # [N, V]
            blanks = torch.tensor([prompt.blanks[number] for prompt in prompts], device=device)  # [N]
            contexts = [prompt.context for prompt in prompts]
            uniforms = self._uniforms(prompts, number, device)
            task = Task(len(prompts), self.ends, device, uniforms, contexts, [number] * len(prompts), states)
            search = self.strategy.build(task, self.processors)
            self._run(search, decoder, logits, blanks)
            for prompt, answers in zip(prompts, search.answers(), strict=True):
                best, *others = (self._cut(number, answer) for answer in answers)
                prompt.answers.append(dataclasses.replace(_finite(best), others=tuple(others)))

    def _run(self, search: Search, decoder: CachedDecoder, logits: Tensor, blanks: Tensor) -> None:
        """Drives one search to its end: logits [N, V] of the first token, blanks [N] text positions."""
        check_every = 1 if logits.device.type == "cpu" else 8  # to ask a GPU is to wait for it
        move = search.advance(logits[:, None])
        for step in range(1, self.strategy.num_steps):
            if step % check_every == 0 and bool(search.finished().all()):
                break
            if move.sources is not None:
                decoder.reorder(move.sources)
            block = step + 1 if self.in_blocks else 1
            move = search.advance(decoder.step(move.tokens, blanks, block))

    def _cut(self, number: int, answer: Answer) -> Answer:
        """The answer without what processors do not count: what stands behind a stop string."""
        length = self.processors.length(number, answer.tokens)
        if length == len(answer.tokens):
            return answer
        return dataclasses.replace(answer, tokens=answer.tokens[:length], token_logprobs=answer.token_logprobs[:length])

    def _chunk(self, prompt: _Prompt, number: int) -> Chunk:
        """What is read before blank `number` is filled."""
        blank = prompt.blanks[number]
        if number == 0:
            return context_chunk(prompt.context, self.sop, blank)
        answer, previous = prompt.answers[-1].tokens, prompt.blanks[number - 1]
        return next_chunk(answer, previous, self.sop, blank, self.in_blocks)

    def _uniforms(self, prompts: list[_Prompt], number: int, device: torch.device) -> Tensor | None:
        """float64 [N, max_len, D]: the random numbers of blank `number`; None where none are drawn."""
        draws = self.strategy.draws(len(self.ends))
        if draws == 0:
            return None
        keys = [prompt_key(prompt.seed, prompt.context) for prompt in prompts]
        return torch.from_numpy(step_numbers(keys, number, self.config.max_len, draws)).to(device)


class _Prompt:
    """A context on its way: its blanks, and the answers found so far."""

    def __init__(self, context: list[int], masks: Sequence[int], seed: int) -> None:
        self.context = context
        self.blanks = find_blanks(context, masks)
        self.seed = seed
        self.answers: list[Answer] = []


def _finite(answer: Answer) -> Answer:
    if not math.isfinite(answer.score):
        raise UserError("the model's logits are not finite; its weights may hold NaN")
    return answer
