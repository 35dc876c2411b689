"""Hugging Face's folders whose files hold more, less or other names than `transformers` writes today."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

import ftk
from ftk.checkpoint import hf_weights
from ftk.checkpoint.hf_tokenizer import tokenizer_files
from ftk.checkpoint.weights import foreign_config, identity_files
from ftk.errors import UserError
from ftk.model_parallel.collective import _checksum
from ftk.models.renames import LazyTensors
from ftk.tokenizers import build_tokenizer, load_tokenizer, train_sentencepiece
from tests.checkpoint.damage import edit_json
from tests.checkpoint.hf_models import contents, convert, convert_back, drawn, encoder, older_norms, rewrite, tokens
from tests.records import assert_near, assert_same_weights

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")


def test_matrices_are_compared_in_pieces_until_they_differ(monkeypatch) -> None:
    compared, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: compared.append(len(one)) or equal(one, other))
    head = torch.ones(5000, 2)
    copy = head.clone()
    tensors = LazyTensors.of({"head": head, "embedding": copy, "shorter": head[:-1], "scalar": torch.ones(())})
    assert not tensors.differ("head", "embedding")
    assert sum(compared) == 5000
    assert max(compared) < 2000
    compared.clear()
    copy[10] = 0.0
    assert tensors.differ("head", "embedding")
    assert sum(compared) < 2000
    assert tensors.differ("head", "shorter")
    assert tensors.differ("head", "none")
    assert not tensors.differ("none", "head")
    assert not tensors.differ("scalar", "scalar")
    other = LazyTensors.of({"head": head, "rounded": head.to(torch.float8_e4m3fn), "less": head.half() - 0.001})
    assert not other.differ("head", "rounded")
    assert other.differ("less", "rounded")


@pytest.mark.parametrize(
    "table",
    [
        torch.ones(164, 32),
        torch.ones(0, 32),
        torch.ones(()),
        torch.ones(164, 32) > 0,
        torch.ones(4, 32).to(torch.float8_e4m3fn),
    ],
    ids=lambda each: f"{each.dtype} {each.shape}",
)
def test_waves_of_positions_are_checked_where_files_have_them(publish, tmp_path, table) -> None:
    source = shutil.copytree(publish("transformer"), tmp_path / "source")
    assert ftk.load_model(source).config.share_embeddings == "all"
    assert ftk.load_model(publish("transformer two vocabularies")).config.share_embeddings == "none"
    rewrite(source, lambda tensors: tensors | {"model.encoder.embed_positions.weight": table})
    with pytest.raises(UserError, match=r"embed_positions.weight does not have the values of all such models"):
        convert(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_one_file_of_all_weights_goes_before_an_older_index(publish, tmp_path) -> None:
    """As where `transformers` saved a model whole into the folder of one that was in several files."""
    drawn("gpt2 exact gelu").save_pretrained(tmp_path / "source", max_shard_size="20KB")
    drawn("gpt2").save_pretrained(tmp_path / "source")
    left = [name for name in contents(tmp_path / "source") if name not in contents(publish("gpt2"))]
    assert "model.safetensors.index.json" in left
    back = convert_back(convert(tmp_path / "source", tmp_path / "ours"), tmp_path / "back")
    assert contents(back) == contents(publish("gpt2"))


def test_older_names_and_the_output_for_pairs(publish, tmp_path) -> None:
    shutil.copytree(publish("bert pairs"), tmp_path / "source")
    plain = convert(tmp_path / "source", tmp_path / "plain")
    older_norms(tmp_path / "source")
    older = convert(tmp_path / "source", tmp_path / "older")
    assert_same_weights(older, plain)
    model, theirs = ftk.load_model(older), drawn("bert pairs")
    with torch.no_grad():
        hidden, scores = model.hidden_states(tokens()), theirs(tokens())
        assert_near(model.head(hidden), scores.prediction_logits)
        assert_near(model.head.next_sentence(hidden[:, 0]), scores.seq_relationship_logits)
    assert contents(convert_back(plain, tmp_path / "back")) == contents(publish("bert pairs"))


@pytest.mark.parametrize("kind", ["Bert", "Longformer", "Roberta"])
def test_an_encoder_without_an_output_layer_is_opened_and_its_pooler_left_out(kind, tmp_path, caplog) -> None:
    torch.manual_seed(1)
    more = {"attention_window": [4, 12]} if kind == "Longformer" else {}
    theirs = encoder(kind, "Model", pad_token_id=1, layer_norm_eps=1e-5, **more)().eval()
    theirs.save_pretrained(tmp_path / "bare")
    assert "pooler.dense.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    caplog.set_level("INFO", "ftk")
    model = ftk.load_model(tmp_path / "bare")
    assert re.search(r"bare: no output layer here reads .*pooler.dense.bias and .*weight; left out", caplog.text)
    assert "bare: has no output layer; lm_head.bias, lm_head.dense.weight" in caplog.text
    with torch.no_grad():
        assert_near(model.hidden_states(tokens()), theirs(tokens()).last_hidden_state)
    again = ftk.load_model(convert(tmp_path / "bare", tmp_path / "ours"))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert float(model.lm_head.dense.weight.detach().std()) == pytest.approx(model.config.init_std, rel=0.2)
    back = convert_back(tmp_path / "ours", tmp_path / "back")
    whole = getattr(transformers, f"{kind}ForMaskedLM").from_pretrained(back).eval()
    with torch.no_grad():
        assert (model(tokens()) - whole(tokens()).logits).abs().max() <= 1e-5


def test_a_trunk_of_a_tied_gpt_j_is_opened(publish, tmp_path, caplog) -> None:
    shutil.copytree(publish("gptj tied, relu"), tmp_path / "trunk")
    rewrite(
        tmp_path / "trunk",
        lambda tensors: {
            name.removeprefix("transformer."): one for name, one in tensors.items() if not name.startswith("lm_head.")
        },
    )
    edit_json(tmp_path / "trunk" / "config.json", architectures=["GPTJModel"])
    caplog.set_level("INFO", "ftk")
    found, whole = ftk.load_model(tmp_path / "trunk"), ftk.load_model(publish("gptj tied, relu"))
    assert "trunk: has no output layer; logits_bias.bias" in caplog.text
    with torch.no_grad():
        assert torch.equal(found.hidden_states(tokens()), whole.hidden_states(tokens()))


def test_a_pooler_that_no_output_reads_is_left_out(publish, tmp_path) -> None:
    """As in published files of masked language models that were not trained on pairs."""
    shutil.copytree(publish("bert pairs"), tmp_path / "source")
    rewrite(tmp_path / "source", lambda tensors: {name: one for name, one in tensors.items() if "seq_rel" not in name})
    model = ftk.load_model(tmp_path / "source")
    assert model.head.next_sentence is None
    with torch.no_grad():
        assert_near(model(tokens()), drawn("bert pairs")(tokens()).prediction_logits)


# Files of the folder besides config.json -> what they say of ends; None: there is no such file.
ENDS: dict[str, dict[str, Any]] = {
    "of the tokenizer": {"tokenizer_config.json": {"eos_token": "</s>"}, "generation_config.json": None},
    "more in generation_config.json": {"generation_config.json": {"eos_token_id": [0, 44]}},
    "more in config.json": {"config.json": {"eos_token_id": [0, 44]}, "generation_config.json": None},
    "none of the tokenizer": {"config.json": {"eos_token_id": 44}, "generation_config.json": None}
    | {"tokenizer_config.json": None},
    "beyond the vocabulary": {"generation_config.json": {"eos_token_id": [0, 50256]}},
}


@pytest.mark.parametrize("files", ENDS.values(), ids=ENDS)
def test_a_folder_with_its_tokenizer_answers_in_words(publish, files, tmp_path) -> None:
    shutil.copytree(publish("llama"), tmp_path / "source")
    words = {"<s>": 1, "</s>": 0} | {f"w{i}": i for i in range(2, 99)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    theirs.save_pretrained(tmp_path / "source")
    for name, change in files.items():
        file = tmp_path / "source" / name
        if change is None:
            file.unlink()
        else:
            file.write_text(json.dumps(json.loads(file.read_text()) | change))
    generator = ftk.load_generator(convert(tmp_path / "source", tmp_path / "ours"), max_len=8)
    found = generator.generate(["w5 w19 w40"])[0]
    prompt = theirs(["w5 w19 w40"], return_tensors="pt")
    assert prompt["input_ids"][0, 0] == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    ends = model.generation_config.eos_token_id
    assert (expected[-1] == 44) == (ends in ([0, 44], 44))
    expected = expected[: -1 if expected[-1] == 44 else None]
    assert found.text.split() == theirs.decode(expected, skip_special_tokens=True).split()
    assert contents(convert_back(tmp_path / "ours", tmp_path / "back")) == contents(tmp_path / "source")


def test_answers_of_a_gpt2_with_berts_tokenizer_end_at_its_sep(publish, tmp_path) -> None:
    """As of many models of Chinese, whose files name no other end."""
    source = shutil.copytree(publish("gpt2"), tmp_path / "source")
    (source / "generation_config.json").unlink()
    edit_json(source / "config.json", eos_token_id=None, bos_token_id=None)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(94))]
    (source / "vocab.txt").write_text("\n".join(words))
    generator = ftk.load_generator(source, max_len=8)
    assert generator.framing.ends == (3,)
    assert generator.generate(["w5 w19"])[0].text.startswith("w5 w19 ")


def test_a_folder_is_described_several_times_and_an_old_pickle_read_once(publish, tmp_path, monkeypatch) -> None:
    source = shutil.copytree(publish("bert pairs"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    reads, read = [], hf_weights.read_state_dict
    monkeypatch.setattr(hf_weights, "read_state_dict", lambda path: reads.append(path) or read(path))
    assert foreign_config(source)["model"]["next_sentence"]
    assert foreign_config(source)["model"]["next_sentence"]
    assert len(reads) == 1
    del tensors["cls.seq_relationship.weight"], tensors["cls.seq_relationship.bias"]
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert not foreign_config(source)["model"]["next_sentence"]


def test_ranks_compare_the_weights_of_a_folder_by_size_and_start(publish, tmp_path) -> None:
    source = shutil.copytree(publish("bert pairs"), tmp_path / "source")
    names = [path.name for path in identity_files(source)]
    assert {"config.json", "model.safetensors"} <= {*names}
    assert names == sorted(names)
    weights, size = source / "model.safetensors", (source / "model.safetensors").stat().st_size
    seen = {_checksum("--path", weights, 1 << 10)}
    for change in (lambda file: file.truncate(size - 1), lambda file: file.write(b"another start")):
        with open(weights, "r+b") as file:
            change(file)
        seen.add(_checksum("--path", weights, 1 << 10))
    assert len(seen) == 3


@pytest.mark.parametrize(("name", "is_told"), [("dict.txt", True), ("vocab.txt", False)])
def test_a_tokenizer_that_transformers_does_not_read_is_told(tmp_path, caplog, name, is_told) -> None:
    for file in (name, "ftk_tokenizer.json"):
        (tmp_path / file).write_bytes(b"{}")
    own = SimpleNamespace(name="of ftk", source=None, files=[SimpleNamespace(path=tmp_path / name)])
    assert tokenizer_files(own, ["causal_lm"]) == {name: b"{}", "ftk_tokenizer.json": b"{}"}
    assert ("transformers does not read ftk's tokenizer of ftk" in caplog.text) is is_told


@pytest.mark.parametrize(
    ("tasks", "layout", "front", "end"),
    [
        ("sft causal_lm", "with_end", [], []),
        ("masked_lm", "with_mask", ["[CLS]"], ["[SEP]"]),
        ("masked_lm", "with_end", [], []),  # it lacks these tokens
        ("classification masked_lm", "with_mask", ["[CLS]"], ["[SEP]"]),
        ("denoising", "with_mask", ["[CLS]"], ["[SEP]"]),
        ("translation denoising", "with_end", [], ["<|endoftext|>"]),
        ("of_a_plugin span_corruption", "with_sentinels", [], ["</s>"]),
    ],
)
def test_transformers_reads_a_tokenizer_of_sentencepiece(tmp_path, tasks, layout, front, end) -> None:
    train_sentencepiece(["the lazy dog jumps", "over a quick brown fox"] * 3, tmp_path / "model", vocab_size=285)
    build_tokenizer("sentencepiece", path=tmp_path / "model", special_tokens=layout).save(tmp_path / "saved")
    own = load_tokenizer(tmp_path / "saved")
    for name, content in tokenizer_files(own, tasks.split()).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids, texts = own.encode("the quick dog"), {token.text: token.id for token in own.command_tokens}
    assert theirs("the quick dog")["input_ids"] == [texts[one] for one in front] + ids + [texts[one] for one in end]
    assert theirs.decode(ids) == "the quick dog"
    special = {role: getattr(theirs, f"{role}_token_id") for role in ("bos", "eos", "pad", "sep", "cls", "mask")}
    assert {role: id_ for role, id_ in special.items() if id_ is not None} == {
        role: id_ for role, id_ in own.special.roles.items() if role in special
    }
