"""A criterion of two passes: R-Drop, whose passes with different dropout are to agree (Liang et al. 2021, eq. 4)."""

from dataclasses import dataclass

from torch.nn import functional as F

from ftk.config.options import option
from ftk.criterions.base import LossOutput, trunk_and_head
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.registry import register_criterion


@dataclass(kw_only=True)
class RDropConfig(CrossEntropyConfig):
    r_drop_weight: float = option(1.0, "weight of the divergence of the two passes")


@register_criterion("r_drop", config=RDropConfig)
class RDrop(CrossEntropy):
    def __call__(self, model, batch):
        if not model.training:
            return super().__call__(model, batch)
        first, second = self.log_probabilities(model, batch), self.log_probabilities(model, batch)  # [N, V]
        nll = -(first + second).gather(1, batch.targets[:, None]).sum() / 2
        there = F.kl_div(first, second, log_target=True, reduction="sum")
        back = F.kl_div(second, first, log_target=True, reduction="sum")
        divergence = (there + back) / 2
        count = batch.targets.new_full((), len(batch.targets))
        meters = {"nll_loss": (nll.detach(), count), "divergence": (divergence.detach(), count)}
        return LossOutput(nll + self.config.r_drop_weight / 2 * divergence, count, meters)

    def log_probabilities(self, model, batch):
        trunk, head = trunk_and_head(model)
        hidden = trunk(**batch.inputs).flatten(0, 1)[batch.places]  # [N, H]
        return F.log_softmax(head(hidden).float(), dim=-1)
