"""A check of plugins' models: token by token they must give what they give for a whole sequence, as in training."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.request import Frame
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.modules.quantized_linear import Int4Linear, Int8Linear, Int8TiedEmbedding
from ftk.registry import attention_of_plugin, is_plugin, named

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator

logger = logging.getLogger(__name__)

STEPS = 3  # tokens that are read one by one
TOLERANCE = {"cpu": 1e-3, "cuda": 2e-2}  # of logits; a GPU may multiply in TF32


def check_generator(generator: TextGenerator[Any]) -> None:
    """`check_decoding` of its models that are a plugin's, or have a plugin's attention, by its own example of a prompt.

    Raises:
        UserError: as `check_decoding`.
    """
    for model in getattr(generator.model, "members", [generator.model]):
        if not (is_plugin(model) or attention_of_plugin(model)) or not _is_comparable(model):
            continue
        try:
            frame = generator.framing.first(generator.encode(generator.example).request)
        except Exception as error:  # a plugin's tokenizer or template may not know such texts
            logger.debug("%s is not checked: %s", named(model), error)
            return
        check_decoding(model, frame)


def _is_comparable(model: Any) -> bool:
    """Whether its weights are numbers of float32, of which two ways give nearly the same."""
    rounded = (Int4Linear, Int8Linear, Int8TiedEmbedding)
    in_full = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return in_full and not any(isinstance(module, rounded) for module in model.modules())


def check_decoding(model: Any, frame: Frame) -> None:
    """Refuses a model that would write otherwise than it was trained to.

    What cannot be compared is passed over: a model that reads a source, or rows of its own.

    Args:
        model: whole on this process.
        frame: a prompt.

    Raises:
        UserError: the logits of some tokens behind the prompt depend on how they are read.
    """
    needed = {*frame.inputs, *(["context_length"] if frame.prefix else [])}
    if frame.source or frame.own or not needed <= model.INPUTS.keys():
        return
    config, form = model.config, attention_of_plugin(model)
    room = getattr(config, "max_positions", None) or len(frame.tokens) + STEPS
    tokens = [*frame.tokens[: max(0, min(STEPS, room - len(frame.tokens)))]]
    with torch.inference_mode(), evaluation_mode(model):
        found = torch.stack([*_one_by_one(model, frame, tokens)])
        try:
            if form is None and hasattr(config, "attention"):  # what "auto" takes on a GPU would be compiled for this
                model.config = dataclasses.replace(config, attention="sdpa")
            expected = _at_once(model, frame, tokens)
        finally:
            model.config = config
    difference, most = (found - expected).abs().max().item(), expected.abs().max().item()
    if not math.isfinite(most) or difference <= TOLERANCE[found.device.type] * max(1.0, most):
        return
    if form is None:
        why = "'embed' and the layers must read each token by itself, and 'around' must use key_positions where given"
    else:
        why = f"generation has an attention of its own, which is not that of `attention` {form}"
    raise UserError(
        f"{named(model)} would not write as it was trained: its logits for tokens that come one by one differ by "
        f"{difference:.2g} from those for the whole text; {why}"
    )


def _one_by_one(model: Any, frame: Frame, tokens: list[int]) -> Iterator[Tensor]:
    """Logits [V] behind the prompt, and behind each of the tokens."""
    decoder = CachedDecoder(model, 1, 1, len(frame.tokens), len(tokens))
    yield decoder.read([0], [frame])[0]
    for token in tokens:
        yield decoder.step(torch.tensor([[token]], device=decoder.device))[0, 0]


def _at_once(model: Any, frame: Frame, tokens: list[int]) -> Tensor:
    """The same, [1 + tokens, V], of the whole sequence."""
    steps, device = np.arange(1, len(tokens) + 1), next(model.parameters()).device
    inputs = {}
    for name, own in frame.inputs.items():
        further = own[..., -1:] + np.multiply.outer(frame.stride[name], steps)
        inputs[name] = torch.tensor(np.concatenate((own, further), -1)[None], device=device)
    if frame.prefix:
        inputs["context_length"] = torch.tensor([frame.prefix], device=device)
    whole = torch.tensor([[*frame.tokens, *tokens]], device=device)
    states = model.hidden_states(whole, **inputs)[0, len(frame.tokens) - 1 :]
    return model.head(states)  # type: ignore[no-any-return]
