"""How far the probabilities of one model are from those of another, from the hidden states of both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.criterions.chunked_loss import in_chunks
from ftk.criterions.config import CrossEntropyConfig
from ftk.criterions.loss_forms import matrix_of
from ftk.errors import UserError
from ftk.modules.heads import Head
from ftk.modules.precision import matmul_dtype


def divergence(
    head: Head,
    hidden: Tensor,
    teacher_head: Head,
    teacher_hidden: Tensor,
    temperature: float,
    weights: Tensor | None = None,
    num_rows: int | None = None,
) -> Tensor:
    """KL(teacher || student) = sum p (log p - log q) of softmax(logits / temperature), summed over the places.

    Where the student's output layer is one matrix, logits of both exist for a chunk of places at a time.

    Args:
        head: of the student; its matrix is whole on this process.
        hidden: [N, H] of the student.
        teacher_head: of the teacher.
        teacher_hidden: [N, H'] of the teacher, without a gradient.
        temperature: above 0.
        weights: [N] float32, factors of the places; None: 1.
        num_rows: of the output layers, the first, are compared; None: those that both have.

    Returns:
        0-d float32.

    Raises:
        UserError: a head gives a single score, which has no probabilities.
    """
    weight = matrix_of(head)
    if weight is None:
        with torch.no_grad():
            teacher_logits = teacher_head(teacher_hidden)
        losses = _divergences(head(hidden), teacher_logits, temperature, num_rows)[0]
        return losses.sum() if weights is None else (losses * weights).sum()
    logit_loss = _TeacherDivergence(teacher_head, teacher_hidden, temperature, matmul_dtype(weight), num_rows)
    chunk_tokens = CrossEntropyConfig().chunk_tokens(hidden.device.type)
    return in_chunks(hidden, weight, logit_loss, chunk_tokens, weights).total


class _TeacherDivergence(NamedTuple):
    """The divergence of a student's logits from the teacher's, as an `ftk.criterions.chunked_loss.LogitLoss`."""

    head: Head
    hidden: Tensor
    temperature: float
    dtype: torch.dtype  # of matrix products: `in_chunks` calls outside of autocast
    num_rows: int | None

    def losses(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        device = self.hidden.device.type
        with torch.autocast(device, dtype=self.dtype, enabled=self.dtype in (torch.bfloat16, torch.float16)):
            teacher_logits = self.head(self.hidden[part])  # [n, V']
        losses, student, teacher = _divergences(logits, teacher_logits, self.temperature, self.num_rows)
        gradient = student.exp_().sub_(teacher.exp_()).div_(self.temperature)
        return losses, losses, F.pad(gradient, (0, logits.size(1) - gradient.size(1)))

    def gradient(self, kept: Tensor, part: slice) -> Tensor:
        return kept


def _divergences(
    logits: Tensor, teacher_logits: Tensor, temperature: float, max_rows: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V] and [n, V'] -> divergences [n], and the log-probabilities of both [n, rows]; float32."""
    rows = min(logits.size(1), teacher_logits.size(1), max_rows or logits.size(1))
    if rows == 1:
        raise UserError("`teacher`: the model gives one number for each place, and no probabilities to learn")
    student, teacher = ((one[:, :rows].float() / temperature).log_softmax(-1) for one in (logits, teacher_logits))
    terms = F.kl_div(student, teacher, reduction="none", log_target=True)
    # 0 log 0 is 0, and not NaN: a teacher may forbid tokens by logits of -inf.
    return terms.masked_fill(teacher == -torch.inf, 0.0).sum(-1), student, teacher
