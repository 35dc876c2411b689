"""ftk-generate in ranks that share a model: what one process writes."""

from __future__ import annotations

import json

import pytest

from ftk_cli import generate
from tests.distributed import run_main
from tests.small_run import LINES, save_run

SIZES = {"tensor": ("--tensor-parallel-size", "2"), "pipeline": ("--pipeline-parallel-size", "2")}
PROMPTS = [
    "the quick [MASK] fox jumps [sMASK] .",
    "",
    "a lazy dog",
    "she reads [mask] letters",
    *(line[:50] + " [MASK]" for line in LINES[:6]),
]


COMMON = ("--path", "two-layers", "--device", "cpu", "--max-len", "4", "--batch-size", "1")


def shared(place, *arguments):
    """(code, lines of stdout, what ftk-generate says on stderr) of two ranks."""
    ended = run_main(generate.main, [[*COMMON, *map(str, arguments)]] * 2, cwd=place)
    [code] = set(ended.codes)
    said = [line for line in ended.stderr.splitlines() if line.startswith("ftk-generate")]
    return code, ended.stdout.splitlines(), said


@pytest.fixture(scope="module")
def two_layers(place):
    """`place` with a checkpoint that a pipeline of two can share, and prompts, some of which cannot be answered."""
    save_run(place / "two-layers" / "checkpoint_1", place / "data-bin", num_layers=2)
    (place / "prompts").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return place


def assert_same_records(found, expected):
    """Tokens and texts equal, numbers to the last digits but one."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one["id"], one.get("text"), one.get("error")) == (other["id"], other.get("text"), other.get("error"))
        for answer, its in zip(one.get("answers", ()), other.get("answers", ()), strict=True):
            assert answer["tokens"] == its["tokens"]
            assert answer["token_logprobs"] == pytest.approx(its["token_logprobs"], abs=2e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_two_processes_write_what_one_writes_and_go_on_where_the_file_was_cut(ask, two_layers, tmp_path, sizes):
    command = ("--input", "prompts", "--output-format", "json", "--beam", "2")
    results = ("--results-path", str(tmp_path / "results"))
    code, stdout, said = ask(generate.main, *COMMON, *command)
    expected = [json.loads(line) for line in stdout]
    assert (code, len(expected), len(said)) == (1, len(PROMPTS), 5)

    code, stdout, shared_said = shared(two_layers, *command, *results, *SIZES[sizes])
    assert (code, stdout) == (1, [])
    assert [line.split(" in ")[0] for line in shared_said] == [line.split(" in ")[0] for line in said]  # said once
    whole = (tmp_path / "results").read_bytes()
    assert_same_records([json.loads(line) for line in whole.splitlines()], expected)

    (tmp_path / "results").write_bytes(whole[:-20])
    code, _, again = shared(two_layers, *command, *results, *SIZES[sizes])
    assert code == 1
    assert "after 8 of an earlier run" in "".join(again)
    assert (tmp_path / "results").read_bytes() == whole

    # The sizes are no settings: another number of processes may go on.
    (tmp_path / "results").write_bytes(whole[:-20])
    _, _, again = ask(generate.main, *COMMON, *command, *results, code=1)
    assert "after 8 of an earlier run" in "".join(again)
    assert_same_records([json.loads(line) for line in (tmp_path / "results").read_bytes().splitlines()], expected)


def test_a_subset_is_printed_once_with_its_scores(ask, two_layers):
    command = ("data-bin", "--max-samples", "4", "--output-format", "json", "--scoring", "token_f1")
    _, stdout, said = ask(generate.main, *COMMON, *command)
    code, shared_out, shared_said = shared(two_layers, *command, *SIZES["pipeline"])
    assert code == 0
    assert_same_records(*([json.loads(line) for line in lines] for lines in (shared_out, stdout)))
    assert len(shared_said) == sum(line.startswith("ftk-generate") for line in said) == 1


def test_a_mistake_is_said_once_and_leaves_no_file(two_layers, tmp_path):
    words = "--input prompts --max-len 500 --output-format json --results-path"
    code, stdout, said = shared(two_layers, *words.split(), tmp_path / "results", *SIZES["tensor"])
    assert (code, stdout, len(said)) == (2, [], 1)
    assert said[0].endswith(" --max-len can be at most 128")
    assert list(tmp_path.iterdir()) == []
