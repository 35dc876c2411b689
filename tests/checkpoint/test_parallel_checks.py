"""What several processes find out about a checkpoint together: damage, and folders that machines do not share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftk.checkpoint import (
    checking,
    load_extra_tensors,
    load_model_state,
    load_optimizer_state,
    newest_whole_checkpoint,
    shared,
    transfer_weights,
    verify,
)
from ftk.checkpoint.save import write_snapshot
from ftk.checkpoint.snapshot import take_snapshot
from ftk.model_parallel.world import Sizes, World, make_world
from tests.distributed import run_ranks

from .conftest import Awkward, make_optimizer
from .test_faults import FAULTS


def said(work: Any, *arguments: Any, **options: Any) -> str:
    try:
        return f"nothing, but {work(*arguments, **options)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def look_at_damage(folder: str) -> dict[str, list[Any]]:
    """What each process says of each damaged checkpoint, and whether its weights are as they were."""
    world = make_world(Sizes(shard=2), "cpu")
    found = {}
    for name in FAULTS:
        model = Awkward(seed=1)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        damaged = Path(folder) / name
        words = [said(work, damaged, model, world=world) for work in (load_model_state, transfer_weights)]
        same = all(tensor.equal(before[key]) for key, tensor in model.state_dict().items())
        found[name] = [words, verify(damaged, world=world), same]
    return found


def test_damage_is_found_by_all_processes_before_any_weight_changes(saved: Path, tmp_path: Path) -> None:
    for name, fault in FAULTS.items():
        shutil.copytree(saved, tmp_path / "damaged" / name)
        fault(tmp_path / "damaged" / name)
    ranks = run_ranks(look_at_damage, 2, str(tmp_path / "damaged"))
    for name in FAULTS:
        for words, problems, same in (rank[name] for rank in ranks):
            assert problems == verify(tmp_path / "damaged" / name) != []
            assert all("Error" in said or "BrokenCheckpoint" in said for said in words), words
            assert all(str(tmp_path / "damaged" / name) in said for said in words), words
            assert same, name


def read_in_turns(folder: str) -> dict[str, Any]:
    world = make_world(Sizes(replicate=3), "cpu")
    hashed: list[str] = []
    real = checking.sha256_of

    def sha256_of(path: Path) -> str:
        hashed.append(path.relative_to(folder).as_posix())
        return real(path)

    checking.sha256_of = sha256_of
    path, model = Path(folder), Awkward()
    optimizer = make_optimizer(model)
    works = {
        "verify": lambda: verify(path, world=world),
        "newest": lambda: newest_whole_checkpoint(path.parent, world=world),
        "model": lambda: load_model_state(path, model, world=world),
        "optimizer": lambda: load_optimizer_state(path, model, optimizer, world=world),
        "extra": lambda: load_extra_tensors(path, "extra", {}, world=world),
        "transfer": lambda: transfer_weights(path, model, world=world),
    }
    found: dict[str, Any] = {}
    for name, work in works.items():
        hashed.clear()
        result = work()
        found[name] = list(hashed)
        assert result in ([], None, path.resolve()) or name in ("model", "transfer")
    return found


def test_each_file_is_read_by_one_of_the_processes(tmp_path: Path) -> None:
    model = Awkward()
    optimizer = make_optimizer(model)
    model(torch.arange(8)).backward()
    optimizer.step()
    snapshot = take_snapshot(
        model=model,
        optimizer=optimizer,
        trainer_state={},
        config={},
        extra_tensors={"extra": {"a": model.scale.detach()}},
    )
    folder = write_snapshot(tmp_path / "checkpoint_1", snapshot)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"manifest.json"}
    ranks = run_ranks(read_in_turns, 3, str(folder))
    parts = {
        "verify": "",
        "newest": "",
        "model": "model/",
        "optimizer": "optimizer/",
        "extra": "extra/",
        "transfer": "model/",
    }
    for name, prefix in parts.items():
        read = [file for rank in ranks for file in rank[name] if file.startswith(prefix)]  # small ones, too, by all
        assert sorted(read) == sorted(file for file in files if file.startswith(prefix)), name
    assert sum(bool(rank["verify"]) for rank in ranks) == 3


def on_own_disks(folder: str) -> dict[str, Any]:
    """As on machines that share nothing: relative names mean another folder on each."""
    shared.WAIT_SECONDS = 0.3
    world = make_world(Sizes(replicate=2), "cpu")
    os.chdir(Path(folder) / str(world.rank))
    writers = world.with_own_host_group()
    snapshot = take_snapshot(model=Awkward(), trainer_state={}, config={}, world=world)
    found: dict[str, Any] = {
        "start": said(shared.check_shared, Path(), world),
        "save": said(write_snapshot, Path("run/checkpoint_1"), snapshot, world=writers),
        "own": sorted(path.name for path in Path("run").glob("*")),
    }
    dist.barrier()
    os.chdir(folder)
    found["shared"] = said(shared.check_shared, Path(), world)
    found["shared save"] = said(write_snapshot, Path("run/checkpoint_1"), snapshot, world=writers)
    dist.barrier()
    found["left"] = sorted(path.name for path in [*Path().iterdir(), *Path("run").iterdir()])
    # A checkpoint that one machine alone has.
    if world.rank == 1:
        os.chdir("1")
    found["verify"] = verify(Path("run/checkpoint_1"), world=world)
    found["load"] = said(load_model_state, Path("run/checkpoint_1"), Awkward(), world=world)
    return found


def test_a_folder_that_machines_do_not_share_is_told_and_nothing_is_saved(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    for rank in run_ranks(on_own_disks, 2, str(tmp_path)):
        for words in (rank["start"], rank["save"]):
            assert words.startswith("UserError: `save_dir`: ")
            assert "is not the same folder for rank 1 on " in words
        assert str(tmp_path / "1" / "run" / "checkpoint_1.tmp-") in rank["save"]
        assert rank["own"] == []
        assert rank["shared"] == "nothing, but None"
        assert rank["shared save"] == "nothing, but run/checkpoint_1"
        assert rank["left"] == ["0", "1", "checkpoint_1", "run"]
        assert len(rank["verify"]) == 1
        assert "no such folder" in rank["load"] or "cannot be read" in rank["load"]


def test_one_process_looks_for_nobody(tmp_path: Path) -> None:
    shared.check_shared(tmp_path / "not there", World.single())
