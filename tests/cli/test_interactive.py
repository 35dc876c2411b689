"""ftk-interactive, and what a terminal is sent: nothing that steers it."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
import unicodedata
from contextlib import contextmanager

import pytest

from ftk.errors import visible
from ftk_cli import generate, interactive


def test_interactive_reads_a_pipe(ask):
    _, out, err = ask(
        interactive.main, "--path", "run", "--max-len", "3", stdin=b"the [MASK] fox [sMASK] .\n\nshe reads", code=1
    )
    assert err == [
        "ftk-interactive: line 2: the prompt is empty; write a text, with [MASK] where something is missing",
        "ftk-interactive: 1 prompt has no blank and is continued at the end: line 3",
    ]
    asked, filled, first, second, _, asked_last, opened, only, _ = out
    assert (asked, asked_last) == ("> the [MASK] fox [sMASK] .", "> she reads")
    assert filled.startswith("the ")
    assert filled.endswith(" .")
    assert first.startswith("  1. [MASK] = ")
    assert second.startswith("  2. [sMASK] = ")
    assert "p = " in first
    assert opened.startswith("she reads")
    assert only.startswith("  1. [gMASK] = ")


@pytest.mark.parametrize(
    ("options", "color"), [([], "never"), (["--beam", "2"], "always"), (["--blank-order", "2", "--reencode"], "always")]
)
def test_interactive_prints_the_same_as_it_comes_and_at_once(ask, monkeypatch, options, color):
    command = (interactive.main, "--path", "run", "--max-len", "4", "--color", color, *options)
    text = b"the [MASK] fox [MASK] .\n\nshe [MASK]reads"
    code, at_once, _ = ask(*command, stdin=text)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    again, as_it_comes, err = ask(*command, stdin=text)
    assert code == again == 1
    assert "line 2: the prompt is empty" in err[0]
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in as_it_comes] == [
        visible(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in at_once
    ]
    assert ("\x1b[4;3" in "".join(as_it_comes)) == (color == "always")


def test_interactive_does_not_read_an_endless_line(ask):
    _, out, err = ask(
        interactive.main, "--path", "run", "--max-len", "2", stdin=b"x" * 3_000_000 + b"\nthe [MASK]\r\n", code=1
    )
    assert err == [
        "ftk-interactive: line 1: the line is longer than 1048576 bytes; no model reads that much, shorten it"
    ]
    assert out[0] == "> the [MASK]"


def test_interactive_names_misspelt_blanks_and_counts_prompts_without_one(ask):
    text = "the [gmask ] fox\nshe reads\n他在【MASK】工作\nold friends\nthe [MASK]\n".encode()
    _, out, err = ask(interactive.main, "--path", "run", "--max-len", "2", stdin=text, code=1)
    assert [line for line in out if line.startswith("> ")] == ["> she reads", "> old friends", "> the [MASK]"]
    assert err == [
        "ftk-interactive: line 1: '[gmask ]' at character 5 is not a blank; write [gMASK] "
        "(this tokenizer has [MASK], [sMASK], [gMASK]), "
        "or have it read as text with --misspelt-blanks text",
        "ftk-interactive: line 3: '【MASK】' at character 3 is not a blank; write [MASK] "
        "(this tokenizer has [MASK], [sMASK], [gMASK]), "
        "or have it read as text with --misspelt-blanks text",
        "ftk-interactive: 2 prompts have no blank and are continued at the end; the first is line 2",
    ]


def test_misspelt_blanks_are_text_where_that_is_asked_for(ask):
    options = ["--path", "run", "--max-len", "2", "--misspelt-blanks", "text"]
    code, out, err = ask(interactive.main, *options, stdin=b"the <mask> [mask] [MASK]\n")
    assert (code, err) == (0, [])
    assert out[0] == "> the <mask> [mask] [MASK]"
    _, _, err = ask(generate.main, "data-bin", *options, code=2)
    assert err[0].endswith("--misspelt-blanks goes with --input; samples of DATA are read as in training")


def test_interactive_refuses_what_is_for_many_prompts(ask):
    code, out, err = ask(interactive.main, "--path", "run", "--batch-size", "4")
    assert (code, out) == (2, [])
    assert err == ["ftk-interactive: --batch-size is for many prompts; here one is answered at a time, leave it out"]


def test_interactive_shows_n_best_alternatives_and_colors(ask):
    command = "--path run --max-len 2 --beam 2 --nbest 2 --alternatives 3 --color always"
    _, out, _ = ask(interactive.main, *command.split(), stdin=b"the [MASK] fox", code=0)
    assert re.fullmatch(r"the \x1b\[4;3[1236]m.+\x1b\[0m fox", out[1])
    assert sum(line.startswith("     or '") for line in out) == 1
    places = [line for line in out if line.startswith("       token ")]
    assert all(len(re.findall(r" 0\.\d{3}", line)) == 3 for line in places)
    assert 2 <= len(places) <= 6


def test_interactive_on_a_terminal_says_how_to_leave_and_leaves(place, tmp_path):
    history = tmp_path / "history"
    with terminal(place, "--history", str(history)) as (process, master):
        assert "To leave: exit, quit or Ctrl-D" in read_until(master, "> ")
        os.write(master, b"the [MASK] fox\n")
        shown = read_until(master, "\n> ")
        assert "1. [MASK] = " in shown
        assert re.search(r"the \x1b\[4;3[1236]m", shown)  # in colours
        os.write(master, b"/help\n")
        assert "To leave: exit, quit or Ctrl-D" in read_until(master, "\n> ")
        os.write(master, b"/quit\n")
        assert process.wait(timeout=300) == 0
    assert history.read_text().splitlines() == ["the [MASK] fox", "/help", "/quit"]


@pytest.mark.slow
def test_interactive_has_a_history_and_takes_a_paste_as_one_text(place, tmp_path):
    history = tmp_path / "history"
    history.write_text("old [MASK] friends\n")
    with terminal(place, "--history", str(history), "--color", "never") as (process, master):
        read_until(master, "> ")
        os.write(master, b"\x1b[A\n")  # arrow up
        assert "1. [MASK] = " in read_until(master, "\n> ")
        os.write(master, b"\x1b[200~the [MASK] fox\nreads [MASK]\n\x1b[201~\n")
        shown = read_until(master, "\n> ")
        assert "1. [MASK] = " in shown
        assert "2. [MASK] = " in shown
        os.write(master, b"\x04")
        assert process.wait(timeout=300) == 0
    assert history.read_text().splitlines()[:2] == ["old [MASK] friends", "the [MASK] fox"]


def test_interactive_on_a_terminal_prints_answers_as_they_come_and_ctrl_c_stops_one(place, tmp_path):
    command = ("--history", str(tmp_path / "history"), "--max-len", "60", "--min-len", "60", "--color", "never")
    gated = (  # each token waits for a byte
        f"import os; gate = os.open({str(tmp_path / 'gate')!r}, os.O_RDONLY)\n"
        "from ftk.generation.engine.decoder import CachedDecoder as D; step = D.step\n"
        "D.step = lambda self, tokens: (os.read(gate, 1), step(self, tokens))[1]\n"
    )
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR | os.O_NONBLOCK)
    try:
        with terminal(place, *command, first=gated) as (process, master):
            read_until(master, "> ")
            os.write(master, b"the [MASK] fox\n")
            os.write(gate, b"." * 20)
            assert "1. [MASK]" not in read_until(master, "fox\nthe ")
            os.write(gate, b"." * 40)
            assert "  1. [MASK] = " in read_until(master, "\n> ")
            while select.select([gate], [], [], 0)[0]:
                os.read(gate, 100)
            os.write(master, b"the [MASK] fox\n")
            os.write(gate, b"." * 20)
            read_until(master, "fox\nthe ")
            os.write(master, b"\x03")
            assert "(stopped)" in read_until(master, "\n> ")
            os.write(master, b"she reads [MASK]\n")
            os.write(gate, b"." * 60)
            assert "1. [MASK] = " in read_until(master, "\n> ")
            os.write(master, b"quit\n")
            assert process.wait(timeout=300) == 0
    finally:
        os.close(gate)


STEERING = "\x1b]0;owned\x07\x1b[2J\x9b1A\u202e\x7f"
"""Titles, clears, moves the cursor, turns the direction of text."""


@contextmanager
def stdout_on_a_terminal(monkeypatch):
    """Gives a list that holds, at the end, what a terminal in the place of stdout was sent."""
    master, own = pty.openpty()
    shown = []
    with os.fdopen(own, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield shown
        stream.write("END")
        stream.flush()
        shown.append(read_until(master, "END").replace("\r\n", "\n").removesuffix("END"))
    os.close(master)


def outside_of_colors(shown):
    """The control and format characters of a text, but for line ends, tabs and ftk's own colours."""
    plain = re.sub(r"\x1b\[(0|90|4;3[1236])m", "", shown)
    return {one for one in plain if one not in "\n\t" and unicodedata.category(one) in ("Cc", "Cf")}


@pytest.mark.parametrize(
    "options", ["", "--color never", "--output-format json", "--output-format fairseq", "--beam 2 --nbest-over text"]
)
def test_nothing_in_a_prompt_or_an_answer_steers_a_terminal_and_a_pipe_gets_it_as_it_is(ask, monkeypatch, options):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = (generate.main, "--path", "run", "--max-len", "4", "--input", "-", *options.split())
    prompt = f"the {STEERING} [MASK] fox\n".encode()
    _, piped, _ = ask(*command, stdin=prompt)
    with stdout_on_a_terminal(monkeypatch) as shown:
        code, _, _ = ask(*command, stdin=prompt)
    assert code == 0
    assert outside_of_colors(shown[0]) == set()
    if "json" in options:
        assert json.loads(shown[0]) == json.loads("".join(piped))
        assert "\\u009b1A\\u202e\\u007f" in shown[0]
    else:
        start = "S-0\tthe " if "fairseq" in options else "the "
        assert shown[0].startswith(start + r"\x1b]0;owned\x07\x1b[2J\x9b1A\u202e\x7f ")
        assert any(f"the {STEERING}" in line for line in piped)
        assert ("\x1b[4;3" in shown[0]) == (options != "--color never")


@pytest.mark.parametrize("options", ["", "--output-format json"])
def test_what_is_wrong_with_a_line_and_given_answers_do_not_steer_a_terminal(ask, monkeypatch, options):
    lines = f'{{"prompt": "[MASK]", "{STEERING[1:4]}": 1}}\nthe {STEERING} [MASK]\tred {STEERING}\n'.encode()
    with stdout_on_a_terminal(monkeypatch) as shown:
        command = (generate.main, "--path", "run", "--input", "-", *options.split())
        _, _, as_options = ask(*command, "--input-format", "json", stdin=lines)
        _, _, scored = ask(*command, "--score-reference", stdin=lines)
    assert outside_of_colors("".join([*shown, *as_options, *scored])) == set()
    assert "owned" in shown[0]


@pytest.mark.parametrize("color", ["never", "always"])
def test_interactive_does_not_let_a_prompt_or_its_answer_steer_the_terminal(ask, monkeypatch, color):
    command = (interactive.main, "--path", "run", "--max-len", "4", "--color", color, "--beam", "2", "--nbest", "2")
    with stdout_on_a_terminal(monkeypatch) as shown:
        code, _, err = ask(*command, stdin=f"the {STEERING} [MASK] fox [MASK]\n".encode())
    assert (code, err) == (0, [])
    assert outside_of_colors(shown[0]) == set()
    assert shown[0].count("\\x1b]0;owned\\x07") == 2  # the question and the filled text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("", "Is a directory"), ("pipe", "is a pipe, not a regular file")])
def test_a_history_that_cannot_be_read_is_named(place, tmp_path, name, said):
    os.mkfifo(tmp_path / "pipe")
    with terminal(place, "--history", str(tmp_path / name)) as (process, master):
        assert f"no history: --history {tmp_path / name}: {said}" in read_until(master, "\n> ")
        os.write(master, b"exit\n")
        assert process.wait(timeout=300) == 0


@contextmanager
def terminal(place, *arguments, first=""):
    """ftk-interactive on a terminal of its own: the process, and the other end of the terminal.

    `first` is run before; the terminal is the process's own, so that Ctrl-C reaches it.
    """
    master, own = pty.openpty()
    claim = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    program = "import sys; from ftk_cli.interactive import main; sys.exit(main())"
    command = [sys.executable, "-c", claim + first + program]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [*command, "--path", "run", "--max-len", "2", *arguments],
        cwd=place,
        stdin=own,
        stdout=own,
        stderr=own,
        env={**environment, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    os.close(own)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait()
        os.close(master)


def read_until(master, mark, timeout_seconds=600):
    """What the terminal shows until `mark` is there."""
    shown, started, decoder = "", time.monotonic(), codecs.getincrementaldecoder("utf-8")(errors="replace")
    while mark not in re.sub(r"\r|\x1b\[\?2004[hl]", "", shown):
        ready, _, _ = select.select([master], [], [], max(0.0, started + timeout_seconds - time.monotonic()))
        assert ready, shown
        shown += decoder.decode(os.read(master, 4096))
    return shown
