"""A Hugging Face folder is opened as it is, wherever a model is only read; the answers are those of its conversion."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import ftk
from ftk.checkpoint import save_checkpoint, weights
from ftk.checkpoint.convert import convert_from, convert_to
from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig
from ftk.errors import UserError
from ftk.models import build_model
from ftk_cli import generate, preprocess, train, validate
from tests.small_run import LINES, WORDS

FORM = HuggingFace(HuggingFaceConfig())
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_positions": 64}
FAMILIES = {"gpt2": SHAPE, "llama": {**SHAPE, "num_kv_heads": 2, "ffn_hidden_size": 24}}


class Folders(NamedTuple):
    """theirs: of Hugging Face's form; ours: the conversion; data: with the same tokenizer."""

    name: str
    theirs: Path
    ours: Path
    data: Path


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request, tmp_path_factory) -> Folders:
    place = tmp_path_factory.mktemp(request.param)
    words = {word: number for number, word in enumerate(["</s>", ".", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (place / "tokenizer").mkdir()
    made.save(str(place / "tokenizer" / "tokenizer.json"))
    (place / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (place / "text").write_text("\n".join(LINES) + "\n")
    source = f"--trainpref {place}/text --validpref {place}/text --destdir {place}/data"
    assert preprocess.main(f"{source} --tokenizer hf --tokenizer-path {place}/tokenizer".split()) == 0
    shape = {**FAMILIES[request.param], "vocab_size": len(words)}
    torch.manual_seed(5)
    model = build_model(request.param, **shape)
    with torch.no_grad():
        model.token_embedding.weight.mul_(20.0)
    save_checkpoint(
        place / "made",
        model=model,
        trainer_state={},
        config={"model": {"_name": request.param, **shape}, "task": {"_name": "causal_lm"}},
        tokenizer_folder=place / "data" / "tokenizer",
    )
    theirs = convert_to(FORM, "hf", place / "made", place / "theirs")
    return Folders(request.param, theirs, convert_from(FORM, theirs, place / "ours"), place / "data")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_model_and_answers_are_those_of_the_conversion_and_nothing_is_written(folders) -> None:
    before = contents(folders.theirs)
    expected, found = (ftk.load_model(folder).state_dict() for folder in (folders.ours, folders.theirs))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    expected, found = (
        ftk.load_generator(folder, beam=2, nbest=2, max_len=6).generate(["the quick brown", "over a"])
        for folder in (folders.ours, folders.theirs)
    )
    assert found == expected
    assert ftk.load_tokenizer(folders.theirs).fingerprint == ftk.load_tokenizer(folders.ours).fingerprint
    assert contents(folders.theirs) == before


def test_commands_print_what_they_print_for_the_conversion(folders, ask) -> None:
    def printed(folder: Path, command, *arguments: str) -> list[dict]:
        code, out, _ = ask(command.main, *arguments, "--path", str(folder), stdin=b"the quick brown\nover a\n")
        assert code == 0
        return [_without_time(line.replace(str(folder), "FOLDER")) for line in out]

    for command in (
        (generate, "--input", "-", "--max-len", "5", "--output-format", "json"),
        (validate, str(folders.data), "--output-format", "json"),
    ):
        theirs, ours = (printed(folder, *command) for folder in (folders.theirs, folders.ours))
        assert len(theirs) > 0
        assert theirs == ours


def _without_time(line: str) -> dict:
    without = ("_seconds", "_per_second", "path")
    return {name: value for name, value in json.loads(line).items() if not name.endswith(without)}


def test_results_go_on_for_the_same_weights_alone(folders, ask, tmp_path) -> None:
    theirs = Path(shutil.copytree(folders.theirs, tmp_path / "theirs"))
    (tmp_path / "prompts").write_text("the quick\nover a\n")
    results = ("--output-format", "json", "--results-path", str(tmp_path / "results"))
    command = (generate.main, "--path", str(theirs), "--input", str(tmp_path / "prompts"), "--max-len", "4", *results)
    assert ask(*command)[0] == 0
    whole = (tmp_path / "results").read_bytes()
    assert ask(*command)[0] == 0
    assert (tmp_path / "results").read_bytes() == whole
    _rewrite(theirs, lambda tensors: {name: tensor * 2 for name, tensor in tensors.items()})
    code, _, err = ask(*command)
    assert code == 2
    assert "checkpoint_digest" in err[-1]


def test_a_run_starts_with_its_weights(folders, tmp_path) -> None:
    def losses(folder: Path) -> list[float]:
        run = tmp_path / folder.name
        shape = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in FAMILIES[folders.name].items())
        flags = (
            f"{folders.data} --arch {folders.name}_tiny {shape} --make-vocab-size-divisible-by 1 --seq-length 32 "
            f"--batch-size 4 --max-update 2 --log-interval 1 --device cpu --finetune-from {folder} --save-dir {run}"
        )
        assert train.main(flags.split()) == 0
        return [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]

    assert losses(folders.theirs) == losses(folders.ours)


def test_tensors_are_read_one_at_a_time(folders, monkeypatch) -> None:
    """That a tensor is gone when the next is copied bounds the memory to the model and what makes one tensor."""
    alive: list[weakref.ref] = []
    copy = weights.copy_rows

    def watched(target: torch.Tensor, source: torch.Tensor) -> None:
        assert [one for one in alive if one() is not None] == []
        alive.append(weakref.ref(source))
        copy(target, source)

    monkeypatch.setattr(weights, "copy_rows", watched)
    model = ftk.load_model(folders.theirs)
    assert len(alive) == len(list(model.parameters()))


def _rewrite(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def _edit(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


DAMAGES = {
    "missing": lambda folder: _rewrite(folder, lambda tensors: dict(list(tensors.items())[1:])),
    "not finite": lambda folder: _rewrite(folder, lambda t: {n: t[n] * (torch.inf if n == min(t) else 1) for n in t}),
    "cut short": lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "unknown family": lambda folder: _edit(folder, model_type="unheard-of"),
    "unknown key": lambda folder: _edit(folder, unheard_of=1),
    "far larger": lambda folder: _edit(folder, vocab_size=10**8),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_wrong_is_said_as_by_a_conversion(folders, tmp_path, damage) -> None:
    theirs = Path(shutil.copytree(folders.theirs, tmp_path / "theirs"))
    damage(theirs)
    messages = []
    for read in (lambda: convert_from(FORM, theirs, tmp_path / "ours"), lambda: ftk.load_model(theirs)):
        with pytest.raises(UserError) as raised:
            read()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_what_it_does_not_have_is_said(folders, tmp_path) -> None:
    theirs = Path(shutil.copytree(folders.theirs, tmp_path / "theirs"))
    with pytest.raises(UserError, match="has no averaged weights"):
        ftk.load_model(theirs, ema=True)
    (theirs / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer that ftk reads as it is; `ftk-checkpoint convert --from hf"):
        ftk.load_generator(theirs)
    assert ftk.load_model(theirs) is not None
