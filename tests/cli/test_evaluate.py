"""ftk-evaluate: its table, files that recompute to it, several processes, and mistakes in its input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ftk.data.supervised.cloze_files import with_content
from ftk.errors import UserError
from ftk.evaluation.evaluation import build_evaluation
from ftk.evaluation.metrics import measure
from ftk.evaluation.perplexity import Perplexity
from ftk.models import build_model
from ftk.tokenizers import load_tokenizer
from ftk_cli import evaluate, report
from tests.distributed import run_main
from tests.small_run import LINES, SHAPE, WORDS, save_model, save_run

EXAMPLE = ("--num-fewshot", "1", "--fewshot-data", "copa.jsonl")
COMMON = ("--path", "run", "--device", "cpu", "--bootstrap", "50")


@pytest.fixture(scope="module")
def files(place):
    """Data beside the run: passages, a text, and pairs."""
    passages = [" ".join(WORDS[start : start + 7]) for start in range(12)]
    (place / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    (place / "plain.txt").write_text("\n".join(LINES[:6]) + "\n")
    (place / "test.source").write_text("".join(f"{line}\n" for line in LINES[:5]))
    (place / "test.target").write_text("".join(f"{' '.join(line.split()[:2])}\n" for line in LINES[:5]))
    (place / "several.jsonl").write_text(json.dumps({"question": "the fox", "answers": ["dog", "cat"]}) + "\n")
    choices = [
        {
            "premise": f"the {word}.",
            "choice1": "It reads.",
            "choice2": f"The old {word} jumps.",
            "question": "effect" if number % 2 else "cause",
            "idx": number + 100,
        }
        for number, word in enumerate(WORDS[:7])
    ]
    labelled = [row | {"label": number % 2} for number, row in enumerate(choices)]
    for name, rows in (("copa", labelled), ("copa-test", [*labelled[:2], *choices[2:]])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def results_of(folder):
    return json.loads((folder / "results.json").read_text())["results"]


def table(lines):
    """Metric -> (value, standard error) of the printed tables, by evaluation."""
    found, name = {}, ""
    for number, line in enumerate(lines):
        if line.startswith("evaluation ") or (not line and lines[number + 1].startswith("evaluation ")):
            continue
        if " of " in line and line.endswith(("did not fit whole", "their questions")):
            continue
        if not line or (line.startswith(("results", " ")) and not re.match(r"^ {8,}\S", line)):
            break
        cells = re.split(r" {2,}", line.strip())
        if not line.startswith(" "):
            name, cells = cells[0], cells[3:]
        metric, value, error = cells
        found[name, metric] = tuple(
            None if one == "–" else float(one.split()[0].replace(",", "")) for one in (value, error)
        )
    return found


ALL = (
    "--evaluation", "lambada", "perplexity window=32", "generation scoring=token_f1", "copa",
    "--data", "lambada=lambada.jsonl", "perplexity=plain.txt", "generation=test.source", "copa=copa.jsonl",
    "--max-len", "4",
)  # fmt: skip


def test_files_recompute_to_the_printed_numbers(ask, files, tmp_path):
    out_dir = tmp_path / "results"
    _, out, _ = ask(evaluate.main, *COMMON, *ALL, "--output", str(out_dir), code=0)
    printed = table(out)
    assert {name for name, _ in printed} == {"lambada", "perplexity window=32", "generation scoring=token_f1", "copa"}
    content = json.loads((out_dir / "results.json").read_text())
    lines = [json.loads(line) for line in (out_dir / "predictions.jsonl").read_text().splitlines()]
    assert sorted(path.name for path in out_dir.iterdir()) == ["predictions.jsonl", "results.json"]
    for result in content["results"]:
        own = [line for line in lines if line["evaluation"] == result["line"]]
        assert result["n"] == len(own)
        evaluation = build_evaluation(result["line"])
        again = measure(evaluation.metrics(), own, evaluation.group, draws=50)
        assert {name: one.value for name, one in again.items()} == {
            name: one["value"] for name, one in result["metrics"].items()
        }
        for name, one in again.items():
            shown, error = printed[result["line"], name]
            for text, exact in ((shown, one.value), (error, one.standard_error)):
                assert text == pytest.approx(exact, abs=0.006, rel=0.005 if exact >= 1e6 else None)  # 3.42e10
            assert result["metrics"][name]["standard_error"] == one.standard_error
    assert content["results"][1]["settings"]["window"] == 32
    (model,) = content["models"]
    assert len(model["weights_sha256"]) == len(content["tokenizer_sha256"]) == 64
    assert set(content["data_sha256"]) == {"lambada.jsonl", "plain.txt", "test.source", "test.target", "copa.jsonl"}
    assert content["versions"].keys() == {"ftk", "torch", "numpy", "python"}
    (record, *_) = [line for line in lines if line["evaluation"] == "lambada"]
    assert record.keys() >= {"idx", "place", "prompt", "candidates", "chosen", "label", "correct", "truncated"}


def test_the_surest_mistakes_are_shown(ask, files):
    _, out, _ = ask(
        evaluate.main, *COMMON, "--evaluation", "lambada", "--data", "lambada.jsonl", "--errors", "3", code=0
    )
    (at,) = [number for number, line in enumerate(out) if line.startswith("lambada, lambada.jsonl: ")]
    shown = out[at + 1 :]
    assert len(shown) == 9
    sure = [float(line.split()[-2]) for line in shown[::3]]
    assert sure == sorted(sure, reverse=True)
    assert all(re.match(r"  lambada.jsonl:\d+  confidence \d+\.\d\d nats$", line) for line in shown[::3])
    assert all(re.match(r"    expected '.*', chosen '.*'", line) for line in shown[2::3])
    _, out, _ = ask(evaluate.main, *COMMON, "--evaluation", "copa", "--data", "copa.jsonl", "--errors", "1")
    choices = [r"0 \('it reads'\)", r"1 \('the old \w+ jumps'\)"]
    assert any(re.fullmatch(f"    expected {one}, chosen {other}", out[-1]) for one, other in (choices, choices[::-1]))


def test_details_and_the_page_say_where_a_model_fails(ask, files, tmp_path):
    output = ("--output", str(tmp_path / "of-run"))
    arguments = ("--evaluation", "copa", "--data", "copa.jsonl", "--details", *output)
    code, out, _ = ask(evaluate.main, *COMMON, *arguments, code=0)
    at = out.index("copa, copa.jsonl: rows are labels, columns are choices")
    counts = [[int(cell) for cell in line.split()[1:]] for line in out[at + 2 : at + 4]]
    (result,) = results_of(tmp_path / "of-run")
    assert result["confusion"] == {"labels": [0, 1], "counts": counts}
    assert [sum(row) for row in counts] == [4, 3]
    numbers = {part["part"]: part["n"] for part in result["parts"]}
    assert (numbers.pop("label 0"), numbers.pop("label 1"), sum(numbers.values())) == (4, 3, 7)
    code, *_ = ask(report.main, str(tmp_path / "of-run"), "--output", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert code == 0
    assert "<h2>By label and by length</h2>" in page
    assert "of-run, copa, copa.jsonl: rows are labels, columns are choices" in page
    assert all(f"<td>{part['part']} (n {part['n']}): accuracy</td>" in page for part in result["parts"])


def test_predictions_are_written_as_they_are_handed_in_also_of_rows_without_labels(ask, files, tmp_path):
    folder = tmp_path / "results"
    arguments = ("--evaluation", "copa", "--data", "copa-test.jsonl", "--output", str(folder), "--submission")
    _, out, _ = ask(evaluate.main, *COMMON, *arguments, code=0)
    assert out[-1] == f"{folder}: results.json, predictions.jsonl, submission/COPA.jsonl"
    predictions = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / "submission" / "COPA.jsonl").read_text().splitlines()]
    assert lines == [{"idx": one["idx"], "label": one["chosen"]} for one in predictions]
    assert [line["idx"] for line in lines] == [*range(100, 107)]
    (result,) = results_of(folder)
    assert (result["n"], result["unlabelled"]) == (2, 5)
    assert ask(evaluate.main, *COMMON, *arguments, "--overwrite")[0] == 0


def test_examples_are_named_with_the_results(ask, files, tmp_path):
    shown = ("--num-fewshot", "2", "--fewshot-data", "copa.jsonl", "--seed", "3", "--fewshot-choice", "first")
    arguments = ("--evaluation", "copa", "--data", "copa-test.jsonl", "--output", str(tmp_path / "out"))
    code, out, _ = ask(evaluate.main, *COMMON, *arguments, *shown)
    assert (code, out[2]) == (0, "copa: 0 of 14 examples had room in front of their questions")
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    few_shot = {"num_fewshot": 2, "fewshot_data": "copa.jsonl", "fewshot_choice": "first", "fewshot_seed": 3}
    assert few_shot.items() <= content["results"][0]["settings"].items()
    assert set(content["data_sha256"]) == {"copa.jsonl", "copa-test.jsonl"}


def test_a_limit_takes_the_first_rows_and_one_line_names_several_evaluations(ask, files):
    files_of = ("lambada=lambada.jsonl", "perplexity=plain.txt")
    _, out, _ = ask(
        evaluate.main, *COMMON, "--evaluation", "lambada,perplexity", "--data", *files_of, "--limit", "3", code=0
    )
    assert [line.split()[2] for line in out if line.startswith(("lambada", "perplexity"))] == ["3", "3"]


def test_fields_and_several_references_can_be_named(ask, files):
    line = "generation source=question target=answers scoring=squad_em"
    _, out, _ = ask(evaluate.main, *COMMON, "--evaluation", line, "--data", "several.jsonl", "--max-len", "3", code=0)
    assert table(out)[line, "squad_em"][0] in (0.0, 100.0)


def test_scorers_may_be_named_by_their_own_flag(ask, files):
    arguments = (
        "--evaluation",
        "generation",
        "--data",
        "test.source",
        "--scoring",
        "squad_f1,squad_em",
        "--max-len",
        "3",
    )
    _, out, _ = ask(evaluate.main, *COMMON, *arguments, code=0)
    assert [metric for _, metric in table(out)] == ["squad_f1", "squad_em"]


def test_sacrebleus_scores_name_the_number_of_references(ask, files, tmp_path):
    pytest.importorskip("sacrebleu")
    line = "generation source=question target=answers scoring=[chrf,bleu]"
    arguments = ("--evaluation", line, "--data", "several.jsonl", "--max-len", "3", "--output", str(tmp_path / "out"))
    _, out, _ = ask(evaluate.main, *COMMON, *arguments, code=0)
    assert [metric for _, metric in table(out)] == ["chrf", "bleu"]
    (result,) = results_of(tmp_path / "out")
    assert [signature.split("|")[0] for signature in result["settings"]["signatures"]] == ["nrefs:2", "nrefs:2"]


def test_what_was_found_is_printed_before_a_later_evaluation_fails(ask, files, monkeypatch):
    def fail(*arguments):
        raise UserError("no luck")

    both = ("--evaluation", "lambada", "perplexity", "--data", "lambada=lambada.jsonl", "perplexity=plain.txt")
    monkeypatch.setattr(Perplexity, "records", fail)
    code, out, err = ask(evaluate.main, *COMMON, *both)
    assert (code, err[-1]) == (2, "ftk-evaluate: no luck")
    assert ("lambada", "accuracy") in table(out)
    monkeypatch.setattr(Perplexity, "metrics", fail)  # these are built before the first row is asked about
    assert ask(evaluate.main, *COMMON, *both)[:2] == (2, [])


@pytest.mark.parametrize("sizes", [(), ("--tensor-parallel-size", "2")], ids=["rows", "model"])
def test_two_processes_find_what_one_finds_and_count_each_row_once(ask, files, tmp_path, sizes):
    one, two = tmp_path / "one", tmp_path / "two"
    arguments = [*COMMON, *ALL, "--output"]
    assert ask(evaluate.main, *arguments, str(one))[0] == 0
    ended = run_main(evaluate.main, [[*arguments, str(two), *sizes]] * 2, cwd=files)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("standard error") == 4
    found, expected = (
        [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()] for folder in (two, one)
    )
    assert [(record["evaluation"], record["idx"]) for record in found] == [
        (record["evaluation"], record["idx"]) for record in expected
    ]
    for record, other in zip(found, expected, strict=True):
        assert record.get("chosen") == other.get("chosen")
        if "logprob" in record:
            assert record["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    for result, other in zip(
        *(json.loads((at / "results.json").read_text())["results"] for at in (two, one)), strict=True
    ):
        assert (result["n"], result["confusion"]) == (other["n"], other["confusion"])
        assert [(part["part"], part["n"]) for part in result["parts"]] == [
            (part["part"], part["n"]) for part in other["parts"]
        ]
        for name, metric in result["metrics"].items():
            for number in ("value", "standard_error"):
                assert metric[number] == pytest.approx(other["metrics"][name][number], rel=1e-5)


def test_an_output_folder_is_replaced_only_if_it_holds_results(ask, files, tmp_path):
    folder = tmp_path / "results"
    arguments = (*COMMON, "--evaluation", "lambada", "--data", "lambada.jsonl", "--limit", "2", "--output", str(folder))
    assert ask(evaluate.main, *arguments)[0] == 0
    first = (folder / "results.json").read_bytes()
    _, _, err = ask(evaluate.main, *arguments, code=2)
    assert "exists already; choose another, or replace it with --overwrite" in err[-1]
    assert ask(evaluate.main, *arguments, "--overwrite")[0] == 0
    assert (folder / "results.json").read_bytes() == first
    (folder / "mine").touch()
    _, _, err = ask(evaluate.main, *arguments, "--overwrite", code=2)
    assert "holds what ftk did not write (mine)" in err[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"]


def test_two_models_are_compared_by_pairs_of_rows(ask, files, tmp_path, second):
    data = ("--evaluation", "copa candidate_scoring=mean", "lambada", "perplexity", "--data")
    data += ("copa=copa-test.jsonl", "lambada=lambada.jsonl", "perplexity=plain.txt")
    folders = [str(tmp_path / name) for name in ("one", "two")]
    assert ask(evaluate.main, *COMMON, *data, "--output", folders[0])[0] == 0
    two = (*COMMON[2:], "--path", "second", "--compare", folders[0])
    code, out, _ = ask(evaluate.main, *two, *data, "--output", folders[1])
    assert code == 0
    for one, other in zip(*map(results_of, map(Path, folders)), strict=True):
        assert (one["more"], other["more"].keys()) == ({}, one["metrics"].keys())
        for name, metric in other["more"].items():
            expected = other["metrics"][name]["value"] - one["metrics"][name]["value"]
            assert metric["value"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
            assert metric["standard_error"] is None or metric["standard_error"] >= 0.0
            if abs(metric["value"]) < 1e6:
                assert any(f"{metric['value']:,.{2 if metric['unit'] else 4}f}" in line for line in out if name in line)
    assert re.split(r" {2,}", out[0])[-3:] == ["standard error", "difference", "standard error"]
    assert json.loads((tmp_path / "two" / "results.json").read_text())["compared_with"] == folders[0]

    lambada = ("--evaluation", "lambada", "--data", "lambada.jsonl")
    for more, message in (
        (("--evaluation", "lambada", "--data", "plain.txt"), "no evaluations like 'lambada' of plain.txt; there are: "),
        ((*lambada, "--limit", "2"), "is of all rows, this evaluation of --limit 2"),
    ):
        _, _, err = ask(evaluate.main, *two, *more, code=2)
        assert err[-1].startswith(f"ftk-evaluate: --compare {folders[0]}: ")
        assert message in err[-1]
    predictions = tmp_path / "one" / "predictions.jsonl"
    lines = [line.replace('"label": "', '"label": "not ') for line in predictions.read_text().splitlines(True)]
    predictions.write_text("".join(lines))
    _, out, _ = ask(evaluate.main, *two, *lambada)
    assert out[-1] == f"not compared with {folders[0]}: text 1 had another right answer"
    predictions.write_text("".join(line.replace('"chosen"', '"choice"') for line in lines))
    _, out, _ = ask(evaluate.main, *two, *lambada)
    assert "its answers are of another version of ftk, without chosen; evaluate it anew" in out[-1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lambada.jsonl").write_text((files / "lambada.jsonl").read_text() * 2)
    _, _, err = ask(evaluate.main, *two, *lambada[:3], str(tmp_path / "other" / "lambada.jsonl"), code=2)
    assert "its lambada.jsonl had another content" in err[-1]
    _, _, err = ask(evaluate.main, *COMMON, *lambada, "--compare", "run", code=2)
    assert "--compare run: results.json: No such file or directory" in err[-1]


def test_two_models_are_compared_on_one_page(ask, files, tmp_path, second):
    data = ("--evaluation", "lambada", "--data", "lambada.jsonl")
    for path in ("run", "second"):
        code, *_ = ask(evaluate.main, *COMMON[2:], "--path", path, *data, "--output", str(tmp_path / f"of-{path}"))
        assert code == 0
    page = tmp_path / "page.html"
    code, out, _ = ask(
        report.main, *(str(tmp_path / f"of-{path}") for path in ("run", "second")), "--output", str(page)
    )
    assert (code, out) == (0, [f"{page}: of-run, of-second"])
    assert "2 models: evaluation" in page.read_text()
    _, _, err = ask(report.main, str(tmp_path / "of-run"), "run", "--output", str(page), code=2)
    assert "run has no results.json, and other folders have" in err[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evaluation", "lambda", "--data", "x"], "evaluation is 'lambda'; did you mean 'lambada'?"),
        (["--evaluation", "loss", "--data", "x"], "evaluation is 'loss'; there are: "),
        (["--evaluation", "ppl", "--data", "x"], "evaluation is 'ppl'; in ftk: perplexity"),
        (["--evaluation", "rouge-l", "--data", "x"], "evaluation is 'rouge-l'; in ftk: generation scoring=rouge"),
        (["--evaluation", "generation", "--scoring", "f1", "--data", "x"], "scoring is 'f1'; in ftk: token_f1"),
        (["--evaluation", "generation", "--scoring", "f1 x=1", "--data", "x"], "scoring is 'f1 x=1'; in ftk: token_f1"),
        (
            ["--evaluation", "generation scoring='em x=1'", "--data", "plain.txt"],
            "scoring is 'em x=1'; in ftk: exact_match",
        ),
        (["--path", "run", "--max-samples", "3"], "unknown flag --max-samples; in ftk: --limit (rows of each file"),
        (["--evaluation", "lambada", "--data", "nowhere.jsonl"], "--data nowhere.jsonl: no such file"),
        (
            ["--evaluation", "lambada", "perplexity", "--data", "lambada=x"],
            "perplexity has no file; give --data perplexity",
        ),
        (["--evaluation", "lambada", "perplexity", "--data", "x"], "--data x names none of the evaluations"),
        (
            ["--evaluation", "lambada", "--data", "lambada.jsonl", "--beam", "4"],
            "no evaluation finds answers, so that --beam",
        ),
        (["--evaluation", "lambada", "--data", "lambada.jsonl", "--scoring", "bleu"], "--scoring has no effect"),
        (
            ["--evaluation", "lambada rule=mine", "--data", "plain.txt"],
            "rule is 'mine'; it must be one of original, harness",
        ),
        (["--evaluation", "generation", "--data", "lambada.jsonl"], "lambada.jsonl:1: field 'source' is missing"),
        (["--evaluation", "lambada", "--data", "lambada.jsonl", "--output", "no/such"], "no/such: there is no folder"),
        (["--evaluation", "lambada", "--data", "lambada.jsonl", "--output", "run/checkpoint_1"], "exists already"),
        (["--evaluation", "lambada", "--data", "lambada.jsonl", "--overwrite"], "--overwrite has no effect without"),
        (
            ["--evaluation", "generation scoring=rogue", "--data", "plain.txt"],
            "scoring is 'rogue'; did you mean 'rouge'? ",
        ),
        (["--evaluation", "copa", "--data", "copa.jsonl", "--num-fewshot", "1"], "--num-fewshot has no effect without"),
        (["--evaluation", "copa", "--data", "copa.jsonl", "--fewshot-data", "x"], "--fewshot-data has no effect with"),
        (
            ["--evaluation", "copa", "--data", "copa.jsonl", "--num-fewshot", "1", "--fewshot-data", "nosuch.jsonl"],
            "--fewshot-data nosuch.jsonl: no such file",
        ),
        (
            ["--evaluation", "lambada", "--data", "lambada.jsonl", *EXAMPLE],
            "--num-fewshot: lambada is asked without examples",
        ),
        (
            ["--evaluation", "copa,lambada", "--data", "copa=copa.jsonl", "lambada=lambada.jsonl", *EXAMPLE],
            "--num-fewshot: lambada is asked without examples",
        ),
        (["--evaluation", "copa", "--data", "copa.jsonl", "--submission"], "--submission has no effect without"),
        (
            ["--evaluation", "lambada", "--data", "lambada.jsonl", "--output", "new", "--submission"],
            "--submission: there is no form for predictions of lambada",
        ),
        (
            ["--evaluation", "copa", "--data", "copa.jsonl", "several.jsonl", "--output", "new", "--submission"],
            "--submission is for one file and one line of copa, which has 2",
        ),
        (
            [
                *("--evaluation", "copa", "cloze cloze=copa", "--data", "copa=copa.jsonl", "cloze=copa.jsonl"),
                *("--output", "new", "--submission"),
            ],
            "--submission: copa and cloze cloze=copa both write COPA.jsonl; evaluate one by itself",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_named_in_a_line(ask, files, arguments, message):
    code, out, err = ask(evaluate.main, *COMMON, *arguments)
    assert (code, out) == (2, [])
    assert message in err[-1]
    assert len(err) == 1


def test_a_model_that_fills_masks_is_refused(ask, files, tmp_path):
    model = build_model("bert", **SHAPE, vocab_size=load_tokenizer(files / "data-bin").padded_vocab_size())
    save_model(tmp_path / "bert", model, files / "data-bin" / "tokenizer", task={"_name": "masked_lm"})
    arguments = ("--path", str(tmp_path / "bert"), "--evaluation", "lambada", "--data", "lambada.jsonl")
    _, _, err = ask(evaluate.main, *arguments, code=2)
    assert "fills masks in a text" in err[-1]


OWN = "like: copa\nmetrics: [accuracy]\n"


@pytest.mark.parametrize(
    ("trained", "line", "pattern"),
    [
        ("copa", "copa", 1),
        ("{own}", "cloze cloze={own}", 1),
        ("{own}", "cloze cloze={copy}", 1),
        ("{own}", "cloze", 1),
        ("{own}", "cloze cloze={own} pattern=2", 2),
        ("{own}", "cloze cloze={other}", 0),
        ("{own}", "copa", 0),
    ],
)
def test_a_run_that_was_trained_for_a_cloze_task_is_asked_as_it_was_trained(
    ask, files, tmp_path, trained, line, pattern
):
    row = {"premise": "she reads.", "choice1": "It is old.", "choice2": "It is silent.", "question": "effect"}
    (tmp_path / "copa.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row | {"label": 0}, row)))
    places = {name: str(tmp_path / f"{name}.yaml") for name in ("own", "copy", "other")}
    for name, place in places.items():
        Path(place).write_text(OWN + ("label: other\n" if name == "other" else ""))
    task = {"_name": "cloze", "cloze": with_content(trained.format(**places)), "pattern": 1, "seq_length": 64}
    model = build_model("glm", **SHAPE, vocab_size=load_tokenizer(files / "data-bin").padded_vocab_size())
    save_model(tmp_path / "tuned", model, files / "data-bin" / "tokenizer", task=task)
    data = ("--data", str(tmp_path / "copa.jsonl"), "--output", str(tmp_path / "results"))
    asked = ("--path", str(tmp_path / "tuned"), "--evaluation", line.format(**places))
    _, out, _ = ask(evaluate.main, *asked, *data, code=0)
    (result,) = results_of(tmp_path / "results")
    assert result["settings"]["pattern"] == pattern
    assert (result["settings"]["seq_length"] == 64) == (pattern > 0)
    if not line.endswith("{other}"):  # whose rows have no label
        assert (result["n"], result["unlabelled"]) == (1, 1)
        assert "  1 + 1 unlabelled  " in out[1]


@pytest.mark.slow
def test_two_processes_of_a_pipeline_find_what_one_finds(ask, files, tmp_path):
    save_run(files / "two-layers" / "checkpoint_1", files / "data-bin", num_layers=2)
    arguments = ["--path", "two-layers", *COMMON[2:], *ALL, "--output"]
    assert ask(evaluate.main, *arguments, str(tmp_path / "one"))[0] == 0
    sizes = ("--pipeline-parallel-size", "2")
    ended = run_main(evaluate.main, [[*arguments, str(tmp_path / "two"), *sizes]] * 2, cwd=files)
    assert ended.returncode == 0, ended.stderr
    for result, other in zip(*(results_of(tmp_path / name) for name in ("two", "one")), strict=True):
        for name, metric in result["metrics"].items():
            assert metric["value"] == pytest.approx(other["metrics"][name]["value"], rel=1e-5)
