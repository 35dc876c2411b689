"""Several `ftk-train` runs one after the other in the same processes, whose start takes longer than a small run.

torchrun ... -m tests.trainer.parallel_jobs '[["DATA", "--save-dir", ...], ...]'; each job's JSON log goes to stdout of
the main process, after a line with the job's number.
"""

from __future__ import annotations

import json
import os
import sys

from ftk_cli.train import main


def run_all(jobs: list[list[str]]) -> int:
    for number, job in enumerate(jobs):
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps({"job": number}), flush=True)
        if (code := main(job)) != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(run_all(json.loads(sys.argv[1])))
