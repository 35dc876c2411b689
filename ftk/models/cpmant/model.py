"""CPM-Ant: a decoder with a learned prompt in front of each text, and positions that are biases of attention scores."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ftk.models.cpm.model import BiasedDecoder
from ftk.models.cpmant import CPMAntConfig
from ftk.modules.attention import Attend
from ftk.modules.initialization import Normal, declare
from ftk.modules.masks import Visibility
from ftk.modules.position_bias import PositionBias

_TEXT = 2
"""Number of the segment of all texts; that of the prompt is 0."""


class CPMAnt(BiasedDecoder):
    """A decoder that sees its prompt and its context whole, and continues them.

    Inputs: `position_ids` (None: 0 to T - 1); `context_length`, leading tokens that all tokens see (None: 0).
    `hidden_states` puts the prompt in front of the tokens, and cuts it off behind. A decoder that reads tokens step by
    step gets the prompt from its framing (`prompt_ids` of the config): there places count from the prompt on.

    Args:
        config: the shape.
        seed: of the initial weights, as of `Transformer`.
    """

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T", "position_ids": "B T", "context_length": "B"}
    POSITION_TABLES = "position_embedding.*"
    ADDS_TOKENS = True

    def __init__(self, config: CPMAntConfig, seed: int | None = None) -> None:
        super().__init__(config, SegmentEmbedding(config), seed)

    def add_parts(self) -> None:
        self.position_bias = declare(SegmentBias(self.config), weight=Normal(self.config.init_std))

    def attend(self, tokens: Tensor, context_length: Tensor | None = None) -> Attend:  # type: ignore[override]
        """The attention of a whole sequence: tokens [B, T], context_length [B] or None."""
        return self.sequence_attend(tokens, Visibility(prefix=context_length))

    def hidden_states(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """What the head reads of the text, [B, T, H]; arguments as in `forward`."""
        prompt, num_rows = self.config.prompt_ids, tokens.size(0)
        places = inputs.get("position_ids")
        if places is None:
            self.check_length(tokens)
            places = self.default_positions(tokens)
        seen = inputs.get("context_length")
        rows = torch.arange(len(prompt), device=tokens.device).expand(num_rows, -1)
        inputs["position_ids"] = torch.cat((rows, places + len(prompt)), dim=1)
        inputs["context_length"] = len(prompt) + (tokens.new_zeros(num_rows) if seen is None else seen)
        return super().hidden_states(torch.cat((rows + prompt.start, tokens), dim=1), **inputs)[:, len(prompt) :]


class SegmentEmbedding(nn.Module):
    """A row for each segment, which is added to the token embedding; places of the prompt come first."""

    def __init__(self, config: CPMAntConfig) -> None:
        super().__init__()
        self.prompt_length = config.prompt_length
        table = nn.Embedding(config.segment_types, config.hidden_size)
        self.segment = declare(table, weight=Normal(config.init_std))

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids [B, T] -> [B, T, H]"""
        return self.segment(_segments(position_ids, self.prompt_length))


class SegmentBias(PositionBias):
    """Biases of distances where query and key are of one segment; else one for the two segments."""

    def __init__(self, config: CPMAntConfig) -> None:
        buckets, kinds = config.num_position_buckets, config.segment_types
        super().__init__(buckets, config.num_attention_heads, config.max_position_distance, True, more=kinds * kinds)
        self.num_kinds = kinds
        self.prompt_length = config.prompt_length

    def places(self, queries: Tensor, keys: Tensor) -> Tensor:
        one, other = (_segments(each, self.prompt_length) for each in (queries[:, :, None], keys[:, None, :]))
        across = self.num_buckets + one * self.num_kinds + other
        return torch.where(one == other, super().places(queries, keys), across)


def _segments(position_ids: Tensor, prompt_length: int) -> Tensor:
    """The segment of each place; int64 of the same shape."""
    return (position_ids >= prompt_length) * _TEXT
