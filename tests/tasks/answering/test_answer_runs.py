"""seq2seq and sft by the commands: from models of three families to answers, resumed bit for bit, refused in a line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ftk
from ftk.checkpoint import read_config
from ftk.checkpoint.convert import convert_to
from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig
from ftk.config import compose
from ftk.data.supervised.corpus import RowsConfig, RowsCorpus
from ftk.errors import UserError
from ftk.generation.answering import TextAnswerer
from ftk.models import build_model
from ftk.planner.search import search
from ftk.tasks.restore import restore_base, restore_task
from ftk.tasks.sft.task import SFTConfig, SFTTask
from ftk.tokenizers import load_tokenizer
from ftk.trainer import auto_parallel
from ftk.trainer.config import TrainConfig
from ftk.trainer.run import build_task
from ftk_cli import checkpoint, data, evaluate, generate, interactive, train, validate
from tests.byte_tokenizer import MARKS, byte_tokenizer
from tests.distributed import run_main
from tests.records import assert_same_weights, records_of
from tests.small_run import WORDS, save_model, save_run
from tests.tiers import slow_but

PAD = 256 + MARKS.index("<pad>")
ROWS = len(MARKS) + 256
ARCHITECTURES = {
    "gpt2": ("gpt2", {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 96}),
    "t5": ("t5_tiny", {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "decoder_start_token": PAD}),
}
NO_DROPOUT = ["--dropout", 0.0, "--embedding-dropout", 0.0, "--attention-dropout", 0.0]
NAMES = ["glm", *ARCHITECTURES]


@pytest.fixture(scope="module")
def starts(tmp_path_factory, made_place) -> Path:
    """Untrained models: a run of a GLM, and a GPT-2 and a T5 in Hugging Face's form, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("starts")
    save_run(folder / "glm", made_place / "data-bin", num_layers=2, hidden_size=32)
    byte_tokenizer(folder / "files").save(folder / "tokenizer")
    for name, (arch, shape) in ARCHITECTURES.items():
        torch.manual_seed(1)
        save_model(folder / "made" / name, build_model(arch, vocab_size=ROWS, **shape), folder / "tokenizer")
        convert_to(HuggingFace(HuggingFaceConfig()), "hf", folder / "made" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """64 questions of three words; the answer is the first and the last of them."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = torch.Generator().manual_seed(1)
    rows = [[WORDS[number] for number in torch.randperm(len(WORDS), generator=draw)[:3]] for _ in range(64)]
    for split, some in (("train", rows), ("valid", rows[:8]), ("few", rows[:6])):
        (folder / f"{split}.source").write_text("".join(f"{' '.join(row)} .\n" for row in some))
        (folder / f"{split}.target").write_text("".join(f"{row[0]} {row[2]}\n" for row in some))
    return folder


@pytest.fixture(scope="module")
def talks(tmp_path_factory) -> Path:
    """Conversations of two turns."""
    folder = tmp_path_factory.mktemp("talks")
    for split, count in (("train", 12), ("val", 3)):
        lines = []
        for number in range(count):
            one, two, three = (WORDS[(number * step + step) % len(WORDS)] for step in (1, 3, 7))
            said = [("user", f"Say {one}."), ("assistant", one), ("user", f"And {two} {three}?"), ("assistant", two)]
            lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def learn(here, rows: Path | str, task: str, start: Path, run: Path, *flags: object) -> None:
    """A run of `task` from a model; later flags go before the usual ones."""
    usual = ["--seq-length", 48, "--target-length", 24, "--batch-size", 4, "--lr", 0.01, "--lr-scheduler", "constant"]
    usual += ["--validate-interval", 0, "--save-dir", run]
    here(train.main, rows, "--task", task, "--finetune-from", start, *usual, *flags, code=0)


def test_an_adapter_alone_asks_by_the_template_of_its_run(starts, talks, tmp_path, here) -> None:
    base, run, alone, merged = starts / "glm", tmp_path / "run", tmp_path / "alone", tmp_path / "merged"
    flags = ["--template", "chatml", "--adapter", "lora", "--max-update", 2, "--seq-length", 56]
    learn(here, talks, "sft", base, run, *flags)
    here(checkpoint.main, "adapter", run, alone, code=0)
    here(checkpoint.main, "merge", alone, merged, "--base", base, code=0)
    asked = ["--input", "-", "--output-format", "json", "--max-len", 4, "--device", "cpu"]
    answers = []
    for path in ([run], [alone, "--base", base], [merged]):
        _, out, _ = here(generate.main, "--path", *path, *asked, stdin=b"Say it.\n", code=0)
        answers.append(json.loads(out))
    assert answers[1] == answers[0]
    assert answers[2]["text"] == answers[0]["text"]
    assert read_config(merged)["task"] == read_config(run)["task"]


PLANNED = {"seq2seq": (48, 16), "sft": (48, 16), "classification": None}  # tokens of both sides; None: not said


@pytest.mark.parametrize(("task", "tokens"), PLANNED.items())
def test_parallel_auto_counts_what_the_decoder_reads_or_refuses(starts, tmp_path, monkeypatch, task, tokens) -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant")]
    row = {"source": "a", "target": "b", "messages": messages, "text": "a"}
    lines = [json.dumps(row | {"label": label}) for label in "cd"]
    for split in ("train", "valid"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    planned: list[Any] = []
    monkeypatch.setattr(auto_parallel, "search", lambda *given: planned.append(given[1]) or search(*given))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [tmp_path, "--task", task, "--finetune-from", starts / "t5", "--parallel", "auto", "--seq-length", 48]
    words += ["--max-update", 1, "--device", "cpu", *(["--target-length", 16] if tokens else [])]
    given = build_task(compose(TrainConfig, "ftk-train", "", [*map(str, words)]))
    if tokens is None:
        with pytest.raises(UserError, match="`task` classification does not say how many tokens the decoder reads"):
            auto_parallel.choose_layout(*given)
        return
    auto_parallel.choose_layout(*given)
    assert [(work.num_tokens, work.decoder_tokens) for work in planned] == [tokens]


@pytest.mark.parametrize("name", slow_but(["glm"], NAMES))
def test_what_was_learned_is_asked_and_scored_as_in_training(starts, pairs, tmp_path, here, name: str) -> None:
    learn(here, pairs, "seq2seq", starts / name, tmp_path, "--max-update", 3, "--label-smoothing", 0.1)
    config = read_config(tmp_path / "checkpoint_last")
    assert config["model"]["vocab_size"] == restore_base(str(starts / name)).sections["model"]["vocab_size"]
    _, out, _ = here(validate.main, pairs, "--path", tmp_path, "--output-format", "json", code=0)
    loss = json.loads(out)["nll_loss"]
    logprobs = logprobs_of(here, pairs, tmp_path)
    assert -sum(map(sum, logprobs)) / sum(map(len, logprobs)) == pytest.approx(loss, rel=1e-4)

    sources, targets = ((pairs / f"valid.{side}").read_text().splitlines() for side in ("source", "target"))
    ask = ["--path", tmp_path, "--max-len", 8, "--output-format", "json"]
    _, out, error = here(generate.main, pairs, *ask, "--scoring", "exact_match", code=0)
    records = [json.loads(line) for line in out.splitlines()]
    answers = [one["answers"][0] for one in records]
    found = [(one["source"], answer.pop("reference")) for one, answer in zip(records, answers, strict=True)]
    assert found == [*zip(sources, targets, strict=True)]
    assert "exact_match = " in out + error
    _, out, _ = here(generate.main, *ask, "--input", "-", stdin="\n".join(sources).encode(), code=0)
    assert [json.loads(line)["answers"] for line in out.splitlines()] == [[answer] for answer in answers]

    generator = ftk.load_generator(tmp_path, device="cpu", max_len=8)
    assert generator.generate(sources[0]).text == answers[0]["text"]
    assert "".join(piece.text for piece in generator.stream(sources[0])) == answers[0]["text"]
    (scored,) = generator.score(sources[0], [targets[0]])
    assert scored.logprobs == pytest.approx(logprobs[0][:-1], rel=1e-4)  # without the end


def logprobs_of(here, rows: Path, run: Path) -> list[list[float]]:
    """Of the tokens of each reference, the end too."""
    _, out, _ = here(generate.main, rows, "--path", run, "--score-reference", "--output-format", "json", code=0)
    (found,) = zip(*(json.loads(line)["candidates"] for line in out.splitlines()), strict=True)
    return [one["answers"][0]["token_logprobs"] for one in found]


CASES = [
    ("glm", "{},{}", ("--data-weights", "1,2", "--pack", "--loss-weighting", "sample", "--template", "chatml")),
    ("glm", "{}", ("--pack", "--loss-weighting", "sample", "--template", "chatml")),
    ("gpt2", "{}", ("--pack", "--template", "chatml", "--num-workers", 1)),
    ("t5", "{},{}", ("--turns", "last", "--bucket-window", 8, "--num-workers", 1)),
]


@pytest.mark.parametrize(("name", "data", "flags"), slow_but(CASES[:1], CASES))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    starts, talks, pairs, tmp_path, here, name: str, data: str, flags: tuple
) -> None:
    length = ("--seq-length", 72, "--dropout", 0.1)
    whole, parts, rows = tmp_path / "whole", tmp_path / "parts", data.format(talks, pairs)
    learn(here, rows, "sft", starts / name, whole, *length, *flags, "--max-update", 5)
    learn(here, rows, "sft", starts / name, parts, *length, *flags, "--max-update", 2)
    learn(here, rows, "sft", starts / name, parts, *length, *flags, "--max-update", 5)
    assert_same_weights(parts / "checkpoint_last", whole / "checkpoint_last")
    assert records_of(whole, "valid")
    if name == "glm" and "," in data:
        both, *alone = (
            json.loads(here(validate.main, one, "--path", whole, "--output-format", "json", code=0)[1])
            for one in (rows, talks, pairs, f"{talks},{talks}")
        )
        for folder, one in zip((talks, pairs, talks), alone, strict=True):
            assert both[f"loss_corpus_{folder.name}"] == pytest.approx(one["loss"], rel=1e-5)
        assert alone[2][f"loss_corpus_{talks.name}"] == pytest.approx(alone[0]["loss"], rel=1e-5)
        assert not any(key.startswith("loss_corpus") for key in alone[0])
        flags = ("--data-weights", "2,1", *flags[2:])
        with pytest.raises(AssertionError, match=r"dataset.data_weights \[1.0, 2.0\] -> \[2.0, 1.0\] .*--reset-data"):
            learn(here, rows, "sft", starts / name, parts, *length, *flags, "--max-update", 6)


def test_rows_may_move_but_not_change_while_a_run_is_interrupted(starts, talks, tmp_path, here) -> None:
    moved = Path(shutil.copytree(talks, tmp_path / "moved"))
    learn(here, talks, "sft", starts / "gpt2", tmp_path / "run", "--max-update", 1)
    learn(here, moved, "sft", starts / "gpt2", tmp_path / "run", "--max-update", 2)
    (moved / "train.jsonl").write_text((moved / "train.jsonl").read_text().replace("Say", "Tell", 1))
    with pytest.raises(AssertionError, match="training data 12 rows, checksum .* -> 12 rows, checksum"):
        learn(here, moved, "sft", starts / "gpt2", tmp_path / "run", "--max-update", 3)


def exact(here, rows: Path, run: Path, split: str) -> float:
    """The share of answers that are the references."""
    ask = ["--path", run, "--gen-subset", split, "--max-len", 24, "--output-format", "json"]
    _, out, _ = here(generate.main, rows, *ask, code=0)
    (answers,) = zip(*(json.loads(line)["answers"] for line in out.splitlines()), strict=True)
    return sum(one["text"] == one["reference"] for one in answers) / len(answers)


def test_a_few_answers_are_learned_by_heart(starts, pairs, tmp_path, here) -> None:
    flags = ["--train-subset", "few", "--valid-subset", "none", "--batch-size", 6, *NO_DROPOUT]
    flags += ["--pattern", "{source} = {}"]
    learn(here, pairs, "seq2seq", starts / "gpt2", tmp_path, *flags, "--max-update", 60)
    assert exact(here, pairs, tmp_path, "few") == 1.0


def test_long_contexts_are_learned_and_evaluated_in_windows(starts, tmp_path, here) -> None:
    draw = torch.Generator().manual_seed(2)
    for split, count in (("train", 12), ("dev", 5)):
        orders = [torch.randperm(len(WORDS), generator=draw).tolist() for _ in range(count)]
        contexts = [" ".join(WORDS[number] for number in order) for order in orders]
        paragraphs = [
            {
                "context": context,
                "qas": [{"id": f"{split}{number}", "question": "last ?", "answers": [{"text": context.split()[-1]}]}],
            }
            for number, context in enumerate(contexts)
        ]
        (tmp_path / f"{split}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    asked = ["--pattern", "{question} {} . {context}", "--target-field", "answer", "--truncate", "right"]
    asked += ["--seq-length", 40, "--target-length", 6, "--window-stride", 12]
    flags = [*asked, "--evaluate-with", "squad", "--validate-interval", 1, "--dropout", 0.1, "--num-workers", 1]
    run, parts = tmp_path / "run", tmp_path / "parts"
    learn(here, tmp_path, "seq2seq", starts / "glm", run, *flags, "--max-update", 6)
    for updates in (4, 6):
        learn(here, tmp_path, "seq2seq", starts / "glm", parts, *flags, "--max-update", updates)
    assert_same_weights(parts / "checkpoint_last", run / "checkpoint_last")
    task, _ = restore_task(run, str(tmp_path))
    data = task.load_split("dev")
    assert len(data) > 2 * 5
    references = [one["reference"] for one in data.questions]
    assert sum(reference != "N/A" for reference in references) >= 5
    assert [one["reference"] for one in task.load_split("dev").questions] == references

    ask = ["--path", str(run), "--evaluation", "squad", "--data", str(tmp_path / "dev.json"), "--device", "cpu"]
    ask += ["--max-len", "6", "--bootstrap", "0", "--submission", "--output"]
    here(evaluate.main, *ask, tmp_path / "one", code=0)
    ended = run_main(evaluate.main, [[*ask, str(tmp_path / "two")]] * 2)
    assert ended.returncode == 0, ended.stderr
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "predictions.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [record["idx"] for record in two] == [f"dev{number}" for number in range(5)]
    assert [record["chosen"] for record in two] == [record["chosen"] for record in one]
    (measured,) = json.loads((tmp_path / "two" / "results.json").read_text())["results"]
    assert measured["n"] == 5
    last = records_of(run, "valid")[-1]
    assert last["squad_squad_f1"] == pytest.approx(measured["metrics"]["squad_f1"]["value"])
    assert [*json.loads((tmp_path / "one" / "submission" / "squad.json").read_text())] == [one["idx"] for one in two]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_64_answers_are_learned_by_heart(starts, pairs, tmp_path, here, name: str) -> None:
    flags = ["--batch-size", 16, *NO_DROPOUT, "--pattern", "{source} = {}", "--valid-subset", "none"]
    flags += ["--lr", 0.005, "--lr-scheduler", "linear", "--warmup-updates", 20]
    learn(here, pairs, "seq2seq", starts / name, tmp_path, *flags, "--max-update", 500)
    assert exact(here, pairs, tmp_path, "train") == 1.0


def test_packed_rows_hold_the_questions_that_are_asked(starts, talks, tmp_path, here, monkeypatch) -> None:
    flags = ["--pack", "--template", "plain", "--max-update", 1]
    learn(here, talks, "sft", starts / "gpt2", tmp_path, *flags)
    task, _ = restore_task(tmp_path, str(talks))
    samples = task.load_split("valid")
    assert (len(samples), len(samples.questions)) == (2, 6)
    both = restore_task(tmp_path, f"{talks},{talks}")[0].load_split("valid")
    assert (len(both), [one["shown"] for one in both.questions]) == (4, 2 * [one["shown"] for one in samples.questions])
    ask = ["--path", tmp_path, "--output-format", "json", "--max-len", 4, "--min-len", 4]
    _, out, _ = here(generate.main, talks, *ask, code=0)
    records = [json.loads(line) for line in out.splitlines()]
    assert [one["source"] for one in records][:2] == ["Say quick.", "And fox lazy?"]

    # A prompt may be the last message of a conversation, which is asked as it was learned.
    said = [json.loads(line)["messages"] for line in (talks / "val.jsonl").read_text().splitlines()]
    lines = [json.dumps({"messages": messages[:number]}) for messages in said for number in (1, 3)]
    _, out, _ = here(
        generate.main, *ask, "--input", "-", "--input-format", "json", stdin="\n".join(lines).encode(), code=0
    )
    found = [json.loads(line)["answers"][0] for line in out.splitlines()]
    for one, answer in zip(records, found, strict=True):
        assert len(answer["tokens"]) == 4
        assert answer["tokens"] == one["answers"][0]["tokens"]
    generator = ftk.load_generator(tmp_path, device="cpu", max_len=4, min_len=4)
    earlier, last = said[0][:2], said[0][2]["content"]
    assert generator.generate(last, options={"messages": earlier}).text == found[1]["text"]
    assert generator.encode(last, {"messages": earlier}).request.prompt != generator.encode(last).request.prompt
    asked: list[tuple[str, Any]] = []
    encode = TextAnswerer.encode

    def spy(self: Any, prompt: str, options: Any = None, *own: Any, **given: Any) -> Any:
        asked.append((prompt, [*(options or {}).get("messages", ())]))
        return encode(self, prompt, options, *own, **given)

    monkeypatch.setattr(TextAnswerer, "encode", spy)
    lines = b"Hi.\nBye.\n/reset\nBye.\n"
    here(interactive.main, "--path", tmp_path, "--max-len", 4, "--chat", stdin=lines, code=0)
    assert [prompt for prompt, _ in asked] == ["Hi.", "Bye.", "Bye."]
    assert [len(earlier) > 0 for _, earlier in asked] == [False, True, False]
    assert asked[1][1][0] == {"role": "user", "content": "Hi."}
    for wrong, message in (([{"role": "boss", "content": "a"}], "'boss'"), ([3], "is missing")):
        with pytest.raises(UserError, match=message):
            generator.encode(last, {"messages": wrong})


def test_what_a_model_is_stays_as_it_was(made_place, pairs, tmp_path, here) -> None:
    """The options of a model that its usual task derives are those of the model that a run starts from."""
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 320, "block_positions": False}
    task, tokenizer = {"_name": "glm_blank", "block_positions": False}, made_place / "data-bin" / "tokenizer"
    save_model(tmp_path / "start", build_model("glm", **shape), tokenizer, task=task)
    learn(here, pairs, "seq2seq", tmp_path / "start", tmp_path / "run", "--max-update", 1)
    model = read_config(tmp_path / "run" / "checkpoint_last")["model"]
    assert {name: model[name] for name in shape} == shape


def test_a_new_model_learns_with_the_tokenizer_of_a_folder(made_place, talks, tmp_path, here) -> None:
    new = ["--arch", "glm_tiny", "--num-layers", 1, "--hidden-size", 16, "--num-attention-heads", 2]
    new += ["--tokenizer-folder", made_place / "data-bin", "--max-update", 1, "--save-dir", tmp_path / "run"]
    here(train.main, talks, "--task", "sft", *new, "--seq-length", 64, "--target-length", 16, code=0)
    assert read_config(tmp_path / "run" / "checkpoint_last")["model"]["vocab_size"] == 384
    new[1] = "t5_tiny"
    _, _, error = here(
        train.main, talks, "--task", "sft", *new[:10], "--max-update", 1, "--save-dir", tmp_path / "other", code=2
    )
    assert "a new encoder-decoder has no token that its decoder starts with; start SFTTask from a" in error


def test_data_are_shown_as_a_model_reads_them(starts, pairs, talks, here) -> None:
    asked = ["--split", "valid", "--task", "seq2seq"]
    _, out, _ = here(data.main, "show", pairs, *asked, "--path", starts / "gpt2", "--pattern", "{source} ={}", code=0)
    source, target = ((pairs / f"valid.{side}").read_text().splitlines()[0] for side in ("source", "target"))
    shown = out.replace("\n       ", "").replace("▁", "_")
    assert f"sample 0 of 8: {len(source) + 2 + len(target)} tokens, {len(target) + 1} targets" in out
    assert " ".join([*source.replace(" ", "_"), "_", "=", *target.replace(" ", "_")]) in shown
    _, out, error = here(data.main, "show", talks, "--task", "sft", "--path", starts / "t5", "--split", "valid", code=0)
    assert "S a y ▁" in out
    _, _, error = here(data.main, "show", talks, "--task", "sft", code=2)
    assert "rows have no tokenizer" in error


REFUSED = [
    ("gpt2", ["--pattern", "{} {source}"], "a causal model reads nothing after an answer"),
    ("gpt2", ["--pattern", "{text} {}"], "train.source:1: field 'text' is missing; there are: source, target"),
    ("gpt2", ["--pattern", "{source}"], "--pattern is '{source}'; it must hold {} once"),
    ("gpt2", ["--seq-length", 90], "--seq-length 90 with --target-length 24 is too long for the model"),
    (
        "gpt2",
        ["--seq-length", 512, "--target-length", 128],
        "--seq-length 512 with --target-length 128 (the task's defaults) is too long for the model: prompt and answer "
        "take 639 positions, but the model has 96; shorten them; --seq-length 72 with --target-length 24 fits",
    ),
    ("gpt2", ["--expected", "page"], "it must be one of word, sentence, text"),
    ("t5", ["--pack"], "--pack is for models that read question and answer in one row, not for encoder-decoders"),
    ("t5", ["--pattern", "{} {source}"], "an encoder-decoder is asked without a text after the answer"),
]


@pytest.mark.parametrize(("name", "flags", "message"), REFUSED)
def test_what_does_not_fit_is_said_in_a_line(starts, pairs, tmp_path, here, name, flags, message) -> None:
    asked = ["--task", "seq2seq", "--finetune-from", starts / name, "--max-update", 1, "--save-dir", tmp_path / "run"]
    _, _, error = here(train.main, pairs, *asked, "--seq-length", 32, "--target-length", 24, *flags, code=2)
    assert message in error
    assert len(error.splitlines()) <= 3
    assert not (tmp_path / "run").exists()


def test_a_model_that_writes_nothing_and_data_without_rows_are_refused(made_place, talks, tmp_path, here) -> None:
    asked = ["--task", "sft", "--max-update", 1, "--save-dir", tmp_path / "run"]
    new = ["--arch", "bert_tiny", "--tokenizer-folder", made_place / "data-bin"]
    _, _, error = here(train.main, talks, *asked, *new, code=2)
    assert "does not say how its models are asked; choose a model that writes texts" in error
    new = ["--arch", "glm_tiny", "--dataset", "indexed", "--seq-length", 64]
    _, _, error = here(train.main, made_place / "data-bin", *asked, *new, code=2)
    assert re.search(r"SFTTask reads rows, but IndexedCorpus \(.*\) has none; leave --dataset out", error)
    new = ["--arch", "gpt2_tiny", "--dataset", "rows", "--tokenizer-folder", made_place / "data-bin"]
    _, _, error = here(train.main, talks, *asked, *new, "--task", "causal_lm", code=2)
    assert re.search(r"CausalLMTask reads tokens, but RowsCorpus \(.*\) has rows; leave --dataset out", error)


def test_a_task_that_loads_splits_itself_is_not_blended(made_place, talks) -> None:
    class Own(SFTTask):
        def load_split(self, split: str) -> Any:
            return super().load_split(split)

    corpus = RowsCorpus(RowsConfig(data=f"{talks},{talks}"), load_tokenizer(made_place / "data-bin"))
    with pytest.raises(UserError, match="task Own cannot blend corpora, it defines load_split instead of make_samples"):
        Own(SFTConfig(), corpus=corpus, seed=1)
