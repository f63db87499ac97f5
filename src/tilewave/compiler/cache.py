"""Compiled programs on disk, so that a second process compiles nothing; and what else is found out only once.

An entry is one file, named by the key of what it was made from. It is written under a temporary name in
the same directory and renamed, so that readers see a whole entry or none, on any file system that can rename.
It carries a checksum of everything in it; whatever fails that check, is of another format or under another
key is dropped as if it were not there. The directory and its entries belong to one user: what others own or
could have written is not read. When the cache cannot be used, programs live in memory only, and one warning
says so.

`load_entry` and `store_entry` keep other things beside the programs, in the same way: what they hold is
sealed by `seal`, a header in JSON and parts in bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tilewave.compiler.records import Program, kernels_of

FORMAT_VERSION = 3
"""Part of every key; raise it when the meaning of an entry or of the key changes."""

_MAGIC = b"tilewave program\n"
_SUFFIX = ".program"
_TEMPORARY_SUFFIX = ".tmp"
_ABANDONED_AFTER_S = 3600.0
_LARGEST_ENTRY = 1 << 28
_LOCK_POLL_S = 0.02

_Kept = TypeVar("_Kept")

_state_lock = threading.Lock()
_warned: set[Path] = set()
_swept: set[Path] = set()


def _renew_lock() -> None:
    """In a forked child: a lock that another thread of the parent held would never be released."""
    global _state_lock
    _state_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class CacheWarning(UserWarning):
    """The program cache cannot be used; programs are kept in memory only."""


class _Refused(Exception):
    """The cache's directory or an entry is not ours alone."""


def cache_directory() -> Path:
    """Where compiled programs are kept: ``TILEWAVE_CACHE_DIR``, or the user's cache directory.

    A path that is not absolute (no home directory, the current directory is gone) is not used as a cache.
    """
    if asked := os.environ.get("TILEWAVE_CACHE_DIR"):
        path = Path(asked).expanduser() if asked.startswith("~") else Path(asked)
        with suppress(FileNotFoundError):  # the current directory may be gone
            return path.absolute()
        return path
    from platformdirs import user_cache_path

    try:
        return user_cache_path("tilewave", appauthor=False) / "programs"
    except RuntimeError:  # no home directory
        return Path("~/.cache/tilewave/programs")


def load(key: str) -> Program | None:
    """The program stored under ``key``, or None. Never raises for the state of the disk."""
    return load_entry(key + _SUFFIX, lambda data: decode(data, key))


def store(key: str, program: Program) -> None:
    """Keep ``program`` under ``key``, if the directory lets us. Never raises for the state of the disk."""
    store_entry(key + _SUFFIX, encode(key, program))


def load_entry(name: str, decoded: Callable[[bytes], _Kept | None]) -> _Kept | None:
    """What ``decoded`` makes of the entry of this file name, or None. Never raises for the state of the disk.

    An entry of which ``decoded`` makes None is removed: it is damaged, or of another format.
    """
    directory = cache_directory()
    try:
        with _opened(directory) as descriptor:
            data = _read_entry(descriptor, name)
            kept = decoded(data) if data is not None else None
            if data is not None and kept is None:
                os.unlink(name, dir_fd=descriptor)
            return kept
    except FileNotFoundError:
        return None
    except (_Refused, OSError) as error:
        _warn_once(directory, error)
        return None


def store_entry(name: str, data: bytes) -> bool:
    """Keep an entry under a file name; whether the directory let us. Never raises for its state."""
    directory = cache_directory()
    try:
        try:
            _store_in(directory, name, data)
        except FileNotFoundError:
            # The directory vanished between its making and our writing: once is an accident.
            _store_in(directory, name, data)
    except (_Refused, OSError) as error:
        _warn_once(directory, error)
        return False
    return True


def remove_entry(name: str) -> None:
    """Forget the entry of this file name, if there is one. Never raises for the state of the disk."""
    directory = cache_directory()
    try:
        with _opened(directory) as descriptor:
            os.unlink(name, dir_fd=descriptor)
    except FileNotFoundError:
        pass
    except (_Refused, OSError) as error:
        _warn_once(directory, error)


@contextmanager
def exclusive(name: str, patience_s: float) -> Iterator[bool]:
    """Hold a lock that all processes with this cache directory share; yields whether we may go ahead.

    False: another process held it for longer than ``patience_s``. Where the directory cannot be written there
    is no lock and nobody to wait for. The lock goes with the process that holds it, and a child of a fork
    does not inherit it; it does not keep threads of one process apart.
    """
    directory = cache_directory()
    descriptor = None
    try:
        _make_private(directory)
        with _opened(directory) as opened:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=opened)
    except (_Refused, OSError) as error:
        _warn_once(directory, error)
    try:
        yield descriptor is None or _locked(descriptor, patience_s)
    finally:
        if descriptor is not None:
            os.close(descriptor)  # gives the lock back


def _locked(descriptor: int, patience_s: float) -> bool:
    """Whether the lock was got; a file system without locks is as good as one that nobody else uses."""
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EINTR):
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(_LOCK_POLL_S)


def _store_in(directory: Path, name: str, data: bytes) -> None:
    _make_private(directory)
    with _opened(directory) as descriptor:
        _sweep_once(directory, descriptor)
        _write_entry(descriptor, name, data)


def _make_private(directory: Path) -> None:
    """Create the directory and what is missing above it, for this user only, whatever the umask."""
    _refuse_if_relative(directory)
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for level in reversed(missing):
        with suppress(FileExistsError):
            level.mkdir(mode=0o700)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of the directory: all work goes through it, so a swap of the path changes nothing."""
    _refuse_if_relative(directory)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _refuse_if_shared(os.fstat(descriptor), "it")
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_if_relative(directory: Path) -> None:
    if not directory.is_absolute():
        raise _Refused("there is no home directory, or the current directory is gone")


def _refuse_if_shared(status: os.stat_result, what: str) -> None:
    if status.st_uid != os.geteuid():
        raise _Refused(f"{what} belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Refused(f"{what} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})")


def _read_entry(directory: int, name: str) -> bytes | None:
    """The bytes of an entry; None if there is none, none at all if it is not a plain file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a symbolic link: not written by us
            return b""
        raise
    try:
        status = os.fstat(descriptor)
        _refuse_if_shared(status, f"its entry {name}")
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_ENTRY:
            return b""
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(_LARGEST_ENTRY)
    finally:
        os.close(descriptor)


def _write_entry(directory: int, name: str, data: bytes) -> None:
    """Write a whole entry or none: under a temporary name, then renamed."""
    temporary = f"{name}.{os.getpid()}.{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def _sweep_once(directory: Path, descriptor: int) -> None:
    """Once a process: remove temporary files that killed writers left behind."""
    with _state_lock:
        if directory in _swept:
            return
        _swept.add(directory)
    oldest = time.time() - _ABANDONED_AFTER_S
    with suppress(OSError), os.scandir(descriptor) as entries:
        for entry in entries:
            if entry.name.endswith(_TEMPORARY_SUFFIX) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                with suppress(OSError):
                    os.unlink(entry.name, dir_fd=descriptor)


def _warn_once(directory: Path, error: Exception) -> None:
    with _state_lock:
        if directory in _warned:
            return
        _warned.add(directory)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    warnings.warn(
        f"the program cache {directory} cannot be used: {reason}. Every process compiles anew. "
        "TILEWAVE_CACHE_DIR can name another directory.",
        CacheWarning,
        stacklevel=5,
    )


def seal(header: Mapping[str, Any], parts: Sequence[bytes]) -> bytes:
    """An entry: magic, SHA-256 of the rest, length of the header, header in JSON, parts."""
    text = json.dumps({"format": FORMAT_VERSION, **header, "sizes": [len(part) for part in parts]}).encode()
    body = b"".join((struct.pack(">I", len(text)), text, *parts))
    return _MAGIC + hashlib.sha256(body).digest() + body


def unseal(data: bytes) -> tuple[dict[str, Any], list[bytes]] | None:
    """The header and the parts of an entry; None if it is damaged or of another format."""
    start = len(_MAGIC) + hashlib.sha256().digest_size
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    try:
        (length,) = struct.unpack_from(">I", body)
        header = json.loads(body[4 : 4 + length])
        if header["format"] != FORMAT_VERSION:
            return None
        parts = []
        offset = 4 + length
        for size in header["sizes"]:
            parts.append(body[offset : offset + size])
            offset += size
        return header, parts
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def encode(key: str, program: Program) -> bytes:
    """A program as an entry: cubin, PTX and log are its parts."""
    symbols = {name: kernel.symbol for name, kernel in program.kernels.items()}
    header = {"key": key, "arch": program.arch, "compiler": program.compiler, "symbols": symbols}
    return seal(header, (program.cubin, program.ptx.encode(), program.log.encode()))


def decode(data: bytes, key: str) -> Program | None:
    """The program in an entry; None if the entry is damaged, of another format or under another key."""
    opened = unseal(data)
    if opened is None:
        return None
    header, parts = opened
    try:
        if header["key"] != key:
            return None
        cubin, ptx, log = parts
        # The figures are read from the log again, not stored: a better reader needs no new entries.
        kernels = kernels_of(header["symbols"], log.decode())
        return Program(header["arch"], header["compiler"], cubin, ptx.decode(), log.decode(), kernels)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
