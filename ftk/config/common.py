"""Options that every command which runs a model has: seed, device, threads, plugins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ftk.config.options import option

MAX_PROCESSES = 1024


def launch_option() -> Any:
    """The option `launch` of the commands whose work several processes can share."""
    return option(
        1,
        "run in this many processes on this machine; on several machines use torchrun",
        min=1,
        max=MAX_PROCESSES,
        unit="processes",
    )


@dataclass(kw_only=True)
class CommonConfig:
    seed: int = option(1, "fixes everything that is random", daily=True, max=2**63 - 1, resume="fixed", min=0)
    device: str = option("auto", "auto, cpu, cuda or cuda:N; auto: a GPU if there is one", daily=True, resume="free")
    num_threads: int | None = option(
        None, "CPU threads of PyTorch; default: PyTorch's own choice", max=1024, unit="threads", resume="free", min=1
    )
    user_dir: str | None = option(
        None, "your package, folder or file with parts; several: A:B", daily=True, metavar="PATH", resume="free"
    )

    def validate(self) -> Iterator[str]:
        kind, _, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (
            number and not (kind == "cuda" and re.fullmatch("[0-9]{1,4}", number))
        ):
            yield f"device is {self.device!r}; it must be auto, cpu, cuda or cuda:N"


@dataclass(kw_only=True)
class LoggingConfig:
    log_interval: int = option(100, "updates between two lines of training figures", unit="updates", min=1)
    log_format: str = option(
        "tqdm", "a progress bar, lines of text, or one JSON object per line", choices=("tqdm", "simple", "json")
    )
    log_file: str | None = option(None, "also write the log lines here", metavar="PATH")
    log_all_ranks: str | None = option(
        None,
        "folder where each process of a parallel run keeps its own log lines, rank_0.log and so on; without it only "
        "the first one's are shown",
        metavar="DIR",
    )


@dataclass(kw_only=True)
class CommandConfig:
    """What steers the command itself and is not part of the run's configuration."""

    config: str | None = option(
        None,
        "start from this YAML file: a run's config.yaml, a recipe, or a built-in recipe's name",
        daily=True,
        metavar="FILE",
    )
    launch: int = launch_option()
    dry_run: bool = option(False, "print all options and sizes of the run, and stop", daily=True)
