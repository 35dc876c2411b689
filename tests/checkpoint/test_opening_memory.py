"""What a process holds at most while it opens a folder of Hugging Face's form in several files, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig
from ftk.models import build_model
from ftk.models.conversion import Contents
from ftk.models.renames import LazyTensors

SHARD = 20e6
CODE = """
import re, sys, ftk

def kilobytes(what):
    return int(re.search(rf"^{what}:\\s*(\\d+)", open("/proc/self/status").read(), re.MULTILINE)[1])

small, folder = sys.argv[1:]
ftk.load_model(small)  # what is imported is no memory of the folder
before = kilobytes("VmRSS")
model = ftk.load_model(folder)
print((kilobytes("VmHWM") - before) * 1024, sum(each.nbytes for each in model.parameters()))
"""


def published(folder: Path, **options: Any) -> Path:
    """A LLaMA in files of at most `SHARD`."""
    folder.mkdir()
    model = build_model("llama_tiny", num_attention_heads=8, **options)
    contents = Contents("llama", model.config, LazyTensors.of(model.state_dict()))
    HuggingFace(HuggingFaceConfig(max_shard_size="20MB")).write(folder, contents)
    return folder


def pickled(source: Path, folder: Path) -> Path:
    """The same weights as `torch.save` writes them."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    files = {}
    for number, file in enumerate(sorted(source.glob("*.safetensors"))):
        tensors = load_file(file)
        torch.save(tensors, folder / f"pytorch_model-{number}.bin")
        files |= dict.fromkeys(tensors, f"pytorch_model-{number}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", ["safetensors", "pickled"])
def test_opening_a_folder_holds_the_model_and_one_file(tmp_path, form) -> None:
    folders = [
        published(tmp_path / "small", num_layers=1, hidden_size=64, vocab_size=100),
        published(tmp_path / "large", num_layers=12, hidden_size=512, ffn_hidden_size=2048, vocab_size=6000),
    ]
    if form == "pickled":
        folders = [pickled(folder, tmp_path / f"{folder.name}.bin") for folder in folders]
    done = subprocess.run([sys.executable, "-c", CODE, *folders], capture_output=True, text=True, check=True)
    peak, size = map(int, done.stdout.split())
    assert size > 200e6
    assert size <= peak <= size + SHARD + 10e6, f"{peak / 1e6:.0f} MB for {size / 1e6:.0f} MB"


def test_opening_a_folder_imports_nothing_that_only_training_needs(tmp_path) -> None:
    folder = published(tmp_path / "small", num_layers=1, hidden_size=64, vocab_size=100)
    code = "import sys, ftk; ftk.load_model(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    # Each takes 0.4 seconds: half of what opening a small model takes with torch's own import.
    assert not {"torch.distributed.tensor", "torch._dynamo", "torch._inductor"} & set(done.stdout.split())


def test_joined_parts_of_several_types_are_described_as_they_are_read(tmp_path) -> None:
    folder = published(tmp_path / "mixed", num_layers=1, hidden_size=64, vocab_size=100)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    half = {name: tensor.bfloat16() if "q_proj" in name else tensor for name, tensor in tensors.items()}
    save_file(half, file, {"format": "pt"})
    contents = HuggingFace(HuggingFaceConfig()).read(folder)
    for name, described in contents.tensors.described.items():
        assert contents.tensors.read(name).dtype == described.dtype, name
