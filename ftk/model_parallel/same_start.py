"""Checks that all processes of a run started with the same command, options, versions and data.

Processes with different options would train diverging replicas, or wait for each other forever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from ftk.config.options import options_of
from ftk.config.root import Chosen, sections_of, slots_of
from ftk.errors import UserError
from ftk.version import __version__

Facts = Mapping[str, Any]
"""What a process was started with, by the name that a user sees; values are what JSON holds."""

_PER_PROCESS_SECTIONS = ("logging",)
_PER_PROCESS_OPTIONS = ("device", "num_threads", "tensorboard_dir", "tokenizer_folder")
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_SHOWN = 3  # differences, and processes on each side of one
_MISSING = "(none)"


def check_same_start(facts: Facts, gather: Callable[[Any], list[Any]]) -> None:
    """Refuse processes that were started with different options. All have to call it.

    Args:
        gather: gives what each process gave, by rank, on all of them.

    Raises:
        UserError: on all of them, with what differs, its values and the ranks.
    """
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
    if len(set(gather(digest))) > 1:
        gathered = gather(texts)
        with contextlib.suppress(RuntimeError):  # a process that leaves at once may cut off another's last message
            gather(None)
        raise UserError(_refusal(gathered))


def options_by_flag(command: str, config: Any) -> dict[str, Any]:
    """The options of a command that must be the same on all processes.

    Options of device, log files and caches are left out, and paths of data: `check_same_data` compares its content.

    Args:
        config: an instance of its root dataclass.
    """
    root = type(config)
    facts: dict[str, Any] = {"the command": command}
    for key, slot in slots_of(root).items():
        chosen: Chosen = getattr(config, key)
        facts[slot.flag] = chosen.arch or chosen.name
        if chosen.config is not None:
            facts |= _by_flag(key, chosen.config)
    for key in sections_of(root):
        if key not in _PER_PROCESS_SECTIONS:
            facts |= _by_flag(key, getattr(config, key))
    return facts


def environment_facts(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Versions, and variables on which numbers depend."""
    import torch

    named = {name for name in environment if name.startswith("FTK_")} | set(_VARIABLES)
    variables = {f"${name}": environment.get(name) for name in sorted(named)}
    return {"the version of ftk": __version__, "the version of torch": torch.__version__, **variables}


def _by_flag(section: str, config: Any) -> dict[str, Any]:
    own = [option for option in options_of(section, type(config)) if not option.positional]
    return {option.flag: getattr(config, option.name) for option in own if option.name not in _PER_PROCESS_OPTIONS}


def _refusal(gathered: list[dict[str, str]]) -> str:
    names = dict.fromkeys(name for facts in gathered for name in facts)
    different = [name for name in names if len({facts.get(name) for facts in gathered}) > 1]
    shown = [_difference(name, [facts.get(name) for facts in gathered]) for name in different[:_SHOWN]]
    more = f"; {len(different) - _SHOWN} more differ" if len(different) > _SHOWN else ""
    return f"the processes were started differently: {'; '.join(shown)}{more}. Start all of them with the same command"


def _difference(name: str, values: list[str | None]) -> str:
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    sides = [f"{_value(value)} on {_processes(found)}" for value, found in list(ranks.items())[:_SHOWN]]
    return f"{name} is {' and '.join(sides)}"


def _value(text: str | None) -> str:
    value = None if text is None else json.loads(text)
    return _MISSING if value is None else value if isinstance(value, str) and value else json.dumps(value)


def _processes(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"process{'es' * (len(ranks) > 1)} {shown}{more}"
