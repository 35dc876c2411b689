"""The repeated part of a model: what is checkpointed, compiled and sharded piece by piece."""

from __future__ import annotations

from torch import nn

from ftk.errors import UserError


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model with their names, in order: the `nn.ModuleList` that holds the most parameters.

    Raises:
        UserError: the model has no such list.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no nn.ModuleList of blocks; keep its layers in one, or do without what goes "
            f"by blocks: --activation-checkpointing, --compile block, --data-parallel-shard-size (in ftk.parallelize "
            f'activation_checkpointing="none", compile="none" or "model", and a plan instead of shares)'
        )
    name, blocks = max(lists, key=lambda named: sum(parameter.numel() for parameter in named[1].parameters()))
    return [(f"{name}.{place}", block) for place, block in blocks.named_children()]  # a stage has not all of them
