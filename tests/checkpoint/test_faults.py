"""Damage is found before a weight is used; whatever kills a save, the older checkpoint stays."""

from __future__ import annotations

import json
import logging
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ftk.checkpoint import (
    BrokenCheckpoint,
    checkpoint_name,
    clean_leftovers,
    load_model_state,
    load_optimizer_state,
    newest_whole_checkpoint,
    numbered_checkpoints,
    point_to,
    read_config,
    read_trainer_state,
    remove_checkpoint,
    resolve_checkpoint,
    save_checkpoint,
    verify,
)
from ftk.errors import UserError
from tests.processes import run_command, small_files_only
from tests.records import assert_same_tensors

from .conftest import Awkward, forge_json, forge_manifest, make_optimizer

TENSORS = "tensors_00000_of_00001.safetensors"
ALIASES = "a: &a [x]\n" + "".join(f"{n}: &{n} [{f'*{p},' * 9}]\n" for p, n in pairwise("abcdefghijkl"))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def tensors_of(folder: Path, part: str) -> Path:
    (file,) = (folder / part).glob("*.safetensors")
    return file


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS = {
    "byte flipped in the weights": lambda c: flip(tensors_of(c, "model"), -5),
    "byte flipped in a tensor header": lambda c: flip(tensors_of(c, "model"), 20),
    "byte flipped in the model's index": lambda c: flip(c / "model/index.json", 90),
    "weights cut": lambda c: os.truncate(tensors_of(c, "model"), 40),
    "weights cut to nothing": lambda c: os.truncate(tensors_of(c, "model"), 0),
    "weights longer": lambda c: os.truncate(tensors_of(c, "model"), 10_000),
    "weights missing": lambda c: tensors_of(c, "model").unlink(),
    "weights replaced by a folder": lambda c: replace_by_folder(tensors_of(c, "model")),
    "config replaced by a folder": lambda c: replace_by_folder(c / "config.yaml"),
    "manifest replaced by a folder": lambda c: replace_by_folder(c / "manifest.json"),
    "model's index missing": lambda c: (c / "model/index.json").unlink(),
    "model's index empty": lambda c: os.truncate(c / "model/index.json", 0),
    "model folder missing": lambda c: shutil.rmtree(c / "model"),
    "config missing": lambda c: (c / "config.yaml").unlink(),
    "config empty": lambda c: os.truncate(c / "config.yaml", 0),
    "trainer state missing": lambda c: (c / "trainer.json").unlink(),
    "trainer state empty": lambda c: os.truncate(c / "trainer.json", 0),
    "optimizer missing": lambda c: shutil.rmtree(c / "optimizer"),
    "optimizer cut": lambda c: os.truncate(tensors_of(c, "optimizer"), 100),
    "tokenizer file missing": lambda c: (c / "tokenizer/deeper/vocabulary.bin").unlink(),
    "manifest missing": lambda c: (c / "manifest.json").unlink(),
    "manifest empty": lambda c: os.truncate(c / "manifest.json", 0),
    "manifest all zeros": lambda c: (c / "manifest.json").write_bytes(bytes(500)),
    "manifest cut": lambda c: os.truncate(c / "manifest.json", 300),
    "manifest no JSON": lambda c: (c / "manifest.json").write_text("size: 3"),
    "manifest another JSON": lambda c: (c / "manifest.json").write_text("[1, 2]"),
    "manifest forgets a file": lambda c: edit_manifest(c, lambda m: m["files"].popitem()),
    "manifest allows another size": lambda c: edit_manifest(c, lambda m: m["files"]["config.yaml"].update(size=1)),
    "manifest of the future": lambda c: edit_manifest(c, lambda m: m.update(version=99)),
}


def edit_manifest(folder: Path, edit) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    edit(content)
    (folder / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=[name.replace(" ", "-") for name in FAULTS])
def test_fault_is_found_before_any_weight_changes(saved: Path, fault) -> None:
    fault(saved)
    model = Awkward(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert verify(saved)
    with pytest.raises(BrokenCheckpoint) as caught:
        load_model_state(saved, model)
    assert str(saved) in str(caught.value)
    is_copy = {problem.split("/")[0] for problem in verify(saved)} == {"optimizer"}
    assert ("makes a copy that has no optimizer" in str(caught.value)) == is_copy
    assert_same_tensors(model.state_dict(), before)


DEEP = "[" * 5000 + "]" * 5000
TENSOR = {"__tensor__": "AAAAAA==", "dtype": "float32", "shape": [1]}


def in_trainer_state(**fields):
    return lambda c: forge_json(c, "trainer.json", lambda state: state.update(fields))


def in_config(text: str):
    return lambda c: (c / "config.yaml").write_text(text)


def no_regular_file(name: str, kind: str):
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        if kind == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero" if kind == "device" else "/nothing")

    return replace


def with_chunks(part: str, chunks) -> None:
    def edit(index) -> None:
        index["tensors"][min(index["tensors"])]["chunks"] = chunks

    return lambda c: forge_json(c, f"{part}/index.json", edit)


HOSTILE = {
    "manifest nested deeply": lambda c: (c / "manifest.json").write_text(f'{{"a":{DEEP}}}'),
    "manifest nested less deeply": lambda c: (c / "manifest.json").write_text(f'{{"a":{"[" * 400 + "]" * 400}}}'),
    "manifest with a name of surrogates": lambda c: edit_manifest(c, lambda m: m["files"].update({"\ud800": {}})),
    "manifest with a huge size": lambda c: edit_manifest(c, lambda m: m["files"]["config.yaml"].update(size=10**40)),
    "manifest with NaN": lambda c: edit_manifest(c, lambda m: m["files"]["config.yaml"].update(size=float("nan"))),
    "manifest with a number of 5000 digits": lambda c: (c / "manifest.json").write_text("9" * 5000),
    "manifest with a list of files": lambda c: edit_manifest(c, lambda m: m.update(files=[])),
    "manifest in another encoding": lambda c: (c / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "trainer state nested deeply": lambda c: (c / "trainer.json").write_text(DEEP),
    "trainer state a list": lambda c: (c / "trainer.json").write_text("[]"),
    "updates below zero": in_trainer_state(num_updates=-5),
    "updates in words": in_trainer_state(num_updates="x"),
    "updates true": in_trainer_state(num_updates=True),
    "updates in parts": in_trainer_state(num_updates=3.5),
    "updates beyond counting": in_trainer_state(num_updates=10**30),
    "updates NaN": in_trainer_state(num_updates=float("nan")),
    "updates a list": in_trainer_state(num_updates=[3]),
    "figures no mapping": in_trainer_state(figures=[1]),
    "seconds infinite": in_trainer_state(seconds=float("inf")),
    "best a number": in_trainer_state(best=7),
    "tokenizer a mapping": in_trainer_state(tokenizer={}),
    "tensor of a function": in_trainer_state(state=TENSOR | {"dtype": "load"}),
    "tensor of no dtype": in_trainer_state(state=TENSOR | {"dtype": ["float32"]}),
    "tensor larger than its bytes": in_trainer_state(state=TENSOR | {"shape": [2**50, 2]}),
    "tensor of another size": in_trainer_state(state=TENSOR | {"shape": [-1]}),
    "tensor without a shape": in_trainer_state(state={"__tensor__": "AAAA"}),
    "tensor in no base64": in_trainer_state(state=TENSOR | {"__tensor__": "!"}),
    "keys that are lists": in_trainer_state(state={"__items__": [[[1], 2]]}),
    "items that are no pairs": in_trainer_state(state={"__items__": [1]}),
    "a float in words": in_trainer_state(state={"__float__": "1e999"}),
    "config nested deeply": in_config("[" * 5000),
    "config of aliases": in_config(ALIASES),
    "config of 2 MB": in_config("a: b\n" + "# comment\n" * 200_000),
    "config with a date": in_config("model: {_name: glm, since: 2020-01-01}"),
    "config with a month 13": in_config("model: {_name: glm, since: 2020-13-01}"),
    "config with a number as a key": in_config("model: {1: 2}"),
    "config with a list as a key": in_config("model: {[1]: 2}"),
    "config with a huge number": in_config(f"model: {{hidden_size: {10**30}}}"),
    "config whose model is a list": in_config("model: [1]"),
    "config whose model is a word": in_config("model: glm"),
    "config that is binary": in_config("\0"),
    "config that makes objects": in_config("!!python/object/apply:os.system [true]"),
    "index without chunks": with_chunks("model", []),
    "optimizer's index without chunks": with_chunks("optimizer", []),
    "model's index a word": lambda c: forge_json(c, "model/index.json", lambda index: index.update(tensors="w")),
    "model's index nested deeply": lambda c: (c / "model/index.json").write_text(DEEP),
} | {
    f"{name} a {kind}": no_regular_file(name, kind)
    for name in ("config.yaml", "manifest.json", "trainer.json", f"model/{TENSORS}", "tokenizer/ftk_tokenizer.json")
    for kind in ("pipe", "device", "link to nothing")
}  # fmt: skip


@pytest.mark.parametrize("make", HOSTILE.values(), ids=[name.replace(" ", "-") for name in HOSTILE])
def test_checkpoint_made_to_deceive_is_broken_and_an_older_one_is_taken(tmp_path: Path, saved: Path, make) -> None:
    older = small(saved.parent / "checkpoint_1", 1)
    forge_manifest(saved)
    assert verify(saved) == []
    forged = (saved / "manifest.json").read_bytes()
    make(saved)
    is_listed = all(path.is_dir() or (path.is_file() and not path.is_symlink()) for path in saved.rglob("*"))
    if is_listed and (saved / "manifest.json").read_bytes() == forged:
        forge_manifest(saved)
    problems = verify(saved)
    assert problems
    assert not [problem for problem in problems if "\n" in problem]
    assert newest_whole_checkpoint(saved.parent) == older


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("optimizer/index.json", lambda c: load_optimizer_state(c, m := Awkward(), make_optimizer(m))),
        (
            "optimizer/tensors_00000_of_00001.safetensors",
            lambda c: load_optimizer_state(c, m := Awkward(), make_optimizer(m)),
        ),
        ("trainer.json", read_trainer_state),
        ("config.yaml", read_config),
    ],
)
def test_flipped_byte_is_found_by_the_one_who_reads_that_file(saved: Path, file: str, read) -> None:
    read(saved)
    flip(saved / file, 3)
    with pytest.raises(BrokenCheckpoint, match=rf"{file}: content differs"):
        read(saved)


def test_every_byte_of_the_small_files_counts(saved: Path) -> None:
    for name in ("manifest.json", "trainer.json", "model/index.json"):
        path = saved / name
        original = path.read_bytes()
        for position in range(0, len(original), 7):
            flip(path, position)
            assert verify(saved), (name, position)
            path.write_bytes(original)
    assert verify(saved) == []


def test_verify_lists_every_problem(saved: Path) -> None:
    flip(tensors_of(saved, "model"), -1)
    os.truncate(tensors_of(saved, "optimizer"), 100)
    (saved / "config.yaml").unlink()
    problems = verify(saved)
    assert [problem.split(":")[0] for problem in problems] == [
        "config.yaml",
        "model/tensors_00000_of_00001.safetensors",
        "optimizer/tensors_00000_of_00001.safetensors",
    ]
    assert "missing" in problems[0]
    assert "sha256" in problems[1]
    assert "has 100 bytes" in problems[2]


def small(folder: Path, value: float) -> Path:
    return save_checkpoint(folder, model={"w": torch.full((3,), value)}, trainer_state={"value": value}, config={})


def test_newest_whole_checkpoint_passes_over_broken_ones_and_says_so(tmp_path: Path, caplog) -> None:
    for updates in (9, 10, 100, 200):
        small(tmp_path / checkpoint_name(updates), updates)
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint_200"
    flip(tensors_of(tmp_path / "checkpoint_200", "model"), -1)
    (tmp_path / "checkpoint_100" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint_10"
    text = caplog.text
    assert "checkpoint_200: is incomplete or damaged: model/tensors_00000_of_00001.safetensors: content differs" in text
    assert "checkpoint_100: is incomplete or damaged: manifest.json" in text
    assert "continuing from" in text
    for updates in (9, 10):
        os.truncate(tmp_path / checkpoint_name(updates) / "trainer.json", 0)
    with pytest.raises(BrokenCheckpoint, match="none of its 4 checkpoints is whole .* move them away"):
        newest_whole_checkpoint(tmp_path)
    for updates in (9, 10, 200):
        shutil.rmtree(tmp_path / checkpoint_name(updates))
    with pytest.raises(BrokenCheckpoint, match="its checkpoint checkpoint_100 is not whole .* move it away"):
        newest_whole_checkpoint(tmp_path)


def test_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_whole_checkpoint(tmp_path) is None
    assert newest_whole_checkpoint(tmp_path / "absent") is None


def test_resolve_prefers_best_then_last_then_newest(tmp_path: Path) -> None:
    for updates in (5, 10, 15):
        small(tmp_path / checkpoint_name(updates), updates)
    assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoint_15"
    point_to(tmp_path, "checkpoint_last", tmp_path / "checkpoint_10")
    assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoint_10"
    point_to(tmp_path, "checkpoint_best", tmp_path / "checkpoint_5")
    assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoint_5"
    assert resolve_checkpoint(tmp_path / "checkpoint_last") == tmp_path / "checkpoint_10"
    (tmp_path / "checkpoint_5" / "manifest.json").rename(tmp_path / "aside")
    with pytest.raises(BrokenCheckpoint, match=r"checkpoint_best: has no manifest.json"):  # no other in silence
        resolve_checkpoint(tmp_path)
    (tmp_path / "aside").rename(tmp_path / "checkpoint_5" / "manifest.json")
    assert os.readlink(tmp_path / "checkpoint_best") == "checkpoint_5"
    point_to(tmp_path, "checkpoint_best", tmp_path / "checkpoint_15")
    assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoint_15"
    remove_checkpoint(tmp_path / "checkpoint_15")
    assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoint_10"
    assert [p.name for p in numbered_checkpoints(tmp_path)] == ["checkpoint_10", "checkpoint_5"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "no such folder"),
        (lambda p: p.write_text("x"), "is a file"),
        (lambda p: p.mkdir(), "holds no checkpoint"),
        (lambda p: p.symlink_to("gone"), "a link to a folder that is gone"),
        (lambda p: (p / "model").mkdir(parents=True), "not a whole checkpoint"),
        (
            lambda p: (
                (p / "1").mkdir(parents=True),
                (p / "1" / "mp_rank_00_model_states.pt").write_text(""),
                (p / "latest_checkpointed_iteration.txt").write_text("1"),
            ),
            "convert --from glm",
        ),
    ],
    ids=["missing", "file", "empty", "dangling", "half", "original"],
)
def test_what_is_no_checkpoint_is_refused_with_a_hint(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "path")
    with pytest.raises(UserError, match=message):
        resolve_checkpoint(tmp_path / "path")


def test_a_link_is_not_put_over_a_folder(tmp_path: Path) -> None:
    small(tmp_path / "checkpoint_1", 1)
    (tmp_path / "checkpoint_last").mkdir()
    with pytest.raises(UserError, match="is not a link"):
        point_to(tmp_path, "checkpoint_last", tmp_path / "checkpoint_1")


def test_saving_over_a_checkpoint_replaces_it_and_over_anything_else_is_refused(tmp_path: Path) -> None:
    folder = small(tmp_path / "checkpoint_1", 1)
    small(folder, 2)
    assert read_trainer_state(folder) == {"value": 2}
    with pytest.raises(UserError, match="exists; replace it with `overwrite`"):
        save_checkpoint(folder, model={}, trainer_state={}, config={}, overwrite=False)
    (folder / "manifest.json").unlink()
    assert verify(small(folder, 3)) == []  # the remains of one, as a run meets them that goes on from the one before
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is no checkpoint; it is not replaced"):
        small(tmp_path / "precious", 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint_1", "precious"]


def test_leftovers_of_killed_saves_are_cleaned(tmp_path: Path) -> None:
    small(tmp_path / "checkpoint_1", 1)
    for name in ("checkpoint_2.tmp-a1", "checkpoint_last.tmp-b2", "checkpoint_seen.tmp-c3"):
        (tmp_path / name / "model").mkdir(parents=True)
    (tmp_path / "checkpoint_last.tmp-link").symlink_to("checkpoint_1")
    (tmp_path / "notes.tmp-1").write_text("mine")
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint_1"
    small(tmp_path / "checkpoint_2", 2)  # goes over its own leftover
    removed = [path.name for path in clean_leftovers(tmp_path)]
    assert removed == ["checkpoint_last.tmp-b2", "checkpoint_seen.tmp-c3"]
    assert verify(tmp_path / "checkpoint_1") == []  # what a link points to is not removed
    (tmp_path / "checkpoint_last.tmp-link").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint_1", "checkpoint_2", "notes.tmp-1"]


def test_checkpoint_that_stepped_aside_for_a_save_that_died_is_brought_back(tmp_path: Path) -> None:
    folder = small(tmp_path / "checkpoint_1", 1)
    os.rename(folder, tmp_path / "checkpoint_1.tmp-x.old")
    assert clean_leftovers(tmp_path) == []
    assert read_trainer_state(folder) == {"value": 1}


@pytest.mark.parametrize("planted", ["link", "folder", "file"])
def test_names_that_others_can_guess_are_neither_followed_nor_in_the_way(tmp_path: Path, planted: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("checkpoint_1.tmp", "checkpoint_1.replaced.tmp", "checkpoint_last.tmp", "sentencepiece.model.tmp"):
        path = run / name
        if planted == "link":
            path.symlink_to(precious)
        elif planted == "folder":
            path.mkdir()
        else:
            path.write_text("theirs")
    for value in (1, 2):
        small(run / "checkpoint_1", value)
        point_to(run, "checkpoint_last", run / "checkpoint_1")
    clean_leftovers(run)
    remove_checkpoint(run / "checkpoint_1")
    assert [path.name for path in precious.iterdir()] == ["thesis.txt"]
    assert len(list(run.iterdir())) == 5  # theirs, and our link


def test_refused_write_says_so_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    old = small(tmp_path / "checkpoint_1", 1)
    code = """
import sys, torch
from ftk.checkpoint import save_checkpoint
try:
    save_checkpoint(sys.argv[1], model={"w": torch.zeros(100_000)}, trainer_state={"value": 9}, config={})
except OSError as error:
    print(error.strerror, "|", error.filename)
"""
    for name in ("checkpoint_1", "checkpoint_2"):
        done = run_command("-c", code, tmp_path / name, before=small_files_only)
        assert (
            "saving the checkpoint failed (File too large for ulimit -f or the file system); nothing of it was kept"
            in done.stdout
        )
        assert str(tmp_path / name) in done.stdout
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_1"]
        assert verify(old) == []
        assert read_trainer_state(old) == {"value": 1}


def test_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("ftk.checkpoint.storage.write_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path / "checkpoint_1", 1)
    assert list(tmp_path.iterdir()) == []
