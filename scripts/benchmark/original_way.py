"""GLM's training step as its original code takes it, in plain PyTorch: what ftk's step is measured against.

Written for this comparison after a reading of THUDM/GLM (mpu/transformer.py, mpu/cross_entropy.py, mpu/grads.py,
fp16/fp16.py), one process. What is kept of the original's way:

- attention from matrix products and a softmax over [B, A, T, T] scores, masked by a float mask as
  `scores * mask - 65504 * (1 - mask)`, the second half computed again in every layer;
- GELU from small operators;
- logits in float32 at every position, [B * T, V], whether there is loss or not;
- cross entropy from small operators: maximum, subtraction, exponential, sum, gather, logarithm;
- gradients clipped, and Adam stepped, one parameter after the other, without fused or foreach kernels;
- in fp16 the whole model in half precision with float32 master weights, and a loss scale.

Parameters have the original's names, so that `ftk.models.glm.convert.to_original` fills them. Dropout sits where the
original has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.models.glm import GLMConfig

LOSS_SCALE = 2.0**12  # fixed: a dynamic one starts at 2 ** 32 and would skip the first twenty steps of a benchmark


class SelfAttention(nn.Module):
    def __init__(self, config: GLMConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // config.num_attention_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.attention_dropout = nn.Dropout(config.attention_dropout)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output_dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden [B, T, H], mask [B, 1, T, T] of the model's type, 1 where a query sees a key -> [B, T, H]"""
        query, key, value = map(self._heads, self.query_key_value(hidden).chunk(3, dim=-1))  # [B, A, T, D]
        scores = torch.matmul(query, key.transpose(-1, -2) / math.sqrt(self.head_size))  # [B, A, T, T]
        scores = torch.mul(scores, mask)
        scores = scores + (-65504.0) * (1.0 - mask)
        weights = self.attention_dropout(torch.softmax(scores, dim=-1))
        attended = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous()  # [B, T, A, D]
        return self.output_dropout(self.dense(attended.view(hidden.shape)))

    def _heads(self, values: Tensor) -> Tensor:
        return values.view(*values.shape[:-1], self.num_heads, self.head_size).permute(0, 2, 1, 3)


class MLP(nn.Module):
    def __init__(self, config: GLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.inner_size)
        self.dense_4h_to_h = nn.Linear(config.inner_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.dense_4h_to_h(gelu(self.dense_h_to_4h(hidden))))


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation, operator by operator."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))


class Layer(nn.Module):
    def __init__(self, config: GLMConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.input_layernorm(hidden), mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Transformer(nn.Module):
    def __init__(self, config: GLMConfig) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(config.max_positions + 1, config.hidden_size)
        self.block_position_embeddings = nn.Embedding(config.max_positions + 1, config.hidden_size)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, embeddings: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        position, block = position_ids[:, 0], position_ids[:, 1]
        hidden = embeddings + self.position_embeddings(position)
        hidden = self.embedding_dropout(hidden + self.block_position_embeddings(block))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.final_layernorm(hidden)


class OriginalGLM(nn.Module):
    """The model; `config` must have block positions."""

    def __init__(self, config: GLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer = Transformer(config)

    def forward(self, tokens: Tensor, position_ids: Tensor, context_length: Tensor) -> Tensor:
        """tokens [B, T], position_ids [B, 2, T], context_length [B] -> logits [B, T, V] at every position"""
        embeddings = self.word_embeddings(tokens)  # [B, T, H]
        mask = float_mask(context_length, tokens.size(1)).to(embeddings.dtype)
        hidden = self.transformer(embeddings, position_ids, mask)
        return F.linear(hidden, self.word_embeddings.weight)


def float_mask(context_length: Tensor, num_tokens: int) -> Tensor:
    """[B, 1, T, T] float32: lower triangle of ones, and ones in the columns of the context."""
    mask = torch.ones(num_tokens, num_tokens, device=context_length.device).tril()
    mask = mask.unsqueeze(0).expand(context_length.size(0), -1, -1)
    column = torch.arange(num_tokens, device=context_length.device)
    return mask.masked_fill((column < context_length.view(-1, 1)).unsqueeze(1), 1.0).unsqueeze(1)


class SmallOperatorCrossEntropy(torch.autograd.Function):
    """Cross entropy as the model-parallel code writes it, for one part of the vocabulary: the whole."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """logits [B, T, V] float32, targets [B, T] -> losses [B, T]"""
        shifted = logits.clone()
        shifted.sub_(shifted.max(dim=-1)[0].unsqueeze(-1))
        exponentials = shifted.exp()
        sums = exponentials.sum(dim=-1)
        outside = (targets < 0) | (targets >= logits.size(-1))
        masked = targets.clone()
        masked[outside] = 0
        rows = torch.arange(masked.numel(), device=logits.device)
        predicted = shifted.view(-1, logits.size(-1))[rows, masked.view(-1)].clone().view_as(targets)
        predicted[outside] = 0.0
        losses = sums.log() - predicted
        exponentials.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(exponentials, outside, masked.view(-1))
        return losses

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        softmax, outside, targets = ctx.saved_tensors
        grad_2d = softmax.view(-1, softmax.size(-1))
        rows = torch.arange(targets.numel(), device=softmax.device)
        grad_2d[rows, targets] -= 1.0 - outside.view(-1).float()
        softmax.mul_(gradient.unsqueeze(-1))
        return softmax, None


class OriginalWay:
    """A training step of the original.

    Args:
        model: with float32 weights, on its device.
        precision: fp32; bf16 by autocast (the original has none); fp16 as the original has it.
        lr, betas, eps, weight_decay, clip_norm: of AdamW and of clipping.
    """

    def __init__(
        self,
        model: OriginalGLM,
        precision: str,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_norm: float,
    ) -> None:
        self.model = model.half() if precision == "fp16" else model
        self.precision = precision
        self.clip_norm = clip_norm
        self.weights = list(self.model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.weights] if precision == "fp16" else self.weights
        decayed = [p for p in self.masters if p.ndim > 1]
        plain = [p for p in self.masters if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=lr,
            betas=betas,
            eps=eps,
            foreach=False,
            fused=False,
        )

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One update; returns the mean loss of the target tokens, 0-d."""
        self.model.zero_grad(set_to_none=True)
        device = batch["tokens"].device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.model(batch["tokens"], batch["position_ids"], batch["context_length"])
        losses = SmallOperatorCrossEntropy.apply(logits.contiguous().float(), batch["targets"])
        del logits  # in the original it is a local of the function that returns the loss
        loss_mask = batch["loss_mask"].float().view(-1)
        loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
        if self.precision == "fp16":
            (loss.float() * LOSS_SCALE).backward()
            for master, weight in zip(self.masters, self.weights, strict=True):
                if weight.grad is not None:
                    master.grad = weight.grad.float() / LOSS_SCALE
        else:
            loss.backward()
        clip_one_by_one(self.masters, self.clip_norm)
        self.optimizer.step()
        if self.precision == "fp16":
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.data.copy_(master.data)
                master.grad = None
        return loss.detach()


def clip_one_by_one(parameters: list[nn.Parameter], max_norm: float) -> None:
    """Norm and scaling one parameter after the other; the host reads each norm, as in the original."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = 0.0
    for gradient in gradients:
        total += gradient.norm(2).item() ** 2
    share = max_norm / (total**0.5 + 1e-6)
    if share < 1.0:
        for gradient in gradients:
            gradient.mul_(share)
