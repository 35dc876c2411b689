"""Every code block of README and docs runs: ```python and ```bash, in order, in a folder with a small corpus."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# What a reader does in hours is done here in seconds: a tiny model, a few updates, a vocabulary for a small text.
SMALLER = [
    (r"--arch glm_large\b", "--arch glm_tiny"),
    (r"--arch gpt2\b", "--arch gpt2_tiny"),
    (r"--max-update \d+", "--max-update 3"),
    (r"--batch-size \d+", "--batch-size 2"),
    (r"--lr-range-test\b", "--lr-range-test --lr-range-updates 12"),
    (r"--vocab-size \d+", "--vocab-size 500"),
    (r"--gen-subset valid\b", "--gen-subset valid --max-samples 2"),
    (r"ftk-validate data-bin", "ftk-validate data-bin --max-valid-samples 4"),
    (r"ftk-hydra-train(.*--config-name glm_tiny)", r"ftk-hydra-train\1 training.max_update=2 task.seq_length=64"),
    (
        r"ftk-checkpoint convert (?:\\\n|.)*?--arch glm_\w+ (?:\\\n|.)*",
        "ftk-checkpoint convert --from glm glm-large-original glm-large --num-attention-heads 4",
    ),
]


SESSION = """
def serve():
    import json, os, sys, traceback
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what blocks print
    for line in sys.stdin:
        try:
            exec(compile(json.loads(line), "block", "exec"), sys.modules["__main__"].__dict__)
            error = None
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


serve()
"""


class Session:
    """One Python for all the blocks of a document, each run once; one that leaves a thread behind ends with it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.said = open(folder / "session.log", "w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", SESSION],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
        )

    def run(self, code: str) -> str | None:
        """Returns the traceback, None if all went well."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.said.seek(0)
            return f"Python ended:\n{self.said.read()[-2000:]}"
        return json.loads(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.said.close()


def blocks(document: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(document.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """train.txt and valid.txt from the docs themselves: real sentences, some hundred of them."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    lines = [line for line in text.split("\n") if len(line) > 20 and line.isascii()]
    (folder / "train.txt").write_text("\n".join(lines[20:]), encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(lines[:20]), encoding="utf-8")
    shutil.copytree(ROOT / "tests" / "golden" / "glm_tiny" / "original_checkpoint", folder / "glm-large-original")
    return folder


# The Chinese README has the English one's blocks (tested below): they run once.
RUN = [document for document in DOCUMENTS if blocks(document) and document.name != "README.zh-CN.md"]


@pytest.mark.parametrize("document", RUN, ids=lambda d: d.name)
@pytest.mark.slow
def test_code_blocks_run(document, corpus, data_bin, tmp_path):
    for file in corpus.iterdir():
        (shutil.copytree if file.is_dir() else shutil.copy)(file, tmp_path / file.name)
    if "ftk-preprocess --trainpref" not in document.read_text(encoding="utf-8"):
        shutil.copytree(data_bin, tmp_path / "data-bin")  # made by the README's tour, which the reader has done before
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": str(ROOT),
    }
    session = Session(tmp_path, environment)
    try:
        run_blocks(document, tmp_path, environment, session)
    finally:
        session.close()


def run_blocks(document: Path, tmp_path: Path, environment: dict[str, str], session: Session) -> None:
    for language, code in blocks(document):
        named = re.match(r"# (\S+\.py)\n", code)
        if language == "python" and named:  # a file of the reader's
            target = tmp_path / named.group(1)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(code, encoding="utf-8")
            command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); import {target.parent.name}"]
        elif language == "python":  # one session for all blocks of a document
            error = session.run(code)
            assert error is None, f"{code}\n{error}"
            continue
        elif language == "bash":
            for pattern, replacement in SMALLER:
                code = re.sub(pattern, replacement, code)
            command = ["bash", "-euo", "pipefail", "-c", code]
        elif language == "yaml":
            import yaml

            assert isinstance(yaml.safe_load(code), dict)
            continue
        else:
            raise AssertionError(f"{document.name}: a block in {language}, which nothing checks")
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def test_both_readmes_have_the_same_commands():
    english, chinese = (blocks(document) for document in DOCUMENTS[:2])
    assert english == chinese


def headings(document: Path) -> set[str]:
    """What GitHub makes of a document's headings, to be linked to."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_documents_lead_somewhere():
    found = 0
    for document in (*DOCUMENTS, ROOT / "examples" / "README.md"):
        for target, part in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", document.read_text(encoding="utf-8")):
            there = document.parent / target if target else document
            assert there.exists(), f"{document.name} links to {target}"
            assert not part or part in headings(there), f"{document.name} links to {target}#{part}"
            found += bool(part)
    assert found > 5
