"""The example strategy samples as its paper says, and works in ftk-generate from a --user-dir."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from ftk.generation.search.random import prompt_key, step_numbers
from ftk.models import build_model
from ftk.plugins import import_user_dir
from ftk.registry import SEARCHES
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tokenizers import load_tokenizer
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.small_run import forget_plugin, save_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "search_plugin"


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """Its name is forgotten afterwards, so that other tests see ftk's own strategies alone."""
    import_user_dir(str(EXAMPLE))
    yield
    forget_plugin("search_plugin", SEARCHES, "mirostat")


@pytest.mark.parametrize(("target", "rate"), [(1.0, 0.5), (0.5, 0.1)])
def test_answers_equal_the_slow_version(target, rate):
    model, limit_met = small_model(seed=4), 0
    generator = BlankGenerator(model, SPECIAL, search=f"mirostat target={target} rate={rate}", max_len=6, seed=5)
    for context in ([7, 8, 3, 9], [3], [10, 11, 12, 3, 6]):
        ((answer,),) = generator.fill_ids([context])
        blank, limit, expected = context.index(3), 2 * target, []
        for number in step_numbers([prompt_key(5, context)], 0, 6, 1)[0, :, 0]:
            shares = slow.next_logprobs(model, context, [], blank, expected).double().exp().numpy()
            surprise = -np.log2(shares)
            kept = np.where(surprise <= max(limit, surprise.min()), shares, 0.0)
            limit_met += int((kept == 0).any())
            token = int(np.searchsorted(kept.cumsum(), number * kept.sum(), side="right"))
            limit -= rate * (surprise[token] - target)
            expected.append(token)
            if token == SPECIAL.eop:
                break
        assert answer.tokens + [SPECIAL.eop] * answer.ended == expected
    assert limit_met > 3


def test_ftk_generate_knows_it_from_a_user_dir(data_bin, tmp_path, command):
    tokenizer = load_tokenizer(data_bin)
    shape = {"vocab_size": tokenizer.padded_vocab_size(), "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    model = build_model("glm", **shape, max_positions=128)
    save_model(tmp_path / "run" / "checkpoint_1", model, data_bin / "tokenizer", task={"_name": "glm_blank"})
    (tmp_path / "prompts").write_text("a text with [MASK] in it\nand another [MASK]\n" * 8)

    def generate(search, *more):
        return command(
            "ftk-generate", "--path", tmp_path / "run", "--input", tmp_path / "prompts", "--output-format", "json",
            "--user-dir", EXAMPLE, "--search", search, "--max-len", 12, "--device", "cpu", *more,
        )  # fmt: skip

    def bits(done):
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line)["answers"][0] for line in done.stdout.splitlines()]
        assert len(answers) == 16
        return [-one / math.log(2) for answer in answers for one in answer["token_logprobs"]]

    low, high = bits(generate("mirostat target=2 rate=1")), bits(generate("mirostat target=50"))
    assert sum(low) / len(low) < sum(high) / len(high) - 0.2
    done = generate("mirostat", "--nbest", 3)
    assert all(len(json.loads(line)["answers"][0]["others"]) == 2 for line in done.stdout.splitlines())
    for search, message in (("mirostat target=0", "target is 0"), ("mirostad", "there are: beam")):
        done = generate(search)
        assert done.returncode == 2
        assert message in done.stderr
