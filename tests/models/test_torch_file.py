"""What a file of `torch.save` may do to the process that reads it: nothing."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from ftk.checkpoint.fairseq import files as fairseq
from ftk.errors import UserError
from ftk.models.torch_file import IgnoredObject, read_tensor_file
from tests.checkpoint.damage import Made


def pointers(kind: str) -> Made:
    """An array whose bytes are pointers to Python objects: a data type of numbers takes such a state from a file."""
    of_objects = Made(np.dtype, ("O",))
    state = (3, "<", (of_objects, (1,)), ("a",), {"a": (of_objects, 0)}, 8, 1, 0)
    return Made(np.ndarray, ((1,), Made(np.dtype, (kind, False, True), state), b"A" * 8))


@pytest.mark.parametrize("kind", ["u4", "f8"])
def test_no_array_of_pointers_is_made_of_a_files_bytes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.pt"
    torch.save([pointers(kind)], path)
    found = type(read_tensor_file(path)[0])  # not the object: a report of a failure would read its pointers
    assert found is IgnoredObject
    torch.save({"model": {"a": torch.ones(1)}, "args": Namespace(arch=pointers(kind))}, path)
    assert fairseq.read(path).options["arch"] == "IgnoredObject"


@pytest.mark.parametrize("made", [Made(bytearray, (10**15,)), Made(OrderedDict, (np.arange(2),))])
def test_what_cannot_be_made_is_one_line(tmp_path: Path, made: Made) -> None:
    torch.save(made, tmp_path / "model.pt")
    with pytest.raises(UserError, match="cannot be read as a PyTorch file"):
        read_tensor_file(tmp_path / "model.pt")


def test_random_states_of_numpy_read_as_stand_ins(tmp_path: Path) -> None:
    torch.save({"rng": np.random.get_state(), "w": torch.ones(2)}, tmp_path / "model.pt")
    content = read_tensor_file(tmp_path / "model.pt")
    assert isinstance(content["rng"][1], IgnoredObject)
    assert content["w"].tolist() == [1.0, 1.0]
