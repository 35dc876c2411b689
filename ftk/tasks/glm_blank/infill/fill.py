"""Fills blanks in text: prompts with [MASK], [sMASK] or [gMASK] in, the same texts with their answers out."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, overload

from torch import nn

from ftk.errors import UserError
from ftk.generation.engine.scoring import Scored
from ftk.generation.processors.steering import PromptOptions, Steering, seed_of
from ftk.generation.results import TextAnswer, TextResult
from ftk.generation.search import Answer
from ftk.generation.text import TextGenerator, as_lists, check_lists, each_prompt, is_single
from ftk.generation.token_text import text_behind
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.infill.filled_text import FilledText
from ftk.tasks.glm_blank.infill.generator import BlankGenerator, check_longest_answer
from ftk.tasks.glm_blank.infill.joint import fillings_of
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from ftk.tasks.glm_blank.infill.questions import question_of
from ftk.tasks.glm_blank.infill.reader import BlankReader
from ftk.tasks.glm_blank.infill.results import EncodedPrompt
from ftk.tasks.glm_blank.infill.scoring import Given, encode_answers, given_answers, scored_answers
from ftk.tasks.glm_blank.infill.streaming import PromptStream
from ftk.tasks.glm_blank.infill.truncation import truncate

if TYPE_CHECKING:
    from ftk.generation.engine.request import Event, Request
    from ftk.tokenizers import Tokenizer

_CONTINUED = "has no blank and is continued at the end", "have no blank and are continued at the end"


class BlankFiller(TextGenerator[EncodedPrompt]):
    """A generator with its tokenizer: text in, text with its blanks filled out.

        filler = BlankFiller(tokenizer, BlankGenerator(model, tokenizer.special, beam=4))
        filler.fill("Ng is an adjunct professor at [MASK] .").answers[0].text

    Blanks are filled from left to right; a prompt without a blank is continued at its end. A prompt is
    refused if the tokenizer lacks one of its blanks or, unless `misspelt_blanks` is "text", one is misspelt ("[mask]").

    Args:
        generator: fills blanks in ids.
        steering: makes the generator's processors; needed for prompts, and calls, with options of their own.

    Raises:
        UserError: tokenizer and model do not fit each other.
    """

    example: ClassVar[str] = "the [MASK] fox"
    own_options: ClassVar[Sequence[str]] = ("blank_order",)
    framing: Any

    def __init__(self, tokenizer: Tokenizer, generator: BlankGenerator, steering: Steering | None = None) -> None:
        parts = generator.model, generator.framing, generator.config, steering, generator.language_model
        super().__init__(tokenizer, *parts)
        self.generator = generator
        self._reader = BlankReader(tokenizer)
        self.invitation = f"Write a text with {', '.join(self.gaps)} where something is missing, or one to go on"

    @classmethod
    def assembled(
        cls,
        tokenizer: Tokenizer,
        model: nn.Module,
        framing: object,
        config: FillConfig,
        steering: Steering,
        language_model: nn.Module | None = None,
    ) -> BlankFiller:
        """See `TextGenerator.assembled`; `BlankGenerator` makes a framing of its own, which reads alike."""
        reader = None
        if language_model is not None:
            reader = LanguageModel(language_model, tokenizer.special, config.lm_weight, ends=config.lm_ends)
        processors = steering.processors
        generator = BlankGenerator(model, tokenizer.special, config, processors=processors, language_model=reader)
        made = cls(tokenizer, generator, steering)
        if hasattr(framing, "of_row"):  # it knows rows, too
            made.framing = framing
        return made

    @classmethod
    def check_config(cls, config: FillConfig, model_config: Any) -> None:
        check_longest_answer(config, model_config)

    fill = TextGenerator.generate

    @overload
    def score(self, prompts: str, answers: Sequence[str], end: bool = True) -> list[TextAnswer]: ...  # type: ignore

    @overload
    def score(
        self, prompts: Sequence[str], answers: Sequence[Sequence[str]], end: bool = True
    ) -> list[list[TextAnswer]]: ...

    def score(self, prompts: Any, answers: Any, end: bool = True) -> list[Any]:
        """Scores given answers instead of finding some.

            filler.score("Ng is at [MASK] .", ["Stanford University"])[0].logprob

        Args:
            prompts: a text with blanks, or a list of such texts, as for `fill`.
            answers: one text per blank of the prompt, from left to right; of a list of prompts a list of such lists.
            end: whether the token that ends an answer is scored, too.

        Returns:
            one answer per blank, with the log-probability of each of its tokens, given the prompt and the answers
            before it; of a list of prompts a list of such lists.

        Raises:
            UserError: as for `fill`; numbers of prompts, blanks and answers that do not fit.
        """
        texts, own = as_lists(prompts, answers)
        check_lists("score(prompt, [answer])", texts, own)
        found = [candidates[0] for candidates in self.score_candidates(texts, [[each] for each in own], end)]
        return found[0] if is_single(prompts) else found

    @overload
    def score_candidates(  # type: ignore[overload-overlap]
        self, prompts: str, candidates: Sequence[Sequence[str]], end: bool = True
    ) -> list[list[TextAnswer]]: ...

    @overload
    def score_candidates(
        self, prompts: Sequence[str], candidates: Sequence[Sequence[Sequence[str]]], end: bool = True
    ) -> list[list[list[TextAnswer]]]: ...

    def score_candidates(self, prompts: Any, candidates: Any, end: bool = True) -> list[Any]:
        """As `score`, for any number of candidates for each prompt, which share one reading of it.

        Args:
            prompts, end: as for `score`.
            candidates: any number for the prompt, each one text per blank; of a list of prompts a list of such lists.

        Returns:
            per candidate one answer per blank; of a list of prompts a list of such lists.
        """
        texts, own = as_lists(prompts, candidates)
        check_lists("score_candidates(prompt, [[answer]])", texts, own)
        found = self.score_encoded(each_prompt(self.encode_candidates, texts, own, [end] * len(texts)))
        return found[0] if is_single(prompts) else found

    def encode(
        self, prompt: str, options: PromptOptions | None = None, seed: int | None = None, *, check: bool = True
    ) -> EncodedPrompt:
        """What the model reads for a prompt: [CLS], the text, and end of text unless a [gMASK] is at the end."""
        pieces, ids = self._reader.read(prompt, self.config.misspelt_blanks)
        written_back = self.config.max_len if self.config.reencode else None
        side, limit = self.config.truncate, self.framing.longest_context(len(pieces) - 1, written_back)
        if side != "error" and limit is not None:
            special = self.tokenizer.special
            ids = truncate(ids, self.framing.masks, limit, side, (special.cls, special.eos))
        options, processors = dict(options or {}), None
        order = options.pop("blank_order", None)
        if options and self.steering is None:
            raise UserError("prompts have options of their own, but the filler was made without steering")
        if options and self.steering is not None:
            own_seed, processors = seed_of(options), self.steering.of(options, len(pieces) - 1)
            seed = seed if own_seed is None else own_seed
        request = self.generator.request(ids, seed, processors, order)
        if check:
            self.framing.check(request)
        remark = _CONTINUED if len(self._reader.pieces(prompt)) == 1 else None
        return EncodedPrompt(prompt, request, remark=remark, pieces=pieces)

    def encode_candidates(self, prompt: str, candidates: Sequence[Sequence[str]], end: bool = True) -> EncodedPrompt:
        """A prompt with answers that are to be scored; arguments as for `score_candidates`, of one prompt."""
        encoded = self.encode(prompt, check=False)
        ids = [encode_answers(self.tokenizer, encoded.pieces, answers) for answers in candidates]
        given = [given_answers(self.framing, encoded.request, answers, end=end) for answers in ids]
        return replace(encoded, candidates=given)

    most_answers = 16

    @property
    def gaps(self) -> Sequence[str]:
        return tuple(self._reader.blanks)

    def num_answers(self, prompt: EncodedPrompt) -> int:
        return len(prompt.blanks)

    def between(self, before: str, behind: str) -> str:
        return f"{before.rstrip()} [MASK] {behind.lstrip()}"

    def check_serving(self) -> None:
        super().check_serving()
        if self.config.blank_order == "confident" or self.config.nbest_over == "text":
            raise UserError(
                "`blank_order` confident and `nbest_over` text ask the model in rounds, which a service does not; "
                "leave them out"
            )

    def encode_sample(self, sample: Mapping[str, Any]) -> EncodedPrompt:
        """A training sample, or one of `AskedQuestions`, as a prompt: what stood in its blanks is its `references`, and
        its one candidate.

        Raises:
            UserError: the task numbers the blanks of its samples.
        """
        question = question_of(sample, self.tokenizer.special)
        request = self.generator.request(question.context)
        targets = question.training_targets(self.framing.ends[0])
        text, pieces = self.source_text(question.context), self._pieces(question.context)
        if "shown" in sample and not sample["was_cut"]:  # some tokenizers lose spaces behind a blank
            text, pieces = sample["shown"], self._reader.pieces(sample["shown"])
        return EncodedPrompt(
            text,
            request,
            candidates=[given_answers(self.framing, request, targets, question.order, end=False)],
            references=[self.tokenizer.decode(reference).strip() for reference in question.references],
            pieces=pieces,
        )

    def events(self, requests: Sequence[Request], *, stream: bool = False) -> Generator[Event, None, None]:
        """See `BlankGenerator.events`."""
        return self.generator.events(requests, stream=stream)

    def text_stream(self, number: int, prompt: EncodedPrompt) -> PromptStream:
        return PromptStream(self, number, prompt)

    def result(self, prompt: EncodedPrompt, answers: Sequence[Answer]) -> TextResult:
        """A prompt with its answers, from left to right."""
        if self.config.nbest_over == "blank":
            return self._result(prompt, answers)
        fillings = fillings_of(answers, self.config.length_penalty)
        best, *others = (replace(self._result(prompt, filling.answers), score=filling.score) for filling in fillings)
        return replace(best, others=tuple(others))

    def scored(self, prompt: EncodedPrompt, candidate: Given, found: Scored) -> list[TextAnswer]:
        answers = scored_answers(self.framing, candidate, found, self.config.length_penalty)
        return self._all_described(prompt, answers)

    def described(self, prompt: EncodedPrompt, blank: int, answer: Answer) -> TextAnswer:
        """An answer in words; `blank` is the id of its mask token."""
        of_texts = self.config.nbest_over == "text"  # `others` are parts of other fillings of the text
        return TextAnswer(
            prompt.request.processors.cut(self.tokenizer.decode(answer.tokens)).strip(),
            answer.tokens,
            answer.token_logprobs,
            answer.score,
            () if of_texts else tuple(self.described(prompt, blank, other) for other in answer.others),
            answer.alternatives,
            answer.lm_logprobs,
            {"blank": self.tokenizer.token_text(blank)},
        )

    def source_text(self, context: Sequence[int]) -> str:
        """A context as one would write it: blanks by name, no [CLS] in front, no end of text behind."""
        return self.tokenizer.decode(self._unframed(context))

    def _unframed(self, context: Sequence[int]) -> list[int]:
        ids, special = list(context), self.tokenizer.special
        if ids and ids[0] == special.cls:
            ids = ids[1:]
        if ids and ids[-1] == special.eos:
            ids = ids[:-1]
        return ids

    def _pieces(self, context: Sequence[int]) -> list[str]:
        """The text before, between and behind the blanks of a context, as `source_text` has it."""
        ids, start, pieces = self._unframed(context), 0, []
        word: list[int] = []  # in place of a blank, behind which some tokenizers lose spaces
        for end in (*(place for place, token in enumerate(ids) if token in self.framing.masks), len(ids)):
            pieces.append(text_behind(self.tokenizer.decode, word, ids[start:end]))
            start, word = end + 1, word or self.tokenizer.encode("a")
        return pieces

    def _result(self, prompt: EncodedPrompt, answers: Sequence[Answer]) -> TextResult:
        described = self._all_described(prompt, answers)
        filled = FilledText(self.tokenizer, self.framing.masks, prompt)
        for answer in answers:
            filled.fill(answer.tokens)
        return TextResult(prompt.prompt, filled.text, described, tuple(filled.spans))

    def _all_described(self, prompt: EncodedPrompt, answers: Sequence[Answer]) -> list[TextAnswer]:
        return [self.described(prompt, *pair) for pair in zip(prompt.blanks, answers, strict=True)]
