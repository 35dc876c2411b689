"""What requests are answered with: completions, filled blanks and scores, without HTTP; and which are refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from dataclasses import replace

import pytest

import ftk
from ftk.checkpoint import save_checkpoint
from ftk.errors import UserError
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.generation.processors.guides import Guide, GuideError
from ftk.generation.results import Span, TextPiece, TextResult
from ftk.models import build_model
from ftk.serving import app, completions, fill
from ftk.serving.fields import parsed
from ftk.serving.prompts import ordered
from ftk.serving.refusal import Refusal
from ftk.tokenizers import build_tokenizer, load_tokenizer
from tests.generation.test_adapted import save_adapter
from tests.serving.services import PROMPTS, filled, held, posted, serving, until, whole
from tests.small_run import SHAPE


@pytest.mark.parametrize("options", [{}, {"sampling": True, "top_k": 5}], ids=["greedy", "samples"])
def test_answers_are_those_of_the_generator_whatever_else_is_running(run, generator, options):
    alone = ftk.load_generator(run, max_len=8, **options)

    async def use(service):
        bodies = [{"prompt": prompt, "seed": 5, **options} for prompt in PROMPTS * 2]
        return await asyncio.gather(*(filled(service, body) for body in bodies))

    for prompt, (found,) in zip(PROMPTS * 2, serving(generator, use), strict=True):
        (result,) = found["results"]
        expected = alone.generate(prompt, seeds=5)
        assert result["text"] == "".join(part["text"] for part in result["segments"]) == expected.text
        assert [answer["text"] for answer in result["answers"]] == [answer.text for answer in expected.answers]
        for answer, right in zip(result["answers"], expected.answers, strict=True):
            assert answer["logprob"] == pytest.approx(right.logprob, abs=1e-5)


def test_blanks_have_the_order_and_the_number_of_answers_that_a_request_asks_for(run):
    served = ftk.load_generator(run, max_len=8, batch_size=2, beam=3)
    body = {"prompt": PROMPTS[1], "blank_order": "2,1"}

    async def use(service):
        asked = [body, {**body, "stream": True}, {**body, "nbest": 2}, {"prompt": PROMPTS[1]}]
        return await asyncio.gather(*(filled(service, one) for one in asked))

    (whole,), stream, (best,), (usual,) = serving(served, use)
    for order, found in (("2,1", whole), ("left", usual)):
        alone = ftk.load_generator(run, max_len=8, beam=3, blank_order=order)
        assert found["results"][0]["text"] == alone.generate(PROMPTS[1]).text
        assert alone.digest == served.digest
    assert [event["answer"] for event in stream[:-1]] == [1, 0]
    assert "".join(part["text"] for event in stream[:-1] for part in event["segments"]) == stream[-1]["text"]
    alone = ftk.load_generator(run, max_len=8, beam=3, nbest=2, blank_order="2,1")
    for answer, right in zip(best["results"][0]["answers"], alone.generate(PROMPTS[1]).answers, strict=True):
        assert [other["text"] for other in answer["others"]] == [other.text for other in right.others] != []


def test_a_stream_is_the_whole_answer_in_pieces(generator):
    async def use(service):
        return await filled(service, {"prompt": PROMPTS, "stream": True})

    events = serving(generator, use)
    for number, _ in enumerate(PROMPTS):
        own = [event for event in events if event["prompt"] == number]
        assert [event["type"] for event in own][-1] == "result"
        parts = [part["text"] for event in own[:-1] for part in event["segments"]]
        assert "".join(parts) == own[-1]["text"]


def test_a_completion_stands_between_prompt_and_suffix(generator):
    async def use(service):
        body = {"prompt": "the quick brown", "suffix": " over a lazy dog", "temperature": 0, "max_tokens": 4}
        return await asyncio.gather(whole(service, body), whole(service, {**body, "echo": True}))

    part, echo = (found["choices"][0]["text"] for found in serving(generator, use))
    assert f"the quick brown{part} over a lazy dog" == echo


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 3, "early_stopping": "never"},
        {"search": "diverse_beam", "beam": 4, "diverse_groups": 4},
        {"sampling": True, "top_k": 5, "typical_p": 0.9},
        {"search": "sampling", "top_p": 0.9},
        {"min_len": 2},
    ],
    ids=["beam", "diverse", "sampling", "search", "min_len"],
)
def test_the_options_of_a_request_take_the_place_of_the_services(run, options):
    generator = ftk.load_generator(run, max_len=8, batch_size=2, **options)
    greedy = ftk.load_generator(run, max_len=4, min_len=options.get("min_len", 0)).generate("the quick").answers[0]

    async def use(service):
        asked = {"prompt": "the quick", "seed": 2}
        return await asyncio.gather(
            whole(service, {**asked, "max_tokens": 4, "temperature": 0, "logprobs": 0}),
            whole(service, {**asked, "temperature": 0.7, "top_p": 0.5}),
            filled(service, {**asked, "sampling": True, "temperature": 0.5}),
            filled(service, {**asked, "sampling": False} if "min_len" not in options else asked),
            filled(service, asked),
        )

    first, *_, usual = serving(generator, use)
    logprobs = first["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs == pytest.approx(greedy.token_logprobs[: len(logprobs)], abs=1e-5)
    (expected,) = generator.generate(["the quick"], seeds=[2])
    assert usual[0]["results"][0]["text"] == expected.text


def pieces(*parts: tuple[str, tuple[tuple[int, int], ...]]):
    """Pieces of text with the places of the answer in them; the last one has a result."""
    return [
        TextPiece(0, 0, "", (), (), (), text, tuple(Span(*span, 0) for span in spans), result=RESULT if last else None)
        for last, (text, spans) in zip([False] * (len(parts) - 1) + [True], parts, strict=True)
    ]


RESULT = TextResult("", "", [])


@pytest.mark.parametrize(
    ("before", "behind", "parts", "text"),
    [
        ("hello", "", [("hel", ((0, 3),)), ("lo world", ((0, 8),))], "hello world"),  # an encoder-decoder's answer
        ("a b", "", [("a b c", ((3, 5),)), (" d", ((0, 2),))], " c d"),
        ("a b", " c\n", [("a b x", ((4, 5),)), (" c", ())], " x"),
        (" a b", "c", [("a b x", ((4, 5),)), (" y c", ((0, 2),))], " x y "),
        ("a ", " c", [("a x", ((2, 3),)), (" c", ())], "x"),
    ],
)
def test_a_line_is_the_answer_with_its_joints(before, behind, parts, text):
    line = completions.Line(before, behind, echo=False)
    assert "".join(line.add(piece) for piece in pieces(*parts)) == line.text == text


def test_length_stop_and_usage(generator):
    async def use(service):
        body = {"prompt": ["the quick", "a lazy"], "n": 2, "max_tokens": 3, "min_tokens": 3, "logprobs": 2, "seed": 1}
        return await whole(service, body), await whole(service, {**body, "n": 1})

    found, once = serving(generator, use)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert [choice["seed"] for choice in found["choices"]] == [1, 2, 1, 2]
    for choice in found["choices"]:
        logprobs = choice["logprobs"]
        assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [3] * 4
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] == once["usage"]["prompt_tokens"]
    assert found["system_fingerprint"] == once["system_fingerprint"]
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}


@pytest.mark.parametrize("prompt", ["é é", "\u337f\u337f", "\U0001f642 \U0001f642"])
def test_tokens_of_a_text_that_the_tokenizer_rewrites_stand_within_it(wordpieces, prompt):
    async def use(service):
        return await whole(service, {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2})

    (choice,) = serving(wordpieces, use)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(choice["text"])


@pytest.mark.parametrize("temperature", [0, 50])
@pytest.mark.parametrize(
    ("which", "body"),
    [
        ("generator", {"prompt": ["the quick", "the quick "]}),
        ("generator", {"prompt": ["the quick [MASK]", "[MASK] fox"]}),
        ("generator", {"prompt": ["the quick", " a "], "suffix": " dog"}),
        ("continuer", {"prompt": ["the quick", "a lazy "]}),
        ("continuer", {"prompt": ["the quick", "a lazy "], "echo": True}),
        ("wordpieces", {"prompt": ["the quick", "a lazy "], "stop": ["o", "e", " a"]}),
        ("wordpieces", {"prompt": ["the quick", "a lazy "], "echo": True}),
        ("begun", {"prompt": ["the quick", " a lazy "], "echo": True}),
    ],
)
def test_tokens_stand_where_their_offsets_say_and_with_the_likeliest(request, which, body, temperature):
    generator = request.getfixturevalue(which)

    async def use(service):
        asked = {**body, "n": 3, "temperature": temperature, "max_tokens": 6, "seed": 3}
        found = [await whole(service, {**asked, "logprobs": count}) for count in (1, 0)]
        if "echo" in body:
            return [*found, []]
        read = completions.read({**asked, "logprobs": 1, "stream": True}, service)
        return [*found, [event["choices"][0] async for event in completions.events(read, service)]]

    tokenizer = generator.tokenizer
    commands = {token.text for token in tokenizer.command_tokens}
    commands |= {f"<unused {token}>" for token in range(generator.model.config.vocab_size)}
    likeliest, plain, parts = serving(generator, use)
    for choice, other in zip(likeliest["choices"], plain["choices"], strict=True):
        lists, text = choice["logprobs"], choice["text"]
        spelt = [*zip(lists["tokens"], lists["text_offset"], strict=True)]
        if which == "begun":  # as with OpenAI, what stands in the ids alone has its name and no room in the text
            assert spelt.pop(0) == ("[CLS]", 0)
        assert "".join("".join(token for token, _ in spelt).split()) == "".join(text.split()), (lists, text)
        for token, offset in spelt:
            assert text[offset:].startswith(token)
        places = [*zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True)]
        if "echo" in body:
            assert places.pop(0)[1:] == (None, None)
        for token, logprob, top in places:
            assert 1 <= len(top) <= 2
            assert logprob <= max(top.values())
            assert token in top or token == ""
            if temperature == 0 and "echo" not in body:  # of what may be written
                assert logprob == max(value for name, value in top.items() if name not in commands)
        assert other["logprobs"]["top_logprobs"] is None
        assert other["logprobs"]["tokens"] == lists["tokens"]
        own = [part["logprobs"] for part in parts if part["index"] == choice["index"]]
        if own:  # white space at the end of an answer so far is given with the next token
            words = [(token, at) for part in own for token, at in zip(part["tokens"], part["text_offset"], strict=True)]
            assert [token.strip() for token, _ in words] == [token.strip() for token in lists["tokens"]]
            assert all(text[at:].startswith(token) for token, at in words)
            assert [logprob for part in own for logprob in part["token_logprobs"]] == lists["token_logprobs"]
            assert [set(top.values()) for part in own for top in part["top_logprobs"]] == [
                set(top.values()) for top in lists["top_logprobs"]
            ]


@pytest.mark.parametrize("end", [False, True])
def test_token_ids_are_scored_as_lm_eval_asks(continuer, end):
    """[*context, *continuation], echoed with one token behind, of which [len(context):-1] is summed."""
    tokenizer, (last, *_) = continuer.tokenizer, continuer.framing.ends
    ids = [tokenizer.encode(text) for text in ("the quick brown fox", "a lazy dog while she reads")]
    ids.append([*ids[0][:2], *continuer.generate_encoded([continuer.encode(ids[0][:2])])[0].answers[0].tokens])
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    body |= {"logit_bias": {str(last): 100 if end else -100}}

    async def use(service):
        one = {"prompt": ids[0], "max_tokens": 0, "echo": True}
        parts = [
            event async for event in completions.events(completions.read({**one, "stream": True}, service), service)
        ]
        return await whole(service, body), await whole(service, {**one, "logprobs": 1}), parts

    (short,) = serving(continuer, lambda service: whole(service, {**body, "prompt": ids[0][:1]}))["choices"]
    assert short["logprobs"]["token_logprobs"][0] is None
    assert len(short["logprobs"]["tokens"]) == 2
    orders: list[str] = []  # to other ranks
    found, nothing, parts = serving(continuer, use, share=lambda own: orders.append(json.dumps(own)))
    given = [order for own in orders for order in json.loads(own)]
    read = [ordered(continuer, order).request.prompt for order in given if "submit" in order]
    assert read == ids
    scored = [dict(order["score"]) for order in given if "score" in order]
    assert [one.pop("adapter") for one in scored] == [None] * 4
    candidates = [continuer.encode_candidates(**one) for one in scored]
    assert [[*one.request.prompt, *one.candidates[0]] for one in candidates] == [*ids, ids[0]]
    for choice, own in zip(found["choices"], ids, strict=True):
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {len(own) + 1}
        assert (choice["text"] == tokenizer.decode(own)) == end
        scores = lists["token_logprobs"][2:-1]
        (((right,),),) = [score(continuer.model, continuer.framing, [Request(own[:2])], [[own[2:]]])]
        assert scores == pytest.approx(right.logprobs, abs=1e-5)
        greedy = all(one == max(top.values()) for one, top in zip(scores, lists["top_logprobs"][2:-1], strict=True))
        assert greedy == right.is_greedy == (own is ids[-1])
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    (alone,) = nothing["choices"]
    expected = found["choices"][0]["logprobs"]
    assert alone["logprobs"] == {name: values[:-1] for name, values in expected.items()}
    assert (alone["text"], alone["finish_reason"]) == (tokenizer.decode(ids[0]), "length")
    assert nothing["usage"]["completion_tokens"] == 0
    assert [part["choices"][0]["text"] for part in parts] == [alone["text"]]


def test_a_stop_text_in_the_last_token_that_may_be_written_is_a_stop(continuer):
    text = continuer.generate("the quick", options={"max_len": 1}).answers[0].text

    async def use(service):
        body = {"prompt": "the quick", "max_tokens": 1, "temperature": 0}
        return [await whole(service, {**body, **own}) for own in ({}, {"stop": text[-1]}, {"stop": []})]

    plain, stopped, empty = (found["choices"][0] for found in serving(continuer, use))
    assert (plain["finish_reason"], stopped["finish_reason"]) == ("length", "stop")
    assert stopped["text"] == text[: text.index(text[-1])]
    assert empty["text"] == plain["text"] == text


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, True]}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GUIDES = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, None),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, None),
    ({"structured_outputs": {"json": SCHEMA}}, None),
    ({"guided_json": json.dumps(SCHEMA)}, None),
    ({"guided_regex": "[0-9]{2}x"}, "[0-9]{2}x"),
    ({"structured_outputs": {"regex": "[0-9]{2}x"}}, "[0-9]{2}x"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
]


@pytest.mark.parametrize("sampling", [False, True])
def test_answers_match_what_a_request_guides_them_to_beside_others(run, sampling):
    pytest.importorskip("llguidance", reason="needs llguidance (pip install ftk[guided])")
    generator = ftk.load_generator(run, max_len=24, batch_size=4)

    async def use(service):
        asked = {"prompt": "the quick", "temperature": float(sampling), "max_tokens": 24, "seed": 3}
        blanks = {"prompt": "the [MASK] fox [MASK]", "sampling": sampling, "seed": 3}
        jobs = [whole(service, asked | own) for own, _ in GUIDES]
        jobs += [filled(service, blanks | own) for own, _ in GUIDES]
        each = filled(service, blanks | {"guide": [SCHEMA, "regex:xy"]})
        return await asyncio.gather(*jobs, each, whole(service, asked))

    *found, each, _ = serving(generator, use)
    texts = [[one["choices"][0]["text"]] for one in found[: len(GUIDES)]]
    texts += [[answer["text"] for answer in one[0]["results"][0]["answers"]] for one in found[len(GUIDES) :]]
    for own, (_, expression) in zip(texts, GUIDES * 2, strict=True):
        for text in own:
            if expression is None:
                assert json.loads(text) in ({"a": 1}, {"a": True})
            else:
                assert re.fullmatch(expression, text.strip())
    first, second = (answer["text"] for answer in each[0]["results"][0]["answers"])
    assert json.loads(first)["a"] in (1, True)
    assert second == "xy"


def test_a_guide_cut_at_max_tokens_says_length_and_a_dead_end_is_the_clients(generator, monkeypatch):
    pytest.importorskip("llguidance", reason="needs llguidance (pip install ftk[guided])")

    async def use(service):
        prompt = {"prompt": "the", "guided_regex": "[0-9]{9}", "max_tokens": 4}
        cut = await whole(service, prompt)

        def stuck(guide, state):
            raise GuideError("guide x: no token")

        with monkeypatch.context() as patch:
            patch.setattr(Guide, "allowed", stuck)
            with pytest.raises(Refusal) as refused:  # compiled before
                await whole(service, prompt)
        return cut["choices"][0], refused.value

    choice, refused = serving(generator, use)
    assert choice["finish_reason"] == "length"
    assert re.fullmatch("[0-9]{1,4}", choice["text"].strip())
    assert (refused.status, str(refused)) == (400, "guide x: no token")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": PROMPTS[0], "max_len": "3"}, 'max_len is "3"; it must be a whole number from 1 to 8'),
        ({"prompt": PROMPTS[0], "max_len": 9}, "max_len is 9; it must be a whole number from 1 to 8"),
        ({"prompt": PROMPTS[0], "nbest": 2}, "nbest is 2; it must be a whole number from 1 to 1"),
        ({"prompt": PROMPTS[0], "blank_order": "1,1"}, "blank_order is '1,1'; it names a blank twice"),
        ({"prompt": PROMPTS[0], "blank_order": [1]}, "blank_order is '[1]'; it is left, confident, or numbers"),
        ({"prompt": PROMPTS[0], "blank_order": "confident"}, "blank_order confident is for all prompts alike"),
        ({"prompt": PROMPTS[0], "sed": 3}, "unknown field 'sed'; did you mean 'seed'?"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(generator, body, message):
    async def use(service):
        with pytest.raises(Refusal) as refused:
            fill.read(body, service)
        return str(refused.value)

    said = serving(generator, use)
    assert said.startswith(message)
    names = said.partition("there are: ")[2].split(", ")
    assert len({*names}) == len(names)


@pytest.mark.parametrize("which", ["generator", "continuer"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_room_behind_a_prompt_is_the_longest_answer_that_fits(request, which, prompt):
    generator = request.getfixturevalue(which)
    asked = generator.encode(prompt, check=False).request
    room = generator.framing.room(asked)
    generator.framing.check(replace(asked, options=replace(asked.options, max_len=room)))
    with pytest.raises(UserError, match=rf"{room + 1} tokens"):
        generator.framing.check(replace(asked, options=replace(asked.options, max_len=room + 1)))


def test_the_services_own_limit_is_lowered_to_the_room_behind_a_prompt(continuer):
    texts = ("the " * count for count in itertools.count(1))
    long = next(text for text in texts if continuer.framing.room(continuer.encode(text, check=False).request) < 8)

    async def use(service):
        prompts, _ = fill.read({"prompt": [long, "the"]}, service)
        rooms = [continuer.framing.room(prompt.request) for prompt in prompts]
        with pytest.raises(Refusal, match="max_len is 8, but after this prompt the model has room for") as refused:
            fill.read({"prompt": long, "max_len": 8}, service)
        return [prompt.request.options.max_len for prompt in prompts], rooms, refused.value.code

    lengths, (short, _), code = serving(continuer, use)
    assert 0 < short < 8
    assert lengths == [short, 8]
    assert code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("which", "body", "message"),
    [
        ("continuer", {"prompt": [5] * 100, "max_tokens": 300}, "max_tokens is 300 (of which this service writes 128"),
        ("continuer", {"prompt": [5] * 100, "max_tokens": 128}, "max_tokens is 128, but after this prompt the model"),
        (
            "continuer",
            {"prompt": [5] * 129, "max_tokens": 0, "echo": True},
            "the prompt is 129 tokens long; it does not fit the model's 128 positions; shorten it",
        ),
        ("converser", {"prompt": [5]}, "this model was trained on conversations, so"),
        ("converser", {"prompt": "the", "echo": True, "logprobs": 0}, "this model was trained on conversations, so"),
    ],
)
def test_refusals_name_what_was_sent_and_what_the_model_is(request, monkeypatch, which, body, message):
    generator = request.getfixturevalue(which)
    monkeypatch.setattr(generator, "config", replace(generator.config, max_len=128))

    async def use(service):
        with pytest.raises(Refusal) as refused:
            completions.read(body, service)
        return refused.value.message

    assert serving(generator, use).startswith(message)


def test_a_score_needs_room_for_its_candidate_alone(continuer, monkeypatch):
    """Not for the longest answer, which may have all positions."""
    monkeypatch.setattr(continuer, "config", replace(continuer.config, max_len=128))
    body = {"prompt": "the quick", "candidates": [" fox"], "end": False}
    ((answer,),) = serving(continuer, lambda service: anext(fill.scores(body, service)))["candidates"]
    assert answer["logprob"] == pytest.approx(sum(continuer.score("the quick", [" fox"])[0].logprobs), abs=1e-5)


def test_what_a_prompt_begins_with_is_counted(begun):
    async def use(service):
        body = {"prompt": "the quick"}
        bodies = [body, {**body, "add_special_tokens": False}]
        counts = [(await posted(service, "/tokenize", one))[1]["count"] for one in bodies]
        return [*counts, (await whole(service, {**body, "max_tokens": 1}))["usage"]["prompt_tokens"]]

    with_it, without, read = serving(begun, use)
    assert with_it == without + 1 == read


def test_scores_are_the_generators(generator):
    async def use(service):
        bodies = [{"prompt": PROMPTS[0], "candidates": given} for given in ([["brown"], ["lazy"]], ["brown", "lazy"])]
        return [event for body in bodies async for event in fill.scores(body, service)]

    nested, flat = serving(generator, use)
    expected = [own[0].logprob for own in generator.score_candidates(PROMPTS[0], [["brown"], ["lazy"]])]
    assert [own[0]["logprob"] for own in nested["candidates"]] == pytest.approx(expected, abs=1e-5)
    assert flat == nested


def test_many_candidates_of_several_requests_are_scored_in_parts_with_a_step_between_any_two(generator, monkeypatch):
    monkeypatch.setattr(fill, "_TOKENS_AT_ONCE", 16)
    candidates = [[text] for text in ("brown", "lazy dog", "the old friends", "fox") * 4]
    body = {"prompt": PROMPTS[0], "candidates": candidates}

    async def use(service, log):
        worker, step, score = service.worker, service.worker._step, generator.score_encoded
        monkeypatch.setattr(worker, "_step", lambda: (log.append(0), step()))
        monkeypatch.setattr(generator, "score_encoded", lambda own: (log.append(len(own[0].candidates)), score(own))[1])
        with held(service):
            scored = [asyncio.ensure_future(anext(fill.scores(body, service))) for _ in range(4)]
            await until(lambda: len(service._called) == len(scored))  # each has a part that waits
        return await asyncio.gather(*scored)

    expected = [own[0].logprob for own in generator.score_candidates(PROMPTS[0], candidates)]
    log: list[int] = []
    for found in serving(generator, lambda service: use(service, log)):
        assert [own[0]["logprob"] for own in found["candidates"]] == pytest.approx(expected, abs=1e-5)
    assert sum(log) == 4 * len(candidates)
    assert sum(map(bool, log)) > 12
    assert not any(one and other for one, other in itertools.pairwise(log))


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({"max_waiting": 1}, "lazy dog " * 3, "ask for at most 3"),  # a place in the queue for each part
        ({"max_context": 24}, "the old friends " * 4, "candidate 1 has"),
    ],
)
def test_candidates_have_limits(generator, monkeypatch, options, text, message):
    monkeypatch.setattr(fill, "_TOKENS_AT_ONCE", 8)

    async def use(service):
        with pytest.raises(Refusal, match=message) as refused:
            await anext(fill.scores({"prompt": PROMPTS[0], "candidates": [[text]] * 8}, service))
        return refused.value.status, service.num_asked

    assert serving(generator, use, **options) == (400, 0)


LONG = "the lazy dog " * 400  # characters, but not tokens, that a prompt may have


@pytest.mark.parametrize(
    ("what", "path", "body", "status"),
    [
        ("encode", "/tokenize", {"prompt": LONG}, 200),
        ("encode", "/v1/fill", {"prompt": LONG}, 400),
        ("encode", "/v1/completions", {"prompt": LONG}, 400),
        ("encode", "/v1/score", {"prompt": PROMPTS[0], "candidates": [[LONG]]}, 400),
        ("encode", "/v1/score", {"prompt": LONG, "candidates": [["a"]]}, 400),
        ("parsed", "/v1/score", {"prompt": LONG, "candidates": [["a"]]}, 400),
        ("decode", "/detokenize", {"tokens": [20] * 2000}, 200),
        ("read", "/v1/completions", {"prompt": "the", "guided_regex": "(a"}, 400),
        ("encode", "/v1/fill", {"prompt": PROMPTS[0], "forbid_words": ["fox"]}, 200),
    ],
)
def test_what_takes_long_is_read_beside_the_loop(generator, calls_of, what, path, body, status):
    threads = calls_of({"parsed": app, "read": completions}.get(what, generator.tokenizer), what)
    assert serving(generator, lambda service: posted(service, path, body))[0] == status
    assert threads
    assert threading.main_thread().name not in threads


def test_a_text_to_tokenize_has_the_limit_of_a_prompt(generator):
    found = serving(generator, lambda service: posted(service, "/tokenize", {"prompt": LONG}), max_context=64)
    assert found[0] == 400
    assert found[1]["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/fill", {"prompt": PROMPTS, "alternatives": 20}),
        ("/v1/completions", {"prompt": "the quick", "logprobs": 5}),
        ("/v1/score", {"prompt": PROMPTS[0], "candidates": [["brown"]]}),
    ],
)
def test_results_are_described_beside_the_loop(generator, calls_of, path, body):
    threads = calls_of(generator.tokenizer, "decode")
    assert serving(generator, lambda service: posted(service, path, body))[0] == 200
    assert threads
    assert threading.main_thread().name not in threads


@pytest.fixture(scope="module")
def continuer(run, tmp_path_factory):
    """A causal model with the tokenizer of the run."""
    return causal(tmp_path_factory.mktemp("continuer"), run / "checkpoint_1" / "tokenizer")


def causal(folder, tokenizer, **task):
    shape = {"vocab_size": load_tokenizer(tokenizer).padded_vocab_size(), **SHAPE}
    config = {"model": {"_name": "gpt2", **shape}, "task": task or {"_name": "causal_lm"}}
    model = build_model("gpt2", **shape)
    save_checkpoint(folder / "checkpoint_1", model=model, trainer_state={}, config=config, tokenizer_folder=tokenizer)
    return ftk.load_generator(folder, max_len=8, batch_size=2)


@pytest.fixture(scope="module")
def wordpieces(tmp_path_factory):
    """A causal model with BERT's tokenizer."""
    folder = tmp_path_factory.mktemp("wordpieces")
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"{mark}{one}" for one in "acdehikloqrtuyz" for mark in ("", "##")),
    ]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    build_tokenizer("bert_wordpiece", path=folder / "vocab.txt", special_tokens="glm").save(folder / "tokenizer")
    return causal(folder, folder / "tokenizer")


@pytest.fixture
def begun(wordpieces, monkeypatch):
    """The same, with a token in front of every prompt, as LLaMA's `<s>`."""
    monkeypatch.setattr(
        wordpieces.tokenizer, "prompt_prefix", wordpieces.tokenizer.encode("[CLS]", command_tokens=True)
    )
    return wordpieces


@pytest.fixture(scope="module")
def converser(run, tmp_path_factory):
    """A causal model that was trained on conversations, with the tokenizer of the run."""
    return causal(
        tmp_path_factory.mktemp("converser"), run / "checkpoint_1" / "tokenizer", _name="sft", template="plain"
    )


@pytest.mark.parametrize(("which", "gaps"), [("generator", ["[MASK]", "[sMASK]", "[gMASK]"]), ("continuer", [])])
def test_tokens_read_as_they_stand_and_alternatives_say_what_an_answer_can_begin_with(request, which, gaps):
    generator = request.getfixturevalue(which)
    assert fill.described(generator)["gaps"] == gaps
    body = {"prompt": [PROMPTS[0], "the quick"], "alternatives": 20, "max_len": 4, "prefix": " fox"}

    async def use(service):
        return await filled(service, body)

    for result in serving(generator, use)[0]["results"]:
        (answer,) = result["answers"]
        # Behind a prompt the space in front of an answer is its own.
        joined = "".join(token["text"] for token in answer["tokens"])
        assert (joined.lstrip() if gaps else joined) == answer["text"]
        places = [*answer["tokens"], *([answer["end"]] if answer["end"] else [])]
        assert sum(place["logprob"] for place in places) == pytest.approx(answer["logprob"], abs=1e-5)
        commands = {token.id for token in generator.tokenizer.command_tokens} - {*generator.framing.ends}
        for place in places:
            assert len(place["alternatives"]) == 20
            for one in place["alternatives"]:
                assert (one["end"], one["command"]) == (one["id"] in generator.framing.ends, one["id"] in commands)


def test_the_name_of_a_model_chooses_its_adapter(run, tmp_path):
    folders = {}
    for seed, name in enumerate(("one", "two")):
        folders[name] = save_adapter(tmp_path / name, ftk.load_model(run, "cpu"), ("output",), seed)
    generator = ftk.load_generator(run, "cpu", max_len=8, batch_size=2, adapters=folders)
    asked = [{"prompt": prompt, "model": name} for name in ("run", "one", "two") for prompt in PROMPTS]
    scored = [{"prompt": PROMPTS[0], "candidates": [["brown"]], "model": name} for name in ("run", "one")]

    async def use(service):
        found = await asyncio.gather(*(filled(service, body) for body in asked))
        one = await whole(service, {"prompt": "the quick", "temperature": 0, "max_tokens": 8, "model": "one"})
        scores = [await anext(fill.scores(body, service)) for body in scored]
        with pytest.raises(Refusal, match=r"there is: run, one, two") as refused:
            await filled(service, {"prompt": "the", "model": "three"})
        return [events[0]["results"][0]["text"] for events in found], one, scores, refused.value.status

    adapters = [f"{name}={folder}" for name, folder in folders.items()]
    texts, one, scores, status = serving(generator, use, adapters=adapters)
    assert status == 404
    alone = {name: ftk.load_generator(folder, "cpu", base=run, max_len=8) for name, folder in folders.items()}
    alone["run"] = ftk.load_generator(run, "cpu", max_len=8)
    assert texts == [alone[body["model"]].generate(body["prompt"]).text for body in asked]
    assert len({*texts[:: len(PROMPTS)]}) > 1, "adapters change something"
    assert one["model"] == "one"
    assert one["system_fingerprint"].endswith(generator.digest)
    assert len({generator.digest, *(own.digest for own in alone.values())}) == 4
    assert "the quick" + one["choices"][0]["text"] == alone["one"].generate("the quick").text
    for found, body in zip(scores, scored, strict=True):
        right = alone[body["model"]].score_candidates(PROMPTS[0], [["brown"]])[0][0].logprob
        assert found["candidates"][0][0]["logprob"] == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "the", "n": 0}, "n"),
        ({"prompt": "the", "n": True}, "n"),
        ({"prompt": "the", "temperature": "1"}, "temperature"),
        ({"prompt": "the", "temperature": 1e999}, "temperature"),
        ({"prompt": "the", "top_p": 0}, "top_p"),
        ({"prompt": "the", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "the", "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"prompt": "the", "logit_bias": {"the": 1}}, "logit_bias"),
        ({"prompt": "the", "logit_bias": {"3": 101}}, "logit_bias"),
        ({"prompt": "the", "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": "the", "store": True}, "store"),
        ({"prompt": "the", "store": 0}, "store"),
        ({"prompt": "the", "reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt": "the", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "the", "min_tokens": 9}, "min_tokens"),
        ({"prompt": "the", "best_of": 3}, "best_of"),
        ({"prompt": "the", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "the", "sufix": "a"}, "sufix"),
        ({"prompt": "a [MASK] b [MASK]"}, "echo"),
        ({"prompt": "the " * 300}, "prompt"),
        ({"prompt": "[mask]"}, "prompt"),
        ({"prompt": "the " * 30_000}, "prompt"),
        ({"prompt": "[MASK] " * 17, "echo": True}, "prompt"),
        ({"prompt": ["the"] * 8, "n": 8}, "n"),
        ({"prompt": "the", "temperature": 10**400}, "temperature"),
        ({"prompt": "the", "best_of": True}, "best_of"),
        ({"prompt": "the", "echo": True, "logprobs": 0}, "logprobs"),
        ({"prompt": "the", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "the", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "the", "response_format": "json"}, "response_format"),
        ({"prompt": "the", "guided_json": 3}, "guided_json"),
        ({"prompt": "the", "guided_choice": "yes"}, "guide"),
        ({"prompt": "the", "guided_regex": "(a"}, "guide"),
        ({"prompt": "the", "guided_grammar": "a :: b"}, "guide"),
        ({"prompt": "the", "structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"prompt": "the", "guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    ],
)
def test_bad_completions_are_refused_with_the_field(generator, body, param):
    async def use(service):
        with pytest.raises(Refusal) as refused:
            completions.read(body, service)
        assert service.num_asked == 0
        return refused.value.status, refused.value.param

    assert serving(generator, use) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'"\\ud800"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
    ids=["half", "list", "nan", "twice", "surrogate", "utf16", "deep", "digits"],
)
def test_bad_json_is_refused(body):
    with pytest.raises(Refusal) as refused:
        parsed(body)
    assert refused.value.status == 400
