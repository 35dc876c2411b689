"""What is saved is what is loaded, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ftk.checkpoint import (
    load_model_state,
    load_model_tensors,
    load_optimizer_state,
    read_config,
    read_trainer_state,
    save_checkpoint,
    verify,
)
from ftk.errors import UserError
from tests.records import assert_same_tensors

from .conftest import Awkward, make_optimizer, train


def save(folder: Path, model: nn.Module, optimizer=None, **state) -> Path:
    return save_checkpoint(folder, model=model, optimizer=optimizer, trainer_state=state, config={"a": 1})


def test_model_with_ties_bf16_int64_scalars_and_empty_tensors_comes_back_bit_for_bit(saved: Path) -> None:
    model = Awkward()
    train(model, make_optimizer(model), 3)
    other = Awkward(seed=1)
    load_model_state(saved, other)
    assert_same_tensors(other.state_dict(), model.state_dict())
    assert other.head.weight is other.embedding.weight


def test_training_goes_on_as_if_it_had_not_stopped(saved: Path) -> None:
    straight = Awkward()
    straight_optimizer = make_optimizer(straight)
    train(straight, straight_optimizer, 7)

    first = Awkward()
    first_optimizer = make_optimizer(first)
    train(first, first_optimizer, 4)
    folder = save(saved.parent / "checkpoint_4", first, first_optimizer)
    resumed = Awkward(seed=5)
    resumed_optimizer = make_optimizer(resumed)
    load_model_state(folder, resumed)
    load_optimizer_state(folder, resumed, resumed_optimizer)
    for step in range(4, 7):  # as `train` would have gone on
        resumed_optimizer.zero_grad()
        resumed(torch.arange(8) % 11 + step % 3).backward()
        resumed_optimizer.step()
    assert_same_tensors(resumed.state_dict(), straight.state_dict())
    for mine, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert_same_tensors(resumed_optimizer.state[mine], straight_optimizer.state[theirs])


def test_optimizer_hyperparameters_come_back_and_kernel_choices_stay(tmp_path: Path) -> None:
    model = Awkward()
    optimizer = make_optimizer(model)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.1234567890123
    folder = save(tmp_path / "c", model, optimizer)
    other = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups], lr=1.0, foreach=True)
    load_optimizer_state(folder, model, other)
    assert [g["lr"] for g in other.param_groups] == [0.1234567890123, 1e-2]
    assert [g["weight_decay"] for g in other.param_groups] == [0.1, 0.0]
    assert other.param_groups[0]["betas"] == (0.9, 0.98)
    assert other.param_groups[0]["foreach"] is True
    assert other.param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Rprop(p),
    ],
    ids=["sgd-momentum", "sgd", "amsgrad", "adafactor", "nadam", "rprop"],
)
def test_state_of_other_optimizers_comes_back(tmp_path: Path, make) -> None:
    model = Awkward()
    optimizer = make(list(model.parameters()))
    train(model, optimizer, 2)
    folder = save(tmp_path / "c", model, optimizer)
    other = make(list(model.parameters()))
    load_optimizer_state(folder, model, other)
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for parameter, state in optimizer.state.items():
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        assert_same_tensors({k: other.state[parameter][k] for k in tensors}, tensors)
        rest = {k: v for k, v in state.items() if k not in tensors}
        assert {k: v for k, v in other.state[parameter].items() if k not in tensors} == rest


def test_non_finite_and_negative_zero_weights_survive(tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    folder = save_checkpoint(tmp_path / "c", model={"w": values}, trainer_state={}, config={})
    assert_same_tensors(load_model_tensors(folder), {"w": values})


def test_views_and_transposes_are_saved_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"transposed": base.t(), "slice": base[1:3, ::2], "expanded": torch.ones(1).expand(3, 2)}
    folder = save_checkpoint(tmp_path / "c", model=tensors, trainer_state={}, config={})
    assert_same_tensors(load_model_tensors(folder), tensors)


def test_files_are_plain_safetensors_with_tied_weights_once(saved: Path) -> None:
    model = Awkward()
    train(model, make_optimizer(model), 3)
    (file,) = (saved / "model").glob("*.safetensors")
    tensors = load_file(file)
    expected = {k: v for k, v in model.state_dict().items() if k not in ("head.weight", "nothing")}
    assert_same_tensors(tensors, expected)


def test_untied_model_takes_both_copies_from_a_tied_checkpoint(saved: Path) -> None:
    model = Awkward(seed=1)
    model.head.weight = nn.Parameter(torch.zeros(11, 6))
    load_model_state(saved, model)
    assert torch.equal(model.head.weight, model.embedding.weight)
    assert model.head.weight is not model.embedding.weight


def test_tied_model_refuses_two_different_copies(tmp_path: Path) -> None:
    untied = Awkward()
    untied.head.weight = nn.Parameter(torch.zeros(11, 6))
    folder = save(tmp_path / "c", untied)
    with pytest.raises(UserError, match=r"embedding.weight and head.weight are one tensor"):
        load_model_state(folder, Awkward())


def test_compiled_and_wrapped_models_use_the_plain_names(saved: Path, tmp_path: Path) -> None:
    model = Awkward(seed=1)
    model.inner = torch.compile(model.inner)
    assert any("_orig_mod" in name for name in model.state_dict())
    load_model_state(saved, model)
    again = save(tmp_path / "c", model)
    assert_same_tensors(load_model_tensors(again), load_model_tensors(saved))


def test_key_mismatch_names_missing_and_unexpected_and_changes_nothing(saved: Path) -> None:
    model = Awkward(seed=1)
    model.extra = nn.Linear(2, 2)
    del model.counts
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_model_state(saved, model)
    assert "missing in the checkpoint: extra.weight, extra.bias" in str(caught.value)
    assert "unexpected in the checkpoint: counts" in str(caught.value)
    assert_same_tensors(model.state_dict(), before)


def test_shape_mismatch_is_named_and_changes_nothing(saved: Path) -> None:
    model = Awkward(seed=1)
    model.inner = nn.Linear(6, 7)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError, match=r"inner.weight is \[6, 6\] in the checkpoint, \[7, 6\] in the model"):
        load_model_state(saved, model)
    assert_same_tensors(model.state_dict(), before)


def test_optimizer_with_other_groups_is_refused(saved: Path) -> None:
    model = Awkward()
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match=r"groups the parameters differently"):
        load_optimizer_state(saved, model, other)
    assert not other.state
    fewer = torch.optim.AdamW([model.scale])
    with pytest.raises(UserError, match=r"unexpected in the checkpoint: coarse, embedding.weight"):
        load_optimizer_state(saved, model, fewer)


def test_checkpoint_without_optimizer_says_so(tmp_path: Path) -> None:
    model = Awkward()
    folder = save(tmp_path / "c", model)
    with pytest.raises(UserError, match="no optimizer state"):
        load_optimizer_state(folder, model, make_optimizer(model))


def test_trainer_state_keeps_values_that_json_lacks(tmp_path: Path) -> None:
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "limit": float("inf"),
        "nothing": float("nan"),
        "ratio": 0.1 + 0.2,
        "by_number": {1: "one", (2, 3): "two"},
        "list": [1, None, True, "注"],
    }
    folder = save(tmp_path / "c", nn.Linear(2, 2), **state)
    back = read_trainer_state(folder)
    assert torch.equal(back["torch"], state["torch"])
    assert back["python"] == state["python"]
    assert back["limit"] == float("inf")
    assert back["nothing"] != back["nothing"]
    for key in ("ratio", "by_number", "list"):
        assert back[key] == state[key]


def test_what_json_cannot_hold_is_refused_before_anything_is_on_disk(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a value of type set cannot be saved in a checkpoint"):
        save(tmp_path / "c", nn.Linear(2, 2), bad={1, 2})
    assert list(tmp_path.iterdir()) == []


def test_config_and_tokenizer_come_back(saved: Path, tokenizer_folder: Path) -> None:
    assert read_config(saved) == {"model": {"_name": "awkward", "hidden_size": 6}, "note": "注"}
    copied = saved / "tokenizer" / "deeper" / "vocabulary.bin"
    assert copied.read_bytes() == (tokenizer_folder / "deeper" / "vocabulary.bin").read_bytes()
    assert verify(saved) == []


def test_another_dtype_is_converted_to_what_the_model_has(saved: Path) -> None:
    model = Awkward(seed=1).to(torch.float64)
    load_model_state(saved, model)
    expected = load_model_tensors(saved)["inner.weight"]
    assert torch.equal(model.inner.weight, expected.double())
