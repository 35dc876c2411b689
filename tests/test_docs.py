"""Every code block of README and docs runs: ```python and ```bash, in order, in a folder with a small corpus."""

from __future__ import annotations

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
    (r"--max-update \d+", "--max-update 3"),
    (r"--batch-size \d+", "--batch-size 2"),
    (r"--lr-range-test\b", "--lr-range-test --lr-range-updates 12"),
    (r"--vocab-size \d+", "--vocab-size 500"),
    (r"--gen-subset valid\b", "--gen-subset valid --max-samples 2"),
    (r"ftk-validate data-bin", "ftk-validate data-bin --max-samples 4"),
    (r"ftk-hydra-train(.*--config-name glm_tiny)", r"ftk-hydra-train\1 training.max_update=2 task.seq_length=64"),
    (
        r"ftk-checkpoint convert .*--arch glm_\w+ .*",
        "ftk-checkpoint convert --from glm glm-large-original glm-large --num-attention-heads 4",
    ),
]


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
    session = tmp_path / "session.py"
    for language, code in blocks(document):
        named = re.match(r"# (\S+\.py)\n", code)
        if language == "python" and named:  # a file of the reader's
            target = tmp_path / named.group(1)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(code, encoding="utf-8")
            command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); import {target.parent.name}"]
        elif language == "python":  # one session for all blocks of a document
            session.write_text((session.read_text() if session.exists() else "") + code, encoding="utf-8")
            command = [sys.executable, str(session)]
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


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
