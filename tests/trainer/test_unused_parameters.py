"""A parameter that has no part in the loss: copies of the model refuse it by name, or look for it where told to."""

from __future__ import annotations

import math
import shlex

import pytest

from tests.distributed import run_jobs
from tests.records import records_of
from tests.trainer.parallel_jobs import run_all

FLAGS = (
    "--arch glm_tiny_extra --device cpu --num-layers 2 --dropout 0 --attention-dropout 0 --embedding-dropout 0 "
    "--lr 1e-3 --seq-length 48 --log-interval 1 --log-format json --max-update 3 --valid-subset none"
)
PLUGIN = """
import dataclasses
from torch import nn
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from ftk.registry import register_architecture, register_model


@register_model("glm_extra", config=GLMConfig, task="glm_blank")
def build(config, seed=None):
    model = GLM(config, seed)
    model.extra = nn.Linear(3, 3)
    nn.init.ones_(model.extra.weight)
    nn.init.zeros_(model.extra.bias)
    return model


@register_architecture("glm_tiny_extra", model="glm_extra")
def glm_tiny_extra():
    return GLMConfig(num_layers=4, hidden_size=64, num_attention_heads=4)
"""


@pytest.fixture(scope="module")
def runs(data_bin, tmp_path_factory, command):
    """The records of one process and of two that look for unused parameters, and what two that do not look say."""
    folder = tmp_path_factory.mktemp("unused")
    (folder / "plugin").mkdir()
    (folder / "plugin" / "__init__.py").write_text(PLUGIN)
    flags = [str(data_bin), *shlex.split(FLAGS), "--user-dir", str(folder / "plugin"), "--save-dir"]
    command("ftk-train", *flags, folder / "alone", "--batch-size", 2, "--update-freq", 2, code=0)
    looking = [*flags, str(folder / "two"), "--batch-size", "2", "--find-unused-parameters"]
    plain = [*flags, str(folder / "refused"), "--batch-size", "2"]
    done = run_jobs(run_all, 2, [looking, plain])
    return [records_of(folder / name) for name in ("alone", "two")], done


def test_copies_that_look_for_it_train_as_one_process(runs):
    (alone, two), _ = runs
    assert [record["num_updates"] for record in two] == [1, 2, 3]
    for one, several in zip(alone, two, strict=True):
        for name in ("loss", "gnorm"):
            assert math.isclose(one[name], several[name], rel_tol=1e-5), (name, one, several)


def test_copies_that_do_not_look_refuse_it_by_name(runs):
    _, done = runs
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("ftk-train: ")]
    assert said[0].startswith(  # another process may say the same on the same line
        "ftk-train: extra.weight, extra.bias had no part in the loss and no gradient; give --find-unused-parameters, "
        "or --freeze what is not to be trained"
    )
