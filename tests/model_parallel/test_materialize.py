"""From the meta device to memory: what is tied stays tied, and what no checkpoint holds is not left to chance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftk.errors import UserError
from ftk.model_parallel.materialize import allocate, fill_unsaved, non_persistent_buffers
from ftk.model_parallel.tensor_parallel.plan import plan_of
from ftk.models import build_model

CPU = torch.device("cpu")


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("saved", torch.ones(4))
        self.register_buffer("frequencies", torch.ones(4), persistent=False)
        self.register_buffer("nothing", None, persistent=False)
        self.register_buffer("type_only", torch.ones(0), persistent=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Rotary(), Rotary()
        self.second.weight = self.first.weight


def allocated(kind=Model):
    with torch.device("meta"):
        model = kind()
    allocate(model, CPU)
    return model


def test_memory_comes_without_untying():
    model = allocated()
    assert model.first.weight is model.second.weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_buffers_that_are_in_no_checkpoint_are_found():
    unsaved = non_persistent_buffers(Model())
    assert unsaved == {f"{part}.{name}" for part in ("first", "second") for name in ("frequencies", "type_only")}
    assert not unsaved & Model().state_dict().keys()


def test_a_buffer_that_nobody_fills_is_refused():
    with pytest.raises(UserError, match=r"Model: the buffer first.frequencies is in no checkpoint.*persistent=True"):
        fill_unsaved(allocated())


def test_a_model_fills_its_own_buffers():
    class Filled(Model):
        def initial_value(self, name, shape, seed):
            return torch.full(shape, float(len(name)))

    model = allocated(Filled)
    model.first.saved.fill_(5.0)
    fill_unsaved(model)
    assert model.first.frequencies.tolist() == [float(len("first.frequencies"))] * 4
    assert model.second.frequencies.tolist() == [float(len("second.frequencies"))] * 4
    assert model.first.saved.tolist() == [5.0] * 4


def test_a_model_without_unsaved_buffers_is_left_alone():
    model = build_model("glm_tiny")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fill_unsaved(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_a_plan_is_told_what_else_there_is():
    with pytest.raises(UserError, match=r"`tensor_parallel_size` 2: Model has no plan.*`data_parallel_shard_size`"):
        plan_of(Model(), 2)
    assert plan_of(build_model("glm_tiny"), 2)["token_embedding"]
