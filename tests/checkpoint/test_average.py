"""The mean of checkpoints is the mean of their weights; checkpoints of different models are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftk.checkpoint import (
    BrokenCheckpoint,
    load_model_state,
    load_model_tensors,
    read_config,
    read_trainer_state,
    save_checkpoint,
    verify,
)
from ftk.checkpoint.average import average_checkpoints, newest_checkpoints
from ftk.errors import UserError

from .conftest import Awkward


def save(run: Path, updates: int, model, tokenizer: Path | None = None, **options) -> Path:
    return save_checkpoint(
        run / f"checkpoint_{updates}",
        model=model,
        trainer_state={"num_updates": updates},
        config={"model": {"_name": "awkward", "heads": 4} | options},
        tokenizer_folder=tokenizer,
    )


def test_mean_of_three_is_exact_in_float64_and_the_rest_is_the_newest(tmp_path: Path, tokenizer_folder: Path) -> None:
    models = [Awkward(seed) for seed in range(3)]
    order = [30, 10, 20]
    folders = [save(tmp_path, updates, m, tokenizer_folder) for updates, m in zip(order, models, strict=True)]
    output = average_checkpoints(folders, tmp_path / "mean")
    assert verify(output) == []
    states = [model.state_dict() for model in models]
    mean = Awkward(seed=9)
    load_model_state(output, mean)
    for name, value in mean.state_dict().items():
        if value.is_floating_point():
            expected = sum(state[name].double() for state in states) / 3
            assert torch.equal(value, expected.to(value.dtype)), name
        else:
            assert torch.equal(value, states[0][name]), name
    assert mean.head.weight is mean.embedding.weight
    assert read_trainer_state(output)["num_updates"] == 30
    assert read_trainer_state(output)["average_of"] == [str(folder) for folder in folders]
    assert (output / "tokenizer" / "ftk_tokenizer.json").is_file()
    assert not (output / "optimizer").exists()


def test_sum_is_not_rounded_on_the_way(tmp_path: Path) -> None:
    values = [2.0**24, 1.0, 1.0, -(2.0**24)]  # in float32 the ones would vanish
    folders = [save(tmp_path, i + 1, {"w": torch.tensor([v])}) for i, v in enumerate(values)]
    output = average_checkpoints(folders, tmp_path / "mean")
    assert load_model_tensors(output)["w"] == 0.5


@pytest.mark.parametrize(
    ("second", "options", "message"),
    [
        ({"w": torch.zeros(3), "b": torch.zeros(1)}, {}, "parameter b is only in .*checkpoint_2"),
        ({"v": torch.zeros(3)}, {}, "parameter w is only in .*checkpoint_1"),
        ({"w": torch.zeros(4)}, {}, r"parameter w is float32\[3\] in the first, float32\[4\] in the second"),
        ({"w": torch.zeros(3).half()}, {}, r"parameter w is float32\[3\] in the first, float16\[3\]"),
        ({"w": torch.zeros(3)}, {"heads": 8}, "model option heads is 4 in the first, 8 in the second"),
    ],
    ids=["more", "other", "shape", "dtype", "option"],
)
def test_checkpoints_of_another_model_are_refused(tmp_path: Path, second, options, message) -> None:
    folders = [save(tmp_path, 1, {"w": torch.zeros(3)}), save(tmp_path, 2, second, **options)]
    with pytest.raises(UserError, match=message):
        average_checkpoints(folders, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_checkpoints_with_another_tokenizer_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    first = save(tmp_path, 1, {"w": torch.zeros(3)}, tokenizer_folder)
    (tokenizer_folder / "deeper" / "vocabulary.bin").write_bytes(b"other")
    second = save(tmp_path, 2, {"w": torch.zeros(3)}, tokenizer_folder)
    with pytest.raises(UserError, match=r"tokenizer file tokenizer/deeper/vocabulary\.bin is"):
        average_checkpoints([first, second], tmp_path / "mean")


def test_broken_input_one_input_and_existing_output_are_refused(tmp_path: Path) -> None:
    folders = [save(tmp_path, i, {"w": torch.zeros(3)}) for i in (1, 2)]
    with pytest.raises(UserError, match="1 checkpoint given"):
        average_checkpoints([folders[0], folders[0]], tmp_path / "mean")
    with pytest.raises(UserError, match="`overwrite`"):
        average_checkpoints(folders, folders[0])
    (folders[1] / "model" / "tensors_00000_of_00001.safetensors").write_bytes(b"")
    with pytest.raises(BrokenCheckpoint, match="checkpoint_2"):
        average_checkpoints(folders, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_newest_checkpoints_of_a_run(tmp_path: Path) -> None:
    for updates in (9, 100, 20):
        save(tmp_path, updates, {"w": torch.zeros(1)})
    assert [folder.name for folder in newest_checkpoints(tmp_path, 2)] == ["checkpoint_20", "checkpoint_100"]
    with pytest.raises(UserError, match=r"has 3 checkpoints .*, 4 were requested"):
        newest_checkpoints(tmp_path, 4)


def test_an_average_of_averages_keeps_the_configuration(tmp_path: Path) -> None:
    folders = [save(tmp_path, i, {"w": torch.full((3,), float(i))}) for i in (1, 2)]
    first = average_checkpoints(folders, tmp_path / "first")
    second = average_checkpoints([first, folders[0]], tmp_path / "second")
    assert torch.equal(load_model_tensors(second)["w"], torch.full((3,), 1.25))
    assert read_config(second) == read_config(folders[0])


def test_how_attention_was_computed_may_differ(tmp_path: Path) -> None:
    options = {"_name": "glm", "hidden_size": 8}
    folders = [
        save(tmp_path, updates, {"w": torch.zeros(2)}, **options, attention=attention)
        for updates, attention in ((1, "sdpa"), (2, "eager"))
    ]
    output = average_checkpoints(folders, tmp_path / "mean")
    assert read_config(output)["model"]["attention"] == "eager"
    other = save(tmp_path, 3, {"w": torch.zeros(2)}, **options, attention="eager", dropout=0.3)
    with pytest.raises(UserError, match="model option dropout is only in"):
        average_checkpoints([folders[1], other], tmp_path / "refused")
