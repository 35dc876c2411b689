"""A plugin that breaks a contract is answered in a line: the class, its file, and what the contract asks."""

from __future__ import annotations

import linecache
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from ftk import load_model, registry
from ftk.errors import UserError
from ftk.registry import Registry
from ftk_cli import checkpoint, generate, train
from tests.cli.broken_plugins import BACKBONE, CASES, CRITERION, DATASET, GOOD, IN_TASK

REGISTRIES = [value for value in vars(registry).values() if isinstance(value, Registry)]


@pytest.fixture
def plugin(tmp_path):
    """Writes a plugin; what the one before registered is forgotten, and what this one does afterwards."""

    def write(text: str) -> None:
        forget()
        (tmp_path / "broken.py").write_text(text, encoding="utf-8")

    yield write
    forget()


def forget() -> None:
    for registered in REGISTRIES:
        for name in [name for name, entry in registered._entries.items() if entry.target.__module__ == "broken"]:
            del registered._entries[name]
    sys.modules.pop("broken", None)
    linecache.clearcache()


def train_it(place: Path, folder: Path, options: str) -> int:
    arch = "" if "--arch" in options else "--arch lstm_tiny"
    window = "" if "--task" in options else "--window 16"
    run = f"--max-update 1 --batch-size 2 {window} --valid-subset none --save-dir {folder / 'run'}"
    return train.main(f"{place / 'data-bin'} --user-dir {folder / 'broken.py'} {arch} {run} {options}".split())


@pytest.mark.parametrize(("text", "options", "old", "new", "message"), CASES, ids=[case[-1][:60] for case in CASES])
def test_a_mistake_is_answered_in_the_words_of_the_contract(
    plugin, place, tmp_path, capsys, text, options, old, new, message
):
    assert old in text
    plugin(text.replace(old, new))
    assert train_it(place, tmp_path, options) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ftk-train: ")]
    assert "broken.py" in said
    assert message in re.sub(r"(\w+) \([^()]*broken\.py:\d+\)", r"CLASS \1", said)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


OWN_SAMPLES = DATASET.replace(
    "def documents(self, split):\n        return DocumentList([[1, 2, 3] * 20])",
    "def samples(self, split, make_samples, seed):\n        return make_samples(DocumentList([[1, 2, 3] * 20]), seed)",
)
ODD = """

class Odd:
    def __init__(self, make_samples, seed):
        self.own = make_samples(DocumentList([[1, 2, 3] * 20]), seed)

    def __len__(self):
        return len(self.own)

    def sizes(self, epoch):
        return self.own.sizes(epoch)

    def sample(self, epoch, index):
        sample = self.own.sample(epoch, index)
        return {**sample, "loss_weights": np.full(len(sample["tokens"]), np.nan, dtype=np.float32)}
"""
PER_TEXT = """
    def count(self, batch):
        return float(batch.placed_tokens.size(0))
"""
RIGHT = {
    "criterion": (CRITERION, "--criterion mine"),
    "a sum of means of texts": (
        CRITERION.replace(".logsumexp(-1).sum()", ".view(*batch.placed_tokens.shape, -1).logsumexp(-1).mean(1).sum()")
        .replace("new_full((), len(batch.targets))", "new_full((), batch.placed_tokens.size(0))")
        .rstrip("\n")
        + "\n"
        + PER_TEXT,
        "--criterion mine",
    ),
    "a mean of a batch that counts as one": (
        CRITERION.replace(".sum()", ".mean()").replace("new_full((), len(batch.targets))", "new_full((), 1)")
        + "\n    def count(self, batch):\n        return 1.0\n",
        "--criterion mine",
    ),
    "a sample with more than numbers": (
        OWN_SAMPLES.replace(
            "return make_samples(DocumentList([[1, 2, 3] * 20]), seed)", "return Odd(make_samples, seed)"
        )
        + ODD,
        "--dataset own",
    ),
    "backbone": (BACKBONE, "--arch trunk_tiny"),
    "documents": (DATASET, "--dataset own"),
    "samples": (OWN_SAMPLES, "--dataset own"),
    "samples of ftk's task": (OWN_SAMPLES, "--dataset own --arch gpt2_tiny --task causal_lm"),
}


@pytest.mark.parametrize(("more", "options"), RIGHT.values(), ids=RIGHT)
def test_without_a_mistake_it_trains(plugin, place, tmp_path, more, options):
    plugin(GOOD + more)
    assert train_it(place, tmp_path, options) == 0


CHANGES = {
    "another head": ("model.head = nn.Linear(32, chosen.config.vocab_size, bias=False)", "head.bias"),
    "another size": ("model.head = nn.Linear(32, 320)", "head.weight is [320, 32] in the checkpoint, [384, 32] in the"),
    "one more part": ("model.more = nn.Linear(32, 32)", "more.bias, more.weight"),
    "tied weights, which are read as they are": ("model.head.weight = model.embedding.weight", None),
    "ftk's own head": ("import ftk.modules.classifier as c; c.replace_head(model, c.HeadShape(num_outputs=400))", None),
    "other values": ("nn.init.zeros_(model.head.bias)", None),
}


@pytest.mark.parametrize(("change", "differs"), CHANGES.values(), ids=CHANGES)
def test_a_run_whose_checkpoints_load_model_will_refuse_says_so_at_its_start(
    plugin, place, tmp_path, caplog, change, differs
):
    build = f"def build_model(self, chosen):\n        model = chosen.build()\n        {change}\n        return model\n"
    plugin(GOOD.replace(IN_TASK, f"{IN_TASK}\n    {build}"))
    assert train_it(place, tmp_path, "") == 0
    warned = [line for line in caplog.messages if "cannot be opened by ftk.load_model" in line]
    assert [f"(what differs: {differs}" in line for line in warned] == ([True] if differs else [])
    with pytest.raises(UserError, match="does not fit the model") if differs else nullcontext():
        load_model(tmp_path / "run")


def test_a_target_without_a_score_is_named_with_its_sample(plugin, place, tmp_path, capsys):
    plugin(GOOD.replace("piece[1:]", "piece[1:] + 999 * min(index, 1)"))
    assert train_it(place, tmp_path, "") == 2
    assert re.search(
        r"ftk-train: sample \d+ has the target 1\d{3}, for which the model has no score;", capsys.readouterr().err
    )


SCORER = """
from ftk.evaluation.base import SumScorer
from ftk.registry import register_scorer


@register_scorer("half")
class Half(SumScorer):
    def measure(self, answer, references):
        return [1.0, 2.0]

    def values(self, sums):
        return sums[0] / sums[1]
"""


def test_a_scorer_that_gives_a_bare_number_is_refused_before_the_first_answer(plugin, place, tmp_path, capsys):
    plugin(GOOD + SCORER)
    given = f"{place / 'data-bin'} --path {place / 'run'} --user-dir {tmp_path / 'broken.py'} --scoring half"
    assert generate.main(given.split()) == 2
    out, err = capsys.readouterr()
    assert re.search(r"Half \(.*broken\.py:\d+\): what values\(sums\) returns is of type float; it must be a dict", err)
    assert out == ""


def test_a_model_that_torch_cannot_export_is_named_in_two_lines(plugin, place, tmp_path, capsys):
    plugin(GOOD)
    assert train_it(place, tmp_path, "") == 0
    given = [
        "export",
        tmp_path / "run",
        tmp_path / "lstm.pt2",
        "--format",
        "export",
        "--user-dir",
        tmp_path / "broken.py",
    ]
    assert checkpoint.main([*map(str, given)]) == 2
    *_, first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("ftk-checkpoint: torch.export cannot export LSTM (")
    assert second == "its forward must take any batch size and length; --format safetensors writes its weights alone"


def test_the_plugin_of_a_run_is_told_of_where_a_name_of_it_is_unknown(plugin, place, tmp_path, capsys):
    plugin(GOOD)
    assert train_it(place, tmp_path, "") == 0
    forget()
    for options, told in {
        "--arch lstm_tiny": True,
        "--window 8": True,
        "--arch glm_tin": False,
        "--lrr 1": False,
    }.items():
        capsys.readouterr()
        assert train.main(f"{place / 'data-bin'} --save-dir {tmp_path / 'run'} {options}".split()) == 2
        assert ("was made with the plugin" in capsys.readouterr().err) == told


def test_a_model_that_cannot_generate_is_refused(plugin, place, tmp_path, capsys):
    plugin(GOOD)
    assert train_it(place, tmp_path, "") == 0
    asked = ["--path", str(tmp_path / "run"), "--user-dir", str(tmp_path / "broken.py"), "--input", str(place / "text")]
    assert generate.main(asked) == 2
    assert (
        "was trained for NextToken, which does not generate; use ftk.load_model, or give the task a function "
        "'framing'" in capsys.readouterr().err
    )
    continuation = "from ftk.generation.engine.continuation import Continuation\n        return Continuation([2], None)"
    framing = f"    @classmethod\n    def framing(cls, tokenizer, model_config):\n        {continuation}\n"
    plugin(GOOD.replace(IN_TASK, IN_TASK + framing))
    assert generate.main(asked) == 2
    assert "cannot generate: it is no ftk.models.base.Backbone, whose layers take a cache" in capsys.readouterr().err
