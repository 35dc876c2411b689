"""Runs of several processes that train an adapter say what one process says, and save the same files."""

from __future__ import annotations

import json
import math
import shlex

import pytest
import torch
from safetensors.torch import load_file

import ftk
from ftk.checkpoint import load_model_tensors
from ftk.checkpoint.adapter import FACTS, WEIGHTS
from ftk.checkpoint.layout import ADAPTER_CONFIG
from ftk.modules.adapters.adapt import is_part
from ftk.modules.adapters.ia3 import IA3
from ftk.modules.adapters.lora import LoRA
from ftk.modules.adapters.prefix import PrefixTuning
from ftk_cli.checkpoint import main as checkpoint
from tests.distributed import run_jobs
from tests.records import losses_of, records_of
from tests.tiers import slow_but, values_of
from tests.trainer.parallel_jobs import run_all, run_records

FLAGS = (
    "--device cpu --seq-length 48 --dropout 0 --attention-dropout 0 --embedding-dropout 0 --lr-scheduler constant "
    "--log-interval 1 --log-format json --max-valid-samples 8"
)
ADAPTER = "--train-also final_norm --lr 1e-2 --max-update 4"
LORA = "--adapter lora --lora-rank 4 --lora-alpha 8"
PREFIX = "--adapter prefix --num-virtual-tokens 3 --prefix-hidden-size 8"
ONE = "--batch-size 4 --update-freq 2"
FACTORS = "--adapter ia3"
# Outputs of a row layer and inputs of a column layer, whose vectors each rank has whole.
WHOLE_FACTORS = "--adapter ia3 --adapter-targets *.feed_forward.inner=inputs *.feed_forward.output *.attention.*"
ASKED = "--evaluate-with perplexity --evaluation-data FOLDER/text.txt"
TAUGHT = f"--teacher FOLDER/base --teacher-hidden-weight 0.5 {ASKED}"
# Name: what is trained, processes, their flags.
RUNS = {
    "float": ("base", 1, ONE),
    "int8": ("base-int8", 1, ONE),
    "decomposed": ("base", 1, f"{ONE} --weight-decomposed"),
    "taught": ("base", 1, f"{ONE} {TAUGHT}"),
    "still": ("base", 1, f"{ONE} --max-update 1 --lr 0"),
    "T2": ("base", 2, f"{ONE} --tensor-parallel-size 2"),
    "T2 sequence": ("base", 2, f"{ONE} --tensor-parallel-size 2 --sequence-parallel"),
    "T2 still": ("base", 2, f"{ONE} --tensor-parallel-size 2 --max-update 1 --lr 0"),
    "T4": ("base", 4, f"{ONE} --tensor-parallel-size 4"),
    "S2": ("base", 2, "--batch-size 4 --data-parallel-shard-size 2"),
    "S2 decomposed": ("base", 2, "--batch-size 4 --data-parallel-shard-size 2 --weight-decomposed"),
    "S2 int8": ("base-int8", 2, "--batch-size 4 --data-parallel-shard-size 2"),
    "S2 taught": ("base", 2, f"--batch-size 4 --data-parallel-shard-size 2 {TAUGHT}"),
    "R2 taught": ("base", 2, f"--batch-size 4 {TAUGHT}"),
    "R2": ("base", 2, "--batch-size 4"),
    "R2 int8": ("base-int8", 2, "--batch-size 4"),
    "P2": ("base", 2, f"{ONE} --pipeline-parallel-size 2"),
    "prefix": ("base", 1, f"{ONE} {PREFIX}"),
    "T2 prefix": ("base", 2, f"{ONE} {PREFIX} --tensor-parallel-size 2"),
    "P2 prefix": ("base", 2, f"{ONE} {PREFIX} --pipeline-parallel-size 2"),
    "S2 prefix": ("base", 2, f"--batch-size 4 {PREFIX} --data-parallel-shard-size 2 --compile block"),
    "asked": ("base", 1, f"{ONE} {ASKED}"),
    "asked compiled": ("base", 1, f"{ONE} {ASKED} --compile block"),
    "T2 asked": ("base", 2, f"{ONE} {ASKED} --tensor-parallel-size 2"),
    "ia3": ("base", 1, f"{ONE} {FACTORS}"),
    "T2 ia3": ("base", 2, f"{ONE} {FACTORS} --tensor-parallel-size 2"),
    "T2 sequence ia3": ("base", 2, f"{ONE} {FACTORS} --tensor-parallel-size 2 --sequence-parallel"),
    "P2 ia3": ("base", 2, f"{ONE} {FACTORS} --pipeline-parallel-size 2"),
    "S2 ia3": ("base", 2, f"--batch-size 4 {FACTORS} --data-parallel-shard-size 2"),
    "ia3 whole": ("base", 1, f"{ONE} {WHOLE_FACTORS}"),
    "T2 ia3 whole": ("base", 2, f"{ONE} {WHOLE_FACTORS} --tensor-parallel-size 2"),
    "T2 compiled": ("base", 2, f"{ONE} --tensor-parallel-size 2 --compile block --activation-checkpointing full"),
}
EXPECTED = {
    **dict.fromkeys(("T2", "T2 sequence", "T4", "S2", "R2", "P2", "T2 compiled"), "float"),
    **dict.fromkeys(("S2 int8", "R2 int8"), "int8"),
    **dict.fromkeys(("S2 taught", "R2 taught"), "taught"),
    "S2 decomposed": "decomposed",
    **dict.fromkeys(("T2 prefix", "P2 prefix", "S2 prefix"), "prefix"),
    **dict.fromkeys(("asked compiled", "T2 asked"), "asked"),
    **dict.fromkeys(("T2 ia3", "T2 sequence ia3", "P2 ia3", "S2 ia3"), "ia3"),
    "T2 ia3 whole": "ia3 whole",
}
QUICK = ("float", "taught", "still", "T2", "T2 still", "S2", "S2 taught", "asked", "T2 asked", "ia3", "T2 ia3")


@pytest.fixture(scope="module")
def runs(data_bin, tmp_path_factory, request):
    """The runs' folders lie in the one that is returned, beside base and base-int8."""
    folder = tmp_path_factory.mktemp("adapters")
    asked = values_of(request, "name")
    asked |= {"still", "T2 still", *(EXPECTED[name] for name in asked)}
    wanted = {name: run for name, run in RUNS.items() if name in asked}

    (folder / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(30)))
    run_records(data_bin, folder, [("base", 1, f"{FLAGS} --arch glm_tiny --num-layers 2 {ONE} --max-update 2")])
    assert checkpoint(["export", f"{folder}/base", f"{folder}/base-int8", "--quantize", "int8"]) == 0
    taken = f"{FLAGS} {ADAPTER} --finetune-from {folder}"
    run_records(
        data_bin,
        folder,
        [
            (name, size, f"{taken}/{source} {adapter_of(flags).replace('FOLDER', str(folder))}")
            for name, (source, size, flags) in wanted.items()
        ],
    )
    return folder


def adapter_of(flags):
    return flags if "--adapter" in flags else f"{LORA} {flags}"


@pytest.mark.parametrize("name", slow_but(QUICK, EXPECTED))
def test_a_run_of_several_processes_learns_what_one_process_learns(runs, name):
    found, expected = losses_of(runs / name), losses_of(runs / EXPECTED[name])
    assert len(found) == 4
    assert all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, expected, strict=True))
    assert abs(found[0] - found[-1]) > 1e-3
    one, other = (load_file(runs / run / "checkpoint_4" / "adapter" / WEIGHTS) for run in (name, EXPECTED[name]))
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "name", slow_but(QUICK, [name for name, one in EXPECTED.items() if one in ("taught", "asked")])
)
def test_validations_of_several_processes_say_what_one_process_says(runs, name):
    found, expected = (records_of(runs / run)[-1] for run in (name, EXPECTED[name]))
    of_teacher = ("task_loss", "teacher_kl", "teacher_hidden") if EXPECTED[name] == "taught" else ()
    for figure in ("loss", *of_teacher, "ppl", "perplexity_perplexity", "perplexity_bits_per_byte"):
        assert math.isclose(found[figure], expected[figure], rel_tol=1e-5, abs_tol=1e-7), figure
    assert not of_teacher or found["teacher_kl"] > 1e-5


@pytest.mark.parametrize("name", slow_but(QUICK, EXPECTED))
def test_the_base_stays_as_it_was(runs, name):
    before, after = load_model_tensors(runs / RUNS[name][0]), load_model_tensors(runs / name)
    parts = (*LoRA.PARTS, *IA3.PARTS, *PrefixTuning.PARTS)
    beside = [key for key in after if not is_part(key, parts) and not key.startswith("final_norm")]
    assert len(beside) == len(before) - 2
    assert all(torch.equal(after[key], before[key]) for key in beside)
    facts = [
        json.loads((runs / run / "checkpoint_4" / "adapter" / FACTS).read_text()) for run in (name, EXPECTED[name])
    ]
    assert facts[0] == facts[1]


def test_initial_values_and_files_are_the_same_bit_for_bit(runs):
    for file in (ADAPTER_CONFIG, WEIGHTS, FACTS):
        one, two = ((runs / run / "checkpoint_1" / "adapter" / file).read_bytes() for run in ("still", "T2 still"))
        assert one == two


@pytest.mark.parametrize("name", slow_but(QUICK, EXPECTED))
def test_an_adapter_of_several_processes_opens_beside_its_base(runs, name, tmp_path):
    tokens = torch.arange(40).reshape(2, 20)
    assert checkpoint(["adapter", str(runs / name), str(tmp_path / "alone")]) == 0
    models = ftk.load_model(runs / name, "cpu"), ftk.load_model(tmp_path / "alone", "cpu", base=runs / RUNS[name][0])
    with torch.no_grad():
        # Of a prefix the file of the adapter has what its network gives.
        torch.testing.assert_close(*(model(tokens) for model in models), rtol=0, atol=1e-5 if "prefix" in name else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ("base", "--tensor-parallel-size 2 --weight-decomposed", "--weight-decomposed needs whole rows of weights"),
        ("base-int8", "--tensor-parallel-size 2", "which tensor and pipeline parallel ranks cannot share"),
    ],
    ids=["decomposed", "int8"],
)
def test_what_ranks_cannot_share_is_refused(runs, data_bin, tmp_path, source, flags, message):
    words = f"{FLAGS} --finetune-from {runs / source} {ADAPTER} {LORA} {ONE} {flags} --save-dir {tmp_path / 'run'}"
    done = run_jobs(run_all, 2, [[str(data_bin), *shlex.split(words)]])
    assert done.returncode == 2
    assert message in done.stderr
