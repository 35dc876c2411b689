"""Beam sampling: the candidates of a beam are drawn, not the best ones taken."""

from __future__ import annotations

from torch import Tensor

from ftk.generation.config import GenerationConfig
from ftk.generation.search.beam import BeamSearch, Candidates
from ftk.generation.search.random import draw_without_replacement, token_probabilities
from ftk.generation.search.ranking import stable_topk
from ftk.registry import register_search


@register_search("beam_sampling")
class BeamSamplingSearch(BeamSearch):
    """Stochastic beams, as beam sampling in transformers.

    Temperature and filters act on the next tokens of each hypothesis, as the last of the processors: what they
    leave is what is added up, and what ranks. Of all continuations of a prompt, those of all its hypotheses
    together, as many as beam search looks at are drawn without replacement, with probabilities proportional to
    exp(score). From there on it is beam search.
    """

    @staticmethod
    def draws(config: GenerationConfig, num_ends: int) -> int:
        return (1 + num_ends) * config.beam

    def candidates(self, scores: Tensor) -> Candidates:
        assert self.task.uniforms is not None, "sampling needs random numbers"
        logprobs = token_probabilities(scores, **self.config.filters()).log().float()
        totals = self.beam.totals(logprobs)  # [N, W, V]
        weights = totals.flatten(1).double().softmax(-1).nan_to_num(0.0)  # NaN: all hypotheses of a prompt are dead
        count = min(self.task.uniforms.size(-1), weights.size(1))
        uniforms = self.task.uniforms[:, self.step, :count]  # [N, C]
        indices, real = draw_without_replacement(weights.view_as(totals), uniforms)
        totals = totals.flatten(1)
        found, order = stable_topk(totals.gather(1, indices).masked_fill(~real, float("-inf")), indices.size(1))
        indices = indices.gather(1, order)
        num_tokens = scores.size(-1)
        return Candidates(found, indices // num_tokens, indices % num_tokens)
