"""ftk-generate: fills blanks, of a preprocessed subset with known answers or of prompts in a text file."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from ftk.config import compose, section
from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.registry import SCORERS
from ftk_cli.frame import run
from ftk_cli.inference_options import DeviceConfig, decode_line, open_filler

if TYPE_CHECKING:
    from ftk.generation.fill import EncodedPrompt

PROG = "ftk-generate"
DESCRIPTION = """Fills blanks with a trained model: those that the task makes in a subset of DATA, or
those in your own prompts, one a line. Prints S- source, T- reference, H- score and tokens, D- score and text,
P- log-probabilities, F- filled text. Examples: ftk-generate data-bin --path run --gen-subset valid;
echo "Ng is an adjunct professor at [MASK] ." | ftk-generate --path run --input -"""

_BATCHES_AT_ONCE = 4  # prompts of so many batches are sorted by length together


@dataclass(kw_only=True)
class GenerateConfig:
    data: str | None = field(
        default=None,
        metadata={"help": "folder written by ftk-preprocess; not with --input", "positional": True, "metavar": "DATA"},
    )
    path: str = field(
        metadata={"help": "checkpoint, or a run's folder (its best checkpoint, else its last)", "metavar": "PATH"}
    )
    gen_subset: str | None = field(
        default=None, metadata={"help": "split of DATA to fill blanks in; valid if not given"}
    )
    input: str | None = field(
        default=None, metadata={"help": "text file with one prompt a line, - for standard input", "metavar": "FILE"}
    )
    max_samples: int | None = field(default=None, metadata={"help": "stop after so many", "unit": "samples"})
    output_format: str = field(
        default="text", metadata={"help": "fairseq's lines, or one JSON object a line", "choices": ("text", "json")}
    )
    scoring: list[str] = field(
        default_factory=list, metadata={"help": "score the answers to DATA by these, e.g. exact_match,token_f1"}
    )

    def validate(self) -> Iterator[str]:
        if (self.data is None) == (self.input is None):
            yield "data and input: give a preprocessed folder or --input FILE, one of the two"
        if self.gen_subset is not None and self.data is None:
            yield "gen_subset names a split of DATA; it does not go with --input"
        if self.max_samples is not None and self.max_samples < 1:
            yield f"max_samples is {self.max_samples}; it must be at least 1"
        if self.scoring and self.data is None:
            yield "scoring needs reference answers; it goes with DATA, not with --input"
        for name in self.scoring:
            if name not in SCORERS:
                yield f"scoring is {name!r}; there are: {', '.join(SCORERS.names())}"


@dataclass(kw_only=True)
class GenerateRoot:
    generate: GenerateConfig = section("what to fill")
    generation: GenerationConfig = section("how to search")
    processors: ProcessorConfig = section("logits processors")
    common: DeviceConfig = section("common")


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def body(argv: list[str]) -> int:
    root = compose(GenerateRoot, PROG, DESCRIPTION, argv)
    if root.generate.data is not None:
        return _fill_subset(root, root.generate.data)
    assert root.generate.input is not None, "validated"
    return _fill_prompts(root, root.generate.input)


def _fill_subset(root: GenerateRoot, data: str) -> int:
    """Answers the blanks that the task makes in a split; prints them beside the references."""
    from ftk.evaluation.base import build_scorer
    from ftk.generation.output import NOTE, json_line, text_lines
    from ftk.generation.samples import question_of
    from ftk.tasks.restore import restore_task

    options = root.generate
    task, _ = restore_task(options.path, data)
    subset = options.gen_subset or "valid"
    samples = task.load_split(subset)
    filler = open_filler(options.path, root.common, root.generation, root.processors)
    count = min(len(samples), options.max_samples or len(samples))
    scorers = {name: build_scorer(name) for name in options.scoring}
    as_json = options.output_format == "json"
    tokenizer, generator, num_tokens, started = filler.tokenizer, filler.generator, 0, time.perf_counter()
    with _progress(count) as bar:
        for indices in _chunks(range(count), root.generation.batch_size * _BATCHES_AT_ONCE):
            questions = [question_of(samples.sample(0, index), tokenizer.special) for index in indices]
            found = generator.fill_ids([question.context for question in questions], progress=bar.update)
            lines: list[str] = []
            for index, question, answers in zip(indices, questions, found, strict=True):
                source = filler.source_text(question.context)
                references = [tokenizer.decode(reference).strip() for reference in question.references]
                filled = filler.describe(question.context, answers)
                num_tokens += sum(len(answer.token_logprobs) for answer in answers)
                lines += (
                    [json_line(index, source, filled, references)]
                    if as_json
                    else text_lines(index, source, filled, tokenizer, references)
                )
                for scorer in scorers.values():
                    for blank, reference in zip(filled, references, strict=True):
                        scorer.add(blank.text, reference)
            _print(lines)
    seconds = time.perf_counter() - started
    if not as_json:
        print(NOTE.format(length_penalty=root.generation.length_penalty))
    rate = num_tokens / seconds
    _say(f"filled {count} samples ({num_tokens} tokens) in {seconds:.1f} s ({rate:.1f} tokens/s)")
    for scorer in scorers.values():
        for name, value in scorer.result().items():
            search = root.generation.search or (
                "sampling" if root.generation.sampling else f"beam={root.generation.beam}"
            )
            stream = sys.stderr if as_json else sys.stdout
            print(f"Generate {subset} with {search}: {name} = {value:.2f} %", file=stream)
    return 0


def _fill_prompts(root: GenerateRoot, source: str) -> int:
    """Answers prompts, one a line; bad lines are named and left out. Returns 2 if there were any."""
    from ftk.generation.output import NOTE, json_line, text_lines

    as_json = root.generate.output_format == "json"
    name, failed = "standard input" if source == "-" else source, 0
    with _open(source) as stream, _progress(_num_prompts(source, root.generate.max_samples)) as bar:
        filler = open_filler(root.generate.path, root.common, root.generation, root.processors)
        numbered = enumerate(itertools.islice(stream, root.generate.max_samples))
        for chunk in _chunks(numbered, root.generation.batch_size * _BATCHES_AT_ONCE):
            encoded: list[tuple[int, EncodedPrompt]] = []
            for index, line in chunk:
                try:
                    encoded.append((index, filler.encode(decode_line(line))))
                except UserError as error:
                    _say(f"{name}:{index + 1}: {error}")
                    failed += 1
            results = filler.fill_encoded([prompt for _, prompt in encoded], progress=bar.update)
            lines: list[str] = []
            for (index, _), result in zip(encoded, results, strict=True):
                prompt = result.prompt.rstrip("\r\n")
                lines += (
                    [json_line(index, prompt, result.answers, filled=result.text)]
                    if as_json
                    else text_lines(index, prompt, result.answers, filler.tokenizer, filled=result.text)
                )
            _print(lines)
    if not as_json:
        print(NOTE.format(length_penalty=root.generation.length_penalty))
    if failed:
        _say(f"{name}: {failed} line{'s' if failed > 1 else ''} not answered")
    return 2 if failed else 0


def _open(source: str) -> Any:
    """The prompts as lines of bytes."""
    if source == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return open(source, "rb")
    except OSError as error:
        raise UserError(f"--input {source}: {error.strerror}; give a text file or -") from None


def _num_prompts(source: str, limit: int | None) -> int | None:
    """How many prompts will come, for the time left; None where only their end will tell."""
    if not os.path.isfile(source) or not sys.stderr.isatty():
        return limit
    with open(source, "rb") as stream:
        return sum(1 for _ in itertools.islice(stream, limit))


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def _progress(total: int | None) -> Any:
    """A bar on stderr with rate and time left; none where stderr is not a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, unit="prompt", disable=None, dynamic_ncols=True, file=sys.stderr)


def _print(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Prints at once, out of the way of the bar."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=stream or sys.stdout):
        print("".join(f"{line}\n" for line in lines), end="", file=stream or sys.stdout, flush=True)


def _say(message: str) -> None:
    sys.stdout.flush()
    _print([f"{PROG}: {message}"], sys.stderr)
