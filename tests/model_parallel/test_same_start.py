"""Processes that were started differently are refused on all of them, with the option, its values and the ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ftk.errors import UserError
from ftk.model_parallel.same_start import check_same_start, environment_facts, options_by_flag
from ftk.tasks.data_facts import fingerprint
from tests.trainer.toy import toy_config


def check_all(*told):
    """What each of several processes, here threads, is told that give these facts; None: nothing."""
    barrier, given = threading.Barrier(len(told)), [None] * len(told)

    def check(rank):
        def gather(value):
            given[rank] = value
            barrier.wait(60)
            values = list(given)
            barrier.wait(60)
            return values

        try:
            check_same_start(told[rank], gather)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(told)) as threads:
        return list(threads.map(check, range(len(told))))


def test_the_same_facts_pass():
    assert check_all({"--lr": 0.1}, {"--lr": 0.1}) == [None, None]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([{"--lr": 0.1}, {"--lr": 0.2}], "--lr is 0.1 on process 0 and 0.2 on process 1."),
        ([{"a": 1}, {"a": 1}, {"a": None}], "a is 1 on processes 0, 1 and (none) on process 2."),
        ([{"a": ""}, {}], 'a is "" on process 0 and (none) on process 1.'),
        ([{"a": True}, {"a": 1}], "a is true on process 0 and 1 on process 1."),
        ([{"a": 1}] * 5 + [{"a": 2}], "a is 1 on processes 0, 1, 2 and 2 more and 2 on process 5."),
        ([dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2)], "process 1; 2 more differ."),
    ],
)
def test_what_differs_is_named_on_all_with_values_and_ranks(told, message):
    said = check_all(*told)
    assert len(set(said)) == 1
    assert message in said[0]
    assert said[0].endswith("Start all of them with the same command")


def test_options_of_the_machine_and_of_the_log_may_differ_and_no_others(tmp_path):
    facts = options_by_flag("ftk-train", toy_config(tmp_path))
    own = {"common__device": "cuda", "common__num_threads": 3, "logging__log_interval": 7, "dataset__data": "elsewhere"}
    assert options_by_flag("ftk-train", toy_config(tmp_path, **own)) == facts
    others = {
        "optimizer__lr": ("--lr", 0.5),
        "lr_scheduler__warmup_updates": ("--warmup-updates", 1),
        "dataloader__batch_size": ("--batch-size", 3),
        "training__precision": ("--precision", "bf16"),
        "parallel__collective_timeout_minutes": ("--collective-timeout-minutes", 3.0),
        "lr_range__lr_range_test": ("--lr-range-test", True),
        "optimizer": ("--optimizer", "sgd"),
    }
    for option, (flag, value) in others.items():
        changed = options_by_flag("ftk-train", toy_config(tmp_path, **{option: value}))
        assert changed[flag] == value
        assert facts[flag] != value


def test_versions_and_variables_that_change_numbers_are_compared():
    facts = environment_facts({"FTK_ANY": "1", "NVIDIA_TF32_OVERRIDE": "0", "HOME": "/root"})
    assert {"the version of ftk", "the version of torch", "$FTK_ANY", "$NVIDIA_TF32_OVERRIDE"} <= facts.keys()
    assert "$HOME" not in facts


class Documents(list):
    @property
    def sizes(self):
        return [len(one) for one in self]


def test_data_of_the_same_sizes_and_other_tokens_has_another_fingerprint():
    long = [*range(5000)]
    documents = Documents([[1, 2, 3], long, []])
    assert fingerprint(documents) == fingerprint(Documents([[1, 2, 3], long, []]))
    for other in ([[1, 2, 4], long, []], [[1, 2], [3, *long], []], [[1, 2, 3], long], [[1, 2, 3], [*long[:-1], 1], []]):
        assert fingerprint(Documents(other)) != fingerprint(documents)
