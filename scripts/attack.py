"""Throws damaged and hostile input at the commands and says where they fall short.

    python scripts/attack.py [--only TEXT] [--seed N] [--sample N] [--processes N] [--verbose]

Every command must end in time, without a traceback, in little memory, with one of the exit codes that are right, a
message of few lines and nothing left behind. Exits with 1 if there is a fault, each printed with what the command said;
--only with its name runs it alone. Mutations and the nonsense that options get are drawn again with each --seed.

The cases are in `attacks/`, a file for each subject, which has `add_cases(chance: random.Random)` for tables and the
decorator `case` for single ones (`harness.py` shows how; `mutations.py` and `options.py` make the tables). A case that
belongs to a hole that was found once has its number behind the room, so that `--only "/5 "` finds it:

     2 texts that change as they are read   8 sizes beyond the tensors         14 damaged JSON and YAML, devices
     4 links in the place of own names     10 weights that are not finite     16 lines without an end
     5 processes of killed commands        12 no home                         17 tokens and data that do not fit
     6 what killed commands left           13 control characters              18 limits, variables
     7 plugins of strangers                20 long input, files of results    19 ~ in paths, numbers (also options/)
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: forked processes have no threads of it

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from attacks.harness import CASES, Case, run_all  # noqa: E402

ROOMS = sorted(
    {file.stem for file in (ROOT / "scripts" / "attacks").glob("*.py")} - {"harness", "mutations", "options"}
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--sample", type=int, metavar="N", help="only N cases of each room, drawn by --seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print what each command said")
    options = parser.parse_args()
    for room in ROOMS:
        importlib.import_module(f"attacks.{room}").add_cases(random.Random(options.seed))
    cases = [case for case in CASES if options.only in case.name]
    if options.sample is not None:
        cases = drawn(cases, options.sample, random.Random(options.seed))
    began, tried, faults = time.monotonic(), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="ftk-attack-") as name:
        workspace = Path(name)
        make_workspace(workspace)
        for case, outcome, fault in run_all(cases, workspace, options.processes):
            room = case.name.split("/")[0]
            tried[room] += 1
            faults[room] += fault is not None
            if fault or options.verbose:
                print(f"{'FAULT' if fault else 'ok'}: {case.name}: {fault or ''} ({outcome.seconds:.1f} s)")
                print("".join(f"    {line[:300]}\n" for line in outcome.stderr.splitlines()[-12:]), end="", flush=True)
    for room in sorted(tried):
        print(f"{room:<16} {tried[room]:>5} cases, {faults[room]} failures")
    seconds = time.monotonic() - began
    print(f"{tried.total()} cases, {faults.total()} failures, {seconds:.0f} seconds (--seed {options.seed})")
    return 1 if faults.total() else 0


def drawn(cases: list[Case], count: int, chance: random.Random) -> list[Case]:
    """The first cases of each room, or all."""
    rooms: dict[str, list[Case]] = {}
    for case in cases:
        rooms.setdefault(case.name.split("/")[0], []).append(case)
    return [case for room in rooms.values() for case in chance.sample(room, min(count, len(room)))]


def make_workspace(folder: Path) -> None:
    """A preprocessed corpus and a run with two checkpoints, for the cases to damage copies of."""
    from ftk_cli.preprocess import main as preprocess
    from ftk_cli.train import main as train

    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if len(line) > 20 and line.isascii()]
    (folder / "train.txt").write_text("\n".join(lines[16:]), encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(lines[:16]), encoding="utf-8")
    data = [f"--trainpref={folder / 'train.txt'}", f"--validpref={folder / 'valid.txt'}"]
    small = ["--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--seq-length=64", "--batch-size=2"]
    recipe = ["--task=glm_blank", "--arch=glm_tiny", *small]
    recipe += ["--max-update=2", "--save-interval-updates=1", "--device=cpu"]
    log = folder / "workspace.log"
    with quiet(log):
        codes = [
            preprocess([*data, "--tokenizer=sentencepiece", "--vocab-size=600", f"--destdir={folder / 'data-bin'}"]),
            train([str(folder / "data-bin"), *recipe, f"--save-dir={folder / 'run'}"]),
        ]
    if any(codes):
        raise SystemExit(f"the workspace could not be made:\n{log.read_text(errors='replace')}")


@contextmanager
def quiet(path: Path) -> Iterator[None]:
    """What commands print inside goes to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    saved = [os.dup(1), os.dup(2)]
    _redirect(file, file)
    try:
        yield
    finally:
        _redirect(*saved)


def _redirect(stdout: int, stderr: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


if __name__ == "__main__":
    sys.exit(main())
