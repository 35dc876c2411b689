"""Gradients that lie on many processes: when they are summed, the last sums of an update, one norm, clipping."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ftk.model_parallel.norms import square_sums
from ftk.model_parallel.shards import canonical_name, depth, local, multiply_gradients, shard_groups
from ftk.model_parallel.world import World


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Forward and backward pass of a micro-batch; the sums over processes are whole after the last one of an update.

    Copies of the model (DDP) and ZeRO stage 1 keep gradients on each process until then; stages 2 and 3 cannot, as
    each process has memory for its share alone. A model of one process is left alone.

    Args:
        model: as it is called in the step; wrapped by DDP, sharded by FSDP2, or neither.
        enabled: false for all micro-batches of an update but the last.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        if enabled:
            yield
        else:
            with model.no_sync():
                yield
        return
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2, which takes a second to import
        from ftk.model_parallel.fully_sharded import accumulate

        accumulate(model, last=enabled)  # type: ignore[arg-type]
    yield


def guarded(loss: Tensor, backward_scale: Tensor) -> Tensor:
    """What to go backward from: `loss * backward_scale`; gradients are NaN where the loss itself is not finite.

    So a loss that is bad on one process makes the gradient norm of all processes bad, and all skip the update,
    without another message between them. A finite loss is multiplied by the scale alone, to the bit.

    Args:
        loss: 0-d.
        backward_scale: 0-d, of the loss's device.
    """
    return loss * (backward_scale + 0.0 * loss.detach())


def is_non_finite(*values: Tensor) -> Tensor:
    """Whether any of the given 0-d tensors is infinite or not a number: a 0-d bool tensor on their device."""
    return ~torch.stack([value.detach().float() for value in values]).isfinite().all()


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """What gradients are multiplied by so that their norm is `max_norm` at most, as torch does it: 0-d."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class GlobalGradients:
    """The gradients of a model as one vector, wherever its parts lie.

    A parameter that is sharded over some dimensions of the mesh is counted once in the sum over them; what is equal
    on more than one process is counted on each of them alone and not summed. Stages of a pipeline hold different
    parameters. The only message is one small sum over each dimension that has more than one process.

    Args:
        model: the inner one.
        uncounted: names of parameters that another process counts (the second copy of a tied weight).
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        world: World,
        uncounted: Collection[str] = (),
    ) -> None:
        self.world = world
        self.parameters = list(parameters)
        names = {parameter: canonical_name(name, model) for name, parameter in model.named_parameters()}
        self._counted = [names.get(parameter) not in uncounted for parameter in self.parameters]

    def norm(self) -> Tensor:
        """Euclidean norm of all gradients, float32, 0-d, the same on every process; nothing is read by the host.

        It lies where the gradients lie: on the host, if they are offloaded.
        """
        parts: dict[frozenset[str], list[Tensor]] = {}  # dimensions of the mesh -> what is sharded over them
        groups: dict[str, dist.ProcessGroup] = {}
        for parameter, counted in zip(self.parameters, self._counted, strict=True):
            if parameter.grad is not None and counted:
                own = shard_groups(parameter.grad)
                groups |= own
                parts.setdefault(frozenset(own), []).append(local(parameter.grad))
        # By the dimensions that are still to be summed over: 0-d float64.
        squares = {dimensions: square_sums(gradients).sum() for dimensions, gradients in parts.items()}
        for dimension in sorted(groups, key=depth, reverse=True):
            kinds = sorted((kind for kind in squares if dimension in kind), key=sorted)
            values = torch.stack([squares.pop(kind) for kind in kinds])
            dist.all_reduce(values, group=groups[dimension])
            for kind, value in zip(kinds, values.unbind(), strict=True):
                rest = kind - {dimension}
                squares[rest] = squares[rest] + value if rest in squares else value
        # A process that counts none makes its zero where the others have their sums.
        device = local(self.parameters[0]).device if self.parameters else self.world.device
        total = squares.get(frozenset(), torch.zeros((), dtype=torch.float64, device=device))
        if self.world.sizes.pipeline > 1:  # stages hold different parameters
            dist.all_reduce(total, group=self.world.group("pipeline"))
        return total.sqrt().float()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients in place by `max_norm / norm` where `norm` is above `max_norm`; 0: leave them.

        Args:
            max_norm: the largest norm that is left alone.
            norm: from `norm`.
        """
        if max_norm > 0.0:
            multiply_gradients(self.parameters, clip_factor(max_norm, norm))
