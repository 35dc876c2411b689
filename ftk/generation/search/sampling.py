"""Sampling: tokens drawn at random."""

from __future__ import annotations

from torch import Tensor

from ftk.generation.config import GenerationConfig
from ftk.generation.search.independent import IndependentSearch
from ftk.generation.search.random import draw, token_probabilities
from ftk.registry import register_search


@register_search("sampling")
class SamplingSearch(IndependentSearch):
    """Tokens drawn from the distribution of `token_probabilities`, with the prompt's own random numbers.

    `nbest` samples are drawn, each by itself; the first is the same however many there are.
    """

    joins = True

    @staticmethod
    def draws(config: GenerationConfig, num_ends: int) -> int:
        return config.nbest

    def choose(self, scores: Tensor) -> Tensor:
        return self.draw(self.probabilities(scores))

    def probabilities(self, scores: Tensor) -> Tensor:
        """What is drawn from: processed scores float32 [N, W, V] -> float64 [N, W, V]."""
        return token_probabilities(scores, **self.config.filters())

    def draw(self, probabilities: Tensor) -> Tensor:
        """One token of each hypothesis: [N, W, V] -> int64 [N, W]."""
        assert self.task.uniforms is not None, "sampling needs random numbers"
        uniforms, place = self.task.uniforms, self.place()  # [N, max_len, W]
        if isinstance(place, int):
            uniforms = uniforms[:, place]
        else:
            uniforms = uniforms.gather(1, place[:, None, None].expand(-1, 1, uniforms.size(2)))[:, 0]
        return draw(probabilities.flatten(0, 1), uniforms.flatten()).unflatten(0, tuple(uniforms.shape))
