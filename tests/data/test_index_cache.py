"""The index cache: built once by one of many processes, and in no way hurt by kills, damage or a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import zlib

import numpy as np
import pytest
from number_corpus import NumberTokenizer, random_documents

from ftk.data import IndexedDataset, IndexedDatasetWriter
from ftk.data.corpora import index_cache
from ftk.data.corpora.index_cache import DEFAULT_FOLDER, IndexCache, file_identity
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset

BUILDER = """
    import os, sys, time
    import numpy as np
    from ftk.data.corpora import index_cache
    from ftk.data.corpora.index_cache import IndexCache

    index_cache.WORTH_CACHING = 0
    folder, seconds, timeout = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])

    def build():
        with open(os.path.join(folder, "builds.txt"), "a") as log:
            log.write(f"{os.getpid()}\\n")
        time.sleep(seconds)
        return np.arange(100_000) * 3

    array = IndexCache(folder, timeout).get("numbers", {"times": 3}, build, dtype=np.int64, count=100_000)
    print(int(array.sum()), "own" if array.flags.owndata else "mapped", flush=True)
"""
EXPECTED = str(int((np.arange(100_000) * 3).sum()))


@pytest.fixture(autouse=True)
def small_arrays_are_cached(monkeypatch):
    monkeypatch.setattr(index_cache, "WORTH_CACHING", 0)


@pytest.fixture
def builder(tmp_path):
    """Starts a process that wants the array; building it takes so many seconds."""
    (tmp_path / "builder.py").write_text(textwrap.dedent(BUILDER))
    (tmp_path / "cache").mkdir()
    started = []

    def start(seconds, timeout=60.0):
        arguments = [tmp_path / "builder.py", tmp_path / "cache", seconds, timeout]
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def builds(tmp_path):
    log = tmp_path / "cache" / "builds.txt"
    return log.read_text().splitlines() if log.exists() else []


def wait_for_builds(tmp_path, count):
    deadline = time.monotonic() + 300
    while len(builds(tmp_path)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_of_processes_that_start_together_one_builds(tmp_path, builder):
    outputs = [process.communicate(timeout=300)[0].split() for process in [builder(1.0) for _ in range(4)]]
    assert outputs == [[EXPECTED, "mapped"]] * 4
    assert len(builds(tmp_path)) == 1


def test_a_killed_builder_leaves_nothing_in_the_way(tmp_path, builder):
    first = builder(600.0)
    wait_for_builds(tmp_path, 1)
    waiting = builder(0.0)
    time.sleep(0.3)
    assert waiting.poll() is None
    first.send_signal(signal.SIGKILL)
    assert waiting.communicate(timeout=300)[0].split() == [EXPECTED, "mapped"]
    assert len(builds(tmp_path)) == 2


def test_a_kill_while_writing_leaves_no_file_under_the_name(tmp_path, builder):
    """The half-written file of a killed process is swept away by the next builder."""
    assert builder(0.0).communicate(timeout=300)[0].split() == [EXPECTED, "mapped"]
    (name,) = (path.name for path in (tmp_path / "cache").glob("numbers-*.npy"))
    (tmp_path / "cache" / name).unlink()
    half = tmp_path / "cache" / f"{name}.tmp-1"
    half.write_bytes(b"half")
    assert builder(0.0).communicate(timeout=300)[0].split() == [EXPECTED, "mapped"]
    assert not half.exists()


def test_who_waited_too_long_builds_for_itself(tmp_path, builder):
    first = builder(600.0)
    wait_for_builds(tmp_path, 1)
    out, err = builder(0.0, timeout=0.2).communicate(timeout=300)
    assert out.split() == [EXPECTED, "own"]
    assert "is being built by another process for more than 0.2 seconds" in err
    assert first.poll() is None


def cached(folder, count=1000, made=None, **depends_on):
    def build():
        if made is not None:
            made.append(count)
        return np.arange(count)

    cache = IndexCache(folder)
    return cache.get("numbers", {"count": count, **depends_on}, build, dtype=np.int64, count=count, is_sane=rises)


def rises(array):
    return bool((np.diff(array) > 0).all())


def test_the_name_is_a_hash_of_all_it_depends_on(tmp_path):
    made = []
    for seed in (1, 2, 1, 2):
        assert cached(tmp_path, made=made, seed=seed).tolist() == list(range(1000))
    assert len(made) == 2
    assert len(list(tmp_path.glob("*.npy"))) == 2
    assert not cached(tmp_path, seed=1).flags.writeable


def without_checksum(path):
    np.save(path, np.arange(1000))


def of_another_type(path):
    np.save(path, np.arange(2000, dtype=np.int32))
    path.write_bytes(path.read_bytes() + bytes(4))


def of_another_shape(path):
    np.save(path, np.arange(1000).reshape(10, 100))
    path.write_bytes(path.read_bytes() + bytes(4))


def with_one_bit_changed(path):
    content = bytearray(path.read_bytes())
    content[-12] ^= 16  # of the last number: it grows, so that the checksum alone sees it
    path.write_bytes(content)


def with_numbers_that_cannot_be(path):
    wrong = np.arange(1000)[::-1].copy()
    path.write_bytes(path.read_bytes()[:-8004] + wrong.tobytes() + zlib.crc32(wrong).to_bytes(4, "little"))


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "no array": lambda path: path.write_bytes(b"no array"),
    "half": lambda path: path.write_bytes(path.read_bytes()[:3000]),
    **{make.__name__: make for make in (without_checksum, of_another_type, of_another_shape, with_one_bit_changed)},
    **{make.__name__: make for make in (with_numbers_that_cannot_be, a_pipe)},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_built_anew_and_that_is_said_once(tmp_path, damage, caplog):
    cached(tmp_path)
    (path,) = tmp_path.glob("*.npy")
    DAMAGE[damage](path)
    made = []
    assert cached(tmp_path, made=made).tolist() == list(range(1000))
    assert made == [1000]
    (message,) = caplog.messages
    assert "is damaged" in message
    assert cached(tmp_path, made=made).tolist() == list(range(1000))
    assert made == [1000]


def test_numpy_reads_the_files_too(tmp_path):
    cached(tmp_path)
    (path,) = tmp_path.glob("*.npy")
    assert np.load(path, mmap_mode="r").tolist() == list(range(1000))


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path, caplog):
    cached(tmp_path)
    (path,) = tmp_path.glob("*.npy")
    path.unlink()
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").symlink_to(tmp_path / "victim")
    assert cached(tmp_path).tolist() == list(range(1000))
    assert not (tmp_path / "victim").exists()
    assert "is a link" in caplog.text


def test_a_user_without_a_home_has_no_cache_and_hears_nothing(monkeypatch, caplog):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cached(DEFAULT_FOLDER).tolist() == list(range(1000))
    assert IndexCache(DEFAULT_FOLDER).folder is None
    assert not caplog.messages


def test_a_folder_that_cannot_be_written_does_not_stop_anything(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert cached(tmp_path / "file" / "cache").tolist() == list(range(1000))
    assert "`index_cache`" in caplog.text


def test_an_error_of_the_builder_is_its_own(tmp_path):
    def build():
        raise OSError("the data cannot be read")

    with pytest.raises(OSError, match="the data cannot be read"):
        IndexCache(tmp_path).get("numbers", {}, build, dtype=np.int64, count=1)
    assert cached(tmp_path).tolist() == list(range(1000))


def test_small_arrays_are_not_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "WORTH_CACHING", 1001)
    assert cached(tmp_path).tolist() == list(range(1000))
    assert os.listdir(tmp_path) == []


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cached(None).tolist() == list(range(1000))
    assert os.listdir(tmp_path) == []


def test_a_changed_file_has_another_identity(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"a" * 100)
    before = file_identity(path)
    assert file_identity(path) == before
    path.write_bytes(b"b" * 100)
    assert file_identity(path) != before


def test_running_sums_of_a_large_corpus_are_a_file_that_all_processes_map(tmp_path):
    """The samples are the same with the file and without; other data has another file."""
    cache, config = IndexCache(tmp_path / "cache"), BlankInfillingConfig(seq_length=32)
    for number in range(2):
        corpus = random_documents([20, 50, 7, 300, 12, 9], seed=number)
        with IndexedDatasetWriter(tmp_path / "train", np.uint16, overwrite=True) as writer:
            for document in range(len(corpus)):
                writer.add(corpus[document])
        plain = GLMBlankDataset(corpus, NumberTokenizer(), config, 1)
        for _ in range(2):
            made = GLMBlankDataset(IndexedDataset(tmp_path / "train"), NumberTokenizer(), config, 1, cache)
            for index in range(len(plain)):
                assert made.sample(1, index)["tokens"].tolist() == plain.sample(1, index)["tokens"].tolist()
        assert len(list((tmp_path / "cache").glob("cumulative-*.npy"))) == number + 1
