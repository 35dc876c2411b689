"""A language model beside the model that fills blanks: what it reads, and what its word counts (shallow fusion)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftk.errors import UserError
from ftk.generation.blanks import Chunk, check_positions, context_chunk, end_ids
from ftk.generation.decoder import CachedDecoder
from ftk.generation.search.base import Fusion
from ftk.generation.uncached_decoder import UncachedDecoder

if TYPE_CHECKING:
    from ftk.generation.in_flight import Prompt


class LanguageModel:
    """Reads text from left to right: what stands left of a blank, and the answer so far; never what is behind.

    A GLM does so when the text ends in its last blank, as in the document objective (Du et al. 2022, 2.2): it reads

        text left of the blank, answers in their places  [gMASK]  start token  answer so far

    with [MASK] where the vocabulary has no [gMASK]. The score of a token becomes log p + weight log p_lm (Gulcehre et
    al. 2015, 4.1; fairseq's --lm-path). Text that is longer than the language model's positions is cut at its left.

    Args:
        model: a `ftk.models.base.Backbone`, which is decoded with keys and values of its own; or any module that is
            called as `model(tokens, position_ids=..., context_length=...)`, whose whole input is read for each token.
        special: as for `BlankGenerator`.
        weight: of its log-probabilities; 0: it is asked, but changes nothing.
        ends: whether it has a say in where an answer ends, too. It does not know what stands behind the blank, and one
            that was trained on documents alone expects text to go on.

    Raises:
        UserError: a weight below 0, a vocabulary without blanks.
    """

    def __init__(self, model: nn.Module, special: Any, weight: float, *, ends: bool = True) -> None:
        if not 0.0 <= weight < math.inf:
            raise UserError(f"the language model's weight is {weight}; it must be 0 or more, and finite")
        masks = [one for one in (getattr(special, name, None) for name in ("gmask", "mask")) if one is not None]
        if not masks:
            raise UserError("the tokenizer has no [gMASK] or [MASK]; a language model continues text there")
        self.model = model
        self.fusion = Fusion(weight, ends)
        self.mask: int = masks[0]
        self.sop: int = special.sop
        self.ends = end_ids(special)
        self._cls: int | None = getattr(special, "cls", None)
        config = getattr(model, "config", None)
        self.in_blocks: bool = getattr(config, "block_positions", True)
        self.max_positions: int | None = getattr(config, "max_positions", None)
        self.vocab_size: int | None = getattr(config, "vocab_size", None)

    def check(self, vocab_size: int | None, max_len: int) -> None:
        """Refuses to go with a model of another vocabulary, or to write answers that its positions do not reach.

        Args:
            vocab_size: rows of the other model's output; None where it does not say.
            max_len: longest answer.

        Raises:
            UserError: with the numbers.
        """
        if None not in (vocab_size, self.vocab_size) and vocab_size != self.vocab_size:
            raise UserError(
                f"the language model has a vocabulary of {self.vocab_size} tokens, the model one of {vocab_size}; "
                "both must have been trained with the same tokenizer"
            )
        if self.max_positions is not None:
            try:
                check_positions(2, 1, max_len, self.max_positions, self.in_blocks)
            except UserError as error:
                raise UserError(f"language model: {error}") from None

    def chunk(self, prompt: Prompt) -> Chunk:
        """What it reads before the next blank of a prompt is answered."""
        context = [*self._left_of_blank(prompt), self.mask]
        return context_chunk(context, self.sop, len(context) - 1, in_blocks=self.in_blocks)

    def capacity(self, prompt: Prompt, max_len: int) -> int:
        """Most tokens that `chunk` will have, if no answer is longer than `max_len`."""
        answers = sum(len(answer) for _, answer in prompt.filled) + (len(prompt.blanks) - 1) * max_len
        longest = len(prompt.context) + answers
        return 1 + (longest if self._num_rows is None else min(longest, self._num_rows))

    def decoder(
        self,
        num_rows: int,
        width: int,
        prefix_capacity: int,
        branch_capacity: int,
        device: torch.device,
        packed: bool = False,
    ) -> CachedDecoder | UncachedDecoder:
        """A decoder of its own; arguments as for `CachedDecoder`."""
        if hasattr(self.model, "layers") and hasattr(self.model, "embed"):
            model: Any = self.model
            return CachedDecoder(
                model, num_rows, width, prefix_capacity, branch_capacity, device, self.in_blocks, packed=packed
            )
        return UncachedDecoder(self.model, num_rows, width, branch_capacity, device, self.in_blocks)

    @property
    def _num_rows(self) -> int | None:
        """Most tokens of a context."""
        return None if self.max_positions is None else self.max_positions + self.in_blocks

    def _left_of_blank(self, prompt: Prompt) -> list[int]:
        """The text before the blank that comes next, with the answers there are in their places."""
        number = len(prompt.answers)
        found = zip(prompt.blanks[:number], (answer.tokens for answer in prompt.answers), strict=True)
        answers = {**dict(prompt.filled), **dict(found)}
        tokens: list[int] = []
        for place, token in enumerate(prompt.context[: prompt.blanks[number]]):
            tokens.extend(answers.get(place, (token,)))
        return self._cut(tokens)

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """The end of a text, with [CLS] before it if it was there, so that there is room for the blank."""
        limit = len(tokens) if self._num_rows is None else self._num_rows - 1
        if len(tokens) <= limit:
            return list(tokens)
        first = [self._cls] if self._cls is not None and limit and tokens[0] == self._cls else []
        return [*first, *tokens[len(tokens) - limit + len(first) :]]
