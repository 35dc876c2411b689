"""Models of each family of Hugging Face's compute the same here, and come back byte for byte; a new one is a row of
`hf_models`."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

import ftk
from ftk.checkpoint import read_config, save_checkpoint, verify
from ftk.checkpoint.hf_classifier import renames_of
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Framing, Request
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.models import build_model
from ftk.models.renames import LazyTensors, renamed
from ftk.modules.norms import RMSNorm
from ftk.registry import HF_MODELS
from ftk_cli.checkpoint import main
from tests.checkpoint.hf_models import FAMILIES, contents, convert, convert_back, drawn, older_norms, rewrite, tokens
from tests.held import Held
from tests.records import assert_near, assert_same_weights
from tests.tiers import slow_but

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")


ENCODERS = [name for name in FAMILIES if name.startswith(("bert", "longformer", "roberta", "xlm", "camembert"))]


ENCODER_DECODERS = [name for name in FAMILIES if name.startswith(("bart", "mt5", "t5", "transformer"))]


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
        assert_near(logits_of(ftk.load_model(ours)), logits_of(theirs))


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
    tied = converter.tied(model.config)  # their names of what is one tensor may be others
    renames = renames_of(converter, None, model.config)
    found = renamed(LazyTensors.of(gradients), renames, model.config, back=True).all()
    read = {name: one.grad for name, one in theirs.named_parameters() if one.requires_grad and one.grad is not None}
    expected = {tied.get(name, name): gradient for name, gradient in read.items()}
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
        assert_near(model(padded, **more, **padding)[scored], theirs(padded, **given).logits[scored])


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ENCODERS], indirect=True)
def test_answers_are_those_of_transformers(theirs, ours, family, beam) -> None:
    """Greedy and beam search, with prompts of several lengths side by side."""
    prompts = [tokens()[row, : 3 + 4 * row].tolist() for row in range(3)]
    options = GenerationConfig(beam=beam, nbest=beam, max_len=12)
    requests = [Request(prompt, options) for prompt in prompts]
    model, end = ftk.load_model(ours), theirs.generation_config.eos_token_id
    framing: Framing = Continuation([end], 64)
    if family in ENCODER_DECODERS:
        framing = SourceToTarget([end], [model.config.decoder_start_token])
    found = engine_for(model, framing, requests, batch_size=2).answers(requests)
    searched = {"num_beams": beam, "num_return_sequences": beam, "length_penalty": 1.0, "early_stopping": True}
    for prompt, (best,) in zip(prompts, found, strict=True):
        flags = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **(searched if beam > 1 else {})}
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
        model = ftk.load_model(publish(family))
        assert_near(logits_of(model), logits_of(drawn(family)))
    assert model.config.tie_embeddings == ("own head" not in family)
    assert model.config.scale_outputs == (family == "t5 own head, scaled")


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if "shared.weight" in tensors:  # T5's names have none, and its one matrix may have either name
        tied = "lm_head.weight" not in tensors
        return {name.replace("shared", "lm_head") if tied else name: value for name, value in tensors.items()}
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


@pytest.mark.parametrize("form", [None, "halves in parts", without_prefix, with_head])
def test_a_folder_comes_back_byte_for_byte(theirs, published, tmp_path, form) -> None:
    source = tmp_path / "source"
    if form == "halves in parts":
        copy.deepcopy(theirs).half().save_pretrained(source, max_shard_size="10KB")
        assert (source / "model.safetensors.index.json").exists()
    else:
        shutil.copytree(published, source)
    if callable(form):
        rewrite(source, form)
    (source / "merges.txt").write_text("a b\n")
    back = convert_back(convert(source, tmp_path / "ours"), tmp_path / "back")
    assert contents(back) == contents(source)


def masks_of(family: str) -> dict[str, torch.Tensor]:
    """What the first files of a family have among the weights, which are no parameters."""
    names = HF_MODELS.get(family.split()[0]).target().buffers
    return {name.replace("*", "0"): torch.ones(1, 1, 64, 64) for name in names}


def test_older_files_load_as_the_newer(theirs, published, ours, tmp_path, family) -> None:
    """Pickled weights in several files with the head's copy and with masks."""
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(published / "config.json", source)
    state = theirs.state_dict()
    masks = masks_of(family)
    torch.save(state, source / "pytorch_model-1.bin")
    torch.save(masks, source / "pytorch_model-2.bin")
    files = dict.fromkeys(state, "pytorch_model-1.bin") | dict.fromkeys(masks, "pytorch_model-2.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert_same_weights(convert(source, tmp_path / "older"), ours)
    back = convert_back(tmp_path / "older", tmp_path / "back")
    assert load_file(back / "model.safetensors").keys() == load_file(published / "model.safetensors").keys()


def test_masks_among_the_weights_are_left_out_of_what_is_written_back(published, ours, tmp_path, family) -> None:
    """As in the files of the first GPT-2, which are of the trunk alone."""
    source = tmp_path / "source"
    shutil.copytree(published, source)
    masks = masks_of(family)
    rewrite(source, lambda tensors: without_prefix({**tensors, **masks}))
    back = convert_back(convert(source, tmp_path / "ours"), tmp_path / "back")
    expected = published if masks else source
    assert load_file(back / "model.safetensors").keys() == load_file(expected / "model.safetensors").keys()
    assert (back / "config.json").read_bytes() == (published / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("family", "size"),
    slow_but([*product(FAMILIES, ["5GB"]), ("gpt2", "20KB"), ("t5", "20KB")], product(FAMILIES, ["5GB", "20KB"])),
    indirect=["family"],
    scope="module",
)
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
    if family.startswith(("camembert", "longformer", "roberta", "xlm")):  # it says where positions begin
        assert written["pad_token_id"] == 1
    elif not family.startswith("transformer"):
        assert written["pad_token_id"] == special.pad is not None
    assert special.bos is None
    assert written["bos_token_id"] == special.cls != special.eos
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


@pytest.mark.parametrize("family", ["longformer", "roberta"], scope="module")
def test_older_names_of_norms_are_todays(published, ours, tmp_path) -> None:
    source = shutil.copytree(published, tmp_path / "source")
    older_norms(source)
    assert_same_weights(convert(source, tmp_path / "older"), ours)


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
