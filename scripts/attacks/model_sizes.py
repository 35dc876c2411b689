"""Checkpoints whose configuration asks for a model that is far larger than its stored tensors."""

from __future__ import annotations

import random

import yaml
from attacks.folders import generate, renew_manifest
from attacks.harness import Place, case

SIZES = {"num_layers": 10**9, "vocab_size": 2**40, "max_positions": 2**40, "ffn_hidden_size": 10**12}


def add_cases(chance: random.Random) -> None:
    for option, size in SIZES.items():
        _larger(option, size)


def _larger(option: str, size: int) -> None:
    def prepare(place: Place) -> str:
        path = place.run / "checkpoint_2" / "config.yaml"
        config = yaml.safe_load(path.read_bytes())
        config["model"][option] = size
        path.write_text(yaml.safe_dump(config))
        renew_manifest(path.parent)
        return str(path.parent)

    @case(f"model_sizes/8 {option} is {size}: generate", codes=(2,))
    def _(place: Place) -> list[str]:
        prepare(place)
        return generate(place)

    @case(f"model_sizes/8 {option} is {size}: export", codes=(2,))
    def _(place: Place) -> list[str]:
        return ["ftk-checkpoint", "export", prepare(place), str(place.folder / "out.pt2"), "--format=export"]

    @case(f"model_sizes/8 {option} is {size}: validate", codes=(2,))
    def _(place: Place) -> list[str]:
        return ["ftk-validate", str(place.data), "--path", prepare(place), "--device=cpu"]

    @case(f"model_sizes/8 {option} is {size}: inspect", codes=(0,))
    def _(place: Place) -> list[str]:
        return ["ftk-checkpoint", "inspect", prepare(place)]
