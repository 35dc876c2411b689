"""ftk-generate --results-path: an interrupted run continues where it stopped, and no other command does."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from ftk import hub
from ftk_cli import generate, results
from tests.small_run import save_run

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
def generated(ask, place, tmp_path, monkeypatch):
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
    assert err[-2].endswith(f"Partial results are in {tmp_path / 'results'}; run the same command to continue.")
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
    assert err[-2].endswith("run the same command without --overwrite-results to continue.")
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


def test_a_changed_input_a_foreign_file_and_a_folder_are_refused(generated, place, tmp_path):
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
        (["--overwrite-results"], "--overwrite-results has no effect without --results-path"),
        (["--results-path", "prompts", "--output-format", "json"], "the same file"),
        (["--on-error", "ignore"], "on-error"),
        (["--results-path", "results"], "--results-path holds JSON Lines, from which a later run can continue"),
        (["--color", "red"], "color"),
        (["--alternatives", "-1"], "alternatives is -1"),
        (["--alternatives", "2", "--score-reference"], "does not use --batch-size, --max-len, --alternatives; leave"),
        (["--color", "always", "--output-format", "json"], "--color is always, but no texts with"),
    ],
)
def test_options_that_do_not_fit(ask, arguments, message):
    _, _, err = ask(generate.main, *INPUT, *arguments, code=2)
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
def test_a_failed_start_empties_nothing_and_leaves_nothing(generated, place, tmp_path, mistake):
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
def test_a_file_that_cannot_be_written_is_named_before_the_model_is_loaded(ask, monkeypatch, name):
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/proc"))
    monkeypatch.setattr(hub, "load_generator", pytest.fail)
    code, _, err = ask(generate.main, *INPUT, "--output-format", "json", "--results-path", name)
    assert (code, len(err)) == (2, 1)
    assert f"--results-path {name}: " in err[0]
    assert err[0].endswith("; name a file that can be written")


@pytest.mark.parametrize("overwrite", [[], ["--overwrite-results"]])
def test_what_is_no_regular_file_is_refused_without_waiting(ask, monkeypatch, tmp_path, overwrite):
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


def test_a_link_that_is_named_is_followed(ask, generated, tmp_path):
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


def test_a_full_stdout_is_one_line(place, command):
    (place / "short").write_text("the quick [MASK] fox\n")  # lines of `text` may be longer than the model reads
    done = command("ftk-generate", "--path", "run", "--input", "short", cwd=place, stdout=Path("/dev/full"), code=1)
    assert done.stderr == "ftk-generate: No space left on device: standard output\n"


def test_no_prompts_give_a_file_without_results(generated, place, tmp_path):
    (place / "prompts").write_bytes(b"")
    assert generated(*INPUT)[0] == 0
    assert (tmp_path / "results").read_bytes() == b""
    assert (tmp_path / "results.settings.json").exists()


@pytest.mark.parametrize(("what", "source"), [([], "prompts"), (["--score-reference"], "data-bin")])
def test_fewer_samples_may_be_asked_for_later_and_nothing_is_lost(generated, place, tmp_path, source, what):
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


def test_a_run_that_goes_on_saving_does_not_come_between(generated, place, tmp_path, monkeypatch):
    run = tmp_path / "saving"
    shutil.copytree(place / "run" / "checkpoint_1", run / "checkpoint_1")
    original = generate.find_checkpoints

    def then_saved(*arguments):
        found = original(*arguments)
        save_run(run / "checkpoint_2", place / "data-bin", seed=1)
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
