"""Options of the GLM blank-infilling objective, and how long a sample can get under them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option
from ftk.tasks.language_model import seq_length_option


@dataclass(kw_only=True)
class BlankInfillingConfig:
    """How documents are packed and where they are blanked out (Du et al. 2022, section 2.1).

    Each sample draws its own objective: the token objective (short random spans), the sentence objective
    (whole sentences) or the document objective (one long span or the end of a document).
    """

    seq_length: int = seq_length_option(
        512,
        "text of one sample before it is blanked out; [CLS] and end-of-document tokens count, a sample is somewhat "
        "longer, because each blank adds a mask and a start token",
        min=8,
    )
    bert_prob: float = option(0.5, "probability of the token objective: short random spans", min=0, max=1)
    gap_sentence_prob: float = option(
        0.3,
        "probability of the sentence objective: whole sentences; what bert-prob and gap-sentence-prob leave of 1 is "
        "the document objective",
        min=0,
        max=1,
    )
    single_span_prob: float = option(
        0.0, "probability, before any other choice, of a token-objective sample with one span only", min=0, max=1
    )
    bert_ratio: float = option(0.15, "share of the tokens that the token objective blanks out", "(0, 0.5]")
    avg_block_length: float = option(
        3.0, "Poisson mean of the span lengths of the token objective", "(0, 100]", unit="tokens"
    )
    max_block_length: int = option(39, "longest span of the token objective", max=10**8, unit="tokens", min=1)
    gap_sentence_ratio: float = option(
        0.15, "share of the tokens that the sentence objective blanks out, at least", "(0, 0.5]"
    )
    gpt_infill_prob: float = option(
        0.5,
        "document objective: probability that the end of the document is generated; otherwise a span inside it is",
        min=0,
        max=1,
    )
    gpt_min_ratio: float = option(
        0.5, "document objective: least share of the document that is generated", min=0, max=1
    )
    short_seq_prob: float = option(
        0.0, "probability that a sample is cut to a random length between 32 and seq-length tokens", min=0, max=1
    )
    non_sentence_start: float = option(
        0.0,
        "probability that a document too long for a sample is cut anywhere instead of at the start of a sentence",
        min=0,
        max=1,
    )
    sample_one_document: bool = option(False, "one document per sample, instead of packing several to seq-length")
    long_documents: str = option(
        "cut",
        "documents that no sample can hold whole: cut (a sample gets a part), or drop (and count) them",
        choices=("cut", "drop"),
    )
    document_mask: bool = option(
        False, "documents packed into one sample do not see each other; otherwise all of them do"
    )
    block_positions: bool = option(
        True, "count positions inside an answer in the second position row; without it that row is 1 in every answer"
    )
    gmask_runs_on: bool = option(
        False,
        "document objective: positions count on after the context, as in GLM-130B, instead of staying at the place "
        "of the blank; for models with rotary positions",
    )
    shuffle_blocks: bool = option(True, "answers in random order; without it in the order of their blanks")
    block_mask_prob: float = option(
        0.0, "token objective: probability that an answer token is given to the model as [dBLOCK]", min=0, max=1
    )
    context_mask_ratio: float = option(
        0.0,
        "token objective: share of the text, in context tokens near blanks, that is replaced by [dBLOCK]",
        min=0,
        max=1,
    )
    context_mask_range: int = option(
        3,
        "how far from a blank context-mask-ratio reaches",
        needs={"context_mask_ratio": True},
        max=10**8,
        unit="tokens",
        min=1,
    )
    random_position: bool = option(False, "start the positions of a text shorter than seq-length at a random place")
    sentinel_tokens: bool = option(
        False,
        "number the masks and start tokens in the order of their answers ([MASK], [MASK1], ...) and give all answers "
        "the position seq-length",
    )

    @property
    def gpt_prob(self) -> float:
        """Probability of the document objective, once the single span is not drawn."""
        return max(0.0, 1.0 - self.bert_prob - self.gap_sentence_prob)

    def validate(self) -> Iterator[str]:
        if self.bert_prob + self.gap_sentence_prob > 1.0 + 1e-9:
            yield (
                f"bert_prob is {self.bert_prob} and gap_sentence_prob is {self.gap_sentence_prob}; "
                f"together they must be at most 1"
            )


def max_blanks(config: BlankInfillingConfig) -> int:
    """The most blanks a sample can have.

    The token objective draws span lengths of at least one token until int(bert_ratio * n) of the n tokens are covered,
    so that it has at most as many blanks; the sentence objective likewise; the document objective has one.
    """
    ratios = ((config.bert_prob, config.bert_ratio), (config.gap_sentence_prob, config.gap_sentence_ratio))
    return max([1, *(int(ratio * config.seq_length) for probability, ratio in ratios if probability > 0.0)])


def max_sample_length(config: BlankInfillingConfig) -> int:
    """The most tokens a sample can have: context with its masks, plus the answers with their start tokens.

    A text of n tokens (n <= seq_length) from which k blanks are taken makes a sample of n + 2k tokens: each
    blank leaves a mask in the context, and its answer is one token longer than the blank (a start token in
    the inputs, an end token in the targets).

    Positions stay in 0 .. seq_length in both rows, so that a model with max_positions >= seq_length fits.
    """
    return config.seq_length + 2 * max_blanks(config)
