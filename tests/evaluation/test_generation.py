"""The evaluation generation: models that learned to answer are asked as they learned it, others are cut at need."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftk.errors import UserError
from ftk.evaluation.evaluation import build_evaluation
from ftk.evaluation.metrics import measure
from ftk.evaluation.results import labelled
from ftk.generation.answering import TextAnswerer
from ftk.generation.config import GenerationConfig
from ftk.generation.continuation import TextContinuer
from ftk.generation.engine.request import Request
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.generation.processors.config import ProcessorConfig
from ftk.generation.processors.steering import Steering
from ftk.generation.search import Answer
from ftk.tasks.seq2seq.task import Seq2SeqConfig, Seq2SeqTask
from ftk.tasks.sft.task import SFTConfig, SFTTask, chat_framing
from tests.byte_tokenizer import CHATML, byte_tokenizer
from tests.small_run import LINES, WORDS


def trained(families: Any, task: Any, options: Any, max_len: int = 4) -> Any:
    """A generator whose model learned a task; without a task, one that learned to go on with texts."""
    own = vars(families["gpt2"])
    framing = own["framing"]
    if task is not None:
        framing = task.framing_as_trained(own["tokenizer"], own["model"].config, options)
    return SimpleNamespace(**{**own, "framing": framing}, config=GenerationConfig(max_len=max_len), steering=None)


def asked(line: str, folder: Path, generator: Any, *rows: dict[str, Any]) -> list[Any]:
    """Prompt in words, references, whether it was cut."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = build_evaluation(line).questions(str(folder / "rows.jsonl"), generator)
    return [(generator.tokenizer.decode(one.requests[0].prompt), one.references, one.truncated) for one in found]


ARTICLE = {"title": "the fox", "body": "jumps over a lazy dog", "summary": "fox jumps"}


def test_a_seq2seq_run_is_asked_with_all_fields_of_its_pattern(families, tmp_path) -> None:
    options = Seq2SeqConfig(pattern="{title} {body} So: {}", target_field="summary")
    generator = trained(families, Seq2SeqTask, options)
    ((prompt, references, was_cut),) = asked("generation", tmp_path, generator, ARTICLE)
    assert (prompt, references, was_cut) == ("the fox jumps over a lazy dog So:", ["fox jumps"], False)
    several = ARTICLE | {"summary": ["fox jumps", "it jumps"]}
    ((again, references, _),) = asked("generation target=summary", tmp_path, generator, several)
    assert (again, references) == (prompt, ["fox jumps", "it jumps"])


@pytest.mark.parametrize(("truncate", "kept"), [("left", slice(-6, None)), ("right", slice(0, 6))])
def test_a_task_cuts_questions_to_its_own_length_at_its_own_end(families, tmp_path, truncate, kept) -> None:
    options = Seq2SeqConfig(pattern="{source}{}", seq_length=6, truncate=truncate)
    generator = trained(families, Seq2SeqTask, options)
    text = " ".join(WORDS[:12])
    row = {"source": text, "target": "fox"}
    ((prompt, _, was_cut),) = asked("generation", tmp_path, generator, row)
    ids = generator.tokenizer.encode(text)
    assert was_cut
    assert prompt == generator.tokenizer.decode(ids[kept])
    with pytest.raises(UserError, match=r"rows.jsonl:1: the question is longer than the model's task reads"):
        asked("generation cut=false", tmp_path, generator, row)


def test_an_sft_run_is_asked_with_all_that_was_said_before(families, tmp_path) -> None:
    generator = trained(families, SFTTask, SFTConfig(template="plain", turns="last"))
    row = {"system": "she reads", "history": [["old", "friends"]], "instruction": "the fox", "input": "long letters"}
    ((prompt, references, _),) = asked("generation", tmp_path, generator, row | {"output": "lazy dog"})
    places = [prompt.find(text) for text in ("she reads", "old", "friends", "the fox", "long letters")]
    assert -1 not in places
    assert places == sorted(places)
    assert references == ["lazy dog"]
    of_each = trained(families, SFTTask, SFTConfig(template="plain"))
    found = asked("generation", tmp_path, of_each, row | {"output": "lazy dog"})
    assert [references for _, references, _ in found] == [["friends"], ["lazy dog"]]
    assert asked("generation target=output", tmp_path, of_each, row | {"output": ["a dog", "dog"]}) == [
        (prompt, ["a dog", "dog"], False)
    ]


def test_other_fields_are_asked_as_a_text(families, tmp_path) -> None:
    generator = trained(families, SFTTask, SFTConfig(template="plain"))
    row = {"question": "the fox", "answers": ["dog", "cat"]}
    ((prompt, references, _),) = asked("generation source=question target=answers", tmp_path, generator, row)
    assert ("the fox" in prompt, references) == (True, ["dog", "cat"])
    with pytest.raises(UserError, match=r"rows.jsonl:1: field 'instruction' is missing"):
        asked("generation", tmp_path, generator, row)


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "the quick fox jumps",
                    "qas": [
                        {"id": "a", "question": "she reads", "answers": [{"text": "fox"}, {"text": "quick fox"}]},
                        {"id": "b", "question": "old friends"},
                    ],
                }
            ]
        }
    ]
}


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (Seq2SeqTask, Seq2SeqConfig(pattern="{question} {context} {}", target_field="answer")),
        (SFTTask, SFTConfig(template="plain")),
        (None, None),
    ],
    ids=["seq2seq", "sft", "plain"],
)
def test_questions_of_squad_are_asked_with_all_answers_or_none(families, tmp_path, task, options) -> None:
    generator = trained(families, task, options)
    (tmp_path / "dev.json").write_text(json.dumps(SQUAD))
    evaluation = build_evaluation("squad")
    asked = evaluation.questions(str(tmp_path / "dev.json"), generator)
    prompts = [generator.tokenizer.decode(one.requests[0].prompt).split() for one in asked]
    assert [prompt[:6] for prompt in prompts] == [
        f"{question} the quick fox jumps".split() for question in ("she reads", "old friends")
    ]
    assert [one.references for one in asked] == [["fox", "quick fox"], []]
    records = [
        {"idx": one.idx, "place": one.place, "chosen": chosen, "references": one.references, "label": label}
        for one, chosen, label in zip(asked, ("fox", "N/A"), ("fox", None), strict=True)
    ]
    assert evaluation.submission(records) == ("squad.json", '{"a": "fox", "b": ""}\n')


def test_a_question_without_answers_is_answered_but_does_not_count(families, tmp_path) -> None:
    own = vars(families["gpt2"])
    generator = TextContinuer(own["tokenizer"], own["model"], own["framing"], GenerationConfig(max_len=3), None)
    (tmp_path / "dev.json").write_text(json.dumps(SQUAD))
    evaluation = build_evaluation("squad")
    first, second = evaluation.records(evaluation.questions(str(tmp_path / "dev.json"), generator), generator)
    assert (first["label"], second["label"]) == ("fox", None)
    assert {"correct", "scores"} <= first.keys()
    assert not {"correct", "scores"} & second.keys()
    assert [*measure(evaluation.metrics(), labelled([first, second]), evaluation.group)] == ["squad_em", "squad_f1"]


LONG = {"source": "she reads", "context": " ".join(WORDS * 2), "target": ["dog", "cat"]}


def in_windows(**options: Any) -> Seq2SeqConfig:
    return Seq2SeqConfig(
        pattern="{source} {context} {}", truncate="right", seq_length=24, **{"window_stride": 9} | options
    )


@pytest.mark.parametrize(
    ("said", "no_answer", "chosen"),
    [
        ([("N/A", -1), ("dog", -9), ("fox", -8)], "N/A", 2),
        ([("N/A", -1), ("N/A", -2), ("fox", -8)], "N/A", 2),
        ([("N/A", -3), ("N/A", -2), ("N/A", -8)], "N/A", 1),
        ([("fox", -3), ("N/A", -2), ("dog", -3)], "N/A", 0),
        ([("fox", -3), ("N/A", -2), ("dog", -4)], None, 0),
        ([("fox", -3), ("N/A", -2), ("lazy dog", -1)], "lazy dog", 0),
        ([("", -1), ("lazy dog", -2), ("fox", -3)], "lazy dog", 2),
        ([("", -1), ("fox", -2)], None, 1),
    ],
)
def test_the_best_answer_counts_that_is_not_the_one_of_windows_without(
    families, tmp_path, said, no_answer, chosen
) -> None:
    generator = trained(families, Seq2SeqTask, in_windows(no_answer=no_answer))
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(LONG)}\n" * 2)
    evaluation = build_evaluation("generation cut=false scoring=[exact_match]")
    questions = evaluation.questions(str(tmp_path / "rows.jsonl"), generator)
    num_windows = len(questions[0].requests)
    assert num_windows > len(said)
    said = said + [(no_answer or "N/A", -99)] * (num_windows - len(said))
    found = [[Answer(generator.tokenizer.encode(text), [score], score)] for text, score in said]
    generator.engine = lambda requests: SimpleNamespace(answers=lambda requests, progress: found * 2)
    records = evaluation.records(questions, generator)
    assert [(record["chosen"], record["logprob"], record["truncated"]) for record in records] == [
        (said[chosen][0], said[chosen][1], False)
    ] * 2
    assert records[0]["correct"] == (said[chosen][0] in LONG["target"])


def test_what_a_tokenizer_writes_for_no_answer_is_none(families, tmp_path) -> None:
    """As BERT's, which writes "n / a"."""
    generator = trained(families, Seq2SeqTask, in_windows())
    tokenizer = generator.tokenizer
    spaced = SimpleNamespace(encode=tokenizer.encode, decode=lambda ids: tokenizer.decode(ids).replace("N/A", "n / a"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(LONG | {"target": "N/A"}))
    evaluation = build_evaluation("generation scoring=[squad_em]")
    (one,) = evaluation.questions(str(tmp_path / "rows.jsonl"), generator)
    found = [[Answer(tokenizer.encode("N/A"), [-1.0], -1.0)] for _ in one.requests]
    generator.engine = lambda requests: SimpleNamespace(answers=lambda requests, progress: found)
    generator.tokenizer = spaced
    (record,) = evaluation.records([one], generator)
    assert (record["chosen"], record["correct"]) == ("N/A", True)


@pytest.mark.parametrize("target", ["N/A", ["N/A"], "lazy dog"])
@pytest.mark.parametrize("said", ["N/A", "lazy dog", ""])
@pytest.mark.parametrize("context", [LONG["context"], "the"])
def test_however_no_answer_is_said_it_is_the_one_of_the_rows(families, tmp_path, target, said, context) -> None:
    generator = trained(families, Seq2SeqTask, in_windows(no_answer="lazy dog"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(LONG | {"target": target, "context": context}))
    evaluation = build_evaluation("generation scoring=[squad_em]")
    (one,) = evaluation.questions(str(tmp_path / "rows.jsonl"), generator)
    assert (len(one.requests) > 1) == (context != "the")
    found = [[Answer(generator.tokenizer.encode(said), [-1.0], -1.0)] for _ in one.requests]
    generator.engine = lambda requests: SimpleNamespace(answers=lambda requests, progress: found)
    (record,) = evaluation.records([one], generator)
    assert (record["chosen"], record["references"], record["correct"]) == ("N/A", ["N/A"], True)


def test_an_empty_answer_is_empty_where_no_windows_were_learned(families, tmp_path) -> None:
    generator = trained(families, Seq2SeqTask, Seq2SeqConfig())
    (tmp_path / "rows.jsonl").write_text(json.dumps({"source": "she reads", "target": "dog"}))
    evaluation = build_evaluation("generation")
    (one,) = evaluation.questions(str(tmp_path / "rows.jsonl"), generator)
    generator.engine = lambda requests: SimpleNamespace(answers=lambda requests, progress: [[Answer([], [], 0.0)]])
    assert [record["chosen"] for record in evaluation.records([one], generator)] == [""]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_windows_are_asked_as_texts_of_their_own(families, tmp_path, penalty: float) -> None:
    own = vars(families["gpt2"])
    options, config = in_windows(), GenerationConfig(max_len=3, beam=2, length_penalty=penalty)
    framing = Seq2SeqTask.framing_as_trained(own["tokenizer"], own["model"].config, options)
    lengths = {"ends": framing.ends, "min_len": config.min_len, "max_len": config.max_len}
    steering = Steering(ProcessorConfig(), own["tokenizer"], **lengths)
    generator = TextAnswerer(own["tokenizer"], own["model"], framing, config, steering)
    alone = TextContinuer(own["tokenizer"], own["model"], own["framing"], config, steering)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(LONG | {"context": text}) + "\n" for text in LINES[:3]))
    evaluation = build_evaluation("generation")
    questions = evaluation.questions(str(tmp_path / "rows.jsonl"), generator)
    for one, record in zip(questions, evaluation.records(questions, generator), strict=True):
        assert len(one.requests) > 1
        prompts = [Request(request.prompt, config, steering.processors) for request in one.requests]
        found = [alone.engine([prompt]).answers([prompt])[0][0] for prompt in prompts]
        best = max(found, key=lambda answer: answer.score)
        assert record["chosen"] == own["tokenizer"].decode(best.tokens).strip()
        assert record["logprob"] == pytest.approx(sum(best.token_logprobs), rel=1e-4)
        assert record["length"] == sum(len(request.prompt) for request in one.requests)


def test_examples_stand_in_front_of_a_source_and_are_lost_first(families, tmp_path) -> None:
    shown = [{"source": f"the {word}", "target": ["dog", "cat"]} for word in ("fox", "old", "lazy")]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in shown))
    line = f"generation num_fewshot=2 fewshot_data={tmp_path}/train.jsonl"
    row = {"source": "she reads", "target": "letters"}
    generator = trained(families, None, None)
    ((prompt, _, was_cut),) = asked(line, tmp_path, generator, row)
    assert prompt.split()[-2:] == ["she", "reads"]
    assert (prompt.count("dog"), prompt.count("cat"), was_cut) == (2, 0, False)
    (source,) = build_evaluation(line).questions(str(tmp_path / "rows.jsonl"), generator)
    assert {*source.examples} < {f"{tmp_path}/train.jsonl:{number}" for number in (1, 2, 3)}
    tight = trained(families, None, None, max_len=128 - len(generator.tokenizer.encode("she reads")))
    ((prompt, _, was_cut),) = asked(line, tmp_path, tight, row)
    assert prompt.endswith("she reads")
    assert was_cut
    learned = trained(families, SFTTask, SFTConfig(template="plain"))
    with pytest.raises(UserError, match="`num_fewshot`: this model is asked about each row alone"):
        asked(line, tmp_path, learned, row)


def test_a_chat_model_is_asked_by_the_template_of_its_tokenizer(families, tmp_path) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer(tmp_path / "chat", chat_template=CHATML)
    framing = chat_framing(tokenizer, families["gpt2"].model.config)
    generator = trained(families, None, None)
    generator.tokenizer, generator.chat_framing = tokenizer, framing
    said = [
        {"role": role, "content": text}
        for text in ("the fox", "she reads")
        for role, text in (("user", text), ("assistant", "lazy dog"))
    ]
    rows = [{"messages": said}, {"source": "the fox", "target": ["a dog", "dog"]}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path, line = str(tmp_path / "rows.jsonl"), "generation chat=true"
    found = build_evaluation(line).questions(path, generator)
    assert [one.references for one in found] == [["lazy dog"], ["lazy dog"], ["a dog", "dog"]]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "chat")
    asked_about = (said[:1], said[:3], said[:1])
    expected = [theirs.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in asked_about]
    assert [one.requests[0].prompt for one in found] == expected
    with pytest.raises(UserError, match=r"rows.jsonl:1: field 'source' is missing; .*'generation chat=true'"):
        build_evaluation("generation").questions(path, generator)
    with pytest.raises(UserError, match="`num_fewshot`: this model is asked about each row alone"):
        build_evaluation(f"{line} num_fewshot=1 fewshot_data={path}").questions(path, generator)
    generator.config = GenerationConfig(max_len=framing().max_positions + 2 - len(expected[1]))  # one token too many
    cut = build_evaluation(line).questions(path, generator)[1]
    shorter = theirs.apply_chat_template(said[2:3], add_generation_prompt=True)["input_ids"]
    assert (cut.requests[0].prompt, cut.truncated) == (shorter, True)
    said[0]["content"] = "fox " * 20  # a text alone is cut at its beginning
    (tmp_path / "long.jsonl").write_text(json.dumps({"messages": said[:2]}))
    (long,) = build_evaluation(line).questions(str(tmp_path / "long.jsonl"), generator)
    assert (long.truncated, len(long.requests[0].prompt)) == (True, len(expected[1]) - 1)
    with pytest.raises(UserError, match=r"rows.jsonl:1: .* it does not fit the model's"):
        build_evaluation(f"{line} cut=false").questions(path, generator)
    generator.chat_framing = None
    with pytest.raises(UserError, match="chat=true is for causal models that ftk has not trained on answers"):
        build_evaluation(line).questions(path, generator)


def test_an_sft_run_is_asked_about_pairs_of_lines(families, tmp_path) -> None:
    generator = trained(families, SFTTask, SFTConfig(template="plain"))
    ((prompt, references, _),) = asked("generation", tmp_path, generator, {"source": "the fox", "target": "dog"})
    assert ("the fox" in prompt, references) == (True, ["dog"])


@pytest.mark.parametrize("too_many", [0, 1, 9])
def test_a_source_loses_at_its_left_what_the_positions_do_not_reach(families, tmp_path, too_many: int) -> None:
    text = " ".join(WORDS)
    ids = families["gpt2"].tokenizer.encode(text)
    # The last token of an answer is not read.
    generator = trained(families, None, None, max_len=128 + 1 - len(ids) + too_many)
    row = {"source": text, "target": "fox"}
    ((prompt, _, was_cut),) = asked("generation", tmp_path, generator, row)
    assert (prompt, was_cut) == (generator.tokenizer.decode(ids[too_many:]), too_many > 0)
    if was_cut:
        with pytest.raises(UserError, match=rf"rows.jsonl:1: the prompt is {len(ids)} tokens long"):
            asked("generation cut=false", tmp_path, generator, row)


def test_a_source_with_positions_of_its_own_leaves_those_of_the_answer_alone(families, tmp_path) -> None:
    generator = trained(families, None, None, max_len=100)
    special = generator.tokenizer.special
    generator.framing = SourceToTarget([special.eos], [special.pad], 128, ([], [special.eos]))
    text = " ".join(WORDS)
    assert 29 < len(generator.tokenizer.encode(text)) < 127
    ((_, _, was_cut),) = asked("generation", tmp_path, generator, {"source": text, "target": "fox"})
    assert not was_cut


def test_a_model_that_has_no_room_for_an_answer_says_so(families, tmp_path) -> None:
    generator = trained(families, None, None, max_len=200)
    with pytest.raises(UserError, match=r"rows.jsonl:1: the prompt is \d+ tokens long; with an answer of up to 200"):
        asked("generation", tmp_path, generator, {"source": "the fox", "target": "dog"})
