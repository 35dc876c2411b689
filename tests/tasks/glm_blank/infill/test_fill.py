"""Text in, text with its blanks filled out, under every tokenizer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ftk.errors import UserError
from ftk.generation import Answer
from ftk.generation.engine.request import Event
from ftk.models import build_model
from ftk.tasks.glm_blank import BlankFiller, BlankGenerator
from ftk.tokenizers import build_tokenizer, train_sentencepiece
from tests.paths import TEST_DATA

PUBLISHED = TEST_DATA / "tokenizers"
TOKENIZERS = {
    "bert": ("bert_wordpiece", "bert-base-uncased-vocab.txt"),
    "chinese": ("sentencepiece", "cog-pretrain.model"),
    "gpt2": ("gpt2_bpe", "gpt2-vocab.json"),
}


class FixedGenerator(BlankGenerator):
    """Answers with given texts; remembers the contexts it saw."""

    def __init__(self, tokenizer, answers):
        super().__init__(SimpleNamespace(), tokenizer.special)
        self.answers = [tokenizer.encode(answer) for answer in answers]
        self.contexts = []

    def events(self, requests, *, stream=False):
        self.contexts += [request.prompt.context for request in requests]
        for place, request in enumerate(requests):
            for number, ids in zip(request.prompt.places, self.answers, strict=False):
                answer = Answer(ids, [-0.5] * (len(ids) + 1), -0.5)
                yield Event(place, "answer", number, ids, answer.token_logprobs, answer)


@pytest.fixture(scope="module")
def own_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    text = ["the quick brown fox jumps over the lazy dog", "she fills blanks in a text , it is trained on text"] * 20
    train_sentencepiece(text, folder, vocab_size=293)
    return build_tokenizer("sentencepiece", path=str(folder), special_tokens="glm")


def published(name, **options):
    kind, file = TOKENIZERS[name]
    if not (PUBLISHED / file).exists():
        pytest.skip(f"{PUBLISHED} is absent; set FTK_TEST_DATA to the folder that holds data/tokenizers")
    path = PUBLISHED if kind == "gpt2_bpe" else PUBLISHED / file
    return build_tokenizer(kind, path=str(path), special_tokens="glm", **options)


@pytest.fixture(params=["own", *TOKENIZERS])
def tokenizer(request, own_tokenizer):
    return own_tokenizer if request.param == "own" else published(request.param)


def fill(tokenizer, prompt, *answers):
    generator = FixedGenerator(tokenizer, answers)
    (result,) = BlankFiller(tokenizer, generator).fill([prompt])
    return result, generator.contexts[0]


@pytest.mark.parametrize(
    ("prompt", "answers", "text"),
    [
        ("the quick [MASK] jumps", [" brown fox"], "the quick brown fox jumps"),
        ("[MASK] jumps over [sMASK] .", ["she", " the dog"], "she jumps over the dog ."),
        ("over the [gMASK]", [" lazy dog"], "over the lazy dog"),
        ("the quick brown", [" fox"], "the quick brown fox"),
        ("a [MASK] [MASK] text", [" quick", " lazy"], "a quick lazy text"),
        ("  she fills [MASK] \n", [" a text"], "she fills a text"),
        ("she fills [MASK] .", [""], "she fills  ."),
    ],
)
def test_answers_take_the_place_of_their_blanks(tokenizer, prompt, answers, text):
    result, _ = fill(tokenizer, prompt, *answers)
    assert result.text == text
    assert [answer.text for answer in result.answers] == [answer.strip() for answer in answers]
    assert result.prompt == prompt


def test_the_users_own_text_is_left_as_it_was_written(own_tokenizer):
    tokenizer = published("bert")
    result, _ = fill(tokenizer, "Ng IS  a [MASK], naïve\tprofessor!", "famous")
    assert result.text == "Ng IS  a famous, naïve\tprofessor!"


@pytest.mark.parametrize(
    ("prompt", "end"),
    [
        ("the quick [MASK] jumps", ["eos"]),
        ("the [MASK]", ["mask", "eos"]),
        ("the quick [gMASK]", ["gmask"]),
        ("the quick", ["gmask"]),
        ("[gMASK] quick", ["eos"]),
    ],
)
def test_prompts_are_framed_as_in_the_original(tokenizer, prompt, end):
    _, context = fill(tokenizer, prompt, "a", "b")
    special = tokenizer.special
    assert context[0] == special.cls
    assert context[-len(end) :] == [getattr(special, name) for name in end]
    assert special.eos not in context[1:-1]


def test_without_task_masks_an_open_prompt_gets_a_plain_mask(tmp_path):
    tokenizer = published("bert", task_mask=False)
    result, context = fill(tokenizer, "once upon a time", "there")
    assert context[-2:] == [tokenizer.special.mask, tokenizer.special.eos]
    assert result.text == "once upon a time there"
    with pytest.raises(UserError, match=r"no \[gMASK\]; it has \[MASK\]"):
        fill(tokenizer, "once [gMASK]", "there")


@pytest.mark.parametrize("prompt", ["", "   \n\t", "\ufeff \n".strip("\ufeff")])
def test_an_empty_prompt_is_refused(own_tokenizer, prompt):
    with pytest.raises(UserError, match="the prompt is empty"):
        fill(own_tokenizer, prompt, "a")


def test_of_several_prompts_the_bad_one_is_named(own_tokenizer):
    filler = BlankFiller(own_tokenizer, FixedGenerator(own_tokenizer, ["a"]))
    with pytest.raises(UserError, match="prompt 2: the prompt is empty"):
        filler.fill(["the [MASK]", " "])
    with pytest.raises(UserError, match="prompt 2: a prompt is a text, but this is int: 3"):
        filler.fill(["the [MASK]", 3])


@pytest.mark.parametrize(
    "prompt",
    [
        "\0\0 [MASK]",
        "\ud800 [MASK] x",
        "👩‍👩‍👧 [MASK] \u202e",
        "x" * 100_000 + "[MASK]",
        "[MASK]" * 200,
        "<|endoftext|> [MASK] [CLS]",
        "[note] [MASK",
        "大学[MASK]在北京",
    ],
)
def test_odd_prompts_never_crash(tokenizer, prompt):
    result, _ = fill(tokenizer, prompt, *["x"] * 200)
    assert len(result.answers) == len(result.spans) == max(1, prompt.count("[MASK]"))
    assert all(result.text[start:end].strip() == "x" for start, end in result.spans)


def test_a_random_model_fills_real_text(own_tokenizer):
    model = build_model(
        "glm",
        vocab_size=own_tokenizer.padded_vocab_size(),
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        max_positions=32,
    )
    filler = BlankFiller(own_tokenizer, BlankGenerator(model, own_tokenizer.special, beam=3, max_len=5))
    results = filler.fill(["the [MASK] fox [sMASK] dog", "she fills"])
    assert [len(result.answers) for result in results] == [2, 1]
    for result in results:
        for answer in result.answers:
            assert 0.0 < answer.probability < 1.0
            assert answer.text in result.text
        for (start, end), answer in zip(result.spans, result.answers, strict=True):
            assert result.text[start:end].strip() == answer.text
            assert not result.text[start:end][:1].isspace()
    with pytest.raises(UserError, match="tokens long, but the model has positions for 33"):
        filler.fill(["fox " * 100])


def test_a_model_smaller_than_the_vocabulary_is_refused(own_tokenizer):
    model = build_model("glm", vocab_size=128, num_layers=1, hidden_size=16, num_attention_heads=2)
    with pytest.raises(UserError, match="the model knows 128"):
        BlankFiller(own_tokenizer, BlankGenerator(model, own_tokenizer.special))
