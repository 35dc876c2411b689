"""Text for the quickstart: the source of Python's own library, or the user's files; and the score at its end.

    python scripts/quickstart_text.py OUT [FILE_OR_FOLDER]

writes OUT/train.jsonl and OUT/valid.jsonl ({"text": ...} per line: one line of source, or one sentence),
OUT/blanks.txt (held-out lines with one or two words replaced by [MASK]), OUT/words.txt (more of them, with one word
replaced each), OUT/words.json (these words) and OUT/vocab_size (for SentencePiece; a Chinese text needs room for its
characters). Parts of some 4000 characters, or 50 lines of the user's, are held out, and of these the lines that do not
occur in the training text.

    python scripts/quickstart_text.py --score OUT < ANSWERS

prints how many words of OUT/words.txt are filled in exactly; ANSWERS: what ftk-generate --output-format json printed.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ftk.data.text.preprocess_config import TextConfig
from ftk.data.text.records import read_documents
from ftk.errors import UserError, visible

VALID_SHARE = 0.08
COVERED = 0.9995  # SentencePiece's default character coverage; the rest is spelled in bytes
NUM_BYTES = 260  # pieces for the bytes
MAX_WORDS, CHARACTERS_PER_WORD = 3600, 300  # vocabulary for whole words: at most this, and one per 300 characters
NUM_BLANKED = 8
NUM_SCORED = 1000
CHUNK = 4000  # characters; a long file becomes several documents, so that some can be held out
LEAST_LINES, CHUNK_LINES = 100, 50  # of the user's text
MAX_SOURCE = 4_500_000  # characters of Python's library; more of it a training of minutes does not see
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "distutils"}


def main() -> int:
    if sys.argv[1:2] == ["--score"]:
        return score(Path(sys.argv[2]))
    if len(sys.argv) not in (2, 3):
        print("usage: quickstart_text.py OUT [FILE_OR_FOLDER]", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    try:
        documents = list(user_documents(Path(sys.argv[2])) if len(sys.argv) == 3 else python_source())
    except (OSError, UserError) as error:
        # without the options of ftk-preprocess that a message may name
        message = re.sub(r"(; choose one with `text_key`)?, or skip such documents .*", "", str(error))
        print(f"quickstart: {visible(message)}", file=sys.stderr)
        return 2
    documents = sorted(set(documents), key=fingerprint)  # the same order and split on every machine
    num_valid = max(1, round(VALID_SHARE * len(documents)))
    train = list(dict.fromkeys(line for document in documents[num_valid:] for line in lines_of(document)))
    seen = set(train)
    valid = [line for document in documents[:num_valid] for line in lines_of(document)]
    valid = [line for line in dict.fromkeys(valid) if line not in seen]
    out.mkdir(parents=True, exist_ok=True)
    write(out / "train.jsonl", train)
    write(out / "valid.jsonl", valid)
    (out / "blanks.txt").write_text("".join(f"{prompt}\n" for prompt in blanked(valid)), encoding="utf-8")
    scored = list(one_word_blanks(valid))
    (out / "words.txt").write_text("".join(f"{prompt}\n" for prompt, _ in scored), encoding="utf-8")
    (out / "words.json").write_text(json.dumps([word for _, word in scored]), encoding="utf-8")
    characters = Counter("".join(train))
    num_words = min(MAX_WORDS, characters.total() // CHARACTERS_PER_WORD)
    (out / "vocab_size").write_text(f"{num_covering(characters) + NUM_BYTES + num_words}\n")
    print(f"{len(train):,} lines of {characters.total():,} characters to train on; {len(valid):,} others held out")
    return 0


def num_covering(characters: Counter[str]) -> int:
    """How many of the most frequent characters make up COVERED of the text."""
    missing = COVERED * characters.total()
    for number, (_, count) in enumerate(characters.most_common(), start=1):
        missing -= count
        if missing <= 0:
            return number
    return len(characters)


def python_source() -> Iterator[str]:
    """The standard library: code, comments and docstrings, with spaces around words, parts of names too."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(library) for file in library.rglob("*.py")]
    size = 0
    for name in sorted(names, key=lambda name: fingerprint(name.as_posix())):
        if not LEFT_OUT.isdisjoint(name.parts):
            continue
        source = (library / name).read_text("utf-8", errors="ignore")
        words = (re.findall(r"[^\W\d_]+|\d+|_+|[^\w\s]+", line) for line in source.split("\n"))
        kept = [" ".join(line) for line in words if 5 <= len(line) <= 32 and sum(map(is_word, line)) >= 3]
        size += sum(map(len, kept))
        if size > MAX_SOURCE:
            return
        yield from chunks("\n".join(kept))


def user_documents(path: Path) -> Iterator[str]:
    """Some lines each: of JSON Lines those of the field "text", of other files all; each line or sentence once."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    shown = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    lines: dict[str, None] = {}
    for file in filter(Path.is_file, shown):
        kind = "jsonl" if ".jsonl" in file.suffixes else "text"
        for document in read_documents([str(file)], TextConfig(), kind):
            lines |= dict.fromkeys(lines_of(document.text))
    if len(lines) < LEAST_LINES:
        raise UserError(
            f"{path}: too little text: lines or sentences that differ: {len(lines)}; give at least {LEAST_LINES}, "
            f"better thousands"
        )
    step = min(CHUNK_LINES, len(lines) // 20)
    different = list(lines)
    for start in range(0, len(lines), step):
        yield "\n".join(different[start : start + step])


def chunks(text: str) -> Iterator[str]:
    """Documents of some CHUNK characters, cut between lines."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append(line)
        if sum(map(len, lines)) > CHUNK:
            yield "\n".join(lines).strip()
            lines = []
    if "".join(lines).strip():
        yield "\n".join(lines).strip()


def lines_of(document: str) -> list[str]:
    """A document's lines, cut into sentences where they are prose."""
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z])|(?<=[。！？])|\n", document)
    return [part.strip() for part in parts if part.strip()]


def is_word(text: str) -> bool:
    return text.isascii() and text.isalpha()


def with_hidden(line: str, count: int, rng: random.Random) -> tuple[str, list[str]] | None:
    """The line with `count` of its words replaced by [MASK], and these words; None where it has too few."""
    words = line.split(" ")
    places = [place for place, word in enumerate(words) if is_word(word)]
    if len(places) <= count or "[MASK]" in line:
        return None
    hidden = sorted(rng.sample(places, count))
    answers = [words[place] for place in hidden]
    for place in hidden:
        words[place] = "[MASK]"
    return " ".join(words), answers


def blanked(lines: list[str]) -> Iterator[str]:
    """Held-out lines with a blank or two, for a look at the answers."""
    rng = random.Random(1)
    spaced = [line for line in lines if 50 <= len(line) <= 160 and sum(map(is_word, line.split(" "))) >= 8]
    dense = [line for line in lines if 10 <= len(line) <= 80 and " " not in line]  # Chinese: no spaces between words
    chosen = spaced if len(spaced) >= NUM_BLANKED else spaced + dense
    for number, line in enumerate(rng.sample(chosen, min(NUM_BLANKED, len(chosen)))):
        if " " in line:
            if (hidden := with_hidden(line, 1 + number % 2, rng)) is not None:
                yield hidden[0]
        else:
            at = rng.randrange(2, len(line) - 4)
            yield f"{line[:at]}[MASK]{line[at + 2 :]}"


def one_word_blanks(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Held-out lines with a word replaced by [MASK], and the word."""
    rng = random.Random(2)
    blanks = [with_hidden(line, 1, rng) for line in lines if 20 <= len(line) <= 160]
    found = [(prompt, word) for prompt, (word,) in filter(None, blanks)]
    yield from rng.sample(found, min(NUM_SCORED, len(found)))


def score(out: Path) -> int:
    """Prints the share of words that are filled in exactly, beside that of the most frequent word."""
    words = json.loads((out / "words.json").read_text(encoding="utf-8"))
    answers = [json.loads(line)["answers"][0]["text"].strip() for line in sys.stdin]
    right = sum(answer == word for answer, word in zip(answers, words, strict=True))
    frequent, usual = Counter(words).most_common(1)[0]
    print(
        f"Of {len(words)} held-out lines with one word hidden, the model fills {right} exactly "
        f"({right / len(words):.1%}); the most frequent of these words, {frequent!r}, would be right in "
        f"{usual} ({usual / len(words):.1%})."
    )
    if right <= usual:
        print(
            "The model is no better than that: train longer, with FTK_QUICKSTART_UPDATES above the updates of step 3."
        )
    return 0


def fingerprint(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()


def write(path: Path, documents: list[str]) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)


if __name__ == "__main__":
    sys.exit(main())
