"""ftk-generate --score-reference: log-probabilities of answers that are known, instead of answers found."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ftk.errors import UserError
from ftk_cli.command import FAILURE
from ftk_cli.fill_subset import EPOCH
from ftk_cli.generate import PROG
from ftk_cli.inference_options import Checkpoints, open_filler
from ftk_cli.line_blocks import Asked, LineBlocks, Record
from ftk_cli.progress import Meter, chunks, progress_bar, say, write
from ftk_cli.prompt_input import Lines, input_name, num_prompts, open_input, parse_object
from ftk_cli.results import OldRecord, earlier_records

if TYPE_CHECKING:
    from ftk.model_parallel.world import World
    from ftk.tasks.glm_blank import FilledBlank
    from ftk.tasks.glm_blank.infill.config import FillConfig
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt
    from ftk_cli.generate import GenerateRoot
    from ftk_cli.results import ResultsFile

_SAMPLES_AT_ONCE = 256  # sorted by length together, and held in memory


class _Totals:
    """What was scored, in this run and, as far as their records are JSON, in earlier ones."""

    def __init__(self, root: GenerateRoot, results: ResultsFile | None) -> None:
        from ftk_cli.answer_lines import is_terminal

        self.terminal = is_terminal(results)
        self.as_json = root.generate.output_format == "json"
        self.length_penalty = root.generation.length_penalty
        self.samples = self.tokens = 0
        self.logprob = 0.0

    def lines(
        self, index: int, source: str, candidates: Sequence[Sequence[FilledBlank]], tokenizer: Any
    ) -> Iterable[str]:
        """The record of one sample with its candidates; the likeliest of them counts in the sums."""
        totals = [sum(answer.logprob for answer in answers) for answers in candidates]
        best = max(range(len(totals)), key=totals.__getitem__)
        self._add(totals[best], sum(len(answer.token_logprobs) for answer in candidates[best]))
        if self.as_json:
            return [_json(index, source, candidates, totals, best, self.terminal)]
        return _text(index, source, candidates, totals, tokenizer, self.terminal)

    def earlier(self, records: Iterable[OldRecord]) -> int:
        """Counts what they hold, and them."""
        count = 0
        for record in records:
            count += 1
            if record.likeliest is not None:
                self._add(*record.likeliest)
        return count

    def finish(self, meter: Meter, results: ResultsFile | None) -> None:
        """The sums, and how long it took."""
        if not self.as_json and results is None:
            from ftk_cli.answer_lines import NOTE

            write([f"{NOTE.format(length_penalty=self.length_penalty)}, L the sum over all blanks"], results)
        mean = self.logprob / max(self.tokens, 1)
        samples = "sample" if self.samples == 1 else "samples"
        say(PROG, meter.summary())
        say(
            PROG,
            f"scored {self.samples} {samples} ({self.tokens} tokens): log-probability {self.logprob:.4f}, "
            f"{mean:.4f} a token, perplexity {math.exp(min(-mean, 700.0)):.4f}",
        )

    def _add(self, logprob: float, tokens: int) -> None:
        self.samples += 1
        self.logprob += logprob
        self.tokens += tokens


def score_subset(
    root: GenerateRoot, data: str, checkpoints: Checkpoints, results: ResultsFile | None, world: World
) -> int:
    """Scores the original text of the blanks that the task makes in a split, as training predicts it."""
    from ftk.tasks.data_facts import check_same_data
    from ftk.tasks.glm_blank.infill.questions import question_of
    from ftk.tasks.restore import restore_task

    options = root.generate
    task, _ = restore_task(checkpoints.model[0], data)
    subset = options.gen_subset or "valid"
    check_same_data(task, [subset], world)
    samples = task.load_split(subset)
    count = min(len(samples), options.max_samples or len(samples))
    totals = _Totals(root, results)
    done = 0
    if results is not None:
        done = totals.earlier(earlier_records(results, _SAMPLES_AT_ONCE, len(samples), options.max_samples))
    meter = Meter("samples", done, "went through")
    filler = open_filler(checkpoints, root.common, _scoring_config(root.generation), root.processors, world)
    special, eop = filler.tokenizer.special, filler.generator.framing.ends[0]
    meter.begin()
    with progress_bar(max(count, done), done, "sample") as bar:
        for indices in chunks(range(done, count), _SAMPLES_AT_ONCE):
            questions = [question_of(samples.sample(EPOCH, index), special) for index in indices]
            scored = filler.generator.score(
                [question.context for question in questions],
                [[question.training_targets(eop)] for question in questions],
                [question.order for question in questions],
                end=False,
                progress=bar.update,
            )
            lines: list[str] = []
            for index, question, (answers,) in zip(indices, questions, scored, strict=True):
                meter.add(sum(len(answer.token_logprobs) for answer in answers))
                found = [filler.describe(question.context, answers)]
                lines += totals.lines(index, filler.source_text(question.context), found, filler.tokenizer)
            write(lines, results)
            bar.set_postfix_str(meter.rate())
    write((), results)
    totals.finish(meter, results)
    return 0


def score_lines(
    root: GenerateRoot, source: str, checkpoints: Checkpoints, results: ResultsFile | None, world: World
) -> int:
    """Scores answers that are given with their prompts. Returns 1 if there were lines that could not be scored."""
    from ftk.tasks.glm_blank.infill.scoring import check_answers

    options, name, totals = root.generate, input_name(source), _Totals(root, results)
    with open_input(source) as stream:
        lines = Lines(stream, name, options.max_samples)
        if results is not None:
            totals.earlier(lines.pass_over(results, _SAMPLES_AT_ONCE, _prompt_of))
        stop, as_json = options.on_error == "stop", totals.as_json
        blocks = LineBlocks(PROG, lines, _SAMPLES_AT_ONCE, stop=stop, as_json=as_json, results=results)
        meter = Meter("prompts", lines.done, "went through")
        filler = open_filler(checkpoints, root.common, _scoring_config(root.generation), root.processors, world)

        def read(line: str) -> tuple[EncodedPrompt, list[list[list[int]]]]:
            prompt, own = parse_line(line)
            encoded = filler.encode(prompt, check=False)
            ids = [filler.encode_answers(encoded, answers) for answers in own]
            check_answers(filler.generator, encoded.context, ids, options.score_end)
            return encoded, ids

        def answers(asked: list[Asked[list[list[list[int]]]]]) -> Iterator[Record]:
            prompts, candidates = [one.prompt for one in asked], [one.more for one in asked]
            scored = filler.score_encoded(prompts, candidates, options.score_end, progress=bar.update)
            for one, found in zip(asked, scored, strict=True):
                meter.add(sum(len(answer.token_logprobs) for answers in found for answer in answers))
                yield totals.lines(one.index, one.prompt.prompt, found, filler.tokenizer)

        meter.begin()
        with progress_bar(num_prompts(source, options.max_samples), lines.done) as bar:
            blocks.answer(read, answers, bar, meter.rate)
    blocks.say_without_blank()
    totals.finish(meter, results)
    blocks.say_failed("scored")
    return FAILURE if blocks.failed else 0


def _scoring_config(config: FillConfig) -> FillConfig:
    """No answer is found: that of the default length need not fit the model's positions."""
    return dataclasses.replace(config, max_len=1)


def parse_line(line: str) -> tuple[str, list[list[str]]]:
    """A line of the input: its prompt, and its candidates, each with one answer a blank.

    Args:
        line: prompt and answers with tabs between, or a JSON object with `prompt` and either `answers` (one a blank)
            or `candidates` (a list of such lists, or of texts where there is one blank).

    Raises:
        UserError: it is neither.
    """
    line = line.rstrip("\r\n")
    if not line.lstrip().startswith("{"):
        prompt, *answers = line.split("\t")
        if not answers:
            raise UserError("there is no answer; write prompt, tab, answer (one for each blank, tabs between), or JSON")
        return prompt, [answers]
    record = parse_object(line, '{"prompt": "the [MASK] fox", "answers": ["quick"]}')
    asked = record.get("prompt")
    given = [key for key in ("answers", "candidates") if key in record]
    if not isinstance(asked, str) or len(given) != 1:
        raise UserError("a JSON line needs a text 'prompt', and either 'answers' or 'candidates'")
    candidates: Any = [record["answers"]] if given == ["answers"] else record["candidates"]
    if isinstance(candidates, list):
        candidates = [[one] if isinstance(one, str) else one for one in candidates]
    if (
        not isinstance(candidates, list)
        or not candidates
        or not all(isinstance(one, list) and all(isinstance(answer, str) for answer in one) for one in candidates)
    ):
        also = ", or a list of such lists" if given == ["candidates"] else ""
        raise UserError(f"{given[0]!r} must be a list of texts, one per blank{also}")
    return asked, candidates


def _prompt_of(line: str) -> str:
    return parse_line(line)[0]


def _text(
    index: int,
    source: str,
    candidates: Sequence[Sequence[FilledBlank]],
    totals: Sequence[float],
    tokenizer: Any,
    terminal: bool,
) -> Iterator[str]:
    """One sample as lines: its source once, then each candidate with its sum."""
    from ftk_cli.answer_lines import text_lines

    for number, (answers, total) in enumerate(zip(candidates, totals, strict=True)):
        lines = text_lines(index, source, answers, tokenizer, terminal=terminal)
        yield from itertools.islice(lines, 1 if number else 0, None)
        yield f"L-{index}\t{total:.4f}"


def _json(
    index: int,
    source: str,
    candidates: Sequence[Sequence[FilledBlank]],
    totals: Sequence[float],
    best: int,
    terminal: bool,
) -> str:
    """One sample as a JSON object; `best` is the place of the likeliest candidate."""
    from ftk_cli.answer_lines import json_record

    record = {
        "id": index,
        "source": source,
        "best": best,
        "candidates": [
            {
                "logprob": total,
                "answers": [
                    {
                        "blank": answer.blank,
                        "text": answer.text,
                        "tokens": answer.tokens,
                        "logprob": answer.logprob,
                        "score": answer.score,
                        "token_logprobs": answer.token_logprobs,
                    }
                    for answer in answers
                ],
            }
            for answers, total in zip(candidates, totals, strict=True)
        ],
    }
    return json_record(record, terminal)
