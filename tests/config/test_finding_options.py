"""Finding an option: help in three depths, and names of other programs."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from ftk.builtins import BUILTIN_MODULES, FOREIGN_NAMES
from ftk.config import compose
from ftk.config.foreign import foreign_rows, in_keywords, names_for
from ftk.config.help import SCREEN
from ftk.config.root import Chosen
from ftk.errors import UserError, with_flags
from ftk.registry import ARCHITECTURES
from ftk.trainer.config import TrainConfig
from ftk_cli.inference_options import with_options_of_task
from ftk_cli.validate import ValidateRoot
from tests.config.all_options import ROOTS, flags_of, options_of_root

FOREIGN = foreign_rows()
ROOT = Path(__file__).resolve().parents[2]


COMMANDS = {
    "ftk-train": ROOTS["train TrainConfig"],
    "ftk-preprocess": ROOTS["preprocess PreprocessConfig"],
    "ftk-generate": ROOTS["generate GenerateRoot"],
    "ftk-evaluate": ROOTS["evaluate EvaluateRoot"],
    "ftk-serve": ROOTS["serve ServeRoot"],
    "ftk-plan": ROOTS["plan PlanRoot"],
}


def help_of(command: str, *arguments: str, capsys: Any) -> str:
    with pytest.raises(SystemExit):
        importlib.import_module(f"ftk_cli.{command}").main(arguments)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        *(["train", "--arch", name, "--help"] for name in ARCHITECTURES.names()),
        ["train", "--help"],
        ["train", "--optimizer", "muon", "--lr-scheduler", "one_cycle", "--dataset", "raw", "-h"],
        ["generate", "--help"],
        ["interactive", "--help"],
        ["serve", "--help"],
        ["preprocess", "--help"],
        ["plan", "--help"],
        ["validate", "--help"],
        ["report", "--help"],
        ["env", "--help"],
        ["data", "show", "--help"],
        ["data", "stats", "--help"],
        *(["checkpoint", name, "--help"] for name in ("inspect", "verify", "average", "export", "convert")),
    ],
    ids=" ".join,
)
def test_help_fits_two_screens(arguments, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(*arguments, capsys=capsys)
    assert text.startswith("usage: ftk-")
    assert text.count("\n") <= SCREEN


def test_help_shows_what_is_daily_and_all_shows_the_rest(capsys):
    daily = help_of("train", "--help", capsys=capsys)
    for flag in (
        "--lr",
        "--batch-size",
        "--seq-length",
        "--max-update",
        "--precision",
        "--save-dir",
        "--warmup-updates",
    ):
        assert re.search(rf"^  {flag} ", daily, flags=re.MULTILINE)
    assert re.search(r"^  DATA ", daily, flags=re.MULTILINE)
    assert "--fp16-init-scale" not in daily
    assert "--seq-length N" in daily
    assert "default: 512" not in daily  # it depends on the task
    whole = help_of("train", "--arch", "glm_large", "--seq-length", "64", "--help", "all", capsys=capsys)
    shown = set(re.findall(r"--[a-z0-9-]+", " ".join(whole.split())))
    config = compose(TrainConfig, "ftk-train", "", ["d", "--arch", "glm_large", "--max-update", "1"])
    parts = [part.config if isinstance(part, Chosen) else part for part in vars(config).values()]
    for section in (part for part in parts if part is not None):  # no adapter has no options
        for field in dataclasses.fields(section):
            if not field.metadata.get("derived") and not field.metadata.get("positional"):
                assert field.metadata.get("flag", f"--{field.name.replace('_', '-')}") in shown
    whole = " ".join(whole.split())
    # The architecture's default, not the dataclass's.
    assert "transformer layers (from 1 to 10,000; default: 24)" in whole
    assert "width of the residual path (from 1 to 1,000,000; default: 1024)" in whole
    assert "the architecture's default, else 8" in whole


def test_the_first_clause_of_each_help_text_can_stand_alone():
    for root in ROOTS.values():
        for option in (option for option in options_of_root(root) if option.daily or option.positional):
            brief = option.help.split(";")[0]
            assert len(re.findall(r"[(\[]", brief)) == len(re.findall(r"[)\]]", brief)), option.help


@pytest.mark.parametrize(
    ("command", "shown", "missing"),
    [
        ("preprocess", "exactly one (required without --vocab-size)", "exactly one (required)"),
        ("plan", "--global-batch-size N", "--lr"),
        ("serve", "--adapters NAME=FOLDER", "--max-body"),
        ("train", "or several to blend: A,B (required)", "shards"),
        ("train --task sft", "or several of these to blend: A,B (required)", "dev or validation"),
    ],
)
def test_daily_help_asks_for_no_more_than_is_needed(command, shown, missing, capsys):
    text = " ".join(help_of(*command.split(), "--help", capsys=capsys).split())
    assert shown in text
    assert missing not in text


@pytest.mark.parametrize(
    ("words", "expected", "missing"),
    [
        ("momentum", ["optimizer (--optimizer muon):", "optimizer (--optimizer sgd):", "--momentum X"], "--seed"),
        ("muon", ["--muon-scale", "--ns-steps N", "--optimizer NAME"], "--momentum-decay"),
        ("warmup_updates", ["lr_scheduler (every --lr-scheduler):"], "optimizer ("),
        ("hidden size", ["model (every --arch):", "--hidden-size N"], "default: 768"),
        ("gradient-accumulation", ["--gradient-accumulation-steps (Hugging Face): in ftk: --update-freq"], "parts"),
        ("arch", ["glm_10b, ", "gpt2_xl"], "--lr "),
        ("fp16-init", ["loss scaling (fp16):", "needs --precision fp16"], "--precision {"),
    ],
)
def test_a_word_is_searched_in_all_parts_chosen_or_not(words, expected, missing, capsys):
    text = " ".join(help_of("train", "--help", *words.split(), capsys=capsys).split())
    for part in expected:
        assert part in text
    assert missing not in text


def test_names_of_other_programs_come_first(capsys):
    text = help_of("train", "--help", "learning-rate", capsys=capsys)
    assert "--learning-rate (Hugging Face): in ftk: --lr" in text.splitlines()[:3]
    assert "--lr-scales" in text


def test_options_of_the_tasks_generators_are_searched_without_a_model(capsys):
    text = help_of("generate", "--help", "blank", "order", capsys=capsys)
    assert text.startswith("options of a model of the task glm_blank, glm_fill:\n  --blank-order TEXT")
    assert text.count("--blank-order TEXT") == 1


def test_an_option_of_another_tasks_generator_says_whose_it_is():
    root = with_options_of_task(ROOTS["generate GenerateRoot"], [])
    for flag, message in (("order", "^--blank-order belongs"), ("orde", r"did you mean --blank-order\? It belongs")):
        with pytest.raises(UserError, match=f"{message} to a model of the task glm_blank, glm_fill$"):
            compose(root, "ftk-generate", "", ["--path", "p", "--input", "f", f"--blank-{flag}", "left"])


def test_a_word_that_is_nowhere_is_a_mistake():
    with pytest.raises(UserError, match="no option is about 'blurbx'; --help all shows every option"):
        compose(TrainConfig, "ftk-train", "", ["--help", "blurbx"])
    with pytest.raises(UserError, match="no option is about '学习率'; help is in English, search an English word"):
        compose(TrainConfig, "ftk-train", "", ["--help", "学习率"])


TRAIN = ["data", "--arch", "glm_tiny", "--max-update", "1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning-rate", "1"], "^unknown flag --learning-rate; in ftk: --lr$"),
        (["--learning_rate=1"], "^unknown flag --learning_rate; in ftk: --lr$"),
        (["--vocab-size", "1"], r"; in ftk: nothing \(the tokenizer of the data decides\)$"),
        (["--tokenizer-type", "x"], "; in ftk: ftk-preprocess --tokenizer NAME$"),
        (["--fp16"], "^unknown flag --fp16; in ftk: --precision fp16$"),
        (["--exit-duration-in-mins", "3"], r"in ftk: --stop-time-hours \(hours, not minutes\)$"),
        (["--train-file", "x"], "in ftk: ftk-preprocess --trainpref FILE$"),
        (["--gpus", "2"], "^unknown flag --gpus; in ftk: --launch N$"),
        (["--max_update", "3"], r"^unknown flag --max_update; did you mean --max-update\?$"),
        (["--muon-scale", "original"], "^--muon-scale belongs to --optimizer muon; add that$"),
        (["--no-nesterov"], "^--no-nesterov belongs to --optimizer muon or sgd; add that$"),
        (["--restart-positions"], "^--restart-positions belongs to --task causal_lm; add that$"),
        (["--bach-size", "3"], r"^unknown flag --bach-size; did you mean --batch-size\?$"),
        (["--momentun", "3"], r"did you mean --momentum\? It belongs to --optimizer muon or sgd$"),
        (["--warmup", "3"], r"in ftk: --warmup-ratio \(share of the whole run, not of the decay; in updates "),
        (["--warm-up", "3"], r"did you mean --warmup-updates or --warmup-ratio or --warmup-init-lr\?$"),
        (["--weight_decay", "3"], r"^unknown flag --weight_decay; did you mean --weight-decay\?$"),
        (["--patience-epochs", "3"], r"did you mean --patience\?$"),
        (["--test-batch-size", "3"], r"did you mean --batch-size\?$"),
        (["--model-parallel-size", "2"], "in ftk: --tensor-parallel-size$"),
        (["--resume-dataloader"], "in ftk: nothing "),
        (["--no-shuffle-block"], "in ftk: --no-shuffle-blocks$"),
        (["--no-shufle-blocks"], r"did you mean --no-shuffle-blocks\?$"),
        (["--no-nestrov"], r"did you mean --no-nesterov\? It belongs to --optimizer muon or sgd$"),
        (["--no-patience"], r"did you mean --patience\?$"),
        (["--load-in-8bit"], "in ftk: ftk-checkpoint export --quantize int8 "),
        (["--optimizer", "nag"], "^unknown optimizer 'nag'; in ftk: sgd with .momentum. and .nesterov.$"),
        (["--task", "causal_lm，"], "^unknown task 'causal_lm，'; write ',' for '，'$"),
        (["--task", "language_modeling"], "^unknown task 'language_modeling'; in ftk: causal_lm$"),
        (["--num-epochs", "3"], "--help WORD searches all options for a word$"),
        (["--epoch", "3"], r"did you mean --max-epoch\?$"),
        (["--attn-implementation", "sdpa"], "in ftk: --attention NAME$"),
        (["--xyzzy"], "^unknown flag --xyzzy; ftk-train --help WORD searches all options for a word$"),
        (["--max-sentences", "8", "--fp16", "--lr", "1"], "(?s)^2 errors.*--max-sentences; .*--fp16; "),
        (["--batch-size", "0", "--lr", "-1", "--dropout", "3"], "(?s)^3 errors.*--batch-size .*--dropout .*--lr is"),
        (["more"], "^unexpected argument 'more'; see ftk-train --help$"),
        (["\u2014max-update", "9"], "^unexpected argument '\u2014max-update'; write two hyphens, --, before the name"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_an_unknown_flag_is_answered_with_what_is_known_of_it(argv, message):
    with pytest.raises(UserError, match=message):
        compose(TrainConfig, "ftk-train", "", [*TRAIN, *argv])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("data --arhc glm_tiny", r"^unknown flag --arhc; did you mean --arch\?$"),
        ("data --bach-size 3 --seq-length 8", r"^unknown flag --bach-size; did you mean --batch-size\?$"),
        ("data --hidden-size 64 --lrr 1", r"^unknown flag --lrr; did you mean --lr\?$"),
        ("data --arch glm_tinny --wram-up 3", "^unknown flag --wram-up; "),
        ("data --seq-length 8 --no-nesterov", "^--arch is missing; there are "),
    ],
)
def test_a_misspelt_flag_is_named_before_the_part_that_is_missing(argv, message):
    with pytest.raises(UserError, match=message):
        compose(TrainConfig, "ftk-train", "", argv.split())


def test_ftk_generate_names_a_precision_that_it_has():
    root = with_options_of_task(ROOTS["generate GenerateRoot"], [])
    with pytest.raises(UserError, match=r"^unknown flag --fp16; in ftk: --precision bf16 \(fp16 is for training\)$"):
        compose(root, "ftk-generate", "", ["--path", "p", "--input", "f", "--fp16"])


def test_a_flag_that_an_option_had_is_still_read(capsys):
    for flag in ("--max-valid-samples", "--max-samples"):
        config = compose(ValidateRoot, "ftk-validate", "", ["d", "--path", "p", flag, "3"])
        assert config.validation.max_valid_samples == 3
    assert "--max-samples" not in help_of("validate", "--help", "all", capsys=capsys)


def test_a_plan_or_a_validation_is_not_told_flags_of_training():
    with pytest.raises(UserError, match="--learning-rate; ftk-validate --help WORD searches"):
        compose(ValidateRoot, "ftk-validate", "", ["d", "--path", "p", "--learning-rate", "1"])


def typed_flags_of(root):
    """Without those whose value ftk finds itself, such as a model's --vocab-size."""
    return flags_of(root) - {flag for option in options_of_root(root) if option.derived for flag in option.flags}


def test_names_of_other_programs_lead_to_options_that_there_are(capsys):
    everywhere = set().union(*map(flags_of, ROOTS.values())) | {"--from"}
    assert len({(row.theirs, row.programs, row.at) for row in FOREIGN}) == len(FOREIGN)
    for row in FOREIGN:
        outside = row.ours.startswith(("torchrun ", "ftk-"))
        assert outside or row.flags() <= everywhere, row
        assert row.at is None or row.at in COMMANDS, row
        if row.ours.startswith("ftk-"):
            command, other, *_ = row.ours.split()
            known = flags_of(COMMANDS[command]) if command in COMMANDS else ""
            known = known or help_of(command.removeprefix("ftk-"), other, "--help", "all", capsys=capsys)
            assert all(flag in known for flag in row.flags()), row
        # The answer is for where it is unknown, and some command has to give it.
        asked = [prog for prog, root in COMMANDS.items() if row in names_for(prog, flags_of(root))]
        assert any(row.theirs not in typed_flags_of(COMMANDS[prog]) for prog in asked), row


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_beams", "in ftk: beam"),
        ("max_length", "in ftk: max_len (tokens of the answer, without the prompt)"),
        ("fp16", None),  # of a command, but not of this call
        ("load_in_8bit", None),  # another command is the answer
        ("beam", None),
    ],
)
def test_keywords_of_other_programs_are_answered_by_keywords(name, hint):
    assert in_keywords(name, ["beam", "max_len"]) == hint


PAGES = [ROOT / "docs" / name for name in ("coming_from.md", "coming_from.zh-CN.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_for_users_of_other_programs_shows_the_table(page):
    shown = set()
    for program, table in re.findall(
        r"^## (THUDM/GLM|fairseq|Hugging Face|Megatron-LM)\n\n(\|.*?)\n\n",
        page.read_text(encoding="utf-8"),
        flags=re.M | re.S,
    ):
        for row in table.splitlines()[2:]:
            theirs, ours, note = (cell.strip() for cell in row.split("|")[1:4])
            for flag in re.findall(r"`(--[^`]+)`", theirs):
                shown.add((program, flag, ours.strip("`") if ours.startswith("`") else "nothing", bool(note)))
    expected = {(program, row.theirs, row.ours, bool(row.note)) for row in FOREIGN for program in row.programs}
    assert shown == expected


def test_names_of_parts_of_other_programs_lead_to_parts_that_there_are():
    for kind, names in FOREIGN_NAMES.items():
        for theirs, ours in names.items():
            assert theirs not in BUILTIN_MODULES[kind]
            assert ours.split()[0] in BUILTIN_MODULES[kind]
            assert set(re.findall("--[a-z-]+", with_flags(ours))) <= flags_of(TrainConfig)
            assert all(f"`{theirs}`" in re.sub("`--[a-z-]+ ", "`", page.read_text(encoding="utf-8")) for page in PAGES)


def test_the_command_lines_of_the_page_are_ours_and_theirs():
    commands = [
        re.findall(
            r"^\| (fairseq|Hugging Face|Megatron-LM|ftk) \| `(.*)` \|$", page.read_text(encoding="utf-8"), flags=re.M
        )
        for page in PAGES
    ]
    assert commands[0] == commands[1]
    by_program = dict(commands[0])
    ours = by_program.pop("ftk").partition("ftk-train ")[2].split()
    config = compose(TrainConfig, "ftk-train", "", ours)
    assert (config.task.name, config.training.precision, config.training.update_freq) == ("causal_lm", "bf16", 2)
    same = flags_of(TrainConfig)
    for program, command in by_program.items():
        known = same | {row.theirs for row in FOREIGN if program in row.programs} | {"--nproc-per-node"}
        assert {flag.replace("_", "-") for flag in re.findall(r"--[a-z][\w-]*", command)} <= known, program
