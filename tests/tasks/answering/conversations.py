"""Questions of rows, for the tests of conversations and of chat templates."""

from __future__ import annotations

from typing import Any

from ftk.data.supervised.row import Row
from ftk.generation.engine.continuation import Continuation
from ftk.tasks.answering.asking import Asking
from ftk.tasks.answering.questions import Question
from ftk.tasks.sft.task import SFTConfig, SFTTask
from ftk.tokenizers.base import Tokenizer

ASKED = {"instruction": "Add.", "output": "3"}
TALK = [("user", "Hi."), ("assistant", "Hello."), ("user", "Bye."), ("assistant", "See you.")]


def questions(tokenizer: Tokenizer, values: dict[str, Any], **options: str) -> list[Question]:
    return [*SFTTask.questions(SFTConfig(**options), tokenizer).of_row(Row(values, "f", 3))]


def asking_of(tokenizer: Tokenizer) -> Asking:
    return Asking(Continuation([tokenizer.special.eos]), "text")


def written(question: Question) -> str:
    return "".join(part.text for part in question.before)
