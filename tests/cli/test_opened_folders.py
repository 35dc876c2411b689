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
from ftk.checkpoint import weights
from ftk.checkpoint.convert import convert_from, convert_to
from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig
from ftk.config.root import load_yaml
from ftk.errors import UserError
from ftk.models import build_model
from ftk_cli import checkpoint, generate, preprocess, train, validate
from tests.records import assert_same_tensors, losses_of
from tests.small_run import LINES, WORDS, save_model

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
    torch.manual_seed(5)
    model = build_model(request.param, **FAMILIES[request.param], vocab_size=len(words))
    with torch.no_grad():
        model.token_embedding.weight.mul_(20.0)
    save_model(place / "made", model, place / "data" / "tokenizer", task={"_name": "causal_lm"})
    theirs = convert_to(FORM, "hf", place / "made", place / "theirs")
    return Folders(request.param, theirs, convert_from(FORM, theirs, place / "ours"), place / "data")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_model_and_answers_are_those_of_the_conversion_and_nothing_is_written(folders) -> None:
    before = contents(folders.theirs)
    expected, found = (ftk.load_model(folder).state_dict() for folder in (folders.ours, folders.theirs))
    assert_same_tensors(found, expected)
    expected, found = (
        ftk.load_generator(folder, beam=2, nbest=2, max_len=6).generate(["the quick brown", "over a"])
        for folder in (folders.ours, folders.theirs)
    )
    assert found == expected
    assert ftk.load_tokenizer(folders.theirs).fingerprint == ftk.load_tokenizer(folders.ours).fingerprint
    assert contents(folders.theirs) == before


def test_commands_print_what_they_print_for_the_conversion(folders, ask) -> None:
    def printed(folder: Path, command, *arguments: str) -> list[dict]:
        _, out, _ = ask(command.main, *arguments, "--path", str(folder), stdin=b"the quick brown\nover a\n", code=0)
        return [_without_time(line.replace(str(folder), "FOLDER")) for line in out]

    for command in (
        (generate, "--input", "-", "--max-len", "5", "--output-format", "json"),
        (validate, str(folders.data), "--output-format", "json"),
    ):
        theirs, ours = (printed(folder, *command) for folder in (folders.theirs, folders.ours))
        assert len(theirs) > 0
        assert theirs == ours


PROPOSED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "eos_token_id": 0,
}
# Contents of generation_config.json, flags of the command, and the proposals that the line names.
PROPOSALS = {
    "all": (PROPOSED, "", "--sampling --temperature 0.7 --top-k 20 --repetition-penalty 1.05"),
    "some given": (PROPOSED, "--sampling --temperature 0.5", "--top-k 20 --repetition-penalty 1.05"),
    "defaults given": (PROPOSED, "--no-sampling --repetition-penalty=1 --top-k 0", "--temperature 0.7"),
    "all given": (PROPOSED, "--sampling --temperature 2 --top-k 3 --repetition-penalty 2", None),
    "filters of no sampling": (
        PROPOSED | {"do_sample": False, "num_beams": 4},
        "",
        "--beam 4 --repetition-penalty 1.05",
    ),
    "no values of the options": (
        {
            "do_sample": 1,
            "num_beams": True,
            "max_new_tokens": 1e9,
            "repetition_penalty": -1,
            "no_repeat_ngram_size": 2.0,
        },
        "",
        "--no-repeat-ngram-size 2",
    ),
    "not finite": ({"do_sample": True, "temperature": float("nan"), "top_p": 2}, "", "--sampling"),
    "no numbers": ({"do_sample": "yes", "repetition_penalty": [2], "max_new_tokens": None}, "", None),
}


@pytest.mark.parametrize(("content", "given", "said"), PROPOSALS.values(), ids=PROPOSALS)
def test_options_that_a_model_proposes_are_said_and_not_applied(folders, ask, tmp_path, content, given, said) -> None:
    theirs = shutil.copytree(folders.theirs, tmp_path / "theirs")
    file = theirs / "generation_config.json"
    file.write_text(json.dumps(content))
    flags = ["--input", "-", "--max-len", "5", *given.split()]
    _, expected, _ = ask(generate.main, *flags, "--path", str(folders.theirs), stdin=b"the quick brown\n")
    for folder, path in (
        (theirs, file),
        (convert_from(FORM, theirs, tmp_path / "ours"), tmp_path / "ours/source" / file.name),
    ):
        _, out, errors = ask(generate.main, *flags, "--path", str(folder), stdin=b"the quick brown\n", code=0)
        lines = [line for line in errors if "proposes" in line]
        assert lines == ([] if said is None else [f"ftk-generate: {path} proposes {said}; not applied"])
        assert out == expected


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
    _, _, err = ask(*command, code=2)
    assert "checkpoint_digest" in err[-1]


def start(folders: Folders, folder: Path, run: Path, *flags: str) -> int:
    common = ["--seq-length", "32", "--batch-size", "4", "--log-interval", "1", "--device", "cpu"]
    return train.main([str(folders.data), *common, "--finetune-from", str(folder), "--save-dir", str(run), *flags])


def test_a_run_starts_with_its_model_task_and_weights(folders, tmp_path) -> None:
    theirs, ours, again = (tmp_path / name for name in ("theirs", "ours", "again"))
    shutil.copytree(folders.theirs, tmp_path / "source")
    assert start(folders, tmp_path / "source", theirs, "--max-update", "2", "--dropout", "0") == 0
    assert start(folders, folders.ours, ours, "--max-update", "2", "--dropout", "0") == 0
    assert losses_of(theirs) == losses_of(ours) != []
    config = load_yaml(theirs / "config.yaml")
    shape = FAMILIES[folders.name]
    assert {name: config["model"][name] for name in shape} == shape
    assert (config["model"]["_name"], config["model"]["dropout"]) == (folders.name, 0.0)
    assert (config["task"]["_name"], config["task"]["seq_length"]) == ("causal_lm", 32)
    # The same command, and the file of the run, continue it without the folder.
    shutil.rmtree(tmp_path / "source")
    assert start(folders, tmp_path / "source", theirs, "--max-update", "3", "--dropout", "0") == 0
    assert train.main(["--config", str(theirs / "config.yaml"), "--max-update", "4"]) == 0
    assert load_yaml(theirs / "config.yaml")["model"] == config["model"]
    # A run of ftk is a folder like any other.
    assert start(folders, theirs, again, "--max-update", "1") == 0
    assert load_yaml(again / "config.yaml")["model"] == config["model"]


def test_what_was_taken_from_the_folder_is_said(folders, capsys) -> None:
    assert start(folders, folders.theirs, Path("unused"), "--max-update", "1", "--dry-run") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("from "))
    assert line.startswith(f"from {folders.theirs}: model {folders.name} ")
    assert "--num-layers 2 " in line
    assert line.endswith("; task causal_lm --make-vocab-size-divisible-by 1")  # not the length, which a flag gives


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 3", "do not fit: num_layers is 2 in the checkpoint, 3 in the model; leave out --arch and such"),
        ("--arch opt_tiny --max-positions 64", "do not fit this opt; leave out --arch, and"),
        ("--seq-length 65", "--seq-length 65 is beyond the model's 64 positions"),
    ],
)
def test_flags_that_do_not_fit_the_folder_are_refused_in_one_line(folders, tmp_path, capsys, flags, message) -> None:
    assert start(folders, folders.theirs, tmp_path / "run", "--max-update", "1", *flags.split()) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ftk-train: ")]
    assert [message in error for error in errors] == [True], errors
    assert not (tmp_path / "run").exists()


def test_rows_that_no_token_has_are_kept_and_another_tokenizer_is_refused(folders, tmp_path, capsys) -> None:
    theirs = _with_rows(folders, tmp_path / "theirs", 29)
    assert start(folders, theirs, tmp_path / "run", "--max-update", "1") == 0
    assert load_yaml(tmp_path / "run" / "config.yaml")["model"]["vocab_size"] == 29
    words = json.loads((theirs / "tokenizer.json").read_text())
    words["model"]["vocab"]["another"] = len(words["model"]["vocab"])
    (theirs / "tokenizer.json").write_text(json.dumps(words))
    assert start(folders, theirs, tmp_path / "other", "--max-update", "1") == 2
    assert "was trained with another tokenizer than the data's" in capsys.readouterr().err
    words["model"]["vocab"]["another"] = words["model"]["vocab"].pop("the")  # as many tokens, one another
    (theirs / "tokenizer.json").write_text(json.dumps(words))
    assert start(folders, theirs, tmp_path / "other", "--max-update", "1") == 2
    assert "was trained with another tokenizer than the data's" in capsys.readouterr().err
    assert start(folders, tmp_path / "nothere", tmp_path / "run", "--max-update", "1") == 2
    assert "nothere: no such" in capsys.readouterr().err  # not what stands in --save-dir
    without = _with_rows(folders, tmp_path / "without", 128)
    (without / "tokenizer.json").unlink()
    assert start(folders, without, tmp_path / "padded", "--max-update", "1") == 0


def _with_rows(folders: Folders, folder: Path, rows: int) -> Path:
    """A copy of `theirs` whose vocabulary is padded to a number of rows."""
    shutil.copytree(folders.theirs, folder)
    more = (0, 0, 0, rows - json.loads((folder / "config.json").read_text())["vocab_size"])
    matrices = ("transformer.wte.weight", "model.embed_tokens.weight", "lm_head.weight")
    pad = torch.nn.functional.pad
    _rewrite(folder, lambda t: {name: pad(t[name], more) if name in matrices else t[name] for name in t})
    _edit(folder, vocab_size=rows)
    return folder


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


def test_what_it_does_not_have_is_said(folders, tmp_path) -> None:
    theirs = Path(shutil.copytree(folders.theirs, tmp_path / "theirs"))
    with pytest.raises(UserError, match="has no averaged weights"):
        ftk.load_model(theirs, ema=True)
    (theirs / "tokenizer.json").unlink()
    said = r"has no tokenizer that ftk reads as it is \(.*holds no tokenizer: .*\); `ftk-checkpoint convert --from hf"
    with pytest.raises(UserError, match=said):
        ftk.load_generator(theirs)
    (theirs / "tokenizer.model").write_bytes(b"")
    (theirs / "tokenizer_config.json").write_text('{"tokenizer_class": "ChatGLMTokenizer"}')
    with pytest.raises(UserError, match=r"as it is \(.*tokenizer_config.json names 'ChatGLMTokenizer', which may"):
        ftk.load_generator(theirs)
    assert ftk.load_model(theirs) is not None


def test_a_folder_with_vocabulary_files_alone_answers_with_the_tokens_of_its_task(made_place, tmp_path) -> None:
    """One that ftk wrote of a run with a tokenizer of its own, and the published layout."""
    theirs = convert_to(FORM, "hf", made_place / "run" / "checkpoint_1", tmp_path / "theirs")
    trained = ftk.load_tokenizer(made_place / "run")
    assert not (theirs / "tokenizer.json").exists()
    assert ftk.load_tokenizer(theirs).fingerprint == trained.fingerprint
    (theirs / "ftk_tokenizer.json").unlink()
    (theirs / "sentencepiece.model").rename(theirs / "cog-pretrain.model")
    published = ftk.load_tokenizer(theirs)
    assert published.special == trained.special
    answers = [
        ftk.load_generator(folder, max_len=4).generate("the [MASK] fox").text for folder in (made_place / "run", theirs)
    ]
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Path:
    """Folders of Hugging Face with one tokenizer: a causal gpt2, a bert without and a roberta; and their data."""
    place = tmp_path_factory.mktemp("heads")
    made = tokenizers.BertWordPieceTokenizer()
    made.train_from_iterator(LINES, vocab_size=120, show_progress=False)
    (place / "vocabulary").mkdir()
    made.save_model(str(place / "vocabulary"))
    (place / "vocabulary" / "tokenizer_config.json").write_text('{"eos_token": "[SEP]"}')
    (place / "text").write_text("\n".join(line.replace(" . ", " .\n") for line in LINES) + "\n")
    source = f"--trainpref {place}/text --validpref {place}/text --destdir {place}/data"
    assert preprocess.main(f"{source} --tokenizer hf --tokenizer-path {place}/vocabulary".split()) == 0
    size = ftk.load_tokenizer(place / "data").vocab_size
    for name, options in {"gpt2": {}, "bert": {}, "roberta": {"pad_token": 0}}.items():
        model = build_model(name, **SHAPE, **options, vocab_size=size)
        save_model(place / "made" / name, model, place / "data" / "tokenizer")
        convert_to(FORM, "hf", place / "made" / name, place / name)
    return place


def finetune(heads: Path, folder: str, *flags: str) -> int:
    common = "--seq-length 32 --batch-size 4 --max-update 1 --device cpu --log-interval 1"
    return train.main([str(heads / "data"), *common.split(), "--finetune-from", str(heads / folder), *flags])


def test_a_next_sentence_output_is_drawn_anew_and_said(heads, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    assert finetune(heads, "bert", "--pairs", "--save-dir", str(tmp_path / "run")) == 0
    parts = "lm_head.next_sentence.weight, lm_head.next_sentence.bias"
    assert f"{parts}: not in {heads}/bert, they keep initial values" in caplog.text
    assert load_yaml(tmp_path / "run" / "config.yaml")["model"]["next_sentence"] is True
    assert ftk.load_model(tmp_path / "run").state_dict()["lm_head.next_sentence.weight"].std() > 0.005


def test_a_longformer_starts_from_a_roberta_with_more_positions(heads, tmp_path, caplog) -> None:
    """Positions are repeated, and the projections of global tokens are copies (Beltagy et al. 2020)."""
    caplog.set_level("INFO")
    grown = tmp_path / "grown"
    assert checkpoint.main(["grow", str(heads / "roberta"), str(grown), "--max-positions", "256"]) == 0
    flags = "--arch longformer_tiny --num-layers 2 --hidden-size 16 --max-positions 256 --lr 1e-9"
    flags = f"{flags} --make-vocab-size-divisible-by 1 --save-dir {tmp_path}/run"
    assert finetune(heads, str(grown), *flags.split()) == 0
    assert "layers.0.attention.qkv_global.weight, layers.0.attention.qkv_global.bias" in caplog.text
    old, new = (ftk.load_model(folder).state_dict() for folder in (heads / "roberta", tmp_path / "run"))
    for name in ("layers.1.attention.qkv_global.weight", "layers.1.attention.qkv.weight"):
        torch.testing.assert_close(new[name], old["layers.1.attention.qkv.weight"])
    table = new["position_embedding.weight"][1:]
    assert torch.equal(table[:64].round(decimals=4), table[192:].round(decimals=4))


@pytest.mark.parametrize(
    ("folder", "flags", "message"),
    [
        (
            "gpt2",
            "--arch bert_tiny --max-positions 64",
            "holds a gpt2, whose weights do not fit this bert; leave out --arch, and the model is that of the folder",
        ),
        ("bert", "--arch gpt2_tiny --max-positions 64", "holds a bert, whose weights do not fit this gpt2; leave out"),
        ("gpt2", "--max-positions 128", "128, 16] in the model (--max-positions of `ftk-checkpoint grow "),
    ],
)
def test_a_model_of_another_kind_is_refused_in_one_line(heads, tmp_path, capsys, folder, flags, message) -> None:
    assert finetune(heads, folder, *flags.split(), "--save-dir", str(tmp_path / "run")) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ftk-train: ")]
    assert [message in error for error in errors] == [True], errors


def test_a_causal_model_does_not_learn_masks_nor_an_encoder_to_continue(heads, tmp_path, capsys) -> None:
    for folder, task in (("gpt2", "masked_lm"), ("bert", "causal_lm")):
        assert finetune(heads, folder, "--task", task, "--save-dir", str(tmp_path / folder)) == 2
        usual = "causal_lm" if task == "masked_lm" else "masked_lm"
        assert f"{folder} is trained by --task {usual}: leave --task out" in capsys.readouterr().err


def test_longer_texts_of_rotary_models_are_said_and_their_scaling_stays(folders, tmp_path, caplog, capsys) -> None:
    caplog.set_level("INFO")
    if folders.name != "llama":
        pytest.skip("only rotary models: learned positions are refused, which another test shows")
    flags = ("--max-update", "1", "--max-positions", "128")
    assert start(folders, folders.theirs, tmp_path / "run", *flags) == 0
    assert f"`max_positions` is 128, that of {folders.theirs} 64: longer texts are new" in caplog.text
    scaled = Path(shutil.copytree(folders.theirs, tmp_path / "scaled"))
    scaling = {"rope_type": "llama3", "factor": 2.0, "rope_theta": 10000.0}
    _edit(scaled, rope_parameters=scaling | {"low_freq_factor": 1.0, "high_freq_factor": 4.0})
    assert start(folders, scaled, tmp_path / "refused", *flags) == 2
    assert "give --rope-original-positions 64 to keep it" in capsys.readouterr().err


def test_proposals_that_cannot_be_read_are_said_and_answers_come(folders, ask, tmp_path) -> None:
    ours = shutil.copytree(folders.ours, tmp_path / "ours")
    (ours / "source").mkdir(exist_ok=True)
    (ours / "source" / "generation_config.json").write_text("{")
    flags = "--input", "-", "--max-len", "5"
    _, out, errors = ask(generate.main, *flags, "--path", str(ours), stdin=b"the quick brown\n", code=0)
    assert out
    assert [line for line in errors if line.endswith("; the options that it may propose are not known")]


def test_a_file_of_fairseqs_answers_as_its_conversion_does(tmp_path: Path, ask) -> None:
    """Its folder contains the dictionaries; opening it writes nothing there."""
    from ftk.checkpoint.fairseq import FairseqConfig
    from ftk.checkpoint.fairseq.reader import Fairseq
    from tests.checkpoint import fairseq_files as files

    build, options = files.TWINS["transformer"]
    source = files.write(tmp_path / "run" / "checkpoint_best.pt", files.from_transformers(build()), options)
    files.write_dictionary(source.parent / "dict.de.txt", files.SOURCE_ROWS, "wort")
    files.write_dictionary(source.parent / "dict.en.txt", files.ROWS, "word")
    before = contents(source.parent)
    ours = convert_from(Fairseq(FairseqConfig()), source, tmp_path / "ours")
    answers = []
    for path in (source, source.parent, ours):
        flags = ["--input", "-", "--path", str(path), "--beam", "2", "--max-len", "5", "--output-format", "json"]
        _, out, _ = ask(generate.main, *flags, stdin=b"wort1 wort2\nwort3\n", code=0)
        answers.append([_without_time(line) for line in out])
    assert len(answers[0]) > 1
    assert answers[0] == answers[1] == answers[2]
    assert contents(source.parent) == before
