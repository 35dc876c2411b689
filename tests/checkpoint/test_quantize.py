"""Quantised checkpoints: written by the command, loaded as any other, and refused where they do not belong."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

import ftk
from ftk.checkpoint import load_model_tensors, verify
from ftk.checkpoint.quantize import quantization_of
from ftk.errors import UserError
from ftk.modules.quantized_linear import Int4Linear, Int8Linear, Int8TiedEmbedding
from ftk_cli.checkpoint import main


def logits(path):
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        return ftk.load_model(path)(tokens)


@pytest.mark.parametrize(
    ("flags", "kind", "embedding", "most_error", "share"),
    [
        (["--quantize", "int8"], Int8Linear, Int8TiedEmbedding, 0.03, 0.4),
        (["--quantize", "int4"], Int4Linear, Int8TiedEmbedding, 0.25, 0.35),
        (["--quantize", "int4", "--group-size", "64"], Int4Linear, Int8TiedEmbedding, 0.25, 0.33),
        (
            ["--quantize", "int8", "--no-quantize-embedding"],
            Int8Linear,
            ftk.modules.embeddings.TiedEmbedding,
            0.03,
            0.5,
        ),
    ],
    ids=["int8", "int4", "int4-64", "int8-linears"],
)
def test_quantized_checkpoint_is_small_and_loads_as_any_other(
    trained, tmp_path, capsys, flags, kind, embedding, most_error, share
):
    output = tmp_path / "small"
    assert main(["export", str(trained), str(output), *flags]) == 0
    assert f"rounded to {flags[1]}" in capsys.readouterr().out
    assert verify(output) == []
    model = ftk.load_model(output)
    assert {type(layer.attention.qkv) for layer in model.layers} == {kind}
    assert isinstance(model.token_embedding, embedding)
    wanted = logits(trained)
    assert 0 < ((logits(output) - wanted).norm() / wanted.norm()).item() < most_error
    sizes = [sum(file.stat().st_size for file in (path / "model").glob("*.safetensors")) for path in (output, trained)]
    assert sizes[0] < share * sizes[1]
    assert main(["inspect", str(output)]) == 0
    assert f"quantised  weights {flags[1]}" in capsys.readouterr().out


def test_moving_average_is_what_is_rounded(trained, tmp_path):
    main(["export", str(trained), str(tmp_path / "average"), "--quantize", "int8", "--ema"])
    main(["export", str(trained), str(tmp_path / "weights"), "--quantize", "int8"])
    average, weights = (load_model_tensors(tmp_path / name) for name in ("average", "weights"))
    name = "layers.0.feed_forward.inner"
    assert torch.equal(average[f"{name}.quantized_weight"], weights[f"{name}.quantized_weight"])
    assert torch.equal(average[f"{name}.weight_scale"], weights[f"{name}.weight_scale"] * 0.5)


def test_a_quantized_checkpoint_is_exported_again_as_it_is(trained, tmp_path):
    main(["export", str(trained), str(tmp_path / "one"), "--quantize", "int4"])
    main(["export", str(tmp_path / "one"), str(tmp_path / "two")])
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "two"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "{}", "again", "--quantize", "int8"],
        ["average", "--inputs", "{}", "{trained}", "--output", "mean"],
        ["convert", "{}", "original", "--to", "glm"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_needs_the_trained_weights_refuses_rounded_ones(trained, tmp_path, capsys, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["export", str(trained), "small", "--quantize", "int8"])
    assert main([argument.format(tmp_path / "small", trained=trained) for argument in arguments]) == 2
    assert "is quantised" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantize", "int4", "--group-size", "48"], "--group-size is 48"),
        (["--quantize", "int4", "--group-size", "128"], "groups of 128 inputs, but a layer has 64"),
        (["--group-size", "64"], "has no effect without --quantize int4"),
        (["--no-quantize-embedding"], "--no-quantize-embedding has no effect without --quantize;"),
        (["--quantize", "int2"], "int2"),
    ],
)
def test_options_that_do_not_fit_are_refused(trained, tmp_path, capsys, flags, message):
    try:
        status = main(["export", str(trained), str(tmp_path / "small"), *flags])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_config_says_how_and_an_unknown_way_is_a_clear_error(trained, tmp_path):
    main(["export", str(trained), str(tmp_path / "small"), "--quantize", "int8"])
    config = yaml.safe_load((tmp_path / "small" / "config.yaml").read_text())
    assert config["quantization"] == {"weights": "int8", "embedding": True}
    for section in ({"weights": "int2"}, {"bits": 3}, json.loads("[1]")):
        with pytest.raises(UserError, match="quantization"):
            quantization_of({"quantization": section})
