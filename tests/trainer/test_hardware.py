"""Peak rates by the device's name, measured rates under a fake clock, peak memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftk.planner.cluster import PEAKS
from ftk.trainer.watch import hardware
from ftk.trainer.watch.hardware import known_peak, peak_flops, peak_resident_bytes

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GH200 480GB", 989.4),
    ],
)
def test_known_gpus(name, half):
    found = known_peak(name)
    assert found is not None
    assert found.half == half


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "NVIDIA A1000", "NVIDIA GeForce GTX 1080", "", "L400", "NVIDIA RTX A4000"]
)
def test_an_unknown_gpu_has_no_peak_rather_than_a_wrong_one(name):
    assert known_peak(name) is None
    assert peak_flops("auto", GPU, "bf16", name=name) is None


def test_no_peak_is_beyond_a_narrower_kind_of_product():
    for name, peak in PEAKS.items():
        assert peak.half >= peak.tf32 >= peak.fp32 > 0, name


@pytest.mark.parametrize(
    ("precision", "tf32", "rate"),
    [("bf16", False, 312e12), ("fp16", True, 312e12), ("fp32", True, 156e12), ("fp32", False, 19.5e12)],
)
def test_the_peak_is_that_of_the_precision(precision, tf32, rate):
    found = peak_flops("auto", GPU, precision, name="NVIDIA A100-SXM4-80GB", tf32=tf32)
    assert found is not None
    assert found[0] == pytest.approx(rate)
    assert "A100" in found[1]


def test_a_given_peak_wins_and_a_cpu_has_none():
    assert peak_flops("1.5", CPU, "fp32") == (1.5e12, "as given by `peak_tflops`")
    assert peak_flops("auto", CPU, "fp32") is None


def test_peak_memory_grows_with_what_is_taken_and_never_shrinks(command):
    code = """
from ftk.trainer.watch.hardware import peak_resident_bytes
before = peak_resident_bytes()
block = bytearray(b"x" * 2**26)
taken = peak_resident_bytes()
del block
print(before, taken, peak_resident_bytes())
"""
    before, taken, after = map(int, command("-c", code).stdout.split())  # of a small process
    assert taken >= before + 60 * 2**20
    assert after >= taken - 2**20  # Linux counts pages by the batch


def test_without_proc_the_peak_is_asked_of_the_kernel(monkeypatch):
    own = peak_resident_bytes()
    monkeypatch.setattr(hardware, "Path", lambda _: Path("/nowhere/status"))
    assert peak_resident_bytes() >= 0.5 * own
