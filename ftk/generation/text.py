"""Generators of texts: what `ftk.load_generator` gives and the commands ask, for every task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, overload

from torch import nn

from ftk.errors import UserError
from ftk.generation.config import check_names, checked_config
from ftk.generation.engine.engine import collect
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.scoring import Scored, score
from ftk.generation.processors.steering import PromptOptions, Steering
from ftk.generation.results import EncodedText, TextAnswer, TextPiece, TextResult

if TYPE_CHECKING:
    from ftk.generation.engine.engine import Engine
    from ftk.generation.engine.fusion import LanguageModel
    from ftk.generation.engine.request import Event, Request
    from ftk.generation.search import Answer
    from ftk.tokenizers.base import Tokenizer

Encoded = TypeVar("Encoded", bound=EncodedText)

Converse = Callable[[str, Sequence[Mapping[str, Any]], Mapping[str, Any]], Any]
"""(last message, earlier ones with `role` and `content`, values of the template's variables) -> the prompt."""


class TextStream(Protocol):
    """One prompt that is being answered: events in, pieces of text out."""

    def add(self, event: Event) -> TextPiece | None:
        """The text that an event makes known; None where no whole character is new."""


class TextGenerator(ABC, Generic[Encoded]):
    """A model with its tokenizer: prompts in words in, the same texts with their answers out.

        generator.generate("Once upon a time").text

    A task's own generator says how it encodes a prompt, and what a result of its answers is.

    Args:
        tokenizer: the one that the model was trained with.
        framing: reads prompts (`Framing`); None where `needs_framing` is false.
        steering: makes processors for all prompts and for those with options of their own; None: prompts have none,
            nor has a call, unless `needs_framing` is false.
        language_model: its log-probabilities are added.

    Raises:
        UserError: tokenizer and model do not fit each other.
    """

    example: ClassVar[str] = "Once upon a time"
    """A prompt, for messages."""

    needs_framing: ClassVar[bool] = True
    """Whether an engine writes the answers, by the framing of the task."""

    reads_ids: ClassVar[bool] = False
    """Whether a prompt may be token ids, each of which follows on those before it as the answer does."""

    own_options: ClassVar[Sequence[str]] = ()
    """Names of options of a prompt that `encode` takes, beside `PROMPT_OPTIONS`."""

    digest: str = ""
    """Of the files that it was loaded from."""

    invitation: str = "Write the beginning of a text"
    """What ftk-interactive asks for."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: nn.Module,
        framing: Any,
        config: Any,
        steering: Steering | None,
        language_model: LanguageModel | None = None,
    ) -> None:
        self.tokenizer, self.model, self.framing = tokenizer, model, framing
        self.config, self.steering, self.language_model = config, steering, language_model
        for one in (model, *([] if language_model is None else [language_model.model])):
            check_vocabulary(tokenizer, one)

    @classmethod
    def assembled(
        cls,
        tokenizer: Tokenizer,
        model: nn.Module,
        framing: Any,
        config: Any,
        steering: Any,
        language_model: nn.Module | None = None,
    ) -> TextGenerator[Encoded]:
        """A generator of loaded parts, see the class."""
        return cls(tokenizer, model, framing, config, steering)

    @classmethod
    def check_config(cls, config: Any, model_config: Any) -> None:
        """Raises UserError if a model with this config can answer no prompt; before its weights are read."""

    @abstractmethod
    def encode(
        self, prompt: str, options: PromptOptions | None = None, seed: int | None = None, *, check: bool = True
    ) -> Encoded:
        """A prompt as the model reads it.

        Args:
            options: of this prompt alone.
            seed: of this prompt; that of its options goes first.
            check: whether answers of the greatest length must fit the model's positions.

        Raises:
            UserError: as for `generate`.
        """

    @abstractmethod
    def encode_candidates(self, prompt: str, candidates: Sequence[Sequence[str]], end: bool) -> Encoded:
        """A prompt with given answers, to be scored.

        Args:
            candidates: any number, each a list with the texts of all answers.
            end: whether the token that ends an answer is scored, too.

        Raises:
            UserError: as for `generate`; the number of texts is not that of the answers.
        """

    @property
    def gaps(self) -> Sequence[str]:
        """What a prompt has where an answer goes; nothing where each prompt is continued at its end."""
        return ()

    def ids_before_answers(self, prompt: Encoded) -> Sequence[int]:
        """Ids that the text of an answer stands behind; none where it stands for itself."""
        return ()

    chat_framing: Callable[..., Any] | None = None
    """How a model that others trained is asked in conversations; None: it knows none, or its own framing has them."""

    @property
    def conversation(self) -> Converse | None:
        """None: the model knows no conversations."""
        chat: Any = self.chat_framing  # always with `converse`
        return None if chat is None else lambda *said: chat().converse(*said)

    keeps_engine: bool = False
    """Whether calls share an engine, so that the turns of a conversation are read once; the model's weights must not
    change then."""

    _engine: Engine | None = None

    most_answers: ClassVar[int] = 1
    """To one prompt of a service."""

    def fill(self, *prompts: Any, **options: Any) -> Any:
        """Raises UserError, but of models that read what follows an answer; so does `score_candidates`."""
        raise UserError(f"{type(self).__name__} has no 'fill', which other models have; use 'generate'")

    def score_candidates(self, *prompts: Any, **options: Any) -> Any:
        raise UserError(f"{type(self).__name__} has no 'score_candidates', which other models have; use 'generate'")

    def num_answers(self, prompt: Encoded) -> int:
        """Answers that a prompt asks for."""
        return 1

    def between(self, before: str, behind: str) -> str:
        """The prompt that asks for what stands between two texts.

        Raises:
            UserError: the model reads nothing behind an answer.
        """
        raise UserError("this model goes on with a text and reads nothing after it; leave 'suffix' out")

    def check_serving(self) -> None:
        """Raises UserError if prompts that come at any time cannot share one engine."""
        if not self.needs_framing:
            raise UserError("this model writes no answers token by token; ask it by ftk-generate")
        if self.language_model is not None:
            raise UserError("a service adds no language model; leave `lm_path` out")

    def encode_sample(self, sample: Mapping[str, Any]) -> Encoded:
        """A training sample as a prompt with references.

        Raises:
            UserError: samples of this task ask for nothing.
        """
        raise UserError("samples of this task ask for no answers; give prompts with `input`")

    @abstractmethod
    def result(self, prompt: Encoded, answers: Sequence[Answer]) -> TextResult:
        """A prompt with its answers, from left to right, in words."""

    @abstractmethod
    def scored(self, prompt: Encoded, candidate: Any, found: Scored) -> list[TextAnswer]:
        """A candidate of a prompt with its log-probabilities, in words."""

    @abstractmethod
    def text_stream(self, number: int, prompt: Encoded) -> TextStream:
        """What makes pieces of text of the events of prompt `number`."""

    @overload  # a text is a sequence of texts, too, but is taken as one
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str,
        seeds: int | None = None,
        progress: Callable[[int], object] | None = None,
        on_piece: Callable[[TextPiece], object] | None = None,
        options: PromptOptions | None = None,
        **others: Any,
    ) -> TextResult: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        on_piece: Callable[[TextPiece], object] | None = None,
        options: Sequence[PromptOptions | None] | None = None,
        **others: Any,
    ) -> list[TextResult]: ...

    def generate(
        self,
        prompts: str | Sequence[str],
        seeds: int | Sequence[int] | None = None,
        progress: Callable[[int], object] | None = None,
        on_piece: Callable[[TextPiece], object] | None = None,
        options: PromptOptions | Sequence[PromptOptions | None] | None = None,
        **others: Any,
    ) -> TextResult | list[TextResult]:
        """Answers a prompt, or each of several.

        Args:
            prompts: a text, or a list of texts.
            seeds: of the prompt, or one for each, for sampling; `config.seed` for all if None. The answers to a prompt
                depend on it and its seed alone, not on what else is in the batch.
            progress: called with the number of prompts that have been answered since the last call.
            on_piece: called with each piece of an answer as it comes, see `stream`; what it raises ends the work.
            options: those of the prompt alone, or for each prompt its own or None. They take the place of those of the
                same name; see `ftk.generation.processors.steering.PROMPT_OPTIONS`.
            others: options of this call, see `with_options`.

        Returns:
            the result of the text; of a list, a list of results in the same order.

        Raises:
            UserError: a prompt is empty or too long; its options are not allowed.
        """
        own = self.with_options(**others)
        found = own.generate_encoded(own._encoded(prompts, seeds, options), progress, on_piece)
        return found[0] if is_single(prompts) else found

    def stream(
        self,
        prompts: str | Sequence[str],
        seeds: int | Sequence[int] | None = None,
        options: PromptOptions | Sequence[PromptOptions | None] | None = None,
        **others: Any,
    ) -> Generator[TextPiece, None, None]:
        """As `generate`, but gives each piece of an answer as soon as it is there.

            for piece in generator.stream("Once upon a time"):
                print(piece.filled, end="", flush=True)

        The work is done between one piece and the next, in the thread of the caller; closing the iterator, or
        dropping it, ends it. Where hypotheses compete (beams, several samples) an answer is one piece.

        Args:
            prompts: a text, or several, which are answered together: their pieces come in turn.
            seeds, options, others: as for `generate`.

        Raises:
            UserError: as `generate`, at once.
        """
        own = self.with_options(**others)
        return own.stream_encoded(own._encoded(prompts, seeds, options))

    def with_options(self, **options: Any) -> TextGenerator[Encoded]:
        """This generator with other options; the model is the same.

            generator.with_options(max_len=64, sampling=True)

        Args:
            options: as for `ftk.load_generator`, but for those of a language model.

        Raises:
            UserError: an unknown option, or a value that is not allowed.
        """
        if not options:
            return self
        if self.steering is None and self.needs_framing:
            raise UserError(
                "a call has options of its own, but its generator was made without steering; use ftk.load_generator"
            )
        for name in ("lm_path", "lm_weight", "lm_ends"):
            if name in options:
                raise UserError(f"{name} is one for all calls; give it to ftk.load_generator")
        steering = self.steering
        of_processors = [] if steering is None else [field.name for field in fields(steering.config)]
        check_names(options, [*(field.name for field in fields(self.config)), *of_processors])
        steered = {name: options.pop(name) for name in of_processors if name in options}
        config = checked_config(self.config, **options)
        self.check_config(config, getattr(self.model, "config", None))
        if steering is not None:
            steering = steering.changed(config.min_len, config.max_len, **steered)
        language_model = None if self.language_model is None else self.language_model.model
        made = self.assembled(self.tokenizer, self.model, self.framing, config, steering, language_model)
        made.chat_framing, made.digest = self.chat_framing, self.digest
        return made

    # What the commands ask of a generator of any task: prompts that were encoded one by one.

    def generate_encoded(
        self,
        prompts: Sequence[Encoded],
        progress: Callable[[int], object] | None = None,
        on_piece: Callable[[TextPiece], object] | None = None,
    ) -> list[TextResult]:
        """As `generate`, for prompts that `encode` or `encode_sample` has made."""
        if on_piece is None:
            found = collect(self.events([prompt.request for prompt in prompts]), len(prompts), progress)
            return [self.result(prompt, answers) for prompt, answers in zip(prompts, found, strict=True)]
        results: dict[int, TextResult] = {}
        with closing(self.stream_encoded(prompts, progress)) as pieces:
            for piece in pieces:
                on_piece(piece)
                if piece.result is not None:
                    results[piece.prompt] = piece.result
        return [results[number] for number in range(len(prompts))]

    def stream_encoded(
        self, prompts: Sequence[Encoded], progress: Callable[[int], object] | None = None
    ) -> Generator[TextPiece, None, None]:
        """As `stream`, for prompts that `encode` has made."""
        streams = [self.text_stream(number, prompt) for number, prompt in enumerate(prompts)]
        with closing(self.events([prompt.request for prompt in prompts], stream=True)) as events:
            for event in events:
                if event.kind == "done":
                    if progress is not None:
                        progress(1)
                elif (piece := streams[event.request].add(event)) is not None:
                    yield piece

    def score_encoded(
        self, prompts: Sequence[Encoded], progress: Callable[[int], object] | None = None
    ) -> list[list[list[TextAnswer]]]:
        """The answers of each candidate of each prompt, for what `encode_candidates` or `encode_sample` has made."""
        requests, candidates = [prompt.request for prompt in prompts], [prompt.candidates for prompt in prompts]
        found = score(self.model, self.framing, requests, candidates, progress)
        return [
            [self.scored(prompt, *pair) for pair in zip(prompt.candidates, own, strict=True)]
            for prompt, own in zip(prompts, found, strict=True)
        ]

    def events(self, requests: Sequence[Request], *, stream: bool = False) -> Generator[Event, None, None]:
        """What happens to requests, alone with an engine; see `Engine.events`.

        Args:
            requests: of this generator's prompts.
            stream: whether tokens are reported one by one.
        """
        return self.engine(requests).events(requests, stream=stream)

    def engine(self, requests: Sequence[Request]) -> Engine:
        """An engine of the generator's model that is large enough for some requests."""
        made, num_rows = self._engine, min(self.config.batch_size, len(requests))
        fits = made is not None and made.decoder.num_rows >= num_rows and all(map(made.has_room, requests))
        if made is None or not fits or made.is_busy or made.was_interrupted:
            parts = self.model, self.framing, requests, self.config.batch_size, self.language_model
            made = engine_for(*parts, has_more_room=self.keeps_engine)
        self._engine = made if self.keeps_engine else None
        return made

    def _encoded(self, prompts: Any, seeds: Any, options: Any) -> list[Encoded]:
        prompts, seeds, options = as_lists(prompts, seeds, options)
        seeds = [self.config.seed] * len(prompts) if seeds is None else seeds
        options = [None] * len(prompts) if options is None else options
        if not (_all_are(Integral, seeds) and _all_are((Mapping, type(None)), options)):
            raise UserError("one text takes one seed and one mapping of options, a list of texts a list of each")
        if not len(prompts) == len(seeds) == len(options):
            raise UserError(f"{len(prompts)} prompts, {len(seeds)} seeds, {len(options)} options; give one for each")
        return each_prompt(self.encode, prompts, options, seeds)


def each_prompt(encode: Callable[..., Encoded], prompts: Sequence[str], *arguments: Iterable[Any]) -> list[Encoded]:
    """`encode` of each prompt with its arguments; an error names the number of its prompt, from 1 on."""
    encoded = []
    for number, own in enumerate(zip(prompts, *arguments, strict=True), start=1):
        try:
            encoded.append(encode(*own))
        except UserError as error:
            raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
    return encoded


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt, a text or its token ids, and not a list of prompts."""
    if not hasattr(prompts, "__len__"):
        check_text(prompts, "a prompt, or each of a list,")
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def as_lists(prompts: Any, *own: Any) -> tuple[Any, ...]:
    """Prompts, and what belongs to each (seeds, options, answers), as lists; a single prompt becomes a list of one."""
    if not is_single(prompts):
        return (prompts, *own)
    return ([prompts], *(None if values is None else [values] for values in own))


def _all_are(kind: Any, values: Any) -> bool:
    return hasattr(values, "__len__") and all(isinstance(value, kind) for value in values)


def check_lists(form: str, prompts: Sequence[str], answers: Sequence[object]) -> None:
    """Raises UserError, with the right form of the call, if there is not one list of answers for each prompt."""
    if any(isinstance(answer, str) for answer in (answers, *answers)):
        raise UserError(f"one text is given in place of a list of answers; write {form}")
    if len(answers) != len(prompts):
        raise UserError(f"answers for {len(answers)} prompts, but there are {len(prompts)}; give some for each")


def check_text(text: object, what: str = "a prompt") -> None:
    """Raises UserError if a prompt, or another thing that `what` names, is no text."""
    if not isinstance(text, str):
        raise UserError(f"{what} is a text, but this is {type(text).__name__}: {text!r:.60}")


def check_vocabulary(tokenizer: Tokenizer, model: Any) -> None:
    """Raises UserError if the tokenizer, or that of sources, has tokens that the model does not know."""
    config = getattr(model, "config", None)
    num_rows = getattr(config, "vocab_size", None)
    of_source = getattr(config, "source_vocab_size", None)
    if of_source is not None and tokenizer.source is None:
        raise UserError(
            f"the model reads a vocabulary of {of_source} tokens and writes one of {num_rows}, and there is one "
            "tokenizer; use ftk.load_model and give it ids"
        )
    if of_source is None and hasattr(model, "encode") and tokenizer.source is not None:
        raise UserError(
            "the tokenizer has a vocabulary for sources and one for targets, but the model has one for both; "
            "use the tokenizer that the model was trained with"
        )
    for rows, vocabulary in ((num_rows, tokenizer), *([] if of_source is None else [(of_source, tokenizer.of_source)])):
        if rows is not None and rows < vocabulary.vocab_size:
            raise UserError(
                f"the tokenizer has {vocabulary.vocab_size} tokens, but the model knows {rows}; "
                "use the tokenizer that the model was trained with"
            )
