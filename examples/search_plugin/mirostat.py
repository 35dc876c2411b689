"""Mirostat 2.0 (Basu et al. 2021, arXiv:2007.14966): tokens that surprise too much are left out, and what is too much
follows from how surprising the tokens so far have been."""

from dataclasses import dataclass

import torch

from ftk.config.options import option
from ftk.generation.search.sampling import SamplingSearch
from ftk.registry import register_search


@dataclass(kw_only=True)
class MirostatConfig:
    target: float = option(3.0, "surprise of a token to be kept on average", "(0, inf)", unit="bits")
    rate: float = option(0.1, "how fast the limit follows", "(0, 1]")


@register_search("mirostat", config=MirostatConfig)
class Mirostat(SamplingSearch):
    """Temperature and filters of plain sampling act first, if they are given."""

    def __init__(self, config, task, processors, options: MirostatConfig) -> None:
        super().__init__(config, task, processors, options)
        shape = (task.num_prompts, self.width(config, options))
        self.limit = torch.full(shape, 2 * options.target, dtype=torch.float64, device=task.device)  # [N, W], bits

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        probabilities = self.probabilities(scores)  # [N, W, V]
        surprise = -probabilities.log2()
        limit = torch.maximum(self.limit, surprise.amin(-1))  # the likeliest token is never left out
        tokens = self.draw(probabilities.masked_fill(surprise > limit[:, :, None], 0.0))  # [N, W]
        seen = surprise.gather(-1, tokens[:, :, None])[:, :, 0]
        self.limit = self.limit - self.options.rate * (seen - self.options.target)
        return tokens

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows)
        self.limit = self.limit[rows]
