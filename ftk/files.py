"""Files for all rooms: read only if they are regular and not too large, written completely or not at all.

Reading: `open_regular`, `read_lines`, `read_json`, `read_yaml`. A defect is an `OSError` or a `ValueError`, whose text
`reason` gives for a message. Writing: `write_whole`, `whole_file`, `temporary_folder` with `put_in_place`; a temporary
name is new, never a link, and locked by the process that writes it, so that the next writer recognises leftovers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ftk.errors import UserError
from ftk.parsing import parse_json, parse_yaml

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

MAX_JSON_BYTES = 1 << 28
MAX_YAML_BYTES = 1 << 20
_KINDS = {
    stat.S_ISDIR: "is a directory",
    stat.S_ISFIFO: "is a pipe, not a regular file",
    stat.S_ISSOCK: "is a socket, not a regular file",
    stat.S_ISCHR: "is a device, not a regular file",
    stat.S_ISBLK: "is a device, not a regular file",
}
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)

PathLike = str | os.PathLike[str]
FileState = tuple[int, int, int, int]
"""Device, inode, bytes and time of the last change: the same as long as the file is not written to."""


def open_regular(path: PathLike) -> io.FileIO:
    """Open a file for reading, unbuffered; a pipe, device or directory is refused without waiting for it.

    Raises:
        OSError: it cannot be opened or is no regular file; `strerror` says what it is.
    """
    return io.FileIO(_opened(path, os.O_RDONLY), "rb")


def state_of(descriptor: int) -> FileState:
    """Identifies an open file and its content, to notice a later change."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def shortened(path: PathLike, found: int, expected: int) -> OSError:
    """The error of a file that has become shorter while it was read: where it ends, and where it should end."""
    how = f"at byte {found:,} of {expected:,}; run again when nothing writes to it"
    return OSError(errno.EIO, f"File became shorter while it was read (it ends {how})", os.fspath(path))


def read_bytes(path: PathLike, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`.

    Raises:
        OSError: as of `open_regular`.
        ValueError: the file is larger.
    """
    with open_regular(path) as file:
        content = bytearray()
        block = min(1 << 24, max(1 << 12, os.fstat(file.fileno()).st_size + 1))  # memory per read
        while len(content) <= max_bytes and (part := file.read(min(block, max_bytes + 1 - len(content)))):
            content += part
    if len(content) > max_bytes:
        raise ValueError(f"is larger than {max_bytes:,} bytes")
    return bytes(content)


def read_lines(path: PathLike, max_bytes: int) -> Iterator[bytes | None]:
    """The lines of a regular file with their ends, one at a time; None stands for one of more than `max_bytes`.

    Raises:
        OSError: as of `open_regular`.
    """
    with open_regular(path) as raw, io.BufferedReader(raw) as file:
        while line := file.readline(max_bytes + 1):
            fits = len(line) <= max_bytes or line.endswith(b"\n")
            yield line if fits else None
            while not fits and line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)


def read_json(path: PathLike, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value of a JSON file.

    Raises:
        OSError: as of `open_regular`.
        ValueError: it is too large, or as of `ftk.parsing.parse_json`.
    """
    return parse_json(read_bytes(path, max_bytes))


def read_yaml(path: PathLike) -> Any:
    """The value of a YAML file of at most 1 MiB, without Python objects.

    Raises:
        OSError: as of `open_regular`.
        ValueError: it is too large, or as of `ftk.parsing.parse_yaml`.
    """
    return parse_yaml(read_bytes(path, MAX_YAML_BYTES))


def expand_home(path: PathLike) -> str:
    """A path in which `~` or `~user` at the start is replaced by the home folder.

    Raises:
        ValueError: there is no such folder (a container may run as a user without one), or no file can have the name.
    """
    found = os.path.expanduser(os.fspath(path))
    if found.startswith("~"):
        raise ValueError("there is no such home folder; write a path without ~, or ./~")
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(found):
            return found
    raise ValueError("no file can have this name")


def reason(error: OSError | ValueError) -> str:
    """What is wrong with a file, to follow its name in a message: "No such file or directory", "is not JSON (...)"."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"{text} for ulimit -f or the file system" if text == os.strerror(errno.EFBIG) else text


@contextlib.contextmanager
def as_user_error(place: object, failed: str = "") -> Iterator[None]:
    """What is wrong with a file inside becomes a `UserError`: `PLACE: REASON`, or `PLACE: FAILED (REASON)`."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = f"{failed} ({reason(error)})" if failed else reason(error)
        raise UserError(f"{place}: {why}") from error


def sha256_of(path: PathLike) -> str:
    """sha256 of a regular file, hex."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    with open_regular(path) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def write_whole(path: PathLike, content: bytes | str) -> None:
    """Write a file, or replace one, in one step; it has reached the disk on return.

    Args:
        path: the file; its folder exists. A link of that name is replaced, not followed.
        content: text is written in UTF-8.

    Raises:
        OSError: the disk is full, `path` is a folder, a device or the like; what was there before is still there.
    """
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_file(path: PathLike) -> Iterator[BinaryIO]:
    """A file to write to; it is renamed to `path` when the block ends, and removed on an error.

    Leftovers of killed writers of the same file are removed.

    Raises:
        OSError: as of `write_whole`.
    """
    path = Path(path)
    with contextlib.suppress(FileNotFoundError):
        _check_regular(os.stat(path, follow_symlinks=False), path)
    remove_leftovers(path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(naming(path))
        descriptor, temporary = _new_file(path)
        stack.callback(temporary.unlink, missing_ok=True)
        with open(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            os.fchmod(descriptor, _mode_of(path))
            os.replace(temporary, path)  # while the file is locked: none takes it for a leftover
        stack.pop_all()
    sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Adds this file's name to an `OSError` that has none, as from a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def new_file_for_torch(path: Path) -> Iterator[io.FileIO]:
    """A new file for torch's own writers, which hide the cause of a failed write, or abort the process.

    Raises:
        OSError: a write failed; raised when the block ends.
    """
    with _DeferredErrors(path, "xb") as file:
        try:
            yield file
        finally:
            if file.error is not None:
                raise file.error


@contextlib.contextmanager
def temporary_folder(path: PathLike) -> Iterator[Path]:
    """An empty folder next to `path`, locked by this process and removed when the block ends, if it still exists.

    Rename it to `path` with `put_in_place` within the block. Leftovers of killed writers are removed first.

    Raises:
        OSError: it cannot be made.
    """
    path = Path(path)
    remove_leftovers(path)
    while True:
        # By its name, since a relative one becomes absolute from Python 3.12 on.
        folder = path.parent / Path(tempfile.mkdtemp(prefix=f"{path.name}.tmp-", dir=path.parent)).name
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        if _lock(descriptor) and _is(folder, descriptor):
            break
        os.close(descriptor)  # removed as a leftover before it was locked
    try:
        os.fchmod(descriptor, 0o777 & ~_umask())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def put_in_place(folder: Path, path: Path) -> None:
    """Rename a finished folder to `path`; an older one is removed. At every moment one of the two is `path`.

    Where the file system cannot exchange two names there is a moment with neither; if the power fails then,
    `remove_leftovers` restores the old one.

    Raises:
        OSError: nothing has changed.
    """
    if not os.path.lexists(path):
        os.rename(folder, path)
        sync_folder(path.parent)
        return
    if not _exchange(folder, path):
        moved = folder.with_name(f"{folder.name}.old")
        os.rename(path, moved)
        try:
            os.rename(folder, path)
        except BaseException:
            os.rename(moved, path)
            raise
        os.rename(moved, folder)
    sync_folder(path.parent)
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)  # what remains is a leftover, which the next writer removes


def sync_tree(folder: Path) -> None:
    """Flush all files and names under `folder` to the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        elif not path.is_symlink():
            with open_regular(path) as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: PathLike) -> None:
    """Flush the names in `folder` to the disk, where the system can open folders."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_leftovers(path: PathLike) -> list[Path]:
    """Remove half-written files of killed processes for `path`: its temporary names that no process has locked.

    Returns:
        What was removed.
    """
    path = Path(path)
    if not path.parent.is_dir():
        return []
    removed = []
    names = [entry.name for entry in os.scandir(path.parent) if entry.name.startswith(f"{path.name}.tmp-")]
    for leftover in (path.with_name(name) for name in sorted(names)):
        if leftover.name.endswith(".old") and not os.path.lexists(path):
            with contextlib.suppress(OSError):
                os.rename(leftover, path)
        elif _remove_unless_locked(leftover):
            removed.append(leftover)
    return removed


def open_lock(path: PathLike) -> int:
    """Open a lock file, made if it is missing; its content is left as it is, and a link is not followed.

    Returns:
        The descriptor, for `fcntl.flock`; a child process does not inherit it.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    try:
        return _opened(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link; remove it", os.fspath(path)) from None
        raise


def open_to_write(path: PathLike, *, append: bool = False) -> io.FileIO:
    """Open a file to write and read, made if it is missing, its content kept; for files that grow in place.

    Args:
        path: the file; a link is not followed.
        append: whether each write goes to the end.

    Raises:
        OSError: it cannot be opened, is a link, or is no regular file.
    """
    descriptor = open_lock(path)
    if append and fcntl is not None:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return io.FileIO(descriptor, "r+b")


class _DeferredErrors(io.FileIO):
    """Keeps the first error of a write instead of raising it; what is written afterwards is dropped."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left and self.error is None:
            try:
                left = left[super().write(left) :]
            except OSError as error:
                self.error = error
        return size


def _opened(path: PathLike, flags: int, mode: int = 0o777) -> int:
    """A descriptor of a regular file, opened without waiting for what else may have its name."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        _check_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(status: os.stat_result, path: PathLike) -> None:
    for is_kind, words in _KINDS.items():
        if is_kind(status.st_mode):
            code = errno.EISDIR if is_kind is stat.S_ISDIR else errno.EINVAL
            raise OSError(code, words, os.fspath(path))


def _new_file(path: Path) -> tuple[int, Path]:
    """A locked, empty file with a new name next to `path`."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.tmp-", dir=path.parent)
        if _lock(descriptor) and _is(name, descriptor):
            return descriptor, Path(name)
        os.close(descriptor)  # removed as a leftover before it was locked


def _lock(descriptor: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process takes this for a leftover and is about to remove it
        return False
    except OSError:  # a file system without locks; there nothing counts as a leftover
        return True
    return True


def _is(path: PathLike, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_unless_locked(leftover: Path) -> bool:
    try:
        descriptor = os.open(leftover, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | _NO_FOLLOW)
    except OSError:
        return False
    try:
        if fcntl is None:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    except OSError:  # locked, of another user, or gone already
        return False
    finally:
        os.close(descriptor)
    return True


def _mode_of(path: Path) -> int:
    """Permissions of the file that is replaced, or those of a new one."""
    with contextlib.suppress(OSError):
        mode = os.stat(path, follow_symlinks=False).st_mode
        if stat.S_ISREG(mode):
            return stat.S_IMODE(mode)
    return 0o666 & ~_umask()


def _umask() -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/self/status", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)  # elsewhere it cannot be read without being set
    os.umask(mask)
    return mask


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(second))
