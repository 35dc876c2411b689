"""A tokenizer's own chat template, a jinja template as `transformers` runs it, in a sandbox."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from ftk.errors import UserError
from ftk.tasks.answering.questions import Words
from ftk.tasks.sft.messages import ASSISTANT, SYSTEM, USER, Message, joined_input
from ftk.tokenizers.base import Tokenizer

_T = TypeVar("_T")

_PLACE = re.compile("\ue000(\\d+)\ue001")
"""Stands for the text of a message while the template runs: what a template says of a text, it says of this."""

_ABSENT = {"tools": None, "documents": None}
"""What templates ask for and conversations here do not have."""

_GIVEN = ("messages", "add_generation_prompt", *_ABSENT)

_NUM_KNOWN, _LONGEST_KNOWN = 256, 256
"""Sequences of roles whose parts are kept, and most roles of one: clients of a service choose theirs."""


class ChatTemplate:
    """Runs the template with places for the texts, which are put there afterwards: they are no part of the template.

    Args:
        source: of the template.
        tokenizer: whose special tokens it may name.

    Raises:
        UserError: jinja2 is not installed, or the template is none.
    """

    is_one_text = True

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        try:
            import jinja2
            import jinja2.ext
            import jinja2.meta
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UserError(
                "the tokenizer's chat template needs the package jinja2; install it by: pip install 'ftk[chat]', or "
                "choose another `template`"
            ) from None
        of_python = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
        self._errors = (jinja2.TemplateError, *of_python)

        class Generation(jinja2.ext.Extension):
            """The tag of `transformers` around what the assistant writes, which is rendered as it stands."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.Scope(body, lineno=line)

        extensions = [jinja2.ext.loopcontrols, Generation]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        # Not `strftime_now`: samples would depend on the day.
        environment.globals["raise_exception"] = _refuse
        special = tokenizer.special.roles.items()
        self._names = {f"{role}_token": tokenizer.token_text(token) for role, token in special}
        self._special = {token.text: token.id for token in tokenizer.command_tokens}
        self._values: Mapping[str, Any] = {}
        self._parts, self._answer = _remembering(self._parts_of), _remembering(self._answer_of)
        try:
            self._template = environment.from_string(source)
            asked = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except self._errors as error:
            raise _broken(error) from None
        self._variables = sorted(asked - {*_GIVEN, *self._names, *environment.globals})

    def words(self, messages: Sequence[Message]) -> list[Words]:
        messages = joined_input(messages)
        parts = self._parts(tuple(message.role for message in messages), True)
        words = [Words(parts[0], is_text=False, stays=True)]
        for message, behind in zip(messages, parts[1:], strict=True):
            words += [Words(message.text, stays=message.role == SYSTEM), Words(behind, is_text=False, stays=True)]
        return words

    def around(self, messages: Sequence[Message]) -> tuple[str, str]:
        answer = self._answer(tuple(message.role for message in joined_input(messages)))
        return answer.front, answer.back

    def given(self, values: Mapping[str, Any]) -> ChatTemplate:
        if unknown := values.keys() - {*self._variables}:
            known = f"it has {', '.join(self._variables)}" if self._variables else "it has none"
            raise UserError(f"the tokenizer's chat template has no variable {min(unknown, key=str)!r}; {known}")
        for name, value in values.items():
            if special := next((token for text in _texts(value) for token in self._special if token in text), None):
                raise UserError(
                    f"the chat template: the value of {name!r} holds the special token {special!r}; take it out"
                )
        found = copy.copy(self)
        found._values = dict(values)
        found._parts, found._answer = found._parts_of, found._answer_of
        return found

    @property
    def end(self) -> int | None:
        """The special token that the template puts behind an answer; None: there is none."""
        return self._answer((USER,)).end

    def _answer_of(self, roles: tuple[str, ...]) -> _Answer:
        try:
            asked, whole = self._parts(roles, True), self._parts((*roles, ASSISTANT), False)
        except UserError:  # it writes no answers of such conversations
            return _Answer()
        before, behind = whole[-2:]
        # Words there, such as the empty thoughts of Qwen3, are not in the prompt and are not learned.
        front = before.removeprefix(asked[-1]) if before.startswith(asked[-1]) else ""
        front = "" if front.strip() else front
        text = behind.lstrip()
        end = max((name for name in self._special if text.startswith(name)), key=len, default=None)
        if end is None:
            return _Answer(front)
        return _Answer(front, behind.removesuffix(text), self._special[end])

    def _parts_of(self, roles: tuple[str, ...], asks: bool) -> Sequence[str]:
        """What the template writes in front of the first message, behind it, behind the second, ...

        Args:
            roles: of the messages.
            asks: whether the next answer is asked for.
        """
        places = [{"role": role, "content": f"\ue000{number}\ue001"} for number, role in enumerate(roles)]
        try:
            given = {"messages": places, "add_generation_prompt": asks, **_ABSENT, **self._names, **self._values}
            text = self._template.render(given)
        except self._errors as error:
            raise _broken(error) from None
        parts = _PLACE.split(text)  # of the template, a number, of the template, ...
        if parts[1::2] != [*map(str, range(len(roles)))]:
            raise UserError(
                "the tokenizer's chat template does not write each message once, in its order; choose another "
                "`template`"
            )
        return parts[::2]


class _Answer(NamedTuple):
    """White space that a template has in front of an answer and behind it, and the special token there."""

    front: str = ""
    back: str = ""
    end: int | None = None


def _remembering(of_roles: Callable[..., _T]) -> Callable[..., _T]:
    """A function of roles that remembers what it returned."""
    known = functools.lru_cache(_NUM_KNOWN)(of_roles)
    return lambda roles, *more: (known if len(roles) <= _LONGEST_KNOWN else of_roles)(roles, *more)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, also those of keys."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            rest += [*item, *item.values()]
        elif isinstance(item, Sequence):
            rest += item


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _broken(error: Exception) -> UserError:
    text = " ".join(str(error).split())
    return UserError(f"the tokenizer's chat template: {text:.200}; choose another `template`")
