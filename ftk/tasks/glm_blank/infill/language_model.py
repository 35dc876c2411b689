"""A language model next to the model that fills blanks: what it reads, and its weight (shallow fusion)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from ftk.errors import UserError
from ftk.generation.engine.request import Frame, Request
from ftk.generation.search.answer import Answer
from ftk.generation.search.base import Fusion
from ftk.tasks.glm_blank.infill.blanks import check_positions
from ftk.tasks.glm_blank.infill.framing import BlankFraming, BlankPrompt


class LanguageModel:
    """Reads text from left to right: what stands left of a blank, and the answer so far; never what is behind.

    A GLM does so when the text ends in its last blank, as in the document objective (Du et al. 2022, 2.2): it reads

        text left of the blank, answers in their places  [gMASK]  start token  answer so far

    with [MASK] where the vocabulary has no [gMASK]. The score of a token becomes log p + weight log p_lm (Gulcehre et
    al. 2015, 4.1; fairseq's --lm-path). Text that is longer than the language model's positions is cut at its left.

    Args:
        model: decoded with keys and values of its own.
        special: as for `BlankGenerator`.
        weight: of its log-probabilities; 0: they are computed, but change nothing.
        ends: whether it scores end tokens, too. It does not know what stands behind the blank, and one
            that was trained on documents alone expects text to go on.

    Raises:
        UserError: a weight below 0, a vocabulary without blanks.
    """

    def __init__(self, model: nn.Module, special: Any, weight: float, *, ends: bool = True) -> None:
        if not 0.0 <= weight < math.inf:
            raise UserError(f"the language model's weight is {weight}; it must be 0 or more, and finite")
        masks = [mask for mask in (getattr(special, name, None) for name in ("gmask", "mask")) if mask is not None]
        if not masks:
            raise UserError("the tokenizer has no [gMASK] or [MASK]; a language model continues text there")
        self.model = model
        self.fusion = Fusion(weight, ends)
        self.mask: int = masks[0]
        self._cls: int | None = getattr(special, "cls", None)
        config = getattr(model, "config", None)
        self._blanks = BlankFraming(special, config)
        self.vocab_size: int | None = getattr(config, "vocab_size", None)

    def check(self, vocab_size: int | None, max_len: int) -> None:
        """Refuses to go with a model of another vocabulary, or to write answers that its positions do not reach.

        Args:
            vocab_size: rows of the other model's output; None where it does not say.

        Raises:
            UserError: with the numbers.
        """
        if None not in (vocab_size, self.vocab_size) and vocab_size != self.vocab_size:
            raise UserError(
                f"the language model has a vocabulary of {self.vocab_size} tokens, the model one of {vocab_size}; "
                "both must have been trained with the same tokenizer"
            )
        blanks = self._blanks
        if blanks.max_positions is not None:
            try:
                check_positions(2, 1, max_len, blanks.max_positions, blanks.in_blocks)
            except UserError as error:
                raise UserError(f"language model: {error}") from None

    def slots(self, request: Request) -> int:
        """Most tokens that it will have read before an answer."""
        prompt = request.prompt
        answers = sum(len(answer) for _, answer in prompt.filled) + (len(prompt.order) - 1) * request.options.max_len
        longest, num_rows = len(prompt.context) + answers, self._blanks.num_rows
        return 1 + (longest if num_rows is None else min(longest, num_rows))

    def next(self, request: Request, answers: Sequence[Answer]) -> Frame:
        """What it reads before the next blank of a prompt is answered: the text left of it, from the beginning, since
        with each answer that is another one."""
        prompt: BlankPrompt = request.prompt
        for number, answer in zip(prompt.order, answers, strict=False):
            prompt = prompt.answered(number, answer.tokens)
        place = prompt.places[prompt.order[0]]
        filled = dict(prompt.filled)
        tokens: list[int] = []
        for at, token in enumerate(prompt.context[:place]):
            tokens.extend(filled.get(at, (token,)))
        context = [*self._cut(tokens), self.mask]
        asked = BlankPrompt(context, (0,), {0: len(context) - 1})
        return self._blanks.first(Request(asked))

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """The end of a text, with [CLS] before it if it was there, so that there is room for the blank."""
        num_rows = self._blanks.num_rows
        limit = len(tokens) if num_rows is None else num_rows - 1
        if len(tokens) <= limit:
            return list(tokens)
        first = [self._cls] if self._cls is not None and limit and tokens[0] == self._cls else []
        return [*first, *tokens[len(tokens) - limit + len(first) :]]
