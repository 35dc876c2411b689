"""Texts that an encoder-decoder writes for other texts: translations, summaries, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ftk.generation.continuation import TextContinuer
from ftk.generation.engine.request import Request
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.generation.results import EncodedText


class TextToText(TextContinuer):
    """An encoder-decoder with its tokenizer: for each text, the source, one answer is written, the target.

        generator.generate("translate English to German: The house is wonderful.").text

    The text of a result is that of the answer. Special tokens may be written in a prompt by their names, such as
    `<extra_id_0>` of T5 and `<mask>` of BART. See `TextGenerator` for the arguments.
    """

    example: ClassVar[str] = "The house is wonderful."
    reads_ids: ClassVar[bool] = False
    invitation = "Write the source text"

    framing: SourceToTarget

    def encode_sample(self, sample: Mapping[str, Any]) -> EncodedText:
        """A sample of an encoder-decoder's task: the target is the reference.

        Raises:
            UserError: the model has no positions for it.
        """
        source = sample["tokens"].tolist()[: int(sample["lengths"])]
        target = [
            token for token, learned in zip(sample["targets"].tolist(), sample["loss_mask"], strict=True) if learned
        ]
        begins = len(self.framing.starts) - 1  # they are learned, and given here
        request = Request(source, self.config, self.steering.processors, self.config.seed)
        self.framing.check(request)
        reference = [token for token in target[begins:] if token not in self.framing.ends]
        before, behind = self.framing.around
        text = source[len(before) : len(source) - len(behind)]
        return EncodedText(
            self.tokenizer.of_source.decode(text),
            request,
            candidates=[target[begins:]],
            references=[self.tokenizer.decode(reference).strip()],
        )

    def shown(self, prompt: EncodedText) -> str:
        """Nothing."""
        return ""

    def ids_before_answers(self, prompt: EncodedText) -> Sequence[int]:
        return ()

    def _stripped(self, text: str) -> str:
        return text.strip()

    def _prompt_ids(self, text: str) -> list[int]:
        return self.framing.source(self.tokenizer.of_source.encode(text, command_tokens=True))

    def _tokens_behind(self, ids: Sequence[int], prompt: str, text: str) -> list[int]:
        return self.tokenizer.encode(text, command_tokens=True)
