"""CPM-1 and CPM-2 of ModelCenter against a forward pass written out from its code, with every weight drawn at random.

Its code: OpenBMB/ModelCenter 1.0.2, model_center/model/cpm1.py, cpm2.py and model_center/layer, which was run once on
the same models; what is published: configs/cpm1/cpm1-large/config.json and configs/cpm2/cpm2-large/config.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ftk
from ftk.checkpoint import load_model_tensors
from ftk.checkpoint.layout import form_of
from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.models import build_model
from ftk.models.cpm.form import ModelCenterConfig
from ftk.models.cpm.model_center import ModelCenter
from ftk.models.renames import LazyTensors
from ftk.modules.position_bias import PositionBias
from ftk.registry import TASKS
from ftk.tokenizers import SpecialTokens
from ftk_cli.checkpoint import main as checkpoint
from tests.small_run import save_model

SHAPE = {  # the roots of 40, 48 and 56 are no powers of two
    **{"vocab_size": 99, "dim_model": 40, "num_heads": 4, "dim_head": 12, "dim_ff": 56, "norm_eps": 1e-6},
    **{"position_bias_num_buckets": 8, "position_bias_max_distance": 20, "dropout_p": 0.0},
}
KINDS = {  # as in the published files, which have keys of initial values besides
    **{"pos_bias_type": "relative", "norm_bias": False, "att_bias": False, "ffn_bias": False, "proj_bias": False},
    **{"ffn_activate_fn": "gated_gelu", "att_mask_value": "-inf", "int8": False, "emb_init_std": 1.0},
}
SCALED = {"length_scale": True, "attn_scale": True, "half": True}
PLAIN = {"length_scale": False, "attn_scale": False, "half": False}
CPM1 = SHAPE | {"num_layers": 2} | KINDS
CPM2 = SHAPE | {"num_encoder_layers": 2, "num_decoder_layers": 3} | KINDS
CONFIGS: dict[str, dict[str, Any]] = {
    "cpm1": CPM1 | SCALED | {"tied": True},  # as published
    "cpm1 without factors": CPM1 | PLAIN | {"tied": False},
    "cpm1 of one factor": CPM1 | SCALED | {"attn_scale": False, "tied": False},
    "cpm2": CPM2 | SCALED,  # as published
    "cpm2 without factors": CPM2 | PLAIN,
}


def weights_for(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random ones by ModelCenter's names, of about the size that its code draws them in."""
    hidden, inner, width = config["dim_model"], config["dim_ff"], config["num_heads"] * config["dim_head"]
    generator = torch.Generator().manual_seed(1)
    made: dict[str, Tensor] = {}

    def draw(name: str, *shape: int, is_scaled: bool = True) -> None:
        std = shape[-1] ** -0.5 if is_scaled and not config["length_scale"] else 1.0
        made[name] = torch.randn(shape, generator=generator) * std

    def norm(name: str) -> None:
        made[f"{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)

    def attention(name: str) -> None:
        norm(f"{name}.layernorm_before_attention")
        for part in "qkv":
            draw(f"{name}.self_attention.project_{part}.weight", width, hidden)
        draw(f"{name}.self_attention.attention_out.weight", hidden, width)

    def stack(name: str, layers: int, is_decoder: bool = False) -> None:
        for layer in (f"{name}.layers.{number}" for number in range(layers)):
            attention(f"{layer}.self_att")
            if is_decoder:
                attention(f"{layer}.cross_att")
            norm(f"{layer}.ffn.layernorm_before_ffn")
            draw(f"{layer}.ffn.ffn.w_in.w_0.weight", inner, hidden)
            draw(f"{layer}.ffn.ffn.w_in.w_1.weight", inner, hidden)
            draw(f"{layer}.ffn.ffn.w_out.weight", hidden, inner)
        norm(f"{name}.output_layernorm")

    is_pair = "num_encoder_layers" in config
    stack("encoder", config["num_encoder_layers" if is_pair else "num_layers"])
    if is_pair:
        stack("decoder", config["num_decoder_layers"], is_decoder=True)
    draw("input_embedding.weight", config["vocab_size"], hidden, is_scaled=not is_pair)
    for table in ("position_bias_enc", "position_bias_dec") if is_pair else ("position_bias",):
        draw(
            f"{table}.relative_attention_bias",
            config["position_bias_num_buckets"],
            config["num_heads"],
            is_scaled=False,
        )
    if not config.get("tied"):
        draw("output_projection.weight", config["vocab_size"], hidden)
    dtype = torch.float16 if config["half"] else torch.float32
    return {name: value.to(dtype) for name, value in made.items()}


def buckets(num_tokens: int, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Row of the table for each query and key, [T, T], as RelativePositionEmbedding has it."""
    part = num_buckets // 2 if bidirectional else num_buckets
    exact = part // 2
    behind = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None, :]
    distance = behind.abs()
    share = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    wide = (share.clamp(0, 0.9999) * (part - exact)).long() + exact
    places = torch.where(distance < exact, distance, wide)
    return torch.where(behind < 0, places + part if bidirectional else torch.zeros_like(places), places)


class Plain:
    """The published computation step by step, in float64."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = {name: value.double() for name, value in weights.items()}

    def linear(self, hidden: Tensor, name: str) -> Tensor:
        matrix = self.weights[f"{name}.weight"]
        product = hidden @ matrix.T
        return product / math.sqrt(matrix.size(1)) if self.config["length_scale"] else product

    def norm(self, hidden: Tensor, name: str) -> Tensor:
        scaled = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.config["norm_eps"])
        return scaled * self.weights[f"{name}.weight"]

    def attention(self, name: str, hidden: Tensor, states: Tensor | None, mask: Tensor, bias: Tensor | None) -> Tensor:
        heads = (self.config["num_heads"], self.config["dim_head"])
        normed = self.norm(hidden, f"{name}.layernorm_before_attention")
        read = normed if states is None else states
        query, key, value = (
            self.linear(each, f"{name}.self_attention.project_{part}").unflatten(-1, heads).transpose(1, 2)
            for each, part in ((normed, "q"), (read, "k"), (read, "v"))
        )
        scores = query @ key.transpose(2, 3)  # [B, A, T, S]
        if self.config["attn_scale"]:
            scores = scores / math.sqrt(heads[1])
        if bias is not None:
            scores = scores + bias
        mixed = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1) @ value
        return hidden + self.linear(mixed.transpose(1, 2).flatten(2), f"{name}.self_attention.attention_out")

    def stack(self, name: str, hidden: Tensor, mask: Tensor, bias: Tensor, *cross: Tensor) -> Tensor:
        layers = {key.split(".")[2] for key in self.weights if key.startswith(f"{name}.layers.")}
        for layer in (f"{name}.layers.{number}" for number in sorted(layers)):
            hidden = self.attention(f"{layer}.self_att", hidden, None, mask, bias)
            if cross:
                hidden = self.attention(f"{layer}.cross_att", hidden, *cross, None)
            normed = self.norm(hidden, f"{layer}.ffn.layernorm_before_ffn")
            gate, inner = (self.linear(normed, f"{layer}.ffn.ffn.w_in.w_{place}") for place in (0, 1))
            hidden = hidden + self.linear(F.gelu(gate) * inner, f"{layer}.ffn.ffn.w_out")
        return self.norm(hidden, f"{name}.output_layernorm")

    def bias(self, name: str, num_tokens: int, bidirectional: bool) -> Tensor:
        shape = (self.config["position_bias_num_buckets"], self.config["position_bias_max_distance"])
        table = self.weights[f"{name}.relative_attention_bias"]
        return table[buckets(num_tokens, *shape, bidirectional)].permute(2, 0, 1)

    def cpm1(self, tokens: Tensor, context: Tensor, span: Tensor) -> Tensor:
        """tokens int64, context bool and span int64, [B, T] each -> logits [B, T, V]"""
        embedding = self.weights["input_embedding.weight"]
        scale = embedding.size(1) ** -0.5 if self.config["length_scale"] else 1.0
        num_tokens = tokens.size(1)
        causal = torch.ones(num_tokens, num_tokens).tril().bool()
        mask = context[:, None, :] | (~context[:, :, None] & causal)
        mask = mask & (span[:, None, :] == span[:, :, None])
        bias = self.bias("position_bias", num_tokens, bidirectional=True)
        hidden = self.stack("encoder", embedding[tokens] * scale, mask, bias)
        return (hidden * scale) @ embedding.T if self.config["tied"] else self.linear(hidden, "output_projection")

    def cpm2(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """source [B, S], lengths [B], target [B, T], int64 -> logits [B, T, V]"""
        embedding = self.weights["input_embedding.weight"]
        seen = (torch.arange(source.size(1)) < lengths[:, None])[:, None, :]  # [B, 1, S]
        causal = torch.ones(1, target.size(1), target.size(1)).tril().bool()
        bias = self.bias("position_bias_enc", source.size(1), bidirectional=True)
        states = self.stack("encoder", embedding[source], seen, bias)
        bias = self.bias("position_bias_dec", target.size(1), bidirectional=False)
        return self.linear(self.stack("decoder", embedding[target], causal, bias, states, seen), "output_projection")


def publish(folder: Path, config: dict[str, Any]) -> Path:
    """A folder as ModelCenter has it."""
    folder.mkdir()
    torch.save(weights_for(config), folder / "pytorch_model.pt")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "vocab.txt").write_text("<unk>\n<s>\n")
    return folder


@pytest.fixture(params=CONFIGS)
def published(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return publish(tmp_path / "published", CONFIGS[request.param])


def plain_of(folder: Path) -> Plain:
    weights = torch.load(folder / "pytorch_model.pt", weights_only=True)
    return Plain(json.loads((folder / "config.json").read_text()), weights)


def convert(*arguments: Any) -> int:
    return checkpoint(["convert", *map(str, arguments)])


def tokens(*shape: int) -> Tensor:
    return torch.randint(99, shape, generator=torch.Generator().manual_seed(2))


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def assert_computes(model: Any, plain: Plain) -> None:
    """The logits are those of the published computation."""
    if "decoder_tokens" in model.INPUTS:
        source, lengths, target = tokens(3, 30), torch.tensor([30, 17, 4]), tokens(3, 26)
        assert_near(model(source, lengths=lengths, decoder_tokens=target), plain.cpm2(source, lengths, target))
        return
    text, lengths = tokens(3, 30), torch.tensor([0, 11, 30])
    context, one = torch.arange(30) < lengths[:, None], torch.zeros(3, 30, dtype=torch.int64)
    assert_near(model(text, context_length=lengths), plain.cpm1(text, context, one))
    spans = torch.arange(30).expand(3, 30) // torch.tensor([[7], [15], [22]])
    assert_near(model(text, document_ids=spans), plain.cpm1(text, torch.zeros_like(context), spans))
    together = model(text, document_ids=spans, context_length=lengths)
    assert_near(together, plain.cpm1(text, context, spans))


def test_a_folder_of_modelcenter_computes_what_its_code_computes_and_comes_back(
    published: Path, tmp_path: Path
) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert_computes(ftk.load_model(published), plain_of(published))
    assert convert("--from", "modelcenter", published, ours) == 0
    assert_computes(ftk.load_model(ours), plain_of(published))
    assert convert("--to", "modelcenter", ours, back) == 0
    for name in ("config.json", "vocab.txt"):
        assert (back / name).read_bytes() == (published / name).read_bytes()
    found, expected = (torch.load(folder / "pytorch_model.pt", weights_only=True) for folder in (back, published))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        if value.dtype == torch.float16:  # of float32 the last bit may change
            assert torch.equal(found[name], value), name
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_a_folder_with_hugging_faces_weights_is_not_modelcenters(name: str, tmp_path: Path) -> None:
    folder = publish(tmp_path / "published", CONFIGS["cpm1"])
    assert form_of(folder) == "modelcenter"
    (folder / name).write_bytes(b"")
    assert form_of(folder) == "hf"


def test_a_vocabulary_of_another_size_and_a_tokenizer_are_not_written(tmp_path: Path, caplog: Any) -> None:
    form, (before, after) = ModelCenter(ModelCenterConfig()), (tmp_path / "before", tmp_path / "after")
    contents = form.read(publish(tmp_path / "published", CONFIGS["cpm1"]))
    for folder, rows in ((before, 99), (after, 104)):
        folder.mkdir()
        model = build_model("cpm1", **dataclasses.asdict(contents.config) | {"vocab_size": rows})
        tensors = LazyTensors.of(model.state_dict())
        grown = dataclasses.replace(contents, config=model.config, tensors=tensors, tokenizer=tmp_path)
        form.write(folder, grown)
    assert (before / "vocab.txt").is_file()
    assert sorted(path.name for path in after.iterdir()) == ["config.json", "pytorch_model.pt"]
    assert "its tokenizer is not written" in caplog.text


def test_a_config_that_says_something_else_is_written_anew(tmp_path: Path) -> None:
    form = ModelCenter(ModelCenterConfig())
    contents = form.read(publish(tmp_path / "published", CONFIGS["cpm1"]))
    form.write(tmp_path, dataclasses.replace(contents, config=dataclasses.replace(contents.config, dropout=0.1)))
    assert json.loads((tmp_path / "config.json").read_text())["dropout_p"] == 0.1
    assert_computes(ftk.load_model(tmp_path), plain_of(tmp_path / "published"))


@pytest.mark.parametrize("arch", ["cpm1_tiny", "cpm2_tiny"])
def test_a_model_of_ftk_goes_out_with_the_published_factors(arch: str, tmp_path: Path) -> None:
    model = build_model(arch, vocab_size=99, num_layers=2).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    save_model(tmp_path / "ours", model)
    out = tmp_path / "out"
    assert convert("--to", "modelcenter", tmp_path / "ours", out, "--no-half") == 0
    plain = plain_of(out)
    assert plain.config.items() >= {"length_scale": True, "attn_scale": True, "half": False}.items()
    assert_computes(model, plain)
    assert convert("--to", "modelcenter", tmp_path / "ours", out, "--overwrite") == 0
    written = torch.load(out / "pytorch_model.pt", weights_only=True)
    assert {value.dtype for value in written.values()} == {torch.float16}
    assert (out / "pytorch_model.pt").stat().st_size < 3 * sum(value.numel() for value in written.values())


def test_factors_are_folded_in_float32_alone_where_there_are_some(tmp_path: Path) -> None:
    """Half precision would not come back; what has no factor stays as it is."""
    for name, plain in (("scaled", False), ("plain", True)):
        folder = publish(tmp_path / name, CONFIGS["cpm1"] | ({"length_scale": False} if plain else {}))
        assert convert("--from", "modelcenter", folder, tmp_path / f"{name}-ours") == 0
        tensors = load_model_tensors(tmp_path / f"{name}-ours")
        halves = {key for key, value in tensors.items() if value.dtype == torch.float16}
        norms = {key for key in tensors if "norm" in key}
        assert halves == (set(tensors) if plain else norms | {"position_bias.weight"})


@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "bidirectional"), [(64, 256, True), (32, 128, True), (32, 128, False)]
)
def test_distances_have_the_published_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    places = torch.arange(700)[None]
    found = PositionBias(num_buckets, 1, max_distance, bidirectional).places(places, places)[0]
    assert torch.equal(found, buckets(700, num_buckets, max_distance, bidirectional))


@torch.no_grad()
@pytest.mark.parametrize("sees_prompt", [True, False])
def test_a_cpm1_continues_what_it_sees_whole_or_from_left_to_right(sees_prompt: bool, tmp_path: Path) -> None:
    """With cached keys, prompts of several lengths side by side, as if all were read anew for each token."""
    folder = publish(tmp_path / "published", CONFIGS["cpm1"])
    model, plain = ftk.load_model(folder), plain_of(folder)
    assert model.config.sees_prompt
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], [90, 3, 90, 3, 90, 3, 90, 3, 90]]
    requests = [Request(prompt, GenerationConfig(max_len=12)) for prompt in prompts]
    framing = Continuation([98], model.config.max_positions, sees_prompt=sees_prompt)
    answers = engine_for(model, framing, requests, batch_size=2).answers(requests)
    for prompt, (best,) in zip(prompts, answers, strict=True):
        read = list(prompt)
        while len(read) < len(prompt) + 12 and read[-1] != 98:
            text = torch.tensor([read])
            context = torch.arange(len(read))[None] < len(prompt) * sees_prompt
            read.append(int(plain.cpm1(text, context, torch.zeros_like(text))[0, -1].argmax()))
        assert list(best.tokens) == [token for token in read[len(prompt) :] if token != 98]


def test_the_task_reads_prompts_as_the_model_asks_for() -> None:
    class Tokenizer:
        special = SpecialTokens(eos=98)
        prompt_prefix = ()

    framing = TASKS.get("causal_lm").target.framing
    for sees_prompt in (True, False):
        config = build_model("cpm1_tiny", num_layers=1, vocab_size=99, sees_prompt=sees_prompt).config
        frame = framing(Tokenizer, config).first(Request([1, 2, 3], GenerationConfig()))
        assert frame.prefix == (3 if sees_prompt else 0)


@torch.no_grad()
def test_a_cpm2_answers_as_if_all_were_read_anew_for_each_token(tmp_path: Path) -> None:
    folder = publish(tmp_path / "published", CONFIGS["cpm2"])
    model, plain = ftk.load_model(folder), plain_of(folder)
    assert model.config.decoder_start_token == 1
    sources = [[5, 6, 7, 8, 9, 10], [11, 12], [90, 3, 90, 3, 90, 3, 90, 3, 90]]
    requests = [Request(source, GenerationConfig(max_len=12)) for source in sources]
    found = engine_for(model, SourceToTarget([98], [1]), requests, batch_size=2).answers(requests)
    for source, (best,) in zip(sources, found, strict=True):
        target = [1]
        while len(target) < 13 and target[-1] != 98:
            logits = plain.cpm2(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]))
            target.append(int(logits[0, -1].argmax()))
        assert list(best.tokens) == [token for token in target[1:] if token != 98]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_bias_type": "rotary"}, "config.json: pos_bias_type is 'rotary'; ftk's model has 'relative'"),
        ({"ffn_activate_fn": "gated_relu"}, "ffn_activate_fn is 'gated_relu'; ftk's model has 'gated_gelu'"),
        ({"cls_head": 2}, "cls_head is 2; ftk's model has None"),
        ({"mask_modules": [0]}, "mask_modules is not known here"),
        ({"position_bias_num_buckets": 7}, "num_position_buckets is 7; it must be even"),
        ({"num_layers": 3}, "the weight that ftk calls layers.2.attention_norm.weight is missing"),
        ({"dim_ff": 57}, "layers.0.feed_forward.gate.weight is [56, 40]; [57, 40] fits the others"),
        ({"tied": False}, "the weight that ftk calls head.weight is missing"),
    ],
)
def test_another_network_is_refused(change: dict[str, Any], message: str, tmp_path: Path, capsys: Any) -> None:
    folder = publish(tmp_path / "published", CONFIGS["cpm1"])
    (folder / "config.json").write_text(json.dumps(CONFIGS["cpm1"] | change))
    assert convert("--from", "modelcenter", folder, tmp_path / "ours") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_damaged_folders_are_refused_in_one_line(tmp_path: Path, capsys: Any) -> None:
    folder = publish(tmp_path / "published", CONFIGS["cpm1"])

    def refused(source: Path) -> str:
        assert convert("--from", "modelcenter", source, tmp_path / "ours") == 2
        return capsys.readouterr().err

    weights = folder / "pytorch_model.pt"
    torch.save([1], weights)
    assert f"{weights}: is no state dict" in refused(folder)
    torch.save({"encoder.strange": torch.ones(1)}, weights)
    assert f"{weights}: parameter 'encoder.strange' has no place in the model" in refused(folder)
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "is not a mapping"),
        ("{}", "has neither num_layers nor num_en"),
    ):
        (folder / "config.json").write_text(content)
        assert f"{folder / 'config.json'}: {message}" in refused(folder)
    weights.unlink()
    assert f"{folder}: holds no pytorch_model.pt" in refused(folder)
    assert f"{tmp_path / 'absent'}: no such folder" in refused(tmp_path / "absent")


def test_what_has_no_such_form_is_not_written(tmp_path: Path, capsys: Any) -> None:
    save_model(tmp_path / "gpt2", build_model("gpt2_tiny", num_layers=1, vocab_size=99))
    assert convert("--to", "modelcenter", tmp_path / "gpt2", tmp_path / "out") == 2
    assert "its model is 'gpt2'; 'cpm1' and 'cpm2' have ModelCenter's form" in capsys.readouterr().err
    model = build_model("cpm1_tiny", num_layers=1, vocab_size=99)
    with torch.no_grad():
        model.layers[0].feed_forward.output.weight[0, 0] = 9000.0  # times the root of 172 inputs
    save_model(tmp_path / "cpm1", model)
    assert convert("--to", "modelcenter", tmp_path / "cpm1", tmp_path / "out") == 2
    assert "w_out.weight has numbers beyond float16; turn --half off to write float32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert convert("--to", "modelcenter", tmp_path / "cpm1", tmp_path / "out", "--no-half") == 0


def test_options_of_a_cpm2_are_those_that_it_has() -> None:
    with pytest.raises(UserError, match="cpm2_tiny has no field 'gated'"):
        build_model("cpm2_tiny", gated=False)
    with pytest.raises(UserError, match="num_position_buckets is 7; it must be even"):
        build_model("cpm1_tiny", num_position_buckets=7)
