"""Hugging Face's classifiers open with the same scores, come back byte for byte, and are written from ftk's own."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import asdict

import pytest
import torch

import ftk
from ftk.checkpoint import read_config, save_checkpoint
from ftk.checkpoint.adapter import adapter_files_of
from ftk.errors import UserError
from ftk.models import build_model
from ftk.modules.adapters import LoRAConfig
from ftk.modules.adapters.adapt import adapt
from ftk.modules.adapters.lora import LoRA
from ftk.modules.classifier import replace_head
from ftk.modules.heads import HeadShape
from ftk_cli.checkpoint import main as checkpoint
from tests.checkpoint.hf_models import contents, convert, convert_back, drawn, rewrite, tokens
from tests.small_run import save_model

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")

TASKS = {
    "bert labels": ("single_label", ["LABEL_0", "LABEL_1", "LABEL_2"]),
    "bert number": ("regression", ["stars"]),
    "bert words": ("token_labels", ["LABEL_0", "LABEL_1", "LABEL_2"]),
    "longformer labels": ("single_label", ["LABEL_0", "LABEL_1"]),
    "roberta labels": ("single_label", ["LABEL_0", "LABEL_1"]),
    "roberta words": ("token_labels", ["LABEL_0", "LABEL_1"]),
}


@torch.no_grad()
@pytest.mark.parametrize("family", TASKS)
def test_a_folder_opens_with_the_same_scores_and_comes_back_byte_for_byte(family, publish, tmp_path) -> None:
    folder = publish(family)
    expected = drawn(family)(tokens()).logits  # [B, K], of words [B, T, K]
    which = (slice(None), 0) if expected.dim() == 2 else ()
    model = ftk.load_model(folder, "cpu")
    # `transformers` makes the first token of a Longformer global.
    more = {"global_mask": (torch.arange(40) == 0).expand(3, -1).long()} if "global_mask" in model.INPUTS else {}
    found = model(tokens(), **more)[which]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    ours = convert(folder, tmp_path / "ours")
    assert torch.equal(ftk.load_model(ours, "cpu")(tokens(), **more)[which], found)
    task = read_config(ours)["task"]
    assert (task["kind"], task["labels"]) == TASKS[family]
    assert contents(convert_back(ours, tmp_path / "theirs")) == contents(folder)


@torch.no_grad()
def test_a_pooler_that_no_classifier_reads_is_left_out(publish, tmp_path) -> None:
    folder = shutil.copytree(publish("roberta labels"), tmp_path / "source")
    pooler = {"roberta.pooler.dense.weight": torch.ones(32, 32), "roberta.pooler.dense.bias": torch.ones(32)}
    rewrite(folder, lambda tensors: tensors | pooler)
    torch.testing.assert_close(
        ftk.load_model(folder, "cpu")(tokens())[:, 0], drawn("roberta labels")(tokens()).logits, rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", ["single_label", "token_labels", "regression"])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_classifier_of_our_own_is_one_of_theirs(name, kind, tmp_path) -> None:
    torch.manual_seed(1)
    shape = {"vocab_size": 99, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_positions": 62}
    model = build_model(name, **shape).eval()
    labels = {"regression": []}.get(kind, ["bad", "good"])
    replace_head(model, HeadShape(num_outputs=len(labels) or 1, head_layer=kind != "token_labels"))
    model.classifier.output.weight.normal_()
    task = {"_name": "classification", "kind": kind, "labels": labels, "label_field": "stars"}

    def save(folder, **options) -> None:
        save_model(tmp_path / folder, model, task=task | options, head=asdict(model.classifier.shape))

    save("ours")
    auto, other = {
        "single_label": (transformers.AutoModelForSequenceClassification, "token_labels"),
        "token_labels": (transformers.AutoModelForTokenClassification, "single_label"),
        "regression": (transformers.AutoModelForSequenceClassification, "token_labels"),
    }[kind]
    theirs = auto.from_pretrained(convert_back(tmp_path / "ours", tmp_path / "theirs"))
    assert theirs.config.id2label == dict(enumerate(labels or ["stars"]))
    scores = model(tokens())[(slice(None), 0) if kind != "token_labels" else ()]
    torch.testing.assert_close(theirs.eval()(tokens()).logits, scores, rtol=1e-4, atol=1e-5)
    save("other", kind=other)
    with pytest.raises(UserError, match="of one label or number from the first token of an encoder"):
        convert_back(tmp_path / "other", tmp_path / "none")


@torch.no_grad()
def changed(model) -> None:
    """Other adapters, and another head."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if ("lora" in name or "classifier" in name) and "original" not in name:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))


@torch.no_grad()
@pytest.mark.parametrize("opens", ["ftk", pytest.param("peft", marks=pytest.mark.slow)])
def test_an_adapter_and_a_head_have_the_names_of_their_classifier(opens, publish, tmp_path) -> None:
    folder = publish("bert labels")
    base = convert(folder, tmp_path / "base")
    model, config = ftk.load_model(base, "cpu"), dict(read_config(base))
    adapter = LoRA(LoRAConfig(lora_rank=2))
    adapt(model, adapter, seed=1)
    changed(model)
    config["adapter"] = {"_name": "lora", "lora_rank": 2}
    files = adapter_files_of(config)
    run = save_checkpoint(tmp_path / "run", model=model, trainer_state={}, config=config, adapter_files=files)
    assert checkpoint(["adapter", str(run), str(tmp_path / "alone"), "--names", "huggingface"]) == 0
    if opens == "peft":
        peft = pytest.importorskip("peft")
        theirs = peft.PeftModel.from_pretrained(deepcopy(drawn("bert labels")), tmp_path / "alone").eval()
        found = theirs(tokens()).logits
    else:
        found = ftk.load_model(tmp_path / "alone", "cpu", base=folder)(tokens())[:, 0]
    torch.testing.assert_close(found, model(tokens())[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("bias", ["none", "all"])
def test_a_classifier_that_peft_trained_opens_in_ftk(bias, publish, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    folder = publish("bert labels")
    # The type saves the classifier.
    config = peft.LoraConfig(target_modules=["query", "value"], task_type="SEQ_CLS", bias=bias)
    theirs = peft.get_peft_model(deepcopy(drawn("bert labels")), config)
    changed(theirs)
    theirs.save_pretrained(tmp_path / "peft")
    found = ftk.load_model(tmp_path / "peft", "cpu", base=folder)(tokens())[:, 0]
    torch.testing.assert_close(found, theirs.eval()(tokens()).logits, rtol=1e-4, atol=1e-4)
