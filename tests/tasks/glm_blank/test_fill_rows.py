"""The task glm_fill: samples equal those made by hand, what is cut, what is refused, and runs that fill in turn."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftk.data.batches.collate import Collater
from ftk.data.supervised.row import Row
from ftk.errors import UserError
from ftk.evaluation.evaluation import build_evaluation
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.generation.search import Answer
from ftk.models import build_model
from ftk.tasks.answering.samples import AnswerDataset, PackedAnswers
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.infill.fill import BlankFiller
from ftk.tasks.glm_blank.infill.generator import BlankGenerator
from ftk.tasks.glm_blank.infill.rows import BlankAsking, RowFraming
from ftk.tasks.glm_blank.rows import GLMFillConfig, GLMFillTask
from ftk.tasks.seq2seq.task import Seq2SeqConfig, Seq2SeqTask
from ftk.tokenizers import load_tokenizer
from ftk.tokenizers.base import Tokenizer
from ftk_cli import evaluate, generate, train
from tests.small_run import WORDS, save_run

TEXT = "the [MASK] fox jumps [sMASK] a lazy [gMASK]"
ANSWERS = ["quick brown", "over", "dog while she reads"]


@pytest.fixture(scope="module")
def tokenizer(made_place: Path) -> Tokenizer:
    return load_tokenizer(made_place / "data-bin")


def encoded(tokenizer: Tokenizer, *rows: dict[str, Any], config: Any = None, **options: Any) -> Any:
    """The rows, and how the model is asked."""
    own = GLMFillConfig(**options)
    framing = RowFraming(tokenizer.special, config)
    asking = GLMFillTask.asking(own, tokenizer, framing)
    of_row = GLMFillTask.questions(own, tokenizer).of_row
    questions = [one for line, row in enumerate(rows, start=1) for one in of_row(Row(row, "rows.jsonl", line))]
    encoder = GLMFillTask.encoder(tokenizer, asking)
    return encoder.within(questions, own.seq_length, own.target_length, own.truncate), asking


def test_a_sample_is_the_original_s(tokenizer) -> None:
    """Answers behind each other, each at the place of its mask, behind its start token, counted within."""
    special = tokenizer.special
    (one,), asking = encoded(tokenizer, {"source": TEXT, "target": ANSWERS})
    sample = AnswerDataset(asking, [one]).sample(1, 0)
    (named,), _ = encoded(tokenizer, {"a": TEXT, "b": ANSWERS}, source_field="a", target_field="b")
    assert AnswerDataset(asking, [named]).sample(1, 0)["tokens"].tolist() == sample["tokens"].tolist()
    ids = [tokenizer.encode(f" {answer}") for answer in ANSWERS]
    context = [
        special.cls,
        *tokenizer.encode("the"),
        special.mask,
        *tokenizer.encode(" fox jumps"),
        special.smask,
        *tokenizer.encode(" a lazy"),
        special.gmask,
    ]
    tokens, targets, rows = [*context], [0] * len(context), [[*range(len(context))], [0] * len(context)]
    for answer, mask in zip(ids, (special.mask, special.smask, special.gmask), strict=True):
        tokens += [special.sop, *answer]
        targets += [*answer, special.eop]
        rows[0] += [context.index(mask)] * (len(answer) + 1)
        rows[1] += range(1, len(answer) + 2)
    assert sample["tokens"].tolist() == tokens
    assert sample["targets"].tolist() == targets
    assert sample["position_ids"].tolist() == rows
    assert sample["loss_mask"].tolist() == [False] * len(context) + [True] * (len(tokens) - len(context))
    assert int(sample["context_length"]) == len(context)
    assert one.reference == "the quick brown fox jumps over a lazy dog while she reads"


def test_a_text_that_does_not_end_in_a_long_blank_has_its_end(tokenizer) -> None:
    (one,), _ = encoded(tokenizer, {"source": "the [MASK] fox", "target": "quick"})
    assert one.before[-1] == tokenizer.special.eos
    assert one.answer.tolist() == [*tokenizer.encode(" quick"), tokenizer.special.eop]


@pytest.mark.parametrize(
    ("seq_length", "truncate", "kept"),
    [
        (500, "right", (0, 1, 2)),
        (40, "right", (0, 1)),
        (40, "left", (1, 2)),
        (12, "right", (0,)),
        (12, "left", (2,)),
        (3, "right", (0,)),
    ],
)
def test_a_long_text_keeps_as_many_blanks_as_fit_with_their_answers(tokenizer, seq_length, truncate, kept) -> None:
    between = " ".join(WORDS[:8])
    row = {"source": f"{between} [MASK] {between} [sMASK] {between} [MASK] {between}", "target": ["fox", "dog", "she"]}
    (one,), _ = encoded(tokenizer, row, seq_length=seq_length, truncate=truncate)
    special = tokenizer.special
    assert len(one.before) == min(seq_length, len(encoded(tokenizer, row)[0][0].before)) or len(kept) < 3
    assert len(one.before) <= seq_length
    assert (one.before[0], one.before[-1]) == (special.cls, special.eos)
    masks = [special.mask, special.smask, special.mask]
    assert [id_ for id_ in one.before if id_ in masks] == [masks[number] for number in kept]
    answers = [id_ for number in kept for id_ in (*tokenizer.encode(f" {row['target'][number]}"), special.eop)]
    assert one.answer.tolist() == answers
    assert one.was_cut == (seq_length < 500)


@pytest.mark.parametrize("truncate", ["left", "right"])
@pytest.mark.parametrize("seq_length", [12, 40, 500])
def test_right_answers_to_a_cut_text_are_its_reference(tokenizer, tmp_path, seq_length, truncate) -> None:
    between = " ".join(WORDS[:8])
    row = {"source": f"{between} [MASK] {between} [MASK] {between}.", "target": ["fox she", "dog"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 600}
    model = build_model("glm", vocab_size=tokenizer.padded_vocab_size(), **shape).eval()
    options = GLMFillConfig(seq_length=seq_length, truncate=truncate, target_length=4)
    framing = GLMFillTask.framing_as_trained(tokenizer, model.config, options)
    filler = BlankFiller(tokenizer, BlankGenerator(model, tokenizer.special, FillConfig()))
    filler.framing = framing
    (one,) = build_evaluation("generation").questions(str(tmp_path / "rows.jsonl"), filler)
    num_kept = len(one.prompt.blanks)
    texts = row["target"][:num_kept] if truncate == "right" else row["target"][-num_kept:]
    answers = [Answer(tokenizer.encode(f" {text}"), [-1.0], -1.0) for text in texts]
    assert one.references == [filler.result(one.prompt, answers).text.strip()]
    assert (num_kept, one.truncated) == (1 + (seq_length > 12), seq_length < 500)


@pytest.mark.parametrize("target_length", range(1, 9))
def test_of_long_answers_the_last_tokens_are_cut(tokenizer, target_length: int, caplog) -> None:
    row = {"source": "the [MASK] a [MASK] x [MASK] fox", "target": ["dog", "fox she", ""]}
    ids = [tokenizer.encode(" dog"), tokenizer.encode(" fox she"), []]
    whole = [id_ for answer in ids for id_ in (*answer, tokenizer.special.eop)]
    with caplog.at_level("INFO"):
        (one,), asking = encoded(tokenizer, row, target_length=target_length)
    sample = AnswerDataset(asking, [one]).sample(1, 0)
    assert sample["targets"][sample["loss_mask"]].tolist() == whole[:target_length]
    assert one.is_whole == (len(whole) <= target_length)
    assert ("1 of 1 texts have answers of more than `target_length`" in caplog.text) != one.is_whole


def test_sizes_losses_and_packing_are_those_of_other_answers(tokenizer) -> None:
    rows = [
        {"source": TEXT, "target": ANSWERS},
        {"source": "the [MASK] fox [MASK] she", "target": ["old", "reads letters"]},
        {"source": "friends in [MASK]", "target": ["silent rooms"]},
    ]
    torch.manual_seed(1)
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_positions": 64}
    model = build_model("glm", vocab_size=tokenizer.padded_vocab_size(), **shape).eval()
    found, asking = encoded(tokenizer, *rows, config=model.config)
    data = AnswerDataset(asking, found)
    samples = [data.sample(1, number) for number in range(len(data))]
    assert data.sizes(1).tolist() == [len(sample["tokens"]) for sample in samples]
    packed = PackedAnswers(data, 200)
    assert len(packed) == 1

    def loss(rows: list[Any]) -> float:
        batch = Collater(tokenizer.special)(rows)
        with torch.no_grad():
            logits = model.head(model.hidden_states(**batch.inputs).flatten(0, 1)[batch.places])
        return float(torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum"))

    asked = data.questions
    requests = [Request(one["prompt"]) for one in asked]
    given = [[asking.framing.continuation(one["answer"])] for one in asked]
    logprobs = [sum(one.logprobs) for (one,) in score(model, asking.framing, requests, given)]
    assert loss(samples) == pytest.approx(-sum(logprobs), rel=1e-5)
    assert loss([packed.sample(1, 0)]) == pytest.approx(loss(samples), rel=1e-5)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"source": TEXT, "target": ["a", "b"]}, "'target' has 2 answers, but field 'source' has 3 blanks; write one"),
        ({"source": TEXT, "target": "a"}, "'target' has 1 answer, but field 'source' has 3 blanks"),
        ({"source": "the fox", "target": ["a"]}, "'target' has 1 answer, but field 'source' has 0 blanks"),
        ({"source": "the fox", "target": []}, "'target' has 0 answers, but field 'source' has 0 blanks"),
        ({"source": "the [MASK]", "target": [3]}, "'target' holds what is no text"),
        ({"source": "the [MASK]", "target": 3}, "'target' is 3; it must be a list or a text"),
        ({"source": "the [MASK]"}, "'target' is missing"),
        ({"source": "the [MASK] [mask]", "target": ["a"]}, "'[mask]' at character 12 is not a blank; write [MASK]"),
    ],
)
def test_rows_that_do_not_fit_are_named(tokenizer, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        encoded(tokenizer, {"source": "a [MASK]", "target": ["b"]}, row)
    assert str(error.value).startswith("rows.jsonl:2: ")
    assert problem in str(error.value)


def test_what_is_nearly_a_blank_is_read_as_text_where_asked_for(tokenizer) -> None:
    row = {"source": "the [MASK] or [mask] fox", "target": ["quick"]}
    (one,), _ = encoded(tokenizer, row, misspelt_blanks="text")
    assert tokenizer.decode(one.before.tolist()[1:-1]).replace(" ", "") == row["source"].replace(" ", "")
    assert one.reference == "the quick or [mask] fox"


def test_room_is_that_of_one_answer(tokenizer) -> None:
    config = SimpleNamespace(max_positions=64)
    asking = BlankAsking(RowFraming(tokenizer.special, config), "word")
    asking.check_room(65, 63)
    with pytest.raises(UserError, match="`seq_length` 66 with `target_length` 63 is too long for the model"):
        asking.check_room(66, 63)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_other_models_are_refused(tokenizer, name: str) -> None:
    shape = {"gpt2": {"max_positions": 64}, "t5": {"head_dim": 8, "decoder_start_token": 0}}[name]
    config = build_model(name, vocab_size=512, num_layers=1, hidden_size=16, num_attention_heads=2, **shape).config
    with pytest.raises(UserError, match="`task` glm_fill is for models that fill several blanks of a text, which "):
        GLMFillTask.framing(tokenizer, config)


def test_a_text_without_a_row_is_refused_with_a_way_out(tokenizer) -> None:
    with pytest.raises(
        UserError, match="; give a folder of such rows, or texts with .MASK. to ftk-generate by --input$"
    ):
        GLMFillTask.questions(GLMFillConfig(), tokenizer).of_text(TEXT)


def test_a_task_of_one_answer_refuses_a_list_of_answers(tokenizer) -> None:
    row = Row({"source": TEXT, "target": ANSWERS}, "rows.jsonl", 2)
    with pytest.raises(UserError, match=r"^rows.jsonl:2: field 'target' is \['quick.*; it must be a text$"):
        [*Seq2SeqTask.questions(Seq2SeqConfig(), tokenizer).of_row(row)]


def test_a_run_learns_by_heart_and_fills_in_turn(made_place, tmp_path, here) -> None:
    rows = [
        {
            "source": f"{WORDS[n]} [MASK] {WORDS[n + 3]} [MASK] {WORDS[n + 5]} .",
            "target": [f"{WORDS[n + 1]} {WORDS[n + 2]}", WORDS[n + 4]],
        }
        for n in range(6)
    ]
    for split in ("train", "valid"):
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    save_run(tmp_path / "base", made_place / "data-bin", num_layers=2, hidden_size=32)
    usual = ["--seq-length", 48, "--target-length", 24, "--batch-size", 6, "--lr", 0.01, "--lr-scheduler", "constant"]
    usual += ["--dropout", 0.0, "--embedding-dropout", 0.0, "--attention-dropout", 0.0, "--validate-interval", 60]
    usual += ["--max-update", 60, "--save-dir", tmp_path / "run", "--evaluate-with", "generation scoring=[exact_match]"]
    started = ["--task", "glm_fill", "--finetune-from", tmp_path / "base"]
    here(train.main, tmp_path, *started, *usual, code=0)
    run = ["--path", tmp_path / "run", "--max-len", 12]
    _, out, _ = here(generate.main, tmp_path, *run, "--output-format", "json", code=0)
    for row, line in zip(rows, out.splitlines(), strict=True):
        answers = json.loads(line)["answers"]
        assert [one["reference"] for one in answers] == row["target"]
        assert [one["text"] for one in answers] == row["target"]
    reference = ["--score-reference", "--output-format", "json"]
    _, scored, _ = here(generate.main, tmp_path, *run[:2], *reference, code=0)
    assert all(len(json.loads(line)["candidates"][0]["answers"]) == 2 for line in scored.splitlines())
    asked = "".join(f"{row['source']}\n" for row in rows).encode()
    _, out, _ = here(generate.main, *run, "--input", "-", "--output-format", "json", stdin=asked, code=0)
    answers = [[one["text"] for one in json.loads(line)["answers"]] for line in out.splitlines()]
    assert answers == [row["target"] for row in rows]
    line = ["--evaluation", "generation scoring=[exact_match]", "--data", tmp_path / "valid.jsonl", "--bootstrap", 0]
    *_, err = here(evaluate.main, *run, "--evaluation", "generation target=x", *line[2:], code=2)
    assert "this model learned answers by fields of its own; leave them out" in err
    here(evaluate.main, *run, *line, "--output", tmp_path / "out", code=0)
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert (result["n"], result["metrics"]["exact_match"]["value"]) == (6, 100.0)
    first = json.loads((tmp_path / "out" / "predictions.jsonl").read_text().splitlines()[0])
    assert (first["chosen"], first["label"]) == ((" ".join(WORDS[:6]) + " ."),) * 2
    assert first["prompt"] == rows[0]["source"]
