"""Hugging Face's folders that are damaged, hostile or of another model are refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ftk
from ftk.checkpoint.layout import MANIFEST, form_of
from ftk.checkpoint.manifest import read_manifest, write_file, write_manifest
from ftk.errors import UserError
from tests.checkpoint.damage import EVIL, edit_json, halve
from tests.checkpoint.hf_models import LLAMA3, YARN, convert, convert_back, rewrite


@pytest.fixture(scope="module")
def ours(publish, tmp_path_factory) -> Path:
    """A GPT-2 of theirs, as a checkpoint of ftk's."""
    return convert(publish("gpt2"), tmp_path_factory.mktemp("ours") / "checkpoint")


def edited(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **values)


def without_model_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))


def generating(content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "generation_config.json").write_text(content)


def with_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, change)


def first(tensors: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor | None]) -> dict:
    name = next(iter(tensors))
    value = change(tensors.pop(name))
    return tensors if value is None else tensors | {name: value}


def with_extra(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As of an output layer that ftk does not have."""
    return {**tensors, "classifier.weight": torch.ones(1, 32)}


def with_index(folder: Path) -> None:
    content = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": EVIL}, folder / "pytorch_model.bin")


ROPE = {"rope_theta": 1e4, "rope_type": "default"}


MISTAKES = [
    (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json: is not a mapping"),
    (edited(model_type="megalodon"), "model_type 'megalodon' is of an unknown family"),
    (without_model_type, 'config.json: has no model_type, .*; add that of its family, e.g. "model_type": "bert"'),
    (edited(quantization_config={"bits": 4}), "quantization_config is {'bits': 4}: the weights are quantised"),
    (edited(quantization_bit=4), "quantization_bit is 4: the weights are quantised, .*remove the key from the file"),
    (edited(surprise=3), "surprise is not known here (3); .*(if it does not, remove it from the file)"),
    (with_tensors(lambda t: first(t, lambda tensor: None)), " is missing"),
    (with_tensors(lambda t: first(t, lambda tensor: tensor[:-1])), " fits the others|does not have the shape"),
    (with_tensors(lambda t: first(t, lambda tensor: tensor.to(torch.int64))), "has numbers of type int64, not float32"),
    (with_tensors(lambda t: first(t, lambda tensor: tensor * torch.nan)), "holds NaN or infinity in"),
    (with_tensors(lambda t: first(t, lambda tensor: tensor * torch.inf)), "holds NaN or infinity in"),
    (with_tensors(lambda t: {**t, "extra.weight": torch.ones(2)}), "'extra.weight' has no place in the model"),
    (lambda folder: halve(folder / "model.safetensors"), ": it is not whole; copy it again"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100), "model.safetensors: "),
    (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    (with_index, "names model-00001-of-00001.safetensors, which is not there"),
    (pickled, "holds Python objects besides tensors"),
]


OWN_MISTAKES = [
    ("bert", edited(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
    ("bert labels", edited(architectures=5), "has no place in the model"),
    ("bert", edited(max_position_embeddings="many"), "max_position_embeddings is 'many'; it must be a whole number"),
    ("bert", edited(is_decoder=True), "is_decoder is True; ftk's model has False"),
    ("gpt2", edited(tie_word_embeddings=False), "the weight that ftk calls head.weight is missing"),
    ("gpt2", edited(n_head=5), "num_attention_heads is 5; it must divide hidden_size 32"),
    ("gpt2", edited(n_layer="many"), "num_layers is 'many'"),
    ("gpt2", edited(n_layer=10**4), "far larger than its tensors"),
    ("gpt2", edited(vocab_size=10**8), "far larger than its tensors"),
    ("gpt2", with_tensors(lambda t: {**t, "lm_head.weight": torch.ones(99, 32)}), "lm_head.weight differs from"),
    (
        "glm4",
        edited(rope_parameters=ROPE | {"partial_rotary_factor": 0.4}),
        "3 of the 8 dimensions of a head; the rotated size must be even and at least 2",
    ),
    ("glm4", edited(rope_parameters=ROPE | {"partial_rotary_factor": 2.0}), "rotary_share is 2.0"),
    ("llama", edited(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; ftk's model has 1.0"),
    ("gptj", edited(rotary_dim=7), "rotary_dim is 7; it must be even and from 2 to the size of a head, 8"),
    ("gptj", edited(tie_word_embeddings=True), "lm_head.weight differs from .* `tie_word_embeddings` false keeps both"),
    ("t5", edited(dropout_rate="high"), "json: dropout_rate is 'high'; it must be at least 0 and below 1$"),
    ("llama", edited(hidden_act="gelu"), "hidden_act is 'gelu'; ftk's model has 'silu'"),
    ("llama", edited(num_key_value_heads=3), "num_kv_heads is 3; it must divide num_attention_heads 4"),
    ("llama", edited(head_dim=7), "the size of a head is 7; rotary positions need an even one"),
    ("llama", edited(tie_word_embeddings=True), "lm_head.weight differs from"),
    ("llama", edited(rope_parameters=ROPE | {"rope_type": "longrope"}), "rope_type is 'longrope'; ftk's models have"),
    ("llama", edited(rope_parameters=ROPE | {"surprise": 1}), "surprise of the rope type default is not known here"),
    ("llama", edited(rope_parameters=YARN | {"mscale": "a", "mscale_all_dim": 1.0}), "yarn has mscale 'a' and factor"),
    ("llama", edited(rope_parameters={"rope_type": "linear"}), "factor of the rope type linear is None; it must be a"),
    ("llama", edited(rope_parameters={"rope_type": "llama3"}), "of the rope type llama3 is None; it must be a number"),
    ("llama", edited(rope_parameters={"rope_type": "dynamic", "factor": None}), "factor of the rope type dynamic is"),
    ("llama", edited(rope_parameters={"rope_type": "yarn"}), "factor of the rope type yarn is None; it must be a"),
    (
        "llama",
        edited(rope_parameters=YARN | {"original_max_position_embeddings": "x"}),
        "original_max_position_embeddings is 'x'; it must be a whole number above 0",
    ),
    ("llama", edited(rope_parameters=YARN, max_position_embeddings="x"), "max_position_embeddings is 'x'; it must be"),
    (
        "llama",
        edited(rope_parameters=ROPE | {"rope_type": "linear", "factor": 2.0}, max_position_embeddings="x"),
        "max_position_embeddings is 'x'; it must be",
    ),
    ("llama", generating('{"eos_token_id": ["x"]}'), "model.end_tokens is 'x'; it must be a list"),
    ("llama", generating("[]"), "generation_config.json: is not a mapping"),
    ("llama", edited(is_decoder=True), "is_decoder is not known here (True)"),
    (
        "llama",
        with_tensors(lambda t: {name: one.to(torch.int8) if "k_proj" in name else one for name, one in t.items()}),
        "k_proj.weight has numbers of type torch.int8, unlike others",
    ),
    ("llama", edited(rope_parameters=[1]), "rope_scaling is [1]; it must be a mapping"),
    ("llama", edited(rope_parameters=ROPE | {"rope_type": ["x"]}), "rope_type is ['x']; ftk's models have"),
    ("llama", edited(rope_parameters=LLAMA3 | {"low_freq_factor": 0.0}), "rope_low is 0.0; it must be above 0"),
    ("bart", edited(decoder_ffn_dim=40), " is [48, 32]; [40, 32] fits the others"),
    ("transformer", edited(decoder_attention_heads=5), "num_decoder_attention_heads is 5; it must divide hidden_size"),
    ("transformer", edited(pad_token_id=-1), "pad_token_id is -1; it must be a token"),
    ("transformer", edited(pad_token_id=2), "decoder_start_token_id and pad_token_id are both 2"),
    ("bart", edited(num_hidden_layers=7), "num_hidden_layers is 7, encoder_layers 2; transformers reads both"),
    ("roberta", edited(pad_token_id="1"), "pad_token_id is '1'; it must be a whole number"),
    ("roberta", edited(pad_token_id=[]), "pad_token_id is []; it must be a whole number"),
    ("mt5", edited(is_decoder=True), "is_decoder is True; ftk's model has False"),
    ("t5", edited(feed_forward_proj="gated-tanh"), "feed_forward_proj is 'gated-tanh'; ftk's model has 'gelu_new' or"),
    ("t5", edited(feed_forward_proj=["relu"]), "feed_forward_proj is ['relu']; ftk's model has"),
    ("gpt2", edited(add_cross_attention=True), "add_cross_attention is True; ftk's model has False"),
    (
        "gpt2",
        lambda folder: (edited(architectures=["GPT2DoubleHeadsModel"])(folder), with_tensors(with_extra)(folder)),
        "architecture GPT2DoubleHeadsModel is not known here",
    ),
    (
        "bert pairs",
        lambda folder: (edited(architectures=["BertForMultipleChoice"])(folder), with_tensors(with_extra)(folder)),
        "architecture BertForMultipleChoice .*AutoModel.from_pretrained",
    ),
    ("t5", edited(dense_act_fn="gelu"), "dense_act_fn is 'gelu'; ftk's model has 'relu'"),
    ("t5", edited(relative_attention_num_buckets=7), "num_position_buckets is 7; it must be even"),
    ("t5", edited(relative_attention_max_distance=4), "max_position_distance is 4; it must be at least 5"),
    (
        "longformer",
        edited(attention_window="wide"),
        "attention_window is 'wide'; it must be a whole number, or one for",
    ),
    ("longformer", edited(attention_window=[4, 6, 8]), "attention_window has 3 numbers; it must have one, or one for"),
    ("longformer", edited(attention_window=[4, 5]), "attention_window has 5; a window must be even"),
    ("mistral", edited(sliding_window="abc"), "sliding_window is 'abc'"),
    ("mistral", edited(sliding_window=0), "sliding_window is 0"),
    ("gpt2", edited(activation_function="quick_gelu"), "activation_function is 'quick_gelu'; ftk's model has"),
    ("opt", edited(activation_function="quick_gelu"), "activation_function is 'quick_gelu'; ftk's model has"),
    ("opt", edited(_remove_final_layer_norm=True), "_remove_final_layer_norm is True; ftk's model has False"),
    (
        "qwen2",
        edited(use_sliding_window=True, sliding_window=4, layer_types=["full_attention"]),
        "layer_types has 1 entries for 2 layers",
    ),
    ("qwen2", edited(layer_types=["full_attention", "linear"]), "layer_types has 'linear'; ftk's models have"),
    ("qwen2", edited(use_sliding_window=True, layer_types="none"), "layer_types must be a list or null"),
]


@pytest.mark.parametrize(
    ("family", "damage", "message"), [*(("gpt2", *row) for row in MISTAKES), *OWN_MISTAKES], scope="function"
)
def test_mistakes_are_one_line_and_nothing_is_written(publish, family, tmp_path, monkeypatch, damage, message) -> None:
    """By a conversion, and where the folder is opened as it is."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(publish(family), tmp_path / "source")
    damage(tmp_path / "source")
    with pytest.raises(UserError, match=re.sub(r"([()\[\]])", r"\\\1", message)) as caught:
        convert(tmp_path / "source", tmp_path / "ours")
    assert "\n" not in str(caught.value)
    if form_of(tmp_path / "source") is not None:
        with pytest.raises(UserError) as opened:
            ftk.load_model(tmp_path / "source")
        assert str(opened.value) == str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def with_entry(**changes: Any) -> Callable[[dict], dict]:
    """`ftk_names.json` with another entry for its file; None: without that part."""

    def change(files: dict) -> dict:
        entry = files["model.safetensors"] | changes
        return {"model.safetensors": {key: value for key, value in entry.items() if value is not None}}

    return change


def renamed_file(name: str) -> Callable[[dict], dict]:
    return lambda files: {name: files["model.safetensors"]}


HOSTILE = [
    (renamed_file("../evil.safetensors"), "names '../evil.safetensors', which is no file of weights"),
    (renamed_file("/tmp/evil.safetensors"), "which is no file of weights"),
    (renamed_file("evil.txt"), "names 'evil.txt', which is no file of weights"),
    (renamed_file("a\0.safetensors"), "which is no file of weights"),
    (lambda files: {}, " is missing"),
    (lambda files: [files], "is not a mapping"),
    (lambda files: {"model.safetensors": ["a"]}, "needs metadata and names, all of strings"),
    (with_entry(metadata=None), "needs metadata and names"),
    (with_entry(metadata={"format": 1}), "needs metadata and names"),
    (with_entry(names=["a", 1]), "needs metadata and names"),
    (with_entry(names=["a"]), "'a' is not in the model"),
    (lambda files: files | {"b.safetensors": files["model.safetensors"]}, "is named twice"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_a_checkpoint_that_tells_what_to_write_where_is_not_believed(ours, tmp_path, change, message) -> None:
    source = tmp_path / "deep" / "ours"
    names = json.loads((ours / "source" / "ftk_names.json").read_text())
    tampered(ours, source, "ftk_names.json", json.dumps(change(names)).encode())
    with pytest.raises(UserError, match=message) as caught:
        convert_back(source, tmp_path / "deep" / "back")
    assert "source/ftk_names.json: " in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent in (tmp_path, source.parent)) == [
        "deep",
        "ours",
    ]


def test_only_small_files_of_known_kinds_are_copied(ours, tmp_path) -> None:
    tampered(ours, tmp_path / "ours", "pytorch_model.bin", b"evil")
    with pytest.raises(UserError, match=r"source/pytorch_model.bin: is none of the files that are copied"):
        convert_back(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def tampered(ours: Path, folder: Path, name: str, content: bytes) -> None:
    """A checkpoint with other content in a file of `source/`, and a manifest that fits it."""
    shutil.copytree(ours, folder)
    files = read_manifest(folder)
    for path in (folder / "source" / name, folder / MANIFEST):
        path.unlink(missing_ok=True)
    write_manifest(folder, files | {f"source/{name}": write_file(folder / "source" / name, [content])})
