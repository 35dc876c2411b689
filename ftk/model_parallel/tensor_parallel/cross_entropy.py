"""Cross entropy of logits that are sharded over the vocabulary: no process holds [N, V]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ftk.errors import UserError
from ftk.model_parallel.tensor_parallel.functions import all_reduce, copy_to_region, part_size
from ftk.model_parallel.tensor_parallel.styles import first_row

_NAME = "vocab_parallel_cross_entropy"  # in messages


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
    mesh = weight.device_mesh
    shard = VocabShard(mesh.get_group(), first_row(weight, mesh.get_local_rank()), weight.size(0))
    return weight.to_local(), shard


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | DeviceMesh,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    mask: Tensor | None = None,
) -> Tensor:
    """The loss of each target, float32 [...], the same on every process (Shoeybi et al. 2019, 3).

    Two messages for each target: the largest logit, then the sum of exponentials and the target's own logit (with
    smoothing also the sum of logits). With smoothing e the target is (1 - e) on the true token and e / V on each of all
    V rows, as `torch.nn.functional.cross_entropy` has it. The loss of float64 logits is float64.

    A target that is no row of the vocabulary is refused on a CPU. On a GPU, where looking would have the host wait for
    the device, its loss and the gradients of its logits are NaN; so it is under torch.compile.

    Args:
        logits: [..., n] of this process's part of the vocabulary, any floating type.
        targets: [...] int64, rows of the whole vocabulary, the same on every process.
        group: the processes, or their mesh of one dimension; parts as `torch.chunk` cuts them.
        vocab_size: V. None: the sum of all parts, for which one number is sent and the host waits: give it in training.
        label_smoothing: e, in [0, 1].
        ignore_index: where the target is this, loss and gradient are 0.
        mask: [...] bool, True where there is loss; elsewhere loss and gradient are 0, and a target may be anything.

    Raises:
        UserError: shapes, types or sizes do not go together, or a target is out of range (on a CPU). Nothing is sent to
            find that out: a single process with a wrong part raises, and the others wait for it.
    """
    group = _group_of(group)
    _check_call(logits, targets, label_smoothing, mask)
    if vocab_size is None:
        own = torch.tensor([logits.size(-1)], device=logits.device)
        vocab_size = logits.size(-1) if group.size() == 1 else int(all_reduce(own, group).item())
    shard = VocabShard.of(group, vocab_size)
    _check_part(logits.size(-1), shard)
    counted = targets != ignore_index if mask is None else mask & (targets != ignore_index)
    outside = counted & ((targets < 0) | (targets >= vocab_size))
    host_reads_freely = targets.device.type == "cpu" and not torch.compiler.is_compiling()
    if host_reads_freely and outside.any():
        raise UserError(
            f"{_NAME}: the target {int(targets[outside][0])} is no row of a vocabulary of {vocab_size}; leave such "
            f"places out with mask, or with ignore_index (which is {ignore_index})"
        )
    rows = logits.reshape(targets.numel(), logits.size(-1))  # [N, n]
    losses, _ = vocab_parallel_losses(rows, targets.reshape(-1), shard, label_smoothing)
    losses = losses.view(targets.shape).masked_fill(~counted, 0.0)
    if host_reads_freely:
        return losses
    return losses * torch.ones_like(losses).masked_fill(outside, torch.nan)  # the gradient is multiplied, too


def vocab_parallel_losses(
    logits: Tensor, targets: Tensor, shard: VocabShard, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """logits [N, n], targets [N] -> the smoothed losses [N], and the likelihoods without smoothing [N], detached."""
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
    places, here = own_places(targets, values.size(-1), shard)
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
    places, here = own_places(targets, softmax.size(-1), shard)
    if label_smoothing:
        softmax.sub_(label_smoothing / shard.vocab_size)
    true = here.to(softmax.dtype).mul_(label_smoothing - 1.0)
    return softmax.scatter_add_(1, places[:, None], true[:, None])


def own_places(targets: Tensor, size: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Of targets [N] the places among this process's `size` rows, and whether they are there; 0 where they are not."""
    places = targets - shard.start
    here = (places >= 0) & (places < size)
    return places.masked_fill(~here, 0), here


def _group_of(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise UserError(
            f"{_NAME}: a mesh of {tuple(group.shape)} with the names {group.mesh_dim_names}; the vocabulary is shared "
            f'over one dimension: give that alone, such as mesh["tensor"]'
        )
    return group.get_group()


def _check_call(logits: Tensor, targets: Tensor, label_smoothing: float, mask: Tensor | None) -> None:
    """Check types and shapes, without reading a tensor's values."""
    if not logits.is_floating_point() or targets.dtype != torch.int64:
        raise UserError(
            f"{_NAME}: logits are {logits.dtype} and targets {targets.dtype}; they must be of a floating type and "
            f"torch.int64"
        )
    if logits.dim() == 0 or targets.shape != logits.shape[:-1]:
        raise UserError(
            f"{_NAME}: logits {list(logits.shape)} and targets {list(targets.shape)} do not match; there must be "
            f"one target, the number of a row, for each row of logits"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != targets.shape):
        raise UserError(
            f"{_NAME}: the mask is {mask.dtype} {list(mask.shape)}; it must be torch.bool {list(targets.shape)}, True "
            f"where there is loss (such as mask != 0)"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise UserError(f"{_NAME}: label_smoothing is {label_smoothing}; it must be in [0, 1]")


def _check_part(size: int, shard: VocabShard) -> None:
    processes = shard.group.size()
    part = part_size(shard.vocab_size, processes)
    wanted = max(0, min(part, shard.vocab_size - shard.start))
    if part * (processes - 1) >= shard.vocab_size:  # the same on all processes: the last one has none
        raise UserError(f"{_NAME}: {shard.vocab_size} rows are too few for {processes} processes; pad the vocabulary")
    if size != wanted:
        raise UserError(
            f"{_NAME}: process {shard.group.rank()} has logits of {size} rows; of a vocabulary of {shard.vocab_size} "
            f"over {processes} processes its part is {wanted}, as torch.chunk cuts: parts of {part}, a smaller last one"
        )


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
