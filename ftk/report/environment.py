"""What a run was run with: versions, machine, settings. For bug reports (ftk-env) and for each start of a run."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ftk.terminal import in_columns
from ftk.version import __version__

PACKAGES = (
    "torch",
    "numpy",
    "hydra-core",
    "omegaconf",
    "sentencepiece",
    "tokenizers",
    "safetensors",
    "tqdm",
    "triton",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_SETTINGS = re.compile(
    r"^(FTK|OMP|MKL|KMP|GOMP|TORCH|PYTORCH|CUDA|CUBLAS|NCCL|GLOO|TRITON|WANDB|LOCAL|MASTER|SLURM_JOB)_|"
    r"^(RANK|WORLD_SIZE|PYTHONPATH|PYTHONHASHSEED|LD_PRELOAD)$"
)
_MAX_DEPTH = 20  # of a file's content; ours has two levels
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_CREDENTIALS_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def collect() -> dict[str, Any]:
    """Everything, as plain values. Imports torch; nothing in it is secret and nothing names the user or the host."""
    return {**_fixed(), "torch": _torch(), "variables": variables(os.environ)}


@functools.cache
def _fixed() -> dict[str, Any]:
    """What stays as it is while the process runs; other programs are asked for some of it."""
    return {
        "ftk": {"version": __version__, "commit": git_commit(), "extensions": extensions(), "extras": extras()},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": _without_home(sys.executable),
        },
        "platform": {"system": platform.platform(), "libc": " ".join(platform.libc_ver()).strip()},
        "cpu": _cpu(),
        "gpus": _gpus(),
        "packages": packages(),
    }


def lines(environment: Mapping[str, Any]) -> list[str]:
    """The same as text, one fact a line."""
    rows = []
    for name, value in facts(environment):
        first, *rest = value.split("\n")
        rows += [(name, first), *(("", line) for line in rest)]
    return in_columns(rows, left=(0, 1))


def facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) pairs in reading order, e.g. ("torch.version", "2.13.0+cpu"); lists become lines."""
    for section, values in environment.items():
        if isinstance(values, Mapping):
            for name, value in values.items():
                yield f"{section}.{name}", _text(value)
            if not values:
                yield section, "none"
        else:
            yield section, _text(values)


def git_commit(folder: Path | None = None) -> str | None:
    """The commit that ftk is run from, with "+changes" where tracked files differ; None if it is no checkout.

    Args:
        folder: of ftk's sources; None: where this file lies.
    """
    folder = folder or Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return commit + ("+changes" if changed else "")


def extensions() -> dict[str, str]:
    """Each Cython extension of ftk: "built", "missing", or "older than its source"."""
    root = Path(__file__).resolve().parents[1]
    states = {}
    for source in sorted(root.rglob("*.pyx")):
        headers = [header.stat().st_mtime for header in source.parent.glob("*.h")]
        name = ".".join(("ftk", *source.relative_to(root).with_suffix("").parts))
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            states[name] = "missing"
        elif os.path.getmtime(spec.origin) < max([source.stat().st_mtime, *headers]):
            states[name] = "older than its source"
        else:
            states[name] = "built"
    return states


def extras() -> dict[str, str]:
    """Each extra of ftk: "found", or what is missing. Empty where ftk is not installed as a package."""
    try:
        needed = importlib.metadata.requires("ftk") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    missing: dict[str, list[str]] = {}
    for line in needed:  # e.g. zstandard>=0.22; extra == "zstd"
        extra = re.search(r"extra\s*==\s*[\"']([\w.-]+)[\"']", line)
        package = re.match(r"[\w.-]+", line)
        if extra and package:
            found = _version(package[0]) is not None
            missing.setdefault(extra[1], []).extend([] if found else [package[0]])
    return {name: f"missing: {', '.join(names)}" if names else "found" for name, names in missing.items()}


def packages() -> dict[str, str]:
    """Versions of the installed packages that matter to ftk."""
    versions = {name: _version(name) for name in PACKAGES}
    return {name: version for name, version in versions.items() if version is not None}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that change what a run does. Values that may be secret are hidden."""
    shown = {}
    for name in sorted(environment):
        if _SETTINGS.search(name):
            value = "(hidden)" if _SECRET.search(name) else environment[name]
            shown[name] = _without_home(_CREDENTIALS_IN_ADDRESS.sub("(hidden)", value))
    return shown


def _without_home(text: str) -> str:
    """The text with the user's folder as `~`: a bug report need not name the user."""
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def _cpu() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        memory = 0.0
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_gib": round(memory, 1) or None,
    }


def _torch() -> dict[str, Any]:
    import torch

    found = torch.__config__.show()
    settings = re.findall(
        r"\b((?:BLAS_INFO|LAPACK_INFO|USE_CUDA|USE_CUDNN|USE_MKLDNN|USE_NCCL|USE_GLOO)=[^,\n]+)", found
    )
    return {
        "version": torch.__version__,
        "commit": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _cudnn(),
        "build": " ".join(map(str.strip, settings)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _cudnn() -> int | str | None:
    """The version, or why there is none: a cluster's LD_LIBRARY_PATH may bring another than torch was built with."""
    import torch

    try:
        return torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    except RuntimeError as error:
        return str(error).partition("\n")[0]


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    shown = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = f"compute capability {found.major}.{found.minor}"
        memory = f"{found.total_memory / 2**30:.1f} GiB"
        shown.append(f"{found.name}, {memory}, {capability}" + (f", driver {driver}" if driver else ""))
    return shown


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    """What a program prints; empty where there is no such program or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(value: Any, depth: int = 0) -> str:
    if isinstance(value, (Mapping, list)) and depth == _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_text(item, depth + 1)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return "\n".join(_text(item, depth + 1) for item in value) or "none"
    if value is None or value == "":
        return "none"
    return "yes" if value is True else "no" if value is False else str(value)
