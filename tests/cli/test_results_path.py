"""ftk-generate --results-path: an interrupted run continues where it stopped, and no other command does."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import yaml

from ftk import hub
from ftk.checkpoint import save_checkpoint
from ftk.errors import UserError
from ftk.generation.results import Span, TextAnswer, TextPiece, TextResult
from ftk.models import build_model
from ftk_cli import generate, prompts, results
from ftk_cli.colors import color_legend, colored_piece, colored_text, use_color
from ftk_cli.prompts import Lines, prompt_lines
from ftk_cli.records import one_line
from tests.cli.test_generate_command import ask, place  # noqa: F401  (fixtures)

PROMPTS = [
    "the [MASK] fox",
    "",
    "she\treads [MASK] of [sMASK]",
    "over a lazy",
    "\ufffd rooms [gMASK]",
    "old [MASK] .",
] * 3
INPUT = ("--path", "run", "--input", "prompts", "--max-len", "3", "--batch-size", "1")
SUBSET = ("data-bin", "--path", "run", "--max-samples", "10", "--max-len", "3", "--batch-size", "1")


@pytest.fixture
def generated(ask, place, tmp_path, monkeypatch):  # noqa: F811
    """generated(*arguments) -> (code, stdout, stderr); the results are in tmp_path/results."""
    (place / "prompts").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")

    def call(*arguments):
        return ask(generate.main, *arguments, "--output-format", "json", "--results-path", str(tmp_path / "results"))

    return call


@pytest.mark.parametrize("source", [INPUT, SUBSET], ids=["input", "subset"])
def test_a_file_cut_anywhere_is_continued_to_the_same_bytes(generated, tmp_path, source):
    command = source
    expected_code = 1 if source is INPUT else 0
    code, out, err = generated(*command)
    whole = (tmp_path / "results").read_bytes()
    assert code == expected_code
    assert out == []
    assert whole.count(b"\n") >= 6
    for cut in (0, len(whole) // 2, len(whole) - 1, len(whole)):
        (tmp_path / "results").write_bytes(whole[:cut])
        code, _, err = generated(*command)
        assert code == expected_code
        assert (tmp_path / "results").read_bytes() == whole
        assert cut < len(whole) - 1 or "of an earlier run" in err[-1 if source is SUBSET else -2]
    if source is INPUT:
        assert err[-1] == "ftk-generate: prompts: 3 lines not answered"  # those of earlier runs, too


def test_an_interruption_leaves_whole_records_and_the_rest_is_answered_once(generated, tmp_path, monkeypatch):
    from ftk.tasks.glm_blank import BlankFiller

    command = INPUT
    generated(*command)
    whole = (tmp_path / "results").read_bytes()
    (tmp_path / "results").unlink()
    answered, original = [], BlankFiller.generate_encoded

    def interrupted(self, prompts, *arguments, **options):
        if answered:
            raise KeyboardInterrupt
        answered.extend(prompts)
        return original(self, prompts, *arguments, **options)

    monkeypatch.setattr(BlankFiller, "generate_encoded", interrupted)
    code, _, err = generated(*command)
    assert (code, err[-1]) == (1, "ftk-generate: interrupted")
    assert err[-2].endswith("results has the answers so far; run the same command to continue")
    part = (tmp_path / "results").read_bytes()
    assert part
    assert whole.startswith(part)
    # Begun anew, and interrupted before the first answer: the old answers are still there, and not this command's.
    code, _, err = generated(*command, "--overwrite-results")
    assert (code, err[-1]) == (1, "ftk-generate: interrupted")
    assert "the answers so far" not in "".join(err)
    assert (tmp_path / "results").read_bytes() == part
    answered.clear()
    code, _, err = generated(*command, "--overwrite-results")
    assert err[-2].endswith("run the same command without --overwrite-results to continue")
    monkeypatch.setattr(BlankFiller, "generate_encoded", original)
    _, _, err = generated(*command)
    assert (tmp_path / "results").read_bytes() == whole
    assert f"answered {15 - len(answered)} prompts" in err[-2]
    assert "after 8 of an earlier run" in err[-2]


def test_scores_of_a_continued_run_are_those_of_a_whole_one(generated, tmp_path):
    command = (*SUBSET, "--scoring", "token_f1")
    code, scores, _ = generated(*command)
    lines = (tmp_path / "results").read_text().splitlines(keepends=True)
    (tmp_path / "results").write_text("".join(lines[:2]))
    assert code == 0
    assert generated(*command)[1] == scores
    assert scores[0].startswith("Generate valid with beam=1: token_f1 = ")


def test_more_samples_may_be_asked_for_later(generated, tmp_path):
    generated(*SUBSET[:3], "--max-samples", "2", "--max-len", "3", "--output-format", "json")
    generated(*SUBSET[:3], "--max-samples", "5", "--max-len", "3", "--output-format", "json", "--batch-size", "3")
    records = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [record["id"] for record in records] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--beam", "2"], "was begun with other settings: beam was 1 and is 2"),
        (["--input", "text"], "input was "),
        (["--path", "run:run"], "checkpoint was "),
        (["--forbid-words", "fox"], "forbid_words was [] and is ['fox']"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_lost(generated, tmp_path, change, message):
    generated(*INPUT)
    before, settings = (tmp_path / "results").read_bytes(), (tmp_path / "results.settings.json").read_bytes()
    code, _, err = generated(*INPUT, *change)
    assert code == 2
    assert message in err[0]
    assert err[0].endswith("give another --results-path, or --overwrite-results to start over")
    assert (tmp_path / "results").read_bytes() == before
    assert generated(*INPUT, *change, "--overwrite-results")[0] in (0, 1)
    assert (tmp_path / "results.settings.json").read_bytes() != settings


def test_settings_that_are_gone_count_only_where_they_were_not_the_default(generated, tmp_path):
    generated(*INPUT)
    settings = tmp_path / "results.settings.json"
    content = json.loads(settings.read_text())
    old = {"contrastive_alpha": 0.6, "contrastive_candidates": 4, "in_flight": True}
    settings.write_text(json.dumps(content | old))
    assert "of an earlier run" in "".join(generated(*INPUT)[2])
    settings.write_text(json.dumps(content | old | {"contrastive_candidates": 8}))
    code, _, err = generated(*INPUT)
    assert code == 2
    assert "other settings: contrastive_candidates was 8 and is None;" in err[0]


def test_a_changed_input_a_foreign_file_and_a_folder_are_refused(generated, place, tmp_path):  # noqa: F811
    generated(*INPUT, "--max-samples", "5")
    (place / "prompts").write_text("\n".join(["the [MASK] fox", "", "changed [MASK]", *PROMPTS[3:]]) + "\n")
    code, _, err = generated(*INPUT)
    assert (code, len(err)) == (2, 1)
    assert "prompts:3 is not the prompt that" in err[0]
    (place / "prompts").write_text("the [MASK] fox\n")
    assert "holds more samples than prompts has; was the input changed?" in generated(*INPUT)[2][0]
    (tmp_path / "results").write_text("S-0\tthe [MASK] fox\n")
    assert "results:1 is not the record of sample 0" in generated(*INPUT)[2][0]
    (tmp_path / "results.settings.json").unlink()
    assert "exists without results.settings.json" in generated(*INPUT)[2][0]
    (tmp_path / "results").unlink()
    (tmp_path / "results").mkdir()
    assert "Is a directory" in generated(*INPUT)[2][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--overwrite-results"], "there is no results_path"),
        (["--results-path", "prompts", "--output-format", "json"], "the same file"),
        (["--on-error", "ignore"], "on-error"),
        (
            ["--results-path", "results"],
            "results_path holds JSON Lines, from which a later run can continue",
        ),
        (["--color", "red"], "color"),
        (["--alternatives", "-1"], "alternatives is -1"),
        (["--alternatives", "2", "--score-reference"], "does not use --batch-size, --max-len, --alternatives; leave"),
        (["--color", "always", "--output-format", "json"], "--color: color is always; it goes with text lines"),
    ],
)
def test_options_that_do_not_fit(ask, arguments, message):  # noqa: F811
    code, _, err = ask(generate.main, *INPUT, *arguments)
    assert code == 2
    assert message in err[0]


@pytest.mark.parametrize(
    "mistake",
    [
        ["--input", "nowhere"],
        ["--constraints", "fox", "--forbid-words", "fox"],
        ["--max-len", "500"],
        ["--path", "run:broken"],
        ["--on-error", "stop", "--batch-size", "64"],
    ],
)
def test_a_failed_start_empties_nothing_and_leaves_nothing(generated, place, tmp_path, mistake):  # noqa: F811
    shutil.copytree(place / "run" / "checkpoint_1", place / "broken", dirs_exist_ok=True)
    weights = next((place / "broken" / "model").iterdir())
    weights.write_bytes(weights.read_bytes()[:-5])
    (place / "prompts").write_text("\n" + "\n".join(PROMPTS))
    code, _, err = generated(*INPUT, *mistake)
    assert code in (1, 2), err
    assert list(tmp_path.iterdir()) == []
    assert generated(*INPUT)[0] == 1
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2
    assert generated(*INPUT, *mistake, "--overwrite-results")[0] == code
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert generated(*INPUT, "--overwrite-results")[0] == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["prompts/results", "/proc/results"])
def test_a_file_that_cannot_be_written_is_named_before_the_model_is_loaded(ask, monkeypatch, name):  # noqa: F811
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/proc"))
    monkeypatch.setattr(hub, "load_generator", pytest.fail)
    code, _, err = ask(generate.main, *INPUT, "--output-format", "json", "--results-path", name)
    assert (code, len(err)) == (2, 1)
    assert f"--results-path {name}: " in err[0]
    assert err[0].endswith("; name a file that can be written")


@pytest.mark.parametrize("overwrite", [[], ["--overwrite-results"]])
def test_what_is_no_regular_file_is_refused_without_waiting(ask, monkeypatch, tmp_path, overwrite):  # noqa: F811
    monkeypatch.setattr(hub, "load_generator", pytest.fail)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "results").write_text("")
    (tmp_path / "results.settings.json").mkdir()
    for path, said in (
        ("/dev/full", "is a device, not a regular file"),
        (tmp_path / "pipe", "is a pipe, not a regular file"),
        (tmp_path / "link", "is a device, not a regular file"),
        ("/", "Is a directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "results", "is no regular file"),
    ):
        code, out, err = ask(generate.main, *INPUT, "--output-format", "json", "--results-path", str(path), *overwrite)
        assert (code, out) == (2, [])
        assert err == [f"ftk-generate: --results-path {path}: {said}; name a file that can be written"]


def test_a_link_that_is_named_is_followed(ask, generated, tmp_path):  # noqa: F811
    assert generated(*INPUT)[0] == 1
    whole = (tmp_path / "results").read_bytes()
    (tmp_path / "link").symlink_to("elsewhere")
    for _ in range(2):  # begun, and gone on with
        assert ask(generate.main, *INPUT, "--output-format", "json", "--results-path", str(tmp_path / "link"))[0] == 1
        assert (tmp_path / "elsewhere").read_bytes() == whole
        (tmp_path / "elsewhere").write_bytes(whole[: len(whole) // 2])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link.settings.json").is_file()


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "results.settings.json is not JSON (nested too deeply); give another"),
        ("[1]", "results.settings.json is no JSON object; give another"),
        ("{", "results.settings.json is not JSON ("),
        ("\ufffd", "results.settings.json is not JSON ("),
        ('{"beam": "' + "9" * 100_000 + '"}', "beam was '999"),
    ],
)
def test_settings_that_are_broken_are_named_in_one_short_line(generated, tmp_path, content, message):
    generated(*INPUT)
    (tmp_path / "results.settings.json").write_text(content)
    code, _, err = generated(*INPUT)
    assert (code, len(err)) == (2, 1)
    assert message in err[0]
    assert len(err[0]) < 5000


@pytest.mark.parametrize(
    "record",
    [
        DEEP,
        "[]",
        "null",
        '{"id": 0, "source": 5}',
        '{"id": 0, "source": "a", "answers": 7}',
        '{"id": 0, "source": "a", "answers": [{"text": 1, "reference": "b"}]}',
        '{"id": 0, "source": "a", "best": 0, "candidates": [{"logprob": 1' + "0" * 400 + ', "answers": []}]}',
        '{"id": 0, "source": "a", "best": {}, "candidates": []}',
    ],
)
def test_a_record_that_is_none_is_named_by_its_line(generated, tmp_path, record):
    command = (*INPUT, "--output-format", "json")
    generated(*command)
    (tmp_path / "results").write_text(record + "\n")
    code, _, err = generated(*command)
    assert (code, len(err)) == (2, 1)
    assert "results:1 is not the record of sample 0; give another" in err[0]


def test_a_full_disk_is_one_line_with_the_file_and_what_was_answered_stays(generated, tmp_path, monkeypatch):
    generated(*INPUT)
    whole, written = (tmp_path / "results").read_bytes(), []

    class Full(io.FileIO):
        def write(self, data):
            if written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written.append(data)
            return super().write(data)

    monkeypatch.setattr(results, "open_to_write", lambda path: Full(path, "r+b" if os.path.exists(path) else "w+b"))
    code, out, err = generated(*INPUT, "--overwrite-results")
    assert (code, out) == (1, [])
    assert err[-1] == f"ftk-generate: No space left on device: {tmp_path / 'results'}"
    part = (tmp_path / "results").read_bytes()
    assert whole.startswith(part)
    assert part.endswith(b"\n")


def test_a_full_stdout_is_one_line(place, command):  # noqa: F811
    done = command("ftk-generate", "--path", "run", "--input", "text", cwd=place, stdout=Path("/dev/full"))
    assert done.returncode == 1
    assert done.stderr == "ftk-generate: No space left on device: standard output\n"


def test_no_prompts_give_a_file_without_results(generated, place, tmp_path):  # noqa: F811
    (place / "prompts").write_bytes(b"")
    assert generated(*INPUT)[0] == 0
    assert (tmp_path / "results").read_bytes() == b""
    assert (tmp_path / "results.settings.json").exists()


@pytest.mark.parametrize(("what", "source"), [([], "prompts"), (["--score-reference"], "data-bin")])
def test_fewer_samples_may_be_asked_for_later_and_nothing_is_lost(
    generated,
    place,  # noqa: F811
    tmp_path,
    source,
    what,
):
    (place / "prompts").write_text("\n".join(f"the [MASK] fox {n}\tred" for n in range(9)))
    begin = ["data-bin"] if source == "data-bin" else ["--input", "prompts"]
    command = [*begin, "--path", "run", *what]
    assert generated(*command, "--max-samples", "7")[0] == 0
    whole = (tmp_path / "results").read_bytes()
    for count, said in ((1, "1 sample"), (6, "6 samples")):
        code, out, err = generated(*command, "--max-samples", str(count))
        assert (code, out) == (0, [])
        assert f"after {count} of an earlier run" in "".join(err)
        if what:
            assert f"scored {said} (" in err[-1]
        assert (tmp_path / "results").read_bytes() == whole
    assert generated(*command, "--max-samples", "8")[0] == 0
    longer = (tmp_path / "results").read_bytes()
    assert longer.startswith(whole)
    assert len(longer) > len(whole)


def test_scores_of_fewer_samples_count_only_these(generated, tmp_path):
    command = ("data-bin", "--path", "run", "--max-len", "3", "--scoring", "token_f1")
    generated(*command, "--max-samples", "9")
    records = list(map(json.loads, (tmp_path / "results").read_text().splitlines()))
    for answer in records[-1]["answers"]:
        answer["text"] = answer["reference"] = "right"
    (tmp_path / "results").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    few, many = (generated(*command, "--max-samples", count)[1] for count in ("8", "9"))
    assert few == ["Generate valid with beam=1: token_f1 = 0.00 %"]
    assert float(many[0].split()[-2]) > 0


def test_records_of_more_samples_than_a_split_has_are_refused(generated, tmp_path):
    command = ("data-bin", "--path", "run", "--max-len", "3", "--output-format", "json")
    generated(*command)
    records = (tmp_path / "results").read_text().splitlines()
    more = [json.dumps({**json.loads(records[-1]), "id": len(records) + n}) for n in range(3)]
    (tmp_path / "results").write_text("\n".join([*records, *more]) + "\n")
    code, _, err = generated(*command)
    assert (code, len(err)) == (2, 1)
    assert "holds more samples than the split valid has; was the input changed?" in err[0]


def test_a_run_that_goes_on_saving_does_not_come_between(generated, place, tmp_path, monkeypatch):  # noqa: F811
    run = tmp_path / "saving"
    shutil.copytree(place / "run" / "checkpoint_1", run / "checkpoint_1")
    original = generate.find_checkpoints

    def then_saved(*arguments):
        found = original(*arguments)
        torch.manual_seed(1)
        config = yaml.safe_load((run / "checkpoint_1" / "config.yaml").read_text())
        shape = {name: value for name, value in config["model"].items() if name != "_name"}
        model, tokenizer = build_model("glm", **shape), run / "checkpoint_1" / "tokenizer"
        save_checkpoint(run / "checkpoint_2", model=model, trainer_state={}, config=config, tokenizer_folder=tokenizer)
        return found

    command = ("--input", "prompts", "--max-len", "3", "--output-format", "json")
    monkeypatch.setattr(generate, "find_checkpoints", then_saved)
    for path in (run, f"{run}:{run}"):
        generated("--path", str(path), *command, "--overwrite-results")
        found = (tmp_path / "results").read_bytes()
        settings = json.loads((tmp_path / "results.settings.json").read_text())
        assert {Path(one).name for one in settings["checkpoint"]} == {"checkpoint_1"}
        shutil.rmtree(run / "checkpoint_2")
        monkeypatch.setattr(generate, "find_checkpoints", original)
        generated("--path", str(path), *command, "--overwrite-results")
        assert (tmp_path / "results").read_bytes() == found
        monkeypatch.setattr(generate, "find_checkpoints", then_saved)


def test_errors_stop_if_wanted_behind_the_answers_before_them(ask):  # noqa: F811
    prompts = b"the [MASK] fox\nshe reads\n\nold [MASK]\n"
    code, out, err = ask(generate.main, "--path", "run", "--input", "-", "--on-error", "stop", stdin=prompts)
    assert code == 2
    assert err[-1].startswith("ftk-generate: standard input:3: the prompt is empty")
    assert [line.split("\t")[0] for line in out if line[0] in "SE"] == ["S-0", "S-1"]


def test_errors_in_json_and_lines_that_are_no_prompts(ask):  # noqa: F811
    prompts = b"the [MASK] fox\n" + b"x" * 3_000_000 + b"\n" + b"fox " * 25_000 + b"\nold\0 \xe2\x80\xae[MASK]\n"
    code, out, _ = ask(
        *(generate.main, "--path", "run", "--input", "-", "--output-format", "json", "--max-len", "2"), stdin=prompts
    )
    first, huge, long, odd = map(json.loads, out)
    assert code == 1
    assert (huge["id"], huge["line"]) == (1, 2)
    assert huge["error"].startswith("the line is longer than 1048576 bytes")
    assert "tokens long, but the model has" in long["error"]
    assert first["answers"][0]["text"] is not None
    assert odd["source"] == "old\0 \u202e[MASK]"


def test_steps_are_the_tokens_of_the_best_answers(ask):  # noqa: F811
    command = (generate.main, "--path", "run", "--input", "-", "--max-len", "3", "--print-step")
    _, out, _ = ask(*command, stdin=b"the [MASK] fox [MASK]\n")
    steps = sum(len(line.split("\t")[1].split()) for line in out if line.startswith("P-"))
    assert [line for line in out if line.startswith("I-")] == [f"I-0\t{steps}"]
    _, out, _ = ask(*command, "--output-format", "json", stdin=b"the [MASK] fox [MASK]\n")
    assert json.loads(out[0])["steps"] == steps


def test_memory_does_not_grow_with_the_input(tmp_path):
    path = tmp_path / "many"
    path.write_bytes(b"x" * 500_000 + b"\n" + b"the [MASK] fox\n" * 300_000)
    tracemalloc.start()
    with open(path, "rb") as stream:
        blocks = list(map(len, Lines(generate.GenerateConfig(path="run"), stream).blocks(64)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(blocks) == 300_001
    assert peak < 4_000_000


def test_a_line_without_an_end_is_named_and_not_kept(monkeypatch):
    monkeypatch.setattr(prompts, "_ENDLESS_BYTES", 1 << 24)
    tracemalloc.start()
    with open("/dev/zero", "rb") as stream, pytest.raises(UserError, match="/dev/zero:1: no line end within 16777216"):
        list(prompt_lines(stream, "/dev/zero"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 23  # half of what was read


def test_alternatives_in_both_formats(ask):  # noqa: F811
    command = (generate.main, "--path", "run", "--input", "-", "--max-len", "3", "--alternatives", "2")
    _, text, _ = ask(*command, "--beam", "3", "--nbest", "2", stdin=b"the [MASK] fox [MASK]\n")
    _, out, _ = ask(*command, "--beam", "3", "--nbest", "2", "--output-format", "json", stdin=b"the [MASK] fox [MASK]")
    answers = [one for answer in json.loads(out[0])["answers"] for one in (answer, *answer["others"])]
    assert len(answers) == 4
    for answer in answers:
        assert len(answer["alternatives"]) == len(answer["token_logprobs"])
        for there, logprob in zip(answer["alternatives"], answer["token_logprobs"], strict=True):
            assert len(there) == 2
            assert there[0]["logprob"] >= max(there[1]["logprob"], logprob)
    shown = [
        "A-0\t" + "\t".join(f"{one['text'].replace(' ', '▁')} {one['logprob']:.4f}" for one in there)
        for answer in answers
        for there in answer["alternatives"]
    ]
    assert shown == [line for line in text if line.startswith("A-")]


class WORDS:
    """Tokens as a byte-level tokenizer decodes them."""

    pieces: ClassVar = {7: b" red", 8: b"\nfox", 9: b" \xe2\x82", 10: b"\xac"}

    @classmethod
    def decode(cls, tokens):
        return b"".join(cls.pieces[token] for token in tokens).decode("utf-8", errors="replace")


def test_colors_where_they_are_wanted_and_never_in_a_pipe(ask, monkeypatch):  # noqa: F811
    command = (generate.main, "--path", "run", "--input", "-", "--max-len", "3", "--min-len", "1", "--color")
    prompt = b"the [MASK] fox\n"
    plain = [line for line in ask(*command, "never", stdin=prompt)[1] if line[0] == "F"]
    assert "\x1b" not in plain[0]
    assert [line for line in ask(*command, "auto", stdin=prompt)[1] if line[0] == "F"] == plain  # not a terminal
    (colored,) = [line for line in ask(*command, "always", stdin=prompt)[1] if line[0] == "F"]
    assert re.sub(r"\x1b\[[\d;]+m", "", colored) == plain[0]
    assert re.search(r"^F-0\tthe \x1b\[4;3[1236]m", colored)
    for choice, notes in (("never", 0), ("always", 1)):
        assert sum("probabilities of tokens" in line for line in ask(*command, choice, stdin=prompt)[1]) == notes


@pytest.mark.parametrize(
    ("choice", "environment", "expected"),
    [
        ("auto", {}, True),
        ("auto", {"NO_COLOR": "1"}, False),
        ("auto", {"NO_COLOR": ""}, True),  # https://no-color.org: present and not empty
        ("auto", {"TERM": "dumb"}, False),
        ("always", {"NO_COLOR": "1"}, True),
        ("never", {}, False),
    ],
)
def test_who_decides_about_colors(monkeypatch, choice, environment, expected):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert use_color(choice, SimpleNamespace(isatty=lambda: True)) is expected
    assert use_color("auto", SimpleNamespace(isatty=lambda: False)) is False


@pytest.mark.parametrize(("probability", "color"), [(0.9, 32), (0.6, 36), (0.3, 33), (0.01, 31), (0.0, 31)])
def test_colors_say_how_probable_a_token_of_the_answer_is(probability, color):
    logprob = math.log(probability) if probability else -math.inf
    answer = TextAnswer("red\nfox", [7, 8], [logprob, logprob], logprob)
    result = TextResult("a [MASK] b", "a red\nfox b", [answer], ((2, 9),))
    assert colored_text(result, WORDS, one_line) == f"a \x1b[4;{color}mred\\nfox\x1b[0m b"
    assert colored_text(result, WORDS, str) == f"a \x1b[4;{color}mred\nfox\x1b[0m b"


def test_each_token_has_its_own_color_and_no_character_two():
    logprobs = [math.log(0.9), math.log(0.3), math.log(0.9), math.log(0.1), math.log(0.01)]  # the last: an end token
    answer = TextAnswer("red\nfox €", [7, 8, 9, 10], logprobs, 0.0)
    result = TextResult("a [MASK]", "a red\nfox €", [answer], ((2, 11),))
    # The two halves of the euro sign: the square root of 0.9 times 0.1 is 0.3, as yellow as the fox.
    assert colored_text(result, WORDS, one_line) == "a \x1b[4;32mred\x1b[0m\x1b[4;33m\\nfox €\x1b[0m"
    piece = TextPiece(0, 0, "red\nfox €", [7, 8, 9, 10], logprobs, " red\nfox € b", (Span(0, 10, 0),))
    assert colored_piece(piece, {}, WORDS) == "\x1b[4;32m red\x1b[0m\x1b[4;33m\nfox €\x1b[0m b"
    assert colored_piece(replace(piece, number=1), {0: answer}, WORDS) == colored_piece(piece, {}, WORDS)


def test_the_legend_shows_every_color():
    legend = color_legend()
    assert re.findall(r"\x1b\[4;(\d+)m([^\x1b]+)\x1b\[0m", legend) == [
        *(("32", "0.8 and more"), ("36", "0.5 and more"), ("33", "0.2 and more"), ("31", "less"))
    ]
