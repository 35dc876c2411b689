"""Questions with one answer, for models of every family: as its usual task asks a model, so it learns to answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ftk.errors import UserError
from ftk.registry import MODELS, TASKS

if TYPE_CHECKING:
    from ftk.generation.engine.request import Framing
    from ftk.tasks.base import Task


def usual_task(model_config: Any) -> type[Task]:
    """The task that a model is usually trained by, which says how it is asked.

    Args:
        model_config: of the model, or what stands for several (`members`).

    Raises:
        UserError: it has none.
    """
    model_config = next(iter(getattr(model_config, "members", ())), model_config)
    entry = MODELS.of_config(model_config)
    if entry.task is None:
        raise UserError(f"the model {entry.name} is registered without a task, which says how it answers")
    return cast("type[Task]", TASKS.get(entry.task).target)


def answer_sample(framing: Framing, prompt: Any, answer: Sequence[int]) -> dict[str, NDArray[Any]]:
    """A training sample: what a model reads to answer a prompt, and its answer as the targets.

    Its loss is what `ftk.generation.engine.scoring.score` finds for the same prompt and answer, with the sign changed.

    Args:
        prompt: of `framing.ask`.
        answer: token ids; with an end token if that is learned, too.

    Returns:
        tokens and targets int64 [T], loss_mask bool [T], and what else the model reads, as `Collater` takes it.

    Raises:
        UserError: as `Framing.branch`; the model reads prompt tokens of its own.
    """
    from ftk.generation.engine.request import NOT_SCORED, Request

    request = Request(prompt)
    frame, branch = framing.first(request), framing.branch(request, framing.continuation(answer))
    if frame.own:
        raise UserError("models with prompt tokens of their own do not learn to answer; choose another model")
    kept = len(frame.tokens) - 1 - branch.offset  # of the frame; see `Branch.offset`
    scored = {kept + branch.offset + i: target for i, target in enumerate(branch.targets) if target != NOT_SCORED}
    length = max(scored, default=-1) + 1  # what is behind the last target is not read
    tokens = np.array([*frame.tokens[:kept], *branch.tokens][:length], dtype=np.int64)
    targets = np.zeros(length, dtype=np.int64)
    loss_mask = np.zeros(length, dtype=np.bool_)
    targets[[*scored]], loss_mask[[*scored]] = [*scored.values()], True
    arrays: dict[str, NDArray[Any]] = {"targets": targets, "loss_mask": loss_mask}
    if frame.source:
        source = np.array(frame.source, dtype=np.int64)
        return {"tokens": source, "lengths": np.array(len(source)), "decoder_tokens": tokens, **arrays}
    for name, of_frame in frame.inputs.items():
        arrays[name] = np.concatenate((of_frame[..., :kept], branch.inputs[name]), axis=-1)[..., :length]
    if frame.prefix:
        arrays["context_length"] = np.array(frame.prefix)
    return {"tokens": tokens, **arrays}
