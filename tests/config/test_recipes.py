"""Every recipe in configs/ composes, for the flat command line and for Hydra, to the published hyperparameters."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

import pytest
from torch import nn

from ftk.checkpoint import save_checkpoint
from ftk.config import compose, dump
from ftk.config.build import build
from ftk.config.compose import recipe_file
from ftk.config.hydra import compose_file, recipes
from ftk.data.supervised.cloze_files import load_cloze
from ftk.errors import UserError
from ftk.registry import ARCHITECTURES
from ftk.tasks.glm_blank.samples.dataset import check_command_tokens
from ftk.tokenizers import with_special_tokens
from ftk.trainer.config import TrainConfig
from ftk_cli.preprocess import DESCRIPTION, PreprocessConfig, tokenizer_of

CONTINUED = {
    "continue/glm": ("glm_tiny", "glm_blank"),
    "continue/causal": ("llama_tiny", "causal_lm"),
    "continue/bert": ("bert_tiny", "masked_lm"),
}
FINETUNED = sorted(name for name in recipes() if name.startswith("finetune/"))
RECIPES = sorted(set(recipes()) - {*CONTINUED, *FINETUNED})

# reference: config/ds_*.sh and config_tasks/model_*.sh of the original:
# layers, hidden, heads, positions, bert and sentence probability, updates, lr, decay updates, warm-up, floor, decay
PUBLISHED = {
    "glm_base": (12, 768, 12, 512, 1.0, 0.0, 150_000, 4e-4, 120_000, 0.05, 0.05, 0.1),
    "glm_large": (24, 1024, 16, 512, 1.0, 0.0, 200_000, 2e-4, 160_000, 0.05, 0.05, 0.1),
    "glm_roberta_large": (24, 1024, 16, 512, 1.0, 0.0, 500_000, 4e-4, 500_000, 0.06, 0.025, 0.01),
    "glm_large_chinese": (24, 1024, 16, 1024, 0.4, 0.3, 250_000, 4e-4, 200_000, 0.04, 0.1, 0.01),
    "glm_10b": (48, 4096, 64, 1024, 0.5, 0.3, 250_000, 1e-4, 175_000, 0.04, 0.1, 0.1),
    "glm_10b_chinese": (48, 4096, 64, 1024, 0.5, 0.3, 150_000, 1e-4, 120_000, 0.04, 0.1, 0.1),
}


def test_there_is_a_recipe_for_every_published_size():
    assert set(RECIPES) >= {
        "glm_tiny",
        "glm_base",
        "glm_large",
        "glm_large_chinese",
        "glm_roberta_large",
        "glm_410m",
        "glm_515m",
        "glm_2b",
        "glm_10b",
        "glm_10b_chinese",
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_alike_by_flag_and_by_hydra(name):
    by_flag = compose(TrainConfig, "ftk-train", "", ["data", "--config", name])
    tree = compose_file(TrainConfig, recipes()[name], ["dataset.data=data"])
    assert dump(by_flag) == dump(build(TrainConfig, tree))
    assert by_flag.model.arch == ("glm_tiny" if name == "quickstart" else name)


@pytest.mark.parametrize("name", CONTINUED)
def test_a_recipe_for_continuing_takes_model_and_task_from_the_folder(name, tmp_path):
    arch, task = CONTINUED[name]
    made = {"model": {"arch": arch, "num_layers": 3}, "task": {"seq_length": 17}}
    folder = save_checkpoint(tmp_path / "made", model=nn.Linear(1, 1), trainer_state={}, config=made)
    flags = ["data", "--config", name, "--finetune-from", str(folder), "--dropout", "0.3"]
    config = compose(TrainConfig, "ftk-train", "", flags)
    assert (config.model.arch, config.model.config.num_layers, config.model.config.dropout) == (arch, 3, 0.3)
    assert (config.task.name, config.task.config.seq_length) == (task, 17)
    assert config.optimizer.config.lr in (2e-5, 3e-5)
    given = ["dataset.data=data", f"checkpoint.finetune_from={folder}"]
    by_hydra = dump(build(TrainConfig, compose_file(TrainConfig, recipes()[name], given)))
    assert dump(compose(TrainConfig, "ftk-train", "", flags[:-2])) == by_hydra


# reference: config_tasks/seq_*.sh of the original: question, answer, epochs, lr, batch, decay
PAIRS = {
    "finetune/cnn_dm": (608, 160, 10, 1e-5, 8, 0.1),
    "finetune/gigaword": (192, 32, 10, 3e-5, 16, 0.1),
    "finetune/xsum": (608, 60, 6, 1e-5, 8, 0.1),
    "finetune/squad": (512, 64, 5, 1e-5, 12, 0.1),
    "finetune/squad_generation": (464, 48, 10, 2e-5, 8, 0.1),
    "finetune/cmrc": (464, 48, 10, 2e-5, 8, 0.1),
    "finetune/blank": (256, 200, 5, 1e-5, 16, 0.1),
    "finetune/customization": (512, 128, 10, 1e-5, 8, 0.01),
}


@pytest.mark.parametrize("name", FINETUNED)
def test_a_recipe_for_fine_tuning_takes_the_model_from_the_folder(name, tmp_path):
    made = {"model": {"arch": "glm_tiny", "num_layers": 3}, "task": {"seq_length": 17}}
    folder = save_checkpoint(tmp_path / "made", model=nn.Linear(1, 1), trainer_state={}, config=made)
    config = compose(TrainConfig, "ftk-train", "", ["data", "--config", name, "--finetune-from", str(folder)])
    assert (config.model.arch, config.model.config.num_layers, config.dataset.name) == ("glm_tiny", 3, "rows")
    given = ["dataset.data=data", f"checkpoint.finetune_from={folder}"]
    assert dump(config) == dump(build(TrainConfig, compose_file(TrainConfig, recipes()[name], given)))
    if name in PAIRS:
        task, schedule = config.task.config, config.lr_scheduler.config
        values = task.seq_length, task.target_length, config.training.max_epoch, config.optimizer.config.lr
        assert (*values, config.dataloader.batch_size, config.optimizer.config.weight_decay) == PAIRS[name]
        assert (schedule.warmup_ratio, config.lr_scheduler.name) == (0.06, "linear")
        assert config.criterion.config.label_smoothing == 0.1


def test_a_flag_beside_a_recipe_for_fine_tuning_changes_its_option_alone(tmp_path):
    made = {"model": {"arch": "glm_tiny", "num_layers": 3}, "task": {"seq_length": 17}}
    folder = save_checkpoint(tmp_path / "made", model=nn.Linear(1, 1), trainer_state={}, config=made)
    flags = ["data", "--config", "finetune/cnn_dm", "--finetune-from", str(folder)]
    config, again = (compose(TrainConfig, "ftk-train", "", [*flags, *more]) for more in ((), ("--lr", "1")))
    assert (again.task, again.optimizer.config.lr) == (config.task, 1.0)


def preprocessing(name: str) -> list[str]:
    """The arguments of the ftk-preprocess command that the comment at the head of a recipe shows."""
    text = recipes()[name].read_text()
    commands = re.findall(r"^# Data: ftk-preprocess ((?:.*\\\n# +)*.*)$", text.partition("defaults:")[0], re.MULTILINE)
    assert len(commands) == 1, f"{name}: a recipe shows the one command that makes its data"
    return shlex.split(commands[0].replace("\\\n#", " "))


@pytest.mark.parametrize("name", [*RECIPES, *CONTINUED])
def test_a_recipe_shows_the_command_that_makes_its_data(name):
    arguments = preprocessing(name)
    trains = ["--tokenizer-path="] if "--vocab-size" in arguments else []
    config: Any = compose(PreprocessConfig, "ftk-preprocess", DESCRIPTION, [*arguments, *trains])
    assert str(config.output.destdir) == "data-bin"


VOCABULARIES = {
    "vocab.txt": "bert-base-uncased-vocab.txt",
    "gpt2": "",
    "roberta": "",  # whose layout of command tokens GPT-2's stands in for
    "cog-pretrain.model": "cog-pretrain.model",
}


@pytest.mark.parametrize("name", [name for name in RECIPES if "--vocab-size" not in preprocessing(name)])
def test_the_data_of_a_recipe_has_the_command_tokens_of_its_objectives(name, test_data):
    arguments = preprocessing(name)
    place = arguments.index("--tokenizer-path") + 1
    arguments[place] = str(test_data / "tokenizers" / VOCABULARIES[arguments[place]])
    config: Any = compose(PreprocessConfig, "ftk-preprocess", DESCRIPTION, arguments)
    tokenizer = tokenizer_of(config.tokenizer, config.special_tokens, arguments)
    task = compose(TrainConfig, "ftk-train", "", ["data", "--config", name]).task.config
    check_command_tokens(with_special_tokens(tokenizer, "glm"), task)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_values_are_the_published_ones(name):
    config = compose(TrainConfig, "ftk-train", "", ["data", "--config", name])
    model, task = config.model.config, config.task.config
    schedule, optimizer = config.lr_scheduler.config, config.optimizer.config
    warmup_share = schedule.warmup_updates / schedule.decay_updates
    assert (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.max_positions,
        task.bert_prob,
        task.gap_sentence_prob,
        config.training.max_update,
        optimizer.lr,
        schedule.decay_updates,
        warmup_share,
        schedule.min_lr_ratio,
        optimizer.weight_decay,
    ) == pytest.approx(PUBLISHED[name])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_an_architecture_alone_trains_with_the_published_values(name):
    by_file = compose(TrainConfig, "ftk-train", "", ["data", "--config", name])
    by_arch = compose(TrainConfig, "ftk-train", "", ["data", "--arch", name, "--max-update", "1000"])
    assert by_arch.optimizer == by_file.optimizer
    assert by_arch.dataloader == by_file.dataloader
    assert by_arch.lr_scheduler.name == by_file.lr_scheduler.name
    ours, published = by_arch.lr_scheduler.config, by_file.lr_scheduler.config
    assert ours.min_lr_ratio == published.min_lr_ratio
    assert ours.warmup_ratio == pytest.approx(published.warmup_updates / by_file.training.max_update, rel=0.1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (3e-3, "cosine", 0.05, 0.1, 8)),
        (["--batch-size", "4", "--weight-decay", "0.3"], (3e-3, "cosine", 0.05, 0.1, 4)),
        (["--max-tokens", "4096"], (3e-3, "cosine", 0.05, 0.1, None)),
        (["--warmup-updates", "7", "--min-lr", "1e-6"], (3e-3, "cosine", 0.0, 0.0, 8)),
        (["--lr", "1e-4"], (1e-4, "cosine", 0.05, 0.1, 8)),
        (["--finetune-from", "run"], (1e-4, "cosine", 0.0, 0.0, 8)),
        (["--optimizer", "lion"], (1e-4, "cosine", 0.05, 0.1, 8)),
        (["--lr-scheduler", "linear"], (3e-3, "linear", 0.0, 0.0, 8)),
    ],
)
def test_what_is_given_wins_over_the_recipe_of_an_architecture(flags, expected):
    config = compose(TrainConfig, "ftk-train", "", ["data", "--arch", "glm_tiny", "--max-update", "9", *flags])
    schedule = config.lr_scheduler.config
    found = (config.optimizer.config.lr, config.lr_scheduler.name, schedule.warmup_ratio, schedule.min_lr_ratio)
    assert (*found, config.dataloader.batch_size) == expected
    again = build(TrainConfig, dump(config))
    assert again == config
    assert again.model.from_recipe == {}


def test_a_plugins_architecture_has_a_recipe_and_chooses_parts_by_it(monkeypatch):
    recipe = {"optimizer": {"_name": "lion", "lr": 2e-4}, "task": {"_name": "causal_lm", "seq_length": 77}}
    plugged = dataclasses.replace(ARCHITECTURES.get("glm_tiny"), name="plugged", recipe=recipe)
    monkeypatch.setitem(ARCHITECTURES._entries, "plugged", plugged)
    config = compose(TrainConfig, "ftk-train", "", ["data", "--arch", "plugged", "--max-update", "9"])
    assert (config.optimizer.name, config.optimizer.config.lr) == ("lion", 2e-4)
    assert (config.task.name, config.task.config.seq_length) == ("causal_lm", 77)
    monkeypatch.setitem(ARCHITECTURES._entries, "plugged", dataclasses.replace(plugged, recipe={"optimizer": {"x": 1}}))
    with pytest.raises(UserError, match=r"unknown option optimizer\.x"):
        compose(TrainConfig, "ftk-train", "", ["data", "--arch", "plugged", "--max-update", "9"])


def test_a_flag_wins_over_the_recipe():
    config = compose(TrainConfig, "ftk-train", "", ["data", "--config", "glm_large", "--lr", "1e-5"])
    assert (config.optimizer.config.lr, config.optimizer.config.eps) == (1e-5, 1e-6)


def test_a_recipe_of_ones_own_builds_on_one_that_comes_with_ftk(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [glm_tiny, _self_]\ntraining: {max_update: 5}\n")
    tree = compose_file(TrainConfig, tmp_path / "mine.yaml")
    shipped = compose_file(TrainConfig, recipes()["glm_tiny"])
    assert tree == shipped | {"training": shipped["training"] | {"max_update": 5}}


def test_a_folder_that_bears_the_name_of_a_recipe_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart" / "run").mkdir(parents=True)  # as scripts/quickstart.sh leaves it
    config = compose(TrainConfig, "ftk-train", "", ["data", "--config", "quickstart"])
    assert config.model.arch == "glm_tiny"
    (tmp_path / "quickstart" / "config.yaml").touch()
    with pytest.raises(UserError, match=r"is a folder; give the YAML file itself, e\.g\. quickstart/config\.yaml"):
        recipe_file("quickstart")
    (tmp_path / "glm_base").write_text("training: {max_update: 7}")
    assert recipe_file("glm_base").samefile(tmp_path / "glm_base")


@pytest.mark.parametrize("name", ["./glm_base", "../configs/glm_base", "x" * 300])
def test_a_path_is_no_name_of_a_recipe(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no such file and no such recipe"):
        recipe_file(name)


# reference: config_tasks/task_*.sh of the original: epochs, batch, length, pattern; the same for all, and the loss
CLOZES = {
    "boolq": (20, 16, 256, 4),
    "cb": (50, 16, 256, 3),
    "copa": (50, 16, 256, 0),
    "rte": (50, 16, 256, 0),
    "wic": (30, 16, 256, 1),
    "wsc": (50, 16, 128, 2),
    "multirc": (15, 64, 512, 0),
    "record": (5, 64, 512, 0),
    "afqmc": (10, 16, 256, 0),
    "tnews": (10, 16, 256, 0),
    "cluewsc": (10, 16, 256, 0),
    "cmrc_cloze": (10, 16, 256, 0),
    "mnli": (3, 16, 256, 0),
}


@pytest.mark.parametrize("name", CLOZES)
def test_a_recipe_for_a_cloze_task_has_the_published_values(name, tmp_path):
    made = {"model": {"arch": "glm_tiny", "num_layers": 3}, "task": {"seq_length": 17}}
    folder = save_checkpoint(tmp_path / "made", model=nn.Linear(1, 1), trainer_state={}, config=made)
    recipe = "glue" if name == "mnli" else name
    flags = ["data", "--config", f"finetune/{recipe}_large", "--finetune-from", str(folder)]
    config = compose(TrainConfig, "ftk-train", "", flags)
    assert (config.model.arch, config.model.config.num_layers, config.dataset.name) == ("glm_tiny", 3, "rows")
    task, optimizer, schedule = config.task.config, config.optimizer.config, config.lr_scheduler.config
    batch = config.dataloader.batch_size * config.training.update_freq
    values = config.training.max_epoch, batch, task.seq_length, task.pattern
    assert (task.cloze, values) == (name, CLOZES[name])
    assert load_cloze(name).pattern == task.pattern
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-5, [0.9, 0.999], 0.1)
    assert (config.lr_scheduler.name, schedule.warmup_ratio, schedule.min_lr_ratio) == ("linear", 0.1, 0.1)
    best = {"multirc": "multirc_f1a", "record": "record_em"}.get(name, "accuracy")
    assert (config.training.clip_norm, config.checkpoint.best_metric) == (1.0, best)
    assert config.evaluations.evaluate_with == [name] * (best != "accuracy")
    assert (config.criterion.name, config.criterion.config.choice_loss) == (
        "choice_cross_entropy",
        {"wsc": "mix", "cmrc_cloze": "generative"}.get(name, "cross_entropy"),
    )
    commented = re.findall(
        r"# (?:With 10B parameters: )?(--(?:lr|max-epoch|cloze \w+ .*--best-metric) .*)",
        recipes()[flags[2]].read_text(),
    )
    for line in commented:
        other = compose(TrainConfig, "ftk-train", "", [*flags, *shlex.split(line)])
        if name == "mnli":
            (own,), best = other.evaluations.evaluate_with, other.checkpoint.best_metric
            assert best.removeprefix(f"{own}_") in load_cloze(own).metrics
            assert (other.task.config.cloze, other.checkpoint.maximize_best_metric) == (own, True)
        else:  # reference: config_tasks/config_blocklm_10B.json of the original
            chosen = other.optimizer.config
            assert (chosen.lr, chosen.betas, chosen.weight_decay) == (5e-6, [0.9, 0.95], 0.01)
    assert len(commented) == (3 if name == "mnli" else 1)
