"""P-tuning: trained tokens between those of a text, whose embeddings an encoder makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.modules.adapters import PromptIds, PTuningConfig
from ftk.modules.adapters.adapt import Adapted, mix_in
from ftk.modules.initialization import Normal, declare, declare_as_torch
from ftk.modules.quantized_linear import Int8TiedEmbedding


class PTuning:
    """Gives the token embedding prompt tokens behind its own (Liu et al. 2021, https://arxiv.org/abs/2103.10385).

    The encoder is that of Du et al. 2022's code (model/prompt.py). Where prompt tokens stand is up to a task.

    Args:
        config: how many; what makes their embeddings.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("prompt_encoder",)

    def __init__(self, config: PTuningConfig) -> None:
        self.config = config

    def places(self, model: nn.Module) -> dict[str, nn.Module]:
        """The token embedding.

        Raises:
            UserError: there is none, or it is rounded.
        """
        table = getattr(model, "token_embedding", None)
        if isinstance(table, Int8TiedEmbedding):
            raise UserError(
                "`adapter` p_tuning: the token embedding is quantised, being the output layer, too; start from the "
                "weights before they were quantised, or use `adapter` lora"
            )
        if not isinstance(table, nn.Embedding):
            raise UserError(f"{type(model).__name__} has no 'token_embedding' for prompt tokens; use `adapter` lora")
        return {"token_embedding": table}

    def put_on(self, layer: Any, value: str) -> None:
        """See `ftk.modules.adapters.adapt.Adapter`; layer: the token embedding."""
        layer.prompt_ids = self.config.prompt_ids(layer.num_embeddings)
        options = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        count = sum(map(len, layer.prompt_ids))
        layer.prompt_encoder = PromptEncoder(count, layer.embedding_dim, self.config.prompt_encoder, options)
        mix_in(layer, PromptedEmbedding)


class PromptEncoder(nn.Module):
    """The embeddings of n prompt tokens, the same in all texts.

    Args:
        num_tokens: n.
        hidden_size: H.
        form: "lstm": of rows [n, H] a bidirectional LSTM of two layers makes [n, 2 H], and two linear layers with a
            ReLU between make [n, H] of these; "mlp": two linear layers; "none": the rows themselves.
        options: device and type.
    """

    def __init__(self, num_tokens: int, hidden_size: int, form: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = declare(nn.Embedding(num_tokens, hidden_size, **options), weight=Normal(1.0))
        if form == "lstm":
            lstm = nn.LSTM(hidden_size, hidden_size, num_layers=2, bidirectional=True, **options)
            self.lstm = declare_as_torch(lstm, hidden_size)
        if form != "none":
            size = hidden_size * (2 if form == "lstm" else 1)
            self.into = declare_as_torch(nn.Linear(size, hidden_size, **options), size)
            self.back = declare_as_torch(nn.Linear(hidden_size, hidden_size, **options), hidden_size)

    def forward(self) -> Tensor:
        """[n, H]"""
        rows = self.embedding.weight
        if hasattr(self, "lstm"):
            # Parameters may have been put in others' places, as by the meta device or FSDP; the LSTM keeps a list.
            self.lstm._flat_weights = [getattr(self.lstm, name) for name in self.lstm._flat_weights_names]
            with torch.autocast(rows.device.type, enabled=False):
                rows, _ = self.lstm(rows)  # [n, 2 H]
        return self.back(F.relu(self.into(rows))) if hasattr(self, "into") else rows  # type: ignore[no-any-return]


class PromptedEmbedding(Adapted):
    """A token embedding whose ids from `num_embeddings` on are those of prompt tokens."""

    prompt_encoder: PromptEncoder
    prompt_ids: PromptIds
    num_embeddings: int

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> [..., H]"""
        return self.with_prompts(tokens, super().forward(tokens.masked_fill(tokens >= self.num_embeddings, 0)))

    def with_prompts(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens [...], of which those of prompt tokens may be anything in `rows`."""
        prompts = self.prompt_encoder().to(rows.dtype)
        own = F.embedding((tokens - self.num_embeddings).clamp(min=0), prompts)
        return torch.where((tokens >= self.num_embeddings)[..., None], own, rows)

    def parts_in_plan(self, style: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}  # all ranks make all prompt tokens

    def precompute(self) -> None:
        self.prompt_encoder.embedding.weight.data = self.prompt_encoder()
        for part in ("lstm", "into", "back"):
            self.prompt_encoder._modules.pop(part, None)


def refuse_stages(adapter: Any, num_stages: int, sequence_parallel: bool = False) -> None:
    """Raise a UserError if the stages of a pipeline, or parts of sequences, are to share a model with prompt tokens."""
    if isinstance(adapter, PTuning) and sequence_parallel:
        raise UserError(
            "`sequence_parallel`: the prompt tokens of `adapter` p_tuning stand in whole sequences; leave it out"
        )
    if isinstance(adapter, PTuning) and num_stages > 1:
        raise UserError(
            f"`pipeline_parallel_size` {num_stages}: only one stage would have the prompt tokens of `adapter` "
            f"p_tuning; use `data_parallel_shard_size`"
        )
