"""ftk-generate: a model answers the lines of an input or the samples of a split, or scores answers that are given."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config import compose
from ftk.errors import UserError, counted
from ftk_cli.command import FAILURE, Terminated, run
from ftk_cli.generate_options import GenerateRoot
from ftk_cli.inference_options import (
    Checkpoints,
    check_same_checkpoints,
    find_checkpoints,
    open_generator,
    open_ranks,
    say_proposals,
    with_options_of_task,
)
from ftk_cli.launch import launch
from ftk_cli.progress import BATCHES_AT_ONCE, Meter, progress_bar, say, tell
from ftk_cli.prompts import Remarks, Samples, Source, T, open_source, refusal

if TYPE_CHECKING:
    from ftk.generation.results import EncodedText
    from ftk.generation.text import TextGenerator
    from ftk.model_parallel.world import World
    from ftk_cli.records import Records
    from ftk_cli.results import ResultsFile
    from ftk_cli.score import Found, Given

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


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, body, argv)


def body(argv: list[str]) -> int:
    if (code := launch("generate", argv)) is not None:
        return code
    root = compose(with_options_of_task(GenerateRoot, argv), PROG, DESCRIPTION, argv)
    from ftk_cli.records import Records, is_terminal

    options, scoring = root.generate, root.generate.score_reference
    size = SCORED_AT_ONCE if scoring else root.generation.batch_size * BATCHES_AT_ONCE
    with ExitStack() as stack:
        world = stack.enter_context(open_ranks(PROG, root, root.parallel.whole()))
        checkpoints = _same_checkpoints(root, world)
        results = stack.enter_context(_results(root, checkpoints, world))
        source = stack.enter_context(open_source(options, checkpoints, world))
        report, remarks = _report(root), Remarks()
        for old in results.earlier(source, size) if results is not None else ():
            report.earlier(old)
        meter = Meter(source.unit, source.done, "went through" if scoring else "answered")
        generator = _generator(root, argv, checkpoints, world)
        answer: Callable[..., list[Any]] = generator.score_encoded if scoring else generator.generate_encoded
        form, shows_terminal = options.output_format, results is None and is_terminal()
        records = Records(generator.tokenizer, form, options.print_step, shows_terminal, options.is_colored())
        meter.begin()
        with progress_bar(source.total(), source.done, source.unit) as bar:
            for block in source.blocks(size):
                asked, lines, stopped_by = _read(block, source, generator, records, remarks, options.on_error == "stop")
                bar.update(len(lines))
                found = answer([prompt for _, prompt in asked], progress=bar.update)
                for (index, prompt), result in zip(asked, found, strict=True):
                    remarks.count(index, prompt)
                    meter.add(report.add(prompt, result))
                    if scoring:
                        lines[index] = records.scored(index, prompt.prompt, result)
                    else:
                        lines[index] = records.answered(index, result, prompt.references)
                if lines:
                    _write((line for index in sorted(lines) for line in lines[index]), results)
                if stopped_by is not None:
                    raise stopped_by
                bar.set_postfix_str(meter.rate())
        notes = () if form == "json" else records.notes(root.generation, scoring)
        _write(notes, results)  # an input without lines has results, too
        for line in remarks.lines():
            say(PROG, f"{source.name}: {line}")
        say(PROG, meter.summary())
        if world.is_main:
            in_json = form == "json" and results is None
            for line in report.lines():
                if scoring:
                    say(PROG, line)
                else:
                    print(line, file=sys.stderr if in_json else sys.stdout)
        if source.failed:
            number = counted(source.failed, "line")
            say(PROG, f"{source.name}: {number} not {'scored' if scoring else 'answered'}")
        return FAILURE if source.failed else 0


def _generator(root: GenerateRoot, argv: Sequence[str], checkpoints: Checkpoints, world: World) -> TextGenerator:
    """Opens the model; says where its folder proposes other options of generation than the given ones."""
    generation, scoring = root.generation, root.generate.score_reference
    if scoring and generation.max_len is not None:
        # No answer is found: that of the default length need not fit the model's positions.
        generation = dataclasses.replace(generation, max_len=1)
    generator = open_generator(checkpoints, root.common, generation, root.processors, world)
    if not scoring:
        say_proposals(PROG, argv, checkpoints, generation, root.processors)
    return generator


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


def _report(root: GenerateRoot) -> Found | Given:
    """What adds up the answers."""
    from ftk.evaluation.base import build_scorer, names_of
    from ftk_cli.score import Found, Given

    if root.generate.score_reference:
        return Given()
    generation = root.generation
    search = generation.search or ("sampling" if generation.sampling else f"beam={generation.beam}")
    scorers = {name: build_scorer(name) for name in root.generate.scoring}
    for name in scorers:
        names_of(name)  # refuses one that gives no numbers, before the first prompt
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


def _write(lines: Iterable[str], results: ResultsFile | None) -> None:
    """Complete records: to the file of results, or to stdout where there is none."""
    if results is None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stdout):  # out of the way of the bar
            tell("".join(f"{line}\n" for line in lines), end="")
    else:
        results.write(lines)


if __name__ == "__main__":
    raise SystemExit(main())
