"""Hugging Face's folders become ftk's checkpoints and come back byte for byte; a new family is a row of `hf_models`."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import ftk
from ftk.checkpoint import huggingface, load_model_tensors, read_config, save_checkpoint, verify
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
from ftk.tokenizers import build_tokenizer
from ftk_cli.checkpoint import main
from tests.checkpoint.hf_models import (
    FAMILIES,
    LLAMA3,
    contents,
    convert,
    convert_back,
    drawn,
    encoder,
    rewrite,
    tokens,
)
from tests.held import Held

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")


ENCODERS = ("bert", "longformer", "roberta")


ENCODER_DECODERS = ("bart", "mt5", "t5", "t5 1.1", "transformer", "transformer two vocabularies")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def theirs(family) -> Any:
    return drawn(family)


@pytest.fixture(scope="module")
def published(family, publish) -> Path:
    return publish(family)


@pytest.fixture(scope="module")
def ours(published, tmp_path_factory) -> Path:
    folder = convert(published, tmp_path_factory.mktemp("ours") / "checkpoint")
    assert verify(folder) == []
    return folder


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


def test_logits_beside_padding_are_those_of_transformers(theirs, ours, family) -> None:
    """Behind texts; in front of those of decoders, whose places then are given."""
    model, lengths = ftk.load_model(ours), torch.tensor([40, 17, 1])
    inside = torch.arange(40) < lengths[:, None]  # [B, T]
    given: dict[str, Any] = {"attention_mask": inside.long()}
    padded, scored, more = tokens(), inside, {}
    if family in ENCODERS:
        types = {"token_types": tokens() % theirs.config.type_vocab_size}
        padded = padded.masked_fill(~inside, theirs.config.pad_token_id)
        given |= {"token_type_ids": types["token_types"], **global_tokens(theirs)}
        more = {**types, **global_tokens(model)}
    elif family in ENCODER_DECODERS:
        given |= {"decoder_input_ids": decoder_tokens(), "use_cache": False}
        scored, more = torch.ones_like(decoder_tokens(), dtype=torch.bool), {"decoder_tokens": decoder_tokens()}
    else:
        scored = inside = inside.flip(1)
        places = (inside.cumsum(1) - 1).clamp(min=0)
        given = {"attention_mask": inside.long(), "position_ids": places}
        more = {"position_ids": places, "document_ids": inside.long() - 1}
    padding = {"lengths": lengths} if "lengths" in model.INPUTS else {}
    with torch.no_grad():
        expected, found = theirs(padded, **given).logits[scored], model(padded, **more, **padding)[scored]
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ENCODERS], indirect=True)
def test_answers_are_those_of_transformers(theirs, ours, family, beam) -> None:
    """Greedy and beam search, with prompts of several lengths side by side."""
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


@pytest.mark.parametrize(
    "table",
    [torch.ones(164, 32), torch.ones(0, 32), torch.ones(()), torch.ones(164, 32) > 0],
    ids=lambda each: f"{each.dtype} {each.shape}",
)
def test_waves_of_positions_are_checked_where_files_have_them(publish, tmp_path, table) -> None:
    source = shutil.copytree(publish("transformer"), tmp_path / "source")
    assert ftk.load_model(source).config.share_embeddings == "all"
    assert ftk.load_model(publish("transformer two vocabularies")).config.share_embeddings == "none"
    rewrite(source, lambda tensors: tensors | {"model.encoder.embed_positions.weight": table})
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


@pytest.mark.parametrize(("family", "start", "end"), [("bart", 2, 2), ("t5", 0, 1)], ids=["bart", "t5"])
def test_the_first_token_that_generation_config_forces_is_read_and_written(family, start, end, tmp_path) -> None:
    """`transformers` 5 leaves it out of config.json, and reads it there where it finds no generation_config.json."""
    theirs = copy.deepcopy(drawn(family))
    theirs.generation_config.update(forced_bos_token_id=7, decoder_start_token_id=start)
    theirs.save_pretrained(tmp_path / "theirs")
    assert "forced_bos_token_id" not in json.loads((tmp_path / "theirs" / "config.json").read_text())
    model = ftk.load_model(convert(tmp_path / "theirs", tmp_path / "ours"))
    assert (model.config.decoder_start_token, model.config.forced_first_token) == (start, 7)
    assert model.config.end_tokens == [end]
    assert contents(convert_back(tmp_path / "ours", tmp_path / "back")) == contents(tmp_path / "theirs")
    config = {"model": {"_name": family, **asdict(model.config)}}
    save_checkpoint(tmp_path / "trained", model=model, trainer_state={}, config=config)
    written = type(theirs).from_pretrained(convert_back(tmp_path / "trained", tmp_path / "hf")).generation_config
    found = written.decoder_start_token_id, written.forced_bos_token_id, written.eos_token_id
    assert found == (start, 7, end)


@pytest.mark.parametrize(
    "family", ["mt5 tied", "t5 tied, gated, not scaled", "t5 own head, scaled"], ids=lambda name: name
)
def test_the_head_of_a_t5_is_what_the_files_hold_and_its_scale_what_the_configuration_says(publish, family) -> None:
    with torch.no_grad():
        expected, model = logits_of(drawn(family)), ftk.load_model(publish(family))
        assert (logits_of(model) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert model.config.tie_embeddings == ("own head" not in family)
    assert model.config.scale_outputs == (family == "t5 own head, scaled")


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


def test_one_file_of_all_weights_goes_before_an_older_index(publish, tmp_path) -> None:
    """As where `transformers` saved a model whole into the folder of one that was in several files."""
    drawn("gpt2 exact gelu").save_pretrained(tmp_path / "source", max_shard_size="20KB")
    drawn("gpt2").save_pretrained(tmp_path / "source")
    left = [name for name in contents(tmp_path / "source") if name not in contents(publish("gpt2"))]
    assert "model.safetensors.index.json" in left
    back = convert_back(convert(tmp_path / "source", tmp_path / "ours"), tmp_path / "back")
    assert contents(back) == contents(publish("gpt2"))


LOST = {
    ("opt_tiny", "layer_norm_eps"): 1e-6,
    ("bart_tiny", "layer_norm_eps"): 1e-6,
    ("transformer_tiny", "layer_norm_eps"): 1e-6,
    ("transformer_tiny", "norm_first"): True,
    ("glm_tiny", "ffn_hidden_size"): 80,
    ("chatglm2_tiny", "rope_scaling"): "linear",
    ("chatglm2_tiny", "rotary_share"): 0.25,
    ("chatglm2_tiny", "tie_embeddings"): True,
    ("mt5_small", "scale_outputs"): True,
}
EFFECTLESS = {("llama_tiny", "rope_factor"): 4.0, ("t5_tiny", "gate_activation"): "silu"}


@pytest.mark.parametrize(("arch", "name"), LOST)
def test_an_option_that_their_form_has_not_is_refused_and_nothing_written(tmp_path, arch, name) -> None:
    more = {"hidden_size": 32, "ffn_hidden_size": 40} if arch == "mt5_small" else {}
    model = build_model(arch, vocab_size=99, num_layers=1, **more, **{name: LOST[arch, name]})
    config = {"model": {"_name": arch.rsplit("_", 1)[0], **asdict(model.config)}}
    save_checkpoint(tmp_path / "ours", model=model, trainer_state={}, config=config)
    option = {"ffn_hidden_size": "inner_size"}.get(name, name)
    with pytest.raises(UserError, match=f"has no place for `{option}` {LOST[arch, name]}; its models have "):
        convert_back(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(("arch", "name"), EFFECTLESS)
def test_an_option_that_has_no_effect_is_not_missed(tmp_path, arch, name) -> None:
    model = build_model(arch, vocab_size=99, num_layers=1, **{name: EFFECTLESS[arch, name]})
    config = {"model": {"_name": arch.rsplit("_", 1)[0], **asdict(model.config)}}
    save_checkpoint(tmp_path / "ours", model=model, trainer_state={}, config=config)
    assert (convert_back(tmp_path / "ours", tmp_path / "theirs") / "config.json").exists()


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
def test_a_model_of_ftk_is_one_of_transformers(theirs, ours, data_bin, tmp_path, size, family) -> None:
    tokenizer = ftk.load_tokenizer(data_bin)
    config = {"model": read_config(ours)["model"] | {"vocab_size": tokenizer.padded_vocab_size()}}
    config["model"]["end_tokens"] = [17]
    if "t5" in family:
        config["model"]["decoder_start_token"] = None  # then it is their usual one
    options = {name: value for name, value in config["model"].items() if name != "_name"}
    model = build_model(config["model"]["_name"], **options).eval()
    trained = tmp_path / "trained"
    save_checkpoint(trained, model=model, trainer_state={}, config=config, tokenizer_folder=data_bin / "tokenizer")
    folder = convert_back(trained, tmp_path / "hf", size)
    count = len(list(folder.glob("*.safetensors")))
    assert count == 1 if size == "5GB" else count > 2
    written, special = json.loads((folder / "config.json").read_text()), tokenizer.special
    assert written["eos_token_id"] == [special.eos, 17]
    if family in ("bart", "bert", "mt5", "t5", "t5 1.1"):
        assert written["pad_token_id"] == special.pad is not None
    if "t5" in family:
        assert written["decoder_start_token_id"] == special.pad
    if family.startswith(("bart", "transformer")):
        assert written["forced_eos_token_id"] == special.eos
    for file in tokenizer.files:
        assert (folder / file.path.name).read_bytes() == file.path.read_bytes()
    loaded, report = type(theirs).from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(loaded.eval()), logits_of(model))


@pytest.mark.parametrize(("arch", "task"), [("bart_tiny", "denoising"), ("bert_tiny", "masked_lm")])
def test_a_tokenizer_with_sep_alone_names_it_as_the_end(tmp_path, arch, task) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b")) + "\n")
    tokenizer = build_tokenizer("bert_wordpiece", path=tmp_path / "vocab.txt")
    assert tokenizer.special.eos is None
    tokenizer.save(tmp_path / "tokenizer")
    model = build_model(arch, vocab_size=7, num_layers=1)
    config = {"model": {"_name": arch.split("_")[0], **asdict(model.config)}, "task": {"_name": task}}
    trained, folder = tmp_path / "trained", tmp_path / "tokenizer"
    save_checkpoint(trained, model=model, trainer_state={}, config=config, tokenizer_folder=folder)
    written = json.loads((convert_back(trained, tmp_path / "hf") / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (2, 3, 0)
    assert written.get("forced_eos_token_id") == (3 if arch == "bart_tiny" else None)


def test_tensors_go_over_one_at_a_time(published, tmp_path) -> None:
    sizes = [tensor.nbytes for tensor in load_file(published / "model.safetensors").values()]
    for step in (
        lambda: convert(published, tmp_path / "ours"),
        lambda: convert_back(tmp_path / "ours", tmp_path / "b"),
    ):
        with Held() as held:
            step()
        assert max(sizes) <= held.peak <= 4 * max(sizes) < sum(sizes)  # as it is read, turned round, as bytes


def test_the_command_there_and_back(published, tmp_path, capfd) -> None:
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert main(["convert", "--from", "hf", str(published), ours]) == 0
    assert "it has no tokenizer and cannot read text" in capfd.readouterr().out
    assert main(["convert", "--to", "hf", ours, back]) == 0
    assert contents(Path(back)) == contents(published)
    assert main(["inspect", str(published)]) == 2
    assert f"ftk-checkpoint convert --from hf {published} DST" in capfd.readouterr().err
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).save(str(Path(back) / "tokenizer.json"))
    assert main(["convert", "--from", "hf", back, "--to", "ftk", ours, "--overwrite"]) == 0
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
    "bart_large": {  # as that for summaries
        **{"_num_labels": 3, "activation_dropout": 0.0, "activation_function": "gelu", "add_final_layer_norm": False},
        **{"architectures": ["BartForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 0},
        **{"classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 1024, "decoder_attention_heads": 16},
        **{"decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0, "decoder_layers": 12, "decoder_start_token_id": 2},
        **{"dropout": 0.1, "early_stopping": True, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096},
        **{"encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 2, "extra_pos_embeddings": 2},
        **{"force_bos_token_to_be_generated": True, "forced_eos_token_id": 2, "gradient_checkpointing": False},
        **{"id2label": {"0": "LABEL_0"}, "init_std": 0.02, "is_encoder_decoder": True, "label2id": {"LABEL_0": 0}},
        **{"length_penalty": 2.0, "max_length": 142, "max_position_embeddings": 1024, "min_length": 56},
        **{"model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": False, "normalize_embedding": True},
        **{"num_beams": 4, "num_hidden_layers": 12, "output_past": True, "pad_token_id": 1, "prefix": " "},
        **{"add_bias_logits": False, "scale_embedding": False, "static_position_embeddings": False},
        **{"task_specific_params": {"summarization": {"num_beams": 4}}, "use_cache": True, "vocab_size": 50264},
    },
    "bert_base_chinese": {
        **{"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "directionality": "bidi"},
        **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02},
        **{"intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert"},
        **{"num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "pooler_fc_size": 768},
        **{"pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128},
        **{"pooler_type": "first_token_transform", "type_vocab_size": 2, "vocab_size": 21128},
    },
    "t5_small": {
        **{"architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512},
        **{"decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0},
        **{"is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512},
        **{"num_heads": 8, "num_layers": 6, "output_past": True, "pad_token_id": 0, "vocab_size": 32128},
        **{"relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"num_beams": 4}}},
    },
    "transformer_wmt_en_de_big": {  # as those of WMT 2019, in an older file
        **{"activation_dropout": 0.0, "activation_function": "relu", "add_bias_logits": False},
        **{"add_final_layer_norm": False, "architectures": ["FSMTForConditionalGeneration"], "attention_dropout": 0.1},
        **{"bos_token_id": 0, "classif_dropout": 0.0, "d_model": 1024, "decoder_attention_heads": 16},
        **{"decoder_ffn_dim": 4096, "decoder_layerdrop": 0, "decoder_layers": 6, "dropout": 0.2},
        **{"early_stopping": False, "encoder_attention_heads": 16, "encoder_emd_tok_dim": 1024},
        **{"encoder_ffn_dim": 8192, "encoder_layerdrop": 0, "encoder_layers": 6, "eos_token_id": 2},
        **{"extra_pos_embeddings": 2, "init_std": 0.02, "is_encoder_decoder": True, "langs": ["en", "de"]},
        **{"length_penalty": 1.0, "max_position_embeddings": 1024, "model_type": "fsmt", "normalize_before": False},
        **{"normalize_embedding": False, "num_beams": 5, "num_hidden_layers": 6, "pad_token_id": 1},
        **{"scale_embedding": True, "src_vocab_size": 42024, "static_position_embeddings": True},
        **{"tgt_vocab_size": 42024, "tie_word_embeddings": False},
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

OF_FILES: dict[str, dict[str, Any]] = {
    "bart_large": {"decoder_start_token": 2, "forced_first_token": 0, "vocab_size": 50264},
    "t5_small": {"decoder_start_token": 0},
    "transformer_wmt_en_de_big": {
        **{"decoder_start_token": 2, "dropout": 0.2, "embedding_dropout": 0.2, "ffn_hidden_size": 8192},
        **{"decoder_ffn_hidden_size": 4096, "source_vocab_size": 42024, "vocab_size": 42024},
        **{"share_embeddings": "none", "first_position": 2},
    },
}
"""What a file has and its preset has not."""


@pytest.mark.parametrize("arch", PUBLISHED)
def test_a_published_config_is_that_of_its_preset(arch) -> None:
    theirs = PUBLISHED[arch]
    (converter,) = [each for name in HF_MODELS if (each := HF_MODELS.get(name).target()).matches(theirs)]
    found, preset = converter.config_from(theirs), replace(model_config(arch)[1], **OF_FILES.get(arch, {}))
    assert type(found) is type(preset)
    widths = ("kv_heads", "head_size", "inner_size", "embedding_size", "layer_windows")
    either = ("ffn_hidden_size", "num_decoder_layers", "word_embedding_size", "activation", "attention_window")
    given = [field.name for field in fields(found) if field.name not in either]
    for name in (*widths, *given, *({"decoder_layers", "decoder_inner_size"} & {*dir(found)})):
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
        expected, found = theirs(tokens()).last_hidden_state, model.hidden_states(tokens())
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    again = ftk.load_model(convert(tmp_path / "bare", tmp_path / "ours"))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert float(model.lm_head.dense.weight.detach().std()) == pytest.approx(model.config.init_std, rel=0.2)
    back = convert_back(tmp_path / "ours", tmp_path / "back")
    whole = getattr(transformers, f"{kind}ForMaskedLM").from_pretrained(back).eval()
    with torch.no_grad():
        assert (model(tokens()) - whole(tokens()).logits).abs().max() <= 1e-5


def test_a_pooler_that_no_output_reads_is_left_out(publish, tmp_path) -> None:
    """As in published files of masked language models that were not trained on pairs."""
    shutil.copytree(publish("bert pairs"), tmp_path / "source")
    rewrite(tmp_path / "source", lambda tensors: {name: one for name, one in tensors.items() if "seq_rel" not in name})
    model = ftk.load_model(tmp_path / "source")
    assert model.head.next_sentence is None
    with torch.no_grad():
        expected = drawn("bert pairs")(tokens()).prediction_logits
        assert (model(tokens()) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("family", "change"), OLD_SPELLINGS.values(), ids=OLD_SPELLINGS, scope="function")
def test_an_older_config_is_of_the_same_model(publish, family, change, tmp_path) -> None:
    shutil.copytree(publish(family), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(change(config)))
    with torch.no_grad():
        found = ftk.load_model(convert(tmp_path / "source", tmp_path / "ours"))(tokens())
        expected = drawn(family)(tokens()).logits
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


# As releases 2 to 4 wrote them, or as other programs do; SmolLM2's files have `is_llama_config`.
COMMON_KEYS: dict[str, Any] = {
    **{"add_cross_attention": False, "is_decoder": False, "tie_encoder_decoder": False, "pruned_heads": {}},
    **{"bad_words_ids": None, "forced_bos_token_id": None, "suppress_tokens": None, "sliding_window": None},
    **{"num_labels": 2, "_num_labels": 1, "torchscript": False, "use_bfloat16": False, "num_beam_groups": 1},
    **{"unsloth_version": "2024.9", "is_llama_config": True, "output_scores": False, "mask_token_id": 3},
}


@pytest.mark.parametrize("family", ["gpt2", "llama", "roberta", "t5"])
def test_keys_that_every_config_may_have_change_nothing(publish, family) -> None:
    config = json.loads((publish(family) / "config.json").read_text())
    converter = HF_MODELS.get(family).target()
    assert converter.config_from(COMMON_KEYS | config) == converter.config_from(config)


# What older pages say to add to a config.json, which keeps its max_position_embeddings; and yarn without a factor:
# its max_position_embeddings, its scaling, more keys, our max_positions.
STRETCHED: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "a factor": (64, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, {}, 128),
    "none": (64, {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}, {}, 64),
    "no rounding": (64, {"rope_type": "yarn", "factor": 4.0, "truncate": None}, {}, 256),
    "linear": (16, {"type": "linear", "factor": 4.0}, {}, 64),  # the shape of vicuna-7b-v1.5-16k, as is the next one
    "linear, FastChat's length": (16, {"type": "linear", "factor": 4.0}, {"max_sequence_length": 64}, 64),
    "linear, a broken factor": (19, {"rope_type": "linear", "factor": 2.3}, {}, 43),
}


@pytest.mark.parametrize(("length", "rope", "more", "positions"), STRETCHED.values(), ids=STRETCHED)
def test_a_model_reads_texts_as_long_as_its_scaling_stretches_them(
    publish, length, rope, more, positions, tmp_path
) -> None:
    source = shutil.copytree(publish("llama"), tmp_path / "source")
    own = {"max_position_embeddings": length, "rope_scaling": rope}
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | own | more))
    model, theirs = ftk.load_model(source), transformers.AutoModelForCausalLM.from_pretrained(source)
    assert (model.config.max_positions, model.config.rope_factor) == (positions, rope["factor"] or 4.0)
    with torch.no_grad():
        expected, found = theirs(tokens()).logits, model(tokens())
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert contents(convert_back(convert(source, tmp_path / "ours"), tmp_path / "back")) == contents(source)
    converter = HF_MODELS.get("llama").target()
    assert converter.config_from(converter.config_to(model.config)).max_positions == positions


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


def test_a_folder_is_described_several_times_and_an_old_pickle_read_once(publish, tmp_path, monkeypatch) -> None:
    source = shutil.copytree(publish("bert pairs"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    reads, read = [], huggingface.read_state_dict
    monkeypatch.setattr(huggingface, "read_state_dict", lambda path: reads.append(path) or read(path))
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
