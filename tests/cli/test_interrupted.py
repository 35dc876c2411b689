"""Runs that are interrupted or killed in the middle, and continued: the same bytes as without that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from ftk.tasks.glm_blank import BlankFiller
from ftk_cli import generate
from ftk_cli.progress import BATCHES_AT_ONCE
from tests.small_run import LINES
from tests.tiers import slow_but

STRATEGIES = {
    "greedy": (),
    "sampling": ("--sampling", "--top-p", "0.95", "--nbest", "2", "--seed", "3"),
    "beam": ("--beam", "3", "--nbest", "2", "--alternatives", "2"),
    "confident": ("--blank-order", "confident"),
}


def prompts(count):
    """Prompts of many lengths, some with two blanks, some that cannot be answered."""
    lines = []
    for number in range(count):
        words = LINES[number % len(LINES)].split()[: 3 + number % 11]
        words[number % len(words)] = "[MASK]"
        if number % 3 == 0:
            words.append(f"{number} [sMASK]")
        lines.append("" if number % 17 == 5 else " ".join(words))
    return lines


@pytest.fixture
def command(place):
    (place / "many").write_text("\n".join(prompts(60)) + "\n", encoding="utf-8")
    return ("--path", "run", "--input", "many", "--max-len", "6", "--batch-size", "2", "--output-format", "json")


@pytest.mark.parametrize("strategy", slow_but(("sampling",), STRATEGIES))
def test_cut_anywhere_the_same_prompts_are_answered_together_and_the_bytes_are_the_same(
    ask, command, tmp_path, monkeypatch, strategy
):
    """A number's last digits may show who stood beside it in the batch: a block of prompts is begun anew as a whole."""
    blocks, original = [], BlankFiller.generate_encoded

    def recorded(self, given, *arguments, **options):
        blocks.append([prompt.prompt for prompt in given])
        return original(self, given, *arguments, **options)

    monkeypatch.setattr(BlankFiller, "generate_encoded", recorded)
    path = tmp_path / "results"
    whole_command = (generate.main, *command, *STRATEGIES[strategy], "--results-path", str(path))
    assert ask(*whole_command)[0] == 1
    whole, all_blocks = path.read_bytes(), list(blocks)
    assert len(all_blocks) == 4
    for share in (0.35, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        blocks.clear()
        assert ask(*whole_command)[0] == 1
        assert path.read_bytes() == whole
        assert blocks == all_blocks[-len(blocks) :]
        assert len(blocks) == 4 - whole[: int(len(whole) * share)].count(b"\n") // (2 * BATCHES_AT_ONCE)
    blocks.clear()
    assert ask(*whole_command)[0] == 1
    assert blocks == []


@pytest.mark.slow
def test_killed_and_interrupted_in_the_middle_it_goes_on_to_the_same_bytes(ask, command, place, tmp_path):
    (place / "many").write_text("\n".join(prompts(300)) + "\n", encoding="utf-8")
    options = (*command, *STRATEGIES["sampling"])
    assert ask(generate.main, *options, "--results-path", str(tmp_path / "whole"))[0] == 1
    whole, path = (tmp_path / "whole").read_bytes(), tmp_path / "results"
    for sent in (signal.SIGKILL, signal.SIGINT):
        before = path.read_bytes() if path.exists() else b""
        error = stopped(sent, place, (*options, "--results-path", str(path)))
        part = path.read_bytes()
        assert len(before) < len(part) < len(whole), "it was not in the middle"
        if sent == signal.SIGINT:
            *_, kept, last = error.splitlines()
            assert last == "ftk-generate: interrupted"
            assert kept.endswith(f"Partial results are in {path}; run the same command to continue.")
            assert whole.startswith(part)
            assert part.endswith(b"\n")
        else:
            assert whole.startswith(part)
    _, _, err = ask(generate.main, *options, "--results-path", str(path), code=1)
    assert "of an earlier run" in err[-2]
    assert path.read_bytes() == whole


def stopped(sent, folder, options):
    """Starts ftk-generate, sends it a signal when it has written its first block, and gives what stderr said."""
    code = (
        "import sys, time; from ftk_cli.generate import main; from ftk_cli.results import ResultsFile as R\n"
        "write = R.write\n"
        "R.write = lambda *a: (write(*a), print('written', file=sys.__stdout__, flush=True), time.sleep(3600))\n"
        "sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout.readline() == "written\n"
        process.send_signal(sent)
        _, error = process.communicate(timeout=600)
        assert process.returncode == (-sent if sent == signal.SIGKILL else 1)
        return error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()
