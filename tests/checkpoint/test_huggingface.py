"""Hugging Face's folders become ftk's checkpoints and come back byte for byte; a new family is a row of `FAMILIES`."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import ftk
from ftk.checkpoint import huggingface, load_model_tensors, read_config, save_checkpoint, verify
from ftk.checkpoint.convert import convert_from, convert_to
from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig
from ftk.checkpoint.layout import MANIFEST
from ftk.checkpoint.manifest import read_manifest, write_file, write_manifest
from ftk.checkpoint.weights import foreign_config, identity_files
from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.engine import engine_for
from ftk.generation.engine.request import Framing, Request
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.model_parallel.collective import _checksum
from ftk.models import build_model, model_config
from ftk.models.conversion import LazyTensors, renamed
from ftk.modules.norms import RMSNorm
from ftk.registry import HF_MODELS
from ftk_cli.checkpoint import main
from tests.held import Held

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")


GPT = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 99,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))


def gptj() -> Any:
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**GPT, rotary_dim=6, n_inner=48))


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 99,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def decoder(name: str, **options: Any) -> Callable[[], Any]:
    """A small model of `transformers`, by the beginning of its classes' names."""

    def build() -> Any:
        config = getattr(transformers, f"{name}Config")(**SMALL | options)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def opt(**options: Any) -> Callable[[], Any]:
    """No padding token: `transformers` gives its row no gradient."""

    def build() -> Any:
        shape = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
        tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
        config = transformers.OPTConfig(**shape, **tokens, max_position_embeddings=64, **options)
        return transformers.OPTForCausalLM(config)

    return build


def encoder(name: str, kind: str = "ForMaskedLM", **options: Any) -> Callable[[], Any]:
    """Rows of padding have gradients like others, which `transformers` leaves out."""

    def build() -> Any:
        shape = {key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "bos_token_id")}
        config = getattr(transformers, f"{name}Config")(**shape | options)
        model = getattr(transformers, f"{name}{kind}")(config)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None
        return model

    return build


def t5(name: str, own_head: bool = False, **options: Any) -> Callable[[], Any]:
    """Heads that together are not as wide as H, and distances beyond the last bucket."""

    def build() -> Any:
        shape = {"d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
        buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
        config = getattr(transformers, f"{name}Config")(**shape, **buckets, vocab_size=99, **options)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        if own_head:  # the configuration no longer says so, the files do
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    return build


def from_fairseq(name: str, bias: bool = False, **options: Any) -> Callable[[], Any]:
    """No row of padding among the tokens: `transformers` gives it no gradient and no place."""

    def build() -> Any:
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
        shape = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        shape |= {"vocab_size": 100} if name == "Bart" else {"src_vocab_size": 100, "tgt_vocab_size": 100}
        shape |= {"decoder_layers": 2} if name == "FSMT" else {}
        shape |= {"pad_token_id": 99, "forced_eos_token_id": None, "num_beams": 1}
        config = getattr(transformers, f"{name}Config")(**{**shape, **heads, **options})
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        if bias:
            torch.nn.init.normal_(model.final_logits_bias)
        for table in ("encoder", "decoder") if name == "FSMT" else ():
            getattr(model.model, table).embed_positions.requires_grad_(False)
        return model

    return build


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
FAMILIES: dict[str, Callable[[], Any]] = {
    "bart": from_fairseq("Bart"),
    "bert": encoder("Bert", pad_token_id=0),
    "glm4": decoder("Glm", head_dim=8, pad_token_id=None),
    "glm4_0414": decoder("Glm4", head_dim=12, attention_bias=False, tie_word_embeddings=True, pad_token_id=None),
    "gpt2": gpt2,
    "gptj": gptj,
    "llama": decoder("Llama"),
    "llama tied, biases, llama3": decoder(
        "Llama", tie_word_embeddings=True, attention_bias=True, rope_parameters=LLAMA3
    ),
    "longformer": encoder(
        "Longformer", type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5, attention_window=[4, 12]
    ),
    "mistral": decoder("Mistral", sliding_window=None),
    "mistral window": decoder("Mistral", sliding_window=7),
    "opt": opt(),
    "opt post-norm, projections": opt(do_layer_norm_before=False, word_embed_proj_dim=20),
    "qwen2": decoder("Qwen2", rope_parameters=YARN),
    "qwen2 window, dynamic": decoder(
        "Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=0, rope_parameters=DYNAMIC
    ),
    "qwen2 window from the second layer on": decoder(
        "Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": decoder("Qwen3", head_dim=12, tie_word_embeddings=True),
    "qwen3 window in the first layer": decoder(
        "Qwen3",
        head_dim=12,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "roberta": encoder("Roberta", type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5),
    "mt5": t5("MT5", own_head=True),
    "t5": t5("T5"),
    "t5 1.1": t5("T5", own_head=True, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "transformer": from_fairseq("FSMT", tie_word_embeddings=True),
    "transformer two vocabularies": from_fairseq("FSMT", src_vocab_size=102, decoder_ffn_dim=40, scale_embedding=False),
}
"""Model of ftk's -> a tiny one of `transformers` with weights of its own."""

OTHERS = {
    "bart bias": from_fairseq("Bart", bias=True),
    "bert pairs": encoder("Bert", "ForPreTraining", pad_token_id=0),
    "llama all heads": decoder("Llama", num_key_value_heads=4),
    "mt5 tied": t5("MT5"),
    "t5 tied, gated, not scaled": t5("T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5 own head, scaled": t5("T5", own_head=True),
}
ENCODERS = ("bert", "longformer", "roberta")
ENCODER_DECODERS = ("bart", "mt5", "t5", "t5 1.1", "transformer", "transformer two vocabularies")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@cache
def drawn(family: str) -> Any:
    """All parameters drawn at random: initial zeros and ones would hide names that were mixed up."""
    torch.manual_seed(1)
    model = {**FAMILIES, **OTHERS}[family]().eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    if family.startswith("bart"):  # else the last bias would decide, and many answers be equally good
        torch.nn.init.normal_(model.model.decoder.layers[-1].final_layer_norm.bias, std=0.03)
    return model


@pytest.fixture(scope="module")
def theirs(family) -> Any:
    return drawn(family)


@pytest.fixture(scope="module")
def publish(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a family, as `transformers` writes it."""

    @cache
    def folder_of(family: str) -> Path:
        folder = tmp_path_factory.mktemp("published") / "whole"
        drawn(family).save_pretrained(folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def published(family, publish) -> Path:
    return publish(family)


@pytest.fixture(scope="module")
def ours(published, tmp_path_factory) -> Path:
    folder = convert(published, tmp_path_factory.mktemp("ours") / "checkpoint")
    assert verify(folder) == []
    return folder


def convert(source: Path, output: Path) -> Path:
    return convert_from(HuggingFace(HuggingFaceConfig()), source, output)


def convert_back(source: Path, output: Path, max_shard_size: str = "5GB") -> Path:
    return convert_to(HuggingFace(HuggingFaceConfig(max_shard_size=max_shard_size)), "hf", source, output)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens() -> torch.Tensor:
    return torch.randint(99, (3, 40), generator=torch.Generator().manual_seed(2))  # [B, T]


def decoder_tokens() -> torch.Tensor:
    """What a decoder behind an encoder reads, of another length: [B, T]"""
    return tokens().flip(0)[:, :23]


def logits_of(model: Any) -> torch.Tensor:
    """Of `transformers`' model or of ftk's, [B, T, V]."""
    if not isinstance(model, transformers.PreTrainedModel):
        more = {"decoder_tokens": decoder_tokens()} if "decoder_tokens" in model.INPUTS else {}
        return model(tokens(), **more, **global_tokens(model))
    # With a cache, FSMT has no causal mask.
    more = {"decoder_input_ids": decoder_tokens(), "use_cache": False} if model.config.is_encoder_decoder else {}
    return model(tokens(), **more, **global_tokens(model)).logits


def global_tokens(model: Any) -> dict[str, torch.Tensor]:
    """Of a Longformer, `transformers`' or ftk's: none in the first row, two in the second, one in the third."""
    mask = torch.zeros(3, 40, dtype=torch.int64)
    mask[1, [0, 7]] = mask[2, 0] = 1
    if isinstance(model, transformers.LongformerForMaskedLM):
        return {"global_attention_mask": mask}
    return {"global_mask": mask} if "global_mask" in getattr(model, "INPUTS", ()) else {}


def test_logits_are_those_of_transformers(theirs, ours) -> None:
    with torch.no_grad():
        expected, found = logits_of(theirs), logits_of(ftk.load_model(ours))
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_gradients_are_those_of_transformers(theirs, ours, family) -> None:
    """Of every parameter, through the inverse of the map."""
    model = ftk.load_model(ours)
    for each in (theirs, model):
        each.zero_grad()
    for logits in map(logits_of, (theirs, model)):  # [B, T, V]
        targets = tokens()[:, 1 : logits.size(1)]
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    converter = HF_MODELS.get(family.split()[0]).target()
    found = renamed(LazyTensors.of(gradients), converter.renames, model.config, back=True).all()
    tied = converter.tied(model.config)  # their names of what is one tensor may be others
    expected = {tied.get(name, name): one.grad for name, one in theirs.named_parameters() if one.requires_grad}
    assert found.keys() == expected.keys()
    # Without rotary positions biases of keys change nothing, and their gradients are roundings.
    smallest = 1e-2 * max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * max(float(value.abs().max()), smallest), name


@pytest.mark.parametrize("beam", [1, 4])
def test_answers_are_those_of_transformers(theirs, ours, family, beam) -> None:
    """Greedy and beam search, with prompts of several lengths side by side; encoders: texts of several lengths."""
    if family in ENCODERS:
        lengths = torch.tensor([40, 17, 1])
        inside = torch.arange(40) < lengths[:, None]  # [B, T]
        padded = tokens().masked_fill(~inside, theirs.config.pad_token_id)
        types = tokens() % theirs.config.type_vocab_size
        with torch.no_grad():
            given = {"attention_mask": inside.long(), "token_type_ids": types, **global_tokens(theirs)}
            expected = theirs(padded, **given).logits[inside]
            model = ftk.load_model(ours)
            found = model(padded, lengths=lengths, token_types=types, **global_tokens(model))[inside]
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
        return
    if family in ENCODER_DECODERS:
        lengths = torch.tensor([40, 17, 1])
        inside = torch.arange(40) < lengths[:, None]  # [B, S]
        with torch.no_grad():
            more = {"decoder_input_ids": decoder_tokens(), "use_cache": False}
            expected = theirs(tokens(), attention_mask=inside.long(), **more).logits
            found = ftk.load_model(ours)(tokens(), lengths=lengths, decoder_tokens=decoder_tokens())
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    prompts = [tokens()[row, : 3 + 4 * row].tolist() for row in range(3)]
    options = GenerationConfig(beam=beam, nbest=beam, max_len=20)
    requests = [Request(prompt, options) for prompt in prompts]
    model, end = ftk.load_model(ours), theirs.generation_config.eos_token_id
    framing: Framing = Continuation([end], 64)
    if family in ENCODER_DECODERS:
        framing = SourceToTarget([end], [model.config.decoder_start_token])
    found = engine_for(model, framing, requests, batch_size=2).answers(requests)
    searched = {"num_beams": beam, "num_return_sequences": beam, "length_penalty": 1.0, "early_stopping": True}
    for prompt, (best,) in zip(prompts, found, strict=True):
        flags = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **(searched if beam > 1 else {})}
        if family in ENCODER_DECODERS:
            # The cache of theirs counts the encoder's layers; without one, FSMT has no causal mask.
            flags |= {"use_cache": "transformer" in family, "decoder_start_token_id": model.config.decoder_start_token}
        rows = theirs.generate(torch.tensor([prompt]), **flags)
        expected = rows[:, len(framing.first(Request(prompt)).tokens) :].tolist()
        for answer, row in zip((best, *best.others), expected, strict=True):
            assert list(answer.tokens) == (row[: row.index(end)] if end in row else row)


def test_a_bart_keeps_the_bias_of_its_logits(publish) -> None:
    with torch.no_grad():
        expected, model = logits_of(drawn("bart bias")), ftk.load_model(publish("bart bias"))
        assert (logits_of(model) - expected).abs().max() <= 1e-5 * float(expected.abs().max())
    assert model.logits_bias.bias.abs().min() > 0


def test_waves_of_positions_are_checked_where_files_have_them(publish, tmp_path) -> None:
    source = shutil.copytree(publish("transformer"), tmp_path / "source")
    assert ftk.load_model(source).config.share_embeddings == "all"
    assert ftk.load_model(publish("transformer two vocabularies")).config.share_embeddings == "none"
    rewrite(source, lambda tensors: tensors | {"model.encoder.embed_positions.weight": torch.ones(164, 32)})
    with pytest.raises(UserError, match=r"embed_positions.weight has not the values that it has in every such model"):
        convert(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("beam", [1, 3])
def test_a_forced_first_token_stands_in_front_of_an_answer(publish, beam) -> None:
    """As data of the configuration; it has no share in a score."""
    theirs, model = drawn("bart"), ftk.load_model(publish("bart"))
    starts = [model.config.decoder_start_token, 7]
    options = GenerationConfig(beam=beam, nbest=beam, max_len=12, length_penalty=0.0)
    requests = [Request(tokens()[row, : 4 + 5 * row].tolist(), options) for row in range(3)]
    end = theirs.generation_config.eos_token_id
    found = engine_for(model, SourceToTarget([end], starts, model.config.position_limit), requests, 3).answers(requests)
    searched = {"num_beams": beam, "num_return_sequences": beam, "length_penalty": 0.0, "early_stopping": True}
    for request, (best,) in zip(requests, found, strict=True):
        flags = {"max_new_tokens": 13, "do_sample": False, "forced_bos_token_id": 7}
        rows = theirs.generate(torch.tensor([request.prompt]), **flags, **(searched if beam > 1 else {})).tolist()
        for answer, row in zip((best, *best.others), rows, strict=True):
            assert row[:2] == starts
            written = row[2:]
            assert list(answer.tokens) == (written[: written.index(end)] if end in written else written)


@pytest.mark.parametrize(
    "family", ["mt5 tied", "t5 tied, gated, not scaled", "t5 own head, scaled"], ids=lambda name: name
)
def test_the_head_of_a_t5_is_what_the_files_hold_and_its_scale_what_the_configuration_says(publish, family) -> None:
    with torch.no_grad():
        expected, model = logits_of(drawn(family)), ftk.load_model(publish(family))
        assert (logits_of(model) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert model.config.tie_embeddings == ("own head" not in family)
    assert model.config.scale_outputs == (family == "t5 own head, scaled")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """The same folder with other tensors in its file of weights."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if "shared.weight" in tensors:  # T5's names have none
        return tensors
    heads = ("lm_head.", "cls.", "final_logits_bias")
    return {name if name.startswith(heads) else name.split(".", 1)[1]: value for name, value in tensors.items()}


def with_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the copy of the embedding, where there is no output layer."""
    embedding = max(tensors.values(), key=lambda tensor: tensor.dim() > 1 and tensor.size(0) in (99, 100))
    head = "lm_head.decoder.weight" if "lm_head.dense.weight" in tensors else "lm_head.weight"
    head = "cls.predictions.decoder.weight" if "cls.predictions.bias" in tensors else head
    if "model.encoder.embed_positions.weight" in tensors and "model.shared.weight" not in tensors:  # FSMT
        head = "model.decoder.output_projection.weight"
    return {head: embedding.clone(), **tensors}


def in_half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.half() for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", [None, "20KB", without_prefix, with_head, in_half])
def test_a_folder_comes_back_byte_for_byte(theirs, published, tmp_path, form) -> None:
    source = tmp_path / "source"
    if isinstance(form, str):
        theirs.save_pretrained(source, max_shard_size=form)
        assert (source / "model.safetensors.index.json").exists()
    else:
        shutil.copytree(published, source)
    if callable(form):
        rewrite(source, form)
    (source / "merges.txt").write_text("a b\n")
    back = convert_back(convert(source, tmp_path / "ours"), tmp_path / "back")
    assert contents(back) == contents(source)


def test_older_files_load_as_the_newer(theirs, published, ours, tmp_path, family) -> None:
    """Pickled weights in several files with the head's copy and with masks, which are no parameters."""
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(published / "config.json", source)
    state = theirs.state_dict()
    masks = {
        name.replace("*", "0"): torch.ones(1, 1, 64, 64) for name in HF_MODELS.get(family.split()[0]).target().buffers
    }
    torch.save(state, source / "pytorch_model-1.bin")
    torch.save(masks, source / "pytorch_model-2.bin")
    files = dict.fromkeys(state, "pytorch_model-1.bin") | dict.fromkeys(masks, "pytorch_model-2.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    tensors = load_model_tensors(convert(source, tmp_path / "older"))
    expected = load_model_tensors(ours)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    back = convert_back(tmp_path / "older", tmp_path / "back")
    assert load_file(back / "model.safetensors").keys() == load_file(published / "model.safetensors").keys()


def test_masks_among_the_weights_are_left_out_of_what_is_written_back(published, ours, tmp_path, family) -> None:
    """As in the files of the first GPT-2, which are of the trunk alone."""
    source = tmp_path / "source"
    shutil.copytree(published, source)
    masks = {
        name.replace("*", "0"): torch.ones(1, 1, 64, 64) for name in HF_MODELS.get(family.split()[0]).target().buffers
    }
    rewrite(source, lambda tensors: without_prefix({**tensors, **masks}))
    back = convert_back(convert(source, tmp_path / "ours"), tmp_path / "back")
    expected = published if masks else source
    assert load_file(back / "model.safetensors").keys() == load_file(expected / "model.safetensors").keys()
    assert (back / "config.json").read_bytes() == (published / "config.json").read_bytes()


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_model_of_ftk_is_one_of_transformers(theirs, ours, data_bin, tmp_path, size) -> None:
    tokenizer = ftk.load_tokenizer(data_bin)
    config = {"model": read_config(ours)["model"] | {"vocab_size": tokenizer.padded_vocab_size()}}
    options = {name: value for name, value in config["model"].items() if name != "_name"}
    model = build_model(config["model"]["_name"], **options).eval()
    trained = tmp_path / "trained"
    save_checkpoint(trained, model=model, trainer_state={}, config=config, tokenizer_folder=data_bin / "tokenizer")
    folder = convert_back(trained, tmp_path / "hf", size)
    count = len(list(folder.glob("*.safetensors")))
    assert count == 1 if size == "5GB" else count > 2
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == tokenizer.special.eos
    for file in tokenizer.files:
        assert (folder / file.path.name).read_bytes() == file.path.read_bytes()
    loaded, report = type(theirs).from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(loaded.eval()), logits_of(model))


def test_tensors_go_over_one_at_a_time(published, tmp_path) -> None:
    sizes = [tensor.nbytes for tensor in load_file(published / "model.safetensors").values()]
    for step in (
        lambda: convert(published, tmp_path / "ours"),
        lambda: convert_back(tmp_path / "ours", tmp_path / "b"),
    ):
        with Held() as held:
            step()
        assert max(sizes) <= held.peak <= 4 * max(sizes) < sum(sizes)  # as it is read, turned round, as bytes


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil_was_here"),))


def edited(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def with_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, change)


def first(tensors: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor | None]) -> dict:
    name = next(iter(tensors))
    value = change(tensors.pop(name))
    return tensors if value is None else tensors | {name: value}


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def with_index(folder: Path) -> None:
    content = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": Evil()}, folder / "pytorch_model.bin")


ROPE = {"rope_theta": 1e4, "rope_type": "default"}
MISTAKES = [
    (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json: is not a mapping"),
    (edited(model_type="megalodon"), "model_type 'megalodon' is of an unknown family"),
    (edited(surprise=3), "surprise is not known here (3)"),
    (with_tensors(lambda t: first(t, lambda tensor: None)), " is missing"),
    (with_tensors(lambda t: first(t, lambda tensor: tensor[:-1])), " fits the others|has not the shape"),
    (with_tensors(lambda t: first(t, lambda tensor: tensor * torch.nan)), "holds NaN or infinity in"),
    (with_tensors(lambda t: {**t, "extra.weight": torch.ones(2)}), "'extra.weight' has no place in the model"),
    (cut, "model.safetensors: "),
    (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    (with_index, "names model-00001-of-00001.safetensors, which is not there"),
    (pickled, "holds Python objects besides tensors"),
]
OWN_MISTAKES = [
    ("bert", edited(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
    ("bert", edited(is_decoder=True), "is_decoder is True; ftk's model has False"),
    ("gpt2", edited(tie_word_embeddings=False), "tie_word_embeddings is False; ftk's model has True"),
    ("gpt2", edited(n_head=5), "num_attention_heads is 5; it must divide hidden_size 32"),
    ("gpt2", edited(n_layer="many"), "num_layers is 'many'"),
    ("gpt2", edited(n_layer=10**4), "far larger than its tensors"),
    ("gpt2", with_tensors(lambda t: {**t, "lm_head.weight": torch.ones(99, 32)}), "lm_head.weight differs from"),
    (
        "glm4",
        edited(rope_parameters=ROPE | {"partial_rotary_factor": 0.4}),
        "3 of the 8 dimensions of a head; the rotated size must be even and at least 2",
    ),
    ("glm4", edited(rope_parameters=ROPE | {"partial_rotary_factor": 2.0}), "rotary_share is 2.0"),
    ("llama", edited(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; ftk's model has 1.0"),
    ("gptj", edited(rotary_dim=7), "rotary_dim is 7; it must be even and from 2 to the size of a head, 8"),
    ("gptj", edited(tie_word_embeddings=True), "tie_word_embeddings is True; ftk's model has False"),
    ("llama", edited(hidden_act="gelu"), "hidden_act is 'gelu'; ftk's model has 'silu'"),
    ("llama", edited(num_key_value_heads=3), "num_kv_heads is 3; it must divide num_attention_heads 4"),
    ("llama", edited(head_dim=7), "the size of a head is 7; rotary positions need an even one"),
    ("llama", edited(tie_word_embeddings=True), "lm_head.weight differs from"),
    ("llama", edited(rope_parameters=ROPE | {"rope_type": "longrope"}), "rope_type is 'longrope'; ftk's models have"),
    ("llama", edited(rope_parameters=ROPE | {"surprise": 1}), "surprise of the rope type default is not known here"),
    ("llama", edited(rope_parameters=[1]), "rope_scaling is [1]; it must be a mapping"),
    ("llama", edited(rope_parameters=ROPE | {"rope_type": ["x"]}), "rope_type is ['x']; ftk's models have"),
    ("llama", edited(rope_parameters=LLAMA3 | {"low_freq_factor": 0.0}), "rope_low is 0.0; it must be above 0"),
    ("bart", edited(decoder_ffn_dim=40), "decoder_ffn_dim is 40; ftk's model has encoder_ffn_dim, 48"),
    ("bart", edited(scale_embedding=True), "scale_embedding is True; ftk's model has False"),
    ("transformer", edited(decoder_attention_heads=2), "decoder_attention_heads is 2; ftk's model has encoder_att"),
    ("transformer", edited(pad_token_id=-1), "pad_token_id is -1; it must be a token"),
    ("mt5", edited(is_decoder=True), "is_decoder is True; ftk's model has False"),
    ("t5", edited(feed_forward_proj="gated-silu"), "feed_forward_proj is 'gated-silu'; ftk's model has relu or gated"),
    ("t5", edited(dense_act_fn="gelu"), "dense_act_fn is 'gelu'; ftk's model has 'relu'"),
    ("t5", edited(relative_attention_num_buckets=7), "num_position_buckets is 7; it must be even"),
    ("t5", edited(relative_attention_max_distance=4), "max_position_distance is 4; it must be at least 5"),
    (
        "longformer",
        edited(attention_window="wide"),
        "attention_window is 'wide'; it must be a whole number, or one for",
    ),
    ("longformer", edited(attention_window=[4, 6, 8]), "attention_window has 3 numbers; it must have one, or one for"),
    ("longformer", edited(attention_window=[4, 5]), "attention_window has 5; a window must be even and at least 2"),
    ("mistral", edited(sliding_window="abc"), "sliding_window is 'abc'"),
    ("mistral", edited(sliding_window=0), "sliding_window is 0"),
    ("opt", edited(activation_function="gelu"), "activation_function is 'gelu'; ftk's model has 'relu'"),
    ("opt", edited(enable_bias=False), "enable_bias is False; ftk's model has True"),
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
    monkeypatch.chdir(tmp_path)
    shutil.copytree(publish(family), tmp_path / "source")
    damage(tmp_path / "source")
    with pytest.raises(UserError, match=re.sub(r"([()\[\]])", r"\\\1", message)) as caught:
        convert(tmp_path / "source", tmp_path / "ours")
    assert "\n" not in str(caught.value)
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


def test_the_command_there_and_back(published, tmp_path, capfd) -> None:
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert main(["convert", "--from", "hf", str(published), ours]) == 0
    assert "it has no tokenizer and cannot read text" in capfd.readouterr().out
    assert main(["convert", "--to", "hf", ours, back]) == 0
    assert contents(Path(back)) == contents(published)
    assert main(["inspect", str(published)]) == 2
    assert f"ftk-checkpoint convert --from hf {published} DST" in capfd.readouterr().err
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).save(str(Path(back) / "tokenizer.json"))
    assert main(["convert", "--from", "hf", back, ours, "--overwrite"]) == 0
    assert capfd.readouterr().out == f"wrote {ours}\n"


# Written as in the files of the hub, of several releases of `transformers`; ends and dtypes are left out.
PUBLISHED: dict[str, dict[str, Any]] = {
    "longformer_base_4096": {
        **{"architectures": ["LongformerForMaskedLM"], "attention_mode": "longformer", "attention_window": [512] * 12},
        **{"attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2, "gradient_checkpointing": False},
        **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "ignore_attention_mask": False},
        **{"initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "sep_token_id": 2},
        **{"max_position_embeddings": 4098, "model_type": "longformer", "num_attention_heads": 12},
        **{"num_hidden_layers": 12, "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 50265},
    },
    "glm_large": {
        **{"_name_or_path": "BAAI/glm-large", "architectures": ["GLMModel"], "attention_dropout_prob": 0.1},
        **{"attention_scale": 1.0, "auto_map": {"AutoConfig": "configuration_glm.GLMConfig"}},
        **{"block_position_encoding": True, "checkpoint_activations": False, "checkpoint_num_layers": 1},
        **{"embedding_dropout_prob": 0.1, "hidden_size": 1024, "initializer_range": 0.02, "max_sequence_length": 512},
        **{"model_type": "glm", "num_attention_heads": 16, "num_layers": 24, "output_dropout_prob": 0.1},
        **{"output_predict": True, "parallel_output": True, "pool_token": "cls", "relative_encoding": False},
        **{"spell_func": "lstm", "spell_length": None, "vocab_size": 30592},
    },
    "opt_350m": {
        **{"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu"},
        **{"attention_dropout": 0.0, "do_layer_norm_before": False, "dropout": 0.1, "enable_bias": True},
        **{"ffn_dim": 4096, "hidden_size": 1024, "init_std": 0.02, "layer_norm_elementwise_affine": True},
        **{"layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 16},
        **{"num_hidden_layers": 24, "pad_token_id": 1, "prefix": "</s>", "use_cache": True, "vocab_size": 50272},
        "word_embed_proj_dim": 512,
    },
    "gptj_6b": {
        **{"activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "gradient_checkpointing": False},
        **{"initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "model_type": "gptj", "n_embd": 4096, "n_head": 16},
        **{"n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64},
        **{"scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1},
        **{"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
        **{"tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "use_cache": True, "vocab_size": 50400},
    },
    "chatglm_6b": {
        **{"_name_or_path": "THUDM/chatglm-6b", "architectures": ["ChatGLMModel"], "bos_token_id": 130004},
        **{"auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"}, "eos_token_id": 130005},
        **{"mask_token_id": 130000, "gmask_token_id": 130001, "pad_token_id": 3, "hidden_size": 4096},
        **{"inner_hidden_size": 16384, "layernorm_epsilon": 1e-05, "max_sequence_length": 2048},
        **{"model_type": "chatglm", "num_attention_heads": 32, "num_layers": 28, "position_encoding_2d": True},
        **{"transformers_version": "4.23.1", "use_cache": True, "vocab_size": 130528},
    },
    "chatglm2_6b": {
        **{"add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True},
        **{"apply_residual_connection_post_layernorm": False, "architectures": ["ChatGLMModel"]},
        **{"attention_dropout": 0.0, "attention_softmax_in_fp32": True, "auto_map": {"AutoModel": "modeling_chatglm"}},
        **{"bias_dropout_fusion": True, "ffn_hidden_size": 13696, "fp32_residual_connection": False},
        **{"hidden_dropout": 0.0, "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1e-05},
        **{"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2},
        **{"num_attention_heads": 32, "num_layers": 28, "original_rope": True, "padded_vocab_size": 65024},
        **{"post_layer_norm": True, "quantization_bit": 0, "rmsnorm": True, "seq_length": 32768},
        **{"tie_word_embeddings": False, "use_cache": True},
    },
    "glm4_9b": {
        **{"architectures": ["GlmForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128},
        **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696},
        **{"max_position_embeddings": 8192, "model_type": "glm", "num_attention_heads": 32, "num_hidden_layers": 40},
        **{"num_key_value_heads": 2, "pad_token_id": 151329, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0},
        **{"tie_word_embeddings": False, "use_cache": True, "vocab_size": 151552},
    },
    "glm4_0414_9b": {
        **{"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128},
        **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696},
        **{"max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40},
        **{"num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05},
        **{"rope_theta": 10000.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 151552},
    },
}


@pytest.mark.parametrize("arch", PUBLISHED)
def test_a_published_config_is_that_of_its_preset(arch) -> None:
    theirs = PUBLISHED[arch]
    (converter,) = [each for name in HF_MODELS if (each := HF_MODELS.get(name).target()).matches(theirs)]
    found, preset = converter.config_from(theirs), model_config(arch)[1]
    assert type(found) is type(preset)
    widths = ("kv_heads", "head_size", "inner_size", "embedding_size", "layer_windows")
    either = ("ffn_hidden_size", "word_embedding_size", "activation", "attention_window")
    given = [field.name for field in fields(found) if field.name not in either]
    for name in (*widths, *given):
        assert getattr(found, name) == getattr(preset, name), name


NORMS = {
    "glm": "GlmRMSNorm",
    "glm4": "Glm4RMSNorm",
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "t5": "T5LayerNorm",
}


@pytest.mark.parametrize(("module", "name"), NORMS.items())
def test_norms_in_bfloat16_are_those_of_transformers_bit_for_bit(module, name) -> None:
    theirs = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)(64, eps=1e-5)
    ours = RMSNorm(64, eps=1e-5)
    with torch.no_grad():
        theirs.weight.normal_()
        ours.weight.copy_(theirs.weight)
    hidden = 3 * torch.randn(50, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(ours.bfloat16()(hidden), theirs.bfloat16()(hidden))


def as_chatglm2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a GLM-4, which is the same network, as ChatGLM2's own code names and joins them."""
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.layers.": "transformer.encoder.layers.",
        "model.norm": "transformer.encoder.final_layernorm",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "lm_head": "transformer.output_layer",
    }
    found = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, tensor = name.replace("self_attn.q_proj", "self_attention.query_key_value"), torch.cat(parts)
        elif "k_proj" in name or "v_proj" in name:
            continue
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        found[name] = tensor
    return found


def test_chatglm2_is_glm4_with_other_names(publish, tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = as_chatglm2(load_file(publish("glm4") / "model.safetensors"))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = {**PUBLISHED["chatglm2_6b"], "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    config |= {"kv_channels": 8, "ffn_hidden_size": 48, "padded_vocab_size": 99, "seq_length": 64, "rope_ratio": 1}
    (source / "config.json").write_text(json.dumps(config | {"layernorm_epsilon": 1.5625e-7}))
    ours = convert(source, tmp_path / "ours")
    with torch.no_grad():
        found, expected = ftk.load_model(ours)(tokens()), drawn("glm4")(tokens()).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert contents(convert_back(ours, tmp_path / "back")) == contents(source)
    converter, options = HF_MODELS.get("chatglm2").target(), ftk.load_model(ours).config
    assert converter.config_from(converter.config_to(options)) == options
    longer = converter.config_to(replace(options, rope_theta=5e5))
    assert converter.config_from(longer).rope_theta == 5e5
    assert converter.config_from(PUBLISHED["chatglm2_6b"] | GLM4_9B_CHAT).rope_theta == 5e6


GLM4_9B_CHAT = {"padded_vocab_size": 151552, "rope_ratio": 500}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rmsnorm": False}, "rmsnorm is False; ftk's model has True"),
        ({"multi_query_attention": False}, "multi_query_attention is False; ftk's model has True"),
        ({"multi_query_attention": None}, "multi_query_attention is None; ftk's model has True"),
        ({"interleaved_qkv": True}, "interleaved_qkv is True; ftk's model has False"),
        ({"rope_ratio": 50}, 'rope_ratio is 50, .* for the former, add "rope_theta": 500000$'),
        ({"rope_ratio": 50, "rope_theta": 10000}, "rope_ratio is 50, "),
        ({"rope_ratio": "50"}, "rope_ratio is '50'; it must be a number"),
    ],
)
def test_a_chatglm2_of_another_form_is_refused(change, message) -> None:
    converter, config = HF_MODELS.get("chatglm2").target(), PUBLISHED["chatglm2_6b"]
    with pytest.raises(UserError, match=message):
        converter.config_from(config | change)


def test_a_chatglm2_without_a_word_on_its_queries_has_them_in_another_order() -> None:
    config = {key: value for key, value in PUBLISHED["chatglm2_6b"].items() if key != "multi_query_attention"}
    with pytest.raises(UserError, match="multi_query_attention is False; ftk's model has True"):
        HF_MODELS.get("chatglm2").target().config_from(config)


OLD_SPELLINGS = {
    "a theta and a scaling": (
        "llama tied, biases, llama3",
        lambda config: (
            {key: value for key, value in config.items() if key != "rope_parameters"}
            | {"rope_theta": LLAMA3["rope_theta"]}
            | {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}}
        ),
    ),
    "a type of scaling and a type of numbers": (
        "llama tied, biases, llama3",
        lambda config: (
            {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
            | {"rope_theta": LLAMA3["rope_theta"], "torch_dtype": "float32"}
            | {
                "rope_scaling": {
                    "type" if key == "rope_type" else key: LLAMA3[key] for key in {*LLAMA3} - {"rope_theta"}
                }
            }
        ),
    ),
    "no head size, no key heads": (
        "llama all heads",
        lambda config: {key: value for key, value in config.items() if key not in ("head_dim", "num_key_value_heads")},
    ),
}


def older_norms(folder: Path) -> None:
    """As in the first files of BERT: names of norms, and places among the weights."""
    last = {"weight": "gamma", "bias": "beta"}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {name: name.rpartition(".") for name in tensors}
        older = {name: f"{start}.{last[end]}" for name, (start, _, end) in names.items() if start.endswith("LayerNorm")}
        words = next(name for name in tensors if name.endswith("embeddings.word_embeddings.weight"))
        ids = {words.replace("word_embeddings.weight", "position_ids"): torch.arange(64)[None]}
        return {older.get(name, name): value for name, value in tensors.items()} | ids

    rewrite(folder, change)


@pytest.mark.parametrize("family", ["longformer", "roberta"], scope="module")
def test_older_names_of_norms_are_todays(published, ours, tmp_path) -> None:
    source = shutil.copytree(published, tmp_path / "source")
    older_norms(source)
    expected, found = load_model_tensors(ours), load_model_tensors(convert(source, tmp_path / "older"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_older_names_and_the_output_for_pairs(publish, tmp_path) -> None:
    shutil.copytree(publish("bert pairs"), tmp_path / "source")
    plain = convert(tmp_path / "source", tmp_path / "plain")
    older_norms(tmp_path / "source")
    older = convert(tmp_path / "source", tmp_path / "older")
    expected, found = load_model_tensors(plain), load_model_tensors(older)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model, theirs = ftk.load_model(older), drawn("bert pairs")
    with torch.no_grad():
        hidden = model.hidden_states(tokens())
        scores = theirs(tokens())
        for ours, expected in (
            (model.head(hidden), scores.prediction_logits),
            (model.head.next_sentence(hidden[:, 0]), scores.seq_relationship_logits),
        ):
            assert (ours - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert contents(convert_back(plain, tmp_path / "back")) == contents(publish("bert pairs"))


@pytest.mark.parametrize(("family", "change"), OLD_SPELLINGS.values(), ids=OLD_SPELLINGS, scope="function")
def test_an_older_config_is_of_the_same_model(publish, family, change, tmp_path) -> None:
    shutil.copytree(publish(family), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(change(config)))
    with torch.no_grad():
        found = ftk.load_model(convert(tmp_path / "source", tmp_path / "ours"))(tokens())
        expected = drawn(family)(tokens()).logits
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_dynamic_positions_end_where_they_would_be_stretched() -> None:
    options = {"num_layers": 1, "vocab_size": 99, "max_positions": 8}
    model = build_model("llama_tiny", **options, rope_scaling="dynamic", rope_factor=2.0)
    assert model(tokens()[:, :8]).isfinite().all()
    with pytest.raises(UserError, match="sequence of 9 tokens, but with `rope_scaling` dynamic"):
        model(tokens()[:, :9])


@pytest.mark.parametrize("family", ["mistral window", "qwen2 window from the second layer on"], scope="module")
def test_scores_behind_one_prompt_keep_to_the_window(theirs, ours) -> None:
    """Continuations stand side by side there; each is scored as if it were alone."""
    prompt, continuations = tokens()[0, :30].tolist(), [tokens()[row, :11].tolist() for row in (1, 2)]
    requests = [Request(prompt, GenerationConfig(max_len=20))]
    engine = engine_for(ftk.load_model(ours), Continuation([0], 64), requests, batch_size=1)
    (found,) = engine.score(requests, [continuations])
    for continuation, scored in zip(continuations, found, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + continuation])).logits[0, 29:-1]  # [11, V]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_a_folder_with_its_tokenizer_answers_in_words(publish, tmp_path) -> None:
    shutil.copytree(publish("llama"), tmp_path / "source")
    words = {"<s>": 1, "</s>": 0} | {f"w{i}": i for i in range(2, 99)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    theirs.save_pretrained(tmp_path / "source")
    generator = ftk.load_generator(convert(tmp_path / "source", tmp_path / "ours"), max_len=8)
    found = generator.generate(["w5 w17 w40"])[0]
    prompt = theirs(["w5 w17 w40"], return_tensors="pt")
    assert prompt["input_ids"][0, 0] == 1
    expected = drawn("llama").generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    assert found.text.split() == theirs.decode(expected, skip_special_tokens=True).split()
    assert contents(convert_back(tmp_path / "ours", tmp_path / "back")) == contents(tmp_path / "source")


def test_a_folder_is_described_several_times_and_an_old_pickle_read_once(publish, tmp_path, monkeypatch) -> None:
    source = shutil.copytree(publish("bert pairs"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    reads, read = [], huggingface.read_tensor_file
    monkeypatch.setattr(huggingface, "read_tensor_file", lambda path: reads.append(path) or read(path))
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
