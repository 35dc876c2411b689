"""Samples that fail, workers that die and signals: the error that an iterator reports, and its cleanup."""

from __future__ import annotations

import errno
import faulthandler
import gc
import itertools
import multiprocessing
import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
from number_corpus import VOCAB_SIZE, NumberTokenizer, random_documents

from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.batches.workers import _abandon_queues
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from ftk.errors import UserError
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from tests.data.numbers_dataset import COLLATER, Numbers, equal_batches, iterator, workers_end_with_their_test  # noqa: F401
from tests.tiers import slow_but


class Refusing(Numbers):
    def sample(self, epoch, index):
        raise UserError(f"sample {index} is damaged")


class FailingAt(Numbers):
    def __init__(self, count, index):
        super().__init__(count)
        self.index = index

    def sample(self, epoch, index):
        if index == self.index:
            raise ZeroDivisionError("a bug")
        return super().sample(epoch, index)


class DyingAt(Numbers):
    def __init__(self, count, index, signum):
        super().__init__(count)
        self.index = index
        self.signum = signum

    def sample(self, epoch, index):
        if index == self.index:
            faulthandler.disable()  # pytest's, which would print the threads of a death that is meant
            os.kill(os.getpid(), self.signum)
        return super().sample(epoch, index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_user_error_in_a_sample_arrives_as_it_is(num_workers):
    made = iterator(dataset=Refusing(5), shuffle=False, num_workers=num_workers)
    with pytest.raises(UserError) as caught:
        list(made.batches())
    assert str(caught.value) == "sample 0 is damaged"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kept", [0, 1, 5000, 199_990])
def test_a_file_that_becomes_shorter_under_a_run_is_one_error_in_words(tmp_path, num_workers, kept):
    with IndexedDatasetWriter(tmp_path / "train", np.uint16) as writer:
        for _ in range(1000):
            writer.add(np.full(100, 30))
    dataset = GLMBlankDataset(IndexedDataset(tmp_path / "train"), NumberTokenizer(), BlankInfillingConfig(), 1)
    batches = EpochBatchIterator(dataset, COLLATER, batch_size=2, num_workers=num_workers).batches()
    next(batches)
    os.truncate(tmp_path / "train.bin", kept)
    with pytest.raises(OSError, match=rf"became shorter .*ends at byte {kept:,} of 200,000") as failed:
        list(batches)
    assert failed.value.filename == str(tmp_path / "train.bin")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_token_outside_of_the_vocabulary_is_named_with_its_document(tmp_path, num_workers):
    with IndexedDatasetWriter(tmp_path / "train", np.int32) as writer:
        for number in range(20):
            writer.add([30, 31, VOCAB_SIZE if number == 7 else 32])
    dataset = GLMBlankDataset(IndexedDataset(tmp_path / "train"), NumberTokenizer(), BlankInfillingConfig(), 1)
    with pytest.raises(UserError, match=r"train.bin: document 7 holds token 600, outside the vocabulary of 600"):
        list(EpochBatchIterator(dataset, COLLATER, batch_size=1, num_workers=num_workers).batches())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("many", [False, True])
def test_the_sample_that_fails_is_named(num_workers, many, caplog):
    dataset = FailingAt(50, 17)
    if many:
        dataset.samples = lambda epoch, indices: [dataset.sample(epoch, int(index)) for index in indices]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        list(iterator(dataset=dataset, num_workers=num_workers, shuffle=False).batches())
    assert "sample 17 of epoch 1 cannot be made" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_make_no_batch_are_named(num_workers, caplog):
    made = EpochBatchIterator(Numbers(9), no_batch, batch_size=3, shuffle=False, num_workers=num_workers)
    with pytest.raises(KeyError):
        list(made.batches())
    assert "no batch can be made of samples 0, 1, 2 of epoch 1" in caplog.text


def no_batch(samples):
    raise KeyError("a bug")


@pytest.mark.parametrize(("index", "signum"), [(0, signal.SIGKILL), (17, signal.SIGSEGV), (49, signal.SIGABRT)])
def test_a_worker_that_dies_is_reported(index, signum):
    others = {*multiprocessing.active_children()}
    made = iterator(dataset=DyingAt(50, index, signum), num_workers=2, shuffle=False)
    with pytest.raises(RuntimeError, match=r"^data worker [12] of 2 \(pid \d+\) died: ") as caught:
        list(made.batches())
    assert ("fewer workers (`num_workers`)" in str(caught.value)) == (signum == signal.SIGKILL)
    assert f"died: killed by {signal.Signals(signum).name}" in str(caught.value)
    assert {*multiprocessing.active_children()} == others
    assert made.state_dict()["samples_consumed"] <= index // 6 * 6


def test_a_queue_whose_lock_was_left_taken_does_not_hold_up_the_exit():
    queue = multiprocessing.Queue()
    queue.put(1)  # starts the thread that closing would wait for
    queue._notempty.acquire()  # as the death of a worker may leave it
    _abandon_queues(SimpleNamespace(_index_queues=[queue]))
    queue.close()  # returns; without the line above it waits for ever
    queue._notempty.release()


def test_samples_of_a_file_in_spawned_workers_are_those_of_memory(tmp_path):
    documents = random_documents([20, 50, 7, 300])
    with IndexedDatasetWriter(tmp_path / "train", np.uint16) as writer:
        for number in range(len(documents)):
            writer.add(documents[number])
    tokenizer, config = NumberTokenizer(), BlankInfillingConfig(seq_length=32)
    in_memory, on_disk = (
        GLMBlankDataset(corpus, tokenizer, config, 1) for corpus in (documents, IndexedDataset(tmp_path / "train"))
    )
    expected = EpochBatchIterator(in_memory, COLLATER, batch_size=4, seed=5)
    spawned = EpochBatchIterator(
        on_disk, COLLATER, batch_size=4, seed=5, num_workers=1, multiprocessing_context="spawn"
    )
    assert equal_batches(list(spawned.batches()), list(expected.batches()))


PLUGIN = """
    import numpy as np
    from ftk.tasks.glm_blank.config import BlankInfillingConfig

    class Constant:
        def __len__(self):
            return 4

        def sizes(self, epoch):
            return np.full(4, 3, dtype=np.int32)

        def sample(self, epoch, index):
            ones = np.ones(3, dtype=np.int64)
            return {"tokens": ones, "targets": ones, "loss_mask": ones.astype(bool),
                    "position_ids": np.stack([ones, ones]), "context_length": np.int64(1), "objective": np.int64(0)}
"""

SPAWNING = """
    import sys
    from types import SimpleNamespace
    from ftk.data.batches.collate import Collater
    from ftk.data.batches.iterator import EpochBatchIterator
    from ftk.plugins import import_user_dir

    if __name__ == "__main__":
        import_user_dir(sys.argv[1])
        import plugin_of_constants
        made = EpochBatchIterator(plugin_of_constants.Constant(), Collater(SimpleNamespace(pad=0)), batch_size=2,
                                  num_workers=1, user_dir=sys.argv[1], multiprocessing_context="spawn")
        print(sum(int(batch.inputs["tokens"].sum()) for batch in made.batches()))
        made.close()
"""


def script(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_plugin_dataset_reaches_spawned_workers(tmp_path):
    plugin = tmp_path / "elsewhere" / "plugin_of_constants"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(textwrap.dedent(PLUGIN))
    done = subprocess.run(
        [sys.executable, script(tmp_path, SPAWNING), plugin], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "12"


INTERRUPTED = """
    import signal, time
    from types import SimpleNamespace
    import numpy as np
    from ftk.data.batches.collate import Collater
    from ftk.data.batches.iterator import EpochBatchIterator

    class Slow:
        def __len__(self):
            return 10000

        def sizes(self, epoch):
            return np.full(10000, 3, dtype=np.int32)

        def sample(self, epoch, index):
            time.sleep(0.01)
            ones = np.ones(3, dtype=np.int64)
            return {"tokens": ones, "targets": ones, "loss_mask": ones.astype(bool),
                    "position_ids": np.stack([ones, ones]), "context_length": np.int64(1), "objective": np.int64(0)}

    def stop(signum, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    made = EpochBatchIterator(Slow(), Collater(SimpleNamespace(pad=0)), batch_size=2, num_workers=2)
    try:
        for batch in made.batches():
            print("batch", flush=True)
    except KeyboardInterrupt:
        time.sleep(0.5)  # saving: a worker's death would be raised here
        print("interrupted after", made.state_dict()["samples_consumed"], flush=True)
"""


@pytest.mark.parametrize("signal_number", slow_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_to_the_process_group_is_answered_by_the_main_process_only(tmp_path, signal_number):
    process = subprocess.Popen(
        [sys.executable, script(tmp_path, INTERRUPTED)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(2):  # of both workers, which have begun then
        assert process.stdout.readline() == "batch\n"
    os.killpg(process.pid, signal_number)
    out, err = process.communicate(timeout=60)
    assert "interrupted after" in out.splitlines()[-1]
    assert err == ""
    assert process.returncode == 0


@pytest.mark.parametrize("started", [0, 4, 12])
@pytest.mark.parametrize(
    ("code", "need"), [(errno.ENOSYS, "/dev/shm"), (errno.ENOSPC, "/dev/shm"), (errno.EMFILE, "(ulimit -n)")]
)
def test_workers_that_cannot_start_are_an_error_that_names_the_way_out(monkeypatch, recwarn, started, code, need):
    made = iterator(num_workers=2, multiprocessing_context="fork")
    make = multiprocessing.synchronize.SemLock.__init__
    count = itertools.count()

    def refuse(self, *arguments, **options):
        if next(count) >= started:
            raise OSError(code, os.strerror(code))
        make(self, *arguments, **options)

    unraisable = []
    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refuse)
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(OSError, match="the data workers cannot start") as caught:
        next(made.batches())
    assert need in str(caught.value)
    assert "`num_workers` 0" in str(caught.value)
    del caught
    gc.collect()
    assert unraisable == []
    assert multiprocessing.active_children() == []
