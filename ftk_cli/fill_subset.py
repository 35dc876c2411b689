"""ftk-generate DATA: answers the blanks that the task makes in a split, with their references."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ftk_cli.generate import PROG
from ftk_cli.inference_options import Checkpoints, open_filler
from ftk_cli.progress import BATCHES_AT_ONCE, Meter, chunks, progress_bar, say, write
from ftk_cli.results import earlier_records

if TYPE_CHECKING:
    from ftk.model_parallel.world import World
    from ftk_cli.generate import GenerateRoot
    from ftk_cli.results import ResultsFile

EPOCH = 1  # whose blanks validation looks at, too


def fill_subset(
    root: GenerateRoot, data: str, checkpoints: Checkpoints, results: ResultsFile | None, world: World
) -> int:
    """Answers the blanks that the task makes in a split; prints them with the references."""
    from ftk.evaluation.base import build_scorer
    from ftk.tasks.data_facts import check_same_data
    from ftk.tasks.glm_blank.infill.questions import question_of
    from ftk.tasks.restore import restore_task
    from ftk_cli.answer_lines import Candidate, is_terminal, json_line, note, num_steps, text_lines

    options = root.generate
    task, _ = restore_task(checkpoints.model[0], data)
    subset = options.gen_subset or "valid"
    check_same_data(task, [subset], world)
    samples = task.load_split(subset)
    count = min(len(samples), options.max_samples or len(samples))
    scorers = {name: build_scorer(name) for name in options.scoring}
    done, size = 0, root.generation.batch_size * BATCHES_AT_ONCE
    earlier = earlier_records(results, size, len(samples), options.max_samples) if results is not None else ()
    for old in earlier:
        done += 1
        for text, reference in old.answers:
            for scorer in scorers.values():
                scorer.add(text, reference)
    meter = Meter("samples", done)
    filler = open_filler(checkpoints, root.common, root.generation, root.processors, world)
    as_json, steps, terminal = options.output_format == "json", options.print_step, is_terminal(results)
    over_text = root.generation.nbest_over == "text"
    tokenizer, generator = filler.tokenizer, filler.generator
    meter.begin()
    with progress_bar(max(count, done), done, "sample") as bar:
        for indices in chunks(range(done, count), size):
            questions = [question_of(samples.sample(EPOCH, index), tokenizer.special) for index in indices]
            found = generator.fill_texts([question.context for question in questions], progress=bar.update)
            lines: list[str] = []
            for index, question, fillings in zip(indices, questions, found, strict=True):
                source = filler.source_text(question.context)
                references = [tokenizer.decode(reference).strip() for reference in question.references]
                all_candidates = [
                    Candidate(one.score, filler.describe(question.context, one.answers)) for one in fillings
                ]
                filled, candidates = all_candidates[0].answers, all_candidates if over_text else []
                meter.add(num_steps(filled))
                lines += (
                    [json_line(index, source, filled, tokenizer, references, None, steps, candidates, terminal)]
                    if as_json
                    else text_lines(index, source, filled, tokenizer, references, None, steps, candidates, terminal)
                )
                for scorer in scorers.values():
                    for blank, reference in zip(filled, references, strict=True):
                        scorer.add(blank.text, reference)
            write(lines, results)
            bar.set_postfix_str(meter.rate())
    write((), results)  # of a split without samples there are results, too
    if not as_json and results is None:
        write([note(root.generation)], results)
    say(PROG, meter.summary())
    for scorer in scorers.values() if world.is_main else ():
        for name, value in scorer.result().items():
            search = root.generation.search or (
                "sampling" if root.generation.sampling else f"beam={root.generation.beam}"
            )
            stream = sys.stderr if as_json and results is None else sys.stdout
            print(f"Generate {subset} with {search}: {name} = {value:.2f} %", file=stream)
    return 0
