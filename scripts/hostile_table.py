"""What ftk-preprocess makes of bad and odd files: a table in Markdown.

    python scripts/hostile_table.py [FOLDER] --tokenizer-path VOCABULARY

Every text and JSONL file of FOLDER (default: data/hostile of the test data) is encoded twice, as the default has
it and with --on-error skip; task files (70 to 79) once more for each field of their first row, by --text-key. What
is written goes through `ftk-data verify`. Exits with 1 if a run shows a
traceback, takes longer than a minute, ends with another code than 0 and 2, leaves something behind after a
refusal, or writes what does not verify.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ftk.data.inspect_data import verify

TEST_DATA = Path(os.environ.get("FTK_TEST_DATA", Path(__file__).resolve().parents[2] / "shared")) / "data"
TIMEOUT_SECONDS = 60
PREPROCESS = "import sys; from ftk_cli.preprocess import main; sys.exit(main())"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=TEST_DATA / "hostile")
    parser.add_argument("--tokenizer", default="sentencepiece")
    parser.add_argument("--tokenizer-path", type=Path, default=TEST_DATA / "tokenizers" / "cog-pretrain.model")
    options = parser.parse_args()
    print("| file | default | `--on-error skip` |\n| --- | --- | --- |")
    faults = []
    for source in sorted(options.folder.iterdir()):
        if source.suffix not in (".txt", ".jsonl"):
            continue
        for key in text_keys(source):
            name = source.name if key is None else f"{source.name}, `--text-key {key}`"
            cells = []
            for mode in ("raise", "skip"):
                result, fault = outcome(source, key, mode, options.tokenizer, options.tokenizer_path)
                cells.append(result)
                faults += [f"{name}, {mode}: {fault}"] if fault else []
            print(f"| {name} | {cells[0]} | {cells[1]} |", flush=True)
    print(f"\n{len(faults)} faults", *faults, sep="\n")
    return 1 if faults else 0


def text_keys(source: Path) -> list[str | None]:
    """Values for --text-key; None stands for its default."""
    if source.suffix != ".jsonl" or not source.name.startswith("7"):
        return [None]
    with open(source, encoding="utf-8") as file:
        return [None, *json.loads(file.readline())]


def outcome(source: Path, key: str | None, mode: str, tokenizer: str, vocabulary: Path) -> tuple[str, str]:
    """(the cell of the table, what is wrong with ftk itself or "")."""
    with tempfile.TemporaryDirectory(prefix="ftk-hostile-") as folder:
        out = Path(folder) / "out"
        arguments = ["--trainpref", source, "--destdir", out, "--on-error", mode, "--workers", 1]
        arguments += ["--tokenizer", tokenizer, "--tokenizer-path", vocabulary]
        arguments += [] if key is None else ["--text-key", key]
        command = [sys.executable, "-c", PREPROCESS, *map(str, arguments)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return "hangs", f"longer than {TIMEOUT_SECONDS} s"
        if "Traceback" in done.stderr or done.returncode not in (0, 2):
            return "fails", done.stderr[-300:]
        if done.returncode == 2:
            message = done.stderr.splitlines()[-1].removeprefix("ftk-preprocess: ").removeprefix(str(source))
            left = [path.name for path in Path(folder).iterdir()]
            return f"exit 2: {escaped(message.lstrip(': '))}", f"left behind: {left}" if left else ""
        record = json.loads((out / "preprocess.json").read_text(encoding="utf-8"))["splits"]["train"]
        counts = ", ".join(f"{count:,} {reason}" for reason, count in record["skipped"].items())
        cell = f"{record['documents']:,} documents, {record['tokens']:,} tokens"
        return cell + (f"; skipped {counts}" if counts else ""), "; ".join(verify(out))


def escaped(message: str) -> str:
    return message.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
