"""Cross entropy of logits that are sharded over the vocabulary: no process holds [N, V]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ftk.model_parallel.tensor_parallel.functions import all_reduce, copy_to_region, part_size


class VocabShard(NamedTuple):
    """Which part of the vocabulary this process has: rows `start` and following, cut as `torch.chunk` cuts."""

    group: dist.ProcessGroup
    start: int
    vocab_size: int  # of all processes

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocab_size: int) -> VocabShard:
        """This process's part."""
        return cls(group, group.rank() * part_size(vocab_size, group.size()), vocab_size)

    def enter(self, hidden: Tensor) -> Tensor:
        """Hidden states, the same on every process, into the output layer: gradients are summed."""
        return copy_to_region(hidden, self.group)


def sharded_output(weight: Tensor) -> tuple[Tensor, VocabShard] | None:
    """This process's rows of an output layer [V, H] that is cut by rows, and which they are; None if it is whole.

    Args:
        weight: as a model's head has it: plain, or a DTensor over the tensor parallel processes.
    """
    if not isinstance(weight, DTensor):
        return None
    assert weight.device_mesh.ndim == 1, "the loss of a model that FSDP2 shards lies inside its forward pass"
    if weight.placements[0] != Shard(0):
        return None
    return weight.to_local(), VocabShard.of(weight.device_mesh.get_group(), weight.size(0))


def vocab_parallel_losses(
    logits: Tensor, targets: Tensor, shard: VocabShard, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The loss of each target, the same on every process (Shoeybi et al. 2019, 3).

    Two messages for each target: the largest logit, then the sum of exponentials and the target's own logit (with
    smoothing also the sum of logits).

    Args:
        logits: [N, n] of this process's part of the vocabulary, any floating type.
        targets: [N] int64, rows of the whole vocabulary, the same on every process. They are not checked.
        shard: this process's part.
        label_smoothing: e; the target is (1 - e) on the true token and e / V on each of all V rows, as
            `torch.nn.functional.cross_entropy` has it.

    Returns:
        losses [N], and without smoothing the negative log-likelihoods [N], detached; float32, or float64 as the logits.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, shard, label_smoothing)


def losses_and_softmax(
    logits: Tensor, targets: Tensor, shard: VocabShard, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Without a gradient: logits [N, n] -> losses [N], likelihoods without smoothing [N], softmax [N, n].

    All float32; float64 of float64 logits.
    """
    values = logits if logits.dtype == torch.float64 else logits.float()
    top = all_reduce(values.amax(-1), shard.group, "max")  # [N]
    # Never over the caller's logits, but over our own copy of them, where a type was changed.
    values = values - top[:, None] if values is logits else values.sub_(top[:, None])
    places, here = local_indices(targets, values.size(-1), shard)
    true = values.gather(1, places[:, None]).squeeze(1).masked_fill(~here, 0.0)
    total = [values.sum(-1)] if label_smoothing else []
    exponentials = values.exp_()
    sums = all_reduce(torch.stack([exponentials.sum(-1), true, *total]), shard.group)  # [2 or 3, N]
    log_sum = sums[0].log()
    losses = nll = log_sum - sums[1]
    if label_smoothing:
        losses = (1.0 - label_smoothing) * nll + label_smoothing * (log_sum - sums[2] / shard.vocab_size)
    return losses, nll, exponentials.div_(sums[0][:, None])


def logits_gradient(softmax: Tensor, targets: Tensor, shard: VocabShard, label_smoothing: float = 0.0) -> Tensor:
    """Softmax minus target distribution, [N, n], written over `softmax`."""
    places, here = local_indices(targets, softmax.size(-1), shard)
    if label_smoothing:
        softmax.sub_(label_smoothing / shard.vocab_size)
    true = here.to(softmax.dtype).mul_(label_smoothing - 1.0)
    return softmax.scatter_add_(1, places[:, None], true[:, None])


def local_indices(targets: Tensor, size: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Of targets [N] the places among this process's `size` rows, and whether they are there; 0 where they are not."""
    places = targets - shard.start
    here = (places >= 0) & (places < size)
    return places.masked_fill(~here, 0), here


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        losses, nll, softmax = losses_and_softmax(logits, targets, shard, label_smoothing)
        ctx.save_for_backward(softmax, targets)
        ctx.shard, ctx.label_smoothing, ctx.dtype = shard, label_smoothing, logits.dtype
        nll = nll.clone()  # not the same tensor as the losses, which have a gradient
        ctx.mark_non_differentiable(nll)
        return losses, nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        softmax, targets = ctx.saved_tensors
        grad = logits_gradient(softmax.clone(), targets, ctx.shard, ctx.label_smoothing)
        return grad.mul_(grad_losses[:, None]).to(ctx.dtype), None, None, None
