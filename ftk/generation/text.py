"""Text that a model continues: prompts in words in, the same texts with their continuations out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
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
        alternatives: as `ftk.generation.Answer.alternatives`.
    """

    text: str
    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    score: float
    alternatives: Sequence[Any] = ()


@dataclass(frozen=True)
class TextResult:
    """A prompt, with its best continuation as `text`, and all that were asked for, best first."""

    prompt: str
    text: str
    answers: Sequence[TextAnswer]


@dataclass(frozen=True)
class TextPiece:
    """New text of a continuation, with the tokens that it consists of; the result with the last one."""

    prompt: int
    text: str
    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    result: TextResult | None = None


class TextGenerator:
    """A model with its tokenizer, in the words of `ftk.load_generator`.

        generator.generate(["Once upon a time"])[0].text

    Args:
        tokenizer: the one that the model was trained with.
        model: answers.
        framing: reads prompts, which are token ids, and gives one answer to each.
        config: options of generation.
        steering: makes processors for all prompts and for those with options of their own.
        language_model: has a say in which tokens come, as much as `config` says.

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
        requests = self.requests(prompts, seeds, options)
        if not requests:
            return []
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt), reverse=True)
        chosen = [requests[index] for index in order]
        with evaluation_mode(*self._models()):
            found = self.engine(chosen).answers(chosen, progress or (lambda count: None))
        by_index = dict(zip(order, found, strict=True))
        return [self._result(prompts[i], requests[i], by_index[i][0]) for i in range(len(prompts))]

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
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._pieces(texts, self.requests(texts, seeds, options, stream=True))

    def score(self, prompts: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[Scored]]:
        """Log-probabilities of given continuations of each prompt, without an end token; see `Engine.score`.

        Args:
            prompts: texts.
            continuations: for each prompt any number of texts, each with the space in front that belongs to it.
        """
        requests = self.requests(prompts)
        given = [
            [self._tokens_behind(request.prompt, prompt, text) for text in own]
            for prompt, request, own in zip(prompts, requests, continuations, strict=True)
        ]
        with evaluation_mode(self.model):
            return score(self.model, self.framing, requests, given)

    def requests(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | None = None,
        options: Sequence[PromptOptions | None] | None = None,
        stream: bool = False,
    ) -> list[Request]:
        """What an engine is asked for some prompts; arguments as for `generate`."""
        seeds = [self.config.seed] * len(prompts) if seeds is None else seeds
        own = [None] * len(prompts) if options is None else options
        if not len(prompts) == len(seeds) == len(own):
            raise UserError(f"{len(prompts)} prompts, {len(seeds)} seeds, {len(own)} options; give one for each")
        requests = []
        for number, (prompt, seed, chosen) in enumerate(zip(prompts, seeds, own, strict=True), start=1):
            try:
                requests.append(self._request(prompt, seed, chosen or {}, stream))
            except UserError as error:
                raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        return requests

    def engine(self, requests: Sequence[Request]) -> Engine:
        """An engine of the generator's model that is large enough for some requests."""
        return engine_for(self.model, self.framing, requests, self.config.batch_size, self.language_model)

    def _request(self, prompt: str, seed: int, options: Mapping[str, Any], stream: bool) -> Request:
        own = self.steering.of(options, 1) if options else None
        its_seed = seed_of(options)
        request = Request(
            self.tokenizer.encode(prompt),
            self.config,
            self.steering.processors if own is None else own,
            seed if its_seed is None else its_seed,
            stream,
        )
        self.framing.check(request)
        return request

    def _models(self) -> list[nn.Module]:
        return [self.model, *([] if self.language_model is None else [self.language_model.model])]

    def _pieces(self, texts: Sequence[str], requests: Sequence[Request]) -> Generator[TextPiece, None, None]:
        if not requests:
            return
        with evaluation_mode(*self._models()):
            engine = self.engine(requests)
            numbers = [engine.submit(request) for request in requests]
            lines = {number: _Line(self, index, texts[index], requests[index]) for index, number in enumerate(numbers)}
            with closing(engine.drain(numbers)) as events:
                for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.kind != "done":
                        yield from lines[event.request].add(event.tokens, event.logprobs, event.answer)

    def _result(self, prompt: str, request: Request, best: Answer) -> TextResult:
        answers = [
            TextAnswer(
                request.processors.cut(self._text_behind(request.prompt, one.tokens)),
                one.tokens,
                one.token_logprobs,
                one.score,
                one.alternatives,
            )
            for one in (best, *best.others)
        ]
        return TextResult(prompt, prompt + answers[0].text, answers)

    def _text_behind(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Tokens as they read behind a prompt, with the space that the tokenizer puts between."""
        before = list(prompt[-_CONTEXT_FOR_SPACING:])
        left, joined = self.tokenizer.decode(before), self.tokenizer.decode([*before, *tokens])
        return joined[len(left) :] if joined.startswith(left) else self.tokenizer.decode(tokens)

    def _tokens_behind(self, ids: Sequence[int], prompt: str, text: str) -> list[int]:
        """A text as tokens behind a prompt; where its first ones would join the prompt's last, those of it alone."""
        joined = self.tokenizer.encode(prompt + text)
        return joined[len(ids) :] if joined[: len(ids)] == list(ids) else self.tokenizer.encode(text)


class _Line:
    """One continuation while its tokens come."""

    def __init__(self, generator: TextGenerator, index: int, prompt: str, request: Request) -> None:
        self.generator, self.index, self.prompt, self.request = generator, index, prompt, request
        self.text = ""  # what was told
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.num_told = 0

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], answer: Answer | None
    ) -> Generator[TextPiece, None, None]:
        """More tokens, and at last the answer: the text that is settled now, if there is any."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        result = None
        if answer is not None:
            result = self.generator._result(self.prompt, self.request, answer)
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
        self.num_told = count
        yield TextPiece(self.index, new, self.tokens[part], self.logprobs[part], result)


def check_vocabulary(tokenizer: Tokenizer, model: Any) -> None:
    """Raises UserError if the tokenizer has tokens that the model does not know."""
    num_rows = getattr(getattr(model, "config", None), "vocab_size", None)
    if num_rows is not None and num_rows < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model knows {num_rows}; "
            "use the tokenizer that the model was trained with"
        )
