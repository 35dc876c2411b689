"""Translation with a tokenizer for sources and one for targets: from text to answers, and what does not go."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ftk
from ftk.checkpoint import read_config
from ftk.data import IndexedDataset
from ftk.data.corpora.indexed_corpus import IndexedCorpus, IndexedCorpusConfig
from ftk.data.inspect_data import verify
from ftk.errors import UserError
from ftk.generation.text import check_vocabulary
from ftk.models import build_model
from ftk.tasks.restore import restore_task
from ftk.tasks.translation.task import TranslationConfig, TranslationTask
from ftk.tokenizers import Tokenizer, load_tokenizer
from ftk.tokenizers.grow import grow_tokenizer
from tests.records import losses_of
from tests.small_run import save_model

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MODEL = "--arch transformer_tiny --num-layers 1 --hidden-size 32 --ffn-hidden-size 48 --dropout 0 --embedding-dropout 0"
MODEL = f"{MODEL} --task translation --seq-length 24 --batch-size 16 --make-vocab-size-divisible-by 1".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Numbers, and their words from the last to the first."""
    folder = tmp_path_factory.mktemp("texts")
    rows = torch.randint(1, 10, (320, 5), generator=torch.Generator().manual_seed(1)).tolist()
    for split, some in (("valid", rows[:16]), ("train", rows[16:])):
        (folder / f"{split}.num").write_text("".join(f"{' '.join(map(str, row))}\n" for row in some))
        lines = (" ".join(WORDS[number - 1] for number in reversed(row)) for row in some)
        (folder / f"{split}.en").write_text("".join(f"{line}\n" for line in lines))
    for language, words in (("num", map(str, range(1, 10))), ("en", (*WORDS, "ten"))):
        (folder / f"dict.{language}.txt").write_text("".join(f"{word} 1\n" for word in words))
    return folder


def preprocess(command, texts: Path, out: Path, *more: object):
    given = ["--trainpref", texts / "train", "--validpref", texts / "valid", "--destdir", out, "--workers", 1]
    given += ["--tokenizer", "fairseq_dict"] if "--vocab-size" not in more else []
    return command("ftk-preprocess", *given, "--source-lang", "num", "--target-lang", "en", *more)


@pytest.fixture(scope="module")
def pairs(texts, command) -> Path:
    dictionaries = "--tokenizer-path", texts / "dict.en.txt", "--source-tokenizer-path", texts / "dict.num.txt"
    done = preprocess(command, texts, texts / "pairs", *dictionaries)
    assert done.returncode == 0, done.stderr
    assert "--arch transformer_tiny --share-embeddings decoder --task translation" in done.stdout
    return texts / "pairs"


@pytest.fixture(scope="module")
def run(pairs, command) -> Path:
    folder = pairs.parent / "run"
    given = [*MODEL, "--share-embeddings", "decoder", "--lr", 0.01, "--log-interval", 1]
    command("ftk-train", pairs, *given, "--max-update", 20, "--save-dir", folder, code=0)
    return folder


def lines(texts: Path, language: str) -> list[str]:
    return (texts / f"valid.{language}").read_text().splitlines()


def test_each_side_is_encoded_by_its_own_tokenizer(texts, pairs) -> None:
    tokenizer = load_tokenizer(pairs)
    source = tokenizer.source
    ends = source.special.eos, tokenizer.special.eos
    assert (source.vocab_size, tokenizer.vocab_size) == (13, 14)
    found = [row.tolist() for row in IndexedDataset(pairs / "valid")]
    sides = zip(lines(texts, "num"), lines(texts, "en"), strict=True)
    assert found == [[*source.encode(one), ends[0], *tokenizer.encode(other), ends[1]] for one, other in sides]
    assert source.decode(source.encode("7 seven")) == "7 <unk>"
    assert tokenizer.decode(tokenizer.encode("7 seven")) == "<unk> seven"
    assert verify(pairs) == []


def test_the_tokenizers_of_a_folder_make_the_same_data_again(texts, pairs, command, tmp_path) -> None:
    target, source = pairs / "tokenizer", pairs / "tokenizer" / "source"
    done = preprocess(command, texts, tmp_path / "out", "--tokenizer-path", target, "--source-tokenizer-path", source)
    assert done.returncode == 0, done.stderr
    for name in ("train.bin", "valid.bin", "tokenizer/source/ftk_tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (pairs / name).read_bytes()
    assert load_tokenizer(tmp_path / "out").fingerprint == load_tokenizer(pairs).fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", 281, "--source-vocab-size", 271, "--source-tokenizer-path", "x"], "leave out one of the two"),
        (
            ["--tokenizer-path", "x", "--source-vocab-size", 272],
            "--source-vocab-size has no effect without --vocab-size",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(texts, command, tmp_path, options, message) -> None:
    done = preprocess(command, texts, tmp_path / "out", *options)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_it_learns_and_goes_on(pairs, run, command) -> None:
    model = read_config(run)["model"]
    tokenizer = load_tokenizer(run / "checkpoint_last")
    assert tokenizer.fingerprint == load_tokenizer(pairs).fingerprint
    assert (model["vocab_size"], model["source_vocab_size"]) == (14, 13)
    assert tokenizer.source.vocab_size == 13
    given = [*MODEL, "--share-embeddings", "decoder", "--lr", 0.01, "--log-interval", 1]
    command("ftk-train", pairs, *given, "--max-update", 22, "--save-dir", run, code=0)
    losses = losses_of(run)
    assert losses[-1] < 0.8 * losses[0]


def test_answers_are_those_of_reading_all_for_each_token(texts, run) -> None:
    generator = ftk.load_generator(run, device="cpu", max_len=12)
    source, target, model = generator.tokenizer.source, generator.tokenizer, generator.model
    prompts = lines(texts, "num")[:6]
    for prompt, result in zip(prompts, generator.generate(prompts), strict=True):
        ids, written = torch.tensor([[*source.encode(prompt), source.special.eos]]), [target.special.eos]
        assert generator.encode(prompt).request.prompt == ids[0].tolist()
        while len(written) <= 12 and (len(written) == 1 or written[-1] != target.special.eos):
            with torch.no_grad():
                logits = model(ids, decoder_tokens=torch.tensor([written]))[0, -1]
            forbidden = {token.id for token in target.command_tokens} - {target.special.eos, target.special.unk}
            logits[[*forbidden, *range(target.vocab_size, len(logits))]] = float("-inf")
            written.append(int(logits.argmax()))
        tokens = [token for token in written[1:] if token != target.special.eos]
        assert result.answers[0].tokens == tokens
        assert result.text == target.decode(tokens).strip()


def test_samples_are_shown_and_asked_in_the_words_of_their_side(texts, pairs, run, command) -> None:
    task, _ = restore_task(run, str(pairs))
    encoded = ftk.load_generator(run, device="cpu").encode_sample(task.load_split("valid").sample(1, 0))
    assert (encoded.prompt, encoded.references) == (lines(texts, "num")[0], [lines(texts, "en")[0]])
    shown = task.show("valid", page=None, width=300, num_samples=1, index=0, draw=0)
    _, reads, learns = shown.splitlines()
    assert reads.split()[1:-1] == lines(texts, "num")[0].split()
    assert learns.split()[1:-1] == lines(texts, "en")[0].split()
    given = ["--gen-subset", "valid", "--max-samples", 2, "--max-len", 12, "--output-format", "fairseq"]
    done = command("ftk-generate", pairs, "--path", run, *given, "--scoring", "token_f1", code=0)
    assert f"S-0\t{lines(texts, 'num')[0]}" in done.stdout.splitlines()
    assert any(line.startswith("T-0") and line.endswith(lines(texts, "en")[0]) for line in done.stdout.splitlines())
    command("ftk-generate", "--path", run, "--input", "-", "--max-len", 12, input="1 2 3 4 5\n", code=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*MODEL], "cannot share all embeddings; give --share-embeddings decoder"),
        (["--arch", "t5_tiny", "--task", "translation"], "but the model has one vocabulary; train --arch transformer"),
        (["--arch", "gpt2_tiny"], "reads one vocabulary, but the data has a tokenizer for sources and one for targets"),
    ],
)
def test_what_does_not_fit_is_said_in_a_line(pairs, command, tmp_path, options, message) -> None:
    done = command("ftk-train", pairs, *options, "--max-update", 1, "--save-dir", tmp_path / "run")
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_one_tokenizer_is_not_enough_for_a_model_with_two(texts, run, command, tmp_path) -> None:
    done = preprocess(command, texts, tmp_path / "one", "--tokenizer-path", texts / "pairs" / "tokenizer")
    assert done.returncode == 0, done.stderr
    assert load_tokenizer(tmp_path / "one").source is None
    with pytest.raises(UserError, match=r"one was made with another tokenizer .*--source-tokenizer-path"):
        restore_task(run, str(tmp_path / "one"))
    task = TranslationTask(
        TranslationConfig(), corpus=IndexedCorpus(IndexedCorpusConfig(data=str(tmp_path / "one"))), seed=1
    )
    with pytest.raises(UserError, match="reads a vocabulary of 13 tokens and writes one of 128, but the data has one"):
        task.complete_model_config(ftk.load_model(run, device="cpu").config)
    padded = build_model("transformer_tiny", vocab_size=128, source_vocab_size=128, share_embeddings="decoder")
    with pytest.raises(UserError, match="reads a vocabulary of 128 tokens and writes one of 128, but the data has one"):
        task.complete_model_config(padded.config)
    with pytest.raises(UserError, match="reads a vocabulary of 128 tokens and writes one of 128, and there is one tok"):
        check_vocabulary(task.tokenizer, padded)
    with pytest.raises(UserError, match="but the model has one for both"):
        check_vocabulary(load_tokenizer(run / "checkpoint_last"), build_model("transformer_tiny", vocab_size=128))


def test_vocabularies_of_two_do_not_grow(pairs, tmp_path) -> None:
    with pytest.raises(UserError, match="a tokenizer with another one for sources cannot grow"):
        grow_tokenizer(load_tokenizer(pairs), ["zebra"], tmp_path / "grown")


def test_it_goes_to_hugging_faces_form_without_its_tokenizers(run, command, tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")
    done = command("ftk-checkpoint", "convert", "--to", "hf", run, tmp_path / "hf", code=0)
    assert "has one tokenizer, but this model has two; neither is written" in done.stderr
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
    theirs = transformers.FSMTForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    source, written = torch.tensor([[5, 12, 7, 2]]), torch.tensor([[2, 13, 10]])
    with torch.no_grad():
        expected = ftk.load_model(run, device="cpu")(source, decoder_tokens=written)
        found = theirs(source, decoder_input_ids=written, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    again = ftk.load_model(tmp_path / "hf", device="cpu")
    assert again.config.share_embeddings == "decoder"
    with torch.no_grad():
        assert torch.equal(again(source, decoder_tokens=written), expected)


def test_a_source_with_a_source_of_its_own_is_refused(pairs, tmp_path) -> None:
    shutil.copytree(pairs / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "source" / "source").symlink_to("..")
    description = tmp_path / "tokenizer" / "source" / "ftk_tokenizer.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"source": "source"}))
    with pytest.raises(UserError, match=r"source/ftk_tokenizer.json: a tokenizer of sources has none for sources"):
        load_tokenizer(tmp_path)


def test_evaluations_refuse_two_vocabularies(texts, run, command) -> None:
    given = ["--evaluation", "generation", "--scoring", "token_f1", "--data", texts / "valid.num"]
    done = command("ftk-evaluate", "--path", run, *given)
    assert (done.returncode, "has a tokenizer of its own for sources" in done.stderr) == (2, True), done.stderr


def test_a_language_model_of_the_targets_goes_with_it(texts, run, tmp_path) -> None:
    tokenizer = load_tokenizer(run / "checkpoint_last")
    torch.manual_seed(3)
    model = build_model("gpt2_tiny", vocab_size=14, num_layers=1)

    def saved(name: str, own: Tokenizer) -> Path:
        own.save(tmp_path / f"{name}-tokenizer")
        return save_model(tmp_path / name, model, tmp_path / f"{name}-tokenizer", task={"_name": "causal_lm"})

    source, tokenizer.source = tokenizer.source, None
    prompts = lines(texts, "num")[:3]
    expected = ftk.load_generator(run, device="cpu", max_len=12).generate(prompts)
    fused = ftk.load_generator(run, device="cpu", max_len=12, lm_path=saved("lm", tokenizer), lm_weight=0.0)
    for plain, beside in zip(expected, fused.generate(prompts), strict=True):
        assert beside.text == plain.text
        assert len(beside.answers[0].lm_logprobs) > 0
    with pytest.raises(UserError, match="has another tokenizer .* a language model must have that of the model"):
        ftk.load_generator(run, device="cpu", lm_path=saved("other", source))
