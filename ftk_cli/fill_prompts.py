"""ftk-generate --input: answers prompts from a file or a pipe, one per line."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ftk_cli.command import FAILURE
from ftk_cli.generate import PROG
from ftk_cli.inference_options import Checkpoints, open_filler
from ftk_cli.line_blocks import Asked, LineBlocks, Record
from ftk_cli.progress import BATCHES_AT_ONCE, Meter, progress_bar, say, write
from ftk_cli.prompt_input import Lines, input_name, num_prompts, open_input, parse_prompt, prompt_of

if TYPE_CHECKING:
    from ftk.model_parallel.world import World
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt, FillResult
    from ftk_cli.generate import GenerateRoot
    from ftk_cli.results import ResultsFile


def fill_prompts(
    root: GenerateRoot, source: str, checkpoints: Checkpoints, results: ResultsFile | None, world: World
) -> int:
    """Answers prompts, one per line, in blocks: in constant memory. Returns 1 if some could not be answered."""
    from ftk_cli.answer_lines import color_legend, note, num_steps

    options = root.generate
    as_json, line_format = options.output_format == "json", options.line_format()
    name, size = input_name(source), root.generation.batch_size * BATCHES_AT_ONCE
    with open_input(source) as stream:
        lines = Lines(stream, name, options.max_samples)
        if results is not None:
            own_prompt = partial(prompt_of, input_format=line_format)
            deque(lines.pass_over(results, size, own_prompt), maxlen=0)  # to its end; records tell nothing more here
        blocks = LineBlocks(PROG, lines, size, stop=options.on_error == "stop", as_json=as_json, results=results)
        meter = Meter("prompts", lines.done)
        filler = open_filler(checkpoints, root.common, root.generation, root.processors, world)

        def read(line: str) -> tuple[EncodedPrompt, None]:
            prompt, own = parse_prompt(line, line_format)
            return filler.encode(prompt, options=own), None

        def answers(asked: list[Asked[None]]) -> Iterator[Record]:
            filled = filler.fill_encoded([one.prompt for one in asked], progress=bar.update)
            for one, result in zip(asked, filled, strict=True):
                meter.add(num_steps(result.answers))
                yield _prompt_record(root, one.index, result, filler.tokenizer, results is None)

        meter.begin()
        with progress_bar(num_prompts(source, options.max_samples), lines.done) as bar:
            blocks.answer(read, answers, bar, meter.rate)
    if not as_json and results is None:
        write([note(root.generation), *([f"NOTE: {color_legend()}"] if _in_color(root) else [])], results)
    blocks.say_without_blank()
    say(PROG, meter.summary())
    blocks.say_failed("answered")
    return FAILURE if blocks.failed else 0


def _prompt_record(root: GenerateRoot, index: int, result: FillResult, tokenizer: Any, printed: bool) -> Iterable[str]:
    """The lines about one prompt; coloured at most where they are printed."""
    from ftk_cli.answer_lines import (
        Candidate,
        colored_text,
        is_terminal,
        json_line,
        one_line,
        terminal_line,
        text_lines,
    )

    steps, terminal = root.generate.print_step, printed and is_terminal(None)
    candidates = [
        Candidate(one.score, one.answers, one.text) for one in (result, *result.others) if one.score is not None
    ]
    if root.generate.output_format == "json":
        return [
            json_line(index, result.prompt, result.answers, tokenizer, None, result.text, steps, candidates, terminal)
        ]
    clean = terminal_line if terminal else one_line
    filled = colored_text(result, tokenizer, clean) if printed and _in_color(root) else clean(result.text)
    return text_lines(index, result.prompt, result.answers, tokenizer, None, filled, steps, candidates, terminal)


def _in_color(root: GenerateRoot) -> bool:
    from ftk_cli.answer_lines import use_color

    return use_color(root.generate.color, sys.stdout)
