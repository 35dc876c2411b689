"""ftk's models in lm-evaluation-harness: its requests find what ftk's own scoring does, its tasks run offline."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftk.errors import UserError
from ftk.evaluation.evaluation import build_evaluation
from ftk.evaluation.metrics import measure
from ftk.models import build_model
from ftk.tokenizers import load_tokenizer
from tests.evaluation.conftest import FAMILIES, SHAPE, all_logprobs, slow_logprobs, with_spread
from tests.paths import ROOT
from tests.small_run import LINES, SENTENCE, WORDS, save_model

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'ftk[harness]'")

TASKS = {"glm": "glm_blank", "gpt2": "causal_lm", "t5": "translation"}


@pytest.fixture(scope="module")
def runs(made_place: Path, tmp_path_factory) -> dict[str, Path]:
    """Family -> a checkpoint."""
    folder, tokenizer = tmp_path_factory.mktemp("runs"), load_tokenizer(made_place / "data-bin")
    shapes: dict[str, Any] = {name: {**SHAPE, "vocab_size": tokenizer.padded_vocab_size()} for name in FAMILIES}
    shapes["glm"]["max_positions"] = shapes["gpt2"]["max_positions"] = 128
    shapes["t5"] |= {"head_dim": 8, "decoder_start_token": tokenizer.special.pad}
    for name, shape in shapes.items():
        torch.manual_seed(2)  # with which each answers one of the prompts below in letters
        model = with_spread(build_model(name, **shape))
        save_model(folder / name, model, made_place / "data-bin" / "tokenizer", task={"_name": TASKS[name]})
    return {name: folder / name for name in FAMILIES}


@pytest.fixture(scope="module")
def models(runs) -> dict[str, Any]:
    from ftk.evaluation.harness import FTK

    return {name: FTK(path=str(path), device="cpu") for name, path in runs.items()}


def asked(*requests: Any) -> list[Any]:
    """Requests as the harness makes them."""
    return [SimpleNamespace(args=request) for request in requests]


PAIRS = [
    (SENTENCE[:40], " while she"),
    (SENTENCE[:40], " letters"),
    (SENTENCE[:40] + " ", "letters"),  # a space at the end of the context goes to the continuation
    ("the lazy", " dog"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_likelihoods_are_those_of_one_forward_for_each_token(models, family: str) -> None:
    model = models[family]
    generator, encode = model.generator, model.generator.tokenizer.encode
    found = model.loglikelihood(asked(*PAIRS), disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(PAIRS, found, strict=True):
        moved = context[len(context.rstrip()) :]
        before, behind = context.rstrip(), moved + continuation
        ids = encode(before)
        own = encode(behind) if family == "t5" else encode(before + behind)[len(ids) :]
        logprobs, likeliest = slow_logprobs(family, generator, ids, own)
        assert logprob == pytest.approx(sum(logprobs), rel=1e-5)
        assert greedy == likeliest
    assert found[1] == pytest.approx(found[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_behind_an_empty_context_stands_what_begins_a_text(models, family: str) -> None:
    model = models[family]
    generator, special = model.generator, model.generator.tokenizer.special
    ids = generator.tokenizer.encode("the lazy dog")
    context = [special.eos] if family == "gpt2" else []
    ((logprob, _),) = model.loglikelihood(asked(("", "the lazy dog")), disable_tqdm=True)
    assert logprob == pytest.approx(sum(slow_logprobs(family, generator, context, ids)[0]), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rolling_windows_are_the_harness_own_and_count_each_token_once(runs, family: str) -> None:
    from ftk.evaluation.harness import FTK

    model = FTK(path=str(runs[family]), device="cpu", max_length=4)
    generator = model.generator
    text = next(line for n in range(4, 40) if len(generator.tokenizer.encode(line := SENTENCE[:n])) == 10)
    ids = generator.tokenizer.encode(text)
    begins = [generator.tokenizer.special.eos] if family == "gpt2" else []
    windows = [(begins, ids[:4]), (ids[3:4], ids[4:8]), (ids[5:8], ids[8:10])]
    expected = sum(
        float(all_logprobs(family, generator, context, own[:n])[token])
        for context, own in windows
        for n, token in enumerate(own)
    )
    found = model.loglikelihood_rolling(asked((text,), ("",)), disable_tqdm=True)
    assert found == pytest.approx([expected, 0.0], rel=1e-5)


def test_a_context_that_is_too_long_is_cut_at_its_left(models) -> None:
    model = models["gpt2"]
    encode = model.generator.tokenizer.encode
    context, continuation = " ".join(WORDS * 10), " letters"
    ids = encode(context)
    own = encode(context + continuation)[len(ids) :]
    kept = ids[len(ids) + len(own) - 129 :]  # the last token is not read
    ((logprob, _),) = model.loglikelihood(asked((context, continuation)), disable_tqdm=True)
    assert logprob == pytest.approx(sum(slow_logprobs("gpt2", model.generator, kept, own)[0]), rel=1e-5)


def test_a_model_with_a_tokenizer_of_its_own_for_sources_is_refused(runs, monkeypatch) -> None:
    import ftk
    from ftk.evaluation.harness import FTK

    generator = ftk.load_generator(runs["t5"], "cpu", max_len=1)
    generator.tokenizer.source = generator.tokenizer
    monkeypatch.setattr(ftk, "load_generator", lambda *arguments, **options: generator)
    with pytest.raises(UserError, match="has a tokenizer of its own for sources, which tasks of the harness"):
        FTK(path=str(runs["t5"]), device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_end_before_the_first_of_the_strings_that_end_them(models, family: str) -> None:
    model = models[family]
    free = asked(*((word, {"until": [], "max_gen_toks": 12}) for word in WORDS))
    answers = model.generate_until(free, disable_tqdm=True)
    stop, prompt, whole = next(  # bytes that are no characters decode to others where there are fewer
        (text[-2:], word, text) for word, text in zip(WORDS, answers, strict=True) if text.isascii() and len(text) > 2
    )
    options = {"until": [stop], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    (cut,) = model.generate_until(asked((prompt, options)), disable_tqdm=True)
    assert cut == whole.partition(stop)[0] != whole
    with pytest.raises(UserError, match="unknown option 'top_q'; did you mean 'top_p'"):
        model.generate_until(asked(("the", {"top_q": 1})))


def test_a_run_that_reads_from_the_left_says_so(runs) -> None:
    from ftk.evaluation.harness import FTK

    model = FTK(path=str(runs["glm"]), device="cpu", unidirectional=True)
    context, continuation = PAIRS[0]
    ids = model.generator.tokenizer.encode(context)
    own = model.generator.tokenizer.encode(context + continuation)[len(ids) :]
    ((logprob, _),) = model.loglikelihood(asked(PAIRS[0]), disable_tqdm=True)
    row = [float(all_logprobs("glm", model.generator, [], [*ids, *own[:n]])[token]) for n, token in enumerate(own)]
    assert logprob == pytest.approx(sum(row), rel=1e-5)
    assert model.get_model_info()["unidirectional"] is True


TEMPLATE = json.dumps({"roles": {"user": {"prefix": "Q: "}, "assistant": {"prefix": "A: "}}})
COPA = {"premise": "It is old.", "choice1": "A.", "choice2": "B.", "question": "cause", "label": 0}


def write_copa(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As the task of configs/harness reads it."""
    (folder / "superglue" / "COPA").mkdir(parents=True)
    (folder / "superglue" / "COPA" / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_conversation_is_asked_by_the_template_of_the_training(models, runs, tmp_path, monkeypatch) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from ftk.evaluation.harness import FTK

    learned = models["gpt2"].generator
    task = {"_name": "sft", "template": TEMPLATE}
    save_model(tmp_path / "chat", learned.model, runs["gpt2"] / "tokenizer", task=task)
    model = FTK(path=str(tmp_path / "chat"), device="cpu", max_len=12)
    said = [{"role": role, "content": text} for role, text in (("user", "fox"), ("assistant", "dog"), ("user", "the"))]
    text = model.apply_chat_template(said)
    prompt, own = model.generator.conversation("the", said[:2], {}), model.generator.tokenizer.encode("lazy dog")
    assert "A: dog" in model.generator.tokenizer.decode(prompt)
    ((logprob, _),) = model.loglikelihood(asked((text, "lazy dog")), disable_tqdm=True)
    assert logprob == pytest.approx(sum(slow_logprobs("gpt2", model.generator, prompt, own)[0]), rel=1e-5)
    (answer,) = model.generate_until(asked((text, {"until": [], "max_gen_toks": 12})), disable_tqdm=True)
    assert answer == model.generator.generate("the", options={"messages": said[:2]}).text
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    write_copa(tmp_path, [COPA])
    monkeypatch.chdir(tmp_path)
    tasks = TaskManager(include_path=str(ROOT / "configs" / "harness"), include_defaults=False)
    options = {"tasks": ["ftk_copa"], "task_manager": tasks, "bootstrap_iters": 0, "apply_chat_template": True}
    found = simple_evaluate(model=model, **options)
    assert found is not None
    (sample,) = found["samples"]["ftk_copa"]
    assert json.loads(sample["arguments"][0][0])[-1]["role"] == "user"
    with pytest.raises(UserError, match="did not learn from conversations, .*; leave apply_chat_template out"):
        simple_evaluate(model=models["gpt2"], **options)
    with pytest.raises(UserError, match="a model has one template here; give no name"):
        model.chat_template("rag")


@pytest.mark.slow
def test_the_command_knows_ftk_by_the_file_of_a_task(runs, tmp_path) -> None:
    write_copa(tmp_path, [COPA])
    offline = {"HF_HOME": str(tmp_path / "cache"), "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    asked_for = ["--model", "ftk", "--model_args", f"path={runs['gpt2']}", "--device", "cpu"]
    file, name = ROOT / "configs" / "harness" / "ftk_copa.yaml", "ftk_copa"
    for module, tasks in (
        ("lm_eval", ["--tasks", str(file)]),
        ("ftk.evaluation.harness", ["--tasks", name, "--include_path", str(file.parent)]),
    ):
        command = [sys.executable, "-m", module, *asked_for, *tasks]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert re.search(r"\|ftk_copa\|.*\|acc +\|", done.stdout), done.stdout


def test_every_task_here_makes_the_command_import_ftk() -> None:
    from lm_eval.api.registry import get_model
    from lm_eval.tasks._yaml_loader import load_yaml

    from ftk.evaluation.harness import FTK, documents

    files = sorted((ROOT / "configs" / "harness").glob("*.yaml"))
    assert len(files) == 4
    for file in files:
        assert load_yaml(str(file), resolve_func=True)["process_docs"] is documents
    assert get_model("ftk") is FTK
    assert get_model("dummy").__module__ == "lm_eval.models.dummy"  # the same task with the harness' own models


def test_its_tasks_run_offline_and_find_the_numbers_of_ftk_evaluate(models, runs, tmp_path, monkeypatch) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    shutil.copytree(ROOT / "configs" / "harness", tmp_path / "tasks")
    (tmp_path / "lambada").mkdir()
    passages = [" ".join(WORDS[start : start + 7]) for start in range(12)]
    lines = [json.dumps({"text": text}) + "\n" for text in passages]
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text("".join(lines))
    (tmp_path / "lambada" / "wikitext2_test.txt").write_text("\n".join(LINES) + "\n")
    (tmp_path / "superglue" / "BoolQ").mkdir(parents=True)
    (tmp_path / "superglue" / "COPA").mkdir()
    boolq = [{"passage": SENTENCE[:40], "question": f"is the {word} old", "label": word < "m"} for word in WORDS[:8]]
    copa = [
        {
            "premise": f"The {word} reads.",
            "choice1": "It is old.",
            "choice2": f"She jumps over the {word}.",
            "question": "cause" if number % 2 else "effect",
            "label": int(word < "m"),
        }
        for number, word in enumerate(WORDS[:8])
    ]
    for name, rows in (("BoolQ", boolq), ("COPA", copa)):
        (tmp_path / "superglue" / name / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    found = simple_evaluate(
        model="ftk",
        model_args={"path": str(runs["gpt2"]), "device": "cpu"},
        tasks=["ftk_lambada", "ftk_wikitext2", "ftk_boolq", "ftk_copa"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )
    assert found is not None
    evaluation, generator = build_evaluation("lambada rule=harness"), models["gpt2"].generator
    records = evaluation.records(evaluation.questions("lambada/lambada_test.jsonl", generator), generator)
    own = measure(evaluation.metrics(), records)
    theirs = found["results"]["ftk_lambada"]
    assert 100 * theirs["acc,none"] == pytest.approx(own["accuracy"].value)
    assert theirs["perplexity,none"] == pytest.approx(own["perplexity"].value, rel=1e-5)
    text = (tmp_path / "lambada" / "wikitext2_test.txt").read_text()
    (total,) = models["gpt2"].loglikelihood_rolling(asked((text,)), disable_tqdm=True)
    bits = found["results"]["ftk_wikitext2"]["bits_per_byte,none"]
    assert bits == pytest.approx(-total / len(text.encode()) / 0.6931471805599453, rel=1e-5)
    joined = {"cause": "because", "effect": "therefore"}
    asked_of = {
        "ftk_boolq": [(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ("no", "yes")) for row in boolq],
        "ftk_copa": [
            (f"{row['premise'][:-1]} {joined[str(row['question'])]}", ("it is old.", f"s{str(row['choice2'])[1:]}"))
            for row in copa
        ],
    }
    for (name, questions), rows in zip(asked_of.items(), (boolq, copa), strict=True):
        pairs = [(context, f" {choice}") for context, choices in questions for choice in choices]
        logprobs = [logprob for logprob, _ in models["gpt2"].loglikelihood(asked(*pairs), disable_tqdm=True)]
        chosen = [int(second > first) for first, second in zip(logprobs[::2], logprobs[1::2], strict=True)]
        right = sum(one == int(row["label"]) for one, row in zip(chosen, rows, strict=True))
        assert found["results"][name]["acc,none"] == pytest.approx(right / len(rows))
