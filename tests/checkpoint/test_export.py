"""Exported files give the model's own logits, without ftk; each is whole or absent."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ftk
from ftk.checkpoint import export, load, load_model_tensors
from ftk_cli.checkpoint import main
from tests.checkpoint.conftest import SMALL_GLM
from tests.records import assert_same_tensors

ROOT = Path(__file__).resolve().parents[2]


def inputs(num_batch: int, num_tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_batch)
    tokens = torch.randint(0, 256, (num_batch, num_tokens), generator=generator)
    num_context = min(num_tokens, SMALL_GLM["max_positions"])  # behind it an answer to a blank at place 5
    number = torch.arange(num_tokens).expand(num_batch, -1)
    text = number.where(number < num_context, 5)
    block = (number - (num_tokens // 2 if num_tokens == num_context else num_context - 1)).clamp(min=0)
    context = torch.randint(0, num_context, (num_batch,), generator=generator)
    return {"tokens": tokens, "position_ids": torch.stack((text, block), dim=1), "context_length": context}


# Batch, tokens: other sizes than the export's example; a context that takes all places, alone and with an answer.
SIZES = [(1, 1), (2, 8), (3, 37), (1, 64), (2, 64 + 9)]


def check(path, run) -> None:
    model = ftk.load_model(path)
    for size in SIZES:
        step = inputs(*size)
        with torch.no_grad():
            wanted = model(step["tokens"], position_ids=step["position_ids"], context_length=step["context_length"])
        torch.testing.assert_close(run(step), wanted, rtol=1e-4, atol=1e-4)


def check_example(path, folder, file) -> None:
    """What docs/export.md does with this file in the folder runs by itself, and gives the model's logits."""
    document = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    _, _, behind = document.partition(f"After `ftk-checkpoint export run {file} ")
    example = textwrap.dedent(
        "\n".join(line for line in behind.partition("After `")[0].split("\n") if line[:4] == "    ")
    )
    same_inputs = [line for line in document.split("\n") if line.startswith(("context = ", "positions = "))]
    assert file in example
    assert len(same_inputs) == 2
    result = "import numpy\nnumpy.save('logits.npy', numpy.asarray(logits))"
    (folder / "example.py").write_text("\n".join(["import torch", *same_inputs, example, result]))
    done = subprocess.run([sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    context, places = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[[0, 1, 2, 3], [0, 0, 0, 0]]])
    with torch.no_grad():
        wanted = ftk.load_model(path)(context, position_ids=places, context_length=torch.tensor([4]))
    np.testing.assert_allclose(np.load(folder / "logits.npy"), wanted, rtol=1e-4, atol=1e-4)


def test_torch_export_gives_the_same_logits(trained, tmp_path):
    output = tmp_path / "model.pt2"
    assert main(["export", str(trained), str(output), "--format", "export"]) == 0
    program = torch.export.load(output).module()
    check(trained, lambda step: program(*step.values()))


@pytest.mark.slow
def test_aot_inductor_gives_the_same_logits(trained, tmp_path):
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("needs a C++ compiler")
    output = tmp_path / "model-cpu.pt2"
    assert main(["export", str(trained), str(output), "--format", "aoti"]) == 0
    compiled = torch._inductor.aoti_load_package(str(output))
    check(trained, lambda step: compiled(*step.values()))
    check_example(trained, tmp_path, output.name)


@pytest.mark.parametrize("max_bytes", [10**9, 10**5], ids=["one file", "weights beside it"])
@pytest.mark.slow
def test_onnx_gives_the_same_logits(trained, tmp_path, monkeypatch, max_bytes):
    monkeypatch.setattr(export, "_ONNX_MAX_BYTES", max_bytes)
    pytest.importorskip("onnxscript", reason="needs ftk[export]")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs ftk[export]")
    output = tmp_path / "model.onnx"
    assert main(["export", str(trained), str(output), "--format", "onnx"]) == 0
    beside = [] if max_bytes == 10**9 else ["model.onnx.data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", *beside]
    session = onnxruntime.InferenceSession(str(output), providers=["CPUExecutionProvider"])

    def run(step):
        return torch.from_numpy(session.run(["logits"], {name: value.numpy() for name, value in step.items()})[0])

    check(trained, run)
    check_example(trained, tmp_path, output.name)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_stay_rounded_in_an_export(trained, tmp_path, weights):
    small = tmp_path / "small"
    main(["export", str(trained), str(small), "--quantize", weights])
    main(["export", str(trained), str(tmp_path / "small.pt2"), "--quantize", weights, "--format", "export"])
    loaded = torch.export.load(tmp_path / "small.pt2")
    program = loaded.module()
    model, step = ftk.load_model(small), inputs(3, 37)
    with torch.no_grad():
        wanted = model(step["tokens"], position_ids=step["position_ids"], context_length=step["context_length"])
    off = (program(*step.values()) - wanted).norm() / wanted.norm()
    assert off < 0.01  # the exported products are in float32, ours in bfloat16
    whole = sum(tensor.nbytes for tensor in load_model_tensors(trained).values())
    assert sum(tensor.nbytes for tensor in loaded.state_dict.values()) < 0.45 * whole


def test_safetensors_holds_the_tensors_and_what_they_are_of(trained, tmp_path):
    output = tmp_path / "model.safetensors"
    assert main(["export", str(trained), str(output), "--format", "safetensors"]) == 0
    wanted = load_model_tensors(trained)
    found = load_file(output)
    assert_same_tensors(found, wanted)
    with safe_open(output, framework="pt") as file:
        assert json.loads(file.metadata()["model"]) == {"_name": "glm", **SMALL_GLM}
    main(["export", str(trained), str(tmp_path / "ema.safetensors"), "--format", "safetensors", "--ema"])
    averaged = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(averaged[name], wanted[name] * 0.5) for name in wanted)


def test_safetensors_of_rounded_weights(trained, tmp_path):
    main(["export", str(trained), str(tmp_path / "small"), "--quantize", "int4"])
    main(["export", str(trained), str(tmp_path / "a.safetensors"), "--quantize", "int4", "--format", "safetensors"])
    main(["export", str(tmp_path / "small"), str(tmp_path / "b.safetensors"), "--format", "safetensors"])
    one, other = (tmp_path / "a.safetensors").read_bytes(), (tmp_path / "b.safetensors").read_bytes()
    assert one[8 + int.from_bytes(one[:8], "little") :] == other[8 + int.from_bytes(other[:8], "little") :]
    for name in ("a", "b"):
        with safe_open(tmp_path / f"{name}.safetensors", framework="pt") as file:
            described = json.loads(file.metadata()["quantization"])
        assert described == {"weights": "int4", "group_size": 32, "embedding": True}


def test_streaming_holds_one_tensor_at_a_time(trained, tmp_path, monkeypatch):
    asked, whole = [], load.read_whole
    monkeypatch.setattr(load, "read_whole", lambda folder, stored: (asked.append(stored), whole(folder, stored))[1])
    monkeypatch.setattr(load, "read_tensors", None)  # of many at a time
    export.stream_safetensors(trained, tmp_path / "model.safetensors")
    assert len(asked) == len(load_file(tmp_path / "model.safetensors"))


def test_tied_tensors_are_written_once(tmp_path):
    weight = torch.randn(4, 3)
    export.write_safetensors(tmp_path / "m.safetensors", {"embedding": weight, "head": weight}, overwrite=False)
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["embedding"]
        assert json.loads(file.metadata()["aliases"]) == {"head": "embedding"}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("model.onnx", "export", "ends in .pt2"),
        ("model", "safetensors", "ends in .safetensors"),
        ("model.onnx", "checkpoint", "model.onnx: would be a folder, a checkpoint; for a file give --format onnx"),
        ("model.pt2", "checkpoint", "for a file give --format export or aoti"),
        ("there.pt2", "aoti", "exists; replace it with --overwrite"),
        ("folder.onnx", "onnx", "is a folder"),
    ],
)
def test_a_wrong_or_taken_name_is_refused_at_once(trained, tmp_path, capsys, name, kind, message):
    (tmp_path / "there.pt2").write_bytes(b"mine")
    (tmp_path / "folder.onnx").mkdir()
    assert main(["export", str(trained), str(tmp_path / name), "--format", kind]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "there.pt2").read_bytes() == b"mine"


def test_a_failed_export_leaves_the_older_file_and_nothing_else(trained, tmp_path, monkeypatch):
    (tmp_path / "model.pt2").write_bytes(b"older")

    def break_off(program, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch.export, "save", break_off)
    with pytest.raises(OSError, match="disk full"):
        export.export_program(ftk.load_model(trained), tmp_path / "model.pt2", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert (tmp_path / "model.pt2").read_bytes() == b"older"


def test_without_onnx_a_line_says_what_to_install(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    assert main(["export", str(trained), str(tmp_path / "model.onnx"), "--format", "onnx"]) == 2
    assert "pip install 'ftk[export]'" in capsys.readouterr().err
