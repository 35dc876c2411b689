"""Checks that all ranks see the same folder: on local disks, a checkpoint of several machines would lack files."""

from __future__ import annotations

import shutil
import socket
import time
import uuid
from pathlib import Path

from ftk.checkpoint.layout import TEMPORARY
from ftk.errors import UserError
from ftk.model_parallel.collective import collective, on_main
from ftk.model_parallel.world import World

WAIT_SECONDS = 20.0  # a network file system may take this long to show another machine's files


def check_shared(folder: Path, world: World) -> None:
    """Check that every rank sees a new subfolder of the main rank; all ranks call it.

    Args:
        folder: created by the main rank.

    Raises:
        UserError: a rank does not see it; raised on all.
    """
    if world.size == 1:
        return
    # A new name each time, since a machine may cache that an old one is missing. `clean_leftovers` removes it.
    name, host = on_main(world, lambda: (f"checkpoint_seen{TEMPORARY}{uuid.uuid4().hex}", socket.gethostname()))
    on_main(world, (folder / name).mkdir)

    def look() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (folder / name).is_dir():
            if time.monotonic() > deadline:
                raise UserError(
                    f"`save_dir`: {folder.absolute()} is not the same folder for rank {world.rank} on "
                    f"{socket.gethostname()} as for rank 0 on {host}; name one on a file system that all machines "
                    "share"
                )
            time.sleep(0.1)

    try:
        collective(world, look)
    finally:
        if world.is_main:
            shutil.rmtree(folder / name, ignore_errors=True)
