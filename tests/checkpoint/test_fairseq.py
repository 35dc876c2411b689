"""fairseq's checkpoints become ftk's, whatever their form; nothing in them is run.

Files are written by `fairseq_files`, from models of `transformers`, whose names come from fairseq's; none by the code
that is tested.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftk
from ftk.checkpoint import read_config, read_trainer_state, verify
from ftk.checkpoint.convert import convert_from
from ftk.checkpoint.fairseq import FairseqConfig
from ftk.checkpoint.fairseq.files import read
from ftk.checkpoint.fairseq.reader import Fairseq
from ftk.checkpoint.layout import form_of
from ftk.checkpoint.weights import digest, fingerprint, identity_files
from ftk.errors import UserError
from ftk.models import build_model
from ftk_cli.checkpoint import main
from tests.checkpoint.damage import EVIL, assert_refused, halve, made_by
from tests.records import assert_same_tensors

from . import fairseq_files as files
from .fairseq_files import BOTH, LM, ROWS, SOURCE_ROWS, TWINS, write

FORM = Fairseq(FairseqConfig())
BEST = "checkpoint_best.pt"


def inputs(source_rows: int) -> dict[str, Tensor]:
    """Texts of nine tokens and of six, the second one padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, min(source_rows, ROWS), (2, 9), generator=generator)
    tokens[1, 6:] = 1
    return {
        "tokens": tokens,
        "lengths": torch.tensor([9, 6]),
        "decoder_tokens": torch.randint(4, ROWS, (2, 7), generator=generator),
    }


def logits(model: nn.Module, rows: int) -> Tensor:
    """Those of ftk's model, of tokens that are no padding."""
    given = inputs(rows)
    names = getattr(model, "INPUTS", {})
    if "lengths" not in names:
        given["tokens"] = given["decoder_tokens"]
    with torch.no_grad():
        found = model(**{name: value for name, value in given.items() if name in names})
    return found if found.size(1) != 9 else found[given["tokens"] != 1]


def expected(twin: nn.Module, rows: int) -> Tensor:
    """Those of `transformers`."""
    given = inputs(rows)
    tokens, answers = given["tokens"], given["decoder_tokens"]
    with torch.no_grad():
        if hasattr(twin.model if hasattr(twin, "model") else twin, "encoder"):
            # With a cache, FSMT has no causal mask.
            return twin(tokens, attention_mask=tokens != 1, decoder_input_ids=answers, use_cache=False).logits
        if hasattr(twin, "roberta"):
            return twin(tokens, attention_mask=tokens != 1).logits[tokens != 1]
        return twin(answers).logits


def twin_at(path: Path, name: str, more: dict[str, Any] | None = None, **changes: Any) -> Path:
    """fairseq's file of a twin; `more`: other entries; `changes`: of its options, None takes one out."""
    build, options = TWINS[name]
    given = {key: one for key, one in (options | changes).items() if one is not None}
    return write(path, files.from_transformers(build()), given, more=more)


@pytest.mark.parametrize("name", TWINS)
def test_it_computes_what_its_twin_in_transformers_computes(tmp_path: Path, name: str) -> None:
    """Opened as a folder and as a file, and converted."""
    build, options = TWINS[name]
    twin = build()
    source = write(tmp_path / "run" / BEST, files.from_transformers(twin), options)
    rows = SOURCE_ROWS if name == "transformer" else ROWS
    ours = convert_from(FORM, source, tmp_path / "ours")
    assert verify(ours) == []
    assert read_trainer_state(ours)["num_updates"] == 123
    wanted = expected(twin, rows)
    for path in (source, source.parent, ours):
        found = logits(ftk.load_model(path), rows)
        assert (found - wanted).abs().max() < 1e-5 < 0.1 < wanted.abs().max()


OWN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # ftk's model and options, fairseq's options
    "norms first": (
        "transformer",
        {
            **{"norm_first": True, "activation": "gelu_tanh", "scale_embeddings": False, "share_embeddings": "decoder"},
            **{"activation_dropout": 0.2, "layer_drop": 0.3},
        },
        {
            **BOTH,
            **{"relu_dropout": 0.2, "encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3},
            **{"arch": "transformer_wmt_en_de", "encoder_normalize_before": True, "decoder_normalize_before": True},
            **{"activation_fn": "gelu_accurate", "no_scale_embedding": True, "share_decoder_input_output_embed": True},
        },
    ),
    "language model with waves": (
        "opt",
        {"learned_positions": False, "scale_embeddings": True, "tie_embeddings": False, "activation": "gelu_tanh"},
        {**LM, "arch": "transformer_lm_gpt2_small", "activation_fn": "gelu_fast"},
    ),
}
SHAPE = {"vocab_size": ROWS, "hidden_size": 16, "num_layers": 3, "num_attention_heads": 2, "ffn_hidden_size": 40}
SHAPE |= {"max_positions": 64, "dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.0}
OF_BOTH = {"source_vocab_size": SOURCE_ROWS, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 24}
OF_BOTH |= {"num_decoder_layers": 2, "num_decoder_attention_heads": 2, "decoder_ffn_hidden_size": 40}
OF_BOTH |= {"decoder_start_token": 2}


def own(name: str) -> tuple[nn.Module, dict[str, Tensor], dict[str, Any]]:
    family, options, theirs = OWN[name]
    sizes = SHAPE | OF_BOTH if family == "transformer" else SHAPE
    model, state = files.from_ours(family, **sizes, **options)
    return model, state, theirs


@pytest.mark.parametrize("name", OWN)
def test_options_without_a_twin_are_read(tmp_path: Path, name: str) -> None:
    model, state, theirs = own(name)
    opened = ftk.load_model(write(tmp_path / BEST, state, theirs))
    assert opened.config == model.config
    assert_same_tensors(opened.state_dict(), model.state_dict())


def test_a_language_model_with_waves_reads_tokens_that_are_scaled() -> None:
    """fairseq/modules/sinusoidal_positional_embedding.py: positions start behind the padding token's id."""
    size = 16
    model = build_model("opt", **SHAPE, learned_positions=False, scale_embeddings=True).eval()
    assert "position_embedding.weight" not in model.state_dict()
    tokens = torch.arange(4, 11)[None]
    expected = torch.empty(1, 7, size)
    for place in range(7):
        for i in range(size // 2):
            angle = (place + 2) * math.exp(-i * math.log(10000) / (size // 2 - 1))
            expected[0, place, i], expected[0, place, size // 2 + i] = math.sin(angle), math.cos(angle)
    with torch.no_grad():
        expected += math.sqrt(size) * model.token_embedding.weight[tokens]
        assert torch.allclose(model.embed(tokens), expected, atol=1e-6)
        assert model.bfloat16().embed(tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["args", "cfg", "mapping", "omegaconf"])
@pytest.mark.parametrize("name", ["transformer", "bart", "roberta", "language model"])
def test_each_form_of_file_gives_the_same_model(tmp_path: Path, name: str, form: str) -> None:
    build, options = TWINS[name]
    state = files.from_transformers(build())
    one = ftk.load_model(write(tmp_path / "one" / BEST, state, options))
    other = ftk.load_model(write(tmp_path / "other" / BEST, files.in_older_names(state), options, form))
    assert other.config == one.config
    assert_same_tensors(other.state_dict(), one.state_dict())


def test_an_option_is_the_models_and_where_that_has_none_the_tasks(tmp_path: Path) -> None:
    options = TWINS["transformer"][1]
    model = {**options, "_name": "transformer", "max_target_positions": None}
    task = {"_name": "translation", "max_source_positions": 8, "max_target_positions": 9}
    path = twin_at(tmp_path / BEST, "transformer", {"cfg": {"model": model, "task": task}})
    found = read(path).options
    assert (found["max_source_positions"], found["max_target_positions"]) == (64, 9)


def test_copies_for_the_fast_path_of_torch_and_heads_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build, options = TWINS["roberta"]
    state = files.from_transformers(build())
    for name in ("in_proj_weight", "in_proj_bias", "out_proj_weight", "fc1_weight", "fc2_bias"):
        state[f"encoder.sentence_encoder.layers.0.{name}"] = torch.zeros(3, 3)
    state["classification_heads.mnli.dense.weight"] = torch.zeros(3, 3)
    found = ftk.load_model(write(tmp_path / "more" / BEST, state, options))
    assert "its classification heads are left out: mnli" in caplog.text
    plain = ftk.load_model(twin_at(tmp_path / "plain" / BEST, "roberta"))
    assert_same_tensors(found.state_dict(), plain.state_dict())


def test_weights_stay_in_the_type_they_are_stored_in(tmp_path: Path) -> None:
    build, options = TWINS["roberta"]
    source = write(tmp_path / BEST, files.from_transformers(build().half()), options)
    assert {one.dtype for one in FORM.read(source).tensors.described.values()} == {torch.float16}


def test_of_a_folder_the_best_checkpoint_is_opened(tmp_path: Path) -> None:
    source = twin_at(tmp_path / BEST, "roberta")
    shutil.copy(source, tmp_path / "checkpoint_last.pt")
    shutil.copy(source, tmp_path / "checkpoint7.pt")
    assert form_of(tmp_path) == form_of(source) == "fairseq"
    assert identity_files(tmp_path) == identity_files(source) == [source]
    assert digest(source) != digest(tmp_path / "checkpoint7.pt")
    assert fingerprint([source]) == fingerprint([tmp_path / "checkpoint7.pt"])
    other = twin_at(tmp_path / "other" / BEST, "roberta", seed=7)
    assert fingerprint([source]) != fingerprint([other])
    source.unlink()
    assert identity_files(tmp_path) == [tmp_path / "checkpoint_last.pt"]
    (tmp_path / "checkpoint_last.pt").rename(tmp_path / "checkpoint8.pt")
    assert form_of(tmp_path) is None
    with pytest.raises(UserError, match=r"holds several .pt files; name one of them"):
        convert_from(FORM, tmp_path, tmp_path / "ours")
    (tmp_path / "checkpoint7.pt").unlink()
    convert_from(FORM, tmp_path, tmp_path / "ours")


def dictionaries(folder: Path, *sides: tuple[str, int, str]) -> None:
    for language, rows, start in sides:
        files.write_dictionary(folder / f"dict.{language}txt", rows, start)


def test_the_dictionaries_beside_it_are_its_tokenizer(tmp_path: Path) -> None:
    source = twin_at(tmp_path / BEST, "transformer")
    dictionaries(tmp_path, ("de.", SOURCE_ROWS, "wort"), ("en.", ROWS, "word"))
    for path in (tmp_path, convert_from(FORM, source, tmp_path / "ours")):
        tokenizer = ftk.load_tokenizer(path)
        assert tokenizer.encode("word0 word1 x") == [4, 5, 3]
        assert tokenizer.of_source.encode("wort0 wort1 x") == [4, 5, 3]
        assert (tokenizer.special.pad, tokenizer.special.eos) == (1, 2)
        assert ftk.load_generator(path, max_len=3).generate(["wort1 wort2"])
    assert read_config(tmp_path)["task"]["_name"] == "translation"


def test_a_mask_is_the_last_token_of_what_was_trained_with_one(tmp_path: Path) -> None:
    source = twin_at(tmp_path / BEST, "bart")
    dictionaries(tmp_path, ("", ROWS - 1, "word"))
    tokenizer = ftk.load_tokenizer(source)
    assert (tokenizer.special.mask, tokenizer.vocab_size) == (ROWS - 1, ROWS)
    assert read_config(source)["task"]["_name"] == "denoising"


def test_dictionaries_elsewhere_and_their_pieces_are_options(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = twin_at(tmp_path / "run" / BEST, "transformer, all shared", eval_bleu_remove_bpe="@@ ")
    (tmp_path / "data").mkdir()
    pieces = "".join(f"{piece} 9\n" for piece in ["wo@@", "rd", "▁re", *map(str, range(ROWS - 8))])
    (tmp_path / "data" / "dict.en.txt").write_text(pieces)
    (tmp_path / "data" / "dict.de.txt").write_text(pieces)
    command = ["convert", "--from", "fairseq", str(source), "--dictionaries", str(tmp_path / "data")]
    assert main([*command, str(tmp_path / "ours")]) == 0
    tokenizer = ftk.load_tokenizer(tmp_path / "ours")
    assert tokenizer.source is None
    assert tokenizer.decode(tokenizer.encode("wo@@ rd rd")) == "word rd"
    assert "makes 31 tokens, the model has 32; is it the one it was trained with?" in caplog.text
    assert main([*command, str(tmp_path / "words"), "--dictionary-pieces", "words"]) == 0
    assert ftk.load_tokenizer(tmp_path / "words").decode([4, 5]) == "wo@@ rd"
    assert main([*command, str(tmp_path / "sentences"), "--dictionary-pieces", "sentencepiece"]) == 0
    assert ftk.load_tokenizer(tmp_path / "sentences").decode([6, 5, 6]) == "rerd re"


def test_a_dictionary_of_numbers_is_not_taken_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    twin_at(tmp_path / BEST, "roberta")
    dictionaries(tmp_path, ("", ROWS - 1, "1"))
    ftk.load_tokenizer(tmp_path)
    assert "its words are numbers, as those of GPT-2's BPE" in caplog.text


@pytest.mark.parametrize(("more", "start"), [({}, 2), ({"add_bos_token": True}, 0)], ids=["usual", "add_bos_token"])
def test_what_a_language_model_continues_begins_as_in_its_training(
    tmp_path: Path, more: dict[str, Any], start: int
) -> None:
    _, state, options = own("language model with waves")
    source = write(tmp_path / "run" / BEST, state, options | more)
    dictionaries(source.parent, ("", ROWS, "word"))
    assert main(["convert", "--from", "fairseq", str(source), str(tmp_path / "ours")]) == 0
    for path in (source, tmp_path / "ours"):
        generator = ftk.load_generator(path, device="cpu")
        assert generator.encode("word4 word5").request.prompt == [start, *generator.tokenizer.encode("word4 word5")]


def test_a_dictionary_of_another_model_is_refused(tmp_path: Path) -> None:
    twin_at(tmp_path / BEST, "roberta")
    dictionaries(tmp_path, ("", ROWS + 1, "word"))
    with pytest.raises(UserError, match=r"makes 34 tokens, but the model has 32; this is not the dictionary"):
        ftk.load_tokenizer(tmp_path)


def test_an_architecture_of_ones_own_is_named(tmp_path: Path) -> None:
    source = twin_at(tmp_path / BEST, "transformer", arch="my_big")
    with pytest.raises(UserError, match=r"'my_big' is none of those that ftk reads .* `fairseq_model`"):
        ftk.load_model(source)
    convert_from(Fairseq(FairseqConfig(fairseq_model="transformer")), source, tmp_path / "ours")
    twin_at(tmp_path / BEST, "transformer")
    with pytest.raises(UserError, match="is fairseq's transformer; leave out `fairseq_model` bart"):
        convert_from(Fairseq(FairseqConfig(fairseq_model="bart")), source, tmp_path / "ours2")


def test_what_fairseqs_own_classes_hold_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where such a module is there and has a function of that name."""
    own, called = made_by("fairseq", monkeypatch)
    one = ftk.load_model(twin_at(tmp_path / "one" / BEST, "roberta"))
    other = ftk.load_model(twin_at(tmp_path / "other" / BEST, "roberta", own=own))
    assert_same_tensors(other.state_dict(), one.state_dict())
    assert called == []


def with_option(name: str = "transformer", **changes: Any) -> Callable[[Path], None]:
    """Options changed; None takes one out."""
    return lambda source: [twin_at(source / BEST, name, **changes), None][1]


def with_tensor(key: str, change: Callable[[Tensor], Any], name: str = "transformer") -> Callable[[Path], None]:
    """A tensor changed, added or, where the result is None, taken out."""

    def damage(source: Path) -> None:
        state: dict[str, Any] = files.from_transformers(TWINS[name][0]())
        state[key] = change(state.get(key, torch.zeros(2, 2)))
        write(source / BEST, {key: one for key, one in state.items() if one is not None}, TWINS[name][1])

    return damage


def with_entry(**more: Any) -> Callable[[Path], None]:
    return lambda source: [twin_at(source / BEST, "transformer", more), None][1]


KEY = "encoder.layers.1.self_attn.k_proj.weight"
MISTAKES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda p: (p / BEST).unlink(), "holds no .pt file, as fairseq saves"),
    (lambda p: halve(p / BEST), "cannot be read|damaged"),
    (lambda p: (p / BEST).write_bytes(b""), "cannot be read|damaged"),
    (lambda p: torch.save([1], p / BEST), "has no state dict under 'model'; is this a checkpoint of fairseq?"),
    (lambda p: torch.save({"model": {"a": 3}, "args": None}, p / BEST), "'a' of its state dict is no tensor"),
    (lambda p: torch.save({"model": {"a": torch.ones(1)}}, p / BEST), "holds no options, neither under 'args' nor"),
    (with_entry(extra_state=EVIL), "Python objects besides tensors"),
    (with_entry(extra_state=EVIL), "If you trust it, where fairseq is installed, python -c"),
    (with_option(data=EVIL), "Python objects besides tensors"),
    (with_entry(fsdp_metadata={}), "is one of several parts of a model; ftk reads whole ones"),
    (with_option(arch="lstm"), "its architecture 'lstm' is none of those that ftk reads"),
    (with_option(arch="transformer_align"), "'transformer_align' is none of those"),
    (with_option(arch=None), "its architecture None is none of those"),
    (with_option(cross_self_attention=True), "its option cross_self_attention is True, which ftk's models do not have"),
    (with_option(adaptive_softmax_cutoff="8,12"), "adaptive_softmax_cutoff is '8,12'"),
    (with_option(no_token_positional_embeddings=True), "no_token_positional_embeddings is True"),
    (with_option(quant_noise_pq=0.1), "quant_noise_pq is 0.1"),
    (with_option(encoder_layers_to_keep="0,1"), "encoder_layers_to_keep is '0,1'"),
    (with_option(activation_fn="tanh"), "activation_fn is 'tanh'; ftk's models have relu, gelu"),
    (with_option(activation_fn=["relu"]), "activation_fn is ['relu']; ftk's models have"),
    (with_option(encoder_normalize_before=True), "encoder_normalize_before is True, decoder_normalize_before False"),
    (with_option(decoder_embed_dim=32), "encoder_embed_dim is 16, decoder_embed_dim 32; ftk's models have one"),
    (with_option(decoder_output_dim=8), "decoder_output_dim is 8; ftk's models have decoder_embed_dim"),
    (
        with_option(encoder_learned_pos=True, decoder_learned_pos=True),
        "are True, False and False; ftk reads True, True",
    ),
    (with_option(layernorm_embedding=True), "are False, True and False"),
    (with_option("bart", share_all_embeddings=False), "share_all_embeddings is off"),
    (with_option("bart", encoder_normalize_before=True, decoder_normalize_before=True), "are True, True and True"),
    (with_tensor("decoder.embed_positions.weight", lambda one: one[:-4], "bart"), "_positions differ"),
    (
        with_option("roberta", encoder_normalize_before=True),
        "encoder_normalize_before is True; ftk's roberta has False",
    ),
    (with_option("roberta", activation_fn="relu"), "activation_fn is 'relu'; ftk's roberta has 'gelu'"),
    (with_option("roberta", mha_heads_to_keep=2), "mha_heads_to_keep is 2"),
    (with_option("language model", layernorm_embedding=True), "layernorm_embedding is on; ftk's opt has no norm there"),
    (with_option("language model", adaptive_input=True), "adaptive_input is True"),
    (with_option("language model", no_decoder_final_norm=True), "no_decoder_final_norm is True"),
    (with_option("language model", alibi=True), "alibi is True"),
    (with_option("language model", decoder_input_dim=8), "decoder_input_dim and decoder_output_dim are 8 and 16"),
    (with_option(encoder_layers=None), "its options have no encoder_layers"),
    (with_option(encoder_layers="two"), "it must be a whole number"),
    (with_option(encoder_layers=3), "stacks.encoder.layers.2.attention_norm.weight is missing"),
    (with_option(encoder_layers=1), "is not in the model"),
    (with_option(encoder_ffn_embed_dim=25), "is [24, 16]; [25, 16] fits the others"),
    (with_option(encoder_attention_heads=3), "it must divide hidden_size 16"),
    (with_option(share_decoder_input_output_embed=True), "differs from model.decoder.embed_tokens.weight"),
    (with_tensor(KEY, lambda one: None), "'model.encoder.layers.1.self_attn.k_proj.weight' is missing"),
    (with_tensor(KEY, lambda one: one[:-1]), "does not have the shape of such a parameter|fits the others"),
    (with_tensor(KEY, lambda one: one * torch.nan), "holds NaN or infinity"),
    (with_tensor("encoder.layers.1.self_attn.in_proj_weight", lambda one: one[0, 0]), "holds queries, keys and values"),
    (with_tensor("encoder.layers.1.self_attn.in_proj_weight", lambda one: torch.ones(48, 16)), "under two names"),
    (with_tensor("encoder.layers.1.c_attn", lambda one: one), "'model.encoder.layers.1.c_attn' has no place"),
    (with_tensor("encoder.embed_tokens.weight", lambda one: None), "there is no matrix 'encoder.embed_tokens.weight'"),
    (
        with_tensor("decoder.embed_tokens.weight", lambda one: one[0]),
        "there is no matrix 'decoder.embed_tokens.weight'",
    ),
]


@pytest.mark.parametrize(("damage", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_checkpoint_that_is_not_read_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with_option()(tmp_path / "source")
    damage(tmp_path / "source")
    assert_refused(FORM, tmp_path / "source", message)


def test_a_mistake_is_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--from", "fairseq", str(tmp_path / "none.pt"), str(tmp_path / "ours")]) == 2
    assert "no such file or folder" in capfd.readouterr().err
    with_option(arch="my_big")(tmp_path)
    assert main(["convert", "--from", "fairseq", str(tmp_path), str(tmp_path / "ours")]) == 2
    assert "name that one with --fairseq-model" in capfd.readouterr().err
