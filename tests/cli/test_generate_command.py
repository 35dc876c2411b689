"""ftk-generate and ftk-interactive, on a small checkpoint with its tokenizer and a preprocessed folder."""

from __future__ import annotations

import json
import re

import pytest

from ftk import hub
from ftk_cli import generate, interactive
from tests.small_run import LINES, SHAPE, save_run


def test_a_subset_is_printed_in_fairseqs_lines(ask):
    command = "data-bin --path run --max-samples 5 --max-len 4 --scoring exact_match,token_f1 --output-format fairseq"
    _, out, _ = ask(generate.main, *command.split(), code=0)
    notes, scores = [line for line in out if line.startswith("NOTE")], out[-2:]
    assert len(notes) == 1
    assert "natural logarithm" in notes[0]
    assert scores[0].startswith("Generate valid with beam=1: exact_match = ")
    assert scores[1].startswith("Generate valid with beam=1: token_f1 = ")
    lines = [line.split("\t") for line in out[:-3]]
    assert {line[0] for line in lines if line[0].startswith("S-")} == {f"S-{index}" for index in range(5)}
    for index in range(5):
        own = [line for line in lines if line[0].split("-")[1].split(".")[0] == str(index)]
        kinds = "".join(line[0][0] for line in own)
        assert kinds == "S" + "THDP" * (len(kinds) // 4)
        blanks = own[0][1].count("MASK]")
        assert blanks == len(kinds) // 4
        places = [str(index)] if blanks == 1 else [f"{index}.{blank}" for blank in range(blanks)]
        assert [line[0][2:] for line in own[1:]] == [place for place in places for _ in range(4)]
        for reference, tokens, text, logprobs in zip(own[1::4], own[2::4], own[3::4], own[4::4], strict=True):
            assert reference[1]
            assert float(tokens[1]) == float(text[1])
            values = [float(value) for value in logprobs[1].split()]
            assert len(values) - len(tokens[2].split()) in (0, 1)
            assert float(tokens[1]) == pytest.approx(sum(values) / len(values), abs=1e-3)


def test_json_holds_the_same_as_text_and_only_json_is_on_stdout(ask):
    command = ["data-bin", "--path", "run", "--max-samples", "4", "--beam", "3"]
    _, text, _ = ask(generate.main, *command, "--output-format", "fairseq")
    _, out, err = ask(generate.main, *command, "--output-format", "json", "--scoring", "token_f1", code=0)
    records = [json.loads(line) for line in out]
    assert [record["id"] for record in records] == [0, 1, 2, 3]
    assert [f"S-{record['id']}\t{record['source']}" for record in records] == [one for one in text if one[0] == "S"]
    shown = [f"{answer['score']:.4f}\t{answer['text']}" for record in records for answer in record["answers"]]
    assert shown == [line.split("\t", 1)[1] for line in text if line[0] == "D"]
    assert any("token_f1 = " in line for line in err)


def test_samples_are_shown_as_texts_with_their_answers_and_what_stood_there(ask):
    command = ["data-bin", "--path", "run", "--max-samples", "6", "--max-len", "3"]
    records = [json.loads(line) for line in ask(generate.main, *command, "--output-format", "json")[1]]
    _, out, _ = ask(generate.main, *command, "--color", "always", code=0)
    assert out.pop().startswith("NOTE: colours are the probabilities of tokens")
    plain, texts = ask(generate.main, *command)[1], []
    for record in records:
        answers = record["answers"]
        texts.append(out[0])
        for number, (answer, line, unscored) in enumerate(zip(answers, out[1:], plain[1:], strict=False), start=1):
            told = f"  {number}. {answer['text']!r}  (reference: {answer['reference']!r})"
            assert (line, unscored) == (f"{told}  \x1b[90m{answer['score']:.4f}\x1b[0m", told)
        assert texts[-1].count("\x1b[4;3") >= sum(bool(answer["text"].strip()) for answer in answers)
        before = re.escape(record["source"].split(answers[0]["blank"])[0])
        assert re.match(before, plain[0])
        del out[: len(answers) + 1], plain[: len(answers) + 1]
    assert (out, plain) == ([], [])


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
        *(generate.main, "--path", "run", "--input", str(source), "--input-format", "text", "--max-len", "3"),
        *("--output-format", "fairseq"),
    )
    named = {number for number in range(len(rows)) for line in err if f"{source}:{number + 1}: the prompt is" in line}
    answered = {int(line.split("\t")[0][2:]) for line in out if line.startswith("S-")}
    assert answered | named == set(range(len(rows)))
    assert not answered & named
    assert {int(line.split("\t")[0][2:]) for line in out if line.startswith("E-")} == named
    assert code == (1 if named else 0)
    assert not any("Traceback" in line for line in err)


def test_bad_lines_are_named_by_number_and_the_others_answered(ask):
    lines = [b"the [MASK] fox", b"", b"\xff\xfe", b"she reads", b"the fox " * 200, b"a\0b [sMASK] [MASK]", b"   "]
    command = (generate.main, "--path", "run", "--input", "-", "--max-len", "3")
    _, texts, _ = ask(*command, stdin=b"\n".join(lines))
    _, out, err = ask(*command, "--output-format", "fairseq", stdin=b"\n".join(lines), code=1)
    assert [line.split("\t")[0] for line in out if line[0] in "SE"] == ["S-0", "E-1", "E-2", "S-3", "E-4", "S-5", "E-6"]
    assert next(line for line in out if line[0] == "E").startswith("E-1\tline 2: the prompt is empty")
    filled = dict(line.split("\t", 1) for line in out if line[0] == "F")
    assert list(filled) == ["F-0", "F-3", "F-5"]
    assert texts == [filled.get(f"F-{number}", "") for number in range(7)]  # line n is of prompt n
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
        (["nowhere", "--path", "run"], "--destdir nowhere; prompts are given by --input FILE (- for standard input)"),
        (["--path", "run", "--prompt", "a [MASK]"], "unknown flag --prompt; in ftk: --input FILE (one prompt per line"),
        (["--model", "run"], "unknown flag --model; in ftk: --path FOLDER"),
        (["other-bin", "--path", "run"], "other-bin was made with another tokenizer"),
        (
            ["data-bin", "--path", "run", "--gen-subset", "test"],
            "data-bin has no split 'test'; there are: train, valid",
        ),
        (["data-bin", "--path", "run", "--scoring", "meteor"], "scoring is 'meteor'; there are: "),
        (["data-bin", "--path", "run", "--scoring", "blue"], "scoring is 'blue'; did you mean 'bleu'? there are: "),
        (["data-bin", "--path", "run", "--scoring", "em x=1"], "scoring is 'em x=1'; in ftk: exact_match"),
        (["data-bin", "--path", "run", "--scoring", "rouge x=1"], "unknown option --scoring: rouge.x"),
        (["--path", "run", "--input", "text", "--scoring", "token_f1"], "needs reference answers"),
        (["data-bin", "--path", "run", "--top-k", "5"], "sampling is off"),
        (["data-bin", "--path", "run", "--max-len", "500"], "--max-len can be at most 12"),
        (["data-bin", "--path", "run", "--bean", "5"], "did you mean --beam"),
        (["data-bin"], "--path"),
    ],
)
def test_mistakes_are_one_clear_line_and_code_2(ask, arguments, message):
    _, out, err = ask(generate.main, *arguments, code=2)
    assert out == []
    assert len(err) == 1
    assert err[0].startswith("ftk-generate: ")
    assert message in err[0]
    assert "valid-subset" not in err[0]  # an option of training


@pytest.mark.parametrize(
    ("command", "path"), [("generate", "run"), ("generate", "run:run"), ("interactive", "run"), ("generate", "lm")]
)
def test_answers_longer_than_the_positions_are_refused_before_weights_are_read(ask, place, monkeypatch, command, path):
    if path == "lm":
        save_run(place / "long", place / "data-bin", max_positions=6000)
    monkeypatch.setattr(hub, "load_model", pytest.fail)
    paths = ["--path", "long", "--lm-path", "run"] if path == "lm" else ["--path", path]
    main, source = (interactive.main, ()) if command == "interactive" else (generate.main, ("--input", "-"))
    code, out, err = ask(main, *paths, *source, "--max-len", "5000", stdin=b"the [MASK]\n")
    assert (code, out, len(err)) == (2, [], 1)
    assert "answers of 5000 tokens need 5001 positions within a blank, but the model has 129" in err[0]
    assert err[0].endswith("--max-len can be at most 128")


def test_a_checkpoint_without_a_tokenizer_is_named(ask, place):
    save_run(place / "bare", None, vocab_size=128, **SHAPE)
    _, _, err = ask(generate.main, "--path", "bare", "--input", "text", code=2)
    assert len(err) == 1
    assert "tokenizer" in err[0]
