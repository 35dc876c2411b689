"""Asks models cloze questions: encodes the text around the gap, cuts what is too long, scores the candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ftk.config.options import option
from ftk.errors import UserError, counted, did_you_mean, shown

if TYPE_CHECKING:
    from ftk.data.supervised.cloze import Cloze, ClozeQuestion, Part
    from ftk.generation.engine.request import Framing
    from ftk.tokenizers.base import Tokenizer

RESTRICTED_LOGITS, SUM, MEAN, PER_CHARACTER = SCORINGS = ("restricted_logits", "sum", "mean", "per_character")
"""What makes one number of a candidate: the logit of its only token; the sum of its tokens' log-probabilities, their
mean, or their sum by the letters of the candidate. Du et al. 2022 use the first for
single words, and sum or mean for others."""

AT_ONCE = 1024
"""Questions that are sorted by length together, and held in memory as the model reads them."""


@dataclass(kw_only=True)
class CandidateConfig:
    """How a cloze task is asked and scored, in training and in evaluations."""

    pattern: int | None = option(None, "number of the pattern; by default that which the task names", min=0)
    candidate_scoring: str | None = option(
        None,
        "what makes one number of a candidate: the logit of its only token, or the sum, the mean or the "
        "sum per character of its tokens' log-probabilities; by default what the task names",
        choices=SCORINGS,
    )
    score_end: bool | None = option(
        None,
        "whether the end token of a candidate is scored, too (not its logit alone); by default what the task names",
    )


Ids = tuple[int, ...]


class EncodedCloze(NamedTuple):
    """A cloze question in tokens.

    Attributes:
        texts: for each of the K candidates the ids before and behind the gap, as far as they fit.
        answers: the ids of the candidates, with the end token where it is scored.
        divisors: K numbers, by which the sums of the log-probabilities are divided.
        num_tokens: the most that a model reads for a candidate.
        was_cut: whether a text lost tokens.
    """

    texts: tuple[tuple[Ids, Ids], ...]
    answers: tuple[Ids, ...]
    divisors: tuple[float, ...]
    num_tokens: int
    was_cut: bool


class CandidateScore(NamedTuple):
    """What a model says of a candidate.

    Attributes:
        score: by the chosen scoring; the larger, the better.
        logprob: the sum of the natural logarithms of its tokens' probabilities.
        is_greedy: whether a greedy search would have written it.
    """

    score: float
    logprob: float
    is_greedy: bool


def scoring_of(cloze: Cloze, scoring: str | None, score_end: bool | None) -> tuple[str, bool]:
    """How candidates are scored, and whether the end token of an answer is scored, too.

    Args:
        scoring: one of `SCORINGS`; None: the task's usual one.
        score_end: None: as the task does.

    Raises:
        UserError: `score_end` is asked for where it has no effect.
    """
    scoring = scoring or cloze.scoring
    if score_end and scoring == RESTRICTED_LOGITS:
        raise UserError(f"`score_end` has no effect with the scoring {scoring}; choose another `candidate_scoring`")
    return scoring, cloze.end if score_end is None else score_end


def check_cloze(cloze: Cloze, pattern: int | None, scoring: str, framing: Framing, tokenizer: Tokenizer) -> None:
    """Refuses what cannot be asked, before a row is read.

    Args:
        pattern: the number of its pattern; None: the usual one.
        scoring: one of `SCORINGS`.

    Raises:
        UserError: there is no such pattern or scoring; the model reads nothing behind the gap; a word is not one token,
            or two words are the same one.
    """
    if scoring not in SCORINGS:
        raise UserError(f"{cloze.name}: candidate scoring {scoring!r}; {did_you_mean(scoring, SCORINGS)}")
    chosen, number = cloze.pattern_of(pattern), cloze.pattern if pattern is None else pattern
    if not framing.reads_behind and not chosen.ends_in_gap:
        usable = [str(other) for other, one in cloze.patterns.items() if one.ends_in_gap]
        instead = f"use `pattern` {' or '.join(usable)}" if usable else "no pattern of it ends in the gap"
        raise UserError(
            f"pattern {number} of {cloze.name} has text after the gap, which this kind of model does not read; "
            f"{instead}"
        )
    if scoring != RESTRICTED_LOGITS:
        return
    where = f"pattern {number} of {cloze.name}"
    if chosen.words is None:
        raise UserError(f"{where} has candidates of several tokens; use `candidate_scoring` {SUM} or {MEAN}")
    found: dict[int, str] = {}
    for word, ids in _words(chosen.words.values(), tokenizer).items():
        pieces = ", ".join(repr(tokenizer.token_text(token)) for token in ids)
        way_out = f"use `candidate_scoring` {SUM}, or write other words in a YAML file of your own"
        if len(ids) != 1 or ids[0] == tokenizer.special.unk:
            raise UserError(
                f"{where}: the word {word!r} is not a token of this tokenizer, which reads "
                f"{counted(len(ids), 'token')} ({pieces}); {way_out}"
            )
        if ids[0] in found:
            raise UserError(
                f"{where}: the words {found[ids[0]]!r} and {word!r} are the same token of this tokenizer ({pieces}); "
                f"{way_out}"
            )
        found[ids[0]] = word


def encode_questions(
    questions: Sequence[ClozeQuestion],
    framing: Framing,
    tokenizer: Tokenizer,
    *,
    scoring: str,
    end: bool,
    seq_length: int,
) -> list[EncodedCloze]:
    """Questions in tokens, as `framing` asks them: parts are encoded one by one, and their ids joined.

    A text that is too long loses tokens from the end of the last part that may be shortened, of the half that has more
    of such tokens; if they have the same number, of the second (as tasks/superglue/pvp.py of Du et al. 2022).

    Args:
        framing: of the model; `check_cloze` has been called.
        scoring: one of `SCORINGS`.
        end: whether the end token of an answer is scored; not for `RESTRICTED_LOGITS`.
        seq_length: the most tokens that a model may read for a candidate.

    Raises:
        UserError: a candidate has no token; what may not be shortened is too long (the longest is named); there is text
            behind the gap, which the model does not read.
    """
    ids = _encoded(questions, tokenizer)
    if scoring == RESTRICTED_LOGITS:
        ids |= _words({candidate for question in questions for candidate in question.candidates}, tokenizer)
    closing = framing.ends[:1] if end and scoring != RESTRICTED_LOGITS else ()
    fit = _Fit(framing, ids, seq_length)
    encoded, too_long = [], list[_TooLong]()
    for question in questions:
        answers, fitted = [], []
        for candidate in question.candidates:
            if not ids[candidate]:
                raise UserError(f"{question.place}: the candidate {candidate!r} has no token; write a text")
            answers.append((*ids[candidate], *closing))
        pairs = [*zip(question.candidates, answers, strict=True)]
        for number, answer in enumerate(answers):
            try:
                fitted.append(fit(question, number, len(answer)))
            except _TooLong as error:
                too_long.append(error)
        if too_long:  # all are looked at, so that the longest is named
            continue
        texts, sizes, cut = zip(*fitted, strict=True)
        divisors = tuple(_divisor(scoring, answer, candidate) for candidate, answer in pairs)
        encoded.append(EncodedCloze(texts, tuple(answers), divisors, max(sizes), any(cut)))
    if too_long:
        longest = max(too_long, key=lambda error: error.num_tokens)
        several = f" (the longest of {len(too_long)} such candidates)" if len(too_long) > 1 else ""
        raise UserError(
            f"{longest}, which cannot be shortened{several}; raise `seq_length` ({seq_length}) to {longest.num_tokens}"
        )
    return encoded


def _encoded(questions: Sequence[ClozeQuestion], tokenizer: Tokenizer) -> dict[str, Ids]:
    """The ids of every text in the questions, each encoded once."""
    parts = [part for question in questions for text in question.texts for half in text for part in half]
    texts = {part.text for part in parts if not part.ids}
    texts.update(candidate for question in questions for candidate in question.candidates)
    ordered = sorted(texts)
    return {text: tuple(row) for text, row in zip(ordered, tokenizer.encode_batch(ordered), strict=True)}


def _words(words: Iterable[str], tokenizer: Tokenizer) -> dict[str, Ids]:
    """The ids of words: of the token that the vocabulary spells so, if there is one, else as a text is encoded.

    Pieces of Chinese words within a sentence are spelled without the sign of a word's start that a text begins with.
    """
    special = {*tokenizer.special.roles.values()}
    spelled = {tokenizer.token_text(token): token for token in range(tokenizer.vocab_size) if token not in special}
    return {word: (spelled[word],) if word in spelled else tuple(tokenizer.encode(word)) for word in words}


class _TooLong(Exception):
    """What may not be shortened of a question with a candidate is too long."""

    def __init__(self, question: ClozeQuestion, number: int, num_tokens: int) -> None:
        candidate = shown(question.candidates[number])
        super().__init__(f"{question.place}: the pattern and the candidate {candidate} take {num_tokens} tokens")
        self.num_tokens = num_tokens


class _Fit:
    """Cuts texts so that they fit beside their answers.

    Args:
        ids: of all texts.
        seq_length: the most tokens that a model may read.
    """

    def __init__(self, framing: Framing, ids: Mapping[str, Ids], seq_length: int) -> None:
        self._framing = framing
        self._ids = ids
        self._seq_length = seq_length
        self._overheads: dict[tuple[int, bool], tuple[int, int]] = {}

    def __call__(self, question: ClozeQuestion, number: int, num_answer: int) -> tuple[tuple[Ids, Ids], int, bool]:
        """The ids before and behind the gap for a candidate, the tokens that a model reads, whether any are lost."""
        text = question.text_of(number)
        behind = text.behind
        if not self._framing.reads_behind:
            if not text.ends_in_gap:
                raise UserError(
                    f"{question.place}: {shown(''.join(part.text for part in behind))} stands after the gap, which "
                    f"this kind of model does not read; use a `pattern` that ends in the gap, or leave such rows out"
                )
            behind = ()
        parts = (*text.before, *behind)
        beside, apart = self._overhead(num_answer, bool(behind))
        ids = [part.ids or self._ids[part.text] for part in parts]
        lengths = [*map(len, ids)]
        kept = shortened(parts, lengths, self._seq_length - beside)
        if kept is None or apart > self._seq_length:
            least = beside + sum(n for n, part in zip(lengths, parts, strict=True) if not part.shorten)
            raise _TooLong(question, number, max(least, apart))
        cut = [own[:length] for own, length in zip(ids, kept, strict=True)]
        halves = cut[: len(text.before)], cut[len(text.before) :]
        before_ids, behind_ids = (tuple(token for part in half for token in part) for half in halves)
        return (before_ids, behind_ids), max(beside + sum(kept), apart), kept != lengths

    def _overhead(self, num_answer: int, has_behind: bool) -> tuple[int, int]:
        """Tokens that a model reads besides the text: with it, and apart from it (in a decoder).

        The last token of an answer is not read.
        """
        from ftk.generation.engine.request import Request

        key = num_answer, has_behind
        if key not in self._overheads:
            num_text = 1 + has_behind
            frame = self._framing.first(Request(self._framing.ask([0], [0] * has_behind)))
            read = len(frame.tokens) + num_answer - 1
            self._overheads[key] = (len(frame.source) - num_text, read) if frame.source else (read - num_text, 0)
        return self._overheads[key]


def shortened(parts: Sequence[Part], lengths: Sequence[int], room: int) -> list[int] | None:
    """The lengths of parts after their cut to `room` tokens in all; None: what may not be shortened has more.

    Args:
        parts: of a text.
        lengths: of each part, in tokens.
        room: for how many tokens there is room.
    """
    kept = list(lengths)
    excess = sum(kept) - room
    left = [0, 0]  # tokens of each half that may be lost
    for part, length in zip(parts, kept, strict=True):
        left[part.second] += length * part.shorten
    if excess > sum(left):
        return None
    for _ in range(excess):
        second = left[0] <= left[1]
        last = max(i for i, part in enumerate(parts) if part.shorten and part.second == second and kept[i])
        kept[last] -= 1
        left[second] -= 1
    return kept


def _divisor(scoring: str, answer: Ids, candidate: str) -> float:
    if scoring == MEAN:
        return float(len(answer))
    return float(len(candidate.removeprefix(" "))) if scoring == PER_CHARACTER else 1.0


def score_questions(
    model: Any,
    framing: Framing,
    questions: Sequence[EncodedCloze],
    progress: Callable[[int], object] | None = None,
) -> list[list[CandidateScore]]:
    """The scores of all candidates; those with the same text are read behind one copy of it.

    With `RESTRICTED_LOGITS` the scores are log-probabilities, too, which differ from logits by one number per question.

    Args:
        model: computes; in evaluation mode meanwhile.
        questions: N.
        progress: called with the number of texts that have been scored since the last call.

    Raises:
        UserError: as `ftk.generation.engine.scoring.score`.
    """
    found: list[list[CandidateScore]] = []
    for start in range(0, len(questions), AT_ONCE):
        found += _scores(model, framing, questions[start : start + AT_ONCE], progress)
    return found


def _scores(
    model: Any, framing: Framing, questions: Sequence[EncodedCloze], progress: Callable[[int], object] | None
) -> list[list[CandidateScore]]:
    """The scores of questions whose frames are in memory together."""
    from ftk.generation.engine.request import Request
    from ftk.generation.engine.scoring import score

    requests: list[Request] = []
    continuations: list[list[Any]] = []
    places: list[tuple[int, int]] = []  # question and candidate of each continuation
    for number, question in enumerate(questions):
        of_text: dict[tuple[Ids, Ids], list[int]] = {}
        for candidate, text in enumerate(question.texts):
            of_text.setdefault(text, []).append(candidate)
        for (before, behind), candidates in of_text.items():
            requests.append(Request(framing.ask(before, behind)))
            continuations.append([framing.continuation(question.answers[candidate]) for candidate in candidates])
            places += [(number, candidate) for candidate in candidates]
    found = iter(one for scored in score(model, framing, requests, continuations, progress) for one in scored)
    results: list[dict[int, CandidateScore]] = [{} for _ in questions]
    for (number, candidate), scored in zip(places, found, strict=True):
        logprob = sum(scored.logprobs)
        divisor = questions[number].divisors[candidate]
        results[number][candidate] = CandidateScore(logprob / divisor, logprob, scored.is_greedy)
    return [[scores[candidate] for candidate in sorted(scores)] for scores in results]


def chosen(scores: Sequence[CandidateScore]) -> int | None:
    """The number of the best candidate; of the only one, whether a model would have written it (else None)."""
    if len(scores) == 1:
        return 0 if scores[0].is_greedy else None
    return max(range(len(scores)), key=lambda number: scores[number].score)
