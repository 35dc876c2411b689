"""A hook: Gaussian noise on the gradients, less from update to update (Neelakantan et al. 2015, arXiv:1511.06807)."""

from dataclasses import dataclass

import torch

from ftk.config.options import option
from ftk.registry import register_hook
from ftk.trainer import Hook, StepInfo


@dataclass(kw_only=True)
class GradientNoiseConfig:
    eta: float = option(0.01, "variance of the noise in the first update")
    gamma: float = option(0.55, "after n updates the variance is eta / (1 + n)^gamma")


@register_hook("gradient_noise", config=GradientNoiseConfig)
class GradientNoise(Hook):
    def __init__(self, config: GradientNoiseConfig) -> None:
        self.config = config

    def after_backward(self, step: StepInfo) -> None:
        # torch's generator is seeded for each update, so that a run that is continued draws the same noise
        std = (self.config.eta / (1 + step.num_updates) ** self.config.gamma) ** 0.5
        for parameter in step.model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=std)
