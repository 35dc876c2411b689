"""The machines of a plan: memory, arithmetic and bandwidths of well-known GPUs as data, and the user's own values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ftk.config.options import option

GIB = 2.0**30


class Peak(NamedTuple):
    """Dense rates of matrix products in TFLOP/s by the vendor's data sheet; fp16 and bf16 accumulate in fp32."""

    half: float  # fp16 and bf16
    tf32: float
    fp32: float


# Words of torch's device name -> peak; the first match counts, so longer names come first.
PEAKS: dict[str, Peak] = {
    "B200": Peak(2250.0, 1125.0, 75.0),
    "GH200": Peak(989.4, 494.7, 66.9),
    "H200 NVL": Peak(835.5, 417.7, 60.0),
    "H200": Peak(989.4, 494.7, 66.9),
    "H100 PCIe": Peak(756.0, 378.0, 51.2),
    "H100 NVL": Peak(835.5, 417.7, 60.0),
    "H100": Peak(989.4, 494.7, 66.9),
    "H800 PCIe": Peak(756.0, 378.0, 51.2),
    "H800": Peak(989.4, 494.7, 66.9),
    "H20": Peak(148.0, 74.0, 44.0),
    "A100": Peak(312.0, 156.0, 19.5),
    "A800": Peak(312.0, 156.0, 19.5),
    "A40": Peak(149.7, 74.8, 37.4),
    "A30": Peak(165.0, 82.0, 10.3),
    "A10": Peak(125.0, 62.5, 31.2),
    "L40S": Peak(362.0, 183.0, 91.6),
    "L40": Peak(181.0, 90.5, 90.5),
    "L4": Peak(121.0, 60.0, 30.3),
    "V100": Peak(125.0, 15.7, 15.7),
    "T4": Peak(65.0, 8.1, 8.1),
    "RTX 5090": Peak(209.5, 104.8, 104.8),
    "RTX 4090": Peak(165.2, 82.6, 82.6),
    "RTX 3090": Peak(71.0, 35.6, 35.6),
    "MI300X": Peak(1307.4, 653.7, 163.4),
}


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes. Bandwidths are of one GPU, in one direction.

    Attributes:
        name: of the kind of GPU.
        memory_bytes: of a GPU.
        half_flops, fp32_flops: dense operations a second of matrix products, in fp16 or bf16 and in fp32 (TF32 where
            the GPU has it).
        memory_bandwidth: bytes per second between a GPU and its memory.
        node_bandwidth: bytes per second to other GPUs of the node.
        network_bandwidth: bytes per second to other nodes.
        gpus_per_node: GPUs that `node_bandwidth` holds between.
        has_bf16: V100 has none.
    """

    name: str
    memory_bytes: float
    half_flops: float
    fp32_flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int = 8
    has_bf16: bool = True

    def flops(self, precision: str) -> float:
        return self.fp32_flops if precision == "fp32" else self.half_flops

    def bus_bandwidth(self, size: int, stride: int) -> float:
        """Bytes per second that each of `size` ranks which are `stride` apart can pass on in a ring.

        Of a group that spans nodes, the ranks within a node send by as many network cards side by side (NCCL's rings),
        at most as fast as they reach each other within the node.
        """
        if size * stride <= self.gpus_per_node:
            return self.node_bandwidth
        together = max(1, self.gpus_per_node // stride)
        return min(self.node_bandwidth, together * self.network_bandwidth)


def _gpu(name: str, memory_gb: float, memory_tb: float, nvlink: float, network: float) -> Cluster:
    """Sizes in GiB, TB/s, GB/s and GB/s."""
    peak, bandwidths = PEAKS[name.upper()], (memory_tb * 1e12, nvlink * 1e9, network * 1e9)
    return Cluster(name, memory_gb * GIB, peak.half * 1e12, peak.tf32 * 1e12, *bandwidths, has_bf16=name != "v100")


# Makers' data sheets: NVLink in one direction (half of the "total" that is printed there). The network is
# that of the maker's own nodes: DGX H100/H200/B200 one 400 Gbit/s card a GPU, DGX A100 one of 200, DGX-1 V100 four of
# 100 for eight GPUs.
PRESETS: dict[str, Cluster] = {
    "v100-16g": _gpu("v100", 16, 0.9, 150, 6.25),
    "v100-32g": _gpu("v100", 32, 0.9, 150, 6.25),
    "a100-40g": _gpu("a100", 40, 1.555, 300, 25),
    "a100-80g": _gpu("a100", 80, 2.039, 300, 25),
    "h100-80g": _gpu("h100", 80, 3.35, 450, 50),
    "h200-141g": _gpu("h200", 131, 4.8, 450, 50),
    "b200-180g": _gpu("b200", 168, 8.0, 900, 50),
}


@dataclass(kw_only=True)
class ClusterConfig:
    """The cluster of a plan: a preset, and what differs from it."""

    cluster: str = option(
        "h100-80g",
        "kind of GPU, with the memory, rates and network of its maker's nodes",
        daily=True,
        choices=tuple(PRESETS),
    )
    gpus: int = option(8, "GPUs in all", daily=True, min=1, max=10**6, unit="GPUs")
    gpus_per_node: int | None = option(None, "GPUs of a node; the preset's if not given", min=1)
    memory_gib: float | None = option(
        None, "memory of a GPU; the preset's if not given", "(0, inf)", daily=True, unit="GiB"
    )
    memory_reserve: float = option(
        0.08,
        "share of a GPU's memory that is left to the CUDA context, NCCL, libraries and fragments",
        "[0, 1)",
    )
    peak_tflops: float | None = option(
        None, "dense matrix products of a GPU in `precision`; the preset's if not given", "(0, inf)", unit="TFLOP/s"
    )
    memory_bandwidth: float | None = option(
        None, "between a GPU and its memory; the preset's if not given", "(0, inf)", unit="GB/s"
    )
    node_bandwidth: float | None = option(
        None, "of a GPU within its node, one direction; the preset's if not given", "(0, inf)", unit="GB/s"
    )
    network_bandwidth: float | None = option(
        None, "of a GPU to other nodes, one direction; the preset's if not given", "(0, inf)", unit="GB/s"
    )

    def validate(self) -> Iterator[str]:
        per_node = self.gpus_per_node or PRESETS[self.cluster].gpus_per_node
        if self.gpus > per_node and self.gpus % per_node:
            yield f"gpus is {self.gpus}; more than one node must be whole nodes of {per_node} (`gpus_per_node`)"

    def build(self) -> Cluster:
        """The preset with what was given instead; `memory_bytes` is what a run may use, the reserve taken off."""
        base = PRESETS[self.cluster]
        changes = {
            "memory_bytes": (self.memory_gib * GIB if self.memory_gib is not None else base.memory_bytes)
            * (1.0 - self.memory_reserve),
            "gpus_per_node": self.gpus_per_node or base.gpus_per_node,
        }
        if self.peak_tflops is not None:
            changes |= {"half_flops": self.peak_tflops * 1e12, "fp32_flops": self.peak_tflops * 1e12}
        for name in ("memory_bandwidth", "node_bandwidth", "network_bandwidth"):
            if (value := getattr(self, name)) is not None:
                changes[name] = value * 1e9
        return dataclasses.replace(base, **changes)  # type: ignore[arg-type]
