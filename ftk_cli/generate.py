"""ftk-generate: fills blanks, of a preprocessed subset with known answers or of prompts in a text file."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from ftk.config import compose, section
from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.registry import SCORERS
from ftk_cli.frame import FAILURE, run
from ftk_cli.inference_options import COLOR, DeviceConfig, decode_line, open_filler

if TYPE_CHECKING:
    from ftk.generation.fill import EncodedPrompt, FillResult
    from ftk_cli.results import ResultsFile

PROG = "ftk-generate"
DESCRIPTION = """Fills blanks with a trained model: those that the task makes in a subset of DATA, or
those in your own prompts, one a line. Prints S- source, T- reference, H- score and tokens, D- score and text,
P- log-probabilities, A- alternatives, I- steps, F- filled text, E- what is wrong with a prompt.
Examples: ftk-generate data-bin --path run --gen-subset valid;
echo "Ng is an adjunct professor at [MASK] ." | ftk-generate --path run --input -"""

_BATCHES_AT_ONCE = 4  # prompts of so many batches are sorted by length together, and held in memory
_MAX_LINE_BYTES = 1 << 20  # a longer line is no prompt; it is not even read whole
_SPEED_ONLY = ("batch_size", "in_flight")  # options of generation that no answer depends on


@dataclass(kw_only=True)
class GenerateConfig:
    data: str | None = field(
        default=None,
        metadata={"help": "folder written by ftk-preprocess; not with --input", "positional": True, "metavar": "DATA"},
    )
    path: str = field(
        metadata={
            "help": "checkpoint, or a run's folder (its best checkpoint, else its last); several with colons between "
            "are an ensemble",
            "metavar": "PATH",
        }
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

    results_path: str | None = field(
        default=None,
        metadata={
            "help": "write to this file, record by record, instead of printing; the same command continues there "
            "what was interrupted",
            "metavar": "FILE",
        },
    )
    overwrite_results: bool = field(
        default=False, metadata={"help": "begin --results-path anew, whatever stands in it"}
    )
    on_error: str = field(
        default="continue",
        metadata={
            "help": "a prompt that cannot be answered: say so in its place and continue (exit code 1 at the end), "
            "or stop",
            "choices": ("continue", "stop"),
        },
    )
    print_step: bool = field(
        default=False, metadata={"help": "print the steps of each sample too: tokens of its best answers"}
    )
    color: str = COLOR
    score_reference: bool = field(
        default=False,
        metadata={
            "help": "score known answers instead of finding some: the references in DATA, or those in --input FILE, "
            "whose lines are prompt, tab, answer (...), or JSON with prompt and answers or candidates"
        },
    )
    score_end: bool = field(
        default=True, metadata={"help": "with --score-reference --input: score the token that ends an answer, too"}
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
        if self.overwrite_results and self.results_path is None:
            yield "overwrite_results is on, but there is no results_path"
        both = (self.input or "", self.results_path or "")
        if all(both) and len(set(map(os.path.realpath, both))) == 1:
            yield "input and results_path are the same file; write the results to another"
        if self.scoring and self.results_path is not None and self.output_format != "json":
            yield "scoring and results_path go together with --output-format json, from which a later run can score"
        if self.score_reference and (self.scoring or self.results_path is not None):
            yield "score_reference finds no answers; scoring and results_path do not go with it"
        if not self.score_end and (not self.score_reference or self.input is None):
            yield "score_end is off; it goes with --score-reference --input"
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
    if root.generate.score_reference:
        if root.generation.alternatives:
            raise UserError("alternatives is on, but score_reference finds no answers; leave one of them out")
        return _score(root)
    with ExitStack() as stack:
        results = _open_results(root)
        if results is not None:
            stack.enter_context(closing(results))
        if root.generate.data is not None:
            return _fill_subset(root, root.generate.data, results)
        assert root.generate.input is not None, "validated"
        return _fill_prompts(root, root.generate.input, results)


def _score(root: GenerateRoot) -> int:
    from ftk_cli.score_reference import score_lines, score_subset

    if root.generate.data is not None:
        return score_subset(root, root.generate.data)
    assert root.generate.input is not None, "validated"
    return score_lines(root, root.generate.input)


def _open_results(root: GenerateRoot) -> ResultsFile | None:
    """The file of --results-path, if it was given and is of this command."""
    from ftk_cli.results import ResultsFile, checkpoint_identity

    options = root.generate
    if options.results_path is None:
        return None
    generation = dataclasses.asdict(root.generation)
    settings = {
        **{name: getattr(options, name) for name in ("gen_subset", "output_format", "print_step")},
        **{name: path and os.path.abspath(path) for name, path in (("data", options.data), ("input", options.input))},
        **checkpoint_identity(options.path),
        "ema": root.common.ema,
        **{name: value for name, value in generation.items() if name not in _SPEED_ONLY},
        **dataclasses.asdict(root.processors),
    }
    as_json = options.output_format == "json"
    return ResultsFile(options.results_path, settings, as_json=as_json, overwrite=options.overwrite_results)


def _fill_subset(root: GenerateRoot, data: str, results: ResultsFile | None) -> int:
    """Answers the blanks that the task makes in a split; prints them beside the references."""
    from ftk.evaluation.base import build_scorer
    from ftk.generation.output import NOTE, json_line, num_steps, text_lines
    from ftk.generation.samples import question_of
    from ftk.hub import checkpoint_paths
    from ftk.tasks.restore import restore_task

    options = root.generate
    task, _ = restore_task(checkpoint_paths(options.path)[0], data)
    subset = options.gen_subset or "valid"
    samples = task.load_split(subset)
    count = min(len(samples), options.max_samples or len(samples))
    scorers = {name: build_scorer(name) for name in options.scoring}
    done = 0
    for old in results.old() if results is not None else ():
        done += 1
        for text, reference in old.answers:
            for scorer in scorers.values():
                scorer.add(text, reference)
    meter = _Meter("samples", done)
    filler = open_filler(options.path, root.common, root.generation, root.processors)
    as_json, steps = options.output_format == "json", options.print_step
    tokenizer, generator = filler.tokenizer, filler.generator
    meter.begin()
    with _progress(max(count, done), done) as bar:
        for indices in _chunks(range(done, count), root.generation.batch_size * _BATCHES_AT_ONCE):
            questions = [question_of(samples.sample(0, index), tokenizer.special) for index in indices]
            found = generator.fill_ids([question.context for question in questions], progress=bar.update)
            lines: list[str] = []
            for index, question, answers in zip(indices, questions, found, strict=True):
                source = filler.source_text(question.context)
                references = [tokenizer.decode(reference).strip() for reference in question.references]
                filled = filler.describe(question.context, answers)
                meter.add(num_steps(filled))
                lines += (
                    [json_line(index, source, filled, tokenizer, references, print_step=steps)]
                    if as_json
                    else text_lines(index, source, filled, tokenizer, references, print_step=steps)
                )
                for scorer in scorers.values():
                    for blank, reference in zip(filled, references, strict=True):
                        scorer.add(blank.text, reference)
            _write(lines, results)
            bar.set_postfix_str(meter.rate())
    if not as_json and results is None:
        print(NOTE.format(length_penalty=root.generation.length_penalty))
    _say(meter.summary())
    for scorer in scorers.values():
        for name, value in scorer.result().items():
            search = root.generation.search or (
                "sampling" if root.generation.sampling else f"beam={root.generation.beam}"
            )
            stream = sys.stderr if as_json and results is None else sys.stdout
            print(f"Generate {subset} with {search}: {name} = {value:.2f} %", file=stream)
    return 0


def _fill_prompts(root: GenerateRoot, source: str, results: ResultsFile | None) -> int:
    """Answers prompts, one a line, in blocks: in constant memory. Returns 1 if some could not be answered."""
    from ftk.generation.output import NOTE, error_line, num_steps

    options = root.generate
    as_json = options.output_format == "json"
    name = "standard input" if source == "-" else source
    with _open(source) as stream:
        numbered = enumerate(itertools.islice(_prompt_lines(stream), options.max_samples))
        done, failed = (0, 0) if results is None else _skip_answered(results, numbered, name)
        meter = _Meter("prompts", done)
        filler = open_filler(options.path, root.common, root.generation, root.processors)
        meter.begin()
        with _progress(_num_prompts(source, options.max_samples), done) as bar:
            for chunk in _chunks(numbered, root.generation.batch_size * _BATCHES_AT_ONCE):
                encoded: list[tuple[int, EncodedPrompt]] = []
                records: dict[int, Iterable[str]] = {}
                stopped_by: UserError | None = None
                for index, line in chunk:
                    try:
                        encoded.append((index, filler.encode(_prompt(line))))
                    except UserError as error:
                        if options.on_error == "stop":  # behind the answers to the prompts before it
                            stopped_by = UserError(f"{name}:{index + 1}: {error}")
                            break
                        _say(f"{name}:{index + 1}: {error}")
                        records[index] = [error_line(index, str(error), as_json)]
                bar.update(len(records))
                failed += len(records)
                answered = filler.fill_encoded([prompt for _, prompt in encoded], progress=bar.update)
                for (index, _), result in zip(encoded, answered, strict=True):
                    records[index] = _prompt_record(root, index, result, filler.tokenizer, results is None)
                    meter.add(num_steps(result.answers))
                _write(itertools.chain.from_iterable(records[index] for index in sorted(records)), results)
                if stopped_by is not None:
                    raise stopped_by
                bar.set_postfix_str(meter.rate())
    if not as_json and results is None:
        print(NOTE.format(length_penalty=root.generation.length_penalty))
    _say(meter.summary())
    if failed:
        _say(f"{name}: {failed} line{'s' if failed > 1 else ''} not answered")
    return FAILURE if failed else 0


def _skip_answered(results: ResultsFile, numbered: Iterator[tuple[int, bytes]], name: str) -> tuple[int, int]:
    """Passes over the prompts that the results hold: how many, and how many of them could not be answered."""
    done = failed = 0
    for old in results.old():
        index, line = next(numbered, (done, None))
        if line is None:
            raise UserError(f"{results.path} holds more samples than {name} has lines; was the input changed?")
        if old.source is None:
            failed += 1
        elif not results.same_source(old, _shown_prompt(line.decode("utf-8", "replace").removeprefix("\ufeff"))):
            raise UserError(
                f"{name}:{index + 1} is not the prompt that {results.path} holds there; "
                "give the same input, another --results-path, or --overwrite-results to begin anew"
            )
        done += 1
    return done, failed


def _prompt_record(root: GenerateRoot, index: int, result: FillResult, tokenizer: Any, printed: bool) -> Iterable[str]:
    """The lines about one prompt; coloured at most where they are printed."""
    from ftk.generation.output import colored_text, json_line, one_line, text_lines, use_color

    prompt, steps = _shown_prompt(result.prompt), root.generate.print_step
    if root.generate.output_format == "json":
        return [json_line(index, prompt, result.answers, tokenizer, filled=result.text, print_step=steps)]
    color = printed and use_color(root.generate.color, sys.stdout)
    filled = colored_text(result) if color else one_line(result.text)
    return text_lines(index, prompt, result.answers, tokenizer, filled=filled, print_step=steps)


def _open(source: str) -> Any:
    """The prompts as a stream of bytes."""
    if source == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return open(source, "rb")
    except OSError as error:
        raise UserError(f"--input {source}: {error.strerror}; give a text file or -") from None


def _prompt_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines, of which no more than one byte beyond the limit is kept."""
    while line := stream.readline(_MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > _MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(_MAX_LINE_BYTES + 1)
        yield line


def _prompt(line: bytes) -> str:
    """The text of a line; UserError if it is too long or not UTF-8."""
    if len(line) > _MAX_LINE_BYTES:
        raise UserError(f"the line is longer than {_MAX_LINE_BYTES} bytes; no model reads that much, shorten it")
    return decode_line(line)


def _shown_prompt(prompt: str) -> str:
    return prompt.rstrip("\r\n")


def _num_prompts(source: str, limit: int | None) -> int | None:
    """How many prompts will come, for the time left; None where only their end will tell."""
    if not os.path.isfile(source) or not sys.stderr.isatty():
        return limit
    with open(source, "rb") as stream:
        return sum(1 for _ in itertools.islice(_prompt_lines(stream), limit))


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


class _Meter:
    """What was done in what time.

    Args:
        unit: what is counted.
        earlier: how many of them an earlier run has done.
    """

    def __init__(self, unit: str, earlier: int) -> None:
        self.unit, self.earlier = unit, earlier
        self.count = self.num_tokens = 0
        self.started = self.loaded = time.perf_counter()

    def begin(self) -> None:
        """The model is loaded."""
        self.loaded = time.perf_counter()

    def add(self, num_tokens: int, count: int = 1) -> None:
        self.num_tokens += num_tokens
        self.count += count

    def rate(self) -> str:
        return f"{self.num_tokens / max(time.perf_counter() - self.loaded, 1e-9):.1f} tokens/s"

    def summary(self) -> str:
        seconds = time.perf_counter() - self.loaded
        earlier = f", after {self.earlier} of an earlier run" if self.earlier else ""
        return (
            f"filled {self.count} {self.unit} ({self.num_tokens} tokens) in {seconds:.1f} s ({self.rate()}){earlier}; "
            f"loading took {self.loaded - self.started:.1f} s"
        )


def _progress(total: int | None, done: int) -> Any:
    """A bar on stderr with rate and time left; none where stderr is not a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, initial=done, unit="prompt", disable=None, dynamic_ncols=True, file=sys.stderr)


def _write(lines: Iterable[str], results: ResultsFile | None) -> None:
    if results is None:
        _print(lines)
    else:
        results.write(lines)


def _print(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Prints at once, out of the way of the bar."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=stream or sys.stdout):
        print("".join(f"{line}\n" for line in lines), end="", file=stream or sys.stdout, flush=True)


def _say(message: str) -> None:
    sys.stdout.flush()
    _print([f"{PROG}: {message}"], sys.stderr)
