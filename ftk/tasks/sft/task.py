"""The task sft: supervised fine-tuning on instructions and conversations, of which the answers are learned."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.config.options import option
from ftk.data.supervised.row import Row
from ftk.errors import UserError, naming_place
from ftk.registry import register_task
from ftk.tasks.answering.asking import Asking
from ftk.tasks.answering.questions import Question
from ftk.tasks.answering.task import AnswerConfig, AnswerTask, QuestionConfig, RowQuestions
from ftk.tasks.answering.text_framing import TextFraming
from ftk.tasks.sft.messages import ASSISTANT, SYSTEM, USER, Message, asked_messages, joined_input, messages_of
from ftk.tasks.sft.template import CHAT, RoleTemplate, Template, is_own, load_template, with_content

if TYPE_CHECKING:
    from ftk.generation.engine.request import Framing
    from ftk.generation.text import TextGenerator
    from ftk.tokenizers.base import Tokenizer

_LENGTH_OF_ANY = 10**8  # nothing is left out


def _template_option(**metadata: Any) -> Any:
    """The field of the option `template`."""
    text = (
        "what stands around the texts: plain, alpaca, chatml, chat, a YAML file; chat: the tokenizer's own template; a "
        "file has a prefix and a suffix for each role; auto: chat if the tokenizer has one, else plain"
    )
    return option("auto", text, metavar="NAME", **metadata)


@dataclass(kw_only=True)
class TemplateConfig(QuestionConfig):
    """Options of every task of conversations."""

    template: str = _template_option()

    def __post_init__(self) -> None:
        self.template = with_content(self.template)


@dataclass(kw_only=True)
class SFTConfig(TemplateConfig, AnswerConfig):
    template: str = _template_option(daily=True)
    turns: str = option(
        "every",
        "which answers of a conversation are learned: each, as a sample of its own, or the last one",
        choices=("every", "last"),
    )


@register_task("sft", config=SFTConfig, criterion="cross_entropy", dataset="rows")
class SFTTask(AnswerTask):
    """The answers of an assistant, each behind all that was said before it."""

    config: TemplateConfig

    @classmethod
    def expected(cls, config: TemplateConfig) -> str:
        return "text"

    @classmethod
    def framing_with(cls, config: TemplateConfig, tokenizer: Tokenizer, model_config: Any) -> Framing:
        """With the tokenizer's own template, answers end as it ends them: ChatML's by `<|im_end|>`."""
        framing = cls.framing(tokenizer, model_config)
        return _ending(framing, tokenizer, first=True) if is_own(config.template, tokenizer) else framing

    def complete_model_config(self, config: Any) -> Any:
        config = super().complete_model_config(config)
        known = getattr(config, "end_tokens", None)
        if known is None:
            return config
        usual = self.framing(self.tokenizer, config).ends[0]
        first = self.framing_with(self.config, self.tokenizer, config).ends[0]  # other programs stop there, too
        added = [] if first in (*known, usual, self.tokenizer.special.eos) else [first]
        return dataclasses.replace(config, end_tokens=[*known, *added])

    @classmethod
    def asking(cls, config: TemplateConfig, tokenizer: Tokenizer, framing: Framing) -> Asking:
        """With the tokenizer's own template, nothing stands in front of it but what it writes, as in `transformers`."""
        if hasattr(framing, "begins") and is_own(config.template, tokenizer):
            own: Any = copy.copy(framing)
            own.begins = []
            framing = own
        return super().asking(config, tokenizer, framing)

    @classmethod
    def chat_template(cls, options: TemplateConfig, tokenizer: Tokenizer, model_config: Any) -> str | None:
        if is_own(options.template, tokenizer):
            return None
        template, framing = load_template(options.template, tokenizer), cls.framing(tokenizer, model_config)
        begins = getattr(framing, "begins", None)  # of models that continue texts
        if begins is None or not isinstance(template, RoleTemplate):
            return None
        return template.jinja("".join(map(tokenizer.token_text, begins)))

    @classmethod
    def questions(cls, config: Any, tokenizer: Tokenizer) -> RowQuestions:
        template = load_template(config.template, tokenizer)

        def of_row(row: Row) -> Iterator[Question]:
            messages = messages_of(row)
            answers = [
                number for number, message in enumerate(messages) if message.role == ASSISTANT and message.learned
            ]
            for number in answers[-1:] if config.turns == "last" else answers:
                yield question_of(template, messages[:number], messages[number].text, row.place)

        def of_text(text: str) -> Question:
            return question_of(template, [Message(USER, text)])

        def of_messages(messages: Sequence[Any], values: Mapping[str, Any]) -> Question:
            return question_of(template.given(values) if values else template, asked_messages(messages))

        return RowQuestions(of_row, of_text, of_messages)


def chat_framing(tokenizer: Tokenizer, model_config: Any) -> Callable[..., TextFraming] | None:
    """How a model that others trained is asked in conversations: by its tokenizer's own template.

    Returns:
        makes it once, when it is called, as the template may be broken, or jinja2 missing. Its argument is the
        `seq_length` that what is longer is cut to; None: nothing is left out. None where the tokenizer has no chat
        template.
    """
    if tokenizer.chat_template is None:
        return None

    @functools.cache
    def framing(seq_length: int | None = None) -> TextFraming:
        options = SFTConfig(template=CHAT, seq_length=_LENGTH_OF_ANY if seq_length is None else seq_length)
        return SFTTask.framing_as_trained(tokenizer, model_config, options)

    return framing


def add_chat_framing(generator: TextGenerator[Any], model_config: Any) -> None:
    """Gives a generator that continues texts the chat template of its tokenizer, unless its framing has one."""
    from ftk.generation.continuation import TextContinuer

    if isinstance(generator, TextContinuer) and not isinstance(generator.framing, TextFraming):
        generator.chat_framing = chat_framing(generator.tokenizer, model_config)


def with_template_end(framing: Framing, tokenizer: Tokenizer) -> Framing:
    """The framing of a model that others trained, whose answers also end as its tokenizer's chat template ends them."""
    if is_own(CHAT, tokenizer):
        with contextlib.suppress(UserError):  # said at the first message: the template is broken, or jinja2 missing
            return _ending(framing, tokenizer)
    return framing


def _ending(framing: Framing, tokenizer: Tokenizer, *, first: bool = False) -> Framing:
    """A framing whose answers also end with the special token that the tokenizer's template has behind them.

    Args:
        framing: of the model; of a causal one, others have ends of their own.
        tokenizer: has a template.
        first: whether that token is the one that is learned.
    """
    if not hasattr(framing, "begins"):
        return framing
    template: Any = load_template(CHAT, tokenizer)
    if template.end is None:
        return framing
    found: Any = copy.copy(framing)
    both = (template.end, *framing.ends) if first else (*framing.ends, template.end)
    found.ends = tuple(dict.fromkeys(both))
    return found


def question_of(
    template: Template, messages: Sequence[Message], answer: str = "", place: str = "the question"
) -> Question:
    """The question whose answer follows on these messages."""
    with naming_place(place):
        words, around = template.words(messages), template.around(messages)

    def shorter(start: int) -> Question:
        kept = [message for message in messages[:start] if message.role == SYSTEM]
        return question_of(template, [*kept, *messages[start:]], answer, place)

    return Question(
        words,
        answer,
        shown=joined_input(messages)[-1].text,
        place=place,
        shorter=[functools.partial(shorter, start) for start in _later_starts(messages)],
        is_one_text=template.is_one_text,
        around=around,
    )


def _later_starts(messages: Sequence[Message]) -> list[int]:
    """Where the messages may begin instead: behind each answer that something is asked behind."""
    roles = [message.role for message in messages]
    asked = max((number for number, role in enumerate(roles) if role not in (SYSTEM, ASSISTANT)), default=0)
    return [number for number, role in enumerate(roles, start=1) if role == ASSISTANT and number <= asked]
