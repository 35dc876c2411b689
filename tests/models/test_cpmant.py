"""CPM-Ant against `transformers`, every weight drawn at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ftk
from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.models import build_model
from ftk.models.cpmant.convert import CPMAntConverter
from ftk.models.renames import LazyTensors, renamed
from tests.checkpoint.hf_models import contents, convert, convert_back
from tests.small_run import save_model

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")

SHAPE = {
    **{"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 12, "dim_ff": 48},
    **{"num_hidden_layers": 2, "position_bias_num_buckets": 16, "position_bias_max_distance": 40},
    **{"prompt_types": 4, "prompt_length": 5, "segment_types": 3},
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(1)
    model = transformers.CpmAntForCausalLM(transformers.CpmAntConfig(**SHAPE)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def published(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpmant") / "published"
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(published: Path) -> Path:
    return convert(published, published.with_name("ours"))


def tokens(length: int = 30) -> torch.Tensor:
    return torch.randint(1, 99, (3, length), generator=torch.Generator().manual_seed(2))  # [B, T]; 0 is padding


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("length", [30, 600])
def test_logits_are_those_of_transformers_which_sees_the_whole_text(theirs: Any, ours: Path, length: int) -> None:
    text = tokens(length)
    with torch.no_grad():
        assert_near(ftk.load_model(ours)(text, context_length=torch.full((3,), length)), theirs(text).logits)


def test_a_text_among_longer_ones_has_the_logits_that_transformers_gives_it_behind_padding(
    theirs: Any, ours: Path
) -> None:
    lengths = torch.tensor([30, 17, 4])
    padded = torch.zeros_like(tokens())
    for row, length in enumerate(lengths):
        padded[row, 30 - length :] = tokens()[row, :length]
    with torch.no_grad():
        expected = theirs(padded).logits
        found = ftk.load_model(ours)(tokens(), context_length=lengths)
    for row, length in enumerate(lengths):
        assert_near(found[row, :length], expected[row, 30 - length :])


def test_gradients_are_those_of_transformers(theirs: Any, ours: Path) -> None:
    model = ftk.load_model(ours)
    theirs.zero_grad()
    for logits in (theirs(tokens()).logits, model(tokens(), context_length=torch.full((3,), 30))):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens().flatten()).backward()
    gradients = LazyTensors.of({name: one.grad for name, one in model.named_parameters()})
    found = renamed(gradients, CPMAntConverter.renames, model.config, back=True).all()
    assert found.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        scale = parameter.grad.abs().max()
        assert_near(found[name] / scale, parameter.grad / scale)


def test_greedy_answers_are_those_of_transformers(theirs: Any, ours: Path) -> None:
    """Of prompts of several lengths side by side, with cached keys in both."""
    model = ftk.load_model(ours)
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], [90, 3, 90, 3, 90, 3, 90, 3, 90]]
    framing = Continuation([98], model.config.max_positions, model.config.prompt_ids, sees_prompt=True)
    requests = [Request(prompt, GenerationConfig(max_len=12)) for prompt in prompts]
    found = engine_for(model, framing, requests, batch_size=2).answers(requests)
    flags = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 98, "pad_token_id": 0}
    for prompt, (best,) in zip(prompts, found, strict=True):
        row = theirs.generate(torch.tensor([prompt]), **flags)[0, len(prompt) :].tolist()
        assert list(best.tokens) == (row[: row.index(98)] if 98 in row else row)


@pytest.mark.parametrize(("prompt", "continuation"), [([99], [1]), ([5, 118], [1]), ([5], [99]), ([5], [1, 109])])
def test_rows_of_prompts_are_no_tokens_of_a_text(ours: Path, prompt: list[int], continuation: list[int]) -> None:
    model = ftk.load_model(ours)
    framing = Continuation([98], model.config.max_positions, model.config.prompt_ids, sees_prompt=True)
    request = Request(prompt, GenerationConfig(max_len=2))
    wrong = max(*prompt, *continuation)
    with pytest.raises(UserError, match=f"{wrong} is no id of the model's 99 tokens"):
        score(model, framing, [request], [[continuation]])
    if wrong in prompt:
        with pytest.raises(UserError, match=f"{wrong} is no id of the model's 99 tokens"):
            engine_for(model, framing, [request], batch_size=1).answers([request])


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_the_folder_comes_back_byte_for_byte(theirs: Any, tmp_path: Path, size: str) -> None:
    theirs.save_pretrained(tmp_path / "published", max_shard_size=size)
    back = convert_back(convert(tmp_path / "published", tmp_path / "ours"), tmp_path / "back")
    assert contents(back) == contents(tmp_path / "published")
    assert (back / "model.safetensors.index.json").exists() == (size == "20KB")


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_model_of_ftk_is_one_of_transformers(tmp_path: Path, size: str) -> None:
    model = build_model("cpmant_tiny", vocab_size=99).eval()
    save_model(tmp_path / "ours", model)
    folder = convert_back(tmp_path / "ours", tmp_path / "theirs", size)
    loaded, report = transformers.CpmAntForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert_near(loaded.eval()(tokens()).logits, model(tokens(), context_length=torch.full((3,), 30)))


def test_without_a_context_a_text_is_read_from_left_to_right(ours: Path) -> None:
    model = ftk.load_model(ours)
    changed = tokens()
    changed[:, 20:] = 1
    with torch.no_grad():
        assert torch.equal(model(tokens())[:, :20], model(changed)[:, :20])
        one, other = (model(each, context_length=torch.full((3,), 30)) for each in (tokens(), changed))
    assert not torch.allclose(one[:, :20], other[:, :20])
