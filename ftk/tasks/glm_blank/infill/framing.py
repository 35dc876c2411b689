"""How a GLM is asked to fill blanks: what it reads, at which positions, before each answer (Du et al. 2022, 2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftk.errors import UserError
from ftk.generation.engine.request import NOT_SCORED, SENTENCE, TEXT, WORD, Branch, Frame, Request
from ftk.generation.ensemble import check_alike
from ftk.generation.search import strategy
from ftk.generation.search.answer import Answer
from ftk.tasks.glm_blank.infill.blanks import check_length, check_positions, end_ids, find_blanks, mask_ids


@dataclass(frozen=True)
class BlankPrompt:
    """A context whose blanks are to be filled; what a `Request` of this task asks.

    Attributes:
        context: token ids.
        order: numbers of the blanks that are to be filled, in this order; the answers come so, too.
        places: number of each open blank -> its place in the context.
        filled: place and answer of blanks that were filled before, as they are read behind the context.
        reencode: whether an answer takes its blank's place, and the context is read anew.
    """

    context: Sequence[int]
    order: Sequence[int]
    places: Mapping[int, int]
    filled: tuple[tuple[int, Sequence[int]], ...] = ()
    reencode: bool = False

    def answered(self, number: int, tokens: Sequence[int]) -> BlankPrompt:
        """With an answer to blank `number`, which is asked no more: in its place, or behind the context."""
        place = self.places[number]
        order = tuple(blank for blank in self.order if blank != number)
        places = {other: at for other, at in self.places.items() if other != number}
        if not self.reencode:
            return BlankPrompt(self.context, order, places, (*self.filled, (place, tokens)))
        context = [*self.context[:place], *tokens, *self.context[place + 1 :]]
        shift = len(tokens) - 1
        places = {other: at + shift if at > place else at for other, at in places.items()}
        return BlankPrompt(context, order, places, self.filled, reencode=True)


class BlankFraming:
    """Reads the context, which all see, then the start token of the first blank, at whose place in the text its answer
    stands; then that answer and the next blank's start token, and so on. The end token of an answer is not read.

    Args:
        special: has `sop`, `eop` and at least one of `mask`, `smask`, `gmask`; `eos` may be there.
        model_config: of the model; what it says of `max_positions`, `block_positions` and `gmask_runs_on` holds, if it
            says it.

    Raises:
        UserError: a special token is missing; the models of an ensemble differ in their kind of positions.
    """

    reads_behind = True

    def __init__(self, special: Any, model_config: Any = None) -> None:
        for name, meaning in (("sop", "start of piece"), ("eop", "end of piece")):
            if getattr(special, name, None) is None:
                raise UserError(f"the tokenizer has no {meaning} token ({name}); it cannot fill blanks")
        self.sop: int = special.sop
        self.ends = end_ids(special)
        self.masks = mask_ids(special)
        if not self.masks:
            raise UserError("the tokenizer has no [MASK], [sMASK] or [gMASK] token; it cannot fill blanks")
        for name in ("block_positions", "gmask_runs_on"):
            check_alike(getattr(model_config, "members", ()), name)
        roles = {TEXT: "gmask", SENTENCE: "smask", WORD: "mask"}
        self._blanks = {expected: getattr(special, role, None) for expected, role in roles.items()}
        self._begins, self._ends_text = (
            [token for token in [getattr(special, role, None)] if token is not None] for role in ("cls", "eos")
        )
        self.max_positions: int | None = getattr(model_config, "max_positions", None)
        self.in_blocks: bool = getattr(model_config, "block_positions", True)
        self.runs_on: int | None = special.gmask if getattr(model_config, "gmask_runs_on", False) else None

    @property
    def num_rows(self) -> int | None:
        """Rows of the tables of positions in the text: the most tokens of a context; None: no limit."""
        return None if self.max_positions is None else self.max_positions + self.in_blocks

    def prompt(self, context: Sequence[int], order: Sequence[int] | None = None, reencode: bool = False) -> BlankPrompt:
        """All blanks of a context, from left to right if no order is given."""
        places = find_blanks(context, self.masks)
        chosen = tuple(range(len(places)) if order is None else order)
        return BlankPrompt(list(map(int, context)), chosen, dict(enumerate(places)), reencode=reencode)

    def check(self, request: Request) -> None:
        """Raises UserError if no blank is asked for or, with the numbers, a context does not fit the positions."""
        prompt, options = request.prompt, request.options
        num_blanks, length = len(prompt.places), len(prompt.context)
        if not prompt.order:
            raise UserError("the prompt asks for no blank; put a mask token where something is missing")
        if self.max_positions is None:
            return
        # What is read ahead takes the place that a further blank's start would.
        num_starts = num_blanks + strategy(options).target.lookahead
        check_positions(length, num_starts, options.max_len, self.max_positions, self.in_blocks)
        longest = self.longest_context(num_blanks, options.max_len if prompt.reencode else None)
        if prompt.reencode and longest is not None and length > longest:
            raise UserError(
                f"the prompt is {length} tokens long; with {num_blanks} answers of up to "
                f"{options.max_len} tokens written back the model has positions for {longest}; "
                "shorten it, or cut it with `truncate` left"
            )

    def longest_context(self, num_blanks: int, written_back: int | None = None) -> int | None:
        """Most tokens of a context with this number of blanks; None where there is no limit.

        Args:
            num_blanks: that are to be filled.
            written_back: greatest length of answers that take their blanks' places; None where none do.

        Raises:
            UserError: such answers take all positions by themselves.
        """
        num_rows = self.num_rows
        if num_rows is None:
            return None
        # Each blank but the last grows to an answer before the context is read for the last time.
        growth = (num_blanks - 1) * (written_back - 1) if written_back is not None and num_blanks else 0
        if growth and num_rows - growth < num_blanks:
            most = 1 + (num_rows - num_blanks) // (num_blanks - 1)
            lower = f"`max_len` can be at most {most}, or " if most >= 1 else ""
            raise UserError(
                f"{num_blanks} answers of up to {written_back} tokens, written back, do not fit the model's "
                f"{num_rows} positions; {lower}ask for fewer at once"
            )
        return num_rows - growth

    def room(self, request: Request) -> int | None:
        """Rows of the table of positions within a blank; a full answer is read whole only if another blank follows."""
        if self.num_rows is None:
            return None
        num_starts = len(request.prompt.places) + strategy(request.options).target.lookahead
        fits = len(request.prompt.context) <= self.num_rows
        return self.num_rows - (self.in_blocks * (1 + (num_starts > 1))) if fits else 0

    def slots(self, request: Request) -> int:
        """The context, with what was filled before, and an answer of the greatest length in each blank but the last."""
        prompt, max_len = request.prompt, request.options.max_len
        read = len(prompt.context) + sum(len(answer) + 1 for _, answer in prompt.filled)
        return read + (len(prompt.order) - 1) * (max_len - 1 if prompt.reencode else max_len + 1) + 1

    def work(self, request: Request) -> tuple[int, int]:
        """Blanks, then tokens of the context."""
        return len(request.prompt.order), len(request.prompt.context)

    def first(self, request: Request) -> Frame:
        """The context, the answers that are there already, and the start of the first blank's answer."""
        return self._whole(request.prompt)

    def next(self, request: Request, answers: Sequence[Answer]) -> Frame | None:
        """The answer that was just found, and the start of the next blank's; with `reencode` everything anew."""
        prompt, done = request.prompt, len(answers)
        if done == len(prompt.order):
            return None
        number = prompt.order[done]
        if prompt.reencode:
            for filled, answer in zip(prompt.order, answers, strict=False):
                prompt = prompt.answered(filled, answer.tokens)
            return self._whole(prompt)
        words = answers[-1].tokens
        place, following = prompt.places[prompt.order[done - 1]], prompt.places[number]
        read = len(prompt.context) + sum(len(answer) + 1 for _, answer in prompt.filled)
        read += sum(len(answer.tokens) + 1 for answer in answers)
        # Its start token was read before it.
        last = self._block(prompt.context, place, read - len(words) - 1, len(words) + 1)[:, 1:]
        positions = np.concatenate((last, self._block(prompt.context, following, read, 1)), axis=1)
        return self._frame([*words, self.sop], positions, number, prompt, restart=False)

    def branch(self, request: Request, continuation: Mapping[int, Sequence[int]]) -> Branch:
        """Answers by the numbers of their blanks, in the order in which they are read.

        An answer whose last token ends it is scored with that token; else its end is not asked.

        Raises:
            UserError: an answer holds an end token before its end, or the positions do not reach it or the context.
        """
        num_rows, length = self.num_rows, len(request.prompt.context)
        if num_rows is not None:
            check_length(length, num_rows)
        tokens: list[int] = []
        targets: list[int] = []
        blocks = [np.zeros((2, 0), np.int64)]
        context = request.prompt.context
        for number, answer in continuation.items():
            words = answer[:-1] if answer and answer[-1] in self.ends else answer
            if any(token in self.ends for token in words):
                raise UserError(f"an answer to blank {number + 1} holds an end token before its end; remove it")
            if num_rows is not None and self.in_blocks and len(words) + 1 >= num_rows:
                raise UserError(
                    f"an answer is {len(words)} tokens long, but the model has positions for {num_rows - 2}; shorten it"
                )
            tokens += [self.sop, *words]
            targets += answer if len(answer) > len(words) else [*answer, NOT_SCORED]
            blocks.append(self._block(context, request.prompt.places[number], length, len(words) + 1))
            length += len(words) + 1
        return Branch(tokens, {"position_ids": np.concatenate(blocks, axis=1)}, targets)

    def ask(
        self, before: Sequence[int], behind: Sequence[int] = (), expected: str = WORD, closed: bool | None = None
    ) -> BlankPrompt:
        """A text with one blank: [MASK] for a word, [sMASK] for a sentence, [gMASK] for a text, as far as there are
        such; between [CLS] and the end of text, which a text that ends in [gMASK] does not have unless `closed`."""
        blank = next(mask for mask in (self._blanks[expected], *self._blanks.values()) if mask is not None)
        if closed is None:
            closed = bool(behind) or blank != self._blanks[TEXT]
        context = [*self._begins, *before, blank, *behind, *(self._ends_text if closed else ())]
        place = len(self._begins) + len(before)
        return BlankPrompt(context, (0,), {0: place})

    def continuation(self, answer: Sequence[int]) -> dict[int, list[int]]:
        """The answer to the one blank."""
        return {0: [*answer]}

    def _whole(self, prompt: BlankPrompt) -> Frame:
        tokens = [*prompt.context]
        blocks = [np.stack((np.arange(len(tokens)), np.zeros(len(tokens), np.int64)))]
        number = prompt.order[0] if prompt.order else 0
        place = prompt.places[number] if prompt.order else 0
        for at, answer in (*prompt.filled, (place, ())):
            blocks.append(self._block(prompt.context, at, len(tokens), len(answer) + 1))
            tokens += [self.sop, *answer]
        return self._frame(tokens, np.concatenate(blocks, axis=1), number, prompt)

    def _frame(
        self, tokens: list[int], positions: np.ndarray, number: int, prompt: BlankPrompt, restart: bool = True
    ) -> Frame:
        context = prompt.context
        runs_on = number in prompt.places and context[prompt.places[number]] == self.runs_on
        stride = {"position_ids": np.array((int(runs_on), int(self.in_blocks)))}
        return Frame(tokens, {"position_ids": positions}, stride, len(context), restart, number, context)

    def _block(self, context: Sequence[int], place: int, read: int, length: int) -> np.ndarray:
        """Positions of a start token and what follows it: int64 [2, length], in the text and within the blank.

        Args:
            read: number of tokens before the start token.
        """
        steps = np.arange(length)
        within = steps + 1 if self.in_blocks else np.ones_like(steps)
        return np.stack((steps + read if context[place] == self.runs_on else np.full_like(steps, place), within))
