"""Adam's moments of original GLM checkpoints stay with their weights, whatever the number of parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftk.checkpoint import load_model_state, load_optimizer_state, verify
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from tests.records import assert_same_tensors

from .test_convert import (
    HEADS,
    convert_from_original,
    convert_to_original,
    cut_as_megatron_does,
    original_state,
    write_original,
)

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-6}


def is_plain(name: str) -> bool:
    return name.endswith(".bias") or "layernorm" in name


def moments_of(state: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Some moments for each parameter, which tell it from all others."""
    return {
        kind: {name: (value * factor + len(name)).square() for name, value in state.items()}
        for kind, factor in (("exp_avg", 3.0), ("exp_avg_sq", 5.0))
    }


def adam_of(module: dict[str, torch.Tensor], moments: dict[str, dict[str, torch.Tensor]], steps: int) -> dict:
    """The state dict of torch's own Adam over the two groups of the original, filled by name."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in module.items()}
    members = [[n for n in module if not is_plain(n)], [n for n in module if is_plain(n)]]
    groups = [
        {"params": [parameters[name] for name in names], "weight_decay": decay}
        for names, decay in zip(members, (0.1, 0.0), strict=True)
    ]
    optimizer = torch.optim.Adam(groups, **OPTIONS)
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps)),
            **{kind: moments[kind][name].clone() for kind in moments},
        }
    return optimizer.state_dict()


def parts_with_adam(num_parts: int, steps: int = 12) -> list[dict]:
    state = original_state()
    moments = {kind: cut_as_megatron_does(tensors, num_parts) for kind, tensors in moments_of(state).items()}
    return [
        {
            "module": module,
            "iteration": 7,
            "optimizer": adam_of(module, {kind: cut[rank] for kind, cut in moments.items()}, steps),
        }
        for rank, module in enumerate(cut_as_megatron_does(state, num_parts))
    ]


def assert_same_adam(found: dict, wanted: dict) -> None:
    assert found["state"].keys() == wanted["state"].keys()
    for number, entries in wanted["state"].items():
        assert_same_tensors(found["state"][number], entries)
    for group, right in zip(found["param_groups"], wanted["param_groups"], strict=True):
        assert {key: group[key] for key in right} == right


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 4)])
def test_the_number_of_parts_changes_and_adam_goes_with_the_weights(tmp_path: Path, before: int, after: int) -> None:
    source = write_original(tmp_path / "original", parts_with_adam(before))
    ours = convert_from_original(source, tmp_path / "ours", num_attention_heads=HEADS)
    assert verify(ours) == []
    back = convert_to_original(ours, tmp_path / "back", num_parts=after)
    for rank, wanted in enumerate(parts_with_adam(after)):
        content = torch.load(back / f"mp_rank_{rank:02d}_model_states.pt", weights_only=True)
        assert list(content["module"]) == list(wanted["module"])  # the order is what parameters are numbered by
        assert_same_tensors(content["module"], wanted["module"])
        assert_same_adam(content["optimizer"], wanted["optimizer"])


def test_an_adam_of_ours_goes_on_from_it(tmp_path: Path) -> None:
    source = write_original(tmp_path / "original", parts_with_adam(2))
    ours = convert_from_original(source, tmp_path / "ours", num_attention_heads=HEADS)
    state = original_state()
    config = GLMConfig(
        vocab_size=state["word_embeddings.weight"].size(0),
        hidden_size=state["word_embeddings.weight"].size(1),
        num_layers=len([name for name in state if name.endswith("dense_h_to_4h.weight")]),
        num_attention_heads=HEADS,
        max_positions=state["transformer.position_embeddings.weight"].size(0) - 1,
    )
    model = GLM(config)
    load_model_state(ours, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load_optimizer_state(ours, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5  # its own
    mine = optimizer.state[model.layers[0].feed_forward.output.weight]
    assert int(mine["step"]) == 12
    assert torch.equal(mine["exp_avg"], moments_of(state)["exp_avg"]["transformer.layers.0.mlp.dense_4h_to_h.weight"])
    rows = moments_of(state)["exp_avg_sq"]["transformer.layers.0.attention.query_key_value.bias"]
    per_head = rows.view(3, HEADS, -1).transpose(0, 1).reshape(-1)
    assert torch.equal(optimizer.state[model.layers[0].attention.qkv.bias]["exp_avg_sq"], per_head)


@pytest.mark.parametrize("damage", ["one group", "no moments", "uneven steps", "deepspeed"])
def test_another_optimizer_is_said_and_the_weights_are_taken(tmp_path: Path, caplog, damage: str) -> None:
    parts = parts_with_adam(2)
    if damage == "one group":
        parts[1]["optimizer"]["param_groups"].pop()
    elif damage == "no moments":
        del parts[0]["optimizer"]["state"][0]["exp_avg"]
    elif damage == "uneven steps":
        parts[0]["optimizer"]["state"][3]["step"] = torch.tensor(11.0)
    else:
        for part in parts:
            part["optimizer"] = {"loss_scaler": 1.0, "fp32_groups_flat": [torch.zeros(3)]}
    source = write_original(tmp_path / "original", parts)
    ours = convert_from_original(source, tmp_path / "ours", num_attention_heads=HEADS)
    assert "only the weights are read" in caplog.text
    assert not (ours / "optimizer").exists()
    back = convert_to_original(ours, tmp_path / "back")
    content = torch.load(back / "mp_rank_00_model_states.pt", weights_only=True)
    assert_same_tensors(content["module"], original_state())
    assert "optimizer" not in content


def test_apex_counts_steps_in_the_group(tmp_path: Path) -> None:
    parts = parts_with_adam(1)
    for state in parts[0]["optimizer"]["state"].values():
        del state["step"]
    for group in parts[0]["optimizer"]["param_groups"]:
        group["step"] = 12
    source = write_original(tmp_path / "original", parts)
    back = convert_to_original(
        convert_from_original(source, tmp_path / "ours", num_attention_heads=HEADS), tmp_path / "back"
    )
    content = torch.load(back / "mp_rank_00_model_states.pt", weights_only=True)
    assert_same_adam(content["optimizer"], parts_with_adam(1)[0]["optimizer"])
