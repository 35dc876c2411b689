"""A run goes on with changed options only where that changes nothing silently; weights can begin another run."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from ftk.checkpoint import load_model_tensors, read_trainer_state, save_checkpoint, transfer_weights
from ftk.config import Chosen, compose, dump
from ftk.config.changes import FIXED, FREE, RESETTABLE, RESUME, find_changes
from ftk.config.root import slots_of
from ftk.errors import UserError
from ftk.trainer.config import TrainConfig, describe_sources
from ftk.trainer.resume import check_changes, with_recipe_of_run
from ftk.trainer.state import TrainerState
from tests.trainer.test_resume import OPTIONS
from tests.trainer.toy import ToyModel, ToyTask, assert_same, everything, toy_config, toy_trainer

STOP = {"training__max_update": 4, "lr_scheduler__decay_updates": 50}
GO_ON = {"training__max_update": 6, "lr_scheduler__decay_updates": 50}


def refused(tmp_path, **options):
    with pytest.raises(UserError) as caught:
        toy_trainer(tmp_path, **{**GO_ON, **options})
    return str(caught.value)


@pytest.mark.parametrize("where", ["save_dir", "restore_from"])
def test_a_run_keeps_its_values_where_its_architecture_has_another_recipe_now(tmp_path, where):
    argv = ["data", "--arch", "glm_tiny", "--max-update", "9", "--warmup-updates", "3"]
    older = ["--lr", "1e-4", "--batch-size", "5", f"--save-dir={tmp_path / 'save_dir'}"]
    toy = dump(compose(TrainConfig, "ftk-train", "", [*argv, *older]))
    checkpoint = tmp_path / "save_dir" / "checkpoint_4"
    save_checkpoint(checkpoint, model=ToyModel(), trainer_state=TrainerState(num_updates=4).to_dict(), config=toy)
    (tmp_path / "save_dir" / "config.yaml").write_text(yaml.safe_dump(toy))
    own = f"--save-dir={tmp_path / where}"
    config = compose(TrainConfig, "ftk-train", "", [*argv, own, "--restore-from", str(tmp_path / "save_dir")])
    assert config.optimizer.config.lr == 3e-3
    kept = with_recipe_of_run(config)
    assert (kept.optimizer.config.lr, kept.dataloader.batch_size) == (1e-4, 5)
    assert find_changes(toy, kept) == [
        change for change in find_changes(toy, config) if change.key.startswith("checkpoint")
    ]
    (line,) = describe_sources(config)
    assert line.startswith("defaults of glm_tiny: `lr` 0.003 `betas` 0.9,0.98 `eps`")
    assert describe_sources(kept) == []


# -- every option has its class -----------------------------------------------------------------------------------


def every_configuration():
    """The toy configuration, and it with each registered part in each slot."""
    base = toy_config("run")
    yield base
    for key, slot in slots_of(TrainConfig).items():
        for name in slot.registry.names():
            entry = slot.registry.get(name)
            if entry.config is not None:
                required = [f for f in dataclasses.fields(entry.config) if f.init and is_required(f)]
                values = {f.name: 1 if "int" in str(f.type) else "x" for f in required}
                values |= {"cloze": "boolq"} if "cloze" in values else {}  # the only text that is read at once
                config = entry.config(**values)
                yield dataclasses.replace(base, **{key: Chosen(entry, config)})


def is_required(field):
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def test_every_option_says_what_a_change_of_it_means():
    seen = {}
    for config in every_configuration():
        others = {section: dict.fromkeys(values, "another") for section, values in dump(config).items()}
        seen |= {change.key: change.resume for change in find_changes(others, config)}
    assert len(seen) > 100
    assert [key for key, resume in seen.items() if resume not in RESUME] == []
    # Each class where it must be: this is the table of docs/training.md.
    expected = {
        "common.seed": FIXED,
        "common.device": FREE,
        "common.num_threads": FREE,
        "logging.log_interval": FREE,
        "model.num_layers": FIXED,
        "task.seq_length": "dataloader",
        "dataset.data": "dataloader",
        "dataloader.batch_size": "dataloader",
        "dataloader.max_tokens": "dataloader",
        "dataloader.num_workers": FREE,
        "dataloader.valid_subset": "meters",
        "training.update_freq": "dataloader",
        "training.max_update": FREE,
        "training.precision": FREE,
        "training.clip_norm": "optimizer",
        "optimizer._name": "optimizer",
        "optimizer.betas": "optimizer",
        "optimizer.weight_decay": "optimizer",
        "optimizer.lr": "lr_scheduler",
        "lr_scheduler._name": "lr_scheduler",
        "lr_scheduler.warmup_updates": "lr_scheduler",
        "checkpoint.save_interval_updates": FREE,
        "checkpoint.best_metric": "meters",
    }
    assert {key: seen[key] for key in expected} == expected
    for kind in RESETTABLE:
        assert seen[f"checkpoint.reset_{kind}"] == FREE


def test_an_option_that_an_older_ftk_did_not_know_had_its_default():
    config = toy_config("run")
    before = dump(config)
    del before["training"]["patience"], before["loss_scale"]
    before["training"]["gone"] = 3
    assert find_changes(before, config) == []
    config.training.patience = 7
    assert [str(change) for change in find_changes(before, config)] == ["training.patience 0 -> 7"]


# -- what is refused, what is taken -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line", "way"),
    [
        ({"common__seed": 6}, "common.seed 5 -> 6", "needs a new run"),
        ({"criterion__label_smoothing": 0.1}, "criterion.label_smoothing 0.0 -> 0.1", "needs a new run"),
        ({"model__dropout": 0.3}, "model.dropout 0.1 -> 0.3", "needs a new run"),
        ({"optimizer__": "sgd"}, "optimizer._name adamw -> sgd", "`reset_optimizer` resets its state"),
        ({"optimizer__weight_decay": 0.5}, "optimizer.weight_decay 0.1 -> 0.5", "`reset_optimizer`"),
        ({"optimizer__lr": 0.5}, "optimizer.lr 0.01 -> 0.5", "`reset_lr_scheduler`"),
        ({"lr_scheduler__": "cosine"}, "lr_scheduler._name linear -> cosine", "`reset_lr_scheduler`"),
        ({"lr_scheduler__warmup_updates": 1}, "lr_scheduler.warmup_updates 3 -> 1", "`reset_lr_scheduler`"),
        ({"dataloader__batch_size": 2}, "dataloader.batch_size 4 -> 2", "`reset_dataloader`"),
        ({"dataloader__max_tokens": 9}, "dataloader.max_tokens none -> 9", "`reset_dataloader`"),
        ({"training__update_freq": 2}, "training.update_freq 1 -> 2", "`reset_dataloader`"),
        ({"task__seq_length": 64}, "task.seq_length 512 -> 64", "`reset_dataloader`"),
        ({"dataset__data": "elsewhere"}, "dataset.data nowhere -> elsewhere", "`reset_dataloader`"),
        ({"checkpoint__best_metric": "ppl"}, "checkpoint.best_metric loss -> ppl", "`reset_meters`"),
        ({"dataloader__valid_subset": None}, "dataloader.valid_subset valid -> none", "`reset_meters`"),
    ],
)
def test_a_change_that_would_change_the_results_is_refused_with_its_way_out(tmp_path, options, line, way):
    toy_trainer(tmp_path, **STOP).train()
    config_before = (tmp_path / "run" / "config.yaml").read_text()
    text = refused(tmp_path, **options)
    [said] = [one for one in text.splitlines() if line in one]
    assert way in said
    assert "these also changed, and are allowed:\n  training.max_update 4 -> 6\n" in text
    assert f"`finetune_from` {tmp_path / 'run' / 'checkpoint_4'}" in text
    assert (tmp_path / "run" / "config.yaml").read_text() == config_before


def test_a_run_whose_finetune_from_is_left_out_is_asked_for_it(tmp_path):
    toy_trainer(tmp_path, **STOP).train()
    source = str(tmp_path / "run")
    toy_trainer(tmp_path, **STOP, save_dir="new", checkpoint__finetune_from=source).train()
    text = refused(tmp_path, save_dir="new", model__dropout=0.3)
    assert f"\nthe run took its model's options from `finetune_from` {source}; give that again, or\n" in text
    assert "the run took" not in refused(tmp_path, save_dir="new", common__seed=6)


def test_every_change_that_is_refused_is_named_at_once(tmp_path):
    toy_trainer(tmp_path, **STOP).train()
    changed = {"optimizer__lr": 0.5, "training__update_freq": 2, "common__seed": 6}
    lines = refused(tmp_path, **changed, checkpoint__reset_dataloader=True).splitlines()[1:-1]
    assert [line.split("   ")[0].strip() for line in lines] == [
        "common.seed 5 -> 6",
        "optimizer.lr 0.01 -> 0.5",
        "these also changed, and are allowed:",
        "training.max_update 4 -> 6",
        "training.update_freq 1 -> 2",
        "checkpoint.reset_dataloader False -> True",
    ]
    assert [line.endswith(")") for line in lines] == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    "options",
    [
        {"logging__log_interval": 1},
        {"dataloader__num_workers": 1},
        {"checkpoint__save_interval_updates": 1, "checkpoint__keep_last": 0},
        {"checkpoint__async_save": False},
        {"common__num_threads": 2},
        {"training__patience": 9, "training__max_nonfinite_updates": 3},
    ],
)
def test_a_harmless_change_is_shown_and_changes_no_bit(tmp_path, caplog, options):
    caplog.set_level("INFO")
    whole = toy_trainer(tmp_path, save_dir="whole", **GO_ON)
    whole.train()
    toy_trainer(tmp_path, **STOP).train()
    resumed = toy_trainer(tmp_path, **{**GO_ON, **options})
    for key, value in options.items():
        assert f"changed since this checkpoint: {key.replace('__', '.')} " in caplog.text
        assert f"-> {value}" in caplog.text
    assert resumed.state.num_updates == 4
    resumed.train()
    assert_same(resumed, whole)


def test_a_run_that_is_refused_for_its_hooks_leaves_the_folder_as_it_was(tmp_path):
    toy_trainer(tmp_path).train()
    before = (tmp_path / "run" / "config.yaml").read_text()
    for options in ({"training__hooks": ["no_such_hook"]}, {"debug__inspect_interval": 1, "debug__inspect": ["none"]}):
        with pytest.raises(UserError):
            toy_trainer(tmp_path, **options)
    assert (tmp_path / "run" / "config.yaml").read_text() == before


# -- resets -------------------------------------------------------------------------------------------------------


def moments(trainer):
    return {
        name: trainer.run.optimizer.state[p]["exp_avg"]
        for name, p in trainer.run.model.named_parameters()
        if p in trainer.run.optimizer.state
    }


def test_reset_optimizer_begins_without_moments_and_keeps_the_rest(tmp_path):
    first = toy_trainer(tmp_path, **STOP)
    first.train()
    changed = {"optimizer__weight_decay": 0.5, "checkpoint__reset_optimizer": True}
    resumed = toy_trainer(tmp_path, **{**GO_ON, **changed})
    assert moments(resumed) == {}
    assert {group["weight_decay"] for group in resumed.run.optimizer.param_groups} == {0.5, 0.0}
    assert resumed.state.num_updates == 4
    assert resumed.state.iterator == first.state.iterator
    for name, tensor in first.run.model.state_dict().items():
        assert torch.equal(tensor, resumed.run.model.state_dict()[name])
    assert resumed.train().num_updates == 6


def test_another_kind_of_optimizer_is_taken_with_a_reset(tmp_path):
    toy_trainer(tmp_path, **STOP).train()
    resumed = toy_trainer(tmp_path, **GO_ON, optimizer__="sgd", checkpoint__reset_optimizer=True)
    assert type(resumed.run.optimizer).__name__ != "AdamW"
    assert resumed.train().num_updates == 6


def test_the_same_command_does_not_reset_twice(tmp_path, caplog):
    caplog.set_level("INFO")
    changed = {"optimizer__weight_decay": 0.5, "checkpoint__reset_optimizer": True}
    toy_trainer(tmp_path, **STOP).train()
    toy_trainer(tmp_path, **{**GO_ON, **changed}).train()
    again = toy_trainer(tmp_path, **{**GO_ON, **changed, "training__max_update": 8})
    assert "`reset_optimizer`: done when this run was continued with it before; not repeated" in caplog.text
    assert len(moments(again)) > 0
    again.train()
    changed["optimizer__weight_decay"] = 0.25
    third = toy_trainer(tmp_path, **{**GO_ON, **changed, "training__max_update": 10})
    assert moments(third) == {}
    third.train()


def test_reset_lr_scheduler_takes_the_new_schedule_where_the_run_stands(tmp_path):
    toy_trainer(tmp_path, **STOP).train()
    changed = {"optimizer__lr": 0.5, "checkpoint__reset_lr_scheduler": True}
    resumed = toy_trainer(tmp_path, **{**GO_ON, **changed})
    assert len(moments(resumed)) > 0
    resumed.train()
    assert resumed.info.lr == pytest.approx(50 * 0.01 * (50 - 5) / (50 - 3), rel=0.05)


def test_reset_dataloader_goes_through_the_data_anew(tmp_path):
    first = toy_trainer(tmp_path, **STOP)
    first.train()
    changed = {"dataloader__batch_size": 3, "checkpoint__reset_dataloader": True}
    resumed = toy_trainer(tmp_path, **{**GO_ON, **changed})
    assert first.state.iterator["samples_consumed"] == 16
    assert resumed.state.iterator == {"epoch": 1, "samples_consumed": 0}
    resumed.train()
    assert resumed.state.iterator["samples_consumed"] == 6


@pytest.mark.parametrize(("size", "freq"), [(2, 2), (1, 4)])
def test_an_update_of_as_many_samples_goes_on_in_smaller_batches(tmp_path, size, freq):
    def toy(**options):
        torch.manual_seed(0)
        return toy_trainer(tmp_path, model=ToyModel(dropout=0.0), **options)

    longer = GO_ON | {"training__max_update": 25}
    straight = toy(**longer, save_dir="straight")
    straight.train()
    assert straight.state.iterator["epoch"] > 1
    toy(**STOP).train()
    smaller = {"dataloader__batch_size": size, "training__update_freq": freq}
    assert "dataloader.batch_size" in refused(tmp_path, **longer, **smaller | {"dataloader__bucket_window": 8})
    other = refused(tmp_path, **longer, **smaller | {"training__update_freq": 3})
    assert f"-> 3; `update_freq` {freq} keeps its samples" in other
    resumed = toy(**longer, **smaller)
    resumed.train()
    assert resumed.state.iterator == straight.state.iterator
    for name, tensor in everything(straight).items():
        torch.testing.assert_close(everything(resumed)[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_reset_meters_forgets_the_best(tmp_path):
    options = {"training__validate_interval_updates": 2}
    first = toy_trainer(tmp_path, **STOP, **options)
    first.train()
    assert first.state.best is not None
    resumed = toy_trainer(tmp_path, **GO_ON, **options, checkpoint__reset_meters=True)
    assert resumed.state.best is None
    assert resumed.state.scores == {}
    resumed.train()
    assert resumed.state.best.num_updates == 6


# -- the data itself ----------------------------------------------------------------------------------------------


class Documents:
    def __init__(self, sizes):
        self.sizes = torch.tensor(sizes, dtype=torch.int32).numpy()


def task_with(tmp_path, sizes):
    task = ToyTask(tmp_path)
    task.corpus = SimpleNamespace(documents=lambda split: Documents(sizes))
    return task


def test_data_that_moved_is_the_same_data_and_other_data_in_its_place_is_not(tmp_path, caplog):
    caplog.set_level("INFO")
    toy_trainer(tmp_path, task=task_with(tmp_path, [3, 4, 5]), **STOP).train()
    moved = toy_trainer(tmp_path, task=task_with(tmp_path, [3, 4, 5]), dataset__data="elsewhere", **GO_ON)
    assert "changed since this checkpoint: dataset.data nowhere -> elsewhere" in caplog.text
    moved.run.checkpoints.release()
    text = refused(tmp_path, task=task_with(tmp_path, [3, 4, 6]))
    assert "training data 3 documents, " in text
    assert "`reset_dataloader`" in text
    taken = toy_trainer(tmp_path, task=task_with(tmp_path, [3, 4, 6]), checkpoint__reset_dataloader=True, **GO_ON)
    assert taken.train().num_updates == 6


# -- weights alone ------------------------------------------------------------------------------------------------


def test_finetune_from_takes_the_weights_and_begins_a_run(tmp_path, caplog):
    caplog.set_level("INFO")
    donor = toy_trainer(tmp_path, **STOP)
    donor.train()
    options = {**OPTIONS, "common__seed": 9, "checkpoint__finetune_from": str(tmp_path / "run")}
    trainer = toy_trainer(tmp_path, save_dir="new", model=ToyModel(dropout=0.0), **options)
    assert trainer.state.num_updates == 0
    assert moments(trainer) == {}
    for name, tensor in donor.run.model.state_dict().items():
        assert torch.equal(tensor, trainer.run.model.state_dict()[name])
    trainer.train()
    again = toy_trainer(tmp_path, save_dir="new", model=ToyModel(dropout=0.0), **options)
    assert again.state.num_updates == 17  # the run's own checkpoint, not the weights once more
    assert_same(again, trainer)


class Headed(nn.Module):
    """The toy with another name and another vocabulary."""

    def __init__(self, rows=11, head="head"):
        super().__init__()
        self.embedding = nn.Embedding(rows, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.2)
        setattr(self, head, nn.Linear(8, rows))


def weights(tmp_path, model):
    return save_checkpoint(tmp_path / "weights", model=model, trainer_state={"tokenizer": "toy"}, config={})


def test_names_that_differ_are_named_and_left_out_by_pattern(tmp_path):
    torch.manual_seed(0)
    source, target = ToyModel(), Headed()
    folder = weights(tmp_path, source)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(UserError) as caught:
        transfer_weights(folder, target)
    text = str(caught.value)
    assert "only the model has head.weight, head.bias" in text
    assert "only the checkpoint has output.bias, output.weight" in text
    assert "`finetune_skip`" in text
    with pytest.raises(UserError, match=r"no name matches wrong\.\*"):
        transfer_weights(folder, target, skip=["head.*", "output.*", "wrong.*"])
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    done = transfer_weights(folder, target, skip=["head.*", "output.*"])
    assert done.skipped == ["head.weight", "head.bias"]
    assert sorted(done.unused) == ["output.bias", "output.weight"]
    assert torch.equal(target.embedding.weight, source.embedding.weight)
    assert torch.equal(target.head.weight, before["head.weight"])


@pytest.mark.parametrize("rows", [7, 20])
def test_a_vocabulary_of_another_size_is_refused_or_its_common_rows_are_taken(tmp_path, rows):
    torch.manual_seed(0)
    source, target = ToyModel(), Headed(rows, head="output")
    folder = weights(tmp_path, source)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(UserError, match=r"embedding.weight is \[11, 8\] in the checkpoint, \[\d+, 8\] in the model"):
        transfer_weights(folder, target)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    done = transfer_weights(folder, target, common_rows=True)
    common = min(11, rows)
    assert done.rows == dict.fromkeys(("embedding.weight", "output.weight", "output.bias"), (common, rows))
    assert torch.equal(target.embedding.weight[:common], source.embedding.weight[:common])
    assert torch.equal(target.embedding.weight[common:], before["embedding.weight"][common:])
    wide = Headed(head="output")
    wide.norm = nn.LayerNorm(9)
    wide.embedding = nn.Embedding(11, 9)
    with pytest.raises(UserError, match="embedding.weight is") as caught:
        transfer_weights(folder, wide, common_rows=True)
    assert "--finetune-vocabulary" not in str(caught.value)  # it would not help


def test_weights_of_another_tokenizer_are_refused_unless_only_rows_were_added(tmp_path, caplog):
    toy_trainer(tmp_path, **STOP).train()
    task = ToyTask(tmp_path)
    task.tokenizer.fingerprint = "another"
    options = {"checkpoint__finetune_from": str(tmp_path / "run"), "save_dir": "new", "task": task}
    with pytest.raises(UserError, match="`finetune_vocabulary` common"):
        toy_trainer(tmp_path, **options)
    with pytest.raises(UserError, match="and it holds a .*, and no cpmant; leave out `arch`"):
        toy_trainer(tmp_path, **options, model__arch="cpmant_tiny")
    toy_trainer(tmp_path, **STOP, model__arch="cpmant_tiny", save_dir="ant").train()
    of_ant = options | {"checkpoint__finetune_from": str(tmp_path / "ant"), "model__arch": "cpmant_tiny"}
    with pytest.raises(UserError, match=r"only adds tokens to it, start from what ftk-checkpoint grow .* DST writes$"):
        toy_trainer(tmp_path, **of_ant)  # of which common would be refused
    trainer = toy_trainer(tmp_path, **options, checkpoint__finetune_vocabulary="common")
    assert "has another tokenizer" in caplog.text
    stored = load_model_tensors(tmp_path / "run")
    assert torch.equal(trainer.run.model.embedding.weight, stored["embedding.weight"])
    assert read_trainer_state(tmp_path / "run")["tokenizer"] == "toy"


def test_a_bare_checkpoint_has_nothing_to_compare(tmp_path):
    torch.manual_seed(0)
    folder = save_checkpoint(tmp_path / "bare", model=ToyModel(), trainer_state={}, config={"optimizer": {"lr": 77}})
    trainer = toy_trainer(tmp_path, checkpoint__restore_from=str(folder))
    assert trainer.state.num_updates == 0


def test_the_batch_of_an_update_is_that_of_all_processes(tmp_path):
    """Another number of processes with the same batches goes on; with others it is refused, with the way out."""
    donor = toy_trainer(tmp_path, **STOP)
    before = dump(donor.run.config)
    assert donor.state.data_processes == 1

    def agree(processes_before, processes, update_freq):
        config = copy.deepcopy(donor.run.config)
        config.training.update_freq = update_freq
        return check_changes(
            config,
            before,
            tmp_path,
            own=False,
            data_before=None,
            data=None,
            processes_before=processes_before,
            processes=processes,
        )

    freq = donor.run.config.training.update_freq
    assert agree(1, 1, freq) == set()
    assert agree(4, 2, 2 * freq) == set()
    with pytest.raises(
        UserError, match=rf"{2 * freq} -> {freq}; `update_freq` {2 * freq} keeps its samples .*`reset_dataloader`"
    ):
        agree(2, 1, freq)
    with pytest.raises(UserError, match=rf"{freq} -> {4 * freq} .*`reset_dataloader`"):
        agree(1, 4, freq)
