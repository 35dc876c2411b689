"""Templates: what stands around what each says in a conversation, as data or as a tokenizer's own chat template."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ftk.errors import UserError, did_you_mean, shown
from ftk.files import as_user_error, read_yaml, reason
from ftk.parsing import parse_json
from ftk.tasks.answering.questions import Words
from ftk.tasks.sft.chat_template import ChatTemplate
from ftk.tasks.sft.messages import ASSISTANT, INPUT, ROLES, SYSTEM, USER, Message, joined_input
from ftk.tokenizers.base import Tokenizer
from ftk.tokenizers.files import TEMPLATE

AUTO, CHAT = "auto", "chat"
"""A tokenizer's own template if it has one, else `plain`; and its own."""

_FOLDER = Path(__file__).with_name("templates")
_SYSTEM_WITH_INPUT = "system_with_input"

_JINJA = (
    "{{ begin }}"
    "{% if told and not messages | selectattr('role', 'equalto', 'system') | list %}"
    "{{ around['system'][0] + told + around['system'][1] }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in around %}"
    "{{ raise_exception('the template has no role ' + message['role']) }}{% endif %}"
    "{{ around[message['role']][0] + message['content'] + around[message['role']][1] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ around['assistant'][0].rstrip(' ') }}{% endif %}"
)
"""The fixed part of a role template in jinja; spaces before an answer belong to the answer."""

_HEAD = re.compile(r"\{% set around = (?P<around>.*) %\}\{% set begin = .* %\}\{% set told = (?P<told>.*) %\}")
"""What stands in front of it."""


class Template(Protocol):
    """How a conversation is written.

    Attributes:
        is_one_text: see `Question`.
    """

    is_one_text: bool

    def words(self, messages: Sequence[Message]) -> list[Words]:
        """All that stands before the assistant's next answer.

        Raises:
            UserError: the template is not for such a conversation.
        """

    def around(self, messages: Sequence[Message]) -> tuple[str, str]:
        """See `Question.around`; of the assistant's next answer."""

    def given(self, values: Mapping[str, Any]) -> Template:
        """The template with values of the variables that it has, such as `enable_thinking`.

        Raises:
            UserError: it has no such variable.
        """


def built_in() -> list[str]:
    """The names of the templates that come with ftk."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def with_content(template: str) -> str:
    """The option `template` with the content of a file instead of its path, so that a checkpoint holds it.

    Args:
        template: a name, the path of a YAML file, or what this has returned.

    Raises:
        UserError: the file cannot be read, or holds no template.
    """
    known = [AUTO, CHAT, *built_in()]
    if template in known:
        return template
    path = os.path.expanduser(template)
    if not _is_content(template) and not os.path.isfile(path):
        raise UserError(
            f"`template` {template} is neither a YAML file nor a known name; {did_you_mean(template, known)}"
        )
    return json.dumps(_from_text(template) if _is_content(template) else _from_file(path), ensure_ascii=False)


def is_own(template: str, tokenizer: Tokenizer) -> bool:
    """Whether an option asks for the tokenizer's own template, which is not one that `RoleTemplate.jinja` wrote."""
    return template in (AUTO, CHAT) and tokenizer.chat_template is not None and _written(tokenizer) is None


def load_template(template: str, tokenizer: Tokenizer) -> Template:
    """The template that an option asks for.

    Args:
        template: of `with_content`.
        tokenizer: whose own template may be meant.

    Raises:
        UserError: the tokenizer has none of its own.
    """
    if template == CHAT and tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no chat template; choose another `template`: "
            f"{', '.join(built_in())}, or a YAML file"
        )
    if template in (AUTO, CHAT) and tokenizer.chat_template is not None:
        written = _written(tokenizer)
        return ChatTemplate(tokenizer.chat_template, tokenizer) if written is None else RoleTemplate(written)
    if _is_content(template):
        return RoleTemplate(_from_text(template))
    return RoleTemplate(_from_file(_FOLDER / f"{'plain' if template == AUTO else template}.yaml"))


class RoleTemplate:
    """A prefix and a suffix for each role.

    Args:
        tree: `roles`: role -> `prefix` and `suffix`, each perhaps missing; without `input`, an input is a part of the
            instruction. `system`: what is said first where a conversation has no system message; `system_with_input`:
            the same where there is an input.
    """

    is_one_text = False

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree

    def words(self, messages: Sequence[Message]) -> list[Words]:
        roles: Mapping[str, Mapping[str, str]] = self.tree["roles"]
        has_input = any(message.role == INPUT for message in messages)
        told = self.tree.get(_SYSTEM_WITH_INPUT if has_input else SYSTEM) or self.tree.get(SYSTEM)
        messages = [*messages] if INPUT in roles else joined_input(messages)
        if told and all(message.role != SYSTEM for message in messages):
            messages = [Message(SYSTEM, told), *messages]
        words: list[Words] = []
        for role, text, _ in messages:
            if role not in roles:
                raise UserError(f"the template has no role {role!r}; it has {', '.join(roles)}")
            around = roles[role]
            words += [_template(around.get("prefix", "")), Words(text, stays=role == SYSTEM)]
            words += [_template(around.get("suffix", ""))]
        return [*words, _template(roles[ASSISTANT].get("prefix", ""))]

    def around(self, messages: Sequence[Message]) -> tuple[str, str]:
        return "", ""

    def given(self, values: Mapping[str, Any]) -> RoleTemplate:
        raise UserError(f"the template has no variable {min(values)!r}, nor any other; only chat templates have some")

    def jinja(self, begin: str) -> str:
        """The same template for `transformers`, where an input is part of the instruction, with `begin` in front."""
        around = {role: [own.get("prefix", ""), own.get("suffix", "")] for role, own in self.tree["roles"].items()}
        told = self.tree.get(SYSTEM, "") if SYSTEM in around else ""
        values = {"around": around, "begin": begin, "told": told}  # jinja reads JSON
        texts = (f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}" for name, value in values.items())
        return "".join(texts) + _JINJA


def _written(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """What the tokenizer's template says, if `RoleTemplate.jinja` wrote it, so that ids are those of the training."""
    source = tokenizer.chat_template or ""
    found = _HEAD.fullmatch(source.removesuffix(_JINJA)) if source.endswith(_JINJA) else None
    if found is None:
        return None
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        around, told = (parse_json(found[name]) for name in ("around", "told"))
        roles = {role: {"prefix": prefix, "suffix": suffix} for role, (prefix, suffix) in around.items()}
        return _checked({"roles": roles, SYSTEM: told}, TEMPLATE)
    return None


def _template(text: str) -> Words:
    return Words(text, is_text=False, stays=True)


def _is_content(template: str) -> bool:
    return template.startswith("{")


def _from_text(text: str) -> dict[str, Any]:
    try:
        return _checked(parse_json(text), "`template`")
    except ValueError as error:
        raise UserError(f"`template` {reason(error)}") from None


def _from_file(path: str | Path) -> dict[str, Any]:
    with as_user_error(path):
        return _checked(read_yaml(path), str(path))


def _checked(tree: Any, where: str) -> dict[str, Any]:
    """A template of the right form."""
    if not isinstance(tree, dict) or not isinstance(tree.get("roles"), dict):
        raise UserError(f"{where}: a template is a mapping with 'roles', e.g. roles: {{user: {{}}, assistant: {{}}}}")
    texts = [(key, tree[key]) for key in tree if key != "roles"]
    _check_names(where, [key for key, _ in texts], (SYSTEM, _SYSTEM_WITH_INPUT))
    _check_names(f"{where}: roles", tree["roles"], ROLES)
    if missing := {USER, ASSISTANT} - tree["roles"].keys():
        raise UserError(f"{where}: roles has no {min(missing)}; it needs {USER} and {ASSISTANT}")
    for role, around in tree["roles"].items():
        if not isinstance(around, dict):
            raise UserError(f"{where}: roles.{role} is {shown(around)}; it must be a mapping of prefix and suffix")
        _check_names(f"{where}: roles.{role}", around, ("prefix", "suffix"))
        texts += [(f"roles.{role}.{name}", text) for name, text in around.items()]
    for name, text in texts:
        if not isinstance(text, str):
            raise UserError(f"{where}: {name} is {shown(text)}; it must be a text")
    return tree


def _check_names(where: str, names: Any, known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{where}: unknown {shown(name)}; {did_you_mean(str(name), known)}")
