"""Checkpoints with values changed and a new manifest; data folders: every file damaged in every way."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import yaml
from attacks.harness import Outcome, Place, case
from attacks.mutations import damages, mutated

DATA_FILES = ("preprocess.json", "train.idx", "train.bin")


def add_cases(chance: random.Random) -> None:
    for file in (
        "config.yaml",
        "trainer.json",
        "model/index.json",
        "optimizer/index.json",
        "tokenizer/ftk_tokenizer.json",
    ):
        for number in range(8):
            _mutated_checkpoint(file, number, chance.randrange(2**32))
    for file in DATA_FILES:
        for name, harm in damages(chance).items():
            _damaged_data(file, name, harm)
    for number in range(20):
        _mutated_record(number, chance.randrange(2**32))


def renew_manifest(checkpoint: Path) -> None:
    """As an attacker who knows the format: sizes and digests match the new content."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        entry["size"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    plain = json.dumps(manifest["files"], sort_keys=True, separators=(",", ":")).encode()
    manifest["digest"] = hashlib.sha256(plain).hexdigest()
    path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def export(place: Place) -> list[str]:
    source, output = place.run / "checkpoint_2", place.folder / "out.safetensors"
    return ["ftk-checkpoint", "export", str(source), str(output), "--format=safetensors"]


def generate(place: Place) -> list[str]:
    return ["ftk-generate", "--path", str(place.run), "--input", str(place.prompts), "--max-len=4", "--device=cpu"]


def go_on(place: Place) -> list[str]:
    config = str(place.workspace / "run" / "config.yaml")
    return ["ftk-train", "--config", config, "--save-dir", str(place.run), "--max-update=3", "--device=cpu"]


def _mutated_checkpoint(file: str, number: int, seed: int) -> None:
    def harm(place: Place) -> None:
        path = place.run / "checkpoint_2" / file
        as_yaml = path.suffix == ".yaml"
        tree = yaml.safe_load(path.read_bytes()) if as_yaml else json.loads(path.read_bytes())
        changed = mutated(tree, random.Random(seed))
        path.write_text(
            yaml.safe_dump(changed) if as_yaml else json.dumps(changed, indent=1, default=str), encoding="utf-8"
        )
        renew_manifest(place.run / "checkpoint_2")

    commands = {"generate": generate, "export": export}
    if file in ("trainer.json", "optimizer/index.json"):
        commands["the run goes on"] = go_on
    for name, command in commands.items():

        @case(f"checkpoint/{file} mutation {number}: {name}", codes=(0, 2))
        def _(place: Place, command: Callable[[Place], list[str]] = command) -> list[str]:
            harm(place)
            return command(place)


def _train(place: Place) -> list[str]:
    config = str(place.workspace / "run" / "config.yaml")
    new = str(place.folder / "new")
    return ["ftk-train", str(place.data), "--config", config, "--save-dir", new, "--max-update=1", "--device=cpu"]


def _no_run(place: Place, outcome: Outcome) -> str | None:
    return "a run's folder was made" if outcome.code == 2 and (place.folder / "new").exists() else None


def _damaged_data(file: str, name: str, harm: Callable[[Path], None]) -> None:
    harmless = file == "train.bin" and name in ("a flipped bit", "NUL bytes")

    codes = (0, 2) if harmless or file == "preprocess.json" else (1, 2)

    @case(f"data/{file} is {name}: train", codes=codes, check=_no_run)
    def _(place: Place) -> list[str]:
        harm(place.data / file)
        return _train(place)

    # A folder of another toolkit has no such record; of ours it holds the digests of the others, and none of its own.
    foreign = file == "preprocess.json" and name in ("missing", "a link to nothing", "a flipped bit")

    @case(f"data/{file} is {name}: verify", codes=(0, 1, 2) if foreign else (1, 2))
    def _(place: Place) -> list[str]:
        harm(place.data / file)
        return ["ftk-data", "verify", str(place.data)]


def _mutated_record(number: int, seed: int) -> None:
    @case(f"data/preprocess.json mutation {number}: train", codes=(0, 2), check=_no_run)
    def _(place: Place) -> list[str]:
        path = place.data / "preprocess.json"
        path.write_text(json.dumps(mutated(json.loads(path.read_bytes()), random.Random(seed)), default=str))
        return _train(place)
