"""Checkpoints of Megatron-LM become ftk's, whatever their parts, names and versions; nothing in them is run.

Files are written by Megatron-Core itself (`tests/golden/megatron`), or by `megatron_files`, after Megatron's source;
none by the code that is tested.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ftk
from ftk.checkpoint import read_config, read_trainer_state, verify
from ftk.checkpoint.convert import convert_from
from ftk.checkpoint.layout import form_of, resolve_checkpoint
from ftk.checkpoint.megatron import MegatronConfig
from ftk.checkpoint.megatron.reader import Megatron
from ftk.checkpoint.weights import foreign_config, identity_files
from ftk.errors import UserError
from ftk.tasks.restore import restore_base
from ftk_cli.checkpoint import main
from ftk_cli.preprocess import main as preprocess
from ftk_cli.train import main as train
from tests.checkpoint.damage import EVIL, assert_refused, halve, made_by
from tests.records import assert_same_tensors

from . import megatron_files as files
from .megatron_files import drawn, write

FORM = Megatron(MegatronConfig())
GOLDEN = Path(__file__).parents[1] / "golden" / "megatron"  # written by Megatron-Core itself, see its make.py
GPT2: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.3, "embedding_dropout": 0.2, "layer_norm_eps": 2e-5}
LLAMA: dict[str, Any] = {"num_kv_heads": 2, "ffn_hidden_size": 40, "rope_theta": 500000.0, "layer_norm_eps": 1e-6}
LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_low": 1.0, "rope_high": 4.0}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model, its options, how it is written
    "gpt2 in one file": ("gpt2", GPT2, {}),
    "gpt2, 2 x 2": ("gpt2", GPT2, {"ranks": 2, "stages": 2}),
    "gpt2, exact gelu, wide": ("gpt2", {"activation": "gelu", "ffn_hidden_size": 72}, {"ranks": 4}),
    "gpt2, legacy, 2 x 2": ("gpt2", {}, {"ranks": 2, "stages": 2, "names": files.in_legacy}),
    "gpt2, legacy with engine": ("gpt2", {}, {"ranks": 2, "names": files.in_legacy_with_engine}),
    "gpt2, interleaved": ("gpt2", {}, {"ranks": 2, "stages": 2, "chunks": 2, "file": "model_rng.pt"}),
    "llama, 2 x 2": ("llama", LLAMA, {"ranks": 2, "stages": 2}),
    "llama, engine, interleaved": (
        "llama",
        LLAMA,
        {"ranks": 2, "stages": 2, "chunks": 2, "names": files.in_core_with_engine},
    ),
    "llama, legacy, tied": (
        "llama",
        LLAMA | {"tie_embeddings": True},
        {"ranks": 2, "stages": 4, "names": files.in_legacy},
    ),
    "llama, a group per head": ("llama", LLAMA | {"num_kv_heads": None}, {"ranks": 4}),
    "llama, stretched": (
        "llama",
        LLAMA | {"rope_scaling": "linear", "rope_factor": 4.0},
        {"rotary_seq_len_interpolation_factor": 4},
    ),
    "llama 3.1": (
        "llama",
        LLAMA | LLAMA3 | {"rope_original_positions": 8192},
        {"ranks": 2, "use_rope_scaling": True, "rope_scaling_factor": 8.0},
    ),
    "qwen2": ("qwen2", LLAMA, {"ranks": 2, "stages": 2}),
    "qwen3, wide heads": ("qwen3", LLAMA | {"head_dim": 12}, {"ranks": 2, "stages": 2}),
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20) % 48)


@pytest.mark.parametrize("case", CASES)
def test_the_model_that_was_written_is_read(tmp_path: Path, case: str) -> None:
    """Opened as it is, and converted: the same options, weights and, to the last bit, logits."""
    name, options, how = CASES[case]
    model = drawn(name, **options)
    source = write(tmp_path / "source", model, **how)
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    opened = ftk.load_model(source)
    ours = convert_from(FORM, source, tmp_path / "ours")
    assert verify(ours) == []
    for found in (opened, ftk.load_model(ours)):
        assert found.config == model.config
        assert_same_tensors(found.state_dict(), model.state_dict())
        assert torch.equal(logits(found), logits(model))
    assert read_config(ours)["task"]["_name"] == "causal_lm"
    assert read_trainer_state(ours)["num_updates"] == 100
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3"])
def test_what_megatron_core_wrote_computes_what_it_computed(name: str) -> None:
    model = ftk.load_model(GOLDEN / name)
    expected = torch.load(GOLDEN / name / "logits.pt", weights_only=True)
    with torch.no_grad():
        found = model(torch.arange(24).reshape(2, 12) * 7 % 32)
    assert (found - expected).abs().max() < 1e-5 < 0.1 < expected.abs().max()


@pytest.mark.parametrize("names", [files.in_first, files.in_legacy], ids=["first names", "later names"])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_rows_of_queries_keys_and_values_are_those_of_the_version(tmp_path: Path, version: float, names: Any) -> None:
    model = drawn("gpt2")
    source = write(tmp_path / "source", model, ranks=2, version=version, names=names, old_zip=version < 2)
    heads = None if version else 4
    ours = convert_from(Megatron(MegatronConfig(num_attention_heads=heads)), source, tmp_path / "ours")
    assert_same_tensors(ftk.load_model(ours).state_dict(), model.state_dict())


@pytest.mark.parametrize("names", [files.in_core, files.in_legacy_with_engine])
def test_only_rows_of_query_key_value_had_another_order(tmp_path: Path, names: Any) -> None:
    source = write(tmp_path / "source", drawn("gpt2"), names=names)
    edit(source, checkpoint_version=1.0)
    assert torch.equal(logits(ftk.load_model(source)), logits(drawn("gpt2")))


def test_an_old_version_with_grouped_heads_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", drawn("llama", **LLAMA), names=files.in_legacy)
    edit(source, checkpoint_version=1.0)
    with pytest.raises(UserError, match=r"checkpoint_version is 1.0, in which there were no grouped key heads"):
        ftk.load_model(source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_stay_in_the_type_they_are_stored_in(tmp_path: Path, dtype: torch.dtype) -> None:
    model = drawn("llama", **LLAMA).to(dtype)
    source = write(tmp_path / "source", model, ranks=2, params_dtype=dtype)
    tensors = FORM.read(source).tensors
    assert {one.dtype for one in tensors.described.values()} == {dtype}
    assert_same_tensors(tensors.all(), model.state_dict())


def test_old_files_without_options_need_the_number_of_heads(tmp_path: Path) -> None:
    source = write(tmp_path / "source", drawn("gpt2"), version=0)
    with pytest.raises(UserError, match="hold no options, as old ones do; convert it with `num_attention_heads`"):
        ftk.load_model(source)
    new = write(tmp_path / "new", drawn("gpt2"))
    with pytest.raises(UserError, match="leave out `num_attention_heads`"):
        convert_from(Megatron(MegatronConfig(num_attention_heads=4)), new, tmp_path / "ours")


def test_a_folder_is_known_by_its_files(tmp_path: Path) -> None:
    source = write(tmp_path / "source", drawn("gpt2"), ranks=2, stages=2)
    assert form_of(source) == form_of(source / "iter_0000100") == "megatron"
    with pytest.raises(UserError, match=r"convert --from megatron .*source DST"):
        resolve_checkpoint(source)
    parts = [path.parent.name for path in identity_files(source)[1:]]
    assert parts == ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"]
    assert torch.equal(logits(ftk.load_model(source / "iter_0000100")), logits(ftk.load_model(source)))
    (source / "iter_0000100").rename(source / "release")
    (source / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert torch.equal(logits(ftk.load_model(source)), logits(drawn("gpt2")))


@pytest.mark.parametrize(("rows", "multiple"), [(256, 256), (128, 1)])
def test_the_padding_of_the_vocabulary_stays_in_further_training(tmp_path: Path, rows: int, multiple: int) -> None:
    """Megatron pads to a multiple for each tensor parallel rank; 128 rows on two were not padded so."""
    source = write(tmp_path / "source", drawn("gpt2", vocab_size=rows), ranks=2, make_vocab_size_divisible_by=128)
    assert foreign_config(source)["task"]["make_vocab_size_divisible_by"] == multiple
    usual = 128 if multiple == 1 else multiple
    assert restore_base(str(source)).sections["task"]["make_vocab_size_divisible_by"] == usual
    of_another_task = restore_base(str(source), "sft").sections["task"]
    assert of_another_task.get("make_vocab_size_divisible_by", 128) == usual


def test_the_command_adds_a_tokenizer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    source = str(write(tmp_path / "source", drawn("gpt2", vocab_size=128)))
    command = ["convert", "--from", "megatron", source]
    command += ["--tokenizer", "bert_wordpiece", "--tokenizer-path", str(tmp_path / "vocab.txt")]
    assert main([*command, str(tmp_path / "ours")]) == 0
    assert "no tokenizer" not in capfd.readouterr().out
    tokenizer = ftk.load_tokenizer(tmp_path / "ours")
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert main(["convert", "--to", "hf", str(tmp_path / "ours"), str(tmp_path / "hf")]) == 0
    assert main([*command, "--to", "hf", str(tmp_path / "at_once")]) == 0
    two_steps, one = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("hf", "at_once")
    )
    assert one == two_steps
    assert torch.equal(logits(ftk.load_model(tmp_path / "hf")), logits(drawn("gpt2", vocab_size=128)))


@pytest.mark.slow  # the two before are its faster twins
def test_such_a_folder_is_trained_further(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "text").write_text("hello world world hello\n" * 40)
    source, data, run = (
        write(tmp_path / "source", drawn("gpt2", vocab_size=256), ranks=2),
        tmp_path / "d",
        tmp_path / "r",
    )
    texts = f"--trainpref {tmp_path}/text --validpref {tmp_path}/text --destdir {data}"
    assert preprocess(f"{texts} --tokenizer bert_wordpiece --tokenizer-path {tmp_path}/vocab.txt".split()) == 0
    options = "--seq-length 12 --batch-size 2 --max-update 1"
    assert train(f"{data} --finetune-from {source} {options} --save-dir {run}".split()) == 0
    assert read_config(run / "checkpoint_last")["model"]["vocab_size"] == 256


def test_what_megatrons_own_classes_hold_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where such a module is there and has a function of that name."""
    own, called = made_by("megatron", monkeypatch)
    source = write(tmp_path / "source", drawn("gpt2"))
    edit(source, args=files.arguments(drawn("gpt2"), own=own))
    assert torch.equal(logits(ftk.load_model(source)), logits(drawn("gpt2")))
    assert called == []


def edit(source: Path, part: str = "mp_rank_00", **changes: Any) -> None:
    """Change entries of one file; a function gets the entry, and what is None is taken out."""
    (path,) = source.glob(f"*/{part}/*.pt")
    with files.megatrons_classes() as enumeration:
        allowed = [argparse.Namespace, enumeration, files.io.BytesIO]
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, weights_only=True)
        for key, change in changes.items():
            content[key] = change(content[key]) if callable(change) else change
        torch.save({key: one for key, one in content.items() if one is not None}, path)


def with_option(**options: Any) -> Callable[[Path], None]:
    """Every part's options changed; None takes one out."""

    def change(args: argparse.Namespace) -> argparse.Namespace:
        values = {**vars(args), **options}
        return argparse.Namespace(**{name: value for name, value in values.items() if value is not None})

    def damage(source: Path) -> None:
        for path in source.glob("*/mp_rank_*"):
            edit(source, path.name, args=change)

    return damage


def with_tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | None], *parts: str
) -> Callable[[Path], None]:
    """A tensor changed, added or, where the result is None, taken out, in some parts or in all."""

    def changed(model: dict[str, Any]) -> dict[str, Any]:
        value = change(model.get(name, torch.zeros(2, 2)))
        return {key: one for key, one in model.items() if key != name} | ({} if value is None else {name: value})

    def damage(source: Path) -> None:
        for path in source.glob("*/mp_rank_*"):
            if path.name in (parts or [path.name]):
                edit(source, path.name, model=changed)

    return damage


def same(one: torch.Tensor) -> torch.Tensor:
    return one


def holding_itself(model: dict[str, Any]) -> dict[str, Any]:
    model["again"] = model
    return model


def distributed(source: Path) -> None:
    for path in source.glob("*/mp_rank_*"):
        shutil.rmtree(path)
    (source / "iter_0000100" / "common.pt").write_bytes(b"")
    (source / "iter_0000100" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def with_objects(module: str, count: int) -> Callable[[Path], None]:
    """Objects of so many classes of a module in one file."""

    def damage(source: Path) -> None:
        made = ModuleType(module)
        kinds = [type(f"Own{number}", (), {"__module__": module}) for number in range(count)]
        vars(made).update({kind.__name__: kind for kind in kinds})
        sys.modules[module] = made
        try:
            edit(source, "mp_rank_01_001", rng_state=[kind() for kind in kinds])
        finally:
            del sys.modules[module]

    return damage


PART = "iter_0000100/mp_rank_00_000"
TRACKER = "latest_checkpointed_iteration.txt"
EMBEDDING = "embedding.word_embeddings.weight"
LAST_QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
FIRST_LEGACY_QKV = "decoder.layers.0.self_attention.query_key_value.weight"
MISTAKES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda p: shutil.rmtree(p / "iter_0000100"), "says '100', but there is no folder"),
    (
        lambda p: (p / TRACKER).unlink(),
        "has no latest_checkpointed_iteration.txt; name one of its folders: iter_0000100",
    ),
    (lambda p: (p / TRACKER).write_text("../.."), "says '../..'; expected the number"),
    (lambda p: (p / TRACKER).write_text("9" * 5000), "is larger than 4,096 bytes"),
    (
        lambda p: shutil.rmtree(p / "iter_0000100/mp_rank_01_000"),
        "2 x 2 ranks (tensor x pipeline), but not mp_rank_01_000",
    ),
    (
        lambda p: [shutil.rmtree(one) for one in p.glob("*/mp_rank_01*")],
        "tensor_model_parallel_size is 2, but there are",
    ),
    (
        lambda p: [shutil.rmtree(one) for one in p.glob("*/mp_rank_*_001")],
        "pipeline_model_parallel_size is 2, but there",
    ),
    (lambda p: [shutil.rmtree(one) for one in p.glob("*/mp_*")], "holds no mp_rank_XX/model_optim_rng.pt"),
    (lambda p: (p / PART).rename(p / f"{PART}_000"), "mixture of experts"),
    (lambda p: shutil.copytree(p / PART, p / "iter_0000100/mp_rank_00"), "both of rank 0"),
    (lambda p: (p / PART).rename(p / "iter_0000100/mp_rank_999999999_999999999"), "but not mp_"),
    (distributed, "is in a distributed format, whose index is a pickle"),
    (lambda p: halve(p / PART / "model_optim_rng.pt"), "cannot be read as a PyTorch file|damaged"),
    (lambda p: next(p.glob("*/mp_rank_01_001/*.pt")).write_bytes(b""), "cannot be read|damaged"),
    (lambda p: torch.save([1], next(p.glob("*/mp_rank_00_000/*.pt"))), "holds no mapping"),
    (lambda p: torch.save({"a": 1}, next(p.glob("*/mp_rank_00_000/*.pt"))), "no state dict under 'model'"),
    (lambda p: edit(p, "mp_rank_00_000", args=EVIL), "Python objects besides tensors"),
    (lambda p: edit(p, "mp_rank_01_001", rng_state=EVIL), "Python objects besides tensors"),
    (with_objects("megatron.own", 65), "Python objects besides tensors (megatron.own.Own"),
    (with_objects("megatronic", 1), "Python objects besides tensors (megatronic.Own0)"),
    (lambda p: edit(p, "mp_rank_00_000", model=holding_itself), "'again' is no tensor"),
    (lambda p: edit(p, "mp_rank_00_001", model={"a": 3}), "'a' is no tensor"),
    (
        lambda p: edit(p, "mp_rank_01_001", iteration=50),
        "mp_rank_01_001 is of iteration 50, mp_rank_00_000 of iteration 100",
    ),
    (lambda p: edit(p, "mp_rank_00_000", checkpoint_version=4.0), "checkpoint_version is 4.0; ftk reads 0, 1, 2, 3"),
    (
        lambda p: edit(p, "mp_rank_00_001", model0={}, model1={}, model=None),
        "holds 1 chunks of an interleaved pipeline, another 2",
    ),
    (with_tensor(LAST_QKV, lambda one: one[:-1], "mp_rank_01_001"), "is [63, 32]; [64, 32] fits"),
    (with_tensor(LAST_QKV, lambda one: one[:, :-1], "mp_rank_01_001"), "do not fit, [32, 32] and [32, 31]"),
    (with_tensor(LAST_QKV, lambda one: one[0, 0], "mp_rank_01_001"), "do not fit, [32, 32] and []"),
    (with_tensor(LAST_QKV, lambda _: None, "mp_rank_01_001"), "do not belong together: only one of them holds"),
    (
        with_tensor(LAST_QKV, lambda _: None, "mp_rank_00_001", "mp_rank_01_001"),
        "layers.3.attention.qkv.weight is missing",
    ),
    (with_tensor("decoder.layers.0.mlp.router.weight", same), "'decoder.layers.0.mlp.router.weight' has no place"),
    (with_tensor("decoder.layers.0.self_attention.q_layernorm.weight", same), "is not in the model"),
    (
        with_tensor("decoder.layers.0.input_layernorm.weight", lambda one: one + 1, "mp_rank_01_000"),
        "is whole on each rank, but differs between ranks",
    ),
    (with_tensor(FIRST_LEGACY_QKV, same), "holds 'decoder.layers.0.self_attention.linear_qkv.weight' under two names"),
    (with_tensor("decoder.final_layernorm.weight", lambda one: torch.zeros(32)), "is in two pipeline stages"),
    (with_tensor("output_layer.weight", lambda one: one * torch.nan, "mp_rank_00_001"), "holds NaN or infinity"),
    (with_tensor("lm_head.dense.weight", same, "mp_rank_00_001"), "holds a BERT"),
    (with_tensor("encoder.layers.0.mlp.linear_fc2.weight", same, "mp_rank_00_001"), "as of an encoder and a dec"),
    (with_tensor(EMBEDDING, lambda _: None), "there is no matrix 'embedding.word_embeddings.weight'"),
    (with_option(num_experts=8), "its option num_experts is 8, which ftk's models do not have"),
    (
        with_option(position_embedding_type="yarn"),
        "position_embedding_type is 'yarn'; ftk reads learned_absolute, rope",
    ),
    (with_option(position_embedding_type=["rope"]), "position_embedding_type is ['rope']"),
    (with_option(position_embedding_type="learned_absolute"), "normalization is 'RMSNorm'"),
    (
        with_option(swiglu=False),
        "swiglu is False; of models with position_embedding_type rope ftk reads those with True",
    ),
    (with_option(rotary_percent=0.5), "rotary_percent is 0.5"),
    (with_option(add_qkv_bias=True, qk_layernorm=True), "add_qkv_bias and qk_layernorm are both on"),
    (with_option(use_rope_scaling=True, rotary_seq_len_interpolation_factor=2), "are both given"),
    (with_option(num_layers=None), "its options have no num_layers"),
    (with_option(num_layers=torch.zeros(3)), "it must be a whole number"),
    (with_option(num_layers=3), "is not in the model"),
    (with_option(num_layers=5), "is missing"),
    (with_option(num_attention_heads=5), "it must divide num_attention_heads 5"),
    (with_option(num_attention_heads=16), "fits the others"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("megatron") / "source", drawn("llama", **LLAMA), ranks=2, stages=2)


@pytest.mark.parametrize(("damage", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_damaged_checkpoint_is_refused_in_one_line(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = shutil.copytree(whole, tmp_path / "source")
    damage(source)
    assert_refused(FORM, source, message)


def test_a_copy_of_a_tied_embedding_that_differs_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", drawn("gpt2"), stages=2)
    edit(source, "mp_rank_00_001", model=lambda model: model | {"output_layer.weight": torch.zeros(48, 32)})
    with pytest.raises(UserError, match=r"'output_layer.weight' differs from 'embedding.word_embeddings.weight'"):
        convert_from(FORM, source, tmp_path / "ours")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_channels": 12}, "kv_channels is 12; ftk's gpt2 has"),
        ({"untie_embeddings_and_output_weights": True}, "untie_embeddings_and_output_weights is True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p is True"),
    ],
)
def test_a_gpt2_with_parts_of_other_models_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = write(tmp_path / "source", drawn("gpt2"), **options)
    with pytest.raises(UserError, match=message):
        ftk.load_model(source)


def test_a_mistake_is_exit_code_2(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--from", "megatron", str(tmp_path / "none"), str(tmp_path / "ours")]) == 2
    assert "no such folder; give the folder of a Megatron-LM checkpoint" in capfd.readouterr().err
    assert main(["convert", "--from", "megatron", str(whole / PART), str(tmp_path / "x")]) == 2
    assert "is no checkpoint of Megatron-LM" in capfd.readouterr().err
    assert main(["convert", "--from", "megatron", __file__, str(tmp_path / "ours"), "--num-attention-heads", "0"]) == 2
    assert "--num-attention-heads is 0; it must be at least 1" in capfd.readouterr().err
