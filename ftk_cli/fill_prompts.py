"""ftk-generate --input: answers prompts from a file or a pipe, one a line."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ftk.errors import UserError
from ftk_cli.frame import FAILURE
from ftk_cli.inference_options import open_filler
from ftk_cli.progress import BATCHES_AT_ONCE, Meter, progress_bar, say, write
from ftk_cli.prompt_input import Lines, input_name, line_text, num_prompts, open_input, parse_prompt, prompt_of

if TYPE_CHECKING:
    from ftk.generation.results import EncodedPrompt, FillResult
    from ftk.model_parallel.world import World
    from ftk_cli.generate import GenerateRoot
    from ftk_cli.results import ResultsFile

PROG = "ftk-generate"


def fill_prompts(root: GenerateRoot, source: str, results: ResultsFile | None, world: World) -> int:
    """Answers prompts, one a line, in blocks: in constant memory. Returns 1 if some could not be answered."""
    from ftk.generation.output import color_legend, error_line, note, num_steps

    options = root.generate
    as_json = options.output_format == "json"
    name, size = input_name(source), root.generation.batch_size * BATCHES_AT_ONCE
    with open_input(source) as stream:
        lines = Lines(stream, name, options.max_samples)
        if results is not None:
            own_prompt = partial(prompt_of, input_format=options.line_format())
            deque(lines.pass_over(results, size, own_prompt), maxlen=0)  # to its end; records tell nothing more here
        failed = lines.failed
        meter = Meter("prompts", lines.done)
        filler = open_filler(options.path, root.common, root.generation, root.processors, world)
        meter.begin()
        with progress_bar(num_prompts(source, options.max_samples), lines.done) as bar:
            for chunk in lines.blocks(size):
                encoded: list[tuple[int, EncodedPrompt]] = []
                records: dict[int, Iterable[str]] = {}
                stopped_by: UserError | None = None
                for index, line in chunk:
                    try:
                        prompt, own = parse_prompt(line_text(line), options.line_format())
                        encoded.append((index, filler.encode(prompt, options=own)))
                    except UserError as error:
                        if options.on_error == "stop":  # behind the answers to the prompts before it
                            stopped_by = UserError(f"{name}:{index + 1}: {error}")
                            break
                        say(PROG, f"{name}:{index + 1}: {error}")
                        records[index] = [error_line(index, str(error), as_json)]
                bar.update(len(records))
                failed += len(records)
                answered = filler.fill_encoded([prompt for _, prompt in encoded], progress=bar.update)
                for (index, _), result in zip(encoded, answered, strict=True):
                    records[index] = _prompt_record(root, index, result, filler.tokenizer, results is None)
                    meter.add(num_steps(result.answers))
                write(itertools.chain.from_iterable(records[index] for index in sorted(records)), results)
                if stopped_by is not None:
                    raise stopped_by
                bar.set_postfix_str(meter.rate())
    if not as_json and results is None:
        print(note(root.generation))
        if _in_color(root):
            print(f"NOTE: {color_legend()}")
    say(PROG, meter.summary())
    if failed:
        say(PROG, f"{name}: {failed} line{'s' if failed > 1 else ''} not answered")
    return FAILURE if failed else 0


def _prompt_record(root: GenerateRoot, index: int, result: FillResult, tokenizer: Any, printed: bool) -> Iterable[str]:
    """The lines about one prompt; coloured at most where they are printed."""
    from ftk.generation.output import Way, colored_text, json_line, one_line, text_lines

    steps = root.generate.print_step
    ways = [Way(one.score, one.answers, one.text) for one in (result, *result.others) if one.score is not None]
    if root.generate.output_format == "json":
        return [
            json_line(index, result.prompt, result.answers, tokenizer, filled=result.text, print_step=steps, ways=ways)
        ]
    color = printed and _in_color(root)
    filled = colored_text(result, tokenizer) if color else one_line(result.text)
    return text_lines(index, result.prompt, result.answers, tokenizer, filled=filled, print_step=steps, ways=ways)


def _in_color(root: GenerateRoot) -> bool:
    from ftk.generation.output import use_color

    return use_color(root.generate.color, sys.stdout)
