"""A pipeline that generates and scores: each process runs its layers, and all get the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.model_parallel.pipeline.runner import PipelineRunner
from ftk.model_parallel.pipeline.stage_module import Stage
from ftk.model_parallel.pipeline.stages import Part


class PipelinedModel(nn.Module):
    """This process's stage, to be called as the whole model is: every process makes the same calls.

    `embed` receives from the stage before, the last of `layers` sends to the next stage, and `head` broadcasts the
    logits of the last stage, so that all processes choose the same tokens. Only the last stage has the model's hidden
    states. A model of two stacks only takes validation steps (`evaluation_runner`).

    Args:
        part: with one stage.
    """

    def __init__(self, part: Part, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.part = part
        self.stage: Any
        (self.stage,) = part.stages
        self.config: Any = self.stage.config
        self.hidden_size = part.hidden_size
        self.group = group
        self.rank, self.last_rank = part.rank, part.layout.last_rank
        self.layers: list[Callable[..., Tensor]] = list(self.stage.layers)
        if self.rank != self.last_rank and not self._has_two_stacks:
            self.layers[-1] = self._sending(self.layers[-1])

    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """As the whole model: tokens [B, T] -> logits [B, T, V]"""
        return self.head(self.hidden_states(tokens, **inputs))

    def hidden_states(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """As the whole model's, for `head` alone: [B, T, H]

        Raises:
            UserError: the model has two stacks, between which a stage's layers alone exchange nothing.
        """
        if self._has_two_stacks:
            raise UserError(
                "an encoder-decoder does not go with a pipeline except in validation; use `tensor_parallel_size` alone"
            )
        for_embed, _ = self.stage.split_inputs(inputs)
        hidden = self.embed(tokens, **for_embed)
        attend = self.stage.wrapped_attend(tokens, inputs)
        for layer in self.layers:
            hidden = layer(hidden, attend)
        return self.finish(hidden)

    def embed(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """tokens [B, T], others as the model's -> the input of the first layer here, [B, T, H]"""
        if self.rank == 0:
            return self.stage.embed(tokens, **inputs)
        hidden = torch.empty(*tokens.shape, self.hidden_size, dtype=self._dtype(), device=tokens.device)
        dist.recv(hidden, group=self.group, group_src=self.rank - 1)
        return hidden

    def around(self, **positions: Any) -> Callable[[Any], Any]:
        """As the whole model's."""
        return self.stage.around(**positions)  # type: ignore[no-any-return]

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> the same shape; elsewhere than on the last stage unchanged"""
        return self.stage.finish(hidden) if self.rank == self.last_rank else hidden

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., H], read on the last stage -> logits [..., V], on every stage"""
        if self.rank == self.last_rank:
            logits = self.stage.head(hidden).contiguous()
        else:
            shape = (*hidden.shape[:-1], self.config.vocab_size)
            logits = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        dist.broadcast(logits, group=self.group, group_src=self.last_rank)
        return logits

    def evaluation_runner(self, criterion: Any, device: torch.device, precision: str) -> PipelineRunner:
        """What takes validation steps of the model: the loss is computed on the last stage, and no logits are sent.

        Args:
            criterion: computes the loss (`ftk.criterions.base.Criterion`), in one pass.
            precision: fp32, bf16 or fp16, of matrix products.
        """
        stage = Stage(
            self.stage,
            criterion,
            self.rank,
            self.part.layout.num_stages,
            precision=precision,
            hidden_dtype=self._dtype(),
        )
        return PipelineRunner(
            self.part,
            [stage],
            schedule="1f1b",
            num_micro_batches=1,
            group=self.group,
            device=device,
            hidden_dtype=self._dtype(),
        )

    def _sending(self, layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def layer_and_send(hidden: Tensor, attend: Any) -> Tensor:
            hidden = layer(hidden, attend)
            dist.send(hidden.contiguous(), group=self.group, group_dst=self.rank + 1)
            return hidden

        return layer_and_send

    @property
    def _has_two_stacks(self) -> bool:
        return "decoder_tokens" in self.stage.INPUTS

    def _dtype(self) -> torch.dtype:
        """Of hidden states between stages: that of the weights."""
        return next(self.stage.parameters()).dtype
