"""What the tasks of language models share: options, padding of the vocabulary, enough positions, token frequencies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ftk.config.options import option
from ftk.errors import UserError
from ftk.evaluation.unigram import Unigram, token_counts

if TYPE_CHECKING:
    from ftk.tasks.base import Task


def seq_length_option(default: int, text: str, *, min: int) -> Any:
    """The field of the option `seq_length`."""
    return option(default, text, daily=True, min=min, max=10**8, unit="tokens")


def vocabulary_divisor() -> Any:
    """The field of the option `make_vocab_size_divisible_by`."""
    text = "the vocabulary is padded to a multiple of this, so that matrix sizes are round; 1: not padded"
    return option(128, text, min=1, max=10**6, unit="tokens")


def check_positions(model_config: Any, task_config: Any, num_positions: int) -> None:
    """Raises UserError if the task's samples need more positions than the model has.

    Args:
        model_config: of a plugin perhaps without `max_positions`: no limit.
        task_config: with `seq_length`, for the message.
        num_positions: that such samples need.
    """
    most = getattr(model_config, "max_positions", None)
    if most is not None and num_positions > most:
        seq_length = task_config.seq_length
        default = " (the task's default)" if seq_length == getattr(type(task_config), "seq_length", None) else ""
        raise UserError(
            f"`seq_length` {seq_length}{default} is beyond the model's {most} positions; "
            f"lower `seq_length` or raise `max_positions`"
        )


def with_room_for_rows(task: Task, config: Any) -> Any:
    """`complete_model_config` of a task that asks a trained model about rows: a vocabulary with room for the task's
    tokens stays.

    Raises:
        UserError: the model has fewer positions than the task's `seq_length`.
    """
    if getattr(config, "position_limit", getattr(config, "max_positions", None)) is not None:
        check_positions(config, task.config, task.config.seq_length)
    if config.vocab_size >= task.tokenizer.vocab_size:
        return config
    return dataclasses.replace(config, vocab_size=task.tokenizer.padded_vocab_size())


def corpus_unigram(task: Task, split: str) -> Unigram | None:
    """Token frequencies of a split's documents; None where the corpus has samples alone."""
    if not hasattr(task.corpus, "documents"):
        return None
    counts = token_counts(task.corpus.documents(split), task.tokenizer.vocab_size)
    return Unigram(counts, task.tokenizer.special.roles.values())
