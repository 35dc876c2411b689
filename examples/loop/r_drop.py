"""A task with another step: R-Drop, two passes with different dropout that are to agree (Liang et al. 2021, eq. 4)."""

from dataclasses import dataclass, field

from torch.nn import functional as F

from ftk.criterions.base import LossOutput
from ftk.registry import register_task
from ftk.tasks.glm_blank.task import GLMBlankConfig, GLMBlankTask


@dataclass(kw_only=True)
class RDropConfig(GLMBlankConfig):
    r_drop_weight: float = field(default=1.0, metadata={"help": "weight of the divergence of the two passes"})


@register_task("glm_blank_r_drop", config=RDropConfig)
class RDropTask(GLMBlankTask):
    def train_step(self, model, criterion, batch) -> LossOutput:
        first, second = self.log_probabilities(model, batch), self.log_probabilities(model, batch)  # [N, V]
        mask = batch["loss_mask"]  # [B, T]
        nll = -(first + second).gather(1, batch["targets"][mask].unsqueeze(1)).sum() / 2
        there = F.kl_div(first, second, log_target=True, reduction="sum")
        back = F.kl_div(second, first, log_target=True, reduction="sum")
        divergence = (there + back) / 2
        meters = {"nll_loss": (nll.detach(), mask.sum()), "divergence": (divergence.detach(), mask.sum())}
        return LossOutput(nll + self.config.r_drop_weight / 2 * divergence, mask.sum(), meters)

    def log_probabilities(self, model, batch):
        hidden = model.hidden_states(
            batch["tokens"], position_ids=batch["position_ids"], context_length=batch["context_length"]
        )  # [B, T, H]
        return F.log_softmax(model.logits(hidden[batch["loss_mask"]]).float(), dim=-1)
