"""ftk: all commands by one name, `ftk train ...` for `ftk-train ...`. Listing them imports nothing heavy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ftk_cli.command import TRACEBACK, list_commands, run

DESCRIPTION = """A toolkit for sequence modeling, from text to a trained model that answers; ftk-COMMAND is the same.
A first model in five minutes: bash scripts/quickstart.sh"""

COMMANDS = {
    "preprocess": "text files -> a folder of token ids, with their tokenizer",
    "train": "trains a model on such a folder, or continues its run",
    "generate": "answers the prompts of a file, or scores given answers",
    "interactive": "answers prompts that you type",
    "serve": "answers over HTTP",
    "validate": "the loss of a trained model on a split",
    "evaluate": "metrics of a trained model on files of data: LAMBADA, perplexity, generated answers ...",
    "data": "shows, counts, checks and merges data folders",
    "checkpoint": "inspects, averages, converts, quantises and exports checkpoints",
    "report": "a page about one run, or several side by side",
    "plan": "parallel layouts for a cluster: memory and time, estimated",
    "hydra-train": "trains with Hydra: overrides by key=value, sweeps",
    "env": "versions and hardware, for a bug report",
}

FOREIGN = {"eval-lm": "evaluate --evaluation perplexity", "score": "generate DATA --scoring bleu"}  # of fairseq


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns its exit code."""
    rest = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in rest if word != TRACEBACK), None)
    if name not in COMMANDS:
        return run("ftk", lambda words: list_commands("ftk", DESCRIPTION, COMMANDS, words, FOREIGN), argv)
    rest.remove(name)
    command = importlib.import_module(f"ftk_cli.{name.replace('-', '_')}").main
    if argv is None:  # as if it had been called by its own name
        sys.argv = [f"ftk-{name}", *rest]
        return int(command())
    return int(command(rest))


if __name__ == "__main__":
    raise SystemExit(main())
