"""ftk-generate --path A:B: checkpoints that answer together."""

from __future__ import annotations

import json

import pytest

from ftk import hub
from ftk.errors import UserError
from ftk.generation.ensemble import Ensemble
from ftk_cli import generate


def test_two_checkpoints_answer_together(ask, place, second):
    command = ["--input", "-", "--score-reference", "--output-format", "json"]
    line = b"the lazy [MASK] while\tdog"
    found = {}
    for path in ("run", "second", "run:second"):
        _, out, _ = ask(generate.main, "--path", path, *command, stdin=line, code=0)
        found[path] = json.loads(out[0])["candidates"][0]["answers"][0]
    filler = hub.load_generator(place / "run")
    encoded = filler.encode_candidates("the lazy [MASK] while", [["dog"]])
    filler.model = Ensemble([hub.load_model(place / "run"), hub.load_model(place / second)])
    (((expected,),),) = filler.score_encoded([encoded])
    assert found["run:second"]["token_logprobs"] == pytest.approx(expected.token_logprobs, abs=1e-5)
    first_logprobs = [found[path]["token_logprobs"][0] for path in ("run", "run:second", "second")]
    assert sorted(first_logprobs)[1] == first_logprobs[1]
    _, out, _ = ask(generate.main, "data-bin", "--path", "run:second", "--max-samples", "2", "--max-len", "3", code=0)
    assert out[1].startswith("  1. '")


@pytest.mark.parametrize(
    ("path", "message"),
    [("run:nowhere", "nowhere"), ("run:foreign", "has another tokenizer"), (":", "names no checkpoint")],
)
def test_what_cannot_be_together_is_named(ask, second, path, message):
    _, _, err = ask(generate.main, "--path", path, "--input", "-", stdin=b"the [MASK]", code=2)
    assert len(err) == 1
    assert message in err[0]


def test_a_list_without_a_checkpoint_is_refused():
    with pytest.raises(UserError, match="names no checkpoint; give folders"):
        hub.load_generator([])
