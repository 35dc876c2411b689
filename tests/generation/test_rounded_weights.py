"""Generation with weights in bfloat16, int8 and int4: right, and how far it may depend on the batch."""

from __future__ import annotations

import copy

import pytest
import torch

import ftk
from ftk.checkpoint.average import save_quantized
from ftk.errors import UserError
from ftk.models import build_model
from ftk.modules.quantization import Quantization, quantize_model
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tokenizers import build_tokenizer, train_sentencepiece
from tests.generation.slow import SPECIAL
from tests.small_run import save_model

SHAPE = {"vocab_size": 200, "num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "max_positions": 64}
KINDS = ["bf16", "int8", "int4", "int8 in bf16"]

BATCH_BOUND = 0.1
"""Natural logarithms by which a token's log-probability may depend on the batch, as docs/generation.md says; 0.03 was
seen. Products of more than 16 rows take another way than those of fewer, and are rounded in other places."""


def certain_model():
    """A model of random weights so large that its distributions are far from flat."""
    model = build_model("glm", **SHAPE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.12, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


def rounded(kind, model):
    weights, _, dtype = kind.partition(" in ")
    if weights != "bf16":
        quantize_model(model, Quantization(weights=weights, group_size=32 if weights == "int4" else None))
    return model.to(torch.bfloat16) if "bf16" in (weights, dtype) else model


def contexts(count):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    words = torch.randint(7, 200, (count, 40), generator=generator).tolist()
    return [[*row[:length], 3, *row[length : length + 4]] for row, length in zip(words, lengths, strict=True)]


def together_until_they_part(one, other):
    """Pairs of log-probabilities of two answers, as far as the tokens before them are the same."""
    pairs = list(zip(one.token_logprobs, other.token_logprobs, strict=False))
    same = [a == b for a, b in zip(one.tokens, other.tokens, strict=False)]
    return pairs[: same.index(False) + 1 if False in same else len(pairs)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_batch_changes_is_rounding_and_within_the_stated_bound(kind):
    model, prompts = rounded(kind, certain_model()), contexts(24)
    alone = BlankGenerator(model, SPECIAL, max_len=6, batch_size=1).fill_ids(prompts)
    among = BlankGenerator(model, SPECIAL, max_len=6, batch_size=24).fill_ids(prompts)
    pairs = [pair for a, b in zip(alone, among, strict=True) for pair in together_until_they_part(a[0], b[0])]
    assert len(pairs) > 100
    # Where the answers part, the two tokens are as good as equally likely: their log-probabilities are compared, too.
    assert max(abs(one - other) for one, other in pairs) < BATCH_BOUND
    assert sum(a[0].tokens == b[0].tokens for a, b in zip(alone, among, strict=True)) >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_rounded_weights_are_near_those_of_float32(kind):
    model, prompts = certain_model(), contexts(24)
    answers = BlankGenerator(model, SPECIAL, max_len=6).fill_ids(prompts)
    given = [[[a.tokens + ([SPECIAL.eop] if a.ended else []) for a in row]] for row in answers]
    exact = BlankGenerator(model, SPECIAL, max_len=6).score(prompts, given)
    small = BlankGenerator(rounded(kind, copy.deepcopy(model)), SPECIAL, max_len=6)
    off = [
        abs(one - other)
        for ((a,),), ((b,),) in zip(exact, small.score(prompts, given), strict=True)
        for one, other in zip(a.token_logprobs, b.token_logprobs, strict=True)
    ]
    assert 0 < sum(off) / len(off) < {"bf16": 0.02, "int4": 0.3}.get(kind, 0.04)
    first = [row[0].tokens[:1] for row in small.fill_ids(prompts)]
    assert sum(one == row[0].tokens[:1] for one, row in zip(first, answers, strict=True)) >= 18


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with run and run-int8, and a tokenizer."""
    folder = tmp_path_factory.mktemp("rounded")
    train_sentencepiece(["the quick brown fox jumps over the lazy dog"] * 20, folder / "pieces", vocab_size=284)
    tokenizer = build_tokenizer("sentencepiece", path=folder / "pieces", special_tokens="glm")
    tokenizer.save(folder / "tokenizer")
    model = build_model("glm", **{**SHAPE, "vocab_size": tokenizer.padded_vocab_size()})
    run = save_model(folder / "run", model, folder / "tokenizer")
    how = Quantization(weights="int8")
    quantize_model(model, how)
    save_quantized(run, folder / "run-int8", model, how)
    return folder


@pytest.mark.parametrize("name", ["run", "run-int8"])
def test_a_checkpoint_is_loaded_in_the_type_that_is_asked_for(checkpoints, name):
    model, plain = ftk.load_model(checkpoints / name, dtype=torch.bfloat16), ftk.load_model(checkpoints / name)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
    assert ("quantized_weight" in str(model.state_dict().keys())) == (name == "run-int8")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        found, exact = model(tokens), plain(tokens)
    assert found.dtype == torch.bfloat16
    assert 0 < (found - exact).norm() / exact.norm() < 0.02
    generator = ftk.load_generator(checkpoints / name, dtype=torch.bfloat16, max_len=4, min_len=2)
    assert generator.generator.model.token_embedding.weight.dtype == torch.bfloat16
    (answer,) = generator.fill(["the quick [MASK] fox"])[0].answers
    assert len(answer.tokens) >= 2


def test_all_of_an_ensemble_and_a_language_model_are_in_the_type(checkpoints):
    run = checkpoints / "run"
    options = {"dtype": torch.bfloat16, "max_len": 3, "lm_path": str(run), "lm_weight": 0.3}
    filler = ftk.load_generator(f"{run}:{checkpoints / 'run-int8'}", **options)
    models = [filler.generator.model, filler.generator.language_model.model]
    assert {parameter.dtype for model in models for parameter in model.parameters()} == {torch.bfloat16}
    assert len(filler.fill(["the quick [MASK] fox"])[0].answers) == 1


@pytest.mark.parametrize("options", [{"path": "run-int8"}, {"path": "run", "lm_path": "run-int8"}], ids=str)
def test_int8_is_refused_on_a_gpu(checkpoints, monkeypatch, options):
    paths = {name: str(checkpoints / path) for name, path in options.items()}
    assert ftk.load_generator(**paths, device="cpu")
    monkeypatch.setattr("ftk.model_parallel.world.resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr("ftk.hub._load_together", lambda *given, **options: pytest.fail("weights were loaded"))
    with pytest.raises(
        UserError, match="run-int8: int8 weights generate on CPUs alone.* precision bf16, or device cpu"
    ):
        ftk.load_generator(**paths)


@pytest.mark.parametrize("dtype", ["bf16", torch.int8])
def test_what_is_no_floating_point_type_is_refused(checkpoints, dtype):
    with pytest.raises(UserError, match="must be a floating point type of torch"):
        ftk.load_model(checkpoints / "run", dtype=dtype)
