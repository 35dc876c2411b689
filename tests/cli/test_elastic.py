"""A run on two machines, played by two agents on this one: one is lost, comes back, and the run goes on."""

from __future__ import annotations

import sys

import pytest

from ftk_cli.train import main
from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from elastic_test import Play, lose_and_return, machines, records

pytestmark = pytest.mark.slow


def test_a_machine_that_is_lost_and_comes_back_goes_on_from_the_last_checkpoint(data_bin, tmp_path):
    exact = ("--dropout", "0", "--attention-dropout", "0", "--embedding-dropout", "0")
    play = Play(updates=30, saved_every=5, killed_after=8, lost_after_seconds=9, flags=exact)
    found = lose_and_return(data_bin, tmp_path / "run", play)
    assert found["exit_codes"] == [0, 0]
    assert found["went_on_from"].startswith("continuing after ")
    with machines(data_bin, tmp_path / "one", play) as start:
        one = start.command[start.command.index("ftk_cli.train") + 1 :]
    assert main([*one, "--update-freq", "2"]) == 0  # what both would have computed undisturbed
    undisturbed, disturbed = records(tmp_path / "one"), records(tmp_path / "run")
    assert [record["num_updates"] for record in disturbed] == list(range(1, 31))
    for name in ("loss", "gnorm", "lr", "epoch"):
        expected = [record[name] for record in undisturbed]
        assert [record[name] for record in disturbed] == pytest.approx(expected, rel=1e-4)
