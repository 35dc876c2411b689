"""Generation with encoder-decoders: as if source and answer were read whole for each token, whatever else goes on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import ftk
from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.decoder import CachedDecoder
from ftk.generation.engine.engine import Engine
from ftk.generation.engine.making import engine_for
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import score
from ftk.generation.engine.source_to_target import SourceToTarget
from ftk.generation.ensemble import Ensemble
from ftk.generation.text import check_vocabulary
from ftk.model_parallel.world import Sizes, World, make_world
from ftk.models import build_model
from ftk.modules.quantization import Quantization, quantize_model
from ftk.tokenizers import load_tokenizer
from tests.distributed import run_ranks
from tests.generation.test_engine import assert_alike
from tests.small_run import save_model

END, START = 1, 0
FRAMING = SourceToTarget([END], [START])
SOURCES = [
    [5, 6, 7, 1],
    [8, 1],
    [9, 10, 11, 12, 13, 14, 9, 10, 11, 12, 13, 14, 1],
    [15, 5, 1],
    [6, 7, 8, 9, 10, 1],
    [13, 1],
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"beam": 3, "nbest": 2},
    {"sampling": True, "top_k": 8},
    {"max_len": 4},
    {"beam": 2, "length_penalty": 0.5},
    {"sampling": True, "nbest": 3},
]
SHAPE = {"vocab_size": 20, "num_layers": 2, "num_decoder_layers": 3, "hidden_size": 16, "head_dim": 6}
SHAPE |= {"num_attention_heads": 2, "num_position_buckets": 4, "max_position_distance": 6}


def random_t5(seed: int = 0, **options: Any):
    """Its distributions are far from flat."""
    torch.manual_seed(seed)
    model = build_model("t5_tiny", **{**SHAPE, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
        model.token_embedding.weight[END] *= 2.0  # or hardly any answer would end
    return model


@pytest.fixture(scope="module")
def model():
    return random_t5()


def request(source, seed=1, **options) -> Request:
    return Request(source, GenerationConfig(**{"max_len": 8, **options}), seed=seed)


def alone(model, one: Request, framing: SourceToTarget = FRAMING):
    ((answer,),) = engine_for(model, framing, [one], 1).answers([one])
    return answer


def slow_logprobs(model, source, written, starts=(START,)) -> torch.Tensor:
    """log P of each token behind what is written, [len(written) + 1, V]."""
    with torch.no_grad():
        decoder_tokens = torch.tensor([[*starts, *written]])
        return model(torch.tensor([source]), decoder_tokens=decoder_tokens)[0, len(starts) - 1 :].log_softmax(-1)


def slow_greedy(model, source, max_len, starts=(START,)):
    tokens: list[int] = []
    while len(tokens) < max_len and tokens[-1:] != [END]:
        tokens.append(int(slow_logprobs(model, source, tokens, starts)[-1].argmax()))
    return tokens


def assert_as_given(model, source, answer, starts=(START,), atol=1e-4) -> None:
    """The log-probabilities of an answer are those of a slow forward pass."""
    written = [*answer.tokens, *[END] * answer.ended]
    logprobs = slow_logprobs(model, source, written, starts)
    expected = [logprobs[step, token].item() for step, token in enumerate(written)]
    assert answer.token_logprobs == pytest.approx(expected, abs=atol)


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_greedy_answers_are_those_of_reading_all_for_each_token(model, batch_size) -> None:
    requests = [request(source) for source in SOURCES]
    found = engine_for(model, FRAMING, requests, batch_size).answers(requests)
    for source, (answer,) in zip(SOURCES, found, strict=True):
        assert [*answer.tokens, *[END] * answer.ended] == slow_greedy(model, source, 8)
        assert_as_given(model, source, answer)
    assert len({tuple(answer.tokens) for (answer,) in found}) > 3


def test_beams_share_the_source_of_their_row(model) -> None:
    requests = [request(source, beam=4, nbest=4) for source in SOURCES]
    for source, (answer,) in zip(SOURCES, engine_for(model, FRAMING, requests, 3).answers(requests), strict=True):
        for one in (answer, *answer.others):
            assert_as_given(model, source, one)


def test_requests_that_come_and_go_are_answered_as_they_would_be_alone(model) -> None:
    """Rows are entered again, and move, with sources of other lengths beside them."""
    requests = [request(source, seed=n, **own) for n, (source, own) in enumerate(zip(SOURCES, OPTIONS, strict=True))]
    engine = Engine(CachedDecoder(model, 3, 4, 1, 8, source_capacity=13), FRAMING)
    numbers = [engine.submit(one) for one in requests[:4]]
    events = [event for _ in range(3) for event in engine.step()]
    numbers += [engine.submit(one) for one in requests[4:]]
    while engine.is_busy:
        events += engine.step()
    answers = {event.request: event.answer for event in events if event.answer is not None}
    for number, one in zip(numbers, requests, strict=True):
        assert_alike(answers[number], alone(model, one))


def test_samples_of_other_sources_have_other_random_numbers() -> None:
    flat = random_t5()
    with torch.no_grad():
        flat.token_embedding.weight.zero_()  # every token is equally likely, whatever the source
    found = {tuple(alone(flat, request(source, sampling=True)).tokens) for source in SOURCES}
    assert len(found) == len(SOURCES)


def test_answers_begin_behind_several_tokens(model) -> None:
    framing = SourceToTarget([END], [START, 7], max_positions=16)
    for source in SOURCES:
        answer = alone(model, request(source), framing)
        assert [*answer.tokens, *[END] * answer.ended] == slow_greedy(model, source, 8, (START, 7))
        assert_as_given(model, source, answer, (START, 7))


def test_given_answers_score_as_a_slow_forward_says(model) -> None:
    given = [[[7, 8, END], [9], [10, 11, 12, 13]], [[5, 6]], [], [[END]], [[3] * 9, [4]], [[2, 2]]]
    found = score(model, FRAMING, [request(source) for source in SOURCES], given)
    for source, own, scored in zip(SOURCES, given, found, strict=True):
        for ids, one in zip(own, scored, strict=True):
            logprobs = slow_logprobs(model, source, ids)
            assert one.logprobs == pytest.approx([logprobs[n, token].item() for n, token in enumerate(ids)], abs=1e-5)


def test_an_ensemble_says_the_mean_probability() -> None:
    """Of members with other depths and sizes; each has keys and values of the source of its own."""
    members = [random_t5(1), random_t5(2, hidden_size=24, num_decoder_layers=1), random_t5(3, num_layers=1)]
    both = Ensemble(members).eval()
    given = [[7, 8, END], [9]]
    scored = score(both, FRAMING, [request(source) for source in SOURCES], [given] * len(SOURCES))
    for source, found in zip(SOURCES, scored, strict=True):

        def mean(ids, source=source):
            each = torch.stack([slow_logprobs(model, source, ids) for model in members])
            logprobs = each.exp().mean(0).log()
            return [logprobs[step, token].item() for step, token in enumerate(ids)]

        for one in (request(source), request(source, beam=3)):
            answer = alone(both, one)
            assert answer.token_logprobs == pytest.approx(mean([*answer.tokens, *[END] * answer.ended]), abs=1e-4)
        for ids, one in zip(given, found, strict=True):
            assert one.logprobs == pytest.approx(mean(ids), abs=1e-5)


def test_an_ensemble_of_models_with_encoders_and_without_is_refused(model) -> None:
    causal = build_model("gpt2_tiny", vocab_size=20, num_layers=1, hidden_size=16, num_attention_heads=2)
    for members in ([model, causal], [causal, model]):
        with pytest.raises(UserError, match="some models of the ensemble are encoder-decoders"):
            Ensemble(members)
    with pytest.raises(UserError, match="models of an ensemble differ in decoder_start_token: None, 3"):
        Ensemble([model, random_t5(decoder_start_token=3)])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_weights_are_read_through_the_same_caches(kind) -> None:
    rounded = copy.deepcopy(random_t5(hidden_size=32, ffn_hidden_size=64, head_dim=16))
    quantize_model(rounded, Quantization(weights=kind, group_size=32 if kind == "int4" else None))
    for source in SOURCES[:3]:
        for one in (request(source), request(source, beam=3)):
            assert_as_given(rounded, source, alone(rounded, one), atol=0.05)  # few rows take another kernel


def test_memory_for_sources_is_made_at_the_start_and_refused_with_numbers(model) -> None:
    decoder = CachedDecoder(model, 4, 4, 1, 8, source_capacity=13)
    assert decoder.num_bytes == 2 * 4 * 3 * 2 * 6 * 4 * (1 + 4 * 8 + 13)  # before anything was read
    engine = Engine(decoder, FRAMING)
    with pytest.raises(UserError, match="the source has 14 tokens, but the engine was made for 13; shorten it"):
        engine.submit(request([5] * 14))
    with pytest.raises(
        UserError, match=r"keys and values of 4 sources with up to 1099511627776 tokens each take .* GB"
    ):
        CachedDecoder(model, 4, 4, 1, 8, source_capacity=2**40)
    with pytest.raises(UserError, match="99 is no id of the model's 20 tokens"):
        engine.submit(request([99]))


@pytest.mark.parametrize(
    ("prompt", "max_len", "message"),
    [
        ([], 4, "the source is empty"),
        ([5] * 9, 4, "the source is 9 tokens long, but the model has 8 positions"),
        ([5], 9, "an answer of up to 9 tokens does not fit the model's 8 positions; lower max_len to 8 or less"),
    ],
)
def test_what_does_not_fit_the_positions_is_refused(prompt, max_len, message) -> None:
    with pytest.raises(UserError, match=message):
        SourceToTarget([END], [START], max_positions=8).check(request(prompt, max_len=max_len))


def test_a_source_without_tokens_is_refused_whatever_the_framing_allows(model) -> None:
    class Careless(SourceToTarget):
        def _check_source(self, source) -> None:
            pass

    framing, requests = Careless([END], [START]), [request([5, END]), request([])]
    with pytest.raises(UserError, match="the source has no tokens; write a text"):
        engine_for(model, framing, requests, 2).answers(requests)
    with pytest.raises(UserError, match="the source has no tokens; write a text"):
        score(model, framing, requests, [[[7]], [[7]]])


def test_no_end_and_no_start_are_refused() -> None:
    for ends, starts, message in (([], [0], "no token that ends a text"), ([1], [], "the decoder starts with")):
        with pytest.raises(UserError, match=message):
            SourceToTarget(ends, starts)


# -- in words -------------------------------------------------------------------------------------------------

PROMPTS = ["the quick brown", "over a", "she reads a book"]


@pytest.fixture(scope="module")
def run(data_bin, tmp_path_factory):
    tokenizer = load_tokenizer(data_bin)
    model = random_t5(3, vocab_size=tokenizer.padded_vocab_size(), decoder_start_token=tokenizer.special.eos)
    folder = tmp_path_factory.mktemp("encoder_decoder") / "run"
    save_model(folder / "checkpoint_1", model, data_bin / "tokenizer", task={"_name": "translation"})
    return folder


def test_a_result_is_the_answer_alone(run) -> None:
    generator = ftk.load_generator(run, max_len=8, beam=3, nbest=2)
    results = generator.generate(PROMPTS)
    for prompt, result in zip(PROMPTS, results, strict=True):
        (answer,) = result.answers
        assert result.prompt == prompt
        assert result.text == answer.text == generator.tokenizer.decode(answer.tokens).strip()
        assert answer.tokens == generator.generate([prompt])[0].answers[0].tokens
        ids = [*generator.tokenizer.encode(prompt), generator.tokenizer.special.eos]
        assert generator.encode(prompt).request.prompt == ids


def test_a_pipeline_is_refused_before_any_weights_are_read(run) -> None:
    with pytest.raises(UserError, match=r"^an encoder-decoder that answers does not go with a pipeline; use `tensor_"):
        ftk.load_generator(run, world=World(0, Sizes(pipeline=2), torch.device("cpu")))


@pytest.mark.parametrize("options", [{}, {"sampling": True, "seed": 4}, {"beam": 2}, {"stop": ["e"]}])
def test_pieces_joined_are_the_text(run, options) -> None:
    generator = ftk.load_generator(run, max_len=12, batch_size=2, **options)
    pieces = list(generator.stream(PROMPTS))
    for number, result in enumerate(generator.generate(PROMPTS)):
        own = [piece for piece in pieces if piece.prompt == number]
        assert "".join(piece.text for piece in own) == result.answers[0].text
        assert own[-1].result.text == result.text == "".join(piece.filled for piece in own)


def test_samples_of_a_split_are_prompts_with_references(run) -> None:
    generator = ftk.load_generator(run, max_len=8)
    source, target = ([*generator.tokenizer.encode(text), generator.framing.ends[0]] for text in PROMPTS[:2])
    sample = {
        "tokens": torch.tensor([*source, 0]).numpy(),
        "lengths": len(source),
        "targets": torch.tensor([*target, 0, 0]).numpy(),
        "loss_mask": torch.tensor([True] * len(target) + [False] * 2).numpy(),
    }
    encoded = generator.encode_sample(sample)
    assert encoded.request.prompt == source
    assert encoded.references == [PROMPTS[1]]
    ((scored,),) = generator.score_encoded([encoded])
    ((other,),) = generator.score_encoded([generator.encode_candidates(PROMPTS[0], [[PROMPTS[1]]], True)])
    assert scored[0].token_logprobs == pytest.approx(other[0].token_logprobs)


def test_a_source_with_a_vocabulary_of_its_own_is_read_as_ids_and_refused_as_text(data_bin) -> None:
    shape = {"vocab_size": 20, "source_vocab_size": 30, "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    torch.manual_seed(4)
    two = build_model("transformer_tiny", **shape, share_embeddings="none", decoder_start_token=START).eval()
    source = [29, 25, 4]
    answer = alone(two, request(source))
    assert_as_given(two, source, answer)
    with pytest.raises(UserError, match="30 is no id of the model's 30 tokens"):
        alone(two, request([30]))
    with pytest.raises(UserError, match="reads a vocabulary of 30 tokens and writes one of 20, and there is one token"):
        check_vocabulary(load_tokenizer(data_bin), two)


def test_longer_answers_than_the_model_has_positions_are_refused_only_where_it_has_a_table(run) -> None:
    generator = ftk.load_generator(run, max_len=700)  # beyond max_positions, of which T5 has no table
    assert generator.framing.max_positions is None


def published_t5(folder: Path) -> Any:
    """A T5 as `transformers` writes it, with its tokenizer, whose answers hold sentinels."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>"]
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator([*PROMPTS, "foxes are jumping over lazy dogs"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5TokenizerFast", **named}))
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=tokenizer.get_vocab_size(), **shape)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        model.shared.weight[3] *= 9.0
        model.shared.weight[4] = -model.shared.weight[3]  # so that one of the two is likely
    model.save_pretrained(folder)
    return tokenizer, model


@pytest.mark.parametrize("beam", [1, 3])
def test_a_published_t5_and_its_tokenizer_answer_as_in_transformers(tmp_path, beam) -> None:
    tokenizer, model = published_t5(tmp_path)
    generator = ftk.load_generator(tmp_path, max_len=10, beam=beam)
    prompts = [*PROMPTS, "the <extra_id_0> brown"]
    found = generator.generate(prompts)
    for prompt, result in zip(prompts, found, strict=True):
        ids = tokenizer.encode(prompt).ids
        (row,) = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False, num_beams=beam).tolist()
        assert result.answers[0].tokens == [token for token in row[1:] if token != 1]
    assert any("<extra_id_" in result.text for result in found)


def found_by(folder: str, sizes: list[int]) -> list[Any]:
    world = make_world(Sizes(*sizes), "cpu") if sizes else World.single()
    answers = []
    for options in ({}, {"beam": 3}):
        generator = ftk.load_generator(folder, world=world, max_len=8, **options)
        answers += [
            [answer.tokens, answer.token_logprobs] for (answer,) in (r.answers for r in generator.generate(PROMPTS))
        ]
    return json.loads(json.dumps(answers))


def test_two_tensor_parallel_ranks_find_what_one_finds(run) -> None:
    expected = found_by(str(run), [])
    for found in run_ranks(found_by, 2, str(run), list(Sizes(tensor=2))):
        for (tokens, logprobs), (wanted, wanted_logprobs) in zip(found, expected, strict=True):
            assert tokens == wanted
            assert logprobs == pytest.approx(wanted_logprobs, abs=2e-5)
