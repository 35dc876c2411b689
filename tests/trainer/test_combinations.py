"""What docs/model_parallel.md says of options that go together is what a run accepts, refuses or warns of.

That the accepted ones compute what one process computes: tests/trainer/test_parallel_training.py (R, S, T, P, sequence
parallel, ZeRO stages, schedules, offload, compile, checkpointing, precisions), test_memory.py (one process),
tests/model_parallel/test_data_parallel.py (copies with offload).
"""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from ftk.config import compose
from ftk.errors import UserError, with_flags
from ftk.trainer.config import TrainConfig
from ftk.trainer.parallel_check import check_parallel
from ftk.trainer.run import build_task
from tests.paths import ROOT

SIZES = {
    "R": "--data-parallel-replicate-size",
    "S": "--data-parallel-shard-size",
    "T": "--tensor-parallel-size",
    "P": "--pipeline-parallel-size",
}


def table():
    """(flag with its value, sizes, what the page says) of each cell."""
    text = (ROOT / "docs" / "model_parallel.md").read_text(encoding="utf-8")
    section = text.split("## What goes together")[1].split("\n## ")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    for row in rows:
        for flag in re.findall(r"`(--[^`]*)`", row[0]):
            for sizes, said in zip(header[1:], row[1:], strict=True):
                yield flag, sizes, said


CELLS = list(table())


RUN = shlex.split("--arch glm_tiny --seq-length 48 --max-update 1 --update-freq 4 --dry-run")


def outcome(data_bin, caplog, flags, sizes):
    """One of "yes", "no" and "no effect"."""
    given = [part for letter in re.findall("[RSTP]", sizes) for part in (SIZES[letter], "2")]
    try:
        check_parallel(*build_task(compose(TrainConfig, "ftk-train", "", [str(data_bin), *RUN, *flags, *given])))
    except UserError as error:
        message = with_flags(str(error))
        return "no" if "\n" not in message and flags[0] in f"--{message}".replace("_", "-") else message
    return "no effect" if "no effect on one process" in caplog.text else "yes"


@pytest.mark.parametrize(("flag", "sizes", "said"), CELLS)
def test_a_cell_of_the_table_is_what_a_run_does(data_bin, caplog, flag, sizes, said):
    assert outcome(data_bin, caplog, flag.split(), sizes) == said


@pytest.mark.parametrize("sizes", ["one process", "T"])
def test_norms_on_the_residual_path_keep_it_in_fp32(data_bin, caplog, sizes):
    flags = "--residual-precision same --precision bf16 --task masked_lm --arch bert_base --num-layers 2"
    assert outcome(data_bin, caplog, flags.split(), sizes) == "no"


def test_the_table_has_every_option_and_every_kind():
    assert {sizes for _, sizes, _ in CELLS} == {"one process", "R", "S", "T", "P", "P x S"}
    assert {said for *_, said in CELLS} == {"yes", "no", "no effect"}
    assert {flag.split()[0] for flag, *_ in CELLS} >= {"--zero-stage", "--cpu-offload", "--weights"}


@pytest.mark.parametrize("sizes", ["one process", *dict.fromkeys(sizes for _, sizes, _ in CELLS if "P" in sizes), "R"])
def test_stage_3_in_a_file_the_former_default_counts_as_not_given(tmp_path, data_bin, caplog, sizes):
    (tmp_path / "config.yaml").write_text("parallel: {zero_stage: 3}\n")
    assert outcome(data_bin, caplog, ["--config", str(tmp_path / "config.yaml")], sizes) == "yes"


@pytest.mark.parametrize("sizes", ["".join(several) for n in (3, 4) for several in itertools.combinations("RSTP", n)])
def test_all_sizes_go_together(data_bin, caplog, sizes):
    assert outcome(data_bin, caplog, ["--cpu-offload"], sizes) == "yes"
