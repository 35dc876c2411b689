"""Kernel of samples: packs, blanks out and lays out a whole batch of them, in one call, without the GIL."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint64_t

from ftk.tasks.glm_blank.samples._infilling cimport Blanked, Rows, covered_tokens, hide_answers, hide_context, lay_out
from ftk.data.corpora._documents cimport TextPacker, most_documents
from ftk.tasks.glm_blank.samples._span cimport Span
from ftk.tasks.glm_blank.samples._spans cimport Drawn, SpanDrawer, scratch_size
from ftk.data.random cimport RandomState, next_below, start_stream

cdef int TOKEN = 0, DOCUMENT = 2


cdef struct Head:  # of a draft: what was drawn for one sample; the text and the blanks follow it in memory
    RandomState state
    int64_t size
    int64_t num_documents
    int64_t objective
    int64_t count
    int64_t append_end
    int64_t offset
    int64_t length
    int64_t context_length


cdef class SampleMaker:
    """Makes GLM samples; each is a pure function of (seed, epoch, index).

    Args:
        packer, drawer: of its texts and blanks.
        most_spans: blanks of one sample at most.
        mask_ids: int64 [3, most_spans], for each objective the mask of the first, second, ... answer.
        start_ids: int64 [most_spans], their start tokens.
        command_ids: pad, eos, cls, end of an answer, dBLOCK (any number where it is not used).
        block_positions, gmask_runs_on, document_mask: as of `BlankInfillingConfig`.
        answer_position: place of all answers, or -1 for the places of their blanks.
        longest_context: with random positions, the place that no context reaches past; else -1.
        block_mask_prob, context_mask_ratio, context_mask_range: as of `BlankInfillingConfig`.
    """

    cdef tuple arguments
    cdef TextPacker packer
    cdef SpanDrawer drawer
    cdef Py_ssize_t most_spans, seq_length
    cdef object mask_array, start_array  # keep what the pointers point to
    cdef const int64_t* mask_ids
    cdef const int64_t* start_ids
    cdef int64_t pad_id, eos_id, cls_id, end_id, hidden_id
    cdef bint block_positions, gmask_runs_on, document_mask
    cdef int64_t answer_position, longest_context
    cdef double block_mask_prob, context_mask_ratio
    cdef Py_ssize_t context_mask_range
    cdef Py_ssize_t text_at, starts_at, spans_at, order_at, stride  # of a draft, in numbers of 8 bytes

    def __init__(
        self,
        TextPacker packer,
        SpanDrawer drawer,
        Py_ssize_t most_spans,
        mask_ids,
        start_ids,
        command_ids,
        bint block_positions,
        bint gmask_runs_on,
        bint document_mask,
        int64_t answer_position,
        int64_t longest_context,
        double block_mask_prob,
        double context_mask_ratio,
        Py_ssize_t context_mask_range,
    ):
        self.arguments = (
            packer, drawer, most_spans, mask_ids, start_ids, command_ids, block_positions, gmask_runs_on,
            document_mask, answer_position, longest_context, block_mask_prob, context_mask_ratio, context_mask_range,
        )
        self.packer, self.drawer = packer, drawer
        self.most_spans, self.seq_length = most_spans, packer.seq_length
        drawn = max(
            drawer.bert_ratio if drawer.bert_prob > 0.0 else 0.0,
            drawer.gap_sentence_ratio if drawer.gap_sentence_prob > 0.0 else 0.0,
        )
        if most_spans < max(1, int(drawn * packer.seq_length)):
            raise ValueError(f"most_spans is {most_spans}; more can be drawn of {packer.seq_length} tokens")
        self.mask_array = np.array(mask_ids, dtype=np.int64).reshape(3, most_spans)
        self.start_array = np.array(start_ids, dtype=np.int64).reshape(most_spans)
        cdef int64_t[:, ::1] masks = self.mask_array
        cdef int64_t[::1] starts = self.start_array
        self.mask_ids, self.start_ids = &masks[0, 0], &starts[0]
        self.pad_id, self.eos_id, self.cls_id, self.end_id, self.hidden_id = command_ids
        self.block_positions, self.document_mask = block_positions, document_mask
        self.gmask_runs_on = gmask_runs_on
        self.answer_position, self.longest_context = answer_position, longest_context
        self.block_mask_prob, self.context_mask_ratio = block_mask_prob, context_mask_ratio
        self.context_mask_range = context_mask_range
        self.text_at = sizeof(Head) // sizeof(int64_t)
        self.starts_at = self.text_at + self.seq_length
        self.spans_at = self.starts_at + most_documents(self.seq_length)
        self.order_at = self.spans_at + 2 * most_spans
        self.stride = self.order_at + most_spans

    def __reduce__(self):
        return SampleMaker, self.arguments

    def samples(self, seed, epoch, indices, Py_ssize_t longest):
        """The samples of some numbers, padded to the longest of them.

        Args:
            seed, epoch: of the random streams.
            indices: int64 [B], their numbers.
            longest: tokens of a text at most, seq_length or fewer.

        Returns:
            the arrays of a batch: tokens, targets int64 [B, T], loss_mask bool [B, T], position_ids int64
            [B, 2, T], context_length, objective int64 [B], with a document mask document_ids int64 [B, T]; and
            the length of each sample, int64 [B].
        """
        return self.lay_out(self.draw(seed, epoch, indices, longest))

    def explain(self, seed, epoch, index):
        """One sample with what it was made of.

        Returns:
            text int64 [N], spans int64 [K, 2], order of the answers int64 [K], whether an end token follows each
            answer; and what `samples` returns for it.
        """
        drafts = self.draw(seed, epoch, [index], self.seq_length)
        cdef int64_t[:, ::1] rows = drafts
        cdef Head* head = <Head*>&rows[0, 0]
        made = (
            drafts[0, self.text_at : self.text_at + head.size].copy(),
            drafts[0, self.spans_at : self.spans_at + 2 * head.count].reshape(-1, 2).copy(),
            drafts[0, self.order_at : self.order_at + head.count].copy(),
            bool(head.append_end),
        )
        return *made, *self.lay_out(drafts)

    cdef draw(self, seed, epoch, indices, Py_ssize_t longest):
        """Everything random but hidden tokens: a draft of each sample, [B, stride]."""
        if not 2 <= longest <= self.seq_length:
            raise ValueError(f"longest is {longest}; it must be in 2 to {self.seq_length}")
        cdef const int64_t[::1] numbers = np.ascontiguousarray(indices, dtype=np.int64)
        cdef Py_ssize_t total = numbers.shape[0], row
        drafts = np.empty((total, self.stride), dtype=np.int64)
        cdef int64_t[:, ::1] rows = drafts
        cdef int64_t[::1] scratch = np.empty(scratch_size(self.seq_length), dtype=np.int64)
        cdef uint64_t seed_word = int(seed) & 0xFFFFFFFFFFFFFFFF, epoch_word = int(epoch) & 0xFFFFFFFFFFFFFFFF
        keeper = [None]
        cdef void* kept = <void*>keeper
        with nogil:
            for row in range(total):
                start_stream(&(<Head*>&rows[row, 0]).state, seed_word, epoch_word, <uint64_t>numbers[row])
                self.draw_one(&rows[row, 0], &scratch[0], longest, kept)
        return drafts

    cdef int draw_one(self, int64_t* draft, int64_t* scratch, Py_ssize_t longest, void* keeper) except -1 nogil:
        cdef Head* head = <Head*>draft
        cdef Span* spans = <Span*>(draft + self.spans_at)
        cdef Drawn drawn
        head.size = self.packer.pack_into(
            &head.state, draft + self.text_at, draft + self.starts_at, &head.num_documents, scratch, longest, keeper
        )
        drawn = self.drawer.draw(
            &head.state, draft + self.text_at, head.size, scratch, spans, draft + self.order_at
        )
        head.objective, head.count, head.append_end = drawn.objective, drawn.count, drawn.append_end
        head.length = head.size + drawn.count * (2 if drawn.append_end else 1)
        head.context_length = head.size - covered_tokens(spans, drawn.count) + drawn.count
        head.offset = 0
        if self.longest_context >= 0:
            head.offset = next_below(&head.state, max(1, self.longest_context - head.context_length + 1))
        return 0

    cdef lay_out(self, drafts):
        """The arrays of drafted samples, as of `samples`; hides tokens with the rest of their random streams."""
        cdef int64_t[:, ::1] rows = drafts
        cdef Py_ssize_t total = rows.shape[0], row, longest = 0
        lengths_array = np.empty(total, dtype=np.int64)
        cdef int64_t[::1] lengths = lengths_array
        for row in range(total):
            lengths[row] = (<Head*>&rows[row, 0]).length
            longest = max(longest, lengths[row])
        arrays = {
            "tokens": np.empty((total, longest), dtype=np.int64),
            "targets": np.empty((total, longest), dtype=np.int64),
            "loss_mask": np.empty((total, longest), dtype=np.bool_),
            "position_ids": np.empty((total, 2, longest), dtype=np.int64),
            "context_length": np.empty(total, dtype=np.int64),
            "objective": np.empty(total, dtype=np.int64),
        }
        if self.document_mask:
            arrays["document_ids"] = np.empty((total, longest), dtype=np.int64)
        cdef int64_t[:, ::1] tokens = arrays["tokens"], targets = arrays["targets"]
        cdef uint8_t[:, ::1] loss = arrays["loss_mask"].view(np.uint8)
        cdef int64_t[:, :, ::1] positions = arrays["position_ids"]
        cdef int64_t[:, ::1] documents = arrays["document_ids"] if self.document_mask else rows
        cdef int64_t[::1] context_length = arrays["context_length"], objective = arrays["objective"]
        cdef int64_t[::1] scratch = np.empty(
            2 * self.seq_length + 3 * self.most_spans, dtype=np.int64
        )
        cdef Rows out
        with nogil:
            for row in range(total):
                out.tokens, out.targets, out.loss = &tokens[row, 0], &targets[row, 0], &loss[row, 0]
                out.places, out.blocks = &positions[row, 0, 0], &positions[row, 1, 0]
                out.documents = &documents[row, 0] if self.document_mask else NULL
                self.lay_out_one(&rows[row, 0], out, longest, &scratch[0])
                context_length[row] = (<Head*>&rows[row, 0]).context_length
                objective[row] = (<Head*>&rows[row, 0]).objective
        return arrays, lengths_array

    cdef void lay_out_one(self, int64_t* draft, Rows out, Py_ssize_t longest, int64_t* scratch) noexcept nogil:
        cdef Head* head = <Head*>draft
        cdef RandomState state = head.state  # a copy: laid out again, the same tokens are hidden
        cdef const Span* spans = <const Span*>(draft + self.spans_at)
        cdef Blanked sample
        cdef Py_ssize_t place
        sample.text, sample.size = draft + self.text_at, head.size
        sample.starts, sample.num_documents = draft + self.starts_at, head.num_documents
        sample.spans, sample.order, sample.count = spans, draft + self.order_at, head.count
        sample.mask_ids, sample.start_ids = self.mask_ids + head.objective * self.most_spans, self.start_ids
        sample.end_id, sample.append_end = self.end_id, head.append_end
        sample.block_positions = self.block_positions
        sample.position_offset, sample.answer_position = head.offset, self.answer_position
        sample.runs_on = self.gmask_runs_on and head.objective == DOCUMENT
        lay_out(sample, out, scratch)
        if head.objective == TOKEN and self.block_mask_prob > 0.0:
            hide_answers(
                &state, out.tokens, head.context_length, spans, sample.order, head.count, self.hidden_id,
                self.block_mask_prob
            )
        if head.objective == TOKEN and self.context_mask_ratio > 0.0:
            hide_context(
                &state, out.tokens, head.context_length, spans, head.count, self.context_mask_range,
                <Py_ssize_t>(self.context_mask_ratio * head.size), self.cls_id, self.eos_id, self.hidden_id, scratch
            )
        for place in range(head.length, longest):
            out.tokens[place] = self.pad_id
            out.targets[place] = self.pad_id
            out.loss[place] = 0
            out.places[place] = 0
            out.blocks[place] = 0
        if out.documents != NULL:
            for place in range(head.length, longest):
                out.documents[place] = -1
