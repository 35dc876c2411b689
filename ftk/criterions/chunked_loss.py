"""Output layer and cross entropy in one, chunk by chunk: [N, V] never exists, gradients are made in the forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ftk.criterions.token_loss import TokenLosses, smoothed
from ftk.modules.precision import matmul_dtype

if TYPE_CHECKING:
    from ftk.model_parallel.tensor_parallel.cross_entropy import VocabShard

# float16 loses what is below 6e-8, and most probabilities of a large vocabulary are near that; the trainer's
# loss scale comes too late for gradients that are made in the forward. 2^8 keeps what is above 2e-10 and is far
# from overflow, as the gradient of a logit lies in [-1, 1].
FLOAT16_SCALE = 256.0

_ROWS = 4096
"""Of the gradient of the weight, to which a product in lower precision is added at a time."""


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    chunk_tokens: int = 1024,
    shard: VocabShard | None = None,
    weights: Tensor | None = None,
) -> TokenLosses:
    """The loss of the logits `hidden @ weight.T`, in memory for `chunk_tokens` rows of them, whatever N is.

    The gradient of a logit is known as soon as the logit is (softmax minus target), so that one pass makes
    the loss and the gradients of hidden states and weight, and nothing of size V outlives its chunk but the
    weight's gradient. Matrix products run in autocast's type; softmax and the weight's gradient are float32.

    Args:
        hidden: [N, H].
        weight: [V, H].
        targets: [N] int64.
        label_smoothing: see `token_losses`.
        chunk_tokens: rows of logits at a time.
        shard: which rows `weight` has, where processes share the vocabulary; `hidden` is the same on all of them.
        weights: [N] float32, factors of the targets' losses; None: 1.

    Returns:
        As `token_losses`. One can go backward from `total` once, and not through the gradients.
    """
    if shard is not None:
        hidden = shard.enter(hidden)
    return in_chunks(hidden, weight, _CrossEntropy(targets, label_smoothing, shard), chunk_tokens, weights)


class LogitLoss(Protocol):
    """A loss of each row of logits, and its gradient."""

    def losses(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [n, V] float32 of the rows `part` -> losses [n], likelihoods [n], the input of `gradient` [n, V]."""

    def gradient(self, kept: Tensor, part: slice) -> Tensor:
        """Of each loss, with respect to its logits: [n, V] float32, perhaps written over `kept`."""


def in_chunks(
    hidden: Tensor, weight: Tensor, logit_loss: LogitLoss, chunk_tokens: int = 1024, weights: Tensor | None = None
) -> TokenLosses:
    """As `chunked_loss`, with another loss than the cross entropy of target tokens."""
    dtype, grad_enabled = matmul_dtype(weight), torch.is_grad_enabled()
    return TokenLosses(*_ChunkedLoss.apply(hidden, weight, logit_loss, chunk_tokens, dtype, grad_enabled, weights))


class _ChunkedLoss(torch.autograd.Function):
    """(hidden, weight, ...) -> (total, losses, nll), of which the total has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        logit_loss: LogitLoss,
        chunk_tokens: int,
        dtype: torch.dtype,
        grad_enabled: bool,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.scale = _float16_scale(weights) if dtype == torch.float16 else 1.0
        need_hidden, need_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        losses, nll = (torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(2))
        with _without_autocast(hidden.device.type):
            rows, matrix = hidden.to(dtype), weight.to(dtype)
            for start in range(0, len(rows), chunk_tokens):
                part = slice(start, start + chunk_tokens)
                losses[part], nll[part], kept = logit_loss.losses((rows[part] @ matrix.T).float(), part)  # kept [n, V]
                if not (need_hidden or need_weight):
                    continue
                grad = logit_loss.gradient(kept, part).mul_(ctx.scale)
                grad = (grad if weights is None else grad.mul_(weights[part, None])).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad @ matrix
                if need_weight:
                    grad_weight = _add_product(grad_weight, grad.T, rows[part])
        if need_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        ctx.grads = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        if weights is not None:
            losses, nll = losses * weights, nll * weights
        ctx.mark_non_differentiable(losses, nll)
        return losses.sum(), losses, nll

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the chunked loss has no second derivative; use `loss_form` plain")
        if ctx.grads is None:
            raise RuntimeError("the chunked loss goes backward only once; use `loss_form` plain for more")
        grads, ctx.grads = ctx.grads, None
        # In place: they are ours alone, and memory for a second [V, H] costs more than the multiplication.
        factor = grad_total / ctx.scale
        return *(None if grad is None else grad.mul_(factor) for grad in grads), *[None] * 5


class _CrossEntropy(NamedTuple):
    """With target tokens [N] int64, whose vocabulary processes may share."""

    targets: Tensor
    label_smoothing: float
    shard: VocabShard | None

    def losses(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        targets = self.targets[part]
        if self.shard is not None:
            from ftk.model_parallel.tensor_parallel.cross_entropy import losses_and_softmax

            return losses_and_softmax(logits, targets, self.shard, self.label_smoothing)
        log_probs = torch.log_softmax(logits, dim=-1)
        return *smoothed(log_probs, targets, self.label_smoothing), log_probs

    def gradient(self, kept: Tensor, part: slice) -> Tensor:
        """Softmax minus target distribution."""
        targets = self.targets[part]
        if self.shard is not None:
            from ftk.model_parallel.tensor_parallel.cross_entropy import logits_gradient

            return logits_gradient(kept, targets, self.shard, self.label_smoothing)
        grad = kept.exp_()
        if self.label_smoothing:
            grad.sub_(self.label_smoothing / grad.size(-1))
        true = grad.new_full((), self.label_smoothing - 1.0).expand(len(targets), 1)
        return grad.scatter_add_(1, targets[:, None], true)


def _float16_scale(weights: Tensor | None) -> Tensor | float:
    """`FLOAT16_SCALE`, less where targets weigh more than 1, so that no product with it overflows; a power of two."""
    if weights is None:
        return FLOAT16_SCALE
    largest = torch.cat([weights.abs().float(), weights.new_ones(1, dtype=torch.float32)]).amax()  # there may be none
    return FLOAT16_SCALE / torch.exp2(largest.log2().ceil())


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in float32, as far as the device can; written over `total`."""
    if left.dtype == torch.float16 and not left.is_cuda:  # its range is too small for the sum
        left, right = left.float(), right.float()
    if left.dtype == torch.float32:
        return left @ right if total is None else total.addmm_(left, right)
    if left.is_cuda:
        product = torch.mm(left, right, out_dtype=torch.float32)
        return product if total is None else total.add_(product)
    if total is None:
        total = right.new_zeros(left.size(0), right.size(1), dtype=torch.float32)
    for part, rows in zip(total.split(_ROWS), left.split(_ROWS), strict=True):  # so that no second [V, H] is made
        part.add_(rows @ right)
    return total


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Types are chosen here; autocast would cast the weight anew for each chunk."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
