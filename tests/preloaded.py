"""What the fork server of `tests.processes` imports once, so that its forks do not: all of ftk, and what that imports
late."""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

import ftk
import ftk_cli

for package in (ftk, ftk_cli):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        with contextlib.suppress(ImportError):  # of a package that is not installed, or of a kernel that is not built
            importlib.import_module(module.name)
for name in ("hydra", "pytest", "tests.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
    importlib.import_module(name)
gc.freeze()  # a collection in a fork would write to all of these objects, and so copy them
