"""Small models of three families with one tokenizer, and the slow way to the log-probability of a token."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftk.generation.engine.continuation import Continuation
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.models import build_model
from ftk.tasks.glm_blank.infill.framing import BlankFraming
from ftk.tokenizers import load_tokenizer

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
FAMILIES = ("glm", "gpt2", "t5")


def with_spread(model: Any) -> Any:
    """The model with larger weights, so that its probabilities differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model.eval()


@pytest.fixture(scope="session")
def families(made_place: Path) -> dict[str, Any]:
    """Family -> what evaluations ask of a generator, all with the tokenizer of `place`."""
    tokenizer = load_tokenizer(made_place / "data-bin")
    special, rows = tokenizer.special, tokenizer.padded_vocab_size()
    torch.manual_seed(3)
    limited = {**SHAPE, "vocab_size": rows, "max_positions": 128}
    models = {
        "glm": with_spread(build_model("glm", **limited)),
        "gpt2": with_spread(build_model("gpt2", **limited)),
        "t5": with_spread(build_model("t5", **SHAPE, vocab_size=rows, head_dim=8, decoder_start_token=special.pad)),
    }
    framings = {
        "glm": BlankFraming(special, models["glm"].config),
        "gpt2": Continuation([special.eos], 128),
        "t5": SourceToTarget([special.eos], [special.pad], None, ([], [special.eos])),
    }
    return {
        name: SimpleNamespace(model=model, framing=framings[name], tokenizer=tokenizer)
        for name, model in models.items()
    }


def slow_logprobs(
    family: str, generator: Any, context: list[int], answer: list[int], *, closed: bool = False, uni: bool = False
) -> tuple[list[float], bool]:
    """Log-probabilities of the tokens of an answer, one forward pass of the whole model for each; and whether all are
    the likeliest.

    Args:
        uni: whether all of the context but its first token is read as part of the answer.
    """
    seen, read = (context[:1], context[1:]) if uni else (context, [])
    found = [all_logprobs(family, generator, seen, [*read, *answer[:n]], closed) for n in range(len(answer))]
    logprobs = [float(row[token]) for row, token in zip(found, answer, strict=True)]
    return logprobs, all(int(row.argmax()) == token for row, token in zip(found, answer, strict=True))


@torch.no_grad()
def all_logprobs(
    family: str, generator: Any, context: list[int], read: list[int], closed: bool = False
) -> torch.Tensor:
    """What may follow a context and the first tokens of an answer: float32 [V]."""
    model, special = generator.model, generator.tokenizer.special
    if family == "gpt2":
        logits = model(torch.tensor([[*context, *read]]))
    elif family == "t5":
        source = [*context, special.eos]
        decoder_tokens = torch.tensor([[special.pad, *read]])
        logits = model(torch.tensor([source]), lengths=torch.tensor([len(source)]), decoder_tokens=decoder_tokens)
    else:
        seen = [special.cls, *context, special.gmask, *([special.eos] if closed else [])]
        place, steps = len(context) + 1, len(read) + 1
        in_text = [*range(len(seen)), *([place] * steps)]
        within = [*([0] * len(seen)), *range(1, steps + 1)]
        logits = model(
            torch.tensor([[*seen, special.sop, *read]]),
            position_ids=torch.tensor([[in_text, within]]),
            context_length=torch.tensor([len(seen)]),
        )
    return logits[0, -1].float().log_softmax(-1)
