"""An ensemble says the mean of its members' probabilities, in generation and in scoring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.generation.ensemble import Ensemble
from ftk.models import build_model
from ftk.tasks.causal_lm.task import CausalLMTask
from ftk.tasks.glm_blank import BlankGenerator
from tests.generation import slow
from tests.generation.slow import SPECIAL, small_model
from tests.tasks.glm_blank.infill.test_orders import CONTEXTS


def members():
    return [small_model(seed=1), small_model(seed=2, hidden_size=24, num_layers=3), small_model(seed=5, num_layers=1)]


def mean_logprobs(models, *arguments):
    own = torch.stack([slow.next_logprobs(model, *arguments) for model in models])
    return own.exp().mean(0).log()


@pytest.mark.parametrize("options", [{}, {"beam": 4, "nbest": 4}])
def test_answers_have_the_mean_probability(options):
    models = members()
    generator = BlankGenerator(Ensemble(models), SPECIAL, max_len=5, **options)
    for context, answers in zip(CONTEXTS, generator.fill_ids(CONTEXTS), strict=True):
        if not options:
            expected = slow.greedy(models, context, 5, logprobs=mean_logprobs)
            assert [answer.tokens for answer in answers] == [tokens for tokens, _ in expected]
        for one, step, token, read in slow.steps_of(context, answers):
            assert one.token_logprobs[step] == pytest.approx(float(mean_logprobs(models, *read)[token]), abs=3e-5)


def test_scores_and_generation_agree():
    generator = BlankGenerator(Ensemble(members()), SPECIAL, max_len=5, beam=3)
    (answers,) = generator.fill_ids(CONTEXTS[:1])
    given = [answer.tokens + [SPECIAL.eop] * answer.ended for answer in answers]
    (((*scored,),),) = generator.score(CONTEXTS[:1], [[given]], end=False)
    for one, answer in zip(scored, answers, strict=True):
        assert one.token_logprobs == pytest.approx(answer.token_logprobs, abs=3e-5)


def test_one_model_alone_is_itself():
    model = small_model(seed=1)
    alone = BlankGenerator(model, SPECIAL, max_len=5).fill_ids(CONTEXTS)
    twice = BlankGenerator(Ensemble([model, model]), SPECIAL, max_len=5).fill_ids(CONTEXTS)
    assert [[a.tokens for a in one] for one in twice] == [[a.tokens for a in one] for one in alone]


def test_the_shortest_positions_count_and_what_does_not_fit_is_refused():
    assert Ensemble([small_model(), small_model(max_positions=32)]).config.max_positions == 32
    with pytest.raises(UserError, match="differ in vocab_size: 20, 21"):
        Ensemble([small_model(), small_model(vocab_size=21)])
    with pytest.raises(UserError, match="differ in num_attention_heads: 2, 4"):
        Ensemble([small_model(), small_model(num_attention_heads=4)])
    with pytest.raises(UserError, match="differ in prompt_length: 4, 3"):
        Ensemble([spread("cpmant_tiny", 0), spread("cpmant_tiny", 0, prompt_length=3)])
    with pytest.raises(UserError, match="differ in block_positions"):
        BlankGenerator(Ensemble([small_model(), small_model(block_positions=False)]), SPECIAL)


def test_members_keep_their_mode():
    models = members()
    BlankGenerator(Ensemble(models), SPECIAL, max_len=2).fill_ids(CONTEXTS[:1])
    assert not any(model.training for model in models)


def spread(arch, seed, **options):
    shape = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "max_positions": 64}
    model = build_model(arch, **{**shape, "num_layers": 2, **options}).eval()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        # One sees all, one three tokens, one five in its second layer; texts are longer.
        ("qwen2_tiny", [{}, {"sliding_window": 3}, {"sliding_window": 5, "windowed_layers": [1]}]),
        ("opt_tiny", [{"word_embedding_size": 12}, {"word_embedding_size": 20, "num_layers": 1}]),
        ("cpmant_tiny", [{}, {"num_layers": 1}]),  # rows in front of a prompt, all of which all tokens see
    ],
)
def test_members_may_differ_in_windows_widths_and_depth(arch, options):
    models = [spread(arch, seed, **own) for seed, own in enumerate(options)]
    both = Ensemble(models)

    def mean(prompt, written):  # log P of what is written, [len(written), V]
        tokens = torch.tensor([[*prompt, *written]])
        seen = {"context_length": torch.tensor([len(prompt)])} if "context_length" in models[0].INPUTS else {}
        with torch.no_grad():
            each = [model(tokens, **seen)[0, len(prompt) - 1 : -1].log_softmax(-1) for model in models]
        return torch.stack(each).exp().mean(0).log()

    tokenizer = SimpleNamespace(special=SimpleNamespace(text_end=1), prompt_prefix=[])
    framing = CausalLMTask.framing(tokenizer, both.config)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [13, 14], [4, 5, 4, 5, 4]]
    requests = [Request(prompt, GenerationConfig(max_len=9, beam=beam)) for prompt in prompts for beam in (1, 3)]
    engine = engine_for(both, framing, requests, batch_size=4)
    for request, (answer,) in zip(requests, engine.answers(requests), strict=True):
        written = [*answer.tokens, *[1] * answer.ended]
        expected = mean(request.prompt, written)
        if request.options.beam == 1:
            assert written == expected.argmax(-1).tolist()
        found = expected.gather(1, torch.tensor(written)[:, None])[:, 0].tolist()
        assert answer.token_logprobs == pytest.approx(found, abs=1e-4)
    given = [[7, 8, 9, 10], [2, 3]]
    for prompt, scored in zip(prompts, score(both, framing, requests[::2], [given] * 3), strict=True):
        for ids, one in zip(given, scored, strict=True):
            found = mean(prompt, ids).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
            assert one.logprobs == pytest.approx(found, abs=1e-4)
