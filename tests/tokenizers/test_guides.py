"""Guided answers in every kind of vocabulary: what each token writes, and that random answers match their guides."""

from __future__ import annotations

import gc
import json
import random
import re
import weakref

import pytest
import tokenizers
import torch
from slow_tokenizers import SENTENCES
from tokenizers import decoders, models, pre_tokenizers

from ftk.errors import UserError
from ftk.generation.processors import build_processors
from ftk.generation.processors.guides import guided_tokens
from ftk.tokenizers import build_tokenizer, train_sentencepiece
from ftk.tokenizers.token_bytes import ALWAYS_SPACE, MAYBE_SPACE
from tests.generation.processors.helpers import run, state_of

pytest.importorskip("llguidance", reason="needs llguidance (pip install ftk[guided])")

LETTERS = [chr(code) for code in range(32, 127)]
MOST = 160  # tokens of an answer


def hf(folder, model, decoder, *added):
    made = tokenizers.Tokenizer(model)
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(["</s>", *added])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return build_tokenizer("hf", path=folder)


def pieces(*more):
    words = ["▁", *(f"▁{one}" for one in LETTERS if one != " "), *LETTERS[1:], "▁true", '":', "▁▁", *more]
    return {piece: id_ for id_, piece in enumerate(dict.fromkeys(words))}


def of_sentencepiece(folder, model_type):
    lines = [*SENTENCES * 3, "".join(LETTERS)]
    sizes = {"unigram": 384, "bpe": 384, "char": 384}
    path = train_sentencepiece(lines, folder, vocab_size=sizes[model_type], model_type=model_type)
    return build_tokenizer("sentencepiece", path=path, special_tokens="with_end")


def bert(folder):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS[1:], *(f"##{one}" for one in LETTERS[1:]), "yes"]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in dict.fromkeys(tokens)))
    return build_tokenizer("bert_wordpiece", path=folder / "vocab.txt", special_tokens="glm")


def fairseq(folder, remove_bpe, spellings):
    (folder / "dict.txt").write_text("".join(f"{one} 1\n" for one in spellings), encoding="utf-8")
    return build_tokenizer("fairseq_dict", path=folder / "dict.txt", remove_bpe=remove_bpe, special_tokens="glm")


def byte_level(folder):
    letters = {letter: id_ for id_, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    return hf(folder, models.BPE(letters | {"Ġtrue": 256}, []), decoders.ByteLevel(), "<pad>")


def with_bytes(folder):
    vocab = pieces(*(f"<0x{byte:02X}>" for byte in range(256)))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return hf(folder, models.BPE(vocab, [], byte_fallback=True), decoders.Sequence(steps))


def word_piece(folder):
    tokens = ["[UNK]", *LETTERS[1:], *(f"##{one}" for one in LETTERS[1:]), "n't", "##n't"]
    vocab = {token: id_ for id_, token in enumerate(dict.fromkeys(tokens))}
    return hf(folder, models.WordPiece(vocab, unk_token="[UNK]"), decoders.WordPiece("##", cleanup=True))


KINDS = {
    "gpt2_bpe": lambda folder, request: build_tokenizer(
        "gpt2_bpe", path=request.getfixturevalue("tiny_gpt2"), special_tokens="glm"
    ),
    "unigram": lambda folder, request: of_sentencepiece(folder, "unigram"),
    "bpe": lambda folder, request: of_sentencepiece(folder, "bpe"),
    "char": lambda folder, request: of_sentencepiece(folder, "char"),
    "bert_wordpiece": lambda folder, request: bert(folder),
    "fairseq_pieces": lambda folder, request: fairseq(folder, "sentencepiece", pieces()),
    "hf_byte_level": lambda folder, request: byte_level(folder),
    "hf_llama": lambda folder, request: with_bytes(folder),
    "hf_metaspace": lambda folder, request: hf(folder, models.BPE(pieces("a▁b"), []), decoders.Metaspace()),
    "hf_wordpiece": lambda folder, request: word_piece(folder),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("guided"), request)


def test_tokens_side_by_side_write_their_bytes(tokenizer):
    of_ids, first_space = tokenizer.token_bytes()
    assert len(of_ids) == tokenizer.vocab_size
    assert all(of_ids[token.id] == b"" for token in tokenizer.command_tokens)
    rng = random.Random(1)
    texts = [id_ for id_, one in enumerate(of_ids) if one.strip() and one.decode("utf-8", "ignore").encode() == one]
    first = [id_ for id_ in texts if first_space != ALWAYS_SPACE or of_ids[id_].startswith(b" ")]
    for _ in range(300):
        ids = [rng.choice(first), *rng.choices(texts, k=6)]
        text = b"".join(of_ids[id_] for id_ in ids).decode()
        if first_space in (MAYBE_SPACE, ALWAYS_SPACE):
            text = text.removeprefix(" ")
        assert tokenizer.decode(ids).strip() == text.strip()


def written(tokenizer, guide, seed, rows=6):
    """Answers of a model whose tokens are random, in one batch; each with its end."""
    torch.manual_seed(seed)
    ends = tuple(one for one in (tokenizer.special.eop, tokenizer.special.eos) if one is not None)
    chain = build_processors(None, tokenizer, ends=ends, max_len=MOST, guide=[guide])
    lines = [[] for _ in range(rows)]
    for _ in range(MOST):
        if all(set(ends) & {*line} for line in lines):
            break
        logits = 3 * torch.randn(rows, 1, tokenizer.vocab_size + 3)
        scores = run(chain, state_of([[line] for line in lines], logits, ends=ends, max_len=MOST))
        for line, one in zip(lines, scores[:, 0].softmax(-1).multinomial(1)[:, 0].tolist(), strict=True):
            line.append(one)
    cut = [next((place for place, one in enumerate(line) if one in ends), -1) for line in lines]
    assert min(cut) >= 0, "an answer has no end"
    return [tokenizer.decode(line[:place]) for line, place in zip(lines, cut, strict=True)]


def random_expression(rng):
    """One whose texts are short, in letters that every vocabulary here has."""
    parts = [
        rng.choice(["[a-d]{1,4}", "(yes|no)", "[0-9]{2}", "x?y", "-", "(a|b[cd]){1,3}", r"\+"])
        for _ in range(rng.randint(1, 4))
    ]
    return rng.choice(["", " "]).join(parts)


def test_random_answers_match_random_expressions(tokenizer):
    rng = random.Random(7)
    for seed in range(12):
        expression = random_expression(rng)
        for text in written(tokenizer, f"regex:{expression}", seed):
            assert re.fullmatch(expression, text), (expression, text)


def random_schema(rng, depth=2):
    kind = rng.choice(["integer", "boolean", "string", "enum", "null"] + ["object", "array"] * (depth > 0))
    if kind == "object":
        names = rng.sample(["a", "name", "x y", "ключ"], rng.randint(1, 3))
        own = {name: random_schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": own, "required": names, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": 1, "maxItems": 2}
    return {
        "integer": {"type": "integer", "minimum": -20, "maximum": 300},
        "boolean": {"type": "boolean"},
        "string": {"type": "string", "minLength": 1, "maxLength": 4},
        "enum": {"enum": ["red", 7, None]},
        "null": {"type": "null"},
    }[kind]


def fits(value, schema):
    """Whether a value is one of such a schema: slow and obviously right."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        own = schema["properties"]
        return isinstance(value, dict) and {*value} == {*own} and all(fits(value[name], own[name]) for name in own)
    if kind == "array":
        return isinstance(value, list) and 1 <= len(value) <= 2 and all(fits(one, schema["items"]) for one in value)
    if kind == "integer":
        return type(value) is int and -20 <= value <= 300
    if kind == "string":
        return isinstance(value, str) and 1 <= len(value) <= 4
    return value is None if kind == "null" else isinstance(value, bool)


def test_random_answers_are_values_of_random_schemas(tokenizer):
    of_ids, first_space = tokenizer.token_bytes()
    compact = {"x-guidance": {"whitespace_flexible": False}}  # white space without end would fill an answer
    whole = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    if not any(one.startswith(b'"') for one in of_ids):
        with pytest.raises(UserError, match="no token that closes a text in JSON"):
            written(tokenizer, f"json:{json.dumps(whole | compact)}", 0)
        return
    if first_space == ALWAYS_SPACE:
        compact = {"x-guidance": {"whitespace_pattern": " "}}
    rng = random.Random(3)
    can_spell = {b"\xd0", "к".encode()} & {*of_ids}
    for seed in range(10):
        schema = random_schema(rng)
        if not can_spell and "\\u" in json.dumps(schema):
            continue
        for text in written(tokenizer, f"json:{json.dumps(schema | compact)}", seed):
            assert fits(json.loads(text), schema), (schema, text)


def test_pieces_that_say_what_stands_behind_them_are_refused(tmp_path):
    with pytest.raises(UserError, match="are whole words"):
        fairseq(tmp_path, "none", LETTERS[1:]).token_bytes()
    with pytest.raises(UserError, match="are whole words"):
        hf(tmp_path, models.WordLevel({"a": 0}, unk_token="a"), None).token_bytes()
    with pytest.raises(UserError, match="subword-nmt"):
        fairseq(tmp_path, "subword_nmt", LETTERS[1:]).token_bytes()
    with pytest.raises(UserError, match="depends on its neighbours \\(decoder BPEDecoder\\)"):
        hf(tmp_path, models.BPE(pieces(), []), decoders.BPEDecoder()).token_bytes()


def test_a_tokenizer_that_nobody_uses_is_not_kept_by_its_guides(tmp_path):
    tokenizer = bert(tmp_path)
    tokens, gone = guided_tokens(tokenizer, {1}), weakref.ref(tokenizer)
    assert tokens is guided_tokens(tokenizer, {1})
    assert tokens.decode(tokenizer.encode("yes")) == tokenizer.decode(tokenizer.encode("yes"))
    tokens = weakref.ref(tokens)
    del tokenizer
    gc.collect()
    assert gone() is None
    assert tokens() is None
