"""Text that a model continues: prompts in words in, the same texts with their continuations out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import PromptReader
from ftk.generation.engine.engine import Engine, engine_for
from ftk.generation.engine.request import Framing, Request
from ftk.generation.engine.scoring import Scored, score
from ftk.generation.processors.steering import PromptOptions, Steering, seed_of
from ftk.generation.search import Answer
from ftk.generation.search.base import Fusion
from ftk.generation.streaming import text_changed, whole_characters
from ftk.modules.evaluation_mode import evaluation_mode

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer

_CONTEXT_FOR_SPACING = 8  # tokens of a prompt that decide whether its continuation begins with a space


@dataclass(frozen=True)
class TextAnswer:
    """One continuation.

    Attributes:
        text: what it adds to the prompt, a space in front included.
        tokens: its ids without the end token.
        token_logprobs: natural logarithms of their probabilities; the end token's stands last if it came.
        score: as `ftk.generation.Answer.score`.
        others: further continuations of the same prompt, best first.
        alternatives, lm_logprobs: as of `ftk.generation.Answer`.
        named: what tells the answer from others to the same prompt, in records; a continuation is the only one.
    """

    text: str
    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    score: float
    others: tuple[TextAnswer, ...] = ()
    alternatives: Sequence[Any] = ()
    lm_logprobs: Sequence[float] = ()
    named: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @property
    def probability(self) -> float:
        """Probability of the whole continuation."""
        return math.exp(self.logprob)

    @property
    def logprob(self) -> float:
        """Natural logarithm of `probability`."""
        return sum(self.token_logprobs)


@dataclass(frozen=True)
class TextResult:
    """A prompt, the text with its best continuation, that continuation as the one answer, and where it stands.

    `score` and `others` are for results that hold several ways to answer a prompt as a whole; here there are none.
    """

    prompt: str
    text: str
    answers: Sequence[TextAnswer]
    score: float | None = None
    others: tuple[TextResult, ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the answers stand in the text."""
        return ((len(self.prompt), len(self.text)),)


@dataclass(frozen=True)
class TextPiece:
    """New text of a continuation, with the tokens that it consists of; answer and result with the last one.

    Attributes:
        prompt: number of the prompt, from 0 on.
        text: what the continuation goes on with.
        tokens, token_logprobs: of the new text; the end token's log-probability comes with the last piece.
        filled: what the whole text goes on with: the first piece holds the prompt, too.
        result: the complete result.
    """

    prompt: int
    text: str
    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    filled: str
    result: TextResult | None = None
    number: ClassVar[int] = 0
    """Of the answer."""

    @property
    def answer(self) -> TextAnswer | None:
        """The complete answer, with the last piece."""
        return None if self.result is None else self.result.answers[0]

    @property
    def filled_spans(self) -> tuple[tuple[int, int, int], ...]:
        """Where parts of answers stand in `filled`, with the number of each answer."""
        return ((len(self.filled) - len(self.text), len(self.filled), self.number),) if self.text else ()


@dataclass(frozen=True)
class EncodedText:
    """A prompt as the model reads it.

    Attributes:
        prompt: as given.
        request: what the engine is asked.
        candidates: ids of continuations that are to be scored.
        references, remark: what is known of the right answers, and what may be wrong with the prompt: nothing.
    """

    prompt: str
    request: Request
    candidates: tuple[list[int], ...] = ()
    references: ClassVar[None] = None
    remark: ClassVar[None] = None


class TextGenerator:
    """A model with its tokenizer, in the words of `ftk.load_generator`.

        generator.generate(["Once upon a time"])[0].text

    Args:
        tokenizer: the one that the model was trained with.
        model: answers.
        framing: reads prompts, which are token ids, and gives one answer to each.
        config: options of generation.
        steering: makes processors for all prompts and for those with options of their own.
        language_model: its log-probabilities are added with the weight in `config`.

    Raises:
        UserError: tokenizer and model do not fit each other.
    """

    config_class: ClassVar[type[GenerationConfig]] = GenerationConfig
    """The options that a generator of this kind has."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: nn.Module,
        framing: Framing,
        config: GenerationConfig,
        steering: Steering,
        language_model: nn.Module | None = None,
    ) -> None:
        self.tokenizer, self.model, self.framing = tokenizer, model, framing
        self.config, self.steering = config, steering
        check_vocabulary(tokenizer, model)
        self.language_model = None
        if language_model is not None:
            check_vocabulary(tokenizer, language_model)
            self.language_model = PromptReader(language_model, framing, Fusion(config.lm_weight, config.lm_ends))

    @classmethod
    def assembled(
        cls,
        tokenizer: Tokenizer,
        model: nn.Module,
        framing: Framing,
        config: Any,
        steering: Steering,
        language_model: nn.Module | None = None,
    ) -> Any:
        """One of loaded parts, see the class; where a task's own generator is made differently."""
        return cls(tokenizer, model, framing, config, steering, language_model)

    @classmethod
    def check_config(cls, config: Any, model_config: Any) -> None:
        """Raises UserError if a model with this config can answer no prompt; before its weights are read."""
        max_positions = getattr(model_config, "max_positions", None)
        if max_positions is not None and config.max_len > max_positions:
            raise UserError(
                f"max_len is {config.max_len}, but the model has {max_positions} positions; lower it (`max_len`)"
            )

    def generate(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        options: Sequence[PromptOptions | None] | None = None,
    ) -> list[TextResult]:
        """Continues each prompt.

        Args:
            prompts: texts.
            seeds: one per prompt, for sampling; `config.seed` for all if None.
            progress: called with the number of prompts that have been answered since the last call.
            options: for each prompt its own, which take the place of those of the same name; see
                `ftk.generation.processors.steering.PROMPT_OPTIONS`.

        Raises:
            UserError: a prompt is empty or too long; its options are not allowed.
        """
        check_list("generate", prompts)
        return self.generate_encoded(self._encoded(prompts, seeds, options), progress)

    def stream(
        self,
        prompts: str | Sequence[str],
        seeds: Sequence[int] | None = None,
        options: Sequence[PromptOptions | None] | None = None,
    ) -> Generator[TextPiece, None, None]:
        """As `generate`, but gives each piece of text as soon as it is there; closing the iterator ends the work.

        Args:
            prompts: a text, or several, which are answered together: their pieces come in turn.
            seeds, options: as for `generate`.
        """
        return self._pieces(self._encoded([prompts] if isinstance(prompts, str) else list(prompts), seeds, options))

    def score(self, prompts: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[Scored]]:
        """Log-probabilities of given continuations of each prompt, without an end token; see `Engine.score`.

        Args:
            prompts: texts.
            continuations: for each prompt any number of texts, each with the space in front that belongs to it.

        Raises:
            UserError: as for `generate`; numbers of prompts and lists of continuations that differ.
        """
        check_lists("score([prompt], [[continuation]])", prompts, continuations)
        pairs = zip(prompts, continuations, strict=True)
        return self._scored([self.encode_candidates(prompt, [[text] for text in own], False) for prompt, own in pairs])

    # What the commands ask of a generator of any task: prompts one by one, in the order of their lines.

    example: ClassVar[str] = "Once upon a time"
    """A prompt, for messages."""

    invitation: ClassVar[str] = "Write the beginning of a text"
    """What ftk-interactive asks for."""

    def encode(
        self, prompt: str, options: PromptOptions | None = None, *, seed: int | None = None, check: bool = True
    ) -> EncodedText:
        """A prompt as the model reads it.

        Args:
            prompt: a text.
            options: of this prompt alone.
            seed: of this prompt; that of its options goes first.
            check: whether an answer of the longest length must fit the model's positions.

        Raises:
            UserError: as for `generate`.
        """
        check_text(prompt)
        own = self.steering.of(options, 1) if options else None
        seeds = (seed_of(options or {}), seed, self.config.seed)
        request = Request(
            self._prompt_ids(prompt),
            self.config,
            self.steering.processors if own is None else own,
            next(one for one in seeds if one is not None),
        )
        if check:
            self.framing.check(request)
        return EncodedText(prompt, request)

    def encode_candidates(self, prompt: str, candidates: Sequence[Sequence[str]], end: bool) -> EncodedText:
        """A prompt with given continuations, each the only text of a list, and whether their end is scored, too.

        Raises:
            UserError: there is not one text in each list; they do not fit the model's positions.
        """
        if any(len(texts) != 1 for texts in candidates):
            raise UserError("a prompt is continued by one answer; give one, or candidates with one each")
        encoded = self.encode(prompt, check=False)
        self.framing.check(dataclasses.replace(encoded.request, options=GenerationConfig(max_len=1)))
        ids = encoded.request.prompt
        given = [[*self._tokens_behind(ids, prompt, text), *self.framing.ends[: int(end)]] for (text,) in candidates]
        for one in given:
            self.framing.branch(encoded.request, one)  # refuses what does not fit
        return dataclasses.replace(encoded, candidates=tuple(given))

    def encode_sample(self, sample: Mapping[str, Any]) -> EncodedText:
        """A training sample as a prompt with references.

        Raises:
            UserError: samples of this task ask for nothing.
        """
        raise UserError("samples of this task ask for no answers; give prompts with `input`")

    def generate_encoded(
        self,
        prompts: Sequence[EncodedText],
        progress: Callable[[int], object] | None = None,
        on_piece: Callable[[TextPiece], object] | None = None,
    ) -> list[TextResult]:
        """As `generate`, for prompts that `encode` has made.

        Args:
            prompts: any number.
            progress: as for `generate`.
            on_piece: called with each piece of text as soon as it is there; what it raises ends the work.
        """
        if not prompts:
            return []
        if on_piece is not None:
            results: dict[int, TextResult] = {}
            with closing(self._pieces(prompts)) as pieces:
                for piece in pieces:
                    on_piece(piece)
                    if piece.result is not None:
                        results[piece.prompt] = piece.result
            return [results[number] for number in range(len(prompts))]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].request.prompt), reverse=True)
        requests = [prompts[index].request for index in order]
        with evaluation_mode(*self._models()):
            found = self.engine(requests).answers(requests, progress or (lambda count: None))
        by_index = dict(zip(order, found, strict=True))
        return [self._result(prompt, by_index[index][0]) for index, prompt in enumerate(prompts)]

    def score_encoded(
        self, prompts: Sequence[EncodedText], progress: Callable[[int], object] | None = None
    ) -> list[list[list[TextAnswer]]]:
        """Of each prompt, and each of its candidates, the one answer with its log-probabilities."""
        penalty = self.config.length_penalty
        results = []
        for prompt, found in zip(prompts, self._scored(prompts, progress), strict=True):
            own = []
            for ids, scored in zip(prompt.candidates, found, strict=True):
                words = [token for token in ids if token not in self.framing.ends]
                score = sum(scored.logprobs) / max(len(ids), 1) ** penalty
                text = self._text_behind(prompt.request.prompt, words)
                own.append([TextAnswer(text, words, list(scored.logprobs), score)])
            results.append(own)
        return results

    def engine(self, requests: Sequence[Request]) -> Engine:
        """An engine of the generator's model that is large enough for some requests."""
        return engine_for(self.model, self.framing, requests, self.config.batch_size, self.language_model)

    def _encoded(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | None,
        options: Sequence[PromptOptions | None] | None,
    ) -> list[EncodedText]:
        seeds = [self.config.seed] * len(prompts) if seeds is None else seeds
        own = [None] * len(prompts) if options is None else options
        if not len(prompts) == len(seeds) == len(own):
            raise UserError(f"{len(prompts)} prompts, {len(seeds)} seeds, {len(own)} options; give one for each")
        encoded = []
        for number, (prompt, seed, chosen) in enumerate(zip(prompts, seeds, own, strict=True), start=1):
            try:
                encoded.append(self.encode(prompt, chosen, seed=seed))
            except UserError as error:
                raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        return encoded

    def _scored(
        self, prompts: Sequence[EncodedText], progress: Callable[[int], object] | None = None
    ) -> list[list[Scored]]:
        requests, given = [prompt.request for prompt in prompts], [list(prompt.candidates) for prompt in prompts]
        with evaluation_mode(self.model):
            return score(self.model, self.framing, requests, given, progress or (lambda count: None))

    def _models(self) -> list[nn.Module]:
        return [self.model, *([] if self.language_model is None else [self.language_model.model])]

    def _pieces(self, prompts: Sequence[EncodedText]) -> Generator[TextPiece, None, None]:
        if not prompts:
            return
        with evaluation_mode(*self._models()):
            requests = [dataclasses.replace(prompt.request, stream=True) for prompt in prompts]
            engine = self.engine(requests)
            numbers = [engine.submit(request) for request in requests]
            lines = {number: _Line(self, index, prompts[index]) for index, number in enumerate(numbers)}
            with closing(engine.drain(numbers)) as events:
                for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.kind != "done":
                        yield from lines[event.request].add(event.tokens, event.logprobs, event.answer)

    def _result(self, prompt: EncodedText, best: Answer) -> TextResult:
        found, *others = (
            TextAnswer(
                prompt.request.processors.cut(self._text_behind(prompt.request.prompt, one.tokens)),
                one.tokens,
                one.token_logprobs,
                one.score,
                alternatives=one.alternatives,
                lm_logprobs=one.lm_logprobs,
            )
            for one in (best, *best.others)
        )
        answer = dataclasses.replace(found, others=tuple(others))
        return TextResult(prompt.prompt, prompt.prompt + answer.text, [answer])

    def _prompt_ids(self, text: str) -> list[int]:
        return [*self.tokenizer.prompt_prefix, *self.tokenizer.encode(text)]

    def _text_behind(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Tokens as they read behind a prompt, with the space that the tokenizer puts between."""
        before = list(prompt[-_CONTEXT_FOR_SPACING:])
        left, joined = self.tokenizer.decode(before), self.tokenizer.decode([*before, *tokens])
        return joined[len(left) :] if joined.startswith(left) else self.tokenizer.decode(tokens)

    def _tokens_behind(self, ids: Sequence[int], prompt: str, text: str) -> list[int]:
        """A text as tokens behind a prompt; where its first ones would join the prompt's last, those of it alone."""
        joined = self._prompt_ids(prompt + text)
        return joined[len(ids) :] if joined[: len(ids)] == list(ids) else self.tokenizer.encode(text)


class _Line:
    """One continuation while its tokens come."""

    def __init__(self, generator: TextGenerator, index: int, prompt: EncodedText) -> None:
        self.generator, self.index, self.prompt, self.request = generator, index, prompt, prompt.request
        self.text = ""  # what was told
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.num_told = 0
        self.is_begun = False  # whether there was a piece

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], answer: Answer | None
    ) -> Generator[TextPiece, None, None]:
        """More tokens, and at last the answer: the text that is settled now, if there is any."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        result = None
        if answer is not None:
            result = self.generator._result(self.prompt, answer)
            text, count = result.answers[0].text, len(answer.tokens)
            if not text.startswith(self.text):
                raise text_changed(self.text, text)
        else:
            text = whole_characters(self.generator._text_behind(self.request.prompt, self.tokens))
            text, count = self.request.processors.settled(text), len(self.tokens)
        if result is None and (not text.startswith(self.text) or len(text) == len(self.text)):
            return
        new, self.text = text[len(self.text) :], text
        part = slice(self.num_told, count if result is None else None)
        filled = new if self.is_begun else self.prompt.prompt + new
        self.num_told, self.is_begun = count, True
        yield TextPiece(self.index, new, self.tokens[part], self.logprobs[part], filled, result)


def check_list(method: str, prompts: object) -> None:
    """Raises UserError, with how `method` is called, if one text is given in place of a list of prompts."""
    if isinstance(prompts, str):
        raise UserError(f"{method} takes a list of prompts; for one, {method}([prompt])[0]")


def check_lists(form: str, prompts: Sequence[str], answers: Sequence[object]) -> None:
    """Raises UserError, with the right form of the call, if there is not one list of answers for each prompt."""
    if isinstance(prompts, str) or any(isinstance(one, str) for one in (answers, *answers)):
        raise UserError(f"one text is given in place of a list; write {form}")
    if len(answers) != len(prompts):
        raise UserError(f"answers for {len(answers)} prompts, but there are {len(prompts)}; give some for each")


def check_text(prompt: object) -> None:
    """Raises UserError if a prompt is no text."""
    if not isinstance(prompt, str):
        raise UserError(f"a prompt is a text, but this is {type(prompt).__name__}: {prompt!r:.60}")


def check_vocabulary(tokenizer: Tokenizer, model: Any) -> None:
    """Raises UserError if the tokenizer has tokens that the model does not know."""
    num_rows = getattr(getattr(model, "config", None), "vocab_size", None)
    if num_rows is not None and num_rows < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model knows {num_rows}; "
            "use the tokenizer that the model was trained with"
        )
