"""Runs that train an adapter beside a frozen base: what moves, what is saved, and how their checkpoints are used."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
import yaml

import ftk
from ftk.checkpoint import load_model_tensors, read_config, verify
from ftk.checkpoint.adapter import FACTS, WEIGHTS
from ftk.checkpoint.index import read_index
from ftk.checkpoint.layout import ADAPTER_CONFIG, resolve_checkpoint
from ftk.config import compose
from ftk.errors import UserError
from ftk.files import sha256_of
from ftk.modules.adapters.adapt import is_part
from ftk.modules.adapters.lora import LoRA
from ftk.modules.quantized_linear import Int8Linear
from ftk.registry import ADAPTERS
from ftk.trainer.config import TrainConfig
from ftk_cli import evaluate, generate, interactive, validate
from ftk_cli.checkpoint import main as checkpoint
from ftk_cli.train import main as train
from tests.tiers import slow_but
from tests.trainer.test_glm_runs import glm_trainer
from tests.trainer.toy import assert_same

LORA = {
    "adapter___name": "lora",
    "adapter__lora_rank": 4,
    "adapter__lora_dropout": 0.1,
    "adapter__adapter_targets": ["layers.*.attention", "layers.*.feed_forward=2/4"],
    "optimizer__lr": 1e-2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, data_bin):
    """A run of a few updates, and its weights in int8."""
    folder = tmp_path_factory.mktemp("base")
    glm_trainer(data_bin, folder / "run", training__max_update=3).train()
    assert checkpoint(["export", str(folder / "run"), str(folder / "int8"), "--quantize", "int8"]) == 0
    return folder


def lora_trainer(base, data_bin, save_dir, source="run", **options):
    return glm_trainer(data_bin, save_dir, **{"checkpoint__finetune_from": str(base / source), **LORA, **options})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data_bin, base):
    trainer = lora_trainer(base, data_bin, tmp_path_factory.mktemp("lora") / "run")
    assert trainer.train().exit_code == 0
    return trainer


@pytest.fixture(scope="module")
def run(uninterrupted):
    return resolve_checkpoint(uninterrupted.run.checkpoints.folder / "checkpoint_8")


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "adapter"
    assert checkpoint(["adapter", str(run), str(folder)]) == 0
    return folder


def logits(path, **options):
    with torch.no_grad():
        return ftk.load_model(path, "cpu", **options)(torch.arange(40).reshape(2, 20))


def hashes(tensors):
    return {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors.items()
    }


# -- training -----------------------------------------------------------------------------------------------------


def test_the_base_stays_as_it_was_and_the_adapter_learns(uninterrupted, base, run, caplog, monkeypatch):
    before, after = hashes(load_model_tensors(base / "run")), hashes(load_model_tensors(run))
    parts = {name for name in after if is_part(name, LoRA.PARTS)}
    assert {name: after[name] for name in after.keys() - parts} == before
    assert len(parts) == 2 * 4 * uninterrupted.run.config.model.config.num_layers
    assert {name.rpartition("/")[0] for name in read_index(run / "optimizer").tensors} == parts
    shapes = {name: tuple(tensor.shape) for name, tensor in load_model_tensors(run).items()}
    assert shapes["layers.0.attention.qkv.lora_A.weight"][0] == 4
    assert shapes["layers.0.feed_forward.inner.lora_A.weight"][0] == 2
    assert all(tensor.abs().max() > 0 for name, tensor in load_model_tensors(run).items() if "lora_B" in name)
    trained = sum(p.numel() for p in uninterrupted.run.model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in uninterrupted.run.model.parameters())
    assert uninterrupted.run.num_trained == trained < 0.1 * whole
    caplog.set_level("INFO")
    monkeypatch.setattr(uninterrupted.run.state, "num_updates", 0)
    uninterrupted.run.describe()
    assert f"training {trained:,} of {whole:,} parameters ({100 * trained / whole:.2g} %)" in caplog.text


@pytest.mark.parametrize(
    ("signal_at", "options"), slow_but([(6, {})], [(6, {}), (9, {"adapter__weight_decomposed": True})]), ids=str
)
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, data_bin, base, uninterrupted, signal_at, options):
    whole = uninterrupted
    if options:
        whole = lora_trainer(base, data_bin, tmp_path / "whole", **options)
        whole.train()
    stopped = lora_trainer(base, data_bin, tmp_path / "run", signal_at=signal_at, **options)
    assert stopped.train().signal == "SIGTERM"
    resumed = lora_trainer(base, data_bin, tmp_path / "run", **options)
    assert resumed.state.num_updates == (signal_at + 1) // 2
    resumed.train()
    assert_same(resumed, whole)


KINDS = {
    "ia3": {"adapter___name": "ia3"},
    "prefix": {"adapter___name": "prefix", "adapter__num_virtual_tokens": 3, "adapter__prefix_hidden_size": 8},
}


@pytest.mark.parametrize("kind", slow_but(["prefix"], KINDS))
def test_other_kinds_are_trained_resumed_and_opened_alone(tmp_path, data_bin, base, kind):
    options = {"checkpoint__finetune_from": str(base / "run"), "optimizer__lr": 1e-2, **KINDS[kind]}
    options |= {"training__max_update": 4}
    whole = glm_trainer(data_bin, tmp_path / "whole", **options)
    assert whole.train().exit_code == 0
    stopped = glm_trainer(data_bin, tmp_path / "run", signal_at=3, **options)
    assert stopped.train().signal == "SIGTERM"
    resumed = glm_trainer(data_bin, tmp_path / "run", **options)
    resumed.train()
    assert_same(resumed, whole)
    before, after = load_model_tensors(base / "run"), load_model_tensors(tmp_path / "run")
    assert all(torch.equal(after[name], before[name]) for name in before)
    parts = {name for name in after if is_part(name, ADAPTERS.get(kind).target(None).PARTS)}
    assert parts == after.keys() - before.keys() != set()
    assert {name.rpartition("/")[0] for name in read_index(tmp_path / "run/checkpoint_4/optimizer").tensors} == parts
    model = whole.run.model.eval()
    with torch.no_grad():
        expected = model(torch.arange(40).reshape(2, 20))
    torch.testing.assert_close(logits(tmp_path / "run"), expected)
    assert (expected - logits(base / "run")).abs().max() > 1e-3
    assert checkpoint(["adapter", str(tmp_path / "run"), str(tmp_path / "alone")]) == 0
    torch.testing.assert_close(logits(tmp_path / "alone", base=base / "run"), expected)
    assert generate.main(["--path", str(tmp_path / "run"), "--input", str(_prompts(tmp_path)), "--device", "cpu"]) == 0


def _prompts(folder):
    (folder / "prompts").write_text("The model [gMASK]\nA run of [MASK] updates\n")
    return folder / "prompts"


def test_prompt_tokens_need_a_task_that_has_places_for_them(tmp_path, data_bin, base):
    options = {"checkpoint__finetune_from": str(base / "run"), "adapter___name": "p_tuning"}
    with pytest.raises(UserError, match="has no places for the prompt tokens of `adapter` p_tuning"):
        glm_trainer(data_bin, tmp_path / "run", **options)


@pytest.mark.parametrize("source", ["run", "int8"])
def test_the_first_loss_is_that_of_the_base(tmp_path, data_bin, base, source):
    options = {"training__max_update": 1, "adapter__lora_dropout": 0.0, "optimizer__lr": 0.0}
    trainer = lora_trainer(base, data_bin, tmp_path / "run", source, **options)
    trainer.train()
    assert torch.equal(logits(tmp_path / "run"), logits(base / source))


def test_an_adapter_is_trained_beside_rounded_weights(tmp_path, data_bin, base, capsys):
    for updates in (3, 5):
        options = {"training__max_update": updates, "lr_scheduler__decay_updates": 9}
        trainer = lora_trainer(base, data_bin, tmp_path / "run", "int8", **options)
        assert trainer.state.num_updates == (0 if updates == 3 else 3)
        trainer.train()
    whole = lora_trainer(base, data_bin, tmp_path / "whole", "int8", **options)
    whole.train()
    assert_same(trainer, whole)
    before, after = load_model_tensors(base / "int8"), load_model_tensors(tmp_path / "run")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert isinstance(ftk.load_model(tmp_path / "run", "cpu").layers[0].attention.qkv, Int8Linear)
    assert checkpoint(["merge", str(tmp_path / "run"), str(tmp_path / "plain")]) == 0
    assert "quantization" not in read_config(tmp_path / "plain")
    found, expected = logits(tmp_path / "plain"), logits(tmp_path / "run")
    assert ((found - expected).norm() / expected.norm()).item() < 0.01  # the products are rounded, the weights not
    plain = load_model_tensors(tmp_path / "plain")
    assert plain.keys() == load_model_tensors(base / "run").keys()
    assert trainer.run.num_parameters - trainer.run.num_trained == sum(tensor.numel() for tensor in plain.values())


def test_what_is_trained_besides_goes_with_the_adapter(tmp_path, data_bin, base):
    trainer = lora_trainer(base, data_bin, tmp_path / "run", adapter__train_also=["final_norm", "layers.0.*norm.bias"])
    trainer.train()
    before, after = load_model_tensors(base / "run"), load_model_tensors(tmp_path / "run")
    moved = {name for name in before if not torch.equal(after[name], before[name])}
    assert moved == {
        "final_norm.weight",
        "final_norm.bias",
        *(f"layers.0.{name}.bias" for name in ("attention_norm", "feed_forward_norm")),
    }
    assert checkpoint(["adapter", str(tmp_path / "run"), str(tmp_path / "alone")]) == 0
    saved = json.loads((tmp_path / "alone" / ADAPTER_CONFIG).read_text())["modules_to_save"]
    assert saved == ["final_norm", "layers.0.attention_norm", "layers.0.feed_forward_norm"]
    assert torch.equal(logits(tmp_path / "alone", base=base / "run"), logits(tmp_path / "run"))


@pytest.mark.slow
def test_an_average_of_the_weights_is_one_of_the_adapter(tmp_path, data_bin, base):
    lora_trainer(base, data_bin, tmp_path / "run", ema__ema_decay=0.5).train()
    assert all(is_part(name, LoRA.PARTS) for name in read_index(tmp_path / "run" / "checkpoint_8" / "ema").tensors)
    average = logits(tmp_path / "run", ema=True)
    assert not torch.equal(average, logits(tmp_path / "run"))
    assert checkpoint(["merge", str(tmp_path / "run"), str(tmp_path / "plain"), "--ema"]) == 0
    torch.testing.assert_close(logits(tmp_path / "plain"), average, rtol=1e-5, atol=1e-5)


def test_a_further_run_goes_on_with_the_adapter_of_the_run_that_it_starts_from(tmp_path, data_bin, run):
    argv = [str(data_bin), "--finetune-from", str(run), "--max-update", "1", "--lr", "0", "--device", "cpu"]
    argv += ["--save-dir", str(tmp_path / "run"), "--seq-length", "48"]
    config = compose(TrainConfig, "ftk-train", "", argv)
    assert (config.adapter.name, config.adapter.config.lora_rank) == ("lora", 4)
    assert train(argv) == 0
    assert torch.equal(logits(tmp_path / "run"), logits(run))


def test_a_run_is_shown_before_it_starts(base, data_bin, capsys):
    flags = ["--adapter", "lora", "--finetune-from", str(base / "run"), "--max-update", "1", "--dry-run"]
    assert train([str(data_bin), "--seq-length", "48", *flags]) == 0
    text = capsys.readouterr().out
    assert "  _name: lora\n  adapter_targets: []" in text
    (line,) = [line for line in text.splitlines() if line.startswith("parameters ")]
    total, trained = (int(word.strip("(").replace(",", "")) for word in line.split()[1:3])
    assert 0 < trained < 0.2 * total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint__finetune_from": None}, "random ones; name a checkpoint by `finetune_from`"),
        ({"adapter__adapter_targets": ["layers.*.atention"]}, "'layers.*.atention' matches no linear layer"),
        ({"adapter__train_also": ["final_nrm"]}, "`train_also` 'final_nrm' matches no parameter"),
        ({"adapter___name": "none"}, "unknown option adapter"),
        ({"adapter___name": "lorra"}, "unknown adapter 'lorra'; did you mean 'lora'"),
    ],
    ids=["no base", "target", "train_also", "options of none", "name"],
)
def test_what_cannot_be_trained_is_refused(tmp_path, data_bin, base, options, message):
    with pytest.raises(UserError) as caught:
        lora_trainer(base, data_bin, tmp_path / "run", **options)
    assert message in str(caught.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_another_adapter_is_another_run(tmp_path, data_bin, base):
    lora_trainer(base, data_bin, tmp_path / "run", training__max_update=1).train()
    with pytest.raises(UserError, match=r"adapter.lora_rank 4 -> 5   \(needs a new run\)"):
        lora_trainer(base, data_bin, tmp_path / "run", adapter__lora_rank=5)
    options = {name: value for name, value in LORA.items() if not name.startswith("adapter")}
    with pytest.raises(UserError, match=r"adapter._name lora -> none   \(needs a new run\)"):
        glm_trainer(data_bin, tmp_path / "run", **options)


def test_a_run_of_an_older_ftk_had_no_adapter(tmp_path, data_bin):
    glm_trainer(data_bin, tmp_path / "run", training__max_update=1).train()
    for file in (tmp_path / "run" / "checkpoint_1" / "config.yaml", tmp_path / "run" / "config.yaml"):
        assert yaml.safe_load(file.read_text())["adapter"] == {"_name": "none"}


def test_rounded_weights_are_still_not_trained_themselves(tmp_path, data_bin, base):
    with pytest.raises(UserError, match="is quantised; further training without `adapter` needs the checkpoint"):
        glm_trainer(data_bin, tmp_path / "run", checkpoint__finetune_from=str(base / "int8"))


# -- checkpoints --------------------------------------------------------------------------------------------------


def test_a_checkpoint_needs_nothing_else_and_holds_the_adapter_in_the_form_of_peft(run, uninterrupted):
    assert verify(run) == []
    assert {path.name for path in (run / "adapter").iterdir()} == {ADAPTER_CONFIG, WEIGHTS, FACTS}
    config = json.loads((run / "adapter" / ADAPTER_CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_dora"]) == ("LORA", 4, 16, False)
    assert config["rank_pattern"]["layers.0.feed_forward.inner"] == 2
    assert config["alpha_pattern"]["layers.0.feed_forward.inner"] == 4
    assert "layers.0.attention.qkv" in config["target_modules"]
    assert "layers.0.attention.qkv" not in config["rank_pattern"]
    model = uninterrupted.run.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(run), model(torch.arange(40).reshape(2, 20)))  # by other kernels
    model.train()


def test_inspect_shows_the_adapter(run, base, capsys):
    assert checkpoint(["inspect", str(run)]) == 0
    assert "\nadapter    _name lora, adapter_targets ['layers.*.attention'" in capsys.readouterr().out
    assert checkpoint(["inspect", str(base / "run")]) == 0
    assert "\nadapter " not in capsys.readouterr().out


def test_merged_weights_give_the_same_and_are_a_plain_checkpoint(run, base, tmp_path, capsys):
    assert checkpoint(["merge", str(run), str(tmp_path / "plain")]) == 0
    assert f"wrote {tmp_path / 'plain'}, with the adapter of 16 layers in its weights" in capsys.readouterr().out
    assert verify(tmp_path / "plain") == []
    assert load_model_tensors(tmp_path / "plain").keys() == load_model_tensors(base / "run").keys()
    torch.testing.assert_close(logits(tmp_path / "plain"), logits(run), rtol=1e-5, atol=1e-5)
    assert ftk.load_tokenizer(tmp_path / "plain").fingerprint == ftk.load_tokenizer(run).fingerprint
    assert checkpoint(["merge", str(tmp_path / "plain"), str(tmp_path / "again")]) == 2
    assert "has no adapter to merge" in capsys.readouterr().err
    assert checkpoint(["adapter", str(base / "run"), str(tmp_path / "again")]) == 2
    assert "has no adapter; it was trained without --adapter" in capsys.readouterr().err


def test_the_adapter_alone_opens_beside_its_base(run, base, alone, tmp_path):
    assert {path.name for path in alone.iterdir()} == {ADAPTER_CONFIG, WEIGHTS, FACTS}
    assert torch.equal(logits(alone, base=base / "run"), logits(run))
    assert checkpoint(["merge", str(alone), str(tmp_path / "plain"), "--base", str(base / "run")]) == 0
    torch.testing.assert_close(logits(tmp_path / "plain"), logits(run), rtol=1e-5, atol=1e-5)
    assert ftk.load_tokenizer(tmp_path / "plain").fingerprint == ftk.load_tokenizer(run).fingerprint
    assert checkpoint(["convert", "--to", "hf", str(tmp_path / "plain"), str(tmp_path / "hf")]) == 0
    base_hf = tmp_path / "base-hf"
    assert checkpoint(["convert", "--to", "hf", str(base / "run"), str(base_hf)]) == 0
    torch.testing.assert_close(logits(alone, base=base_hf), logits(run))  # the same weights in another form


def test_the_adapter_alone_is_refused_beside_other_weights(run, alone, base, data_bin, tmp_path, capsys):
    glm_trainer(data_bin, tmp_path / "other", training__max_update=1, common__seed=9).train()
    message = (
        "was trained beside other weights than those of .*other/checkpoint_1 .*; give the model that it was trained"
    )
    with pytest.raises(UserError, match=message):  # whichever flag names the model
        logits(alone, base=tmp_path / "other")
    with pytest.raises(UserError, match="other weights"):
        logits(alone, base=base / "int8")
    with pytest.raises(UserError, match="has an adapter, and another adapter needs plain weights"):
        logits(alone, base=run)
    with pytest.raises(UserError, match="is an adapter without its model; `base` names the folder of that"):
        logits(alone)
    with pytest.raises(
        UserError, match=r"is no adapter .*; leave `base` out, or give .*ftk-checkpoint adapter RUN DST"
    ):
        logits(run, base=base / "run")
    assert checkpoint(["adapter", str(base / "run"), str(tmp_path / "none")]) == 2
    assert "has no adapter" in capsys.readouterr().err
    assert checkpoint(["adapter", str(run), str(alone)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "adapter_model.bin").touch()
    for folder in (base, tmp_path / "kept"):
        assert checkpoint(["adapter", str(run), str(folder), "--overwrite"]) == 2
        assert "is no adapter; it is not replaced" in capsys.readouterr().err
    shutil.copytree(alone, tmp_path / "old")
    assert checkpoint(["adapter", str(run), str(tmp_path / "old"), "--overwrite"]) == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        half = shutil.copytree(alone, tmp_path / f"without {name}")
        (half / name).unlink()
        with pytest.raises(UserError, match=f"has no {name}; copy the whole folder of the adapter again"):
            logits(half, base=base / "run")
        with pytest.raises(UserError, match="is an adapter without its model"):
            logits(half)


def test_commands_answer_with_an_adapter_as_with_merged_weights(run, base, alone, data_bin, tmp_path, here):
    here(checkpoint, "merge", run, tmp_path / "plain", code=0)
    (tmp_path / "prompts").write_text("The model [gMASK]\nA run of [MASK] updates\n")
    ways = [("--path", run), ("--path", alone, "--base", base / "run"), ("--path", tmp_path / "plain")]
    asked = ("--input", tmp_path / "prompts", "--max-len", 6, "--device", "cpu")
    answers = [here(generate.main, *way, *asked, code=0)[1] for way in ways]
    assert answers[0] == answers[1] == answers[2] != ""
    (tmp_path / "rows.jsonl").write_text('{"text": "The model reads what a run of updates is"}\n')
    evaluated = ("--evaluation", "lambada", "--data", tmp_path / "rows.jsonl", "--device", "cpu", "--output")
    tables = [
        here(evaluate.main, *way, *evaluated, tmp_path / f"results-{number}", code=0)[1].splitlines()[:-1]
        for number, way in enumerate(ways[:2])
    ]
    assert tables[0] == tables[1] != []
    facts = json.loads((tmp_path / "results-1" / "results.json").read_text())
    assert facts["adapter"] == {"folder": str(alone), "weights_sha256": sha256_of(alone / WEIGHTS)}
    validated = ("--max-valid-samples", 6, "--output-format", "json", "--device", "cpu")
    figures = [
        json.loads(here(validate.main, data_bin, *way, *validated, code=0)[1])["loss"]
        for way in (*ways, ("--path", base / "run"))
    ]
    assert figures[0] == figures[1] == pytest.approx(figures[2], rel=1e-5)
    assert abs(figures[0] - figures[3]) > 1e-3


def test_a_terminal_answers_with_an_adapter_alone(base, alone, here):
    flags = ("--path", alone, "--base", base / "run", "--max-len", 4, "--device", "cpu")
    _, out, _ = here(interactive.main, *flags, stdin=b"The model [gMASK]\n", code=0)
    assert "The model" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["export", "{run}", "{new}", "--quantize", "int8"],
        ["export", "{run}", "{new}.safetensors", "--format", "safetensors"],
        ["convert", "--to", "hf", "{run}", "{new}"],
        ["grow", "{run}", "{new}", "--max-positions", "2000"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_what_needs_plain_weights_says_how_to_get_them(run, tmp_path, capsys, argv):
    words = [word.format(run=run, new=tmp_path / "new") for word in argv]
    assert checkpoint(words) == 2
    assert f"needs plain weights; ftk-checkpoint merge {run} DST" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_export_of_the_weights_keeps_the_adapter_and_an_average_wants_one_adapter(run, base, tmp_path, here, capsys):
    here(checkpoint, "export", run, tmp_path / "small", code=0)
    assert torch.equal(logits(tmp_path / "small"), logits(run))
    for name in (ADAPTER_CONFIG, WEIGHTS, FACTS):
        assert (tmp_path / "small" / "adapter" / name).read_bytes() == (run / "adapter" / name).read_bytes()
    flags = ["average", "--inputs", str(run), str(base / "run"), "--output", str(tmp_path / "mean")]
    assert checkpoint(flags) == 2
    assert "adapter option _name is only in" in capsys.readouterr().err
