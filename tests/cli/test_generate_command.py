"""ftk-generate and ftk-interactive, on a small checkpoint with its tokenizer and a preprocessed folder."""

from __future__ import annotations

import codecs
import io
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
import torch

from ftk import hub
from ftk.checkpoint import save_checkpoint
from ftk.errors import visible
from ftk.models import build_model
from ftk.tokenizers import load_tokenizer
from ftk_cli import generate, interactive, preprocess

SENTENCE = "the quick brown fox jumps over a lazy dog while she reads long letters of old friends in silent rooms"
WORDS = SENTENCE.split()
LINES = [
    " ".join(WORDS[(start + step * stride) % len(WORDS)] for step in range(30)) + " ."
    for start in range(8)
    for stride in (1, 3, 7)
]
SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 128}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data-bin/ (train and valid), other-bin/ (another tokenizer) and run/ (a checkpoint)."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text").write_text("\n".join(LINES) + "\n")
    for name, size in (("data-bin", "290"), ("other-bin", "285")):
        source = f"--trainpref {folder}/text --validpref {folder}/text --destdir {folder / name}"
        code = preprocess.main(
            [*source.split(), "--tokenizer", "sentencepiece", "--vocab-size", size, "--special-tokens", "glm"]
        )
        assert code == 0
    tokenizer = load_tokenizer(folder / "data-bin")
    shape = {"vocab_size": tokenizer.padded_vocab_size(), **SHAPE}
    torch.manual_seed(0)
    save_checkpoint(
        folder / "run" / "checkpoint_1",
        model=build_model("glm", **shape),
        trainer_state={},
        config={"model": {"_name": "glm", **shape}, "task": {"_name": "glm_blank", "seq_length": 48}},
        tokenizer_folder=folder / "data-bin" / "tokenizer",
    )
    return folder


@pytest.fixture
def ask(place, capsys, monkeypatch):
    """ask(main, *arguments, stdin=bytes) -> (exit code, lines of stdout, lines of stderr); relative to the folder."""
    monkeypatch.chdir(place)

    def call(main, *arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


def test_a_subset_is_printed_in_fairseqs_lines(ask):
    code, out, _ = ask(
        generate.main,
        "data-bin",
        "--path",
        "run",
        "--max-samples",
        "5",
        "--max-len",
        "4",
        "--scoring",
        "exact_match,token_f1",
    )
    assert code == 0
    notes, scores = [line for line in out if line.startswith("NOTE")], out[-2:]
    assert len(notes) == 1
    assert "natural logarithm" in notes[0]
    assert scores[0].startswith("Generate valid with beam=1: exact_match = ")
    assert scores[1].startswith("Generate valid with beam=1: token_f1 = ")
    lines = [line.split("\t") for line in out[:-3]]
    assert {line[0] for line in lines if line[0].startswith("S-")} == {f"S-{index}" for index in range(5)}
    for index in range(5):
        own = [line for line in lines if line[0].split("-")[1] == str(index)]
        kinds = "".join(line[0][0] for line in own)
        assert kinds == "S" + "THDP" * (len(kinds) // 4)
        assert own[0][1].count("MASK]") == len(kinds) // 4
        for reference, tokens, text, logprobs in zip(own[1::4], own[2::4], own[3::4], own[4::4], strict=True):
            assert reference[1]
            assert float(tokens[1]) == float(text[1])
            values = [float(value) for value in logprobs[1].split()]
            assert len(values) - len(tokens[2].split()) in (0, 1)
            assert float(tokens[1]) == pytest.approx(sum(values) / len(values), abs=1e-3)


def test_json_holds_the_same_as_text_and_only_json_is_on_stdout(ask):
    _, text, _ = ask(generate.main, "data-bin", "--path", "run", "--max-samples", "4", "--beam", "3")
    code, out, err = ask(
        generate.main,
        "data-bin",
        "--path",
        "run",
        "--max-samples",
        "4",
        "--beam",
        "3",
        "--output-format",
        "json",
        "--scoring",
        "token_f1",
    )
    assert code == 0
    records = [json.loads(line) for line in out]
    assert [record["id"] for record in records] == [0, 1, 2, 3]
    assert [f"S-{record['id']}\t{record['source']}" for record in records] == [one for one in text if one[0] == "S"]
    shown = [
        f"D-{record['id']}\t{answer['score']:.4f}\t{answer['text']}"
        for record in records
        for answer in record["answers"]
    ]
    assert shown == [line for line in text if line[0] == "D"]
    assert any("token_f1 = " in line for line in err)


def test_references_are_what_the_documents_hold(ask):
    _, out, _ = ask(
        generate.main, "data-bin", "--path", "run", "--max-samples", "8", "--output-format", "json", "--max-len", "1"
    )
    assert len(out) == 8
    for record in map(json.loads, out):
        whole = record["source"]
        for answer in record["answers"]:
            whole = whole.replace(answer["blank"], f" {answer['reference']} ", 1)
        assert "".join(whole.replace("<|endoftext|>", "").replace("[CLS]", "").split()) in "".join(LINES * 2).replace(
            " ", ""
        )


def test_the_answers_do_not_depend_on_the_batch(ask):
    command = ["data-bin", "--path", "run", "--max-samples", "6", "--output-format", "json", "--batch-size"]
    _, one, _ = ask(generate.main, *command, "1")
    _, many, _ = ask(generate.main, *command, "64")
    assert len(one) == len(many) == 6
    for left, right in zip(map(json.loads, one), map(json.loads, many), strict=True):
        for alone, together in zip(left["answers"], right["answers"], strict=True):
            assert alone["tokens"] == together["tokens"]
            assert alone["token_logprobs"] == pytest.approx(together["token_logprobs"], abs=1e-5)


@pytest.mark.parametrize("name", ["70_copa_bad.jsonl", "71_wic_bad_offsets.jsonl", "73_multirc_empty.jsonl"])
def test_rows_of_a_task_file_are_answered_as_the_text_they_are_or_named(ask, test_data, name):
    source = test_data / "hostile" / name
    if not source.exists():
        pytest.skip(f"{source} is missing")
    rows = source.read_text(encoding="utf-8").splitlines()
    code, out, err = ask(
        generate.main, "--path", "run", "--input", str(source), "--input-format", "text", "--max-len", "3"
    )
    named = {number for number in range(len(rows)) for line in err if f"{source}:{number + 1}: the prompt is" in line}
    answered = {int(line.split("\t")[0][2:]) for line in out if line.startswith("S-")}
    assert answered | named == set(range(len(rows)))
    assert not answered & named
    assert {int(line.split("\t")[0][2:]) for line in out if line.startswith("E-")} == named
    assert code == (1 if named else 0)
    assert not any("Traceback" in line for line in err)


def test_bad_lines_are_named_by_number_and_the_others_answered(ask):
    lines = [
        b"the [MASK] fox",
        b"",
        b"\xff\xfe",
        b"she reads",
        b"the fox " * 200,
        b"a\0b [sMASK] [MASK]",
        b"   ",
    ]
    code, out, err = ask(generate.main, "--path", "run", "--input", "-", "--max-len", "3", stdin=b"\n".join(lines))
    assert code == 1
    assert [line.split("\t")[0] for line in out if line[0] in "SE"] == ["S-0", "E-1", "E-2", "S-3", "E-4", "S-5", "E-6"]
    assert next(line for line in out if line[0] == "E").startswith("E-1\tline 2: the prompt is empty")
    assert [line.split("\t")[0] for line in out if line[0] == "S"] == ["S-0", "S-3", "S-5"]
    assert [line.split("\t")[0] for line in out if line[0] == "F"] == ["F-0", "F-3", "F-5"]
    problems = [line.split("standard input:")[1] for line in err if "standard input:" in line]
    assert problems[0].startswith("2: the prompt is empty")
    assert problems[1].startswith("3: not UTF-8 at byte 1")
    assert problems[2].startswith("5: the prompt is")
    assert "positions" in problems[2]
    assert problems[3].startswith("7: the prompt is empty")
    assert problems[4] == " 1 prompt has no blank and is continued at the end: line 4"
    assert problems[5] == " 4 lines not answered"
    assert any(line.startswith("ftk-generate: answered 3 prompts (") and "tokens/s" in line for line in err)


def test_prompts_from_a_file_keep_their_own_text(ask, place):
    (place / "prompts").write_text("the [MASK] fox\nThe  Lazy\tdog [gMASK]\n")
    code, out, _ = ask(generate.main, "--path", "run", "--input", "prompts", "--output-format", "json")
    records = [json.loads(line) for line in out]
    assert code == 0
    assert [record["source"] for record in records] == ["the [MASK] fox", "The  Lazy\tdog [gMASK]"]
    assert records[1]["text"].startswith("The  Lazy\tdog ")
    assert [len(record["answers"]) for record in records] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "nowhere", "--input", "text"], "nowhere"),
        (["--path", "data-bin", "--input", "text"], "holds no checkpoint"),
        (["--path", "run", "--input", "nowhere"], "--input nowhere: No such file"),
        (["--path", "run", "--input", "run"], "--input run: Is a directory"),
        (["--path", "run"], "a preprocessed folder or --input FILE"),
        (["data-bin", "--path", "run", "--input", "text"], "a preprocessed folder or --input FILE"),
        (["nowhere", "--path", "run"], "nowhere: no such data folder"),
        (["other-bin", "--path", "run"], "other-bin was made with another tokenizer"),
        (
            ["data-bin", "--path", "run", "--gen-subset", "test"],
            "data-bin has no split 'test'; there are: train, valid",
        ),
        (["data-bin", "--path", "run", "--scoring", "bleu"], "scoring is 'bleu'; there are: exact_match"),
        (["--path", "run", "--input", "text", "--scoring", "token_f1"], "needs reference answers"),
        (["data-bin", "--path", "run", "--top-k", "5"], "sampling is off"),
        (["data-bin", "--path", "run", "--max-len", "500"], "--max-len can be at most 12"),
        (["data-bin", "--path", "run", "--bean", "5"], "did you mean --beam"),
        (["data-bin"], "--path"),
    ],
)
def test_mistakes_are_one_clear_line_and_code_2(ask, arguments, message):
    code, out, err = ask(generate.main, *arguments)
    assert code == 2
    assert out == []
    assert len(err) == 1
    assert err[0].startswith("ftk-generate: ")
    assert message in err[0]
    assert "valid-subset" not in err[0]  # an option of training


@pytest.mark.parametrize(
    ("command", "path"), [("generate", "run"), ("generate", "run:run"), ("interactive", "run"), ("generate", "lm")]
)
def test_answers_longer_than_the_positions_are_refused_before_weights_are_read(ask, place, monkeypatch, command, path):
    shape = {"vocab_size": load_tokenizer(place / "data-bin").padded_vocab_size(), **SHAPE, "max_positions": 6000}
    if path == "lm":
        save_checkpoint(
            place / "long",
            model=build_model("glm", **shape),
            trainer_state={},
            config={"model": {"_name": "glm", **shape}},
            tokenizer_folder=place / "data-bin" / "tokenizer",
        )
    monkeypatch.setattr(hub, "load_model", pytest.fail)
    paths = ["--path", "long", "--lm-path", "run"] if path == "lm" else ["--path", path]
    main, source = (interactive.main, ()) if command == "interactive" else (generate.main, ("--input", "-"))
    code, out, err = ask(main, *paths, *source, "--max-len", "5000", stdin=b"the [MASK]\n")
    assert (code, out, len(err)) == (2, [], 1)
    assert "answers of 5000 tokens need 5001 positions within a blank, but the model has 129" in err[0]
    assert err[0].endswith("--max-len can be at most 128")


def test_a_checkpoint_without_a_tokenizer_is_named(ask, place):
    shape = {"vocab_size": 128, **SHAPE}
    save_checkpoint(
        place / "bare",
        model=build_model("glm", **shape),
        trainer_state={},
        config={"model": {"_name": "glm", **shape}},
        tokenizer_folder=None,
    )
    code, _, err = ask(generate.main, "--path", "bare", "--input", "text")
    assert code == 2
    assert len(err) == 1
    assert "tokenizer" in err[0]


def test_interactive_reads_a_pipe(ask):
    code, out, err = ask(
        interactive.main, "--path", "run", "--max-len", "3", stdin=b"the [MASK] fox [sMASK] .\n\nshe reads"
    )
    assert code == 1
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
    code, out, err = ask(
        interactive.main, "--path", "run", "--max-len", "2", stdin=b"x" * 3_000_000 + b"\nthe [MASK]\r\n"
    )
    assert code == 1
    assert err == [
        "ftk-interactive: line 1: the line is longer than 1048576 bytes; no model reads that much, shorten it"
    ]
    assert out[0] == "> the [MASK]"


def test_interactive_names_misspelt_blanks_and_counts_prompts_without_one(ask):
    text = "the [gmask ] fox\nshe reads\n他在【MASK】工作\nold friends\nthe [MASK]\n".encode()
    code, out, err = ask(interactive.main, "--path", "run", "--max-len", "2", stdin=text)
    assert code == 1
    assert [line for line in out if line.startswith("> ")] == ["> she reads", "> old friends", "> the [MASK]"]
    assert err == [
        "ftk-interactive: line 1: '[gmask ]' at character 5 is no blank; write [gMASK] "
        "(this tokenizer has [MASK], [sMASK], [gMASK]), "
        "or have it read as text with --misspelt-blanks text",
        "ftk-interactive: line 3: '【MASK】' at character 3 is no blank; write [MASK] "
        "(this tokenizer has [MASK], [sMASK], [gMASK]), "
        "or have it read as text with --misspelt-blanks text",
        "ftk-interactive: 2 prompts have no blank and are continued at the end; the first is line 2",
    ]


def test_misspelt_blanks_are_text_where_that_is_asked_for(ask):
    options = ["--path", "run", "--max-len", "2", "--misspelt-blanks", "text"]
    code, out, err = ask(interactive.main, *options, stdin=b"the <mask> [mask] [MASK]\n")
    assert (code, err) == (0, [])
    assert out[0] == "> the <mask> [mask] [MASK]"
    code, _, err = ask(generate.main, "data-bin", *options)
    assert code == 2
    assert err[0].endswith("--misspelt-blanks goes with --input; samples of DATA are read as in training")


def test_interactive_refuses_what_is_for_many_prompts(ask):
    code, out, err = ask(interactive.main, "--path", "run", "--batch-size", "4")
    assert (code, out) == (2, [])
    assert err == ["ftk-interactive: --batch-size is for many prompts; here one is answered at a time, leave it out"]


def test_interactive_shows_n_best_alternatives_and_colors(ask):
    command = (
        interactive.main,
        "--path",
        "run",
        "--max-len",
        "2",
        "--beam",
        "2",
        "--nbest",
        "2",
        "--alternatives",
        "3",
    )
    code, out, _ = ask(*command, "--color", "always", stdin=b"the [MASK] fox")
    assert code == 0
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
        os.write(master, b"quit\n")
        assert process.wait(timeout=300) == 0
    assert history.read_text().splitlines() == ["the [MASK] fox", "quit"]


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
    plain = re.sub(r"\x1b\[(0|4;3[1236])m", "", shown)
    return {one for one in plain if one not in "\n\t" and unicodedata.category(one) in ("Cc", "Cf")}


@pytest.mark.parametrize("options", ["", "--color never", "--output-format json", "--beam 2 --nbest-over text"])
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
        assert r"S-0	the \x1b]0;owned\x07\x1b[2J\x9b1A\u202e\x7f [MASK] fox".replace(r"\t", "\t") in shown[0]
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
