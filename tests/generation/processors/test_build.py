"""Options: how they become processors, what contradicts what, and answers of real generators under them."""

from __future__ import annotations

import os
import re
import sys
from string import ascii_lowercase as WORD

import pytest

from ftk.errors import UserError
from ftk.generation.processors import ProcessorConfig, build_processors
from ftk.generation.processors.phrases import spellings
from ftk.generation.processors.progress import UnorderedProgress
from ftk.generation.processors.steering import Steering
from ftk.tasks.glm_blank import BlankFiller, BlankGenerator
from ftk.tasks.glm_blank.infill.blanks import end_ids
from tests.generation.processors.helpers import Letters, allowed, run, state_of
from tests.generation.slow import small_model
from tests.tasks.glm_blank.infill.test_fill import own_tokenizer, tokenizer  # noqa: F401  (fixtures)

LETTERS = Letters()
ENDS = end_ids(LETTERS.special)
COMMANDS = {0, 3, 4, 5}  # pad, sop, mask, cls; 2 and 6 end an answer, 1 is unknown


def ids(text):
    return LETTERS.encode(text)


def chain(**options):
    return build_processors(None, LETTERS, ends=ENDS, max_len=8, **options)


def allowed_after(tokens, blank=0, **options):
    state = state_of([[tokens]], vocab_size=70, blank=[blank], ends=(2, 6), max_len=8)
    return allowed(run(chain(**options), state))[0][0]


def test_no_command_token_and_no_row_without_a_token_ever():
    assert allowed_after([]) == set(range(62)) - COMMANDS


def test_words_are_forbidden_with_a_space_in_front_and_without():
    found = allowed_after(ids("a"), forbid_words=["b", "ab"])
    assert not found & {*ids("b"), *ids(" b")}
    assert ids("a")[0] in found
    assert ids("b")[0] in allowed_after(ids("b"), forbid_words=["ab"])
    assert ids("b")[0] not in allowed_after(ids(" a"), forbid_words=["ab"])


def test_a_file_of_words_is_read_line_by_line(tmp_path):
    (tmp_path / "bad.txt").write_text("\ufeffxy\n\n  z  \n", encoding="utf-8")
    found = allowed_after(ids("x"), forbid_words_file=str(tmp_path / "bad.txt"), forbid_words=["q"])
    assert not found & {*ids("y"), *ids("z"), *ids("q")}
    (tmp_path / "bad.txt").write_text("ab\nE\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.txt:2: 'E': the tokenizer does not know"):
        chain(forbid_words_file=str(tmp_path / "bad.txt"))
    with pytest.raises(UserError, match="No such file"):
        chain(forbid_words_file=str(tmp_path / "none.txt"))
    (tmp_path / "bad.txt").write_bytes(b"ab\n\xff")
    with pytest.raises(UserError, match="not UTF-8 at byte 4"):
        chain(forbid_words_file=str(tmp_path / "bad.txt"))


def test_one_prefix_is_for_all_blanks_and_several_are_for_one_each():
    begin = {*ids("a"), *ids(" a")}
    assert allowed_after([], blank=5, prefix=["ab"]) == begin
    assert allowed_after([], blank=0, prefix=["", "ab"]) == set(range(62)) - COMMANDS
    assert allowed_after([], blank=1, prefix=["", "ab"]) == begin
    assert allowed_after([], blank=2, prefix=["", "ab"]) == set(range(62)) - COMMANDS


def test_constraints_go_to_the_blanks_that_are_named():
    options = {"constraints": ["ab", "c"], "constraint_answers": [2, 0]}
    tight = ids("xxxxxxx")
    assert allowed_after(tight, blank=0, **options) == {*ids("c"), *ids(" c")}
    assert allowed_after(tight[:-2], blank=1, **options) >= {*ids("c"), *ids("a")}
    assert allowed_after(tight[:-2], blank=1, **options) == {*ids("c"), *ids("a"), *ids(" c"), *ids(" a")}
    only_second = {"constraints": ["ab"], "constraint_answers": [2]}
    assert 2 in allowed_after(tight, blank=0, **only_second)
    assert 2 in allowed_after(tight, blank=2, **only_second)
    assert allowed_after(tight[:-1], blank=1, **only_second) == {*ids("a"), *ids(" a")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_lens": [-1]}, "min_lens holds -1"),
        ({"max_lens": [0]}, "max_lens holds 0; it must be at least 1"),
        ({"max_lens": [9]}, "max_lens holds 9; it must be from min_len 0 to max_len 8"),
        ({"min_lens": [5], "max_lens": [3]}, "answer 1: min_lens 5 is above max_lens 3"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be from 1e-6 to 1e6"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan; it must be from"),
        ({"presence_penalty": 2e6}, "presence_penalty is 2000000.0; it must be from"),
        ({"logit_bias": ["a=1"]}, "logit_bias holds 'a=1'; write ID=NUMBER"),
        ({"logit_bias": ["1=1e9"]}, "logit_bias holds '1=1e9'; write ID=NUMBER"),
        ({"logit_bias": ["99=1"]}, "logit_bias: 99 is no id of the tokenizer's"),
        ({"stop_token_ids": [99]}, "stop_token_ids: 99 is no id of the tokenizer's"),
        ({"repetition_penalty_prompt": True}, "repetition_penalty_prompt needs a repetition_penalty"),
        ({"unk_penalty": float("nan")}, "unk_penalty is nan"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size is -2"),
        ({"forbid_words": [" "]}, "forbid_words holds an empty text"),
        ({"constraints": [""]}, "constraints holds an empty text"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"constraints": ["a"], "constraint_answers": [1, 2]}, "constraint_answers has 2 numbers for 1 constraints"),
        ({"constraints": ["a"], "constraint_answers": [-1]}, "constraint_answers holds -1; it must be at least 0"),
        ({"ordered_constraints": True}, "ordered_constraints needs constraints"),
        ({"constraints": ["É"]}, "constraints 'É': the tokenizer does not know a part of it"),
        ({"constraints": ["abcdefghi"]}, "constraints 'abcdefghi' need 9 tokens, but an answer has room for 8"),
        ({"constraints": ["abcde", "fghij"]}, "'abcde', 'fghij' need 10 tokens"),
        (
            {"constraints": ["abcd"], "max_lens": [8, 3]},
            "constraints 'abcd' need 4 tokens, but answer 2 has room for 3; raise `max_len` or max_lens",
        ),
        ({"prefix": ["abcdefghi"]}, "prefix 'abcdefghi': it needs 9 tokens, but an answer has room for 8"),
        ({"prefix": ["abcde"], "constraints": ["fghi"]}, "prefix 'abcde': it and the constraints need 9 tokens"),
        ({"prefix": ["abc"], "forbid_words": ["bc"]}, "prefix 'abc' must come, but 'bc' in it is forbidden"),
        ({"constraints": ["abc"], "forbid_words": ["c"]}, "constraints 'abc' must come, but 'c' in it is forbidden"),
        ({"prefix": ["abc"], "stop": ["b"]}, "prefix 'abc' holds 'b', at which an answer stops"),
        ({"constraints": ["abc"], "stop": ["bc"]}, "constraints 'abc' holds 'bc', at which an answer stops"),
    ],
)
def test_contradictions_are_told_with_their_names(options, message):
    with pytest.raises(UserError) as error:
        chain(**options)
    assert message in str(error.value)


def test_a_prefix_that_brings_the_constraint_along_fits():
    assert allowed_after(ids("abcde"), prefix=["abcdef"], constraints=["cdefgh"]) == set(ids("f"))


def test_overlapping_constraints_fit_where_one_behind_the_other_would_not():
    chain(constraints=["abcdef", "defghh"[:5]])


LIMIT = "has room for 8; raise `max_len`"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constraints": ["ab" * 4_000]}, "ba ... (8,000 characters) need 8000 tokens, but an answer " + LIMIT),
        ({"constraints": [f"{a}{b}{c}" for a in WORD for b in WORD for c in WORD]}, "more need 17576 tokens, but"),
        ({"constraints": ["ab"] * 5_000, "ordered_constraints": True}, "and 4,997 more need 10000 tokens, but"),
        ({"prefix": ["ab" * 4_000]}, "ba ... (8,000 characters): it needs 8000 tokens, but an answer " + LIMIT),
    ],
)
def test_what_is_far_too_long_is_refused_before_it_is_searched_and_shown_shortened(options, message, monkeypatch):
    monkeypatch.setattr(UnorderedProgress, "__init__", pytest.fail)
    with pytest.raises(UserError) as error:
        chain(**options)
    assert message in str(error.value)
    assert len(str(error.value)) < 400


def test_the_same_constraint_many_times_is_one():
    chain(constraints=["ab"] * 50_000)


def test_a_phrase_is_searched_for_thousands_of_forbidden_ones_in_one_pass():
    chain(constraints=["ab"], forbid_words=[f"{a}{b}{c}" for a in WORD for b in WORD for c in WORD])


def test_a_file_of_words_that_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path / "pipe", "is a pipe, not a regular file"), ("/dev/zero", "is a device")):
        with pytest.raises(UserError, match=f"forbid_words_file {path}: {said}"):
            chain(forbid_words_file=str(path))


@pytest.mark.parametrize("text", ["fox", "the text", "fills"])
def test_spellings_are_what_an_answer_would_have(tokenizer, text):  # noqa: F811
    try:
        rows = spellings(tokenizer, text, "prefix")
    except UserError:
        pytest.skip("not in this vocabulary")
    within = tokenizer.encode(f"it is {text}")
    assert any(tuple(within[-len(row) :]) == row for row in rows)
    assert all(tokenizer.decode(row).strip() == text for row in rows)


def test_everything_at_once_in_its_order():
    options = {
        "min_lens": [3], "max_lens": [6], "repetition_penalty": 1.3, "repetition_penalty_prompt": True,
        "unk_penalty": 2.0, "no_repeat_ngram_size": 2, "forbid_words": ["x"], "prefix": ["a"], "constraints": ["b"],
        "stop": ["zz"], "stop_token_ids": [5], "presence_penalty": 0.5,
    }  # fmt: skip
    items = build_processors(
        ProcessorConfig(**options), LETTERS, ends=ENDS, max_len=8, allowed_tokens=lambda *_: None
    ).items
    assert [type(item).__name__ for item in items] == [
        "RepetitionPenalty", "LogitDifferences", "UnknownPenalty", "ForbiddenTokens", "ForbiddenPhrases",
        "NoRepeatNgram", "MinLength", "AllowedTokens", "LexicalConstraints", "ForcedPrefix", "MaxLength", "StopStrings",
        "StopTokens",
    ]  # fmt: skip


GUIDED = "needs llguidance (pip install ftk[guided])"


def test_a_guide_comes_behind_what_forbids_and_counts_where_nothing_else_is_left():
    pytest.importorskip("llguidance", reason=GUIDED)
    options = {"guide": ["regex:ab*"], "forbid_words": ["a"], "max_lens": [6], "min_lens": [3]}
    assert [type(one).__name__ for one in chain(**options).items][-2:] == ["GuidedAnswers", "MaxLength"]
    assert allowed_after([], **options) == set(ids("a"))
    assert allowed_after(ids("a"), **options) == set(ids("b"))  # no end before min_lens
    assert allowed_after(ids("abb"), **options) == {*ids("b"), 2, 6}
    assert allowed_after(ids("a"), guide=["regex:a"], min_lens=[3]) == {2, 6}
    assert allowed_after([], blank=1, guide=["regex:a", 'choice:["cd", "ce"]']) == set(ids("c"))
    assert allowed_after(ids("c"), blank=1, guide=["regex:a", 'choice:["cd", "ce"]']) == {*ids("d"), *ids("e")}
    assert allowed_after([], blank=0, guide=["", "regex:a"]) == set(range(62)) - COMMANDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guide": ["regex:(a"]}, "guide regex:(a: "),
        ({"guide": ["regex:A"]}, "guide regex:A: no token of the vocabulary goes on with it"),
        ({"guide": ["json:{"]}, "guide json:{: not JSON: "),
        ({"guide": ["json:" + "[" * 100_000]}, "nested too deeply"),
        ({"guide": ["json:3"]}, "a JSON schema is an object"),
        ({"guide": ["json"]}, "no token that closes a text in JSON"),
        ({"guide": ["choice:[]"]}, "choices are a list of texts"),
        ({"guide": ["grammar:start: foo"]}, 'unknown name: "foo"'),
        ({"guide": ["grammar:root := a"]}, "guide grammar:root := a: "),
        ({"guide": ["yes|no"]}, "guide yes|no: write json, or json:..., regex:..., choice:..., grammar:..."),
        ({"guide": ["regex:" + "a" * 300_000]}, "has 300,006 characters"),
        ({"guide": ["regex:a"], "prefix": ["a"]}, "prefix and a guide are both given"),
        ({"guide": ["regex:a"], "constraints": ["a"]}, "constraints and a guide are both given"),
        ({"guide": ["regex:a"], "guide_file": "x.json"}, "guide and guide_file are both given"),
        ({"guide_file": "x.md"}, "guide_file x.md: its name must end in .json, .regex"),
        ({"guide_file": "/nowhere/x.json"}, "guide_file /nowhere/x.json: No such file"),
    ],
)
def test_a_guide_that_cannot_be_compiled_is_refused(options, message):
    pytest.importorskip("llguidance", reason=GUIDED)
    with pytest.raises(UserError) as error:
        chain(**options)
    assert message in str(error.value)
    assert len(str(error.value)) < 600


def test_a_guide_needs_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'ftk\[guided\]'"):
        build_processors(None, Letters(), ends=ENDS, guide=["regex:a"])


@pytest.mark.parametrize(
    ("name", "text"), [("a.regex", "ab\n"), ("a.lark", 'start: "ab"\n'), ("a.gbnf", 'root ::= "ab"')]
)
def test_a_guide_of_a_file_is_of_the_kind_that_its_name_says(tmp_path, name, text):
    pytest.importorskip("llguidance", reason=GUIDED)
    (tmp_path / name).write_text(text)
    assert allowed_after(ids("a"), guide_file=str(tmp_path / name)) == set(ids("b"))


def filler(seed=0, allowed_tokens=None, search=None, **options):
    search = {"max_len": 8} | (search or {})
    processors = build_processors(
        None, LETTERS, ends=ENDS, max_len=search["max_len"], allowed_tokens=allowed_tokens, **options
    )
    model = small_model(vocab_size=70, seed=seed)
    return BlankFiller(LETTERS, BlankGenerator(model, LETTERS.special, processors=processors, **search))


SEARCHES = [{}, {"beam": 4}, {"sampling": True, "seed": 3}, {"search": "diverse_beam", "beam": 4}]
STEERED = {
    "min_lens": [4], "max_lens": [6, 8], "repetition_penalty": 1.2, "no_repeat_ngram_size": 2,
    "forbid_words": ["e", "kl"], "prefix": ["", "mn"], "constraints": ["pq"],
}  # fmt: skip


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("seed", range(3))
def test_combined_options_hold_in_every_answer(search, seed):
    (result,) = filler(seed, search=search, **STEERED).fill(["ab <MASK> cd <MASK> ef"])
    first, second = result.answers
    assert 4 <= len(first.tokens) <= 6
    assert second.text.startswith("mn")
    for answer in (first, second):
        assert "pq" in answer.text.replace(" p", "p")
        assert "e" not in answer.text
        assert not COMMANDS & set(answer.tokens)
        pairs = list(zip(answer.tokens, answer.tokens[1:], strict=False))
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("search", SEARCHES)
def test_an_answer_does_not_depend_on_its_batch(search):
    prompts = ["ab <MASK> cd <MASK> ef", "<MASK>", "abcdefghijkl <MASK> x", "q <MASK>", "ab <MASK> cd <MASK> ef"]
    steered = filler(search=search, **STEERED)
    together = steered.fill(prompts)
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = steered.fill([prompt])
        assert [one.tokens for one in alone.answers] == [one.tokens for one in result.answers]


@pytest.mark.parametrize("search", SEARCHES)
def test_log_probabilities_are_the_models_own(search):
    steered = filler(search=search, **STEERED)
    prompt = steered.encode("ab <MASK> cd")
    (result,) = steered.generate_encoded([prompt])
    (answer,) = result.answers
    from tests.generation import slow

    model, blank = steered.generator.model, prompt.context.index(4)
    for index, token in enumerate(answer.tokens):
        expected = slow_logprob(slow, model, prompt.context, blank, answer.tokens[:index], token)
        assert answer.token_logprobs[index] == pytest.approx(expected, abs=1e-4)


def slow_logprob(slow, model, context, blank, before, token):
    import torch

    tokens = [*context, LETTERS.special.sop, *before]
    text = [*range(len(context)), *[blank] * (len(before) + 1)]
    block = [*[0] * len(context), *range(1, len(before) + 2)]
    with torch.no_grad():
        logits = model(
            torch.tensor([tokens]),
            position_ids=torch.tensor([[text, block]]),
            context_length=torch.tensor([len(context)]),
        )
    return float(logits[0, -1].log_softmax(-1)[token])


@pytest.mark.parametrize("search", SEARCHES)
def test_a_stop_string_cuts_text_tokens_and_log_probabilities(search):
    free = filler(search=search, forbid_words=["zzz"]).fill(["ab <MASK> cd <MASK>"])[0].answers[0]
    stop = LETTERS.decode(free.tokens)[2:4]
    (result,) = filler(search=search, stop=[stop]).fill(["ab <MASK> cd <MASK>"])
    for answer in result.answers:
        assert stop not in answer.text
        assert len(answer.token_logprobs) <= len(answer.tokens) + 1
    assert stop not in result.text
    if not search:  # greedy walks the same way
        assert result.answers[0].text == LETTERS.decode(free.tokens).split(stop)[0].strip()


def test_a_function_steers_every_search():
    vowels = {*ids("aeiou")}
    for search in SEARCHES:
        steered = filler(search=search, allowed_tokens=lambda context, blank, tokens: vowels if len(tokens) < 3 else ())
        (result,) = steered.fill(["ab <MASK> cd"])
        assert len(result.answers[0].tokens) == 3
        assert set(result.answers[0].tokens) <= vowels


@pytest.mark.parametrize("search", [*SEARCHES, {"search": "beam_sampling", "beam": 3, "sampling": False}])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_match_their_guides_in_every_search_and_any_batch(search, batch_size):
    """Guides differ by prompt and by blank, so that groups of one engine have different ones."""
    pytest.importorskip("llguidance", reason=GUIDED)
    options = [
        {"guide": "regex:(ab|cd){1,2}x"},
        {"guide": ["regex:[a-c]{2,4}", 'choice:["yes", "no"]']},
        {"guide": ["", "regex:z+( q)?"]},
        {"guide": "regex:(ab|cd){1,2}x"},
    ]
    # An answer without a bound may fill its 8 tokens and be cut there; the others end before.
    wanted = [["(ab|cd){1,2}x"] * 2, ["[a-c]{2,4}", "yes|no"], [".*", "z+( q)?"], ["(ab|cd){1,2}x"] * 2]
    unbounded = wanted[2]
    config = {"max_len": 8, "batch_size": batch_size, **search}
    steering = Steering(ProcessorConfig(), LETTERS, ends=ENDS, min_len=0, max_len=8)
    for seed in range(2):
        model = small_model(vocab_size=70, seed=seed)
        generator = BlankGenerator(model, LETTERS.special, processors=steering.processors, **config)
        found = BlankFiller(LETTERS, generator, steering).fill(["[MASK]a[MASK]"] * 4, options=options)
        for result, expressions in zip(found, wanted, strict=True):
            for answer, expression in zip(result.answers, expressions, strict=True):
                for one in (answer, *answer.others):
                    ended = len(one.token_logprobs) > len(one.tokens)
                    assert re.fullmatch(expression, one.text), (expression, one.text)
                    assert ended or (expression in unbounded and len(one.tokens) == 8), (expression, one.text)
