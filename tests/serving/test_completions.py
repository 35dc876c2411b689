"""What requests are answered with: completions and filled blanks, without HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

import ftk
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.generation.results import Span, TextPiece, TextResult
from ftk.plugins import import_user_dir
from ftk.registry import SEARCHES
from ftk.serving import app, completions, fill
from ftk.serving.encoded import ordered
from ftk.tokenizers import build_tokenizer
from tests.generation.test_adapted import save_adapter
from tests.serving.services import PROMPTS, causal, filled, posted, serving, whole
from tests.serving.test_chat import OF_VLLM
from tests.small_run import forget_plugin, save_run


@pytest.fixture(scope="module")
def wordpieces(tmp_path_factory):
    """A causal model with BERT's tokenizer."""
    folder = tmp_path_factory.mktemp("wordpieces")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens += [f"{mark}{one}" for one in "acdehikloqrtuyz" for mark in ("", "##")]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    build_tokenizer("bert_wordpiece", path=folder / "vocab.txt", special_tokens="glm").save(folder / "tokenizer")
    return causal(folder, folder / "tokenizer")


@pytest.fixture(scope="module")
def filler(wordpieces, tmp_path_factory):
    """A GLM with BERT's tokenizer: an answer may begin with a piece that goes on with the word in front of it."""
    folder = tmp_path_factory.mktemp("filler")
    wordpieces.tokenizer.save(folder / "tokenizer")
    save_run(folder / "run" / "checkpoint_1", folder)
    return ftk.load_generator(folder / "run", max_len=8, batch_size=2)


@pytest.fixture
def begun(wordpieces, monkeypatch):
    """The same, with a token in front of every prompt, as LLaMA's `<s>`."""
    monkeypatch.setattr(
        wordpieces.tokenizer, "prompt_prefix", wordpieces.tokenizer.encode("[CLS]", command_tokens=True)
    )
    return wordpieces


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
        alone = {"prompt": "the quick", "echo": True, "max_tokens": 0, "min_tokens": 3}
        bodies = body, {**body, "echo": True}, alone
        return await asyncio.gather(*(whole(service, one) for one in bodies))

    part, echo, alone = (found["choices"][0]["text"] for found in serving(generator, use))
    assert f"the quick brown{part} over a lazy dog" == echo
    assert alone == "the quick"


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


def test_what_a_request_leaves_out_is_as_the_service_samples(run):
    generator = ftk.load_generator(run, max_len=8, batch_size=2, sampling=True, temperature=3.0, top_k=5, min_p=0.01)

    async def use(service):
        asked = {"prompt": "the quick", "seed": 2, "max_tokens": 8}
        given = {"temperature": 3, "top_k": 5, "min_p": 0.01}
        bodies = asked, asked | given, asked | {"temperature": 1, "top_k": 0, "min_p": 0}
        return [(await whole(service, body))["choices"][0]["text"] for body in bodies]

    own, given, other = serving(generator, use)
    assert own == given != other


def test_a_plugins_search_answers_completions_too(run):
    import_user_dir(Path(__file__).parents[2] / "examples" / "search_plugin")
    try:
        generator = ftk.load_generator(run, max_len=8, batch_size=2, search="mirostat target=0.1 rate=1")
        greedy, sampled = (ftk.load_generator(run, max_len=8, sampling=sampling) for sampling in (False, True))

        async def use(service):
            asked = {"prompt": "the quick", "seed": 2, "max_tokens": 8}
            bodies = asked, asked | {"temperature": 0.5}, asked | {"temperature": 0}
            return [(await whole(service, body))["choices"][0]["text"] for body in bodies]

        texts = serving(generator, use)
        warm = generator.with_options(temperature=0.5)
        ways = [one.generate(["the quick"], seeds=[2])[0].text for one in (generator, warm, greedy, sampled)]
    finally:
        forget_plugin("search_plugin", SEARCHES, "mirostat")
    assert [f"the quick{text}" for text in texts] == ways[:3]
    assert ways[0] != ways[3]


def pieces(*parts: tuple[str, tuple[tuple[int, int], ...]]):
    """Pieces of text with the places of the answer in them; the last one has a result."""
    return [
        TextPiece(0, 0, "", (), (), text, tuple(Span(*span, 0) for span in spans), result=RESULT if last else None)
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
        ("wordpieces", {"prompt": ["the quick", "a lazy "], "stop_token_ids": [*range(5, 16)]}),
        ("generator", {"prompt": ["the quick", "the quick "], "stop_token_ids": [*range(60, 76)], "ignore_eos": True}),
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
            logprobs = [logprob for part in own for logprob in part["token_logprobs"]]
            assert logprobs == pytest.approx(lists["token_logprobs"], abs=1e-5)
            assert [sorted(top.values()) for part in own for top in part["top_logprobs"]] == [
                pytest.approx(sorted(top.values()), abs=1e-5) for top in lists["top_logprobs"]
            ]


def test_a_piece_that_goes_on_with_a_word_stands_in_the_text_without_its_mark(filler):
    (piece,) = (one for one in range(filler.tokenizer.vocab_size) if filler.tokenizer.token_text(one) == "##y")
    body = {"prompt": "the quick", "logit_bias": {f"{piece}": 100}, "max_tokens": 3, "temperature": 0, "logprobs": 0}

    async def use(service):
        return await whole(service, body)

    (choice,) = serving(filler, use)["choices"]
    assert choice["text"] == "yyy"
    assert choice["logprobs"]["tokens"] == ["y", "y", "y"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


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


@pytest.mark.parametrize("which", ["generator", "continuer"])
def test_what_vllms_clients_send_is_honoured(request, which):
    generator = request.getfixturevalue(which)
    end = str(generator.framing.ends[0])
    command = next(one.id for one in generator.tokenizer.command_tokens if one.id not in generator.framing.ends)
    rows = [
        (OF_VLLM, 1, "stop"),
        ({"ignore_eos": True}, 5, "length"),
        ({"ignore_eos": True, "stop_token_ids": [command], "logit_bias": {str(command): 100}}, 0, "stop"),
    ]

    async def use(service):
        body = {"prompt": "the quick", "max_tokens": 5, "temperature": 0, "logit_bias": {end: 100}}
        return [await whole(service, {**body, **own}) for own, *_ in rows]

    for found, (_, count, reason) in zip(serving(generator, use), rows, strict=True):
        assert found["usage"]["completion_tokens"] == count
        assert found["choices"][0]["finish_reason"] == reason
        assert (found["choices"][0]["text"] == "") == (reason == "stop")


def test_what_a_prompt_begins_with_is_counted(begun):
    async def use(service):
        body = {"prompt": "the quick"}
        bodies = [body, {**body, "add_special_tokens": False}]
        counts = [(await posted(service, "/tokenize", one))[1]["count"] for one in bodies]
        return [*counts, (await whole(service, {**body, "max_tokens": 1}))["usage"]["prompt_tokens"]]

    with_it, without, read = serving(begun, use)
    assert with_it == without + 1 == read


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
        status, refused = await posted(service, "/v1/fill", {"prompt": "the", "model": "three"})
        assert "there is: run, one, two" in refused["error"]["message"]
        return [events[0]["results"][0]["text"] for events in found], one, scores, status

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
