"""ftk-plan on the command line: its table, its JSON, its errors."""

from __future__ import annotations

import json
import re

import pytest
import torch

from ftk.config import compose
from ftk.planner.layout import Layout
from ftk.planner.report import NOT_PLANNED
from ftk_cli.plan import PlanRoot, main, shape_of
from tests.model_parallel.planned_shapes import check_shapes

SMALL = ("--arch", "glm_tiny", "--global-batch-size", 64)
ALL_SIZES = ("--tensor-parallel-size", 2, "--pipeline-parallel-size", 1, "--data-parallel-shard-size", 2)
ALL_SIZES += ("--data-parallel-replicate-size", 1)


@pytest.fixture
def plan(here):
    """plan(*arguments, code=exit code) -> what ftk-plan says on stdout and stderr."""
    return lambda *arguments, code=0: here(main, *arguments, code=code)[1:]


def test_plans_side_by_side_and_the_first_in_detail(plan):
    out, _ = plan(*SMALL, "--gpus", 8, "--cluster", "a100-40g", "--top", 3)
    assert out.startswith(
        "model    glm_tiny\n         2,223,616 parameters; 4 layers, hidden 64, inner 256, 4 heads, 30592 tokens"
    )
    assert "cluster  8 a100, 8 a node; of each 36.8 GiB to use, 312 TFLOP/s, 300 GB/s in the node" in out
    head = next(line for line in out.splitlines() if line.startswith("T "))
    assert head.split() == [
        *("T", "P", "S", "R", "SP", "ZeRO", "checkpointing", "batch"),
        *("GiB", "step", "s", "MFU", "tokens/s/GPU", "waiting"),
    ]
    rows = out.splitlines()[out.splitlines().index(head) + 1 :][:3]
    assert all(len(row.split()) == 15 for row in rows)
    for part in (
        "The first of them:",
        "memory of a process",
        "messages of an update",
        "time of an update",
        "Times are estimates, never compared with a cluster. A layer of a micro-batch takes at least 0.3 ms: a guess",
        "Left out of",
    ):
        assert part in out
    assert "--tensor-parallel-size 1 --pipeline-parallel-size 1" in out
    assert "T does not divide 4 attention heads: T 8" not in out  # more than the heads is not tried
    unplanned = out.splitlines()[-1]
    assert unplanned.startswith("Assumed at their defaults: --cpu-offload, --pipeline-layers, --gradient-comp")


def test_json_holds_the_same_in_bytes_and_seconds(plan):
    out, _ = plan(
        *(*SMALL, "--json", "--top", 2, "--all", "--gpus", 4, "--tensor-parallel-size", 2, "--sequence-parallel"),
        *("--pipeline-parallel-size", 1, "--data-parallel-shard-size", 2, "--zero-stage", 2, "--batch-size", 8),
        *("--activation-checkpointing", "full", "--precision", "fp32", "--seq-length", 128, "--optimizer", "lion"),
        *("--loss-share", 0.5, "--matmul-efficiency", 0.5, "--ema", "--vocab-size", 1000),
    )
    found = json.loads(out)
    assert found["model"]["vocab_size"] == 1000
    assert found["model"]["name"] == "glm_tiny (vocab_size 1000)"
    assert found["work"] == {
        "global_batch": 64,
        "num_tokens": 128,
        "loss_share": 0.5,
        "precision": "fp32",
        "state_bytes": 4.0,
        "loss_chunk_tokens": 1024,
        "average_bytes": 4,
        "decoder_tokens": 0,
        "optimizer": "lion",
    }
    [plan] = found["plans"]  # everything was given
    assert found["feasible"] == 1
    layout = plan["layout"]
    assert (layout["tensor"], layout["shard"], layout["zero_stage"], layout["micro_batches"]) == (2, 2, 2, 4)
    memory = plan["memory_bytes"]
    assert memory["optimizer_state"] == memory["parameters"] == memory["average"] == memory["gradients"]
    assert memory["total"] == sum(value for name, value in memory.items() if name != "total")
    assert plan["seconds"]["total"] == pytest.approx(sum(v for k, v in plan["seconds"].items() if k != "total"))
    gathers = [m for m in plan["messages"] if m["what"] == "inputs of matrices"]
    assert {"--cpu-offload", "--pipeline-layers", "--gradient-compression"} < set(found["not_planned"])
    assert [(m["count"], m["message_bytes"]) for m in gathers] == [(4 * 2 * 4, 8 * 128 * 64 * 4)]
    assert "--sequence-parallel" in plan["flags"]
    assert "--zero-stage 2" in plan["flags"]
    assert plan["flags"].startswith("--seq-length 128 --precision fp32 ")
    assert plan["flags"].endswith(" --batch-size 8 --update-freq 4")


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_checkpointing_that_is_given_is_planned_alone(plan, mode):
    out, _ = plan(*SMALL, "--gpus", 2, "--activation-checkpointing", mode, "--all", "--top", 100, "--json")
    assert {plan["layout"]["checkpointing"] for plan in json.loads(out)["plans"]} == {mode}


@pytest.mark.parametrize(("arch", "share"), [("glm_tiny", 0.18), ("gpt2_tiny", 1.0), ("bert_tiny", 0.15)])
def test_the_share_of_loss_is_that_of_the_usual_task(plan, arch, share):
    out, _ = plan("--arch", arch, "--global-batch-size", 8, "--gpus", 1, "--json")
    assert json.loads(out)["work"]["loss_share"] == share


# Architecture, flags, tokens of both sides, the least of pipelines.
TWO_STACKS = {
    "t5": ("t5_tiny", [], (512, 114), None),  # as its task hides spans, 15 % of a text
    "t5, longer than its usual texts": ("t5_tiny", ["--seq-length", 1024], (1024, 229), None),
    "t5, both given": ("t5_1_1_small", ["--seq-length", 64, "--target-length", 16], (64, 16), None),
    "bart": ("bart_tiny", ["--seq-length", 256], (256, 256), 2),
    "fairseq": ("transformer_tiny", ["--seq-length", 256, "--target-length", 64], (256, 64), 2),
    "fairseq, norms in front": ("transformer_tiny", ["--norm-first"], (1024, 1024), None),
}


def on_meta(model):
    with torch.device("meta"):
        return model.build()


@pytest.mark.parametrize(("arch", "flags", "tokens", "stages"), TWO_STACKS.values(), ids=TWO_STACKS)
def test_encoder_decoders_have_two_lengths(plan, arch, flags, tokens, stages):
    """And a pipeline, where nothing but the ends is in no layer."""
    given = ("--arch", arch, "--global-batch-size", 8, "--gpus", 2, *flags)
    found = json.loads(plan(*given, "--json")[0])
    first = {name: value for name, value in found["plans"][0]["layout"].items() if name != "micro_batches"}
    model = compose(PlanRoot, "ftk-plan", "", [*map(str, given)]).model
    assert check_shapes(lambda: on_meta(model), shape_of(model), Layout(**first)).differences == []
    assert (found["work"]["num_tokens"], found["work"]["decoder_tokens"]) == tokens
    assert found["plans"][0]["flags"].startswith(f"--seq-length {tokens[0]} ")
    pipelines = {one["layout"]["pipeline"] for one in found["plans"]} - {1}
    assert pipelines == ({stages} if stages else set())
    assert (stages is None) == ("the model has no pipeline stages that can be planned" in found["refused"])
    text = plan(*given)[0]
    assert re.search(r"; (\d) \+ \1 layers, hidden", text)
    assert f"8 samples of {tokens[0]:,} tokens for the encoder and {tokens[1]:,} for the decoder, in all" in text


def test_schedules_and_stages(plan):
    out, _ = plan(
        *(*SMALL, "--gpus", 2, "--pipeline-parallel-size", 2, "--json"),
        *("--pipeline-schedule", "zero-bubble", "--pipeline-stages-per-rank", 2),
    )
    layouts = [plan["layout"] for plan in json.loads(out)["plans"]]
    assert {(layout["schedule"], layout["stages_per_rank"]) for layout in layouts} == {("zero-bubble", 2)}


def test_clusters_of_other_makers(plan):
    out, _ = plan(
        *(*SMALL, "--gpus", 8, "--gpus-per-node", 4, "--memory-gib", 10, "--memory-reserve", 0, "--peak-tflops", 50),
        *("--node-bandwidth", 30, "--network-bandwidth", 3, "--memory-bandwidth", 500),
    )
    assert "4 a node; of each 10.0 GiB to use, 50 TFLOP/s, 30 GB/s in the node, 3 GB/s between nodes" in out


def test_all_that_fit_are_listed_where_one_asks_for_it(plan):
    lines = {}
    for flags in ((), ("--all",)):
        out, _ = plan(*SMALL, "--gpus", 4, "--top", 10000, *flags)
        lines[flags] = [line.split()[:4] for line in out.partition("waiting\n")[2].partition("\n\n")[0].splitlines()]
    meshes = {tuple(sizes) for sizes in lines[("--all",)]}
    assert len(lines[()]) == len(meshes) < len(lines[("--all",)])


def test_the_flags_that_are_said_to_be_left_out_are_those_of_ftk_train(command):
    help_text = command("ftk-train", "--help", "all").stdout
    assert set(NOT_PLANNED) < set(re.findall(r"^  (--[a-z-]+)", help_text, flags=re.MULTILINE))


def test_nothing_fits(plan):
    out, _ = plan(*SMALL, "--gpus", 3, "--memory-gib", 0.01, code=1)
    assert "Nothing fits." in out
    assert "R x S does not divide the 64 samples of an update: 3" in out
    assert "The least memory:" in out


def test_where_memory_is_not_the_matter_it_is_not_blamed(plan):
    out, _ = plan(*SMALL, "--gpus", 3, "--pipeline-parallel-size", 1, code=1)
    assert "Nothing is possible with 64 samples per update, for the reasons below." in out
    assert "R x S does not divide the 64 samples of an update: 3" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", 8), "ftk-plan: --arch is missing; there are "),
        (("--arch", "glm_tiny"), "ftk-plan: --global-batch-size is missing: samples of an update"),
        ((*SMALL, "--gpus", 12), "ftk-plan: --gpus is 12; more than one node must be whole nodes of 8"),
        ((*SMALL, "--seq-length", 600), "ftk-plan: --seq-length 600 is more than the 512 positions of the model"),
        ((*SMALL, "--cluster", "v100-32g"), "ftk-plan: precision is bf16, which v100-32g does not compute in"),
        ((*SMALL, "--cluster", "h100"), "ftk-plan: --cluster is 'h100'; it must be one of v100-16g, v100-32g"),
        ((*SMALL, "--num-layers", 0), "ftk-plan: --num-layers is 0; it must be at least 1"),
        (
            (*SMALL, "--gpus", 8, "--tensor-parallel-size", 3),
            "ftk-plan: --tensor-parallel-size 3 does not divide the number of GPUs, 8; give sizes that do",
        ),
        (
            (*SMALL, "--gpus", 8, "--tensor-parallel-size", 2, "--data-parallel-shard-size", 8),
            "ftk-plan: --tensor-parallel-size 2 x --data-parallel-shard-size 8 = 16 does not divide the number of GPUs",
        ),
        (
            (*SMALL, "--gpus", 8, *ALL_SIZES),
            "ftk-plan: --tensor-parallel-size 2 x --pipeline-parallel-size 1 x --data-parallel-shard-size 2 x "
            "--data-parallel-replicate-size 1 = 4 is not the number of GPUs, 8; leave out one size, or give --gpus 4",
        ),
        ((*SMALL, "--target-length", 8), "ftk-plan: --target-length is for encoder-decoders, and this model has one"),
        (
            ("--arch", "bart_tiny", "--global-batch-size", 8, "--target-length", 1025),
            "ftk-plan: --target-length 1025 is more than the 1024 positions of the model; give --max-positions too",
        ),
        ((*SMALL, "--top", 0), "ftk-plan: --top is 0; it must be at least 1"),
    ],
)
def test_mistakes_are_told_in_a_line(plan, arguments, message):
    out, err = plan(*arguments, code=2)
    assert err.startswith(message), err
    assert out == ""
    assert "Traceback" not in err


def test_models_of_plugins_are_planned_or_refused(command, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from ftk.registry import register_architecture, register_model\n"
        "@dataclass(kw_only=True)\n"
        "class Config:\n"
        "    width: int = 8\n"
        "@register_model('mine', config=Config)\n"
        "class Mine(nn.Module):\n"
        "    def __init__(self, config):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList([nn.Linear(config.width, config.width)])\n"
        "@register_architecture('mine_small', model='mine')\n"
        "def small():\n"
        "    return Config()\n"
    )
    done = command("ftk-plan", "--user-dir", tmp_path, "--arch", "mine_small", "--global-batch-size", 8, code=2)
    assert "ftk-plan: Mine cannot be planned: it has no num_layers" in done.stderr


def test_a_plugins_encoder_decoder_has_the_decoders_length_of_its_task(command, tmp_path):
    """Whose options need have no `seq_length`."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from ftk.models.config import register_family\n"
        "from ftk.models.t5 import T5Config\n"
        "from ftk.registry import register_task\n"
        "from ftk.tasks.encoder_decoder import EncoderDecoderTask\n"
        "@dataclass(kw_only=True)\n"
        "class Config:\n"
        "    words: int = 24\n"
        "@register_task('pairs', config=Config)\n"
        "class Pairs(EncoderDecoderTask):\n"
        "    @classmethod\n"
        "    def longest(cls, config):\n"
        "        return 99, config.words\n"
        "register_family('mine', T5Config, 'ftk.models.t5.model:T5', task='pairs')('mine_tiny', 2, 64, 4)\n"
    )
    flags = ("--user-dir", tmp_path, "--arch", "mine_tiny", "--global-batch-size", 8, "--seq-length", 64, "--json")
    done = command("ftk-plan", *flags, code=0)
    work = json.loads(done.stdout)["work"]
    assert (work["num_tokens"], work["decoder_tokens"]) == (64, 24)
