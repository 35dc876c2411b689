"""Text for the quickstart: documents from Python's own language reference, or from the user's files.

    python scripts/quickstart_text.py OUT [FILE_OR_FOLDER]

writes OUT/train.jsonl and OUT/valid.jsonl ({"text": ...} a line), OUT/blanks.txt (held-out sentences with one or two
words replaced by [MASK]) and OUT/vocab_size (for SentencePiece; a Chinese text needs room for its characters).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

VALID_SHARE = 0.06
COVERED = 0.9995  # SentencePiece's default character coverage; the rest is spelled in bytes
NUM_BYTES, NUM_WORDS = 260, 1600  # pieces for the bytes, and for what is longer than a character
NUM_BLANKED = 8
CHUNK = 4000  # characters; a long file becomes several documents, so that some can be held out


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: quickstart_text.py OUT [FILE_OR_FOLDER]", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    try:
        documents = list(user_documents(Path(sys.argv[2])) if len(sys.argv) == 3 else language_reference())
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
    characters = Counter("".join(documents[num_valid:]))
    (out / "vocab_size").write_text(f"{num_covering(characters) + NUM_BYTES + NUM_WORDS}\n")
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


def language_reference() -> Iterator[str]:
    """The topics of Python's language reference, as every Python carries them (pydoc_data.topics)."""
    from pydoc_data.topics import topics

    for topic in topics.values():
        yield from chunks(plain(topic))


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


def fingerprint(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()


def write(path: Path, documents: list[str]) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)


if __name__ == "__main__":
    sys.exit(main())
