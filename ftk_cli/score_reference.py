"""ftk-generate --score-reference: log-probabilities of answers that are known, instead of answers found."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ftk.errors import UserError
from ftk_cli.frame import FAILURE
from ftk_cli.inference_options import decode_line, open_filler

if TYPE_CHECKING:
    from ftk.generation import BlankFiller, FilledBlank
    from ftk.generation.fill import EncodedPrompt
    from ftk_cli.generate import GenerateRoot

PROG = "ftk-generate"

_SAMPLES_AT_ONCE = 256  # sorted by length together, and held in memory


class _Totals:
    """What was scored; prints it."""

    def __init__(self, root: GenerateRoot, filler: BlankFiller) -> None:
        self.as_json = root.generate.output_format == "json"
        self.length_penalty = root.generation.length_penalty
        self.tokenizer = filler.tokenizer
        self.samples = self.tokens = 0
        self.logprob = 0.0

    def print(self, index: int, source: str, candidates: Sequence[Sequence[FilledBlank]]) -> None:
        """One sample with its candidates; the likeliest of them counts in the sums."""
        totals = [sum(answer.logprob for answer in answers) for answers in candidates]
        best = max(range(len(totals)), key=totals.__getitem__)
        self.samples += 1
        self.logprob += totals[best]
        self.tokens += sum(len(answer.token_logprobs) for answer in candidates[best])
        if self.as_json:
            print(_json(index, source, candidates, totals, best))
            return
        from ftk.generation.output import text_lines

        for number, (answers, total) in enumerate(zip(candidates, totals, strict=True)):
            lines = text_lines(index, source, answers, self.tokenizer)
            for line in itertools.islice(lines, 1 if number else 0, None):  # the source once
                print(line)
            print(f"L-{index}\t{total:.4f}")

    def finish(self) -> None:
        """The sums."""
        if not self.as_json:
            from ftk.generation.output import NOTE

            print(f"{NOTE.format(length_penalty=self.length_penalty)}, L the sum over all blanks")
        mean = self.logprob / max(self.tokens, 1)
        sys.stdout.flush()
        _say(
            f"scored {self.samples} samples ({self.tokens} tokens): log-probability {self.logprob:.4f}, "
            f"{mean:.4f} a token, perplexity {math.exp(min(-mean, 700.0)):.4f}"
        )


def score_subset(root: GenerateRoot, data: str) -> int:
    """Scores what stood in the blanks that the task makes in a split, as training predicts it."""
    from ftk.generation.samples import question_of
    from ftk.hub import checkpoint_paths
    from ftk.tasks.restore import restore_task

    task, _ = restore_task(checkpoint_paths(root.generate.path)[0], data)
    samples = task.load_split(root.generate.gen_subset or "valid")
    filler = open_filler(root.generate.path, root.common, root.generation, root.processors)
    special, eop, totals = filler.tokenizer.special, filler.generator.ends[0], _Totals(root, filler)
    count = min(len(samples), root.generate.max_samples or len(samples))
    for indices in _chunks(range(count)):
        questions = [question_of(samples.sample(0, index), special) for index in indices]
        scored = filler.generator.score(
            [question.context for question in questions],
            [[question.training_targets(eop)] for question in questions],
            [question.order for question in questions],
            end=False,
        )
        for index, question, (answers,) in zip(indices, questions, scored, strict=True):
            totals.print(index, filler.source_text(question.context), [filler.describe(question.context, answers)])
    totals.finish()
    return 0


def score_lines(root: GenerateRoot, source: str) -> int:
    """Scores answers that stand beside their prompts; bad lines are named and left out. Returns 1 if there were any."""
    from ftk.generation.scoring import check_answers

    name, failed = "standard input" if source == "-" else source, 0
    with _open(source) as stream:
        filler = open_filler(root.generate.path, root.common, root.generation, root.processors)
        totals = _Totals(root, filler)
        for chunk in _chunks(enumerate(itertools.islice(stream, root.generate.max_samples))):
            prompts: list[EncodedPrompt] = []
            candidates: list[list[list[list[int]]]] = []
            indices: list[int] = []
            for index, line in chunk:
                try:
                    prompt, own = parse_line(decode_line(line))
                    encoded = filler.encode(prompt, check=False)
                    ids = [filler.encode_answers(encoded, answers) for answers in own]
                    check_answers(filler.generator, encoded.context, ids, root.generate.score_end)
                except UserError as error:
                    _say(f"{name}:{index + 1}: {error}")
                    failed += 1
                else:
                    prompts.append(encoded)
                    candidates.append(ids)
                    indices.append(index)
            scored = filler.score_encoded(prompts, candidates, root.generate.score_end)
            for index, encoded, found in zip(indices, prompts, scored, strict=True):
                totals.print(index, encoded.prompt, found)
    totals.finish()
    if failed:
        _say(f"{name}: {failed} line{'s' if failed > 1 else ''} not scored")
    return FAILURE if failed else 0


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
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"not a JSON object, though it begins with a brace: {error}") from None
    prompt = record.get("prompt")
    given = [key for key in ("answers", "candidates") if key in record]
    if not isinstance(prompt, str) or len(given) != 1:
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
        raise UserError(f"{given[0]!r} must be a list of texts, one a blank{also}")
    return prompt, candidates


def _json(
    index: int, source: str, candidates: Sequence[Sequence[FilledBlank]], totals: Sequence[float], best: int
) -> str:
    """One sample as a JSON object; `best` is the place of the likeliest candidate."""
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
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _open(source: str) -> Any:
    if source == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return open(source, "rb")
    except OSError as error:
        raise UserError(f"--input {source}: {error.strerror}; give a text file or -") from None


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, _SAMPLES_AT_ONCE)):
        yield chunk


def _say(message: str) -> None:
    print(f"{PROG}: {message}", file=sys.stderr)
