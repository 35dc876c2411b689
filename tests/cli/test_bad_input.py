"""Bad lines and bad options, with every family of strategies: a clear result or a clear error, and the others go on."""

from __future__ import annotations

import json
import math

import pytest
import torch

import ftk
from ftk_cli import generate, interactive
from tests.small_run import save_model
from tests.tiers import slow_but

FAMILIES = {
    "greedy": (),
    "beam": ("--beam", "3", "--nbest", "2"),
    "sampling": ("--sampling", "--top-p", "0.9", "--nbest", "2"),
    "diverse_beam": ("--search", "diverse_beam", "--beam", "4"),
    "beam_sampling": ("--search", "beam_sampling", "--beam", "3"),
}
HOW = ("--input-format json", "--input-format tabs", "--score-reference")
COMMAND = ("--path", "run", "--output-format", "json", "--max-len", "2")

# A line, and the number of its answers or the beginning of what is said about it. The model has 129 positions.
LINES: list[tuple[bytes, int | str]] = [
    (b"the [MASK] fox", 1),
    (b"", "the prompt is empty; write a text"),
    (b" \t ", "the prompt is empty; write a text"),
    (b"the fox " * 12_500, "the prompt is 87502 tokens long, but the model has positions for 129"),
    (b"x" * (1 << 20) + b" [MASK]", "the line is longer than 1048576 bytes"),
    (b"no blank", 1),
    (b"[MASK]" * 200, "the prompt is 202 tokens long, but the model has positions for 129"),
    (b"[MASK] [sMASK]" * 50, 100),
    (b"a\0b\x01\x7f [MASK]\0", 1),
    ("\u202e\U0001f469\u200d\U0001f467 e\u0301\u0301 [MASK] \ufeff\ud7ff\U0010ffff".encode(), 1),
    (b"\xed\xa0\x80 [MASK]", "not UTF-8 at byte 1 of the line"),  # half a surrogate pair
    (b"the [MASK] \xff", "not UTF-8 at byte 12 of the line"),
    (b"a [MASK]\xc3", "not UTF-8 at byte 9 of the line"),  # half a character
    ("a\u2028b\x0b [MASK]\r".encode(), 1),
    (b"[gMASK] [gMASK]", 2),
    (b"[CLS] </s> <|endofpiece|> {} %s [MASK", 1),
    (b"the [mask] fox", "'[mask]' at character 5 is not a blank; write [MASK] (this tokenizer has"),
    ("他在［MASK］和 [MASK] 。".encode(), "'［MASK］' at character 3 is not a blank; write [MASK] (this"),
    (b"at [MASK] in [GMASK] .", "'[GMASK]' at character 14 is not a blank; write [gMASK] (this"),
    (b"at [MASK] in [gMAKS] .", 1),
    ("【注】 a [1] note [FOO] <b> (mask) （口罩） [MASK]".encode(), 1),
    (b"last [MASK]", 1),
]


@pytest.mark.parametrize("family", slow_but(("diverse_beam",), FAMILIES))
def test_each_bad_line_is_named_by_its_number_and_the_others_are_answered(ask, family):
    command = (generate.main, *COMMAND, "--input", "-", *FAMILIES[family])
    code, out, err = ask(*command, stdin=b"\n".join(line for line, _ in LINES))
    records = [json.loads(line) for line in out]
    assert code == 1
    assert [record["id"] for record in records] == list(range(len(LINES)))
    said = [line.removeprefix("ftk-generate: standard input:") for line in err if "standard input:" in line]
    for number, (record, (_, expected)) in enumerate(zip(records, LINES, strict=True), start=1):
        if isinstance(expected, int):
            assert len(record["answers"]) == expected
        else:
            assert record["line"] == number
            assert record["error"].startswith(expected)
            assert said.pop(0) == f"{number}: {record['error']}"
    assert said == [
        " 2 prompts have no blank and are continued at the end; the first is line 6",
        f" {sum(isinstance(expected, str) for _, expected in LINES)} lines not answered",
    ]

    good = [line for line, expected in LINES if isinstance(expected, int)]
    _, out, _ = ask(*command, stdin=b"\n".join(good), code=0)
    answered = [record for record in records if "answers" in record]
    for alone, among_bad in zip(map(json.loads, out), answered, strict=True):
        assert [one["tokens"] for one in alone["answers"]] == [one["tokens"] for one in among_bad["answers"]]


@pytest.mark.parametrize("family", slow_but(("sampling",), FAMILIES))
def test_hostile_files_as_input(ask, test_data, family):
    files = [path for path in sorted((test_data / "hostile").iterdir()) if path.name != "README.md"]
    assert len(files) > 40
    for path in files:
        with open(path, "rb") as stream:
            lines = [line for line, _ in zip(stream, range(12), strict=False)]
        source = (*COMMAND, "--input", str(path), "--input-format", "text", "--max-samples", "12")
        code, out, err = ask(generate.main, *source, *FAMILIES[family])
        records = [json.loads(line) for line in out]
        assert [record["id"] for record in records] == list(range(len(lines))), path
        for number, (line, record) in enumerate(zip(lines, records, strict=True), start=1):
            expected = what_is_wrong(line)
            if "error" in record:
                assert expected in record["error"], (path, number)
                assert is_said(path, record, err)
            else:
                assert expected == "" or expected == "positions", (path, number)
                assert record["answers"]
        assert code == (1 if any("error" in record for record in records) else 0)
        assert not any("Traceback" in line for line in err)


@pytest.mark.parametrize("how", slow_but(("--input-format tabs",), HOW))
def test_hostile_files_as_lines_with_more_than_a_prompt(ask, test_data, how):
    answered = 0
    for path in sorted((test_data / "hostile").iterdir()):
        with open(path, "rb") as stream:
            count = sum(1 for _ in zip(stream, range(12), strict=False))
        command = COMMAND[:4] if how == "--score-reference" else COMMAND
        source = (*command, "--input", str(path), "--max-samples", "12", *how.split())
        code, out, err = ask(generate.main, *source)
        records = [json.loads(line) for line in out]
        assert [record["id"] for record in records] == list(range(count)), path
        bad = [record for record in records if "error" in record]
        assert code == (1 if bad else 0), (path, err)
        assert all(is_said(path, record, err) for record in bad)
        assert not any("Traceback" in line for line in err)
        answered += len(records) - len(bad)
    assert answered > 0 or how == "--score-reference"  # no file has answers beside its prompts


def is_said(path, record, err):
    """Whether the messages hold a record's error, or that of an earlier line which is like it."""
    return any(
        f"{path}:{record['line']}: {record['error']}" in line or "with the error of line" in line for line in err
    )


def test_one_mistake_in_many_lines_is_said_a_few_times_and_counted(ask):
    lines = ["我喜欢 [MASK]".encode("gbk") for _ in range(40)]
    why = "not UTF-8 at byte 1 of the line; convert the file to UTF-8, e.g. with iconv -f GB18030 -t UTF-8 if it is"
    code, out, err = ask(generate.main, *COMMAND, "--input", "-", stdin=b"\n".join(lines))
    assert (code, len(out), sum(why in line for line in err)) == (1, 40, 5)
    assert "ftk-generate: standard input: 35 more lines with the error of line 1" in err
    assert "ftk-generate: standard input: 40 lines not answered" in err
    code, _, err = ask(interactive.main, "--path", "run", stdin=b"\n".join(lines))
    assert (code, sum(why in line for line in err)) == (1, 5)
    assert err[-1] == "ftk-interactive: 35 more lines with the error of line 1"


def what_is_wrong(line: bytes) -> str:
    """What an error must say; "positions" where only the tokenizer can tell whether there is one."""
    if len(line) > 1 << 20:
        return "longer than"
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    if not text.removeprefix("\ufeff").strip():
        return "is empty"
    return "positions" if len(line) > 60 else ""


@pytest.mark.parametrize("weight", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_weights_that_are_not_finite_are_said_in_one_line_and_answer_nothing(ask, place, weight):
    folder = place / "broken" / "checkpoint_1"
    model = ftk.load_model(place / "run")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name:
                parameter.fill_(weight)
    save_model(folder, model, place / "data-bin" / "tokenizer", task={"_name": "glm_blank", "seq_length": 48})
    prompt, scored = b"the [MASK] fox [MASK]\n", b"the [MASK] fox\tred\n"
    path = ("--path", str(folder))
    calls = [(generate.main, *path, "--input", "-", *family) for family in FAMILIES.values()]
    calls += [
        (generate.main, "data-bin", *path, "--sampling"),
        (generate.main, *path, "--input", "-", "--blank-order", "confident"),
        (generate.main, *path, "--input", "-", "--repetition-penalty", "2"),
        (interactive.main, *path, "--sampling"),
    ]
    for stdin, call in [(prompt, call) for call in calls] + [
        (scored, (generate.main, *path, "--input", "-", "--score-reference", "--output-format", how))
        for how in ("text", "json")
    ]:
        code, out, err = ask(*call, stdin=stdin)
        assert code == (1 if call[0] is interactive.main else 2), call
        assert out == []
        assert len(err) == 1
        assert "its weights may hold NaN" in err[0]


# Options, and what is said at once (exit code 2, one line, nothing answered), or None: all prompts are answered.
_DIVERSE = "--search diverse_beam --beam 4"
OPTIONS: list[tuple[str, str | None]] = [
    ("--beam 1000 --nbest 1000", None),
    ("--search diverse_beam --beam 1000", None),
    ("--search beam_sampling --beam 400", None),
    ("--sampling --top-k 100000", None),
    ("--sampling --top-p 0", "--top-p is 0.0; it must be above 0 and at most 1"),
    ("--sampling --top-p nan", "--top-p is 'nan'; it must be a finite number"),
    ("--search beam_sampling --beam 2 --top-p 0", "--top-p is 0.0"),
    ("--sampling --top-p 1e-300", None),
    ("--sampling --temperature 0", "temperature is 0.0; it must be above 0 and finite"),
    ("--sampling --temperature -1", "temperature is -1.0; it must be above 0 and finite"),
    ("--sampling --temperature nan", "--temperature is 'nan'; it must be a finite number"),
    ("--sampling --temperature 1e-310", None),
    ("--sampling --temperature 1e300", None),
    ("--sampling --typical-p 0", "--typical-p is 0.0"),
    ("--sampling --min-p 2", "--min-p is 2.0; it must be from 0 to 1"),
    ("--beam 2 --nbest 3", "nbest is 3, but beam is 2"),
    ("--nbest 3", "nbest is 3, but greedy search does not use it"),
    ("--search diverse_beam --beam 5", "--diverse-groups is 2, which does not divide beam 5"),
    ("--length-penalty nan", "--length-penalty is 'nan'; it must be a finite number"),
    ("--length-penalty inf --beam 2", "--length-penalty is 'inf'; it must be a finite number"),
    ("--length-penalty 2000", "--length-penalty is 2000.0; it must be from -10 to 10"),
    ("--length-penalty -2000 --beam 2", "--length-penalty is -2000.0; it must be from -10 to 10"),
    ("--length-penalty 10", None),
    ("--length-penalty -10 --beam 2", None),
    (f"{_DIVERSE} --diversity-strength inf", "--diversity-strength is 'inf'; it must be a finite number"),
    (f"{_DIVERSE} --diversity-strength 1e29", "--diversity-strength is 1e+29; it must be from 0 to 1e6"),
    (f"{_DIVERSE} --diversity-strength 1e6", None),
    ("--sampling --seed -5", None),
    ("--alternatives 100000", None),
    ("--beam 0", "--beam is 0; it must be at least 1"),
    ("--search beam --beam 0", "--beam is 0; it must be at least 1"),
    ("--nbest 0", "--nbest is 0; it must be at least 1"),
    ("--beam 3 --nbest 0", "--nbest is 0; it must be at least 1"),
    ("--top-p 0", "--top-p is 0.0; it must be above 0 and at most 1"),
    ("--temperature -1", "--temperature is -1.0; it must be above 0"),
    ("--diverse-groups 0", "--diverse-groups is 0; it must be at least 1"),
    (f"{_DIVERSE} --diverse-groups 0", "--diverse-groups is 0; it must be at least 1"),
    ("--max-len 0", "--max-len is 0; it must be at least 1"),
    ("--max-len -3", "--max-len is -3; it must be at least 1"),
    ("--max-len 5000", "answers of 5000 tokens need 5001 positions within a blank, but the model has 129"),
    ("--batch-size 0", "--batch-size is 0; it must be at least 1"),
    ("--constraints fox --forbid-words fox", "must come, but 'fox' in it is forbidden"),
    ("--constraints fox --stop o", "constraints 'fox' holds 'o', at which an answer stops"),
    ("--constraints lettersofoldfriends --max-len 3", "tokens, but an answer has room for 3; raise --max-len"),
    ("--prefix letters --constraints friends --max-len 8", "it and the constraints need"),
    ("--min-lens 2 --max-lens 1", "answer 1: --min-lens 2 is above --max-lens 1"),
    ("--beam 1000000000", "--beam is 1000000000; it must be at most 10,000"),
    (f"--sampling --nbest {10**15}", f"--nbest is {10**15}; it must be at most 10,000"),
    (f"--search diverse_beam --beam {10**9}", "it must be at most 10,000"),
    (f"--max-len {10**15}", f"--max-len is {10**15}; it must be at most 1,000,000"),
    (f"--max-len {10**30}", f"--max-len is {10**30}; it must be at most 1,000,000"),
    (f"--min-len {10**15}", "it must be from 0 to --max-len 2"),
    (f"--batch-size {10**15}", "it must be at most 1,000,000"),
    (f"--max-samples {10**30}", "it must be at most 1,000,000,000,000,000"),
    (f"--sampling --seed {2**62}", None),
    (f"--sampling --seed {10**50}", "it must be at most 9,223,372,036,854,775,807"),
    (f"--sampling --top-k {10**15}", None),
    (f"--alternatives {10**15}", None),
    (f"--no-repeat-ngram-size {10**15}", "it must be at most 1,000,000"),
    ("--repetition-penalty 1e-308", "--repetition-penalty is 1e-308; it must be from 1e-6 to 1e6"),
    ("--repetition-penalty nan", "--repetition-penalty is 'nan'; it must be a finite number"),
    ("--unk-penalty=-1e29", "--unk-penalty is -1e+29; it must be from -1e+06 to 1e+06, or inf (never)"),
    ("--unk-penalty inf", None),
    (
        f"--constraints fox --constraint-answers {10**9}",
        "--constraint-answers is 1000000000; it must be at most 10,000",
    ),
    (f"--max-lens {','.join(['1'] * 10_001)}", "--max-lens has 10001 entries; at most 10000 answers can be named"),
    (f"--blank-order 1,{'9' * 5000}", "it is left, confident, or numbers from 1 on"),
    ("--lm-path run --lm-weight 1e29", "--lm-weight is 1e+29; it must be from 0 to 1e6"),
    ("--min-len 9 --max-len 3", "--min-len is 9; it must be from 0 to --max-len 3"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[options[:60] for options, _ in OPTIONS])
def test_options_without_a_meaning_are_refused_at_once_and_extreme_ones_answered(ask, options, message):
    prompts = b"the [MASK] fox [sMASK] .\n\nold [MASK]\n"
    code, out, err = ask(generate.main, *COMMAND, "--input", "-", *options.split(), stdin=prompts)
    if message is None:
        assert code == 1  # the empty line
        assert [len(json.loads(line).get("answers", ())) for line in out] == [2, 0, 1]
        assert "standard input:2: the prompt is empty" in err[0]
    else:
        assert (code, out, len(err)) == (2, [], 1)
        assert message in err[0]
