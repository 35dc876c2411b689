"""Answers that match what a request guides them to, without HTTP."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

import ftk
from ftk.generation.processors.guides import Guide, GuideError
from ftk.serving.refusal import Refusal
from tests.serving.services import filled, posted, serving, whole

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

        def stuck(guide, state, size):
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
    ("route", "body", "param"),
    [
        ("completions", {"guide": None, "guided_regex": "(a"}, "guided_regex"),
        (
            "completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format",
        ),
        ("fill", {"guided_regex": None, "guide": "regex:(a"}, "guide"),
    ],
)
def test_a_guide_that_cannot_be_compiled_is_called_as_the_request_calls_it(generator, route, body, param):
    pytest.importorskip("llguidance", reason="needs llguidance (pip install ftk[guided])")

    async def use(service):
        return await posted(service, f"/v1/{route}", {"prompt": "the", **body})

    status, answer = serving(generator, use)
    assert (status, answer["error"]["param"]) == (400, param)
