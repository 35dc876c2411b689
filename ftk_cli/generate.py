"""ftk-generate: a model answers the lines of an input or the samples of a split, or scores answers that are given."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config import compose, section
from ftk.config.options import option, options_of
from ftk.errors import UserError, counted
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.config import ProcessorConfig
from ftk.model_parallel.config import InferenceParallelConfig
from ftk.registry import SCORERS
from ftk_cli.command import FAILURE, Terminated, run
from ftk_cli.inference_options import (
    COLOR,
    ENSEMBLE,
    Checkpoints,
    DevicePrecisionConfig,
    check_same_checkpoints,
    find_checkpoints,
    given_flags,
    open_generator,
    say_proposals,
    with_options_of_task,
)
from ftk_cli.launch import launch
from ftk_cli.progress import BATCHES_AT_ONCE, Meter, progress_bar, say, write
from ftk_cli.prompts import Remarks, Samples, Source, T, open_source, refusal

if TYPE_CHECKING:
    from ftk.generation.results import EncodedText
    from ftk.generation.text import TextGenerator
    from ftk.model_parallel.world import World
    from ftk_cli.records import Records
    from ftk_cli.results import ResultsFile
    from ftk_cli.score import Found

SCORED_AT_ONCE = 256
"""Samples with given answers that are sorted by length together, and held in memory."""

PROG = "ftk-generate"
DESCRIPTION = """Answers prompts with a trained model: those that its task makes of a subset of DATA, or your own,
one per line. Prints the texts with their answers. With --output-format fairseq: S- source, T- reference, H- score and
tokens, D- score and text, P- log-probabilities, A- alternatives, I- steps, N- score of a text, L- log-probability of
known answers, F- text with its answers, E- what is wrong with a prompt; 0.3 is the fourth answer to prompt 0.
With --path, --help all also shows the options of the model's task.
Examples: ftk-generate data-bin --path run --gen-subset valid;
echo "Once upon a time" | ftk-generate --path run --input -"""


@dataclass(kw_only=True)
class GenerateConfig:
    data: str | None = option(
        None, "folder written by ftk-preprocess; not with --input", positional=True, metavar="DATA", path=True
    )
    path: str = ENSEMBLE
    gen_subset: str | None = option(None, "split of DATA to answer; valid if not given", daily=True)
    input: str | None = option(
        None, "text file with one prompt per line, - for standard input", daily=True, metavar="FILE"
    )
    input_format: str = option(
        "auto",
        "a line of --input is a prompt (text), a prompt and constraints of its own with tabs between (tabs, as in "
        "fairseq), or a JSON object with prompt, or the messages of a conversation, and options of its own: "
        "constraints, prefix, seed, max_len ... (json); auto: json for files named .jsonl or .json, else text",
        choices=("auto", "text", "tabs", "json"),
    )
    max_samples: int | None = option(None, "stop after this many", daily=True, min=1, unit="samples")
    output_format: str = option(
        "text",
        "the texts with their answers; fairseq's lines, with all figures; or one JSON object per line",
        daily=True,
        choices=("text", "fairseq", "json"),
    )
    scoring: list[str] = option([], "score the answers to DATA by these, e.g. exact_match,token_f1", daily=True)

    results_path: str | None = option(
        None,
        "write to this file, record by record, instead of printing (with --output-format json); the same command "
        "continues there what was interrupted",
        daily=True,
        metavar="FILE",
    )
    overwrite_results: bool = option(False, "replace the content of --results-path", needs={"results_path": True})
    on_error: str = option(
        "continue",
        "a prompt that cannot be answered: say so in its place and continue (exit code 1 at the end), or stop",
        needs={"input": True},
        choices=("continue", "stop"),
    )
    print_step: bool = option(False, "print the steps of each sample too: tokens of its best answers")
    color: str = COLOR
    score_reference: bool = option(
        False,
        "score known answers instead of finding some: the references in DATA, or those in --input FILE, whose lines "
        "are prompt, tab, answer (...), or JSON with prompt and answers or candidates",
    )
    score_end: bool = option(
        True,
        "with --score-reference --input: score the token that ends an answer, too",
        needs={"score_reference": True, "input": True},
    )

    def line_format(self) -> str:
        """What a line of `input` is: text, tabs or json."""
        if self.input_format != "auto":
            return self.input_format
        return "json" if (self.input or "").endswith((".jsonl", ".json")) else "text"

    @property
    def subset(self) -> str:
        """The split of `data`."""
        return self.gen_subset or "valid"

    def prints_texts(self) -> bool:
        """Whether texts with their answers are printed, which can be coloured."""
        of_prompts = self.input is not None and self.output_format == "fairseq"
        return (of_prompts or self.output_format == "text") and not self.score_reference

    def is_colored(self) -> bool:
        """Whether texts with their answers are printed in colours."""
        from ftk_cli.colors import use_color

        return self.prints_texts() and use_color(self.color, sys.stdout)

    def validate(self) -> Iterator[str]:
        if (self.data is None) == (self.input is None):
            found = "missing, and so is DATA" if self.input is None else "given, and so is DATA"
            yield f"input is {found}; give a preprocessed folder or --input FILE, one of the two"
        if self.gen_subset is not None and self.data is None:
            yield "gen_subset names a split of DATA; it does not go with --input"
        if self.input_format != "auto" and (self.input is None or self.score_reference):
            yield f"input_format is {self.input_format}; it goes with --input, and not with --score-reference"
        if self.scoring and self.data is None:
            yield "scoring needs reference answers; it goes with DATA, not with --input"
        both = (self.input or "", self.results_path or "")
        if all(both) and len(set(map(os.path.realpath, both))) == 1:
            yield "input and results_path are the same file; write the results to another"
        if self.results_path is not None and self.output_format != "json":
            yield "results_path holds JSON Lines, from which a later run can continue; add --output-format json"
        if self.score_reference and self.scoring:
            yield "score_reference finds no answers; scoring does not go with it"
        if self.score_reference and self.print_step:
            yield "score_reference takes no steps; print_step does not go with it"
        if self.color == "always" and not self.prints_texts():
            yield "color is always, but no texts with their answers are printed"
        for name in self.scoring:
            if name.split()[0] not in SCORERS:
                yield f"scoring is {name!r}; {SCORERS.hint(name.split()[0])}"


@dataclass(kw_only=True)
class GenerateRoot:
    generate: GenerateConfig = section("what to answer")
    generation: GenerationConfig = section("how to search")
    processors: ProcessorConfig = section("logits processors")
    parallel: InferenceParallelConfig = section("parallel")
    common: DevicePrecisionConfig = section("common")

    def validate(self) -> Iterator[str]:
        options = self.generation
        if self.generate.score_reference:
            unused = given_flags("generation", options, without=options.of_scores)
            unused += given_flags("processors", self.processors)
            if unused:
                yield (
                    f"--score-reference asks the model itself about given answers and does not use "
                    f"{', '.join(unused)}; leave {'it' if len(unused) == 1 else 'them'} out"
                )
        if self.generate.data is not None:
            others = {option.name for option in options_of("generation", type(options))} - set(options.of_prompts)
            for flag in given_flags("generation", options, without=others):
                yield f"{flag} goes with --input; samples of DATA are read as in training"


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def body(argv: list[str]) -> int:
    if (code := launch("generate", argv)) is not None:
        return code
    root = compose(with_options_of_task(GenerateRoot, argv), PROG, DESCRIPTION, argv)
    from ftk.model_parallel.same_start import options_by_flag
    from ftk.model_parallel.world import open_world, resolve_device
    from ftk_cli.records import Records, is_terminal
    from ftk_cli.score import Given

    options, generation = root.generate, root.generation
    scoring, device = options.score_reference, resolve_device(root.common.device)
    size = SCORED_AT_ONCE if scoring else generation.batch_size * BATCHES_AT_ONCE
    with ExitStack() as stack:
        world = stack.enter_context(open_world(root.parallel.whole(), device, options_by_flag(PROG, root)))
        stack.enter_context(world.name_missing_ranks())
        if not world.is_main:  # the main process prints
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(silence))
        checkpoints = _same_checkpoints(root, world)
        results = stack.enter_context(_results(root, checkpoints, world))
        source = stack.enter_context(open_source(options, checkpoints, world))
        report = Given() if scoring else _found(root)
        for old in results.earlier(source, size) if results is not None else ():
            report.earlier(old)
        meter = Meter(source.unit, source.done, "went through" if scoring else "answered")
        if scoring and generation.max_len is not None:
            # No answer is found: that of the default length need not fit the model's positions.
            generation = dataclasses.replace(generation, max_len=1)
        generator = open_generator(checkpoints, root.common, generation, root.processors, world)
        if not scoring:
            say_proposals(PROG, argv, checkpoints, generation, root.processors)
        as_json, printed = options.output_format == "json", results is None
        shows_terminal = printed and is_terminal()
        form, colored = options.output_format, options.is_colored()
        records = Records(generator.tokenizer, form, options.print_step, shows_terminal, colored)
        answer: Callable[..., list[Any]] = generator.score_encoded if scoring else generator.generate_encoded
        remarks = Remarks()
        meter.begin()
        with progress_bar(source.total(), source.done, source.unit) as bar:
            for block in source.blocks(size):
                asked, lines, stopped_by = _read(block, source, generator, records, remarks, options.on_error == "stop")
                bar.update(len(lines))
                found = answer([prompt for _, prompt in asked], progress=bar.update)
                for (index, prompt), one in zip(asked, found, strict=True):
                    remarks.count(index, prompt)
                    meter.add(report.add(prompt, one))
                    lines[index] = (
                        records.scored(index, prompt.prompt, one)
                        if scoring
                        else records.answered(index, one, prompt.references)
                    )
                if lines:
                    write((line for index in sorted(lines) for line in lines[index]), results)
                if stopped_by is not None:
                    raise stopped_by
                bar.set_postfix_str(meter.rate())
        write(() if as_json else records.notes(generation, scoring), results)  # an input without lines has results, too
        for line in remarks.lines():
            say(PROG, f"{source.name}: {line}")
        say(PROG, meter.summary())
        for line in report.lines() if world.is_main else ():
            if scoring:
                say(PROG, line)
            else:
                print(line, file=sys.stderr if as_json and printed else sys.stdout)
        if source.failed:
            number = counted(source.failed, "line")
            say(PROG, f"{source.name}: {number} not {'scored' if scoring else 'answered'}")
        return FAILURE if source.failed else 0


def _same_checkpoints(root: GenerateRoot, world: World) -> Checkpoints:
    """The checkpoints; all ranks must see the same files."""
    from ftk.model_parallel.collective import check_same_files

    options = root.generate
    if world.size > 1 and options.input == "-":
        raise UserError("--input - cannot be read by several processes; write the prompts to a file")
    checkpoints = find_checkpoints(options.path, root.generation.lm_path, world, root.common.base)
    check_same_checkpoints(checkpoints, world)
    if options.input is not None:
        check_same_files(world, {"--input": [Path(options.input)]})
    return checkpoints


@contextmanager
def _results(root: GenerateRoot, checkpoints: Checkpoints, world: World) -> Iterator[ResultsFile | None]:
    """The file of --results-path, if it was given; after an interruption a message says what is in it."""
    from ftk_cli.results import ResultsFile, settings_of

    options = root.generate
    if options.results_path is None:
        yield None
        return
    settings = settings_of(root, checkpoints)
    results = ResultsFile(options.results_path, settings, overwrite=options.overwrite_results, world=world)
    try:
        yield results
    except (KeyboardInterrupt, Terminated):
        if results.is_ours:
            again = "the same command" + (" without --overwrite-results" if options.overwrite_results else "")
            say(PROG, f"Partial results are in {results.path}; run {again} to continue.")
        raise
    finally:
        results.close()


def _found(root: GenerateRoot) -> Found:
    """The report of answers that are found."""
    from ftk.evaluation.base import build_scorer
    from ftk_cli.score import Found

    generation = root.generation
    search = generation.search or ("sampling" if generation.sampling else f"beam={generation.beam}")
    scorers = {name: build_scorer(name) for name in root.generate.scoring}
    return Found(scorers, f"Generate {root.generate.subset} with {search}")


def _read(
    block: list[tuple[int, T]],
    source: Source[T],
    generator: TextGenerator,
    records: Records,
    remarks: Remarks,
    stop: bool,
) -> tuple[list[tuple[int, EncodedText]], dict[int, list[str]], UserError | None]:
    """A block as the model reads it.

    Returns:
        numbers and prompts; the records of lines that cannot be answered, by their numbers; the error of the first
        of them if `stop`: no line after it is read.
    """
    asked: list[tuple[int, EncodedText]] = []
    refused: dict[int, list[str]] = {}
    for index, item in block:
        try:
            asked.append((index, source.read(item, generator)))
        except UserError as error:
            if isinstance(source, Samples):
                raise
            message = refusal(error)
            if stop:
                return asked, refused, UserError(f"{source.name}:{index + 1}: {message}")
            if remarks.refuse(index, message):
                say(PROG, f"{source.name}:{index + 1}: {message}")
            source.failed += 1
            refused[index] = records.refused(index, message)
    return asked, refused, None


if __name__ == "__main__":
    raise SystemExit(main())
