"""Initial values are drawn only where no checkpoint overwrites them."""

from __future__ import annotations

import pytest

import ftk.trainer.run as run_module
from ftk.errors import UserError
from tests.trainer.parallel_jobs import picked, run_records
from tests.trainer.toy import toy_trainer

STEPS = (
    "--lr-scheduler constant --arch glm_tiny --num-layers 2 --device cpu --lr 1e-3 --warmup-updates 3 --seq-length 48 "
    "--batch-size 2 --log-interval 1 --log-format json --valid-subset none --data-parallel-shard-size 2"
)


@pytest.fixture
def filled(monkeypatch):
    """The argument `fill` of `distribute` in each run."""
    fills = []
    distribute = run_module.distribute

    def noting(*arguments, fill):
        fills.append(fill)
        return distribute(*arguments, fill=fill)

    monkeypatch.setattr(run_module, "distribute", noting)
    return fills


def test_a_run_that_continues_needs_no_initial_values(tmp_path, filled):
    toy_trainer(tmp_path, training__max_update=2).train()
    toy_trainer(tmp_path, training__max_update=3).train()
    last = str(tmp_path / "run" / "checkpoint_last")
    toy_trainer(tmp_path, save_dir="restored", checkpoint__restore_from=last).train()
    toy_trainer(tmp_path, save_dir="tuned", checkpoint__finetune_from=last).train()  # may leave out some
    assert filled == [True, False, False, True]


def test_a_run_that_cannot_be_built_leaves_its_folder_to_others(tmp_path, monkeypatch):
    toy_trainer(tmp_path, training__max_update=2).train()

    def refuse(*arguments, fill):
        raise UserError("no such model")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "distribute", refuse)
        with pytest.raises(UserError, match="no such model"):
            toy_trainer(tmp_path, training__max_update=3)
    assert toy_trainer(tmp_path, training__max_update=3).train().num_updates == 3


def test_shares_that_only_a_checkpoint_has_filled_go_on_as_without_a_break(data_bin, tmp_path):
    flags = [("whole", 2, f"{STEPS} --max-update 4"), *(("broken", 2, f"{STEPS} --max-update {n}") for n in (2, 4))]
    records, _ = run_records(data_bin, tmp_path, flags)
    whole, broken = (picked(records[name], ("num_updates", "loss", "gnorm")) for name in ("whole", "broken"))
    assert len(whole) == 4
    assert broken == whole
