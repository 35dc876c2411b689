"""Text for the quickstart: Python's own documentation, or the user's files; and the score at its end.

    python scripts/quickstart_text.py OUT [FILE_OR_FOLDER]

writes OUT/train.jsonl and OUT/valid.jsonl ({"text": ...} a line), OUT/blanks.txt (held-out sentences with one or two
words replaced by [MASK]), OUT/words.txt (more of them, with one word replaced each), OUT/words.json (these words) and
OUT/vocab_size (for SentencePiece; a Chinese text needs room for its characters).

    python scripts/quickstart_text.py --score OUT < ANSWERS

prints how many words of OUT/words.txt are filled in exactly; ANSWERS: what ftk-generate --output-format json printed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

VALID_SHARE = 0.06
COVERED = 0.9995  # SentencePiece's default character coverage; the rest is spelled in bytes
NUM_BYTES = 260  # pieces for the bytes
MAX_WORDS, CHARACTERS_PER_WORD = 4500, 300  # vocabulary for whole words: at most this, and one per 300 characters
NUM_BLANKED = 8
NUM_SCORED = 300
CHUNK = 4000  # characters; a long file becomes several documents, so that some can be held out


def main() -> int:
    if sys.argv[1:2] == ["--score"]:
        return score(Path(sys.argv[2]))
    if len(sys.argv) not in (2, 3):
        print("usage: quickstart_text.py OUT [FILE_OR_FOLDER]", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    try:
        documents = list(user_documents(Path(sys.argv[2])) if len(sys.argv) == 3 else python_documentation())
    except (OSError, UnicodeDecodeError) as error:
        print(f"quickstart: cannot read the text: {error}", file=sys.stderr)
        return 2
    documents = sorted(set(documents), key=fingerprint)  # the same order and split on every machine
    num_valid = max(1, round(VALID_SHARE * len(documents)))
    if len(documents) < 10:
        print(f"quickstart: only {len(documents)} documents of text found; at least 10 are needed", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    write(out / "valid.jsonl", documents[:num_valid])
    write(out / "train.jsonl", documents[num_valid:])
    (out / "blanks.txt").write_text("\n".join(blanked(documents[:num_valid])) + "\n", encoding="utf-8")
    whole_words = Counter(word for d in documents[num_valid:] for word in d.split() if is_word(word))
    one_word = list(one_word_blanks(documents[:num_valid]))
    (out / "words.txt").write_text("".join(f"{prompt}\n" for prompt, _ in one_word), encoding="utf-8")
    facts = {"words": [word for _, word in one_word], "frequent": (whole_words.most_common(1) or [("", 0)])[0][0]}
    (out / "words.json").write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
    characters = Counter("".join(documents[num_valid:]))
    num_words = min(MAX_WORDS, characters.total() // CHARACTERS_PER_WORD)
    (out / "vocab_size").write_text(f"{num_covering(characters) + NUM_BYTES + num_words}\n")
    print(f"{len(documents)} documents, {characters.total():,} characters, {num_valid} documents held out")
    return 0


def num_covering(characters: Counter[str]) -> int:
    """How many of the most frequent characters make up COVERED of the text."""
    missing = COVERED * characters.total()
    for number, (_, count) in enumerate(characters.most_common(), start=1):
        missing -= count
        if missing <= 0:
            return number
    return len(characters)


def python_documentation() -> Iterator[str]:
    """The language reference and the docstrings of the standard library, as every Python carries them."""
    from pydoc_data.topics import topics

    for topic in topics.values():
        yield from chunks(plain(topic))
    library, seen = Path(sysconfig.get_paths()["stdlib"]), set()
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"}.isdisjoint(file.parts):
            new = [docstring for docstring in docstrings(file) if docstring not in seen]
            seen.update(new)
            yield from chunks("\n".join(map(plain, new)))


def docstrings(file: Path) -> list[str]:
    """The docstrings of a module, its classes and functions; none where it cannot be read."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, documented) and (text := ast.get_docstring(node))]


def user_documents(path: Path) -> Iterator[str]:
    """JSON Lines: the field "text" of each line; other files: paragraphs, gathered to documents of some length."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        content = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            for line in content.split("\n"):
                if line.strip():
                    yield from chunks(str(json.loads(line).get("text", "")))
        else:
            yield from chunks(content)


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


def plain(topic: str) -> str:
    """reStructuredText as running text: paragraphs unwrapped, underlines and markup dropped."""
    text = re.sub(r"^[*=~\-^\"]{3,}$", "", topic, flags=re.MULTILINE)
    text = re.sub(r"[*`]", "", text)
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def blanked(documents: list[str]) -> Iterator[str]:
    """Held-out sentences with a blank or two."""
    rng = random.Random(1)
    sentences = [s.strip() for d in documents for s in re.split(r"(?<=[.!?])\s+|(?<=[。！？])|\n", d)]
    spaced = [s for s in sentences if 50 <= len(s) <= 160 and s.count(" ") >= 8 and "|" not in s]
    dense = [s for s in sentences if 10 <= len(s) <= 80 and " " not in s]  # Chinese: no spaces between words
    chosen = spaced if len(spaced) >= NUM_BLANKED else spaced + dense
    rng.shuffle(chosen)
    for number, sentence in enumerate(chosen[:NUM_BLANKED]):
        if " " not in sentence:
            at = rng.randrange(2, len(sentence) - 4)
            yield f"{sentence[:at]}[MASK]{sentence[at + 2 :]}"
            continue
        words = sentence.split(" ")
        for place in rng.sample(range(1, len(words) - 1), 1 + number % 2):
            words[place] = "[MASK]"
        yield " ".join(words)


def is_word(text: str) -> bool:
    return text.isascii() and text.isalpha()


def one_word_blanks(documents: list[str]) -> Iterator[tuple[str, str]]:
    """Held-out sentences with a word replaced by [MASK], and the word."""
    rng = random.Random(2)
    sentences = [s.strip() for d in documents for s in re.split(r"(?<=[.!?])\s+|\n", d)]
    chosen = [s for s in sentences if 50 <= len(s) <= 160 and s.count(" ") >= 8 and "|" not in s and "[" not in s]
    rng.shuffle(chosen)
    for sentence in chosen[:NUM_SCORED]:
        words = sentence.split(" ")
        if places := [place for place in range(1, len(words) - 1) if is_word(words[place])]:
            place = rng.choice(places)
            yield " ".join([*words[:place], "[MASK]", *words[place + 1 :]]), words[place]


def score(out: Path) -> int:
    """Prints the share of words that are filled in exactly, beside that of the most frequent word."""
    facts = json.loads((out / "words.json").read_text(encoding="utf-8"))
    answers = [json.loads(line)["answers"][0]["text"].strip() for line in sys.stdin]
    words, frequent = facts["words"], facts["frequent"]
    right = sum(answer == word for answer, word in zip(answers, words, strict=True)) / len(words)
    usual = words.count(frequent) / len(words)
    print(f"{len(words)} held-out sentences with one word blanked out, filled in exactly: {right:.1%}")
    print(f"always answering with the most frequent word, {frequent!r}: {usual:.1%}")
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
