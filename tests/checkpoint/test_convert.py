"""Original GLM checkpoints become ftk's and come back equal; nothing in them is unpickled freely."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ftk
from ftk.checkpoint import load_model_tensors, read_config, read_trainer_state, verify
from ftk.checkpoint.convert import convert_from, convert_to
from ftk.errors import UserError
from ftk.models.glm.convert import to_original
from ftk.models.glm.original import OriginalGLM, OriginalGLMConfig, read_original
from tests.checkpoint.damage import EVIL, assert_refused, halve
from tests.records import assert_same_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "glm_tiny"
ORIGINAL = GOLDEN / "original_checkpoint"
HEADS = 4


def convert_from_original(source: Path, output: Path, *, overwrite: bool = False, **options) -> Path:
    return convert_from(OriginalGLM(OriginalGLMConfig(**options)), source, output, overwrite=overwrite)


def convert_to_original(source: Path, output: Path, *, num_parts: int = 1, overwrite: bool = False) -> Path:
    form = OriginalGLM(OriginalGLMConfig(model_parallel_size=num_parts))
    return convert_to(form, "glm", source, output, overwrite=overwrite)


def original_state() -> dict[str, torch.Tensor]:
    content = torch.load(ORIGINAL / "150000" / "mp_rank_00_model_states.pt", weights_only=True)
    return content["module"]


def write_original(folder: Path, parts: list, tag: str = "7", latest: str | None = "latest") -> Path:
    (folder / tag).mkdir(parents=True)
    for rank, part in enumerate(parts):
        torch.save(part, folder / tag / f"mp_rank_{rank:02d}_model_states.pt")
    if latest is not None:
        (folder / latest).write_text(tag + "\n")
    return folder


def cut_as_megatron_does(state: dict[str, torch.Tensor], num_parts: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's weights by index arithmetic: what the model-parallel layers of the original hold."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num_parts)]
    for name, value in state.items():
        for rank, part in enumerate(parts):
            if "query_key_value" in name:
                hidden = value.size(0) // 3
                width = hidden // num_parts
                rows = [kind * hidden + rank * width + row for kind in range(3) for row in range(width)]
                part[name] = value[rows].clone()
            elif "dense_h_to_4h" in name or name == "word_embeddings.weight":
                width = value.size(0) // num_parts
                part[name] = value[rank * width : (rank + 1) * width].clone()
            elif name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
                width = value.size(1) // num_parts
                part[name] = value[:, rank * width : (rank + 1) * width].clone()
            else:
                part[name] = value.clone()
    return parts


def golden_logits_difference(folder: Path) -> float:
    with np.load(GOLDEN / "step0.npz") as arrays:
        golden = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    model = ftk.load_model(folder)
    with torch.no_grad():
        logits = model(golden["input_ids"], position_ids=golden["position_ids"], context_length=golden["sep"])
    return float((logits - golden["logits"]).abs().max())


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_converted_model_computes_the_golden_logits(tmp_path: Path, num_parts: int) -> None:
    parts = [{"module": part, "iteration": 7} for part in cut_as_megatron_does(original_state(), num_parts)]
    source = write_original(tmp_path / "original", parts)
    folder = convert_from_original(source, tmp_path / "ours", num_attention_heads=HEADS)
    assert golden_logits_difference(folder) < 1e-4
    assert read_trainer_state(folder)["num_updates"] == 7


@pytest.mark.parametrize("source", [ORIGINAL, ORIGINAL / "150000"], ids=["folder", "iteration"])
def test_golden_checkpoint_converts_and_comes_back_equal(tmp_path: Path, source: Path) -> None:
    folder = convert_from_original(source, tmp_path / "ours", num_attention_heads=HEADS)
    assert verify(folder) == []
    assert golden_logits_difference(folder) < 1e-4
    model = read_config(folder)["model"]
    assert (model["_name"], model["vocab_size"], model["max_positions"]) == ("glm", 128, 64)
    assert read_config(folder)["task"]["_name"] == "glm_blank"

    back = convert_to_original(folder, tmp_path / "back")
    assert back == tmp_path / "back" / "150000"
    content = torch.load(back / "mp_rank_00_model_states.pt", weights_only=True)
    assert content["iteration"] == 150000
    assert_same_tensors(content["module"], original_state())
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        assert (tmp_path / "back" / name).read_text() == (ORIGINAL / name).read_text().strip()


def test_half_precision_is_kept_as_stored(tmp_path: Path) -> None:
    state = {name: value.half() for name, value in original_state().items()}
    source = write_original(tmp_path / "original", [{"module": state}])
    folder = convert_from_original(source, tmp_path / "ours", num_attention_heads=HEADS)
    assert {t.dtype for t in load_model_tensors(folder).values()} == {torch.float16}
    back = convert_to_original(folder, tmp_path / "back")
    assert_same_tensors(read_original(back).state_dict, state)


def test_random_states_and_optimizer_beside_the_weights_do_not_disturb(tmp_path: Path) -> None:
    extra = {
        "np_rng_state": np.random.get_state(),
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
        "lr_scheduler": {"start_lr": 1e-4, "decay_style": "cosine"},
        "optimizer": {"state": {0: {"step": 3, "exp_avg": torch.ones(2)}}},
        "csr_tensor_module_names": {"a", "b"},
        "param_shapes": {"a": torch.Size([2, 3])},
    }
    source = write_original(tmp_path / "original", [{"module": original_state(), **extra}])
    assert_same_tensors(read_original(source).state_dict, original_state())


@pytest.mark.parametrize("form", ["bare", "old-zip"])
def test_other_forms_of_the_file_are_read(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "original" / "best"
    folder.mkdir(parents=True)
    (tmp_path / "original" / "latest_checkpointed_iteration.txt").write_text("best")
    content = original_state() if form == "bare" else {"module": original_state()}
    path = folder / "mp_rank_00_model_states.pt"
    torch.save(content, path, _use_new_zipfile_serialization=form == "bare")
    original = read_original(tmp_path / "original")
    assert_same_tensors(original.state_dict, original_state())
    assert original.iteration is None


PART, TRACKER = "150000/mp_rank_00_model_states.pt", "latest_checkpointed_iteration.txt"


def with_weight(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    """A weight changed, added or, where there is no value, taken out."""
    state = {key: one for key, one in (original_state() | {name: value}).items() if one is not None}
    return lambda folder: torch.save({"module": state}, folder / PART)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: shutil.rmtree(p / "150000"), "says '150000', but there is no folder"),
        (lambda p: (p / TRACKER).write_text("../../etc"), "the name of a folder"),
        (lambda p: (p / TRACKER).write_text(""), "the name of a folder"),
        (lambda p: halve(p / PART), "cannot be read as a PyTorch file|damaged"),
        (lambda p: (p / PART).write_bytes(b""), "cannot be read|damaged"),
        (lambda p: (p / PART).unlink(), "holds no mp_rank_XX"),
        (lambda p: shutil.copy(p / PART, p / PART.replace("00_", "02_")), "has 2 parts up to mp_rank_02, but not 01"),
        (lambda p: torch.save([1], p / PART), "no state dict under 'module'"),
        (lambda p: torch.save({"a": 1}, p / PART), "'a' under 'module' is not a tensor"),
        (lambda p: torch.save({"module": original_state(), "args": EVIL}, p / PART), "Python objects besides tensors"),
        (with_weight("transformer.layers.1.mlp.dense_4h_to_h.bias", None), "1.feed_forward.output.bias is missing"),
        (with_weight("transformer.final_layernorm.bias", torch.zeros(63)), "final_norm.bias is [63]; [64] fits"),
        (with_weight("transformer.final_layernorm.bias", torch.ones(64) / 0), "NaN or infinity in final_norm"),
        (with_weight("transformer.layers.9999.input_layernorm.bias", torch.ones(64)), "far larger than its tensors"),
    ],
)
def test_damaged_original_is_refused_in_one_line(tmp_path: Path, monkeypatch, damage, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    source = shutil.copytree(ORIGINAL, tmp_path / "original")
    damage(source)
    assert_refused(OriginalGLM(OriginalGLMConfig(num_attention_heads=HEADS)), source, message)


def test_heads_come_from_the_number_or_the_architecture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give `arch` or `num_attention_heads`"):
        convert_from_original(ORIGINAL, tmp_path / "ours")
    with pytest.raises(UserError, match="has num_layers 2, `arch` glm_tiny has 4"):
        convert_from_original(ORIGINAL, tmp_path / "ours", architecture="glm_tiny")
    with pytest.raises(UserError, match="num_attention_heads is 5; it must divide hidden_size 64"):
        convert_from_original(ORIGINAL, tmp_path / "ours", num_attention_heads=5)

    model = ftk.models.build_model("glm_tiny", vocab_size=256, dropout=0.0)
    source = write_original(tmp_path / "tiny", [{"module": to_original(model.state_dict(), model.config)}])
    folder = convert_from_original(source, tmp_path / "ours", architecture="glm_tiny")
    assert read_config(folder)["model"]["arch"] == "glm_tiny"
    assert read_config(folder)["model"]["dropout"] == 0.1
    assert_same_tensors(ftk.load_model(folder).state_dict(), model.state_dict())


def test_gmask_row_of_the_chinese_10b_is_copied_on_request(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = original_state()
    state["word_embeddings.weight"] = torch.randn(50048, 64, generator=generator)
    source = write_original(tmp_path / "original", [{"module": state}])
    plain = convert_from_original(source, tmp_path / "plain", num_attention_heads=HEADS)
    copied = convert_from_original(source, tmp_path / "copied", num_attention_heads=HEADS, copy_gmask_row=True)
    before = load_model_tensors(plain)["token_embedding.weight"]
    after = load_model_tensors(copied)["token_embedding.weight"]
    assert torch.equal(after[50009], before[50007])
    assert torch.equal(after[:50009], before[:50009])
    assert torch.equal(after[50010:], before[50010:])
    with pytest.raises(UserError, match="no row 50009"):
        convert_from_original(ORIGINAL, tmp_path / "x", num_attention_heads=HEADS, copy_gmask_row=True)


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    folder = convert_from_original(ORIGINAL, tmp_path / "ours", num_attention_heads=HEADS)
    with pytest.raises(UserError, match="`overwrite`"):
        convert_from_original(ORIGINAL, folder, num_attention_heads=HEADS)
    convert_from_original(ORIGINAL, folder, num_attention_heads=HEADS, overwrite=True)
    back = tmp_path / "back"
    convert_to_original(folder, back)
    with pytest.raises(UserError, match="`overwrite`"):
        convert_to_original(folder, back)
    convert_to_original(folder, back, overwrite=True)
    with pytest.raises(UserError, match="is no checkpoint as `to` glm writes it; it is not replaced"):
        convert_to_original(folder, folder, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ours"]


@pytest.mark.parametrize(
    ("parts", "what"),
    [(3, "4 attention heads nor 128 rows .*"), (8, "4 attention heads")],  # 128 rows could be cut in 8
)
def test_failed_cut_leaves_nothing(tmp_path: Path, parts: int, what: str) -> None:
    folder = convert_from_original(ORIGINAL, tmp_path / "ours", num_attention_heads=HEADS)
    refused = rf"`model_parallel_size` {parts} does not divide {what} \(1, 2 or 4 would\)"
    with pytest.raises(UserError, match=refused):
        convert_to_original(folder, tmp_path / "back", num_parts=parts)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
