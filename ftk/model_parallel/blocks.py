"""The repeated part of a model: what is checkpointed, compiled and sharded piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ftk.errors import UserError


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model with their names, in order; none if it has no list of them.

    They are what the `nn.ModuleList` with the most parameters holds, lists in it taken apart. Without one, or where
    that list is in one of several like parts, the same of an `nn.Sequential` or an `nn.ModuleDict` of like parts, or
    at last of any `nn.Sequential`. Where the parts of an `nn.ModuleDict` have lists of their own, as the towers of a
    model have, they are those of all parts.
    """
    name, container = _container(model)
    if container is None:
        return []
    parts = list(_parts(name, container))
    if isinstance(container, nn.ModuleDict) and all(_is_tower(part) for _, part in parts):
        parts = [(f"{path}.{inner}", block) for path, part in parts for inner, block in blocks_of(part)]
    once: dict[nn.Module, str] = {}
    for path, part in parts:
        once.setdefault(part, path)
    return [(path, part) for part, path in once.items()]


def needed_blocks(model: nn.Module, option: str) -> list[tuple[str, nn.Module]]:
    """The blocks of a model that must have some.

    Args:
        option: what goes by blocks, for the message: "activation_checkpointing".

    Raises:
        UserError: it has none.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no nn.ModuleList of blocks, nor an nn.Sequential or nn.ModuleDict of "
            f'equal parts, and {option} works block by block; put its layers into one, or give {option}="none"'
        )
    return blocks


def has_two_stacks(model: nn.Module) -> bool:
    """Whether this is an encoder-decoder: it has inputs with an axis S, the length of the source."""
    axes: dict[str, str] = getattr(model, "INPUTS", {})
    return any("S" in names.split() for names in axes.values())


def refuse_added_tokens(model: nn.Module, option: str) -> None:
    """Raises UserError if sequences inside a model are longer than the tokens that it is given, where an option counts
    on their lengths: what cuts sequences, or sends them between processes."""
    if getattr(model, "ADDS_TOKENS", False):
        raise UserError(
            f"`{option}`: {type(model).__name__} puts tokens in front of each text; use `tensor_parallel_size` or "
            f"`data_parallel_shard_size`"
        )


def _container(model: nn.Module) -> tuple[str, nn.Module | None]:
    lists: list[tuple[str, nn.Module]] = []
    alike: list[tuple[str, nn.Module]] = []
    rows: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not _has_parameters(module):
            continue
        if isinstance(module, nn.ModuleList):
            lists.append((name, module))
        elif isinstance(module, nn.Sequential | nn.ModuleDict):
            if _has_like_parts(module):
                alike.append((name, module))
            elif isinstance(module, nn.Sequential) and len(list(_parts(name, module))) > 1:
                rows.append((name, module))
    if not lists:
        return _largest(alike or rows)
    name, largest = _largest(lists)
    around = [(outer, module) for outer, module in alike if not outer or name.startswith(f"{outer}.")]
    return _largest(around) if around else (name, largest)


def _largest(named: list[tuple[str, nn.Module]]) -> tuple[str, nn.Module | None]:
    return max(named, key=lambda one: sum(p.numel() for p in one[1].parameters()), default=("", None))


def _parts(name: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules called one after the other: no lists, which cannot be called, and nothing without parameters."""
    for place, part in container.named_children():  # a stage has not all of them
        path = f"{name}.{place}" if name else place
        if _only_holds(part):
            yield from _parts(path, part)
        elif _has_parameters(part):
            yield path, part


def _has_like_parts(container: nn.Module) -> bool:
    parts = [part for part in container.children() if _has_parameters(part)]
    return len(parts) > 1 and len({type(part) for part in parts}) == 1 and not _only_holds(parts[0])


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(part, nn.ModuleList) and _has_parameters(part) for part in module.modules())


def _is_tower(module: nn.Module) -> bool:
    """Whether it has a list of blocks, or, as it is never called, cannot be one: its blocks are on another stage."""
    return _has_list(module) or type(module).forward is nn.Module.forward


def _only_holds(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
