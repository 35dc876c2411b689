"""Fills blanks in text: prompts with [MASK], [sMASK] or [gMASK] in, the same texts with their answers out."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from ftk.errors import UserError
from ftk.generation.processors.steering import PromptOptions, Steering, seed_of
from ftk.generation.search import Answer
from ftk.generation.text import check_list, check_lists, check_text, check_vocabulary
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.infill.filled_text import FilledText
from ftk.tasks.glm_blank.infill.generator import BlankGenerator, check_longest_answer, longest_first, whole_answers
from ftk.tasks.glm_blank.infill.given_answers import encode_answers
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from ftk.tasks.glm_blank.infill.misspelt_blanks import refuse_misspelt_blanks
from ftk.tasks.glm_blank.infill.questions import question_of
from ftk.tasks.glm_blank.infill.results import EncodedPrompt, FilledBlank, FillResult
from ftk.tasks.glm_blank.infill.scoring import check_answers, score_ids
from ftk.tasks.glm_blank.infill.streaming import Piece, PromptStream
from ftk.tasks.glm_blank.infill.truncation import truncate

if TYPE_CHECKING:
    from ftk.generation.processors.base import Processors
    from ftk.tasks.glm_blank.infill.generator import NewTokens
    from ftk.tokenizers import Tokenizer

_BLANKS = {"[MASK]": "mask", "[sMASK]": "smask", "[gMASK]": "gmask"}


class BlankFiller:
    """A generator with its tokenizer: text in, text with its blanks filled out.

        filler = BlankFiller(tokenizer, BlankGenerator(model, tokenizer.special, beam=4))

    Args:
        tokenizer: the one that the model was trained with.
        generator: fills blanks in ids.
        steering: makes the generator's processors; needed for prompts with options of their own.

    Raises:
        UserError: tokenizer and model do not fit each other.
    """

    config_class: ClassVar[type[FillConfig]] = FillConfig
    example: ClassVar[str] = "the [MASK] fox"

    def __init__(self, tokenizer: Tokenizer, generator: BlankGenerator, steering: Steering | None = None) -> None:
        self.tokenizer = tokenizer
        self.generator = generator
        self.steering = steering
        check_vocabulary(tokenizer, generator.model)
        special = tokenizer.special
        ids = {text: getattr(special, name) for text, name in _BLANKS.items()}
        self.blanks: dict[str, int] = {text: one for text, one in ids.items() if one is not None}
        self._missing = [text for text, one in ids.items() if one is None]
        # What is put at the end of a prompt without a blank.
        self._last_blank = self.blanks.get("[gMASK]", next(iter(self.blanks.values())))
        own_names = [tokenizer.token_text(one) for one in self.blanks.values()]
        self._names = {*self.blanks, *(token.text for token in tokenizer.command_tokens)}
        self._blank_pattern = re.compile("|".join(map(re.escape, {*self.blanks, *own_names})))

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
        """One of loaded parts, see `TextGenerator.assembled`; the generator makes its own framing."""
        beside = None
        if language_model is not None:
            beside = LanguageModel(language_model, tokenizer.special, config.lm_weight, ends=config.lm_ends)
        processors = steering.processors
        generator = BlankGenerator(model, tokenizer.special, config, processors=processors, language_model=beside)
        return cls(tokenizer, generator, steering)

    @classmethod
    def check_config(cls, config: FillConfig, model_config: Any) -> None:
        """See `TextGenerator.check_config`."""
        check_longest_answer(config, model_config)

    @property
    def invitation(self) -> str:
        """What ftk-interactive asks for."""
        return f"Write a text with {', '.join(self.blanks)} where something is missing, or one to go on"

    def generate(self, prompts: Sequence[str], seeds: Sequence[int] | None = None, **options: Any) -> list[FillResult]:
        """`fill`, under the name that it has for every task."""
        return self.fill(prompts, seeds, **options)

    def fill(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        on_piece: Callable[[Piece], object] | None = None,
        options: Sequence[PromptOptions | None] | None = None,
    ) -> list[FillResult]:
        """Fills the blanks of each prompt from left to right.

            filler.fill(["Ng is an adjunct professor at [MASK] ."])[0].answers[0].text

        Args:
            prompts: texts; one without a blank is continued at its end.
            seeds, progress: as for `BlankGenerator.fill_ids`.
            on_piece: called with each piece of an answer as it comes, see `stream`; what it raises ends the work.
            options: for each prompt its own, which take the place of those of the same name; see
                `ftk.generation.processors.steering.PROMPT_OPTIONS`.

        Raises:
            UserError: a prompt is empty or too long, or has a blank that the tokenizer lacks or, unless
                `misspelt_blanks` is "text", one that is misspelt ("[mask]"); its options are not allowed.
        """
        check_list("fill", prompts)
        return self.generate_encoded(self._encoded(prompts, options), progress, on_piece, seeds)

    def stream(
        self,
        prompts: str | Sequence[str],
        seeds: Sequence[int] | None = None,
        options: Sequence[PromptOptions | None] | None = None,
    ) -> Generator[Piece, None, None]:
        """As `fill`, but gives each piece of an answer as soon as it is there.

            for piece in filler.stream("Ng is an adjunct professor at [MASK] ."):
                print(piece.filled, end="", flush=True)

        The work is done between one piece and the next, in the thread of the caller; closing the iterator, or
        dropping it, ends it. Where hypotheses compete (beams, several samples) a blank has one piece: its answer. With
        `nbest_over` "text" these come when all are known, and `others` only by `fill`.

        Args:
            prompts: a text, or several, which are answered together: their pieces come in turn.
            seeds, options: as for `fill`.

        Raises:
            UserError: as `fill`, at once.
        """
        encoded = self._encoded([prompts] if isinstance(prompts, str) else prompts, options)
        return self.stream_encoded(encoded, seeds)

    def _encoded(
        self, prompts: Sequence[str], options: Sequence[PromptOptions | None] | None = None
    ) -> list[EncodedPrompt]:
        options = [None] * len(prompts) if options is None else options
        if len(options) != len(prompts):
            raise UserError(f"options for {len(options)} prompts, but there are {len(prompts)}; None stands for none")
        encoded = []
        for number, (prompt, own) in enumerate(zip(prompts, options, strict=True), start=1):
            try:
                encoded.append(self.encode(prompt, options=own))
            except UserError as error:
                raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        return encoded

    def encode(self, prompt: str, options: PromptOptions | None = None, *, check: bool = True) -> EncodedPrompt:
        """What the model reads for a prompt: [CLS], the text, and end of text unless a [gMASK] is at the end.

        Args:
            prompt: a text.
            options: of this prompt alone.
            check: whether answers of the longest length must fit the model's positions.

        Raises:
            UserError: as for `fill`.
        """
        check_text(prompt)
        text = prompt.strip()
        if not text:
            raise UserError("the prompt is empty; write a text, with [MASK] where something is missing")
        for blank in self._missing:
            if blank in text:
                raise UserError(f"this tokenizer has no {blank}; it has {', '.join(self.blanks)}")
        if self.generator.config.misspelt_blanks == "refuse":
            refuse_misspelt_blanks(prompt, self._names, list(self.blanks))
        pieces = self._blank_pattern.split(text)
        # "[MASK]" is understood everywhere, also where the tokenizer's own name for it is another.
        for blank, token in self.blanks.items():
            text = text.replace(blank, self.tokenizer.token_text(token))
        ids = self.tokenizer.encode(text, command_tokens=True)
        special = self.tokenizer.special
        continued = len(pieces) == 1
        if continued:
            ids, pieces = [*ids, self._last_blank], [*pieces, ""]
        if sum(token in self.generator.framing.masks for token in ids) != len(pieces) - 1:
            raise UserError("the prompt holds a command token that counts as a blank here; remove it")
        if special.cls is not None and ids[0] != special.cls:
            ids = [special.cls, *ids]
        if special.eos is not None and ids[-1] not in (special.gmask, special.eos):
            ids = [*ids, special.eos]
        side, limit = self.generator.config.truncate, self.generator.longest_context(len(pieces) - 1)
        if side != "error" and limit is not None:
            ids = truncate(ids, self.generator.framing.masks, limit, side, (special.cls, special.eos))
        if check:
            self.generator.check(ids)
        if not options:
            return EncodedPrompt(prompt, pieces, ids, continued=continued)
        if self.steering is None:
            raise UserError("prompts have options of their own, but the filler was made without steering")
        processors = self.steering.of(options, len(pieces) - 1)
        return EncodedPrompt(prompt, pieces, ids, seed_of(options), processors, continued)

    def generate_encoded(
        self,
        prompts: Sequence[EncodedPrompt],
        progress: Callable[[int], object] | None = None,
        on_piece: Callable[[Piece], object] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[FillResult]:
        """As `fill`, for prompts that `encode` or `encode_sample` has made."""
        generator = self.generator
        if generator.config.nbest_over == "text":
            return self._fill_texts(prompts, seeds, progress, on_piece)
        if on_piece is not None:
            results: dict[int, FillResult] = {}
            with closing(self.stream_encoded(prompts, seeds, progress)) as pieces:
                for piece in pieces:
                    on_piece(piece)
                    if piece.result is not None:
                        results[piece.prompt] = piece.result
            return [results[number] for number in range(len(prompts))]
        contexts, own = [prompt.context for prompt in prompts], [prompt.processors for prompt in prompts]
        if generator.config.blank_order == "confident":
            answers = generator.fill_ids(contexts, self._seeds(prompts, seeds), progress, own)
            return [self.result(prompt, found) for prompt, found in zip(prompts, answers, strict=True)]
        # The engine is asked from here, as directly as it goes: most prompts come this way.
        requests = generator.requests(contexts, self._seeds(prompts, seeds), own)
        order = longest_first(requests)
        asked, by_blank = [requests[index] for index in order], [dict[int, Answer]() for _ in prompts]
        if asked:
            with evaluation_mode(*generator.models()):
                found = generator.engine(asked).answers(asked, progress or (lambda count: None))
            for index, own_answers in zip(order, found, strict=True):
                by_blank[index] = dict(zip(requests[index].prompt.order, own_answers, strict=True))
        return [
            self.result(prompt, [found[blank] for blank in sorted(found)])
            for prompt, found in zip(prompts, by_blank, strict=True)
        ]

    def _fill_texts(
        self,
        prompts: Sequence[EncodedPrompt],
        seeds: Sequence[int] | None,
        progress: Callable[[int], object] | None,
        on_piece: Callable[[Piece], object] | None,
    ) -> list[FillResult]:
        """As `generate_encoded`, the n best of each text as a whole."""
        contexts, own = [prompt.context for prompt in prompts], [prompt.processors for prompt in prompts]
        found = self.generator.fill_texts(contexts, self._seeds(prompts, seeds), progress, own)
        if on_piece is not None:
            parts = (part for number, one in enumerate(found) for part in whole_answers(number, one[0].answers))
            for piece in self._pieces([PromptStream(self, prompt) for prompt in prompts], parts):
                on_piece(piece)
        results = []
        for prompt, fillings in zip(prompts, found, strict=True):
            best, *others = (replace(self.result(prompt, one.answers), score=one.score) for one in fillings)
            results.append(replace(best, others=tuple(others)))
        return results

    def stream_encoded(
        self,
        prompts: Sequence[EncodedPrompt],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Generator[Piece, None, None]:
        """As `stream`, for prompts that `encode` has made."""
        contexts, own = [prompt.context for prompt in prompts], [prompt.processors for prompt in prompts]
        parts = self.generator.stream_ids(contexts, self._seeds(prompts, seeds), progress, own)
        return self._pieces([PromptStream(self, prompt) for prompt in prompts], parts)

    def _seeds(self, prompts: Sequence[EncodedPrompt], seeds: Sequence[int] | None) -> Sequence[int] | None:
        """The seed of each prompt; its own goes first."""
        if all(prompt.seed is None for prompt in prompts) or (seeds is not None and len(seeds) != len(prompts)):
            return seeds
        usual = [self.generator.config.seed] * len(prompts) if seeds is None else seeds
        return [seed if prompt.seed is None else prompt.seed for prompt, seed in zip(prompts, usual, strict=True)]

    def processors_of(self, prompt: EncodedPrompt) -> Processors:
        """What changes the scores of a prompt's answers, and says what counts of them."""
        return self.generator.processors if prompt.processors is None else prompt.processors

    def _pieces(
        self, streams: Sequence[PromptStream], parts: Generator[NewTokens, None, object]
    ) -> Generator[Piece, None, None]:
        with closing(parts):
            for part in parts:
                piece = streams[part.prompt].add(part)
                if piece is not None:
                    yield piece

    def score(
        self, prompts: Sequence[str], answers: Sequence[Sequence[str]], end: bool = True
    ) -> list[list[FilledBlank]]:
        """Scores given answers instead of finding some.

            filler.score(["Ng is at [MASK] ."], [["Stanford University"]])[0][0].logprob

        Args:
            prompts: texts with blanks, as for `fill`.
            answers: for each prompt one text a blank, from left to right.
            end: whether the token that ends an answer is scored, too.

        Returns:
            per prompt one answer a blank, with the log-probability of each of its tokens, given the prompt and the
            answers before it.

        Raises:
            UserError: as for `fill`; numbers of prompts, blanks and answers that do not fit.
        """
        check_lists("score([prompt], [[answer]])", prompts, answers)
        return [found[0] for found in self.score_candidates(prompts, [[own] for own in answers], end)]

    def score_candidates(
        self, prompts: Sequence[str], candidates: Sequence[Sequence[Sequence[str]]], end: bool = True
    ) -> list[list[list[FilledBlank]]]:
        """As `score`, for any number of candidates for each prompt, which share one reading of it.

        Args:
            prompts, end: as for `score`.
            candidates: for each prompt any number of candidates, each one text a blank.

        Returns:
            per prompt and candidate, in the order given, one answer a blank.
        """
        check_lists("score_candidates([prompt], [[[answer]]])", prompts, candidates)
        encoded = []
        for number, (prompt, own) in enumerate(zip(prompts, candidates, strict=True), start=1):
            try:
                encoded.append(self.encode_candidates(prompt, own, end))
            except UserError as error:
                raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        return self.score_encoded(encoded)

    def score_encoded(
        self, prompts: Sequence[EncodedPrompt], progress: Callable[[int], object] | None = None
    ) -> list[list[list[FilledBlank]]]:
        """As `score_candidates`, for what `encode_candidates` or `encode_sample` has made."""
        contexts, orders = [prompt.context for prompt in prompts], [prompt.order for prompt in prompts]
        candidates = [prompt.candidates for prompt in prompts]
        scored = score_ids(self.generator, contexts, candidates, orders, end=False, progress=progress)
        return [
            [self.describe(prompt.context, answers) for answers in found]
            for prompt, found in zip(prompts, scored, strict=True)
        ]

    def encode_candidates(self, prompt: str, candidates: Sequence[Sequence[str]], end: bool = True) -> EncodedPrompt:
        """A prompt with answers that are to be scored; arguments as for `score_candidates`, of one prompt."""
        encoded, ends = self.encode(prompt, check=False), self.generator.framing.ends
        given = [encode_answers(self.tokenizer, encoded, answers) for answers in candidates]
        if end:
            given = [[one if one and one[-1] in ends else [*one, ends[0]] for one in answers] for answers in given]
        check_answers(self.generator, encoded.context, given, end=False)
        return replace(encoded, candidates=given)

    def encode_sample(self, sample: Mapping[str, Any]) -> EncodedPrompt:
        """A training sample as a prompt: what stood in its blanks is its `references`, and its one candidate.

        Raises:
            UserError: the task numbers the blanks of its samples.
        """
        question = question_of(sample, self.tokenizer.special)
        return EncodedPrompt(
            self.source_text(question.context),
            [],
            question.context,
            order=question.order,
            candidates=[question.training_targets(self.generator.framing.ends[0])],
            references=[self.tokenizer.decode(reference).strip() for reference in question.references],
        )

    def describe(
        self, context: Sequence[int], answers: Sequence[Answer], processors: Processors | None = None
    ) -> list[FilledBlank]:
        """Answers in words, each with the blank that it fills; `processors` if they are not the generator's."""
        blanks = [token for token in context if token in self.generator.framing.masks]
        processors = self.generator.processors if processors is None else processors
        return [self._described(blank, answer, processors) for blank, answer in zip(blanks, answers, strict=True)]

    def describe_blank(self, prompt: EncodedPrompt, number: int, answer: Answer) -> FilledBlank:
        """As `describe`, for the blank of this number alone, counted from 0."""
        blanks = [token for token in prompt.context if token in self.generator.framing.masks]
        return self._described(blanks[number], answer, self.processors_of(prompt))

    def _described(self, blank: int, answer: Answer, processors: Processors) -> FilledBlank:
        return FilledBlank(
            self.tokenizer.token_text(blank),
            processors.cut(self.tokenizer.decode(answer.tokens)).strip(),
            answer.tokens,
            answer.token_logprobs,
            answer.score,
            tuple(self._described(blank, other, processors) for other in answer.others),
            answer.alternatives,
            answer.lm_logprobs,
        )

    def source_text(self, context: Sequence[int]) -> str:
        """A context as one would write it: blanks by name, no [CLS] in front, no end of text behind."""
        ids, special = list(context), self.tokenizer.special
        if ids and ids[0] == special.cls:
            ids = ids[1:]
        if ids and ids[-1] == special.eos:
            ids = ids[:-1]
        return self.tokenizer.decode(ids)

    def filled_text(self, prompt: EncodedPrompt) -> FilledText:
        """A prompt's text, none of its blanks filled yet."""
        return FilledText(self.tokenizer, self.generator.framing.masks, prompt, self.processors_of(prompt).cut)

    def result(self, prompt: EncodedPrompt, answers: Sequence[Answer]) -> FillResult:
        """A prompt with its answers, from left to right; of a sample, which has no `pieces`, without a text."""
        if not prompt.pieces:
            return FillResult(prompt.prompt, "", self.describe(prompt.context, answers))
        filled = self.filled_text(prompt)
        for answer in answers:
            filled.fill(answer.tokens)
        described = self.describe(prompt.context, answers, prompt.processors)
        return FillResult(prompt.prompt, filled.text, described, tuple(filled.spans))
