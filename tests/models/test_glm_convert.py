"""Published checkpoints become ours and back without a value lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.models.glm import GLMConfig
from ftk.models.glm.convert import config_from_original, from_original, merge_parts, split_parts, to_original
from ftk.models.glm.model import GLM
from ftk.models.glm.original import OriginalGLM

HEADS = 4
CONFIG = GLMConfig(num_attention_heads=HEADS)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_original_weights_survive_the_round_trip(original_weights: dict[str, Tensor]) -> None:
    ours = from_original(original_weights, CONFIG)
    assert equal(to_original(ours, CONFIG), original_weights)


def test_converted_names_are_exactly_the_models(original_weights: dict[str, Tensor], golden_config: GLMConfig) -> None:
    expected = {name: value.shape for name, value in GLM(golden_config).state_dict().items()}
    assert {name: v.shape for name, v in from_original(original_weights, CONFIG).items()} == expected


def test_query_key_value_rows_are_regrouped_per_head() -> None:
    rows = torch.arange(3 * 8)[:, None].expand(-1, 8)  # hidden size 8, 2 heads of 4: row number in each row
    name = "transformer.layers.0.attention.query_key_value.weight"
    converted = from_original({name: rows}, GLMConfig(num_attention_heads=2))["layers.0.attention.qkv.weight"][:, 0]
    head0, head1 = [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    assert converted.tolist() == head0 + head1


def test_config_is_read_from_the_shapes(original_weights: dict[str, Tensor], golden_config: GLMConfig) -> None:
    found = config_from_original(original_weights, HEADS)
    for field in ("vocab_size", "num_layers", "hidden_size", "num_attention_heads", "max_positions"):
        assert getattr(found, field) == getattr(golden_config, field), field
    assert found.block_positions
    assert found.ffn_hidden_size is None


def test_config_without_block_positions_counts_every_row_as_a_position() -> None:
    shape = GLMConfig(
        vocab_size=24,
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        max_positions=10,
        ffn_hidden_size=20,
        block_positions=False,
    )
    found = config_from_original(to_original(GLM(shape).state_dict(), shape), 2)
    assert found == shape


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_parts_merge_into_what_was_split(original_weights: dict[str, Tensor], num_parts: int) -> None:
    parts = split_parts(original_weights, num_parts)
    assert len(parts) == num_parts
    assert equal(merge_parts(parts), original_weights)


def test_parts_are_cut_as_megatron_cuts_them(original_weights: dict[str, Tensor]) -> None:
    first, second = split_parts(original_weights, 2)
    layer = "transformer.layers.0."
    qkv = original_weights[layer + "attention.query_key_value.weight"]  # [192, 64], thirds of 64 rows
    expected = torch.cat([qkv[32:64], qkv[96:128], qkv[160:192]])
    assert torch.equal(second[layer + "attention.query_key_value.weight"], expected)
    assert torch.equal(second["word_embeddings.weight"], original_weights["word_embeddings.weight"][64:])
    inner = layer + "mlp.dense_h_to_4h.bias"
    assert torch.equal(first[inner], original_weights[inner][:128])
    for name in ("attention.dense.weight", "mlp.dense_4h_to_h.weight"):
        whole = original_weights[layer + name]
        assert torch.equal(second[layer + name], whole[:, whole.size(1) // 2 :])
    for name in (layer + "attention.dense.bias", "transformer.position_embeddings.weight"):
        assert torch.equal(second[name], original_weights[name])


def test_one_part_of_each_half_is_that_of_a_finer_split(original_weights: dict[str, Tensor]) -> None:
    halves = split_parts(original_weights, 2)
    quarters = split_parts(original_weights, 4)
    assert equal(merge_parts(quarters[:2]), halves[0])
    assert equal(merge_parts(quarters[2:]), halves[1])


def test_original_folder_loads_without_unpickling_code(
    original_folder: Path, original_weights: dict[str, Tensor]
) -> None:
    path = original_folder / "150000" / "mp_rank_00_model_states.pt"
    assert equal(merge_parts([torch.load(path, weights_only=True)["module"]]), original_weights)


def test_a_folder_is_known_by_its_tracker_as_others_of_deepspeed_have_parts_of_these_names(
    original_folder: Path, tmp_path: Path
) -> None:
    assert OriginalGLM.recognises(original_folder)
    assert OriginalGLM.recognises(original_folder / "150000")
    shutil.copytree(original_folder / "150000", tmp_path / "global_step5")
    (tmp_path / "latest").write_text("global_step5")
    assert not OriginalGLM.recognises(tmp_path)
    assert not OriginalGLM.recognises(tmp_path / "global_step5")


def test_a_parameter_that_glm_does_not_have_is_named(original_weights: dict[str, Tensor]) -> None:
    with pytest.raises(UserError, match=r"'prompt_spell\.lstm_head\.weight_ih_l0' has no place in the model"):
        from_original(original_weights | {"prompt_spell.lstm_head.weight_ih_l0": torch.zeros(1)}, CONFIG)


def test_heads_that_do_not_divide_are_refused(original_weights: dict[str, Tensor]) -> None:
    with pytest.raises(UserError, match=r"query_key_value.weight \[192, 64\]: does not have the shape"):
        from_original(original_weights, GLMConfig(num_attention_heads=5))
    with pytest.raises(UserError, match="num_attention_heads is 5; it must divide hidden_size 64"):
        config_from_original(original_weights, 5)


def test_parts_of_different_models_are_refused(original_weights: dict[str, Tensor]) -> None:
    first, second = split_parts(original_weights, 2)
    del second["word_embeddings.weight"]
    with pytest.raises(UserError, match=r"mp_rank_01 and mp_rank_00 .* 'word_embeddings\.weight'"):
        merge_parts([first, second])


def test_a_split_that_does_not_come_out_even_is_refused(original_weights: dict[str, Tensor]) -> None:
    with pytest.raises(UserError, match="3 model-parallel parts do not divide"):
        split_parts(original_weights, 3)


def test_a_state_dict_that_is_no_glm_is_refused() -> None:
    with pytest.raises(UserError, match=r"there is no 'word_embeddings\.weight'; found wte\.weight"):
        config_from_original({"wte.weight": torch.zeros(2, 2)}, 2)
