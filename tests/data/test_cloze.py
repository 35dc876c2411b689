"""Cloze tasks: every built-in pattern by hand, what is code per data set, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftk.data.supervised.cloze_files import cloze_names, load_cloze
from ftk.data.supervised.row import Row
from ftk.data.supervised.rows import read_rows
from ftk.errors import UserError
from tests.data.asked_cloze import asked, rows_of, spelled

BOOLQ = {"passage": "The sky is “blue” – mostly.", "question": "is the sky blue", "label": True}
PASSAGE = 'The sky is "blue" - mostly.'
ENTAILED = {"premise": "Dogs bark.", "hypothesis": "Dogs are loud!.", "label": "entailment"}
BROAD = {"sentence1": "Dogs bark.", "sentence2": "Dogs are loud!.", "label": "not_entailment"}
WIC = {"word": "class", "sentence1": "A class.", "sentence2": "Real class.", "start1": 2, "end1": 7, "label": True}
ANSWERS = [{"text": "yes, a lot", "label": 1, "idx": 5}, {"text": "no", "label": 0, "idx": 6}]
RAIN = {"question": "Did it rain?", "answers": ANSWERS, "idx": 3}
MULTIRC = {"idx": 2, "passage": {"text": "It rained. ", "questions": [RAIN]}}
COPA = {"premise": "My body cast a shadow.", "choice1": "The sun was rising.", "choice2": "Grass was cut."}
COPA |= {"question": "cause", "label": 0, "idx": 7}
TARGET = {"span1_text": "Mark", "span1_index": 0, "span2_text": "he", "span2_index": 4}
WSC = {"text": "Mark told Pete, because he liked it.", "target": TARGET, "label": True, "idx": 1}
STARRED = "Mark told Pete, because *he* liked it."
ENTITIES = [{"start": 24, "end": 28}, {"start": 0, "end": 3}, {"start": 0, "end": 3}]
QUERY = {"idx": 4, "query": "He went to @placeholder, then home", "answers": [{"start": 0, "end": 3, "text": "Rome"}]}
RECORD = {"idx": 3, "passage": {"text": "Rome is old.\n@highlight\nParis is new", "entities": ENTITIES}, "qas": [QUERY]}
RACE = {"article": "A  b . C", "question": "The sky is _ today", "options": ["red", "blue", "up", "no"], "answer": "B"}
MNLI = {"premise": "Dogs bark!", "hypothesis": "They do.", "label": 2}
YAHOO = {"question_title": "Why", "question_content": "me", "best_answer": "So.", "topic": 9}
CLUEWSC = {"text": "小明告诉老王他来了", "label": "true"}
CLUEWSC["target"] = {"span1_text": "小明", "span1_index": 0, "span2_text": "他", "span2_index": 6}  # type: ignore[assignment]
MARKED = "#小明#告诉老王*他*来了"
SQUAD = {"context": "Ann won.", "question": "Who won?", "answer": "Ann", "answers": ["Ann", "Anna"]}

# Task -> a row, and for each pattern what it makes of it, by hand from the table of the original's patterns. "·" stands
# between parts, "~" in front of those that may be shortened, "≈" in front of such of the second half.
PATTERNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "boolq": (
        BOOLQ,
        [
            f"~{PASSAGE}· Question:·~ is the sky blue·? Answer:·[]·.",
            f"~{PASSAGE}· Question:·~ is the sky blue·? Answer:·[]·.",
            f"~{PASSAGE}· Based on the previous passage,·~ is the sky blue·?·[]·.",
            f"~{PASSAGE}· Based on the previous passage,·~ is the sky blue·?·[]·.",
            f"Based on the following passage·~ is the sky blue·?·[]·.·~ {PASSAGE}",
            f"Based on the following passage·~ is the sky blue·?·[]·.·~ {PASSAGE}",
        ],
    ),
    "rte": (
        ENTAILED,
        [
            '"·~Dogs are loud·" ?·[]·,· "·≈Dogs bark.·"',
            "~Dogs are loud·?·[]·,·≈ Dogs bark.",
            '"·~Dogs are loud·" ?·[]·. "·≈Dogs bark.·"',
            "~Dogs are loud·?·[]·.·≈ Dogs bark.",
            "~Dogs bark.· question:·~ Dogs are loud· True or False?· answer:·[]",
        ],
    ),
    "wic": (
        WIC,
        [
            '~"A class." / "Real class."· Similar sense of "class"?·[]·.',
            "~A class.·~ Real class.· Does class have the same meaning in both sentences?·[]",
            'class· .· Sense (1) (a) "·~A class.·"· (·[]·) "·Real class.·"',
        ],
    ),
    "multirc": (
        MULTIRC,
        [
            "~It rained·.· Question:· Did it rain?· Is it· yes, a lot·?·[]·.",
            '~It rained·.· Question:· Did it rain·?· Is the correct answer "·yes, a lot·"?·[]·.',
            '~It rained·. Based on the previous passage,· Did it rain·?· Is "·yes, a lot·" a correct answer?·[]·.',
            "~It rained· Did it rain·- [·[]·]·yes, a lot",
            "~It rained·.· Question:· Did it rain·?· yes, a lot·?·[]·.",
        ],
    ),
    "copa": (
        COPA,
        [
            '"·the sun was rising·" or "·grass was cut·"?·~ My body cast a shadow· because·[]·.',
            "the sun was rising· or· grass was cut·?·~ My body cast a shadow· because·[]·.",
            '"·the sun was rising·" or "·grass was cut·"·~ My body cast a shadow· because·[]·.',
            '"·the sun was rising·" or "·grass was cut·"?·~My body cast a shadow·[]· the sun was rising',
        ],
    ),
    "wsc": (
        WSC,
        [
            f"~{STARRED}· The pronoun '*he*' refers to·[]·.",
            f"~{STARRED}· In the previous sentence, the pronoun '*he*' refers to·[]·.",
            f"~{STARRED}· Question: In the passage above, what does the pronoun '*he*' refer to?· Answer:·[]·.",
        ],
    ),
    "record": (RECORD, ["~Rome is old.\n- Paris is new· He went to·[]·, then home"]),
    "race": (
        RACE,
        ["~A b. C·≈ The sky is·[]·≈ today", "~A b. C· Based on the previous passage,·≈ The sky is·[]·≈ today"],
    ),
    "mnli": (MNLI, ['"·~Dogs bark·" ?·[]·, "·≈They do.·"', "~Dogs bark·?·[]·,·≈They do."] * 2),
    "sst2": ({"sentence": "A film", "label": 1}, ["~A film· It was·[]·."] * 2),
    "cola": ({"sentence": "A film", "label": 1}, ['"·~A film·"· This is·[]·.']),
    "qnli": (
        {"question": "Who won?", "sentence": "Ann won.", "label": 0},
        [
            "~Ann won.· Question:·~ Who won·? Do you know the answer?·[]·.",
            "~Ann won.· Based on the previous passage, do you know the answer·~ Who won·?·[]·.",
            "Based on the following passage, do you know the answer·~ Who won·?·[]·.·~ Ann won.",
        ],
    ),
    "mrpc": (
        {"sentence1": "He left.", "sentence2": "The man left.", "label": 1},
        ["~He left.·[]·, ·≈the man left.", "~He left.· Does it mean that·≈the man left·?·[]"],
    ),
    "qqp": (
        {"question1": "How far?", "question2": "What distance?", "label": 0},
        ["~How far?· Do you mean ·≈what distance?·[]·.", "~How far?·[]·, ·≈what distance?"],
    ),
    "yelp_polarity": (
        {"text": "Nice.", "label": 1},
        [
            "It was·[]·.·~Nice.",
            "~Nice.·. All in all, it was·[]·.",
            "Just·[]·!·≈Nice.",
            "~Nice.· In summary, the restaurant is·[]·.",
        ],
    ),
    "ag_news": (
        {"title": "T.", "description": "D.", "label": 3},
        [
            "[]·:·~T.·~D.",
            "[]· News:·~T.·~D.",
            "~T.·(·[]·)·~D.",
            "~T.·~D.·(·[]·)",
            "[ Category:·[]·]·~T.·~D.",
            "[]·-·~T.·~D.",
        ],
    ),
    "yahoo": (
        YAHOO,
        [
            "[]·:·~Why me·~So.",
            "[]· Question:·~Why me·~So.",
            "~Why me·(·[]·)·~So.",
            "~Why me·~So.·(·[]·)",
            "[ Category:·[]·]·~Why me·~So.",
            "[]·-·~Why me·~So.",
        ],
    ),
    "afqmc": (
        {"sentence1": "花呗怎么用", "sentence2": "如何用花呗", "label": "0"},
        ["~花呗怎么用·？·你是说·≈如何用花呗·？·[]·。", "~花呗怎么用·？·[]·，·≈如何用花呗"],
    ),
    "tnews": ({"sentence": "股市“大跌”", "keywords": "", "label": "114"}, ["标题：·~股市“大跌”·关键词：·类别：·[]"]),
    "cluewsc": (
        CLUEWSC,
        [f"~{MARKED}·代词'*他*'·[]·指#小明#.", f"在如下的句子中：·~{MARKED}·代词'*他*'·[]·指'#小明#'."],
    ),
}
PATTERNS["squad_cloze"] = (SQUAD, ["~Ann won.· Who won?·[]·."])
PATTERNS["cmrc_cloze"] = (SQUAD, ["~Ann won.·请问，Who won?·[]·。", "根据以下信息：·~Ann won.·请问，Who won?·[]·。"])
PATTERNS["yelp_full"] = ({"text": "Nice.", "label": 4}, PATTERNS["yelp_polarity"][1])
PATTERNS["cb"] = (
    ENTAILED,
    [*PATTERNS["rte"][1][:4], "~Dogs bark.· question:·~ Dogs are loud!.· true, false or neither?· answer:·[]"],
)
PATTERNS["ax_b"] = (BROAD, PATTERNS["rte"][1])
PATTERNS["ax_g"] = (ENTAILED, PATTERNS["rte"][1])

# Task and pattern -> candidates, and which of them is right for the row above.
YES, LOWER = (" No", " Yes"), (" false", " true")
CANDIDATES: dict[tuple[str, int], tuple[tuple[str, ...], int]] = {
    **{("boolq", number): ((YES, LOWER)[number % 2], 1) for number in range(6)},
    **{(name, number): ((" Yes", " No"), right) for name, right in (("rte", 0), ("ax_b", 1)) for number in range(4)},
    ("rte", 4): ((" true", " false"), 0),
    ("cb", 3): ((" Yes", " No", " Maybe"), 0),
    ("cb", 4): ((" true", " false", " neither"), 0),
    ("wic", 0): (YES, 1),
    ("wic", 2): (("2", "b"), 1),
    ("multirc", 0): (YES, 1),
    ("multirc", 3): ((" False", " True"), 1),
    ("copa", 0): ((" the sun was rising", " grass was cut"), 0),
    ("copa", 3): ((" because", " because"), 0),
    ("wsc", 2): ((" Mark",), 0),
    ("record", 0): ((" Paris", " Rome"), 1),
    ("race", 0): ((" red", " blue", " up", " no"), 1),
    ("mnli", 0): ((" Right", " Maybe", " Wrong"), 2),
    ("mnli", 2): ((" Yes", " Maybe", " No"), 2),
    ("sst2", 0): ((" terrible", " great"), 1),
    ("sst2", 1): ((" bad", " good"), 1),
    ("cola", 0): ((" incorrect", " correct"), 1),
    ("qnli", 0): ((" Yes", " No"), 0),
    ("mrpc", 0): (YES, 1),
    ("qqp", 0): (YES, 0),
    ("yelp_polarity", 0): ((" bad", " good"), 1),
    ("yelp_full", 0): ((" terrible", " bad", " okay", " good", " great"), 4),
    ("ag_news", 0): ((" World", " Sports", " Business", " Tech"), 3),
    ("afqmc", 0): ((" 不是", " 是"), 0),
    ("cluewsc", 1): (("不是", "是"), 1),
    ("squad_cloze", 0): ((" Ann",), 0),
    ("cmrc_cloze", 0): (("Ann",), 0),
}


@pytest.mark.parametrize("name", cloze_names())
def test_every_pattern_is_that_of_the_table(name: str) -> None:
    row, expected = PATTERNS[name]
    cloze = load_cloze(name)
    assert [*cloze.patterns] == [*range(len(expected))]
    assert [spelled(asked(name, row, pattern=number)[0]) for number in cloze.patterns] == expected


@pytest.mark.parametrize(("name", "pattern"), CANDIDATES)
def test_candidates_have_their_space_and_the_label_says_which_is_right(name: str, pattern: int) -> None:
    question = asked(name, PATTERNS[name][0], pattern=pattern)[0]
    assert (question.candidates, question.right[0]) == CANDIDATES[name, pattern]


def test_usual_patterns_and_scorings_are_those_of_the_published_runs() -> None:
    usual = {name: (cloze.pattern, cloze.scoring, cloze.end) for name in cloze_names() if (cloze := load_cloze(name))}
    words, texts = ("restricted_logits", False), ("sum", True)
    published = {"boolq": (4, *words), "cb": (3, *words), "wic": (1, *words), "wsc": (2, "mean", True)}
    published |= dict.fromkeys(("copa", "record", "race", "squad_cloze", "cmrc_cloze"), (0, *texts))
    assert usual == {name: published.get(name, (0, *words)) for name in cloze_names()}


def test_a_label_that_is_missing_is_not_false() -> None:
    unlabelled = {key: value for key, value in BOOLQ.items() if key != "label"}
    assert [question.right for question in asked("boolq", unlabelled, BOOLQ)] == [None, (1,)]
    with pytest.raises(UserError, match=r"rows.jsonl:2: field 'label' is missing; a row to learn from"):
        asked("boolq", BOOLQ, unlabelled, train=True)
    of_datasets = {"sentence": "It is cold.", "label": -1}  # a row of a test split
    assert asked("cola", of_datasets)[0].right is None
    with pytest.raises(UserError, match="field 'label' is -2; it must be one of 0, 1"):
        asked("cola", of_datasets | {"label": -2})


# -- what is code per data set ---------------------------------------------------------------------------------


def test_copa_is_learned_twice_with_the_choices_swapped() -> None:
    own, swapped = asked("copa", COPA | {"question": "effect"}, train=True)
    assert own.candidates == swapped.candidates[::-1]
    assert (own.right, swapped.right, own.idx, swapped.idx) == ((0,), (1,), 7, "7m")
    assert spelled(swapped).startswith('"·grass was cut·" or "·the sun was rising·"?·~ My body cast a shadow·, so·')
    of_csv = Row({name: str(value) for name, value in COPA.items()}, "rows.csv", 2, is_text=True)
    assert [one.right for one in load_cloze("copa").questions([of_csv], None, True)] == [(0,), (1,)]
    both = asked("copa", COPA, pattern=3)[0]
    assert spelled(both, 1).endswith("shadow·[]· grass was cut")


SAID = "Ann met Eve , but she left"


@pytest.mark.parametrize(
    ("text", "pronoun", "index", "marked"),
    [
        (SAID, "she", 5, "Ann met Eve , but *she* left"),
        (SAID, "she", 6, "Ann met Eve , but *she* left"),
        (SAID, "she", 4, "Ann met Eve , but *she* left"),
        ("Ann hit him, hard", "him", 2, "Ann hit *him* , hard"),
        ("Ann said She's in", "she", 2, "Ann said *She* 's in"),
        ("he and her and he", "he", 3, "he and her and *he*"),
    ],
)
def test_a_pronoun_beside_its_index_or_with_punctuation_is_found(text, pronoun, index, marked) -> None:
    target = {"span1_text": "Ann", "span2_text": pronoun, "span2_index": index}
    (question,) = asked("wsc", {"text": text, "target": target, "label": True})
    assert question.texts[0].before[0].text == marked


def test_a_pronoun_that_is_not_there_is_named() -> None:
    target = {"span1_text": "Ann", "span2_text": "he", "span2_index": 1}
    message = "rows.jsonl:1: field 'target.span2_index' is 1, but 'he' is not near it in the 3 words of 'text'"
    with pytest.raises(UserError, match=message):
        asked("wsc", {"text": "Ann met her", "target": target, "label": True})


def test_wsc_is_true_where_the_asked_span_wins() -> None:
    others = {"candidates": [{"text": "Pete"}, {"text": "Eve"}, {"text": "Pete"}]}
    true, false = asked("wsc", WSC | others, WSC | others | {"label": False})
    assert true.candidates == (" Mark", " Pete", " Eve")
    assert true.labels == (True, False, False)
    assert (true.right, false.right) == ((0,), (1, 2))
    alone, wrong = asked("wsc", WSC, WSC | {"label": False})
    assert (alone.right, wrong.right, wrong.otherwise) == ((0,), (), False)


def test_wsc_is_learned_from_true_rows_with_at_most_ten_candidates() -> None:
    many = {"candidates": [{"text": f"c{number}"} for number in range(12)]}
    dealt = asked("wsc", WSC | many, WSC | many | {"label": False}, train=True)
    assert [len(question.candidates) for question in dealt] == [10, 10]
    assert dealt[1].candidates == (" Mark", " c9", " c10", " c11", *(f" c{number}" for number in range(6)))
    assert len(asked("wsc", WSC | many)[0].candidates) == 13


def test_multirc_asks_about_each_answer_and_groups_them_by_question() -> None:
    first, second = asked("multirc", MULTIRC)
    assert (first.idx, second.idx, first.group, second.group) == ([2, 3, 5], [2, 3, 6], (2, 3), (2, 3))
    assert (first.right, second.right, second.labels) == ((1,), (0,), (0, 1))


def test_record_learns_from_one_right_answer_among_ten_candidates() -> None:
    (whole,) = asked("record", RECORD)
    assert (whole.candidates, whole.right, whole.answers) == ((" Paris", " Rome"), (1,), ("Rome",))
    assert (whole.labels, whole.idx, whole.group) == (("Paris", "Rome"), 4, (3, 4))
    names = [f"N{number:02}" for number in range(14)]
    entities = [{"start": 4 * number, "end": 4 * number + 2} for number in range(14)]
    query = QUERY | {"answers": [{"text": "N03"}, {"text": "N01"}]}
    row = {"idx": 0, "passage": {"text": " ".join(names), "entities": entities}, "qas": [query]}
    learned = asked("record", row, train=True)
    assert [question.candidates[0] for question in learned] == [" N01", " N03"]
    for question in learned:
        assert question.right == (0,)
        assert len(set(question.candidates)) == 10
        assert not {" N01", " N03"} & set(question.candidates[1:])
    assert [question.candidates for question in asked("record", row, train=True)] == [
        question.candidates for question in learned
    ]
    assert asked("record", row)[0].right == (1, 3)
    unlabelled = {key: value for key, value in QUERY.items() if key != "answers"}
    assert asked("record", RECORD | {"qas": [unlabelled]})[0].right is None


def test_race_without_a_place_for_the_answer_asks_behind_the_question() -> None:
    row = RACE | {"question": "What is it?"}
    expected = [
        "~A b. C· Question:·≈ What is it?· Answer:·[]",
        "~A b. C· Based on the previous passage,·≈ What is it?·[]",
    ]
    assert [spelled(asked("race", row, pattern=number)[0]) for number in (0, 1)] == expected


def test_the_spans_of_cluewsc_are_found_beside_their_index() -> None:
    target = {"span1_text": "老王", "span1_index": 3, "span2_text": "他", "span2_index": 9}
    (question,) = asked("cluewsc", CLUEWSC | {"target": target})
    assert question.texts[0].before[0].text == "小明告诉#老王#*他*来了"


# -- the files at hand -----------------------------------------------------------------------------------------


def test_all_rows_of_the_files_at_hand_are_read(test_data: Path) -> None:
    folder = test_data / "superglue"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing")
    found: dict[str, int] = {}
    for name in ("boolq", "copa", "wsc"):
        cloze = load_cloze(name)
        for path in sorted((folder / {"boolq": "BoolQ"}.get(name, name.upper())).glob("*.jsonl")):
            rows = [*read_rows(str(path))]
            questions = cloze.questions(rows, train=path.stem == "train")
            found[f"{name} {path.stem}"] = len(questions)
            assert all((question.right is None) == (path.stem == "test") for question in questions)
    expected = {"boolq train": 1000, "boolq val": 3270, "copa test": 500, "copa train": 800, "copa val": 100}
    assert found == expected | {"wsc test": 146, "wsc train": 259, "wsc val": 104}


HOSTILE = [
    ("70_copa_bad.jsonl", "copa", 1, r"field 'label' is missing; a row to learn from says"),
    ("70_copa_bad.jsonl", "copa", 2, r"field 'label' is 2; it must be one of 0, 1"),
    ("70_copa_bad.jsonl", "copa", 3, r"field 'choice1' is None; it must be a text"),
    ("70_copa_bad.jsonl", "copa", 4, r"field 'question' is 'why'; it must be one of 'cause', 'effect'"),
    ("70_copa_bad.jsonl", "copa", 5, r"field 'label' is '1'; it must be a whole number"),
    ("71_wic_bad_offsets.jsonl", "wic", 1, r"field 'start1' is 200 and 'end1' is 205; they are places in 'sentence1'"),
    ("71_wic_bad_offsets.jsonl", "wic", 2, r"field 'start1' is -1 and 'end1' is 0; .*0 <= start1 < end1 <= 8"),
    ("73_multirc_empty.jsonl", "multirc", 0, r"field 'passage.questions' is empty; write at least one"),
    ("73_multirc_empty.jsonl", "multirc", 1, r"field 'answers' is empty; write at least one"),
    ("73_multirc_empty.jsonl", "multirc", 2, r"field 'passage.text' is missing"),
]


@pytest.mark.parametrize(("file", "name", "row", "message"), HOSTILE)
def test_rows_of_the_hostile_files_are_named(test_data, file: str, name: str, row: int, message: str) -> None:
    path = test_data / "hostile" / file
    if not path.exists():
        pytest.skip(f"{path} is missing")
    rows = [*read_rows(str(path))]
    with pytest.raises(UserError, match=rf"{file}:{row + 1}: {message}"):
        load_cloze(name).questions([rows[row]], train=True)


# -- a user's own task -----------------------------------------------------------------------------------------
def test_names_that_are_unknown_or_files_that_are_missing_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown cloze task 'bolq'; did you mean 'boolq'"):
        load_cloze("bolq")
    with pytest.raises(UserError, match="cannot read the cloze task .*no.yaml: No such file"):
        load_cloze(str(tmp_path / "no.yaml"))
    with pytest.raises(UserError, match="`pattern` 6: boolq has the patterns 0, 1, 2, 3, 4, 5"):
        asked("boolq", BOOLQ, pattern=6)
    with pytest.raises(UserError, match="rows.jsonl:1: has 3 candidates, but race has 4 labels"):
        asked("race", RACE | {"options": ["a", "b", "c"]})
    with pytest.raises(UserError, match="rows.jsonl:1: field 'options' holds 3; a candidate is a text"):
        asked("race", RACE | {"options": ["a", "b", "c", 3]})
    file = tmp_path / "each.yaml"
    file.write_text("labels: [0, 1, 2, 3]\npatterns: [{text: '{each}{gap}', candidates: '{a}', each: [a, b]}]")
    with pytest.raises(UserError, match="rows.jsonl:1: has 4 candidates, but 'each' has 2 fields"):
        load_cloze(str(file)).questions(rows_of({"a": ["1", "2"], "b": "3", "label": 3}))
