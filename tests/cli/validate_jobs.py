"""Several `ftk-validate` runs one after the other in the same processes.

`run_jobs(run_all, size, [["DATA", "--path", ...], ...])`: each job's output goes to stdout of the main process, after
a line with the numbers in the parameters that each process holds.
"""

from __future__ import annotations

import json

from ftk.model_parallel.shards import local
from ftk_cli import validate


def run_all(jobs: list[list[str]]) -> int:
    load = validate.load

    def counted(root, world, criterion):
        model, runner = load(root, world, criterion)
        held = world.gather_json(sum(local(parameter).numel() for parameter in model.parameters()))
        if world.is_main:
            print(json.dumps({"held": held}), flush=True)
        return model, runner

    validate.load = counted
    return next((code for job in jobs if (code := validate.main(job)) != 0), 0)
