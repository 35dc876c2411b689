"""Every code block of README and docs runs: ```python and ```bash, in order, in a folder with a small corpus."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers

from tests.processes import commands_of_shells, forked, redirect

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHINESE = [document for document in DOCUMENTS if document.name.endswith(".zh-CN.md")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# What a reader does in hours is done here in seconds: a tiny model, a few updates, a vocabulary for a small text.
SMALLER = [
    (r"^python scripts/", f"{sys.executable} {ROOT}/scripts/"),
    (r"--arch glm_large\b", "--arch glm_tiny"),
    (r"--config glm_large\b", "--config glm_tiny --max-update 4"),
    (r"--arch gpt2\b", "--arch gpt2_tiny"),
    (r"--arch t5_small\b", "--arch t5_tiny"),
    (r"--max-update ([1-9])\d+", lambda match: f"--max-update {int(match[1]) + 2}"),  # 2000 stays more than 1000
    (r"--batch-size \d+", "--batch-size 2"),
    (r"--lr-range-test\b", "--lr-range-test --lr-range-updates 12"),
    (r"--vocab-size \d+", "--vocab-size 500"),
    (r"--source-vocab-size \d+", "--source-vocab-size 400"),
    (r"--gen-subset valid\b", "--gen-subset valid --max-samples 2"),
    (r"ftk-(train|validate) data-bin ", r"ftk-\1 data-bin --max-valid-samples 4 "),
    (r"ftk-hydra-train(.*--config-name glm_tiny)", r"ftk-hydra-train\1 training.max_update=2 task.seq_length=64"),
    (
        r"ftk-checkpoint convert (?:\\\n|.)*?--arch glm_\w+ (?:\\\n|.)*",
        "ftk-checkpoint convert --from glm glm-large-original glm-large --num-attention-heads 4",
    ),
]

CHARACTERS = "秦川雄帝宅函谷壯皇居綺殿千尋起離宮百雉餘連甍遙接漢飛觀迥凌虛雲日隱層闕風煙出疎，。"


class Session:
    """One Python for all blocks of a document, each run once; what they print lies in session.log."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "session.log"
        self.connection, theirs = Pipe()
        self.process = forked(answer_blocks, theirs, str(folder), str(self.log))
        self.process.start()
        theirs.close()

    def run(self, code: str) -> str | None:
        """Returns the traceback, None if the block ran to its end."""
        self.connection.send(code)
        try:
            return self.connection.recv()
        except EOFError:
            return f"Python ended:\n{self.log.read_text()[-2000:]}"

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def answer_blocks(connection: Connection, folder: str, log: str) -> None:
    os.chdir(folder)
    for number in (1, 2):
        redirect(log, number)
    names = vars(ModuleType("__main__"))
    while True:
        try:
            exec(compile(connection.recv(), "block", "exec"), names)
            error = None
        except Exception:
            error = traceback.format_exc()
        connection.send(error)


def import_file(folder: str, name: str, log: str) -> None:
    os.chdir(folder)
    redirect(log, 2)
    sys.path.insert(0, folder)
    importlib.import_module(name)


def blocks(document: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(document.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, command) -> Path:
    """train.txt and valid.txt from the docs themselves, chinese.jsonl, and the checkpoints of others."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    lines = [line for line in text.split("\n") if len(line) > 20 and line.isascii()]
    (folder / "train.txt").write_text("\n".join(lines[20:]), encoding="utf-8")
    (folder / "valid.txt").write_text("\n".join(lines[:20]), encoding="utf-8")
    draw = random.Random(1)
    poems = ["".join(draw.choices(CHARACTERS, k=40)) for _ in range(300)]
    (folder / "chinese.jsonl").write_text("\n".join(json.dumps({"text": poem}) for poem in poems))
    shutil.copytree(ROOT / "tests" / "golden" / "glm_tiny" / "original_checkpoint", folder / "glm-large-original")
    make_gpt2(folder, command)
    return folder


def make_gpt2(folder: Path, command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Writes gpt2/, as one would download it: a small GPT-2 in Hugging Face's form, with its tokenizer."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=letters, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train([str(folder / "valid.txt")], trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    train = "--arch gpt2_tiny --seq-length 32 --batch-size 2 --max-update 1 --valid-subset none"
    for line in (
        "ftk-preprocess --trainpref valid.txt --tokenizer hf --tokenizer-path tokenizer --destdir data",
        f"ftk-train data {train} --make-vocab-size-divisible-by 1 --save-dir trained",
        "ftk-checkpoint convert --to hf trained gpt2",
    ):
        command(*line.split(), cwd=folder, code=0)
    for made in ("tokenizer", "data", "trained"):
        shutil.rmtree(folder / made)


@pytest.fixture(scope="module")
def run(data_bin, command, tmp_path_factory) -> Path:
    """A small trained GLM, for pages that start where training has ended."""
    folder = tmp_path_factory.mktemp("run") / "run"
    options = ("--arch", "glm_tiny", "--max-update", 3, "--save-interval-updates", 2, "--batch-size", 2, "--save-dir")
    command("ftk-train", data_bin, *options, folder, code=0)
    return folder


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with commands_of_shells() as environment:
        yield environment


def prepare(document: Path, folder: Path, corpus: Path, data_bin: Path, run: Path) -> None:
    """Puts what a reader of a page has before into a folder: text, and what the page does not make itself."""
    shutil.copytree(corpus, folder, dirs_exist_ok=True)
    text = document.read_text(encoding="utf-8")
    if "ftk-preprocess --trainpref" not in text:
        shutil.copytree(data_bin, folder / "data-bin")
    if not re.search(r"--save-dir run\b(?!-)", text):
        shutil.copytree(run, folder / "run")


# A Chinese page has the blocks of the English one (tested below): they run once.
RUN = [document for document in DOCUMENTS if blocks(document) and document not in CHINESE]


@pytest.mark.parametrize("document", RUN, ids=lambda document: document.relative_to(ROOT).as_posix())
@pytest.mark.slow
def test_code_blocks_run(document, corpus, data_bin, run, environment, tmp_path):
    prepare(document, tmp_path, corpus, data_bin, run)
    session = Session(tmp_path)
    try:
        for language, code in blocks(document):
            run_block(language, code, tmp_path, environment, session)
    finally:
        session.close()


def run_block(language: str, code: str, folder: Path, environment: dict[str, str], session: Session) -> None:
    named = re.match(r"# (\S+\.py)\n", code)
    if language == "python" and named:  # a file of the reader's
        target = folder / named.group(1)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(code, encoding="utf-8")
        process = forked(import_file, str(folder), target.parent.name, str(folder / "import.log"))
        process.start()
        process.join()
        assert process.exitcode == 0, (folder / "import.log").read_text()
    elif language == "python":  # one session for all blocks of a document
        error = session.run(code)
        assert error is None, f"{code}\n{error}"
    elif language == "bash":
        for pattern, replacement in SMALLER:
            code = re.sub(pattern, replacement, code)
        command = ["bash", "-euo", "pipefail", "-c", code]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    elif language == "yaml":
        import yaml

        assert isinstance(yaml.safe_load(code), dict)
    else:
        raise AssertionError(f"a block in {language}, which nothing checks")


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda document: document.relative_to(ROOT).as_posix())
def test_a_chinese_page_has_the_blocks_of_the_english_one(chinese):
    english = chinese.with_name(chinese.name.replace(".zh-CN.md", ".md"))
    assert blocks(chinese) == blocks(english)
    assert indented(chinese) == indented(english)
    assert len(headings(chinese)) == len(headings(english))
    assert f"[English]({english.name})" in chinese.read_text(encoding="utf-8")
    assert f"[中文]({chinese.name})" in english.read_text(encoding="utf-8")


def test_every_how_to_page_is_in_chinese_too():
    pages = {document.name.removesuffix(".md") for document in (ROOT / "docs" / "howto").iterdir()}
    assert {f"{page}.zh-CN" for page in pages if "." not in page} == {page for page in pages if "." in page}


def indented(document: Path) -> list[str]:
    """What is shown as code but not run: what commands print, and commands that need more than one machine has."""
    text = BLOCK.sub("", document.read_text(encoding="utf-8"))
    return [line for line in text.splitlines() if line.startswith("    ")]


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
