"""What the tasks of encoder-decoder models share: the arrays of their samples, and what they ask of a model."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftk.config.options import option
from ftk.data.batches.collate import SampleBatch
from ftk.errors import UserError
from ftk.models.config import ends_of
from ftk.tasks.base import Task
from ftk.tasks.language_model import check_positions

if TYPE_CHECKING:
    from ftk.generation.engine.source_to_target import SourceToTarget
    from ftk.generation.text import TextGenerator
    from ftk.tokenizers.base import Tokenizer

_STARTS = ("pad", "eos", "bos")


def decoder_start_option(default: str) -> Any:
    """The field of the option `decoder_start`."""
    text = "the token in front of what the decoder reads, by its role; T5: pad, BART and fairseq: eos"
    return option(default, text, choices=_STARTS)


def required_id(tokenizer: Tokenizer, role: str, task: str) -> int:
    """The id of a special token; of `eos` and `bos` that of `sep` and `cls`, where there is no other.

    Raises:
        UserError: the tokenizer has none of this role.
    """
    special = tokenizer.special
    token: int | None = special.text_end if role == "eos" else getattr(special, role)
    if token is None and role == "bos":
        token = special.cls
    if token is None:
        raise UserError(f"the tokenizer {tokenizer.name} has no {role} token, which {task} needs")
    return token


def paired_samples(
    sources: NDArray[np.int64],
    source_lengths: NDArray[np.int64],
    targets: NDArray[np.int64],
    target_lengths: NDArray[np.int64],
    start: int,
    pad: int,
) -> SampleBatch:
    """Samples of what an encoder reads and what a decoder learns to write: it reads the same, one place later.

    Args:
        sources: [B, S], `pad` behind each; source_lengths: [B].
        targets: [B, T], `pad` behind each; target_lengths: [B].
        start: the token in front of what the decoder reads.
        pad: fills.

    Returns:
        tokens int64 [S], lengths int64, decoder_tokens and targets int64 [T], loss_mask bool [T].
    """
    width = targets.shape[1]
    decoder_tokens = np.empty_like(targets)
    decoder_tokens[:, :1] = start  # of no samples the width is 0
    decoder_tokens[:, 1:] = targets[:, :-1]
    shorter = np.flatnonzero(target_lengths < width)
    decoder_tokens[shorter, target_lengths[shorter]] = pad  # in the place of the last token, which is not read
    arrays = {
        "tokens": sources,
        "lengths": source_lengths,
        "decoder_tokens": decoder_tokens,
        "targets": targets,
        "loss_mask": np.arange(width) < target_lengths[:, None],  # [B, T]
    }
    return SampleBatch(
        arrays, source_lengths, dict.fromkeys(("decoder_tokens", "targets", "loss_mask"), target_lengths)
    )


class EncoderDecoderTask(Task, ABC):
    """A text to write for each text that is read; options: `decoder_start`, `make_vocab_size_divisible_by` and more."""

    @classmethod
    @abstractmethod
    def longest(cls, config: Any) -> tuple[int, int]:
        """The most tokens that the encoder and the decoder read; `config`: of the task."""

    def complete_model_config(self, config: Any) -> Any:
        if getattr(config, "position_limit", getattr(config, "max_positions", None)) is not None:
            check_positions(config, self.config, max(self.longest(self.config)))
        vocab_size = self.tokenizer.padded_vocab_size(self.config.make_vocab_size_divisible_by)
        return dataclasses.replace(config, vocab_size=vocab_size, **self._start_of(config))

    @classmethod
    def around_text(cls, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """See `Task`; what stands behind a source ends a target, too."""
        end = tokenizer.special.text_end
        return [*tokenizer.prompt_prefix], [] if end is None else [end]

    @classmethod
    def target_begins(cls, tokenizer: Tokenizer) -> list[int]:
        """Tokens that every target begins with."""
        return [*tokenizer.prompt_prefix]

    @classmethod
    def in_answers(cls, tokenizer: Tokenizer) -> list[int]:
        """Command tokens that a target may hold."""
        return []

    @classmethod
    def framing(cls, tokenizer: Tokenizer, model_config: Any) -> SourceToTarget:
        from ftk.generation.engine.source_to_target import SourceToTarget

        start = getattr(model_config, "decoder_start_token", None)
        first = getattr(model_config, "forced_first_token", None)
        begins = cls.target_begins(tokenizer) if first is None else [first]
        around, ends = cls.around_text(tokenizer.of_source), ends_of(model_config, *cls.around_text(tokenizer)[1])
        limit = getattr(model_config, "position_limit", None)
        starts = [] if start is None else [start, *begins]
        return SourceToTarget(ends, starts, limit, around, cls.in_answers(tokenizer))

    @classmethod
    def text_generator(cls) -> type[TextGenerator[Any]]:
        from ftk.generation.text_to_text import TextToText

        return TextToText

    def _start_of(self, config: Any) -> dict[str, int]:
        """The decoder's first token as a field of the model's options, which generation reads."""
        if not hasattr(config, "decoder_start_token"):
            return {}
        role = self.config.decoder_start
        start = required_id(self.tokenizer, role, f"`decoder_start` {role}")
        if config.decoder_start_token not in (None, start):
            text = self.tokenizer.token_text
            raise UserError(
                f"the model's decoder starts with token {config.decoder_start_token} "
                f"({text(config.decoder_start_token)}), but `decoder_start` {role} is {start} "
                f"({text(start)}); change `decoder_start`"
            )
        return {"decoder_start_token": start}


def both_lengths(task: type[Any], config: Any) -> tuple[int, int] | None:
    """The most tokens that the encoder and the decoder of a model read of a sample; None: the task does not say."""
    if issubclass(task, EncoderDecoderTask):
        return task.longest(config)
    # The tasks of answering are for models of one stack, too.
    source, target = (getattr(config, name, None) for name in ("seq_length", "target_length"))
    return None if source is None or target is None else (source, target)
