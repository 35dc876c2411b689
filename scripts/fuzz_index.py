"""Fuzzes the index reader: alters valid `.bin/.idx` pairs and looks whether a wrong token ever comes out.

    python scripts/fuzz_index.py --seconds 60 --seed 1

The corpus is pairs of every dtype, both dialects, many shapes (empty, one sequence, empty sequences, documents of
several sequences, thousands of sequences, modes as in multimodal files). Each is altered in one to three places:
bits flipped, bytes set, header fields and single lengths, pointers and marks set to extreme or neighbouring values,
truncated, lengthened, parts copied over or exchanged; or else the .bin file is cut or lengthened (its tokens are the
data, which no check of an index can know; `ftk-data verify` compares checksums). Then it is opened, in half of the
cases with the check put off to the first access, and read by every way there is, in random order.

What may happen: a `UserError`, or every token equals the true one. Three changes are no faults of the reader: a dtype
code that stands for another dtype of the same width (then the bytes must be the true ones), a document index that is
still a legal one, and a whole index of no sequences where there are no tokens. The number of sequences is the
header's until the first access, so that opening reads no more than the header. Anything else, a crash of the process
included, is printed with the seed that makes it again, and the exit code is 1. The work is done in child processes,
so that a segmentation fault is seen.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

from ftk.data.indexed import dataset as indexed_dataset
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from ftk.data.indexed.format import FAIRSEQ_DTYPES, MAGIC, VERSION
from ftk.errors import UserError

MEGATRON = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
FAIRSEQ = ("uint8", "int8", "int16", "int32", "int64", "float64", "uint16", "uint32", "uint64")
EXTREMES = (0, 1, -1, 2, 7, 8, 255, 256, 2**31 - 1, -(2**31), 2**32, 2**61, 2**62, 2**63 - 1, -(2**63))
BATCH = 2000  # cases a child process works off


class Case:
    """One valid pair: its bytes and the sequences that are in it."""

    def __init__(self, name: str, index: bytes, data: bytes, rows: list[np.ndarray]) -> None:
        self.name, self.index, self.data, self.rows = name, index, data, rows


def corpus(folder: Path) -> list[Case]:
    """Valid pairs of every kind."""
    cases = []
    generator = np.random.default_rng(0)
    shapes = {
        "none": [],
        "one": [5],
        "empty-ones": [0, 0, 0],
        "mixed": [3, 0, 1, 5, 2],
        "eight": [1] * 8,
        "long": [1000, 1],
        "many": generator.integers(0, 6, size=3000).tolist(),
    }
    for dialect, dtypes in (("megatron", MEGATRON), ("fairseq", FAIRSEQ)):
        for dtype in dtypes:
            for shape, lengths in shapes.items():
                for grouped in (False, True) if dialect == "megatron" else (False,):
                    prefix = folder / "made"
                    rows = [generator.integers(0, 100, size=length).astype(dtype) for length in lengths]
                    if dialect == "megatron":
                        with IndexedDatasetWriter(prefix, dtype, overwrite=True) as writer:
                            for number, row in enumerate(rows):
                                writer.add(row, end_document=not grouped or number % 3 == 2)
                        index, data = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
                    else:
                        index, data = fairseq_index(rows, np.dtype(dtype)), b"".join(row.tobytes() for row in rows)
                    name = f"{dialect}-{dtype}-{shape}{'-grouped' if grouped else ''}"
                    cases.append(Case(name, index, data, rows))
                    if dialect == "megatron" and rows:
                        cases.append(Case(f"{name}-modes", index + bytes(len(rows)), data, rows))
    return cases


def fairseq_index(rows: list[np.ndarray], dtype: np.dtype) -> bytes:
    """The .idx file that fairseq writes for `rows`."""
    code = next(code for code, known in FAIRSEQ_DTYPES.items() if known == dtype)
    sizes = np.array([len(row) for row in rows], dtype="<i4")
    pointers = np.cumsum(sizes, dtype="<i8") * dtype.itemsize - sizes * dtype.itemsize
    return MAGIC + struct.pack("<QBQ", VERSION, code, len(rows)) + sizes.tobytes() + pointers.tobytes()


def alter(case: Case, rng: random.Random) -> tuple[bytes, bytes, str]:
    """The pair with one to three changes, and what they are."""
    index, data = bytearray(case.index), case.data
    done: list[str] = []
    if rng.random() < 0.1:  # both files altered so that they agree again is what only a checksum can see
        change = rng.choice((1, 2, 3, 4, 8, 16, len(data)))
        return case.index, data[:-change] if rng.random() < 0.5 else data + bytes(change), "data"
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.choice(("bit", "bit", "byte", "header", "field", "field", "cut", "longer", "copy", "swap"))
        done.append(kind)
        if not index:
            continue
        if kind == "bit":
            index[rng.randrange(len(index))] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            index[rng.randrange(len(index))] = rng.randrange(256)
        elif kind == "header":
            at, size = rng.choice(((0, 1), (9, 8), (17, 1), (18, 8), (26, 8)))
            set_number(index, at, size, near(index, at, size, rng))
        elif kind == "field":
            set_field(index, case, rng)
        elif kind == "cut":
            del index[rng.choice((rng.randrange(len(index)), max(0, len(index) - rng.randrange(1, 40)))) :]
        elif kind == "longer":
            index += bytes(rng.randrange(256) for _ in range(rng.choice((1, 8, 12, 20, len(case.rows) or 1))))
        else:
            size = min(rng.choice((1, 4, 8, 16)), len(index))
            first, second = (rng.randrange(len(index) - size + 1) for _ in range(2))
            one, other = index[first : first + size], index[second : second + size]
            index[second : second + size] = one
            if kind == "swap":
                index[first : first + size] = other
    return bytes(index), data, "+".join(done)


def near(index: bytearray, at: int, size: int, rng: random.Random) -> int:
    present = int.from_bytes(index[at : at + size], "little")
    return rng.choice((*EXTREMES, present + rng.choice((-8, -2, -1, 1, 2, 8)), rng.getrandbits(8 * size)))


def set_number(index: bytearray, at: int, size: int, value: int) -> None:
    if at + size <= len(index):
        index[at : at + size] = (value % (1 << (8 * size))).to_bytes(size, "little")


def set_field(index: bytearray, case: Case, rng: random.Random) -> None:
    """One length, pointer or mark to another value; now and then two lengths so that their sum is the same."""
    start = 26 if case.name.startswith("fairseq") else 34
    count = len(case.rows)
    if not count:
        return
    number = rng.randrange(count)
    size, at = rng.choice(((4, start + 4 * number), (8, start + 4 * count + 8 * number)))
    if rng.random() < 0.2 and start == 34:
        size, at = 8, start + 12 * count + 8 * number
    if rng.random() < 0.2 and count > 1:
        other = rng.randrange(count)
        for place, change in ((start + 4 * number, 1), (start + 4 * other, -1)):
            if place + 4 <= len(index):
                set_number(index, place, 4, struct.unpack_from("<i", index, place)[0] + change)
        return
    set_number(index, at, size, near(index, at, size, rng))


def attempt(case: Case, index: bytes, data: bytes, folder: Path, rng: random.Random) -> str:
    """Opens and reads an altered pair; returns what became of it, raises AssertionError if a wrong token came out."""
    prefix = folder / "altered"
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(data)
    indexed_dataset._EAGER_CHECK_BYTES = rng.choice((0, 1 << 24))
    try:
        dataset = IndexedDataset(prefix)
        ways = [read_one_by_one, read_gathered, read_packed, read_parts, read_sizes]
        rng.shuffle(ways)
        for way in ways:
            way(dataset, case, rng)
    except UserError as error:
        message = str(error)
        assert str(prefix) in message, f"an error that does not say where: {message}"
        return "refused"
    return "the same tokens"


def same(found: np.ndarray, true: np.ndarray, what: str) -> None:
    """Byte for byte: a changed dtype code can show the same bytes as another dtype of the same width."""
    assert found.tobytes() == true.tobytes(), f"wrong tokens by {what}: {found[:20]} instead of {true[:20]}"


def row(case: Case, number: int) -> np.ndarray:
    """The true sequence; none beyond the end, where the reader has to refuse before it gives tokens."""
    return case.rows[number] if number < len(case.rows) else np.empty(0, dtype=np.int64)


def read_one_by_one(dataset: IndexedDataset, case: Case, rng: random.Random) -> None:
    if len(dataset) != len(case.rows):
        dataset.check()
        assert not case.data, f"{len(dataset)} sequences instead of {len(case.rows)}"
    order = list(range(len(dataset)))
    rng.shuffle(order)
    for number in order[:200]:
        same(dataset[number], row(case, number), f"[{number}]")


def read_gathered(dataset: IndexedDataset, case: Case, rng: random.Random) -> None:
    chosen = [rng.randrange(len(dataset)) for _ in range(50)] if len(dataset) else []
    rows = dataset.gather(chosen)
    for place, number in enumerate(chosen):
        same(rows[place, : len(row(case, number))], row(case, number), f"gather of {number}")


def read_packed(dataset: IndexedDataset, case: Case, rng: random.Random) -> None:
    chosen = [rng.randrange(len(dataset)) for _ in range(50)] if len(dataset) else []
    tokens, offsets = dataset.gather_packed(chosen)
    for place, number in enumerate(chosen):
        same(tokens[offsets[place] : offsets[place + 1]], row(case, number), f"gather_packed of {number}")


def read_parts(dataset: IndexedDataset, case: Case, rng: random.Random) -> None:
    for _ in range(20 if len(dataset) else 0):
        number = rng.randrange(len(dataset))
        offset = rng.randrange(len(row(case, number)) + 1)
        same(dataset.get(number, offset), row(case, number)[offset:], f"get of {number} from {offset}")


def read_sizes(dataset: IndexedDataset, case: Case, rng: random.Random) -> None:
    whole = dataset.sizes.tolist() == [len(row) for row in case.rows]
    assert whole or not case.data, "wrong sizes"
    assert dataset.tokens.tobytes() == case.data, "wrong tokens as a whole"
    marks = dataset.document_index
    legal = marks[0] == 0 and marks[-1] == len(dataset) and (np.diff(marks) >= 0).all()
    assert legal, f"an illegal document index: {marks[:20]}"


def work(cases: list[Case], seed: int, folder: str, results: multiprocessing.Queue) -> None:
    """A batch of cases, in a process of its own."""
    place = Path(folder)
    place.mkdir(exist_ok=True)
    outcomes: Counter[str] = Counter()
    for number in range(seed, seed + BATCH):
        (place / "number").write_text(str(number))
        rng = random.Random(number)
        case = rng.choice(cases)
        index, data, changes = alter(case, rng)
        if index == case.index and data == case.data:
            outcomes["unchanged"] += 1
            continue
        try:
            outcomes[attempt(case, index, data, place, rng)] += 1
        except Exception as error:
            outcomes["FAULT"] += 1
            detail = f"{type(error).__name__}: {error}" if isinstance(error, AssertionError) else traceback.format_exc()
            print(f"case {number}: {case.name}, {changes}: {detail}", flush=True)
    results.put(outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--case", type=int, default=None, help="one case again, by its number")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the counts there")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="ftk-fuzz-") as folder:
        cases = corpus(Path(folder))
        size = sum(len(case.index) + len(case.data) for case in cases)
        print(f"corpus: {len(cases)} valid pairs, {size:,} bytes", flush=True)
        if arguments.case is not None:
            rng = random.Random(arguments.case)
            case = rng.choice(cases)
            index, data, changes = alter(case, rng)
            print(f"{case.name}, {changes}: {attempt(case, index, data, Path(folder), rng)}")
            return 0
        started, seed = time.monotonic(), arguments.seed
        context = multiprocessing.get_context("fork")
        while time.monotonic() - started < arguments.seconds:
            results: multiprocessing.Queue = context.Queue()
            child = context.Process(target=work, args=(cases, seed, f"{folder}/child", results))
            child.start()
            child.join()
            if child.exitcode == 0:
                outcomes += results.get()
            else:
                number = (Path(folder) / "child" / "number").read_text()
                print(f"case {number}: the process ended with {child.exitcode}", flush=True)
                outcomes["FAULT"] += 1
            seed += BATCH
    seconds = time.monotonic() - started
    print(f"{sum(outcomes.values()):,} pairs in {seconds:.0f} s, cases {arguments.seed} to {seed - 1}")
    for outcome, count in sorted(outcomes.items()):
        print(f"  {outcome}: {count:,}")
    if arguments.json:
        record = {"pairs": len(cases), "bytes": size, "first": arguments.seed, "last": seed - 1, "outcomes": outcomes}
        Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n")
    return 1 if outcomes["FAULT"] else 0


if __name__ == "__main__":
    sys.exit(main())
