"""Masks that an encoder fills: the same tokens and probabilities as those of `transformers`; refusals in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import ftk
from ftk.errors import UserError
from ftk_cli.generate import main as generate
from ftk_cli.interactive import main as interactive

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")

CORPUS = ["the quick brown fox jumps over the lazy dog", "she sells sea shells by the sea shore", "Paris is a city"]
TEXTS = [
    "the quick {} fox jumps over the {} dog",
    "{} is a city",
    "she sells{}, and she sells sea {} by the sea shore; the shells she sells are sea {} , she says",
]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}


def word_pieces(folder: Path) -> Any:
    """As BERT's; the folder does not say what its special tokens are for, as the first published ones."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    ends = [(one, backend.token_to_id(one)) for one in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ends)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **roles)


def byte_pairs(folder: Path) -> Any:
    """As RoBERTa's, whose mask swallows the space on its left."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", tokenizers.AddedToken("<mask>", lstrip=True, special=True)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    ends = [(one, backend.token_to_id(one)) for one in ("</s>", "<s>")]
    backend.post_processor = processors.RobertaProcessing(*ends)
    backend.save(str(folder / "tokenizer.json"))
    roles = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    roles |= {"cls_token": "<s>", "sep_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**roles, "mask_token": "<mask>"}))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="<mask>", **roles)


FAMILIES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "Bert": (word_pieces, {"pad_token_id": 0}),
    "Roberta": (byte_pairs, {"pad_token_id": 1, "type_vocab_size": 1}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def published(request, tmp_path_factory) -> tuple[Path, Any]:
    """A folder with a model of which every weight is random, and the pipeline of `transformers` that fills masks."""
    folder = tmp_path_factory.mktemp(request.param)
    make_tokenizer, options = FAMILIES[request.param]
    tokenizer = make_tokenizer(folder)
    config = getattr(transformers, f"{request.param}Config")(vocab_size=len(tokenizer), **SHAPE, **options)
    model = getattr(transformers, f"{request.param}ForMaskedLM")(config).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=draw)
    model.save_pretrained(folder)
    return folder, transformers.FillMaskPipeline(model=model, tokenizer=tokenizer, device="cpu")


def spelled(texts: list[str], mask: str) -> list[str]:
    return [text.replace("{}", mask) for text in texts]


@pytest.mark.parametrize("mask", ["[MASK]", "<mask>"])
def test_candidates_are_those_of_transformers(published, mask: str) -> None:
    folder, pipeline = published
    filler = ftk.load_generator(folder, "cpu", batch_size=2)
    found = filler.fill(spelled(TEXTS, mask), top=4)
    for text, result in zip(spelled(TEXTS, pipeline.tokenizer.mask_token), found, strict=True):
        theirs = pipeline(text, top_k=4)
        theirs = theirs if isinstance(theirs[0], list) else [theirs]
        for answer, candidates in zip(result.answers, theirs, strict=True):
            (ours,) = answer.alternatives
            assert [token for token, _ in ours] == [one["token"] for one in candidates]
            expected = [one["score"] for one in candidates]
            assert [math.exp(value) for _, value in ours] == pytest.approx(expected, rel=1e-4)
            assert answer.tokens == [candidates[0]["token"]]
            assert answer.probability == pytest.approx(candidates[0]["score"], rel=1e-4)
    for text, result in zip(spelled(TEXTS, mask), found, strict=True):
        alone = filler.fill(text, top=4)
        assert alone.text == result.text
        for ours, other in zip(alone.answers, result.answers, strict=True):
            assert ours.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-5)


def test_results_have_text_places_and_pieces(published) -> None:
    folder, _ = published
    filler = ftk.load_generator(folder, "cpu", alternatives=0)
    text = "the quick [MASK] fox jumps over the <mask> dog"
    result = filler.generate(text)
    assert result.prompt == text
    assert len(result.answers) == len(result.spans) == 2
    for (start, end), answer in zip(result.spans, result.answers, strict=True):
        assert answer.text.removeprefix("##") == result.text[start:end].strip()
        assert not answer.alternatives
    rest = text
    for part in text.replace("<mask>", "[MASK]").split("[MASK]"):
        assert part.strip() in result.text
        rest = rest.replace(part, "")
    pieces = list(filler.stream([text, "[MASK] is a city"]))
    assert "".join(piece.filled for piece in pieces if piece.prompt == 0) == result.text
    streamed = [piece.result for piece in pieces if piece.prompt == 0][-1]  # beside another text: rounded otherwise
    assert (streamed.text, streamed.spans) == (result.text, result.spans)
    for one, other in zip(streamed.answers, result.answers, strict=True):
        assert one.tokens == other.tokens
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-5)
    assert "<span" in result._repr_html_()


def test_several_models_are_an_ensemble(published) -> None:
    folder, _ = published
    text = "Paris is a [MASK]"
    one, two = (ftk.load_generator(path, "cpu").fill(text) for path in (folder, [folder, folder]))
    assert two.answers[0].token_logprobs == pytest.approx(one.answers[0].token_logprobs, abs=1e-5)


def test_commands_print_texts_and_candidates(published, tmp_path: Path, capsys) -> None:
    folder, _ = published
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Paris is a [MASK]\nParis is a city\nParis" + " is" * 70 + " <mask>\n", encoding="utf-8")
    flags = ["--path", str(folder), "--input", str(prompts), "--device", "cpu"]
    result = ftk.load_generator(folder, "cpu").fill("Paris is a [MASK]", top=2)
    ((best, logprob), (second, _)) = result.answers[0].alternatives[0]

    assert generate([*flags, "--alternatives", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == result.text
    spell = ftk.load_tokenizer(folder).token_text
    assert f"token 1: {spell(best)!r} {math.exp(logprob):.3f}  {spell(second)!r}" in captured.out
    mask = spell(ftk.load_tokenizer(folder).special.mask)
    assert f"prompts.txt:2: the text has no mask; write {mask} where a token is missing" in captured.err
    longest = 66 if "Bert" in folder.name else 64
    assert f"tokens, those at its beginning and end counted, but the model has {longest} positions" in captured.err

    assert generate([*flags, "--max-samples", "1", "--output-format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == result.text
    assert [one["token"] for one in record["answers"][0]["alternatives"][0]][:2] == [best, second]
    assert len(record["answers"][0]["alternatives"][0]) == 5


def test_given_words_have_the_probabilities_of_transformers(published, tmp_path: Path, capsys) -> None:
    folder, pipeline = published
    words = ["is", "city"]
    target = "Ġis" if "Roberta" in folder.name else "is"  # the token of a word has the space in front of it
    (theirs,) = pipeline(f"Paris {pipeline.tokenizer.mask_token} a city", targets=[target])
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Paris [MASK] a city", "candidates": words},
        {"prompt": "Paris [MASK] a <mask>", "answers": words},
        {"prompt": "Paris [MASK] a <mask>", "answers": ["is"]},
        {"prompt": "Paris [MASK] a city", "answers": ["is a"]},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    flags = ["--path", str(folder), "--input", str(prompts), "--device", "cpu", "--output-format", "json"]
    assert generate([*flags, "--score-reference"]) == 1
    captured = capsys.readouterr()
    alone, both, *refused = map(json.loads, captured.out.splitlines())
    assert math.exp(alone["candidates"][0]["logprob"]) == pytest.approx(theirs["score"], rel=1e-4)
    assert [one["text"] for one in both["candidates"][0]["answers"]] == words
    assert refused[0]["error"] == "the text has 2 masks, but 1 are answered"
    assert refused[1]["error"] == "'is a' is 2 tokens; a mask stands for one"


REFUSED = {
    "--beam 4": "--beam belongs to a model of the task",
    "--max-len 8": "--max-len belongs to a model of the task causal_lm, cloze, ",
    "--alternatives -1": "--alternatives is -1",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_options_of_other_tasks_are_refused(published, flags: str, capsys) -> None:
    folder, _ = published
    assert interactive(["--path", str(folder), *flags.split()]) == 2
    assert REFUSED[flags] in capsys.readouterr().err


def test_what_is_no_task_of_an_encoder_is_refused(published) -> None:
    folder, _ = published
    with pytest.raises(UserError, match="unknown generation option 'beam'"):
        ftk.load_generator(folder, "cpu", beam=4)
    with pytest.raises(UserError, match="does not use 'allowed_tokens'"):
        ftk.load_generator(folder, "cpu", allowed_tokens=lambda *_: [1])
    filler = ftk.load_generator(folder, "cpu")
    with pytest.raises(UserError, match="alternatives is -1"):
        filler.fill("a [MASK]", top=-1)
    with pytest.raises(UserError, match="leave out constraints"):
        filler.generate("a [MASK]", options={"constraints": ["b"]})
    with pytest.raises(UserError, match="a prompt is a text"):
        filler.generate([3])


def test_a_tokenizer_without_a_mask_is_refused(published, tmp_path: Path) -> None:
    folder, _ = published
    for file in folder.iterdir():
        content = file.read_bytes()
        if file.name.startswith("tokenizer"):
            content = content.replace(b"<mask>", b"<else>").replace(b"[MASK]", b"[ELSE]").replace(b"mask_token", b"x")
        (tmp_path / file.name).write_bytes(content)
    with pytest.raises(UserError, match="the tokenizer hf has no (mask|cls) token, which masked_lm needs"):
        ftk.load_generator(tmp_path, "cpu")
