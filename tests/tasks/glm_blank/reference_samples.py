"""GLM samples the plain way, in Python and NumPy: what the kernels are tested against and measured against.

The steps are those of the original (THUDM/GLM, datasets.py BlockDataset and blocklm_utils.py ConstructBlockStrategy),
with the differences that docs/glm.md lists. The random stream is an argument: `SlowRandom` gives the kernels' own
samples, `PlainRandom` the samples that one would draw with Python's generator, as fast as that is.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate

import numpy as np

from ftk.tasks.glm_blank.command_tokens import sentinels

TOKEN, SENTENCE, DOCUMENT = 0, 1, 2


class PlainRandom:
    """Python's own generator."""

    def __init__(self, *key):
        generator = random.Random(str(key))
        self.uniform, self.below, self.shuffle = generator.random, generator.randrange, generator.shuffle

    def choice_weighted(self, cumulative):
        return min(bisect_right(cumulative, self.uniform() * cumulative[-1]), len(cumulative) - 1)


class PlainDataset:
    """Samples one by one.

    Args:
        documents: arrays of token ids, by number.
        special: ids of the command tokens.
        config: BlankInfillingConfig.
        sentence_ends: bool [V].
        length_weights: running sums of the weights of the span lengths 1, 2, ...
    """

    def __init__(self, documents, special, config, sentence_ends, length_weights):
        self.documents = documents
        self.special = special
        self.config = config
        self.sentence_ends = np.asarray(sentence_ends, dtype=bool)
        self.length_weights = list(length_weights)
        self.cumulative = np.cumsum(documents.sizes, dtype=np.int64)

    def sample(self, rng):
        config, special = self.config, self.special
        text, starts = self.pack(rng)
        objective, spans, append_end = self.blanks(text, rng)
        order = list(range(len(spans)))
        if config.shuffle_blocks:
            rng.shuffle(order)
        context_length = len(text) - sum(end - start for start, end in spans) + len(spans)
        offset = rng.below(max(1, config.seq_length - context_length + 1)) if config.random_position else 0
        sample = lay_out(text, starts, spans, order, objective, append_end, offset, special, config)
        if objective == TOKEN and config.block_mask_prob > 0.0:
            place = context_length
            for number in order:
                for step in range(1, spans[number][1] - spans[number][0] + 1):
                    if rng.uniform() < config.block_mask_prob:
                        sample["tokens"][place + step] = special.dblock
                place += spans[number][1] - spans[number][0] + 1
        if objective == TOKEN and config.context_mask_ratio > 0.0:
            hide_context(sample["tokens"], context_length, spans, len(text), special, config, rng)
        return sample

    def pack(self, rng):
        """A text, and where its documents begin."""
        config, special = self.config, self.special
        pieces, starts, used = [], [], 0
        document = self.draw_document(rng)
        room = config.seq_length
        if config.short_seq_prob > 0.0 and rng.uniform() < config.short_seq_prob:
            shortest = min(32, config.seq_length // 2)
            room = shortest + rng.below(config.seq_length - shortest)
        while True:
            free = room - used
            if used == 0 and len(document) + 2 > free:
                document = document[self.random_start(document, free, rng) :]
            starts.append(used)
            if len(document) + 2 > free:
                piece = np.concatenate([[special.cls], document[: free - 1]]).astype(np.int64)
                ends = np.flatnonzero(sentence_ends(piece, self.sentence_ends)) + 1
                end = ends[-1] if len(ends) else 0
                pieces.append(piece[:end] if end >= max(2, free // 2) else piece)
                break
            pieces.append(np.concatenate([[special.cls], document, [special.eos]]).astype(np.int64))
            used += len(document) + 2
            if config.sample_one_document or room - used < 3:
                break
            document = self.draw_document(rng)
        return np.concatenate(pieces), starts

    def draw_document(self, rng):
        token = int(rng.uniform() * self.cumulative[-1])
        document = self.documents[int(np.searchsorted(self.cumulative, token, side="right"))]
        return document[:-1] if len(document) and document[-1] == self.special.eos else document

    def random_start(self, document, room, rng):
        start = rng.below(len(document) + 2 - room + 1)
        if start == 0 or rng.uniform() < self.config.non_sentence_start:
            return start
        reach = room // 2
        first = max(0, start - reach)
        window = document[first : start + reach + 1].astype(np.int64)
        starts = np.flatnonzero(sentence_ends(window, self.sentence_ends)) + 1 + first
        before = [place for place in starts.tolist() if place <= start][-1:]
        after = [place for place in starts.tolist() if start <= place < first + len(window)][:1]
        if not before and first == 0:
            before = [0]
        return ([*before, *after, start] if rng.uniform() < 0.5 else [*after, *before, start])[0]

    def blanks(self, text, rng):
        """The objective, its spans and whether an end token follows each answer."""
        config, eos, cls = self.config, self.special.eos, self.special.cls
        objective, single = TOKEN, rng.uniform() < config.single_span_prob
        if not single:
            drawn = rng.uniform()
            if drawn >= config.bert_prob:
                sentence = drawn < config.bert_prob + config.gap_sentence_prob or config.gpt_prob < 1e-9
                objective = (SENTENCE if config.gap_sentence_prob > 0.0 else TOKEN) if sentence else DOCUMENT
        if objective == TOKEN:
            return TOKEN, slow_token_spans(text, eos, cls, config.bert_ratio, self.length_weights, single, rng), True
        if objective == SENTENCE:
            spans = slow_sentence_spans(text, eos, cls, config.gap_sentence_ratio, self.sentence_ends, rng)
            return SENTENCE, spans, True
        spans, is_suffix = slow_document_span(text, eos, cls, config.gpt_infill_prob, config.gpt_min_ratio, rng)
        return DOCUMENT, spans, not is_suffix


def sentence_ends(tokens, ends):
    """bool [N]: whether a sentence ends at each token, and does not go on ending."""
    marks = ends[np.minimum(tokens, len(ends) - 1)] & (tokens < len(ends))
    return marks & ~np.append(marks[1:], False)


def segments(tokens, eos, cls):
    """(start, end) of each run of text between [CLS] and end-of-document tokens."""
    cuts = np.flatnonzero((tokens == eos) | (tokens == cls)).tolist()
    edges = zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(tokens)], strict=True)
    return [(start, end) for start, end in edges if end > start]


def draw_segment(found, rng):
    sums = list(accumulate(end - start for start, end in found))
    return found[bisect_right(sums, rng.below(sums[-1]))]


def place_spans(start, end, lengths, rng):
    free = (end - start) - sum(lengths) - (len(lengths) - 1)
    spans = []
    for place, length in zip(sorted([rng.below(free + 1) for _ in lengths]), lengths, strict=True):
        spans.append((start + place, start + place + length))
        start += length + 1
    return spans


def slow_token_spans(tokens, eos, cls, ratio, weights, single, rng):
    found = segments(tokens, eos, cls)
    if not found:
        return []
    longest = max(end - start for start, end in found)
    text_total = sum(end - start for start, end in found)
    lengths, total = [], 0
    while total < (1 if single else max(1, int(ratio * len(tokens)))):
        lengths.append(min(1 + rng.choice_weighted(weights), max(1, longest - 1)))
        total += lengths[-1]
    if single:
        start, end = draw_segment(found, rng)
        return place_spans(start, end, [min(lengths[0], max(1, end - start - 1))], rng)
    rng.shuffle(lengths)
    found.sort(key=lambda segment: segment[1] - segment[0])
    spans, seen, covered = [], 0, 0
    for number, (start, end) in enumerate(found):
        seen += end - start
        taken, room = [], end - start
        while True:
            fitting = next((place for place, length in enumerate(lengths) if length <= room), None)
            if fitting is None:
                break
            # the middle of the span must not lie past this document's part of all that is covered
            too_much = (2 * (covered + sum(taken)) + lengths[fitting]) * text_total > 2 * total * seen
            if number < len(found) - 1 and too_much:
                break
            lengths[0], lengths[fitting] = lengths[fitting], lengths[0]
            taken.append(lengths.pop(0))
            room -= taken[-1] + 1
        if taken:
            spans += place_spans(start, end, taken, rng)
            covered += sum(taken)
    return sorted(spans)


def slow_sentence_spans(tokens, eos, cls, ratio, ends, rng):
    sentences = []
    for start, end in segments(tokens, eos, cls):
        marks = sentence_ends(tokens[start:end], ends)
        marks[-1] = True
        stops = (np.flatnonzero(marks) + start + 1).tolist()
        sentences += zip([start, *stops], stops, strict=False)
    rng.shuffle(sentences)
    chosen, covered = [], 0
    for start, end in sentences:
        if covered >= max(1, int(ratio * len(tokens))):
            break
        chosen.append((start, end))
        covered += end - start
    return sorted(chosen)


def slow_document_span(tokens, eos, cls, suffix_prob, min_ratio, rng):
    found = segments(tokens, eos, cls)
    if not found:
        return [], False
    start, end = draw_segment(found, rng)
    longest = max(1, end - start - 1)
    shortest = min(longest, max(1, int(min_ratio * (end - start))))
    length = shortest + rng.below(longest - shortest + 1)
    if len(found) > 1 or rng.uniform() < suffix_prob:
        takes_end = end < len(tokens) and tokens[end] == eos
        return [(end - length, int(end + takes_end))], True
    start += rng.below(end - start - length + 1)
    return [(start, start + length)], False


def lay_out(text, starts, spans, order, objective, append_end, offset, special, config):
    """The arrays of a sample, put together from pieces as the original does."""
    mask = (special.mask, special.smask, special.gmask)[objective]
    masks, sops = [mask] * len(spans), [special.sop] * len(spans)
    if config.sentinel_tokens:
        for answer, number in enumerate(order[1:]):
            sops[number] = sentinels(special)[answer][1]
            if objective == TOKEN:
                masks[number] = sentinels(special)[answer][0]
    documents = np.searchsorted(starts, np.arange(len(text)), side="right") - 1
    pieces, document_pieces, blank_places, length, kept_from = [], [], [], 0, 0
    for number, (start, end) in enumerate(spans):
        pieces += [text[kept_from:start], [masks[number]]]
        document_pieces += [documents[kept_from : start + 1]]
        length += start - kept_from
        blank_places.append(length + offset)
        length += 1
        kept_from = end
    pieces.append(text[kept_from:])
    document_pieces.append(documents[kept_from:])
    context_length = length + len(text) - kept_from

    tokens, targets = [*pieces], [*pieces]
    places, blocks = [np.arange(offset, offset + context_length)], [np.zeros(context_length, dtype=np.int64)]
    for number in order:
        start, end = spans[number]
        inputs = end if append_end else end - 1
        count = inputs - start + 1
        tokens += [[sops[number]], text[start:inputs]]
        targets += [text[start:end], [special.eop] if append_end else []]
        if config.gmask_runs_on and objective == DOCUMENT:
            places.append(np.arange(offset + sum(map(len, places)), offset + sum(map(len, places)) + count))
        else:
            places.append(np.full(count, config.seq_length if config.sentinel_tokens else blank_places[number]))
        blocks.append(np.arange(1, count + 1) if config.block_positions else np.ones(count, dtype=np.int64))
        document_pieces.append(np.full(count, documents[start]))
    tokens = np.concatenate(tokens).astype(np.int64)
    sample = {
        "tokens": tokens,
        "targets": np.concatenate(targets).astype(np.int64),
        "loss_mask": np.arange(len(tokens)) >= context_length,
        "position_ids": np.stack([np.concatenate(places), np.concatenate(blocks)]),
        "context_length": np.int64(context_length),
        "objective": np.int64(objective),
    }
    if config.document_mask:
        sample["document_ids"] = np.concatenate(document_pieces)
    return sample


def hide_context(tokens, context_length, spans, size, special, config, rng):
    """Replaces context tokens near blanks, in place."""
    blanks, removed = [], 0
    for start, end in spans:
        blanks.append(start - removed)
        removed += end - start - 1
    near = {place for blank in blanks for place in range(blank - config.context_mask_range, blank)}
    near |= {place for blank in blanks for place in range(blank + 1, blank + config.context_mask_range + 1)}
    inside = [place for place in sorted(near - set(blanks)) if 0 <= place < context_length]
    candidates = [place for place in inside if tokens[place] not in (special.cls, special.eos)]
    for step in range(min(int(config.context_mask_ratio * size), len(candidates))):
        other = step + rng.below(len(candidates) - step)
        tokens[candidates[other]] = special.dblock
        candidates[other] = candidates[step]


def collate(samples, pad):
    """Padded arrays of a batch."""
    longest = max(len(sample["tokens"]) for sample in samples)
    fill = {"tokens": pad, "targets": pad, "document_ids": -1}
    batch = {}
    for name in samples[0]:
        rows = [sample[name] for sample in samples]
        if np.ndim(rows[0]) == 0:
            batch[name] = np.array(rows)
            continue
        padding = [[(0, 0)] * (row.ndim - 1) + [(0, longest - row.shape[-1])] for row in rows]
        batch[name] = np.stack(
            [np.pad(row, pads, constant_values=fill.get(name, 0)) for row, pads in zip(rows, padding, strict=True)]
        )
    return batch
