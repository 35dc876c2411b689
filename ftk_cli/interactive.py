"""ftk-interactive: answers texts that are typed, or read from a pipe."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.config import compose, section
from ftk.config.options import option
from ftk.errors import UserError, counted, visible
from ftk.files import open_regular
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk_cli.command import FAILURE, run
from ftk_cli.inference_options import (
    COLOR,
    MODEL,
    DevicePrecisionConfig,
    find_checkpoints,
    given_flags,
    open_generator,
    say_proposals,
    with_options_of_task,
)
from ftk_cli.progress import say, tell
from ftk_cli.prompts import Remarks, line_text, prompt_lines, refusal

if TYPE_CHECKING:
    from ftk.generation.results import EncodedText, TextAnswer, TextPiece, TextResult
    from ftk.generation.text import TextGenerator

PROG = "ftk-interactive"
DESCRIPTION = """Reads texts and prints each with the model's answers: continued, or with what is missing in it.
With --path, --help all also shows the options of the model's task.
Example: ftk-interactive --path run --beam 4"""
LEAVE = ("exit", "quit")
"""Words that leave, also with a slash in front."""
HELP = "/help"
RESET = "/reset"
_HISTORY_LENGTH = 1000


@dataclass(kw_only=True)
class InteractiveConfig:
    path: str = MODEL
    history: str = option("~/.ftk_history", "file that keeps what was typed on a terminal; '' for none", metavar="FILE")
    chat: bool = option(
        False,
        f"each text is the next message of a conversation (of models that learned from such); {RESET} starts another",
        daily=True,
    )
    color: str = COLOR


@dataclass(kw_only=True)
class InteractiveRoot:
    interactive: InteractiveConfig = section("model")
    generation: GenerationConfig = section("how to search")
    processors: ProcessorConfig = section("logits processors")
    common: DevicePrecisionConfig = section("common")

    def validate(self) -> Iterator[str]:
        if "--batch-size" in given_flags("generation", self.generation):
            yield "--batch-size is for many prompts; here one is answered at a time, leave it out"


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def body(argv: list[str]) -> int:
    root = compose(with_options_of_task(InteractiveRoot, argv), PROG, DESCRIPTION, argv)
    from ftk_cli.colors import color_legend, use_color

    checkpoints = find_checkpoints(root.interactive.path, root.generation.lm_path, base=root.common.base)
    generator = open_generator(checkpoints, root.common, root.generation, root.processors)
    say_proposals(PROG, argv, checkpoints, root.generation, root.processors)
    color = use_color(root.interactive.color, sys.stdout)
    said: list[dict[str, str]] | None = [] if root.interactive.chat else None
    if said is not None and getattr(generator, "conversation", None) is None:
        raise UserError(
            "the model did not learn from conversations, and its tokenizer has no chat template; leave --chat out"
        )
    generator.keeps_engine = said is not None
    if not sys.stdin.isatty():
        return _answer_lines(generator, color, said)
    usage = (
        f"{generator.invitation}{_longest(root.generation)}.\n"
        "A text of several lines is pasted as a whole. Ctrl-C stops an answer. "
        f"{'' if said is None else f'{RESET} starts another conversation. '}"
        f"To leave: {', '.join(LEAVE)} or Ctrl-D. {HELP} shows this."
    )
    print(usage)
    if color:
        print(f"{color_legend().capitalize()}.")
    with _line_editing(root.interactive.history):
        for text in _typed_texts():
            if text.strip() == HELP:
                print(usage)
            elif said is not None and text.strip() == RESET:
                said.clear()
            else:
                try:
                    _answer(generator, text, color, said)
                except UserError as error:
                    say(PROG, refusal(error))
                except KeyboardInterrupt:
                    tell("(stopped)\n")
    return 0


def _answer_lines(generator: TextGenerator, color: bool, said: list[dict[str, str]] | None) -> int:
    """Answers the lines of a pipe or a file; returns the exit code. Arguments as of `_answer`."""
    code, remarks = 0, Remarks()
    for index, line in enumerate(prompt_lines(sys.stdin.buffer, "standard input")):
        if said is not None and line.strip() == RESET.encode():
            said.clear()
            continue
        try:
            remarks.count(index, _answer(generator, line, color, said))
        except UserError as error:
            code, message = FAILURE, refusal(error)
            if remarks.refuse(index, message):
                say(PROG, f"line {index + 1}: {message}")
    for remark in remarks.lines():
        say(PROG, remark)
    return code


def _longest(generation: GenerationConfig) -> str:
    """How long answers may be, where that is an option."""
    if generation.max_len is None:
        return ""
    return f"; answers have at most {counted(generation.max_len, 'token')} (--max-len)"


def _answer(generator: TextGenerator, line: str | bytes, color: bool, said: list[dict[str, str]] | None) -> EncodedText:
    """Prints the answers to a text, which it returns as the model read it.

    Args:
        said: messages before it, to which it and its answer are added; None: it stands alone.

    Raises:
        UserError: it cannot be answered.
    """
    from ftk_cli.colors import colored_text
    from ftk_cli.records import is_terminal

    text = line if isinstance(line, str) else line_text(line)
    prompt = generator.encode(text, None if said is None else {"messages": said})
    # Text from a pipe is not on the screen yet.
    question = "" if isinstance(line, str) else f"> {_for_stdout(text)}\n"
    if is_terminal():
        result = _answer_in_sight(generator, prompt, question, color)
    else:
        (result,) = generator.generate_encoded([prompt])
        tell(question + (colored_text(result, generator.tokenizer, str) if color else result.text))
    tell(_for_stdout("\n".join(_shown(generator, result))))
    if said is not None:
        said += [{"role": "user", "content": text}, {"role": "assistant", "content": result.text}]
    return prompt


def _answer_in_sight(generator: TextGenerator, prompt: EncodedText, question: str, color: bool) -> TextResult:
    """Prints the text while it is generated, after the question."""
    from ftk_cli.colors import colored_piece

    answered: dict[int, TextAnswer] = {}
    begun = False

    def show(piece: TextPiece) -> None:
        nonlocal begun
        if piece.answer is not None:
            answered[piece.number] = piece.answer
        words = colored_piece(piece, answered, generator.tokenizer) if color else visible(piece.filled)
        tell(words if begun else question + words, end="")
        begun = True

    try:
        (result,) = generator.generate_encoded([prompt], on_piece=show)
    finally:
        if begun:
            tell("")
    return result


def _for_stdout(text: str) -> str:
    """Text as a terminal may be sent it; a pipe gets it as it is."""
    from ftk_cli.records import is_terminal

    return visible(text) if is_terminal() else text


@contextmanager
def _line_editing(path: str) -> Iterator[None]:
    """Gives input() line editing and a history that is kept in a file, and makes a pasted text one input."""
    if importlib.util.find_spec("readline") is None:
        yield
        return
    readline: Any = importlib.import_module("readline")
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_auto_history(True)
    readline.set_history_length(_HISTORY_LENGTH)
    file = os.path.expanduser(path)
    try:
        if file:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600))
            open_regular(file).close()  # readline would wait for a pipe, and read a device to its end
            readline.read_history_file(file)
    except OSError as error:  # no reason not to answer
        print(f"{PROG}: no history: --history {path}: {error.strerror}; '' for none", file=sys.stderr)
        file = ""
    try:
        yield
    finally:
        if file:
            readline.write_history_file(file)


def _typed_texts() -> Iterator[str]:
    """What is typed or pasted, until one leaves."""
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # as in a shell: what was typed is dropped; also one that came too late for an answer
            print("\n(to leave: exit or Ctrl-D)")
            continue
        if text.strip().lower().removeprefix("/") in LEAVE:
            return
        if text.strip():
            yield text


def _shown(generator: TextGenerator, result: TextResult) -> Iterator[str]:
    """Each answer with its probability and those of its tokens, and what else was found."""
    yield from _shown_answers(generator, result)
    for other in result.others:
        yield f"  or {other.text}"
        yield from _shown_answers(generator, other)
    yield ""


def _shown_answers(generator: TextGenerator, result: TextResult) -> Iterator[str]:
    from ftk_cli.records import likeliest_tokens

    if result.score is not None:
        yield f"  all: score {result.score:.4f}"
    for number, answer in enumerate(result.answers, start=1):
        name = "".join(f"{value} = " for value in answer.named.values())
        yield f"  {number}. {name}{_described(answer)}"
        yield from likeliest_tokens(answer, generator.tokenizer)
        for other in answer.others:
            yield f"     or {_described(other)}"
            yield from likeliest_tokens(other, generator.tokenizer)


def _described(answer: TextAnswer) -> str:
    tokens = " ".join(f"{math.exp(logprob):.3f}" for logprob in answer.token_logprobs)
    return f"{answer.text!r}  p = {answer.probability:.3g}  (each: {tokens})"


if __name__ == "__main__":
    raise SystemExit(main())
