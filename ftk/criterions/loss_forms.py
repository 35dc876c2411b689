"""From hidden states to the loss: logits at once, chunk by chunk, or by torch's own fused operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.criterions.chunked_loss import chunked_loss
from ftk.criterions.config import CrossEntropyConfig
from ftk.criterions.token_loss import TokenLosses, token_losses, weighted
from ftk.errors import UserError
from ftk.modules.precision import matmul_dtype

if TYPE_CHECKING:
    from ftk.model_parallel.tensor_parallel.cross_entropy import VocabShard
    from ftk.modules.heads import Head

# On a CPU chunked is as fast as plain at 20 MB of logits (V 30592) and faster above. Plain holds three times the
# logits' bytes (logits, log-probabilities, their gradient), so that a tie goes to chunked. On a GPU chunks save
# memory alone, at the price of launches; not measured.
_CHUNKED_FROM_BYTES = {"cpu": 16 * 2**20}
_CHUNKED_FROM_BYTES_ELSEWHERE = 2**30


def output_loss(
    head: Head, hidden: Tensor, targets: Tensor, config: CrossEntropyConfig, weights: Tensor | None = None
) -> TokenLosses:
    """The loss of the places whose hidden states are given, in the form that the options choose.

    Args:
        head: gives the logits; any form but "plain" needs its `weight` (`ftk.modules.heads.Head`).
        hidden: [N, H], gathered where there is loss.
        targets: [N] int64.
        config: label smoothing, form and chunk.
        weights: [N] float32, factors of the targets' losses; None: 1.

    Raises:
        UserError: the form needs what head or torch do not have.
    """
    if (own := _sharded(head)) is not None:
        return _sharded_loss(hidden, *own, targets, config, weights)
    weight, form = matrix_of(head), config.loss_form
    if form == "auto":
        form = "plain" if weight is None else _cheaper_form(hidden, weight)
    if form == "plain":
        return token_losses(head(hidden), targets, config.label_smoothing, weights)
    if weight is None:
        raise _refusal_of_form(form)
    smoothing, chunk = config.label_smoothing, config.chunk_tokens(hidden.device.type)
    if form == "chunked":
        return chunked_loss(hidden, weight, targets, smoothing, chunk, weights=weights)
    return linear_loss(hidden, weight, targets, smoothing, chunk, weights=weights)


def check_form(form: str, head: Head, tensor_size: int) -> None:
    """Refuse before the first update what the loss of a whole model's head refuses: in a pipeline the last ranks alone
    would know.

    Args:
        form: `loss_form` of the criterion.
        tensor_size: of a tensor parallel plan, which shares out the vocabulary of any head that is one matrix.

    Raises:
        UserError: as `output_loss`.
    """
    if form in ("chunked", "linear") and matrix_of(head) is None:
        raise _refusal_of_form(form)
    if form == "linear" and tensor_size > 1:
        raise _refusal_of_linear()


def _refusal_of_form(form: str) -> UserError:
    return UserError(
        f"`loss_form` {form} needs a model whose output layer is one matrix, and this model's is not; "
        f"use `loss_form` plain"
    )


def _refusal_of_linear() -> UserError:
    return UserError(
        "`loss_form` linear needs the whole vocabulary on each process, which tensor parallel processes share; "
        "use `loss_form` chunked"
    )


def matrix_of(head: Head) -> Tensor | None:
    """The matrix [V, H] of a head that is this matrix alone; None: it is more."""
    return head.weight if getattr(head, "bias", None) is None else None  # nn.Linear may have one


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    chunk_tokens: int = 1024,
    weights: Tensor | None = None,
) -> TokenLosses:
    """The same by `torch.nn.functional.linear_cross_entropy`, which makes the logits once more in the backward.

    Args: as `chunked_loss`.

    Raises:
        UserError: this torch does not have it.
    """
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise UserError(
            f"`loss_form` linear needs torch 2.13 or newer, this is {torch.__version__}; use `loss_form` chunked"
        )
    dtype = matmul_dtype(weight)  # autocast does not cover this operator
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
    nll = F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options).float()
    losses = nll
    if label_smoothing:
        # The chunked operator cannot smooth. The mean over v of -log p_v is logsumexp - mean logit, and
        # logsumexp is nll + true logit: two dot products a token instead of another pass over the logits.
        from_true = F.embedding(targets, weight).float() - weight.float().mean(dim=0)  # [N, H]
        losses = nll + label_smoothing * (hidden.float() * from_true).sum(dim=-1)
    return weighted(losses, nll, weights)


def _sharded_loss(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    targets: Tensor,
    config: CrossEntropyConfig,
    weights: Tensor | None,
) -> TokenLosses:
    """The same where processes share the vocabulary: weight [n, H] is this process's part."""
    from ftk.model_parallel.tensor_parallel.cross_entropy import vocab_parallel_losses

    form = _cheaper_form(hidden, weight) if config.loss_form == "auto" else config.loss_form
    if form == "linear":
        raise _refusal_of_linear()
    if form == "chunked":
        chunk = config.chunk_tokens(hidden.device.type)
        return chunked_loss(hidden, weight, targets, config.label_smoothing, chunk, shard, weights)
    logits = F.linear(shard.enter(hidden), weight)  # [N, n]
    return weighted(*vocab_parallel_losses(logits, targets, shard, config.label_smoothing), weights)


def _cheaper_form(hidden: Tensor, weight: Tensor) -> str:
    limit = _CHUNKED_FROM_BYTES.get(hidden.device.type, _CHUNKED_FROM_BYTES_ELSEWHERE)
    return "chunked" if hidden.size(0) * weight.size(0) * 4 >= limit else "plain"


def target_logprobs(head: Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of target tokens, each with a gradient of its own, and whether no token is likelier.

    All logits are made at once: for losses of a few places only.

    Args:
        head: gives the logits; its vocabulary may be sharded.
        hidden: [N, H].
        targets: [N] int64.

    Returns:
        [N] float32 and [N] bool.
    """
    logits, shard = _logits(head, hidden)
    if shard is None:
        logprobs = logits.log_softmax(-1)  # [N, V]
        own = logprobs.gather(1, targets[:, None]).squeeze(1)
        return own, own.detach() >= logprobs.detach().amax(-1)
    from ftk.model_parallel.tensor_parallel.cross_entropy import vocab_parallel_losses
    from ftk.model_parallel.tensor_parallel.functions import all_reduce

    with torch.no_grad():
        best = all_reduce(logits.amax(-1), shard.group, "max")
        rows = torch.arange(len(targets), device=targets.device)
        is_best = _own_logits(logits, rows, targets, shard) >= best
    return -vocab_parallel_losses(logits, targets, shard)[0], is_best


def chosen_logits(head: Head, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Logits of some tokens; the others have no gradient.

    Args:
        head: as of `target_logprobs`.
        hidden: [N, H].
        rows: [C] int64, of the hidden states.
        tokens: [C] int64.

    Returns:
        [C] float32.
    """
    logits, shard = _logits(head, hidden)
    return logits[rows, tokens] if shard is None else _own_logits(logits, rows, tokens, shard)


def _logits(head: Head, hidden: Tensor) -> tuple[Tensor, VocabShard | None]:
    """float32 [N, V]; where processes share the vocabulary [N, n], this process's, and which they are."""
    if (own := _sharded(head)) is None:
        return head(hidden).float(), None
    weight, shard = own
    return F.linear(shard.enter(hidden), weight).float(), shard


def _sharded(head: Head) -> tuple[Tensor, VocabShard] | None:
    """This process's part of a head's matrix, and which rows it has; None: processes do not share it."""
    weight = matrix_of(head)
    if weight is None or type(weight.data) is Tensor:
        return None
    from ftk.model_parallel.tensor_parallel.cross_entropy import sharded_output

    return sharded_output(weight)


def _own_logits(logits: Tensor, rows: Tensor, tokens: Tensor, shard: VocabShard) -> Tensor:
    """The logits of tokens, of which each process has some; the same on every process.

    Args:
        logits: [N, n], this process's.
        rows, tokens: [C] int64.
        shard: this process's part.
    """
    from ftk.model_parallel.tensor_parallel.cross_entropy import local_indices
    from ftk.model_parallel.tensor_parallel.functions import reduce_from_region

    places, here = local_indices(tokens, logits.size(-1), shard)
    return reduce_from_region(logits[rows, places].masked_fill(~here, 0.0), shard.group)
