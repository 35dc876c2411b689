"""What all commands share: errors become one clear line and an exit code; signals become a clean stop."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

from ftk.config import compose, section
from ftk.errors import Diverged, LogFormatter, UserError, did_you_mean, is_out_of_memory, visible, with_flags
from ftk.files import reason
from ftk.terminal import in_columns
from ftk_cli import ranks

USER_ERROR = 2
FAILURE = 1
HANG_UP = getattr(signal, "SIGHUP", None)  # not on Windows
TERMINATING = tuple(signum for signum in (signal.SIGTERM, HANG_UP) if signum is not None)
TRACEBACK = "--traceback"

Body = Callable[[list[str]], "int | None"]
C = TypeVar("C")
_LATER = 0.1  # seconds
_MOST_CHARACTERS = 600  # of a message; of longer ones the middle is left out


class Reported(Exception):
    """Raised in place of an error that has been printed; its argument is the exit code."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP as an exception, so that `finally` clauses clean up as on Ctrl-C."""


def run(prog: str, body: Body, argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Args:
        prog: the command's name, with which every message starts.
        body: takes the arguments; returns an exit code, None for 0.
        argv: arguments; None for the process's own. `--traceback` anywhere shows tracebacks of errors.

    Returns:
        0, 2 for a user error (`UserError`), 1 for a failure while running or an interruption.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = TRACEBACK in arguments
    arguments = [argument for argument in arguments if argument != TRACEBACK]
    _set_up_log()
    _escape_what_has_no_code()
    previous = {**_handle_signals(_terminate), **_handle_interrupts()}
    try:
        ranks.check_variables()
        ranks.mute_log()
        try:
            code = body(arguments) or 0
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # here a full disk is an error like others; at the end of the process it is a traceback
        return code
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        _discard_output(sys.stdout)
        return FAILURE
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if argv is None and previous.pop(signal.SIGINT, None) is not None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # this process ends; one more Ctrl-C has no traceback to show
        if previous and ranks.is_distributed():
            # torchrun signals all ranks as soon as one has failed, perhaps while this one reports its own failure or
            # just before it exits: it must end with its own exit code.
            _handle_signals(signal.SIG_IGN)
            if argv is None:
                previous = {}
        return error.args[0] if isinstance(error, Reported) else report(prog, error, show_traceback)
    finally:
        for signum, handler in previous.items():
            if handler is not None:  # None: not set by Python
                signal.signal(signum, handler)


def _set_up_log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.WARNING)  # lists its cache at exit


def _escape_what_has_no_code() -> None:
    """What the encoding of stdout lacks, as GBK some characters, is written as JSON's escapes, valid in JSON, too."""
    codecs.register_error("ftk_escape", _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="ftk_escape")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _handle_signals(handler: Any) -> dict[signal.Signals, Any]:
    """Handle SIGTERM, and SIGHUP unless it is ignored, as under nohup; returns the previous handlers."""
    try:
        return {
            signum: signal.signal(signum, handler)
            for signum in map(signal.Signals, TERMINATING)
            if signum != HANG_UP or signal.getsignal(signum) != signal.SIG_IGN
        }
    except ValueError:  # not the main thread: somebody else owns the signals
        return {}


def _handle_interrupts() -> dict[signal.Signals, Any]:
    """Handle SIGINT where Python does by its own handler; returns that."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return {}
    return {signal.SIGINT: signal.signal(signal.SIGINT, _interrupt)}


def _discard_output(stream: TextIO) -> None:
    """Discard a stream's buffered output, which the end of the process would try to write once more."""
    with contextlib.suppress(OSError, ValueError):  # no file, as in a test
        descriptor = stream.fileno()
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)


def subcommands(prog: str, description: str, commands: dict[str, tuple[str, Body]]) -> Body:
    """A body that runs one of several subcommands, e.g. `ftk-data show ...`.

    Args:
        commands: name -> (one line of help, body).
    """

    def body(argv: list[str]) -> int | None:
        if argv and argv[0] in commands:
            return commands[argv[0]][1](argv[1:])
        return list_commands(prog, description, {name: text for name, (text, _) in commands.items()}, argv)

    return body


def list_commands(
    prog: str, description: str, commands: dict[str, str], argv: Sequence[str], foreign: Mapping[str, str] | None = None
) -> int:
    """What a command of several subcommands does where the arguments name none: help, the version, or an error.

    Args:
        commands: name -> one line of help.
        foreign: names of other programs -> what is written instead.
    """
    from ftk.version import __version__

    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {prog} COMMAND ...\n\n{description}\n\ncommands ({prog} COMMAND --help shows more):")
        print("\n".join(f"  {line}" for line in in_columns(commands.items(), left=(0, 1))))
        return 0 if argv else USER_ERROR
    if argv[0] == "--version":
        print(f"ftk {__version__}")
        return 0
    ours = (foreign or {}).get(argv[0])
    hint = did_you_mean(argv[0], commands) if ours is None else f"in ftk: {prog} {ours}"
    raise UserError(f"unknown command {argv[0]!r}; {hint}")


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag that must be known before all others are read; of several, the last one; None: not given."""
    joined = [word.partition("=")[2] for word in argv if word.startswith(f"{flag}=")]
    following = [value for word, value in zip(argv, argv[1:], strict=False) if word == flag]
    return [*joined, *following][-1] if joined or following else None


def compose_options(config: type[C], prog: str, description: str, argv: Sequence[str]) -> C:
    """The options of a command that has only these; see `ftk.config.compose`.

    Args:
        config: their dataclass.
        prog, description, argv: as for `compose`.
    """
    name = prog.split()[-1].removeprefix("ftk-")
    root = dataclasses.make_dataclass("Root", [(name, config, section("options"))], kw_only=True)
    return getattr(compose(root, prog, description, argv), name)


def describe(error: BaseException) -> str:
    """One line for an error that is not a `UserError`: what failed, on which file."""
    if (memory := _memory_wanted(error)) is not None:
        return (
            f"out of memory{memory}; smaller batches, shorter samples, fewer processes or a smaller model need less "
            f"(--traceback shows where)"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{reason(error)}: {error.filename}" if error.filename else reason(error)
    text = " ".join(str(error).split()) or "no message"
    from ftk.plugins import place_in_plugin

    if len(text) > _MOST_CHARACTERS:  # as that of torch's compiler, which ends in what the C++ compiler said
        text = f"{text[: _MOST_CHARACTERS // 2]} ... {text[-_MOST_CHARACTERS // 2 :]}"
    return f"{type(error).__name__}: {text}{place_in_plugin(error)} (--traceback shows where)"


def _memory_wanted(error: BaseException) -> str | None:
    """For an out-of-memory error: whose memory, and how much was requested; None for any other error."""
    if not is_out_of_memory(error):
        return None
    text = " ".join(str(error).split())
    gpu = " of the GPU" if re.search("CUDA|CUBLAS|HIP", text) else ""
    asked = re.search(r"(?:tried to allocate|Unable to allocate) ([\d.]+ \w+)", text, re.IGNORECASE)
    return gpu + (f" ({asked[1]} were requested)" if asked else "")


def report(prog: str, error: BaseException, show_traceback: bool) -> int:
    """Print what went wrong, once, and return the exit code. Of several ranks the first one that failed prints."""
    code = USER_ERROR if isinstance(error, UserError) else FAILURE
    if isinstance(error, (UserError, Diverged)):
        text = with_flags(str(error))
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, Terminated):
        text = f"terminated ({error})"
    elif isinstance(error, ModuleNotFoundError) and (kernel := _unbuilt(error.name or "")) is not None:
        text = f"{kernel} is not built: install ftk (pip install -e .), or run python setup.py build_ext --inplace"
    else:
        text = describe(error)
    message = ranks.message_to_print(error, text) if ranks.is_distributed() else text
    if message is not None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone, a full disk: the exit code remains
            if show_traceback:
                traceback.print_exception(error)
            print(f"{prog}: {visible(message)}", file=sys.stderr, flush=True)
    if isinstance(error, OSError):
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output(sys.stdout)
    return code


def _unbuilt(name: str) -> Path | None:
    """The source of a kernel of ftk's, of which a checkout has no compiled module; None: it is another module."""
    source = (Path(__file__).resolve().parents[1] / name.replace(".", "/")).with_suffix(".pyx")
    return source if name.startswith("ftk.") and source.is_file() else None


@contextlib.contextmanager
def report_errors(prog: str) -> Iterator[None]:
    """Report an error inside at once, before this process ends and the others fail in turn."""
    try:
        yield
    except BrokenPipeError:  # `run` ends silently
        raise
    except (Exception, KeyboardInterrupt, Terminated) as error:
        raise Reported(report(prog, error, TRACEBACK in sys.argv)) from error


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(signum).name)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """As Python's own handler, but not while torch is being imported, whose C++ aborts at an exception in places."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if not getattr(spec, "_initializing", False):
        raise KeyboardInterrupt
    again = threading.Timer(_LATER, os.kill, (os.getpid(), signum))
    again.daemon = True
    again.start()
