"""ftk-generate --score-reference, on a small checkpoint: answers of a subset, and those beside prompts."""

from __future__ import annotations

import contextlib
import json
import math
import shutil

import pytest
import torch
import yaml

import ftk
from ftk.config.options import options_of
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.tasks.glm_blank import BlankFiller
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.restore import restore_task
from ftk_cli import generate
from tests.checkpoint.conftest import forge_manifest

SCORE = ["--path", "run", "--score-reference"]
FAIRSEQ = [*SCORE, "--input", "-", "--output-format", "fairseq"]


def test_the_sum_over_a_subset_is_the_training_loss(ask, place):
    _, out, err = ask(generate.main, "data-bin", *SCORE, "--max-samples", "9", "--output-format", "json", code=0)
    task, _ = restore_task(place / "run", str(place / "data-bin"))
    samples, model = task.load_split("valid"), ftk.load_model(place / "run")
    for record in map(json.loads, out):
        sample = samples.sample(1, record["id"])
        batch = task.collater()([sample])
        with torch.no_grad():
            loss = CrossEntropy(CrossEntropyConfig())(model, batch).loss
        assert record["candidates"][0]["logprob"] == pytest.approx(-float(loss), rel=1e-4)
    total = sum(json.loads(line)["candidates"][0]["logprob"] for line in out)
    (summary,) = (line for line in err if "scored" in line)
    assert "scored 9 samples" in summary
    assert f"log-probability {total:.4f}" in summary


def test_answers_beside_prompts_as_tabs_and_as_json(ask, place):
    lines = [
        "the quick [MASK] fox [sMASK] .\tbrown\tjumps over",
        json.dumps({"prompt": "the lazy [MASK] while", "candidates": ["dog", ["brown fox"], "dog"]}),
        json.dumps({"prompt": "she reads", "answers": ["long letters"]}),
    ]
    stdin = "\n".join(lines).encode()
    _, out, err = ask(generate.main, *SCORE, "--input", "-", "--output-format", "json", stdin=stdin, code=0)
    first, second, third = map(json.loads, out)
    filler = ftk.load_generator(place / "run")
    (expected,) = filler.score(["the quick [MASK] fox [sMASK] ."], [["brown", "jumps over"]])
    assert [one["logprob"] for one in first["candidates"][0]["answers"]] == pytest.approx(
        [one.logprob for one in expected], abs=1e-4
    )
    assert first["candidates"][0]["logprob"] == pytest.approx(sum(one.logprob for one in expected), abs=1e-4)
    assert [one["answers"][0]["text"] for one in second["candidates"]] == ["dog", "brown fox", "dog"]
    values = [one["logprob"] for one in second["candidates"]]
    assert values[0] == pytest.approx(values[2], abs=1e-4)
    assert values[second["best"]] == max(values)
    assert third["candidates"][0]["answers"][0]["blank"] == "[gMASK]"

    _, text, _ = ask(generate.main, *FAIRSEQ, stdin=stdin)
    kinds = "".join(line[0] for line in text)
    assert kinds == "S" + "HDP" * 2 + "L" + "S" + "HDPL" * 3 + "SHDPL" + "N"
    shown = [float(line.split("\t")[1]) for line in text if line.startswith("L-1\t")]
    assert shown == pytest.approx(values, abs=1e-3)
    (summary,) = (line for line in err if "scored" in line)
    chosen = [one["candidates"][one["best"]] for one in (first, second, third)]
    tokens = sum(len(answer["token_logprobs"]) for one in chosen for answer in one["answers"])
    perplexity = math.exp(-sum(one["logprob"] for one in chosen) / tokens)
    assert f"({tokens} tokens)" in summary
    assert float(summary.split()[-1]) == pytest.approx(perplexity, rel=1e-3)


def test_without_its_end_an_answer_has_one_token_less(ask):
    stdin = b"the lazy [MASK] while\tdog"
    command = [*SCORE, "--input", "-", "--output-format", "json"]
    _, (with_end,), _ = ask(generate.main, *command, stdin=stdin)
    _, (without,), _ = ask(generate.main, *command, "--no-score-end", stdin=stdin)
    ended, open_ended = (json.loads(one)["candidates"][0]["answers"][0] for one in (with_end, without))
    assert len(ended["token_logprobs"]) == len(ended["tokens"]) + 1
    assert open_ended["token_logprobs"] == pytest.approx(ended["token_logprobs"][:-1], abs=1e-5)


def test_bad_lines_are_named_and_the_others_scored(ask):
    lines = [
        "the lazy [MASK]\tdog",
        "",
        "the lazy [MASK]",
        "[MASK] the [MASK]\tdog",
        "{the lazy",
        '{"prompt": "the [MASK]"}',
        '{"prompt": "the [MASK]", "answers": [3]}',
        '{"prompt": "the [MASK]", "candidates": []}',
        "the [MASK]\t" + "dog " * 200,
        "the " * 300 + "\tdog",
        "the \0 [MASK]\t\U0001f469",
    ]
    _, out, err = ask(generate.main, *FAIRSEQ, stdin="\n".join(lines).encode(), code=1)
    assert [line.split("\t")[0] for line in out if line[0] == "S"] == ["S-0", "S-10"]
    problems = [line.split("standard input:")[1] for line in err if "standard input:" in line]
    for problem, start in zip(
        problems,
        (
            "2: there is no answer",
            "3: there is no answer",
            "4: 1 answers for 2 blanks",
            "5: not a JSON object",
            "6: a JSON line needs",
            "7: 'answers' must be a list of texts",
            "8: 'candidates' must be a list",
            "9: an answer is ",
            "10: the prompt is ",
            " 9 lines not scored",
        ),
        strict=True,
    ):
        assert problem.startswith(start)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--path", "run", "--input", "text", "--no-score-end"],
            "--no-score-end has no effect without --score-reference;",
        ),
        (["data-bin", *SCORE, "--no-score-end"], "--no-score-end has no effect without --input;"),
        (["data-bin", *SCORE, "--scoring", "token_f1"], "finds no answers"),
        ([*SCORE, "--input", "nowhere"], "--input nowhere: No such file"),
    ],
)
def test_mistakes_are_named(ask, arguments, message):
    code, out, err = ask(generate.main, *arguments)
    assert (code, out, len(err)) == (2, [], 1)
    assert message in err[0]


ANSWERS = [
    "the quick [MASK] fox [sMASK] .\tbrown\tjumps over",
    "no answer",
    json.dumps({"prompt": "the lazy\t[MASK] while", "candidates": ["dog", ["brown fox"], "dog"]}),
    "[MASK] reads\tshe",
    '{"prompt": "the [MASK]"}',
    json.dumps({"prompt": "she reads", "answers": ["long letters"]}),
] * 2
SOURCES = {"input": ("--input", "answers"), "subset": ("data-bin", "--max-samples", "6")}


@pytest.fixture
def scored(ask, place, tmp_path, monkeypatch):
    """scored(*arguments) -> (code, stdout, stderr); a block is two samples, the results are in tmp_path/results."""
    (place / "answers").write_text("\n".join(ANSWERS) + "\n", encoding="utf-8")
    monkeypatch.setattr(generate, "SCORED_AT_ONCE", 2)

    def call(*arguments):
        results = ("--output-format", "json", "--results-path", str(tmp_path / "results"))
        return ask(generate.main, *SCORE, *arguments, *results)

    return call


def sums(err):
    """The line with the sums."""
    (found,) = (line for line in err if "scored" in line and "log-probability" in line)
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_cut_anywhere_is_continued_to_the_same_bytes(scored, tmp_path, source):
    command = SOURCES[source]
    code, out, err = scored(*command)
    whole, total = (tmp_path / "results").read_bytes(), sums(err)
    assert (code, out) == (1 if source == "input" else 0, [])
    for cut in (0, len(whole) // 2, len(whole) - 1, len(whole)):
        (tmp_path / "results").write_bytes(whole[:cut])
        again, _, err = scored(*command)
        assert again == code
        assert (tmp_path / "results").read_bytes() == whole
        assert cut < len(whole) // 2 or any("of an earlier run" in line for line in err)
        assert sums(err) == total  # what earlier runs have scored is counted
    if source == "input":
        assert err[-1] == "ftk-generate: answers: 4 lines not scored"


def test_an_interruption_leaves_whole_records_and_the_rest_is_scored_once(scored, tmp_path, monkeypatch):
    command = SOURCES["input"]
    scored(*command)
    whole = (tmp_path / "results").read_bytes()
    (tmp_path / "results").unlink()
    blocks, original = [], BlankFiller.score_encoded

    def interrupted(self, prompts, *arguments, **options):
        blocks.append(prompts)
        if len(blocks) == 3:
            raise KeyboardInterrupt
        return original(self, prompts, *arguments, **options)

    monkeypatch.setattr(BlankFiller, "score_encoded", interrupted)
    code, _, err = scored(*command)
    assert (code, err[-1]) == (1, "ftk-generate: interrupted")
    part = (tmp_path / "results").read_bytes()
    assert part.count(b"\n") == 4
    assert whole.startswith(part)
    assert scored(*command)[0] == 1
    assert (tmp_path / "results").read_bytes() == whole
    again = [prompt.prompt for block in blocks[3:] for prompt in block]
    the_last = ["the quick [MASK] fox [sMASK] .", "the lazy\t[MASK] while", "[MASK] reads", "she reads"]
    assert again == ["she reads", *the_last]


def test_other_answers_and_other_settings_are_refused(scored, place):
    command = SOURCES["input"]
    scored(*command)
    code, _, err = scored(*command, "--no-score-end")
    assert code == 2
    assert "score_end was True and is False" in err[0]
    (place / "answers").write_text("\n".join([*ANSWERS[:3], "another [MASK]\tshe", *ANSWERS[4:]]) + "\n")
    code, _, err = scored(*command)
    assert code == 2
    assert "answers:4 is not the prompt that" in err[0]


def test_a_line_that_cannot_be_scored_is_named_in_its_place_or_stops(ask):
    stdin = ("\n".join(ANSWERS[:4]) + "\n" + "x" * 2_000_000 + "\n" + ANSWERS[3]).encode()
    _, out, _ = ask(generate.main, *SCORE, "--input", "-", "--output-format", "json", stdin=stdin, code=1)
    assert [(record["id"], "error" in record) for record in map(json.loads, out)] == [
        *((0, False), (1, True), (2, False), (3, False), (4, True), (5, False))
    ]
    assert json.loads(out[1])["line"] == 2
    assert json.loads(out[4])["error"].startswith("the line is longer than 1048576 bytes")
    _, out, _ = ask(generate.main, *FAIRSEQ, stdin=stdin)
    assert [line.split("\t")[0] for line in out if line[0] in "SE"] == ["S-0", "E-1", "S-2", "S-3", "E-4", "S-5"]
    _, out, err = ask(generate.main, *FAIRSEQ, "--on-error", "stop", stdin=stdin, code=2)
    assert err[-1].startswith("ftk-generate: standard input:2: there is no answer")
    assert [line.split("\t")[0] for line in out if line[0] in "SE"] == ["S-0"]


@pytest.mark.parametrize("source", ["input", "subset"])
def test_the_bar_counts_every_sample_once(scored, monkeypatch, source):
    counts = []

    class Bar(contextlib.nullcontext):
        def update(self, count):
            counts.append(count)

        def set_postfix_str(self, text):
            assert text.endswith(" tokens/s")

    def bar(total, done, unit="prompt"):
        assert (total, done) == ((None, 0) if source == "input" else (6, 0))
        return Bar(Bar())

    monkeypatch.setattr(generate, "progress_bar", bar)
    scored(*SOURCES[source])
    assert sum(counts) == (len(ANSWERS) if source == "input" else 6)
    assert max(counts) <= 2


UNUSED = [
    (option, section)
    for section, config in (("generation", FillConfig), ("processors", ProcessorConfig))
    for option in options_of(section, config)
    if option.name not in ("length_penalty", "truncate", "misspelt_blanks")
]
VALUES = {
    "search": "sampling",
    "early_stopping": "never",
    "nbest_over": "text",
    "blank_order": "confident",
    "forbid_words_file": "text",
    "lm_path": "run",
    "logit_bias": "6=1",
}


@pytest.mark.parametrize("option", [option for option, _ in UNUSED], ids=lambda option: option.name)
def test_each_option_that_scoring_does_not_use_is_refused_by_name(ask, option):
    value = VALUES.get(option.name, "0.25" if option.kind is float else "6")
    words = [option.flag, value]
    if option.kind is bool:
        words = [option.flag.replace("--", "--no-", 1) if option.default else option.flag]
    code, out, err = ask(generate.main, *SCORE, "--input", "-", *words, *TOGETHER_WITH.get(option.name, ()))
    assert (code, out, len(err)) == (2, [], 1)
    refused = err[0].partition("does not use ")[2].partition("; leave")[0].split(", ")
    assert words[0] in refused


TOGETHER_WITH = {
    **dict.fromkeys(["early_stopping", "nbest"], ("--beam", "6")),
    **dict.fromkeys(["diverse_groups", "diversity_strength"], ("--search", "diverse_beam", "--beam", "6")),
    **dict.fromkeys(["temperature", "top_k", "top_p", "min_p", "typical_p", "nbest_over"], ("--sampling",)),
    **dict.fromkeys(["lm_weight", "lm_ends"], ("--lm-path", "run")),
    **dict.fromkeys(["constraint_answers", "ordered_constraints"], ("--constraints", "fox")),
    "repetition_penalty_prompt": ("--repetition-penalty", "2"),
}


def test_what_scoring_uses_may_be_given(ask):
    line = b"the lazy [MASK] while\tdog"
    used = "--length-penalty 0 --truncate left --misspelt-blanks text --on-error stop --max-samples 3 --num-threads 1"
    _, out, _ = ask(generate.main, *FAIRSEQ, *used.split(), stdin=line, code=0)
    score, total = (next(line for line in out if line[0] == kind).split("\t")[1] for kind in "HL")
    assert score == total  # with --length-penalty 0


@pytest.mark.parametrize("words", [("--truncate", "left"), ("--on-error", "stop")])
@pytest.mark.parametrize("what", [(), ("--score-reference",)])
def test_what_is_about_lines_is_refused_with_data(ask, words, what):
    code, out, err = ask(generate.main, "data-bin", "--path", "run", *words, *what)
    assert (code, out, len(err)) == (2, [], 1)
    assert words[0] in err[0]
    assert "--input; " in err[0]


@pytest.mark.parametrize("seed", ["x", [1], -1, 2**70, {"a": 1}])
def test_a_seed_that_no_run_has_is_one_line(ask, place, tmp_path, seed):
    broken = tmp_path / "run"
    shutil.copytree((place / "run").resolve(), broken)
    for folder in (path for path in (broken, *broken.glob("checkpoint_*")) if not path.is_symlink()):
        if (folder / "model").is_dir():
            config = yaml.safe_load((folder / "config.yaml").read_text())
            config["common"] = {**(config.get("common") or {}), "seed": seed}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            forge_manifest(folder)
    _, _, err = ask(generate.main, "data-bin", "--path", str(broken), "--score-reference", code=2)
    assert len(err) == 1 or seed == 2**70
    assert "common" in err[-1] or "config.yaml" in err[-1]
