"""Files are read with limits and appear whole or not at all; what killed writers left is removed, what lives is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ftk import files, parsing
from ftk.errors import visible
from tests.processes import run_command, small_files_only

WAITS_IN = """
import sys, time
from pathlib import Path
from ftk import files
with files.{name}(Path(sys.argv[1])) as made:
    print("ready", flush=True)
    time.sleep(600)
"""


ALIASES = b"a: &a [x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (name, name, b",".join([b"*%c" % (name - 1)] * 9)) for name in b"bcdefghijkl"
)
"""Each name stands for nine of the one before."""


@pytest.fixture
def writer_in_the_middle(tmp_path):
    """Starts a process that is in the middle of `whole_file` or `temporary_folder`; it is killed in the end."""
    started = []

    def start(name: str, path: Path) -> subprocess.Popen[str]:
        code = WAITS_IN.format(name=name)
        process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, kind):
    path = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    for read in (files.read_json, files.read_yaml, files.open_regular):
        with pytest.raises(OSError, match="is a") as refused:
            read(path)
        assert files.reason(refused.value).startswith("is a ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b"1" * 5000, "is not JSON"),
    ],
)
def test_every_defect_of_json_is_one_kind_of_error(content, message):
    with pytest.raises(ValueError, match=message):
        parsing.parse_json(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"".join(b" " * i + b"a:\n" for i in range(200)), "nested too deeply"),
        (ALIASES, "more than 100,000 values"),
        (b"&a [*a]", "alias within"),
        (b"a: [", "is not a YAML file"),
        (b"a: \xff", "is not a YAML file: .*; it is not UTF-8: convert it, e.g. with iconv -f GB18030 "),
        (b"a:\n\tb: 1", "is not a YAML file: .*; it is a tab: indent with spaces$"),
        ("a: 1\nb： 1\nc: 2", "is not a YAML file: .*; near it is '：': write ':'$"),
        ("a: [1， 2\n", "is not a YAML file: .*; near it is '，': write ','$"),
        (b"a: 2020-13-45", "is not a YAML file"),
        (b"{[1]: 2}", "is not a YAML file"),
        (b"? {a: b}\n: c", "is not a YAML file"),
        (b"a: !!python/object/apply:os.system [id]", "is not a YAML file"),
        (b"a: 1\n---\nb: 2", "is not a YAML file"),
    ],
)
def test_every_defect_of_yaml_is_one_kind_of_error(content, message):
    with pytest.raises(ValueError, match=message):
        parsing.parse_yaml(content)


def test_large_files_are_refused_before_they_are_parsed(tmp_path):
    (tmp_path / "large").write_bytes(b"a: 1\n" * 300_000)
    with pytest.raises(ValueError, match="larger than 1,048,576 bytes"):
        files.read_yaml(tmp_path / "large")


def test_a_file_is_replaced_in_one_step_and_an_error_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="in the middle"), files.whole_file(path) as file:  # noqa: PT012
        file.write(b"half")
        raise RuntimeError("in the middle")
    assert path.read_text() == "old"
    files.write_whole(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_new_files_have_the_users_permissions_and_replaced_ones_keep_theirs(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_whole(tmp_path / "new", "")
        (tmp_path / "old").touch(0o600)
        files.write_whole(tmp_path / "old", "")
        with files.temporary_folder(tmp_path / "folder") as folder:
            assert folder.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o600


def test_links_of_any_name_are_neither_emptied_nor_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("file", "file.tmp", "file.tmp-1", f"file.tmp-{os.getpid()}", "lock"):
        (tmp_path / name).symlink_to(victim)
    files.write_whole(tmp_path / "file", "mine")
    for open_it in (files.open_lock, files.open_to_write):
        with pytest.raises(OSError, match="is a link; remove it"):
            open_it(tmp_path / "lock")
    assert victim.read_text() == "precious"
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "file").is_symlink()


def test_a_lock_file_keeps_its_content(tmp_path):
    (tmp_path / "lock").write_text("precious")
    os.close(files.open_lock(tmp_path / "lock"))
    assert (tmp_path / "lock").read_text() == "precious"


@pytest.mark.parametrize("name", ["whole_file", "temporary_folder"])
def test_leftovers_of_the_killed_go_and_those_of_the_living_stay(tmp_path, writer_in_the_middle, name):
    path = tmp_path / "result"
    living, killed = writer_in_the_middle(name, path), writer_in_the_middle(name, path)
    assert len(list(tmp_path.iterdir())) == 2
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    removed = files.remove_leftovers(path)
    assert len(removed) == 1
    assert len(list(tmp_path.iterdir())) == 1
    assert living.poll() is None
    files.write_whole(path, "mine")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    path = tmp_path / "folder"
    for content in ("old", "new"):
        with files.temporary_folder(path) as folder:
            (folder / "file").write_text(content)
            files.put_in_place(folder, path)
    assert (path / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["folder"]


def test_the_exchange_of_two_folders_is_one_step(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "of_a").touch()
    if not files._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system does not exchange names")
    assert (tmp_path / "b" / "of_a").exists()


def test_a_folder_that_stepped_aside_is_brought_back(tmp_path):
    (tmp_path / "folder.tmp-abc.old").mkdir()
    (tmp_path / "folder.tmp-abc.old" / "file").write_text("old")
    (tmp_path / "folder.tmp-abc").mkdir()
    files.remove_leftovers(tmp_path / "folder")
    assert (tmp_path / "folder" / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["folder"]


def test_many_writers_of_one_file_do_not_harm_each_other(tmp_path):
    path, errors = tmp_path / "file", []

    def write(number: int) -> None:
        try:
            for _ in range(50):
                files.write_whole(path, str(number) * 1000)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(path.read_text())) == 1
    assert os.listdir(tmp_path) == ["file"]


def test_text_cannot_steer_a_terminal():
    assert visible("plain 中文 é\tx") == "plain 中文 é\tx"
    assert visible("\x1b[2Jevil\r\x07\x9b\u202e\u200d\udc80") == r"\x1b[2Jevil\r\x07\x9b\u202e\u200d\udc80"


def test_json_of_any_width_is_read_and_of_any_depth_is_not():
    assert parsing.parse_json("[" * parsing.MAX_DEPTH + "]" * parsing.MAX_DEPTH) is not None
    assert parsing.parse_json(str([[]] * 1000)) == [[]] * 1000
    for depth in (parsing.MAX_DEPTH + 2, 500, 100_000):
        for opened, closed in (("[", "]"), ('{"a":', "}")):
            with pytest.raises(ValueError, match="nested too deeply"):
                parsing.parse_json(opened * depth + "1" + closed * depth)


def test_failed_write_names_the_file_that_was_to_be_written(tmp_path):
    code = """
import sys
from ftk import files
try:
    files.write_whole(sys.argv[1], bytes(500_000))
except OSError as error:
    print(error.strerror, error.filename)
"""
    path = tmp_path / "out.bin"
    done = run_command("-c", code, path, before=small_files_only)
    assert done.stdout == f"File too large {path}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket"])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, kind):
    path = tmp_path / "it"
    server = socket.socket(socket.AF_UNIX)
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "socket": lambda: server.bind(str(path))}[kind]()
    before = os.stat(path)
    with pytest.raises(OSError, match="is a (directory|pipe|socket)"):
        files.write_whole(path, b"new")
    assert os.path.samestat(os.stat(path), before)
    assert os.listdir(tmp_path) == ["it"]
    server.close()


def test_a_device_is_not_replaced():
    before = os.stat(os.devnull)
    with pytest.raises(OSError, match="is a device"):
        files.write_whole(os.devnull, b"new")
    assert os.path.samestat(os.stat(os.devnull), before)


def test_a_number_that_a_float_holds_as_zero_is_no_yaml():
    assert parsing.parse_yaml("[0.0, -0.0e+5, 1.0e-300]") == [0.0, 0.0, 1e-300]
    with pytest.raises(ValueError, match="1.0e-400 is too small to differ from 0"):
        parsing.parse_yaml("a: 1.0e-400")


def test_lines_are_read_one_by_one_and_one_that_is_too_long_is_not_held(tmp_path):
    (tmp_path / "lines").write_bytes(b"12345\n" + b"x" * 6 + b"\n" + b"y" * 1000 + b"\n\n123456\nend")
    assert list(files.read_lines(tmp_path / "lines", 5)) == [b"12345\n", None, None, b"\n", None, b"end"]
    (tmp_path / "lines").write_bytes(b"z" * 12)
    assert list(files.read_lines(tmp_path / "lines", 5)) == [None]
