"""A check of plugins' models: token by token they must give what they give for a whole sequence, as in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.request import Frame
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.registry import ATTENTIONS, is_plugin, named

STEPS = 3  # tokens that are read one by one
TOLERANCE = 1e-3  # of logits of weights in float32


def check_decoding(model: Any, frame: Frame) -> None:
    """Refuses a model that would write other answers than it was trained to; nothing of ftk's own is asked.

    Only what can be compared is: weights in float32, of a model that reads no source and no rows of its own.

    Args:
        model: whole on this process.
        frame: a prompt.

    Raises:
        UserError: the logits of some tokens behind the prompt depend on how they are read.
    """
    form = str(getattr(model.config, "attention", ""))
    of_form = form in ATTENTIONS and is_plugin(ATTENTIONS.get(form).target)
    if not (is_plugin(model) or of_form) or next(model.parameters()).dtype != torch.float32:
        return
    needed = {*frame.inputs, *(["context_length"] if frame.prefix else [])}
    if frame.source or frame.own or not needed <= model.INPUTS.keys():
        return
    tokens = [*frame.tokens[:STEPS]]
    config = model.config
    with torch.inference_mode(), evaluation_mode(model):
        found = torch.stack([*_one_by_one(model, frame, tokens)])
        try:
            if not of_form:  # the form that "auto" takes on a GPU would be compiled for this one sequence
                model.config = dataclasses.replace(config, attention="sdpa")
            expected = _at_once(model, frame, tokens)
        finally:
            model.config = config
    difference = (found - expected).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        if of_form:
            why = f"generation has an attention of its own, which is not that of `attention` {form}"
        else:
            why = "`embed` and the layers must read each token by itself, and `around` use key_positions where given"
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
