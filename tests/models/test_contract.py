"""What every family of models keeps, whatever it is: one row of `FAMILIES` for each.

This file runs half of the families (`OF_THIS_FILE`), `test_contract_of_others.py` the other half, so that two
processes share them; to test all families, name both files.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import ftk
from ftk.batch import Batch
from ftk.checkpoint.export import _OF_PACKED_ROWS
from ftk.data.batches.collate import PaddedCollater
from ftk.errors import UserError
from ftk.generation.engine.around import adds_bias
from ftk.model_parallel.blocks import blocks_of, has_two_stacks
from ftk.model_parallel.config import EngineConfig
from ftk.model_parallel.engine import prepare_model
from ftk.model_parallel.tensor_parallel.plan import match_plan
from ftk.models import build_model, model_config
from ftk.models.bart.convert import BartConverter
from ftk.models.bert.convert import BertConverter
from ftk.models.cpm.convert import CPM1Converter
from ftk.models.cpmant.convert import CPMAntConverter
from ftk.models.fairseq.convert import FSMTConverter
from ftk.models.glm.convert import RENAMES as GLM_RENAMES
from ftk.models.glm4.convert import ChatGLM2Converter, GLM4x0414Converter
from ftk.models.glm130b.convert import GLM130B_RENAMES, ChatGLMConverter
from ftk.models.gpt2.convert import GPT2Converter
from ftk.models.gptj.convert import GPTJConverter
from ftk.models.llama.convert import LlamaConverter
from ftk.models.longformer.convert import LongformerConverter
from ftk.models.opt.convert import OPTConverter
from ftk.models.renames import LazyTensors, Rename, renamed
from ftk.models.roberta.convert import RobertaConverter
from ftk.models.t5.convert import T5Converter
from ftk.modules.adapters import LoRAConfig, PrefixConfig
from ftk.modules.adapters.adapt import adapt, adapted_layers, merge
from ftk.modules.adapters.lora import LoRA
from ftk.modules.adapters.prefix import PrefixTuning
from ftk.modules.classifier import is_of_head, replace_head
from ftk.modules.heads import HeadShape
from ftk.registry import TASKS
from ftk_cli.checkpoint import main as checkpoint
from ftk_cli.data import main as data
from ftk_cli.plan import main as plan
from ftk_cli.preprocess import main as preprocess
from ftk_cli.train import main as train
from tests.records import assert_same_tensors, assert_same_weights, losses_of
from tests.small_run import save_model
from tests.tiers import selected_items, slow_but, values_of
from tests.trainer.parallel_jobs import run_records


@dataclass(frozen=True)
class Family:
    """One row.

    Attributes:
        arch: a small architecture.
        renames: of its published form.
        options: of the model, which differ from the architecture's.
        task: what it is trained on here, with its options.
        ask: what stands behind a text that is to be continued.
        refused: layouts that it has not, of `TWO_RANKS` and `FOUR_RANKS`.
        drawn: buffers that are random at the start of a run: were they 0, a rank without them would pass.
    """

    arch: str
    renames: tuple[Rename, ...]
    options: dict[str, Any] = field(default_factory=dict)
    task: str = "causal_lm --document-mask --restart-positions --make-vocab-size-divisible-by 8"
    ask: str = ""
    refused: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()


MASK = " [MASK]"
FAMILIES = {
    "bart": Family(  # norms behind the sums in both stacks, a bias of the logits
        "bart_tiny",
        BartConverter.renames,
        {"logits_bias": True, "num_decoder_attention_heads": 2, "decoder_ffn_hidden_size": 48},
        task="denoising --make-vocab-size-divisible-by 8",
        drawn=("logits_bias.bias",),
    ),
    "bert": Family(  # norms behind the sums, an output layer with parameters of its own
        "bert_tiny",
        BertConverter.renames,
        {"next_sentence": True},
        task="masked_lm --pairs --make-vocab-size-divisible-by 8",
        ask=MASK,
    ),
    "chatglm": Family(  # DeepNorm, two rotations of a head, an output layer of its own
        "chatglm_tiny", ChatGLMConverter.renames, {"tie_embeddings": False}, task="glm_blank", ask=" [gMASK]"
    ),
    "chatglm2": Family("chatglm2_tiny", ChatGLM2Converter.renames),  # GLM-4's network; two key heads
    "cpm1": Family(  # biases of distances, one table for all layers
        "cpm1_tiny",
        CPM1Converter().renames_of({"attn_scale": True}),
        {"tie_embeddings": False},
    ),
    "cpmant": Family(  # a prompt in front of each text, biases of distances
        "cpmant_tiny",
        CPMAntConverter.renames,
        task="causal_lm --restart-positions --make-vocab-size-divisible-by 8",
        refused=("T2_SP", "P2", "T2_P2"),
    ),
    "glm": Family("glm_tiny", GLM_RENAMES, task="glm_blank --document-mask", ask=" [gMASK]"),
    "glm130b": Family(  # gates with biases, places in the text alone
        "glm130b_tiny", GLM130B_RENAMES, task="glm_blank --no-block-positions --document-mask", ask=" [gMASK]"
    ),
    "glm4_0414": Family("glm4_0414_tiny", GLM4x0414Converter.renames),  # two norms around each part, fused gates
    "gpt2": Family("gpt2_tiny", GPT2Converter.renames),
    "gptj": Family("gptj_tiny", GPTJConverter.renames),  # a parallel residual path
    "gptj_tied": Family(  # a bias alone behind the token embedding
        "gptj_tiny", GPTJConverter.renames, {"tie_embeddings": True}
    ),
    "llama": Family("llama_tiny", LlamaConverter.renames),
    "longformer": Family(  # windows to both sides; projections that only global tokens use
        "longformer_tiny",
        LongformerConverter.renames,
        {"attention_window": [8]},
        task="masked_lm --make-vocab-size-divisible-by 8",
        ask=MASK,
    ),
    "mistral": Family("mistral_tiny", LlamaConverter.renames, {"sliding_window": 16}),
    "opt": Family(  # post-norm, and a token embedding that is projected
        "opt_tiny", OPTConverter.renames, {"norm_first": False, "word_embedding_size": 40}
    ),
    "opt_fairseq": Family(  # waves of positions behind scaled tokens, and an output layer of its own
        "opt_tiny",
        OPTConverter.renames,
        {"learned_positions": False, "scale_embeddings": True, "tie_embeddings": False},
    ),
    "qwen2": Family(  # biases of queries, keys and values alone, and a window in one layer
        "qwen2_tiny", LlamaConverter.renames, {"sliding_window": 16, "windowed_layers": [1]}
    ),
    "qwen3": Family("qwen3_tiny", LlamaConverter.renames),  # norms of heads, which together are not as wide as H
    "roberta": Family(  # positions that depend on padding, an output layer of its own
        "roberta_tiny",
        RobertaConverter.renames,
        {"tie_embeddings": False},
        task="masked_lm --mask-whole-words --make-vocab-size-divisible-by 8",
        ask=MASK,
    ),
    "t5": Family(  # an encoder and a decoder, of different depth; biases of positions
        "t5_tiny",
        T5Converter.renames,
        {"gated": True, "tie_embeddings": False, "num_decoder_layers": 3, "activation_dropout": 0.0},
        task="span_corruption --make-vocab-size-divisible-by 8",
    ),
    "t5_tied": Family(  # one matrix of tokens, whose outputs are scaled
        "t5_tiny",
        T5Converter.renames,
        {"activation_dropout": 0.0},
        task="span_corruption --make-vocab-size-divisible-by 8",
    ),
    "transformer": Family(  # waves of positions, three matrices of tokens, a narrower decoder
        "transformer_tiny",
        FSMTConverter.renames,
        {"share_embeddings": "none", "norm_first": True, "decoder_ffn_hidden_size": 48},
        task="denoising --make-vocab-size-divisible-by 8",
    ),
}

# Two micro-batches of four samples an update, of one data rank or of two.
FLAGS = (
    "--device cpu --num-layers 2 --max-positions 64 --seq-length 48 --dropout 0 --attention-dropout 0 "
    "--embedding-dropout 0 --lr 1e-3 --lr-scheduler constant --log-interval 1 --log-format json --batch-size 4 "
    "--max-valid-samples 8"
)
TWO_RANKS = {
    "T2": "--update-freq 2 --tensor-parallel-size 2",
    "T2_SP": "--update-freq 2 --tensor-parallel-size 2 --sequence-parallel",
    "P2": "--update-freq 2 --pipeline-parallel-size 2",
    "FSDP2": "--data-parallel-shard-size 2",
}
FOUR_RANKS = {"T2_P2": "--update-freq 2 --tensor-parallel-size 2 --pipeline-parallel-size 2"}
# T2 alone only where there is no T2_SP: that one and T2_P2 cut the same tensors, with a shared sequence and without.
EACH = [
    (name, layout)
    for name, row in FAMILIES.items()
    for layout in (*TWO_RANKS, *FOUR_RANKS)
    if layout != "T2" or "T2_SP" in row.refused
]
# Before each commit: tensors cut, with the sequence where it can be, of families whose tensors are cut like no
# other's; layers cut, of those whose layers and whose inputs are no other's; shards of one family of each kind.
LIKE_OTHERS = ("chatglm", "chatglm2", "gptj_tied", "mistral", "opt_fairseq", "qwen2", "qwen3", "t5_tied")
OWN_LAYERS = [name for name in FAMILIES if name not in LIKE_OTHERS]
EXPORTED = ("gpt2", "llama")  # before each commit; test_export.py has glm, and test_encoder_decoder.py two stacks
NORM_ON_RESIDUAL = ("bart", "bert", "chatglm", "glm130b", "glm4_0414", "longformer", "opt", "roberta")
CUT_LIKE_OTHERS = ("bert", "glm130b", "glm4_0414", "gptj")  # as roberta, glm, llama and gpt2
TENSORS_LIKE_OTHERS = ("gptj_tied", "mistral", "opt_fairseq", "t5_tied")
QUICK = {(name, "T2_SP") for name in FAMILIES if name not in TENSORS_LIKE_OTHERS}
QUICK |= {(name, "P2") for name in OWN_LAYERS if name not in CUT_LIKE_OTHERS}
QUICK |= {(name, "T2") for name, row in FAMILIES.items() if "T2_SP" in row.refused}
QUICK |= {(name, "FSDP2") for name in ("bart", "glm", "t5")}
OF_THIS_FILE = [*OWN_LAYERS, *LIKE_OTHERS][::2]  # of those with most runs, and of the others


def model_flags(row: Family) -> str:
    """Its options as flags."""
    flags = []
    for name, value in row.options.items():
        flag = name.replace("_", "-")
        words = ",".join(map(str, value)) if isinstance(value, list) else value
        flags.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {words}")
    return " ".join(flags)


@pytest.fixture(params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def english(test_data, tmp_path_factory) -> Path:
    """The first paragraphs of the English test data."""
    folder = tmp_path_factory.mktemp("english")
    for split, count in (("train", 400), ("valid", 20)):
        with open(test_data / "english" / f"{split}.txt", encoding="utf-8") as file:
            (folder / split).write_text("".join(islice(file, count)), encoding="utf-8")
    flags = f"--trainpref {folder}/train --validpref {folder}/valid --tokenizer sentencepiece --vocab-size 600"
    assert preprocess([*shlex.split(flags), "--destdir", str(folder / "data-bin")]) == 0
    return folder / "data-bin"


def start_of(row: Family, english: Path, folder: Path) -> str:
    """Flags of a start from weights of which `drawn` are random; none where nothing is drawn."""
    if not row.drawn:
        return ""
    tokenizer = TASKS.get(row.task.split()[0]).target.add_special_tokens(ftk.load_tokenizer(english))
    sizes = {"vocab_size": tokenizer.padded_vocab_size(8), "num_layers": 2, "max_positions": 64}
    torch.manual_seed(1)  # else the start depends on the tests before, and of one in 25 the losses do not fall at once
    model = build_model(row.arch, **sizes, **row.options)
    for name in row.drawn:
        torch.nn.init.normal_(model.get_buffer(name))
    save_model(folder, model, english / "tokenizer")
    return f"--finetune-from {folder}"


@pytest.fixture(scope="module")
def runs(english, tmp_path_factory, request) -> Path:
    """The runs that the selected tests look at, all of one number of ranks in one start."""
    folder = tmp_path_factory.mktemp("runs")
    tests = selected_items(request)
    names = sorted(values_of(request, "name"))
    starts = {name: start_of(FAMILIES[name], english, folder / name / "start") for name in names}

    def flags_of(name: str, flags: str) -> str:
        row = FAMILIES[name]
        return f"{FLAGS} --task {row.task} --arch {row.arch} {model_flags(row)} {starts[name]} {flags}"

    asked = {(given["name"], given.get("layout")) for given in (test.callspec.params for test in tests)}
    wanted = [(name, run) for name, run in EACH if (name, run) in asked and run not in FAMILIES[name].refused]
    layouts = {**TWO_RANKS, **FOUR_RANKS}
    runs = [
        (f"{name}/{run}", 4 if run in FOUR_RANKS else 2, flags_of(name, f"{layouts[run]} --max-update 3"))
        for name, run in wanted
    ]
    alone = [("one", 5)]
    if any(test.originalname == test_a_stopped_run_goes_on_bit_for_bit.__name__ for test in tests):
        alone += [("stopped", 2), ("stopped", 5)]
    runs += [
        (f"{name}/{run}", 1, flags_of(name, f"--update-freq 2 --max-update {updates}"))
        for name in names
        for run, updates in alone
    ]
    run_records(english, folder, runs)
    return folder


@pytest.mark.parametrize(("name", "layout"), slow_but(QUICK, EACH))
def test_losses_are_those_of_one_process(runs, english, name, layout, capsys) -> None:
    if layout in FAMILIES[name].refused:
        flags = shlex.split(f"--task {FAMILIES[name].task} --arch {FAMILIES[name].arch} {FLAGS}")
        more = shlex.split({**TWO_RANKS, **FOUR_RANKS}[layout])
        assert (
            train([str(english), *flags, *more, "--dry-run", "--max-update", "1", "--save-dir", str(runs / "refused")])
            == 2
        )
        option = "sequence-parallel" if "SP" in layout else "pipeline-parallel-size"
        assert f"--{option}: CPMAnt puts tokens in front of each text; use --tensor" in capsys.readouterr().err
        return
    found, expected = losses_of(runs / name / layout), losses_of(runs / name / "one")[:3]
    assert len(found) == 3
    assert all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, expected, strict=True))


def test_a_stopped_run_goes_on_bit_for_bit(runs, name) -> None:
    assert_same_weights(runs / name / "stopped" / "checkpoint_5", runs / name / "one" / "checkpoint_5")
    _, early, *later = losses_of(runs / name / "one")  # of the first one no weight has moved far
    assert min(later) < early


def test_the_map_of_names_covers_all_parameters_and_has_an_inverse(name) -> None:
    model = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options)
    ours = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    renames = FAMILIES[name].renames
    theirs = renamed(LazyTensors.of(ours), renames, model.config, back=True).all()
    again = renamed(LazyTensors.of(theirs), renames, model.config).all()
    assert_same_tensors(again, ours)


def test_it_says_whether_it_adds_a_bias_to_the_scores(name) -> None:
    model = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options)
    shape = next(module.key_shape for module in model.modules() if hasattr(module, "key_shape"))
    assert adds_bias(model, torch.empty(shape)) == model.ADDS_BIAS


@pytest.mark.parametrize("name", ["chatglm2"])
def test_more_tensor_ranks_than_key_heads_are_refused(name) -> None:
    with torch.device("meta"):
        model = build_model("glm4_9b", num_layers=1)
    assert match_plan(model, model.tensor_parallel_plan, 2)
    message = r"qkv has 2 key heads, which 4 tensor parallel processes do not divide \(1, 2 would\)"
    with pytest.raises(UserError, match=message):
        match_plan(model, model.tensor_parallel_plan, 4)


def inputs(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(3))
    return {name: tokens for name in ("tokens", "decoder_tokens") if name in model.INPUTS}


def test_a_batch_that_is_made_longer_has_the_same_hidden_states_and_gradients(name) -> None:
    model = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options).eval().double()
    batch = Batch(inputs(model), targets=torch.arange(48), places=torch.arange(48))
    found = []
    for each in (batch, PaddedCollater(lambda samples: samples, 16, model.INPUTS, 64)(batch)):
        assert each.placed_tokens.size(1) == 24 + 8 * len(found)
        model.zero_grad()
        hidden = model.hidden_states(**each.inputs).flatten(0, 1)[each.places]
        hidden.square().sum().backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        found.append({"hidden": hidden.detach(), **gradients})
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_its_residual_path_has_the_type_of_matrix_products_where_that_is_allowed(name) -> None:
    model = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options).eval()
    engine, types = EngineConfig(residual_precision="same"), []
    if name in NORM_ON_RESIDUAL:
        with pytest.raises(UserError, match="`residual_precision` same is for models whose layers have their norms in"):
            prepare_model(model, engine, torch.device("cpu"))
        return
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.hidden_states(**inputs(model))
        prepare_model(model, engine, torch.device("cpu"))
        for _, block in blocks_of(model):
            block.register_forward_hook(lambda block, inputs, output: types.append(output.dtype))
        found = model.hidden_states(**inputs(model))
    assert set(types) == {torch.bfloat16}
    assert (found - expected).norm() / expected.norm() < 0.02


@torch.no_grad()
def test_an_adapter_changes_nothing_at_its_start_is_shared_by_ranks_and_merges(name) -> None:
    model = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options).eval()
    expected = model(**inputs(model))
    adapt(model, LoRA(LoRAConfig()))
    assert torch.equal(model(**inputs(model)), expected)
    styles = match_plan(model, model.tensor_parallel_plan, 2)
    assert {f"{layer}.{part}" for layer in adapted_layers(model) for part in ("lora_A", "lora_B")} <= styles.keys()
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B.weight, std=0.02)
    changed = model(**inputs(model))
    assert (changed - expected).abs().max() > 1e-3
    merge(model)
    torch.testing.assert_close(model(**inputs(model)), changed, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_head_takes_the_place_of_its_output_layer_and_leaves_its_body_as_it_is(name) -> None:
    model: Any = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hidden = model.hidden_states(**inputs(model))
    replace_head(model, HeadShape(num_outputs=3), seed=1)
    assert torch.equal(model.hidden_states(**inputs(model)), hidden)
    own = model.classifier
    assert torch.equal(model(**inputs(model)), own.output(torch.tanh(own.dense(hidden))))
    after = model.state_dict()
    assert {key.partition(".")[0] for key in before.keys() - after.keys()} == {*model.replaced}
    assert all(torch.equal(after[key], before[key]) for key in before.keys() & after.keys())
    assert set(after.keys() - before.keys()) == set(filter(is_of_head, after))
    styles = match_plan(model, model.tensor_parallel_plan, 2)
    assert {"classifier", "classifier.dense", "classifier.dropout", "classifier.output"} <= styles.keys()
    with pytest.raises(UserError, match="has a classifier already"):
        replace_head(model, HeadShape(num_outputs=3))


@torch.no_grad()
def test_a_prefix_is_seen_in_all_layers_and_shared_by_ranks(name) -> None:
    model = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options).eval()
    adapter = PrefixTuning(PrefixConfig(num_virtual_tokens=3))
    if name == "longformer":
        with pytest.raises(UserError, match="GlobalAttention takes no prefix"):
            adapt(model, adapter)
        return
    expected = model(**inputs(model))
    adapt(model, adapter)
    layers = adapter.places(model)
    assert {f"{layer}.prefix.embedding" for layer in layers} <= match_plan(model, model.tensor_parallel_plan, 2).keys()
    for layer in layers.values():
        before = model(**inputs(model))
        assert (before - expected).abs().max() > 1e-4
        layer.prefix.embedding.weight.zero_()  # is seen, too, but differently
        assert (model(**inputs(model)) - before).abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("name", ["bart", "bert", "longformer", "roberta", "t5", "transformer"])
def test_a_row_without_tokens_is_read_as_one_of_one_token(name) -> None:
    model = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options).eval()
    more = {"global_mask": torch.eye(2, 24, dtype=torch.int64)} if "global_mask" in model.INPUTS else {}
    expected, found = (model(**inputs(model), **more, lengths=torch.tensor([24, length])) for length in (1, 0))
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bart", "bert", "longformer", "t5"])
def test_the_inputs_of_both_kinds_may_be_given_by_their_place(name) -> None:
    model = build_model(FAMILIES[name].arch, vocab_size=96, **FAMILIES[name].options).eval()
    given = {**inputs(model), "lengths": torch.tensor([24, 7])}
    assert torch.equal(model(*given.values()), model(**given))


@pytest.mark.parametrize("name", slow_but(OWN_LAYERS, FAMILIES))
def test_rounded_weights_answer_nearly_the_same(runs, name, tmp_path) -> None:
    run = str(runs / name / "one")
    assert checkpoint(["export", run, str(tmp_path / "int8"), "--quantize", "int8"]) == 0
    with torch.no_grad():
        expected, found = (model(**inputs(model)) for model in map(ftk.load_model, (run, tmp_path / "int8")))
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", slow_but(EXPORTED, FAMILIES))
def test_an_exported_program_gives_the_same_logits(runs, name, tmp_path) -> None:
    run, file = str(runs / name / "one"), tmp_path / "model.pt2"
    assert checkpoint(["export", run, str(file), "--format", "export"]) == 0
    model, program = ftk.load_model(run), torch.export.load(file).module()
    given = {"tokens": inputs(model)["tokens"]}
    for key, axes in islice(model.INPUTS.items(), 1, None):
        if key not in _OF_PACKED_ROWS:  # a row of a program is one text
            shape = [{"B": 2, "S": 24, "T": 24, "2": 2}[axis] for axis in axes.split()]
            numbers = torch.arange(24) % (model.config.type_vocab_size if key == "token_types" else 24)
            given[key] = numbers.expand(shape) if "T" in axes else torch.full(shape, 5)
    with torch.no_grad():
        torch.testing.assert_close(program(*given.values()), model(**given), rtol=1e-4, atol=1e-4)


def test_a_plan_of_its_layout_on_a_cluster(name, capsys) -> None:
    arch = FAMILIES[name].arch
    with torch.device("meta"):
        model = build_model(arch)
    assert plan(["--arch", arch, "--gpus", "8", "--cluster", "a100-40g", "--global-batch-size", "64"]) == 0
    count, config = sum(parameter.numel() for parameter in model.parameters()), model_config(arch)[1]
    layers = f"{config.num_layers} + {config.decoder_layers}" if has_two_stacks(model) else config.num_layers
    assert f"{count:,} parameters; {layers} layers" in capsys.readouterr().out


def test_its_samples_are_shown(english, name, capsys) -> None:
    flags = shlex.split(f"--task {FAMILIES[name].task.split()[0]} --seq-length 16 --width 500")
    assert data(["show", str(english), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    if name == "gpt2":
        read, learned = lines[1].split()[1:], lines[2].split()[1:]
        assert lines[0].endswith(": 16 tokens, 16 targets")
        assert learned[:-1] == read[1:]
    assert data(["show", str(english), *flags, "--index", "1000000"]) == 2
    assert "1000000" in capsys.readouterr().err


def test_a_trained_checkpoint_answers_alone_and_among_others_alike(runs, name) -> None:
    options = {} if FAMILIES[name].ask == MASK else {"max_len": 8}  # there is one token for each mask
    generator = ftk.load_generator(runs / name / "one", **options)
    prompts = [f"It was {word}{FAMILIES[name].ask}" for word in ("a dark night", "the", "so late that nobody came")]
    together = [result.text for result in generator.generate(prompts)]
    assert together == [generator.generate([prompt])[0].text for prompt in prompts]
    if not has_two_stacks(generator.model):  # whose answers do not go on with the source
        assert all(text.startswith("It was ") for text in together)


@pytest.mark.parametrize("name", ["chatglm"])
def test_a_chatglm_that_was_trained_here_tells_its_own_code_which_tokens_frame_answers(runs, name, tmp_path) -> None:
    run = runs / name / "one"
    assert checkpoint(["convert", "--to", "hf", str(run), str(tmp_path / "hf")]) == 0
    found, special = json.loads((tmp_path / "hf" / "config.json").read_text()), ftk.load_tokenizer(run).special
    roles = {"bos": special.sop, "eos": special.eop, "mask": special.mask, "gmask": special.gmask}
    assert {role: found[f"{role}_token_id"] for role in roles} == roles
