"""A causal language model in words: texts are continued, in pieces or whole, and given continuations are scored."""

from __future__ import annotations

import pytest
import torch

import ftk
from ftk.errors import UserError
from ftk.models import build_model
from ftk.tokenizers import load_tokenizer
from tests.small_run import save_model

PROMPTS = ["the quick brown", "over a", "she reads"]


@pytest.fixture(scope="module")
def run(data_bin, tmp_path_factory):
    tokenizer = load_tokenizer(data_bin)
    shape = {"vocab_size": tokenizer.padded_vocab_size(), "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    shape["max_positions"] = 64
    torch.manual_seed(3)
    model = build_model("gpt2", **shape)
    with torch.no_grad():
        model.token_embedding.weight.mul_(20.0)
    folder = tmp_path_factory.mktemp("causal") / "run"
    save_model(folder / "checkpoint_1", model, data_bin / "tokenizer", task={"_name": "causal_lm"})
    return folder


def test_the_checkpoints_task_says_how_it_generates(run):
    generator = ftk.load_generator(run, max_len=8, beam=3, nbest=2)
    results = generator.generate(PROMPTS)
    assert [generator.generate([prompt])[0].answers[0].tokens for prompt in PROMPTS] == [
        result.answers[0].tokens for result in results
    ]
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.text == prompt + result.answers[0].text
        (answer,) = result.answers
        assert len(answer.others) == 1
        assert answer.score >= answer.others[0].score
    with pytest.raises(UserError, match="unknown generation option 'blank_order'"):
        ftk.load_generator(run, blank_order="left")
    with pytest.raises(UserError, match="^unknown generation option 'num_return_sequences'; in ftk: nbest$"):
        ftk.load_generator(run, num_return_sequences=3)
    with pytest.raises(UserError, match="^repetition_penalty is 'x'; it must be a finite number$"):
        ftk.load_generator(run, repetition_penalty="x")
    with pytest.raises(UserError, match="^a prompt, or each of a list, is a text, but this is int: 3$"):
        generator.generate(3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": True, "seed": 4},
        {"beam": 2},
        {"stop": ["e"], "alternatives": 2},
        {"stop_token_ids": [*range(30, 60)]},
    ],
)
def test_pieces_joined_are_the_text(run, options):
    generator = ftk.load_generator(run, max_len=12, batch_size=2, **options)
    pieces = list(generator.stream(PROMPTS))
    for number, result in enumerate(generator.generate(PROMPTS)):
        own = [piece for piece in pieces if piece.prompt == number]
        assert "".join(piece.text for piece in own) == result.answers[0].text
        assert [token for piece in own for token in piece.tokens][: len(result.answers[0].tokens)] == list(
            result.answers[0].tokens
        )
        likeliest = [[token for token, _ in top] for piece in own for top in piece.alternatives]
        assert likeliest == [[token for token, _ in top] for top in result.answers[0].alternatives]
        assert own[-1].result.text == result.text == "".join(piece.filled for piece in own)


OF_A_CALL = {"max_len": 12, "sampling": True, "top_k": 5, "seed": 3, "forbid_words": ["e"], "stop": ["o"]}


@pytest.mark.parametrize("options", [{"max_len": 12}, {"beam": 3, "nbest": 2}, OF_A_CALL])
def test_a_call_may_have_the_options_of_a_generator(run, options):
    generator, other = (ftk.load_generator(run, **{"max_len": 4, **own}) for own in ({}, options))
    expected, plain = other.generate(PROMPTS), generator.generate(PROMPTS)
    assert generator.generate(PROMPTS, **options) == expected
    *_, last = generator.stream(PROMPTS[0], **options)
    assert last.result.text == expected[0].text
    assert generator.generate(PROMPTS) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 5}, "unknown generation option 'max_new_tokens'; in ftk: max_len"),
        ({"forbid_word": "a"}, "unknown generation option 'forbid_word'; did you mean 'forbid_words'"),
        ({"temperature": 0.5}, "temperature is 0.5, but greedy search does not use it; sampling is off; turn it on"),
        ({"max_len": 1000}, "max_len is 1000, but the model has 64 positions"),
        ({"max_len": "many"}, "^max_len is 'many'; it must be a whole number$"),
        ({"seed": None}, "^seed is empty; it must be a whole number$"),
        ({"repetition_penalty": "x"}, "^repetition_penalty is 'x'; it must be a finite number$"),
        ({"min_lens": "two"}, "^min_lens is 'two'; it must be a list, each item a whole number$"),
        ({"lm_weight": 0.5}, "lm_weight is one for all calls; give it to ftk.load_generator"),
    ],
)
def test_mistakes_in_the_options_of_a_call(run, options, message):
    with pytest.raises(UserError, match=message):
        ftk.load_generator(run, max_len=4).generate(PROMPTS, **options)


def test_options_of_a_call_are_taken_in_their_types(run):
    generator = ftk.load_generator(run, max_len=4)
    texts = {"max_len": "8", "repetition_penalty": "2", "forbid_words": "e", "stop": "o,"}
    assert generator.generate(PROMPTS, **texts) == generator.generate(
        PROMPTS, max_len=8, repetition_penalty=2.0, forbid_words=["e"], stop=["o,"]
    )


def test_a_prompt_may_have_options_and_a_seed_of_its_own(run):
    generator = ftk.load_generator(run, max_len=8, sampling=True)
    plain, own = generator.generate(["over a"] * 2, options=[None, {"seed": 9, "max_len": 2}])
    assert plain.text == generator.generate(["over a"])[0].text
    assert own.text == generator.generate(["over a"], seeds=[9], options=[{"max_len": 2}])[0].text
    assert len(own.answers[0].tokens) <= 2


def test_what_was_generated_scores_as_it_was_reported(run):
    generator = ftk.load_generator(run, max_len=6)
    for prompt, result in zip(PROMPTS, generator.generate(PROMPTS), strict=True):
        ((scored, other),) = generator.score([prompt], [[result.answers[0].text, " fox"]])
        tokens = list(result.answers[0].tokens)
        if tokens == list(generator.tokenizer.encode(result.answers[0].text))[-len(scored.logprobs) :]:  # cut alike
            assert scored.logprobs == pytest.approx(
                list(result.answers[0].token_logprobs)[: len(scored.logprobs)], abs=1e-4
            )
        assert len(other.logprobs) > 0


def test_one_text_gives_one_result_and_a_list_a_list(run):
    generator = ftk.load_generator(run, max_len=4, sampling=True)
    (expected,) = generator.generate(["over a"], seeds=[5], options=[{"max_len": 3}])
    assert generator.generate("over a", seeds=5, options={"max_len": 3}) == expected
    assert [piece.result for piece in generator.stream("over a", 5, {"max_len": 3})][-1] == expected
    assert generator.generate([]) == []
    assert [generator.score("over", [" a", " fox"])] == generator.score(["over"], [[" a", " fox"]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda one: one.generate("she reads", seeds=[3]), "one text takes one seed and one mapping of options"),
        (lambda one: one.generate(["she"], seeds=3), "a list of texts a list of each"),
        (lambda one: one.generate(["she"], options={"seed": 3}), "a list of texts a list of each"),
        (lambda one: one.generate(["a", 3]), "prompt 2: a prompt is a text, but this is int: 3"),
        (lambda one: next(one.stream([None])), "a prompt is a text, but this is NoneType"),
        (lambda one: one.score(["she"], [" reads"]), r"a list of answers; write score\(prompt, \[continuation\]\)"),
        (lambda one: one.score("she", " reads"), "in place of a list of answers"),
        (lambda one: one.score("she", [[" reads"]]), "a continuation is a text, but this is list"),
        (lambda one: one.score(["she", "he"], [[" reads"]]), "answers for 1 prompts, but there are 2"),
        (lambda one: one.score(["she"], [[" reads" * 64]]), r"answer take \d+ positions, but the model has 64"),
    ],
)
def test_what_is_no_list_of_texts_is_refused_with_the_right_form(run, call, message):
    with pytest.raises(UserError, match=message):
        call(ftk.load_generator(run))


def test_what_does_not_fit_is_refused_before_weights_are_read(run):
    with pytest.raises(UserError, match="max_len is 65, but the model has 64 positions"):
        ftk.load_generator(run, max_len=65)
    with pytest.raises(UserError, match="the prompt is empty"):
        ftk.load_generator(run).generate([""])
    with pytest.raises(UserError, match="`device` is 'tpu'; it must be auto, cpu, cuda or cuda:N"):
        ftk.load_model(run, device="tpu")


@pytest.mark.parametrize("num_passes", [1, 2])  # within the reading of the prompt, and within a step
def test_what_is_asked_after_an_interrupt_is_answered(run, num_passes, monkeypatch):
    generator = ftk.load_generator(run, max_len=4, min_len=4)
    generator.keeps_engine = True
    expected = generator.generate(PROMPTS[0]).answers[0].tokens
    finish, passes = generator.model.finish, []

    def interrupted(hidden):
        passes.append(hidden)
        if len(passes) == num_passes:
            raise KeyboardInterrupt
        return finish(hidden)

    monkeypatch.setattr(generator.model, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generator.generate(PROMPTS[0])
    assert generator.generate(PROMPTS[0]).answers[0].tokens == expected
