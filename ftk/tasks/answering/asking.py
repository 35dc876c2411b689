"""How questions are put to a model, whatever its family: prompts, training samples, and how long they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ftk.errors import UserError
from ftk.tasks.answers import answer_sample

if TYPE_CHECKING:
    from ftk.generation.engine.request import Framing


class Asking:
    """How questions are put to a model.

    Args:
        expected: how long an answer is, one of `ftk.generation.engine.request.EXPECTED`.

    Attributes:
        is_apart: whether an answer is a text of its own, as an encoder-decoder writes it.
    """

    def __init__(self, framing: Framing, expected: str) -> None:
        self.framing, self.expected = framing, expected
        self._added: dict[tuple[bool, bool], tuple[int, int]] = {}
        self.is_apart = "decoder_tokens" in self._probe(False, True)

    def prompt(self, before: Sequence[int], behind: Sequence[int]) -> Any:
        """What the framing understands; arguments as of `Framing.ask`."""
        return self.framing.ask(before, behind, self.expected)

    def sample(self, before: Sequence[int], behind: Sequence[int], answer: Sequence[int]) -> dict[str, NDArray[Any]]:
        """A training sample, see `answer_sample`."""
        return answer_sample(self.framing, self.prompt(before, behind), answer)

    def added(self, has_behind: bool, is_whole: bool = True) -> tuple[int, int]:
        """How many tokens the framing adds: to a question, and to the row of a sample.

        The row is that of question and answer; of the answer alone where it `is_apart`.

        Args:
            has_behind: whether there is a text behind the place of the answer.
            is_whole: whether the answer has its end token, which is not counted as added.
        """
        key = has_behind, is_whole
        if key not in self._added:
            sample, asked = self._probe(*key), 1 + has_behind
            of_question = int(sample.get("context_length", len(sample["tokens"]))) - asked
            self._added[key] = of_question, len(sample["targets"]) - 1 - (0 if self.is_apart else asked)
        return self._added[key]

    def check_room(self, seq_length: int, target_length: int, whose: str = "") -> None:
        """Raises UserError if the model has no positions for a question and an answer of these lengths."""
        if (error := self._too_long(seq_length, target_length)) is not None:
            limit = getattr(self.framing, "max_positions", None) or 0
            fitting = limit // 4 * 3, limit // 4
            room = limit >= 4 and self._too_long(*fitting) is None
            way = f"; `seq_length` {fitting[0]} with `target_length` {fitting[1]} fits" if room else ""
            raise UserError(
                f"`seq_length` {seq_length} with `target_length` {target_length}{whose} is too long for the model: "
                f"{error}{way}"
            )

    def _too_long(self, seq_length: int, target_length: int) -> UserError | None:
        word = self._word()
        try:
            self.sample([word] * max(1, seq_length - self.added(False)[0]), (), [word] * target_length)
        except UserError as error:
            return error
        return None

    def _probe(self, has_behind: bool, is_whole: bool) -> dict[str, NDArray[Any]]:
        """A sample with one token on each side that there is, and an answer of one token."""
        word = self._word()
        return self.sample([word], [word] * has_behind, [self.framing.ends[0] if is_whole else word])

    def _word(self) -> int:
        """A token that ends no answer."""
        return next(token for token in itertools.count() if token not in self.framing.ends)
