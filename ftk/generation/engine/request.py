"""What is asked of the engine, what it reports, and how a task says what a model reads for a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.base import Processors
from ftk.modules.adapters import PromptIds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ftk.generation.search import Answer
    from ftk.generation.search.answer import Alternatives

NOT_SCORED = -(2**63)
"""Among the targets of a branch: what follows this token is not asked. No id that was meant as one."""

WORD, SENTENCE, TEXT = EXPECTED = ("word", "sentence", "text")


@dataclass(eq=False)
class Request:
    """A prompt and all that decides its answers.

    Attributes:
        prompt: what the framing of the engine's task understands, e.g. token ids.
        options: of the search; those of requests that run at the same time may differ.
        processors: of scores.
        seed: of random numbers.
        stream: whether tokens are reported one by one, where the search settles them so.
        adapter: name of the one that reads it, of those that stand side by side on the model; None: none of them.
    """

    prompt: Any
    options: GenerationConfig = field(default_factory=GenerationConfig)
    processors: Processors = field(default_factory=Processors)
    seed: int = 1
    stream: bool = False
    adapter: str | None = None


class Event(NamedTuple):
    """Something that has happened to a request.

    Attributes:
        request: its number, as `Engine.submit` gave it.
        kind: "token", "answer" (one is complete; a request may have several), "done" or "error". The last two come
            once, and nothing follows them.
        number: of the answer that it is about, as the framing counts them.
        tokens: ids that have not been reported yet, without the end token.
        logprobs: natural logarithms of their probabilities; the end token's comes with the answer.
        answer: the complete answer. Where a stop string cuts it, it may lack tokens that were reported.
        error: why there are no more answers.
        alternatives: of "token", for each of `tokens` the likeliest ones there, if they were asked for; those of the
            others stand in the answer.
    """

    request: int
    kind: str
    number: int = 0
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    answer: Answer | None = None
    error: Exception | None = None
    alternatives: Alternatives = ()


class Frame(NamedTuple):
    """What a model reads before it writes an answer, which begins behind the last token.

    Attributes:
        tokens: T ids, at least one.
        inputs: what else `model.embed` takes, by name: int64 [.., T].
        stride: by the same names, int64 [..]: what is added to the last token's input for each further token.
        prefix: leading tokens that all tokens see, if `restart`.
        restart: whether what was read for the request so far is forgotten; else this comes behind it.
        number: of the answer that begins here, which has random numbers and options of its own.
        context: token ids that random numbers and processors go by.
        source: token ids that the model's encoder reads; empty for models without one.
        own: leading tokens that are rows of the model's own, beyond its vocabulary.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, NDArray[np.int64]]
    stride: Mapping[str, NDArray[np.int64]]
    prefix: int = 0
    restart: bool = True
    number: int = 0
    context: Sequence[int] = ()
    source: Sequence[int] = ()
    own: int = 0

    def part(self, start: int, stop: int | None = None) -> Frame:
        """Its tokens from `start` on, up to `stop`, exclusive."""
        inputs = {name: array[..., start:stop] for name, array in self.inputs.items()}
        return self._replace(tokens=self.tokens[start:stop], inputs=inputs)


class Branch(NamedTuple):
    """A given continuation of a request's first frame, as it is read to be scored.

    Attributes:
        tokens: T ids.
        inputs: as in `Frame`, of these tokens.
        targets: what follows, or `NOT_SCORED`.
        offset: 0: the branch stands in the place of the frame's last token, and target i follows token i. -1: it stands
            behind the frame; target 0 follows the frame's last token, target i + 1 token i.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, NDArray[np.int64]]
    targets: Sequence[int]
    offset: int = 0


class Framing(Protocol):
    """How prompts of a task are read: functions of a request and its answers, without state.

    Attributes:
        ends: tokens that end an answer; the first is the one that ends it where nothing else can.
        reads_behind: whether a text behind an answer is read, too (`ask`).
    """

    ends: tuple[int, ...]
    reads_behind: bool

    def check(self, request: Request) -> None:
        """Raises UserError, with the numbers, if the model cannot answer it."""

    def room(self, request: Request) -> int | None:
        """The greatest `max_len` for which there are positions, below 1 where the prompt takes them all; None: any."""

    def slots(self, request: Request) -> int:
        """The most tokens that all its frames, and the answers between them, take in a cache."""

    def work(self, request: Request) -> tuple[int, ...]:
        """How much work it is, to be compared with other requests."""

    def first(self, request: Request) -> Frame:
        """What is read for its first answer."""

    def next(self, request: Request, answers: Sequence[Answer]) -> Frame | None:
        """What is read after these answers; None where they are all."""

    def branch(self, request: Request, continuation: Any) -> Branch:
        """A continuation of the first frame that is given instead of searched for."""

    def ask(
        self, before: Sequence[int], behind: Sequence[int] = (), expected: str = WORD, closed: bool | None = None
    ) -> Any:
        """The prompt of a text with one gap, which the answer is to fill.

        Args:
            before, behind: ids of the text on both sides of the gap, without tokens that begin or end a text.
            expected: how long an answer is, one of `EXPECTED`; some models are asked otherwise for long ones.
            closed: whether the end of the text stands behind the gap; None: where the model was trained so. Models
                that read nothing behind an answer do not use it.

        Raises:
            UserError: such models read nothing behind an answer.
        """

    def continuation(self, answer: Sequence[int]) -> Any:
        """What `branch` takes for one answer; with its end token, where that is scored, too."""


def prompt_ids_of(model: Any) -> PromptIds:
    """The ids of a model's prompt tokens (`ftk.modules.adapters.p_tuning`); none where it has no such adapter.

    Raises:
        UserError: the members of an ensemble differ in theirs.
    """
    members = [*getattr(model, "members", [model])]
    found = {getattr(getattr(member, "token_embedding", None), "prompt_ids", PromptIds()) for member in members}
    if len(found) > 1:
        raise UserError("the models of the ensemble differ in their prompt tokens; leave out those with others")
    return found.pop()


def check_ids(model: Any, tokens: Sequence[int]) -> None:
    """Refuses token ids that a model does not know: an embedding fails over them, on a GPU with the whole process.

    Args:
        model: has `config.vocab_size`; nothing is checked where it does not. It may have prompt tokens behind.
        tokens: ids.

    Raises:
        UserError: names one of them.
    """
    prompts = prompt_ids_of(model)
    known = [token for token in tokens if not any(token in ids for ids in prompts)] if any(prompts) else tokens
    _check_below(getattr(getattr(model, "config", None), "vocab_size", None), known)


def check_source(model: Any, tokens: Sequence[int]) -> None:
    """`check_ids` of what an encoder reads, which may have a vocabulary of its own; and refuses a source of no tokens.

    Args:
        model: where it has an encoder, there must be tokens: attention to nothing is NaN.
        tokens: ids.

    Raises:
        UserError: names one of them; or there is no source, and the model has an encoder.
    """
    if len(tokens) == 0 and hasattr(model, "encode"):
        raise UserError("the source has no tokens; write a text")
    config = getattr(model, "config", None)
    _check_below(getattr(config, "source_vocab_size", None) or getattr(config, "vocab_size", None), tokens)


def _check_below(size: int | None, tokens: Sequence[int]) -> None:
    if size is None:
        return
    for token in tokens:
        if not 0 <= token < size:
            raise UserError(
                f"{token} is no id of the model's {size} tokens; use the tokenizer that the model was trained with"
            )
