"""Programs that came with the package: a read-only layer before the cache, made with one compiler.

A wheel holds one archive an architecture, so that the speed of the product's kernels and the first call do
not depend on the compiler that a user happens to have; an editable install holds none, and compiles. Entries
hold machine code and the compiler's log; beside them lies what the register-file pass made of them. PTX,
which would double a wheel, is left out: only the emulator needs it, and a GPU newer than the compiler, whose
code has to be made there anyway. An entry is found by what was compiled, so that an archive of other sources
is as good as none.

``TILEWAVE_SHIPPED=0`` switches the layer off, and so does ``TILEWAVE_NVRTC``: who names a compiler wants it
used. Any other value of ``TILEWAVE_SHIPPED`` names a directory of archives to use instead of the package's.
"""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tilewave.compiler import cache
from tilewave.compiler.records import Program

DIRECTORY = Path(__file__).parent.parent / "shipped"
"""Where the archives lie in the package."""

_Kept = TypeVar("_Kept")


def load(key: str, arch: str) -> Program | None:
    """The shipped program of this content key, without PTX, or None; never raises for the archive's state."""
    directory = _directory()
    return None if directory is None else _load(directory, key, arch)


def load_entry(name: str, arch: str, decoded: Callable[[bytes], _Kept | None]) -> _Kept | None:
    """What ``decoded`` makes of another entry of an archive, or None; never raises for its state."""
    directory = _directory()
    data = None if directory is None else _read(directory, name, arch)
    return None if data is None else decoded(data)


def write(
    directory: Path,
    arch: str,
    programs: Iterable[tuple[str, Program]],
    others: Iterable[tuple[str, bytes]] = (),
) -> Path:
    """Write the archive of an architecture: (content key, program) pairs, their PTX left out, and ``others``.

    ``others`` are (name, entry) pairs for `load_entry`. Returns the archive's path. The same content gives
    the same bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{arch}.zip"
    temporary = path.with_suffix(".tmp")
    encoded = [(key, cache.encode(key, replace(program, ptx=""))) for key, program in programs]
    with zipfile.ZipFile(temporary, "w") as archive:
        for name, data in sorted([*encoded, *others]):
            entry = zipfile.ZipInfo(name)  # dated 1980, whenever it is written
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    temporary.replace(path)
    return path


def _directory() -> Path | None:
    """Where archives are looked for, or None."""
    asked = os.environ.get("TILEWAVE_SHIPPED")
    if asked == "0" or os.environ.get("TILEWAVE_NVRTC"):
        return None
    return Path(asked) if asked else DIRECTORY


@functools.lru_cache(maxsize=4096)
def _load(directory: Path, key: str, arch: str) -> Program | None:
    data = _read(directory, key, arch)
    return None if data is None else cache.decode(data, key)


def _read(directory: Path, name: str, arch: str) -> bytes | None:
    archive = _archive(directory / f"{arch}.zip")
    if archive is None:
        return None
    try:
        return archive.read(name)
    except Exception:  # missing, or damaged in one of the many ways that zipfile and zlib tell apart
        return None


@functools.lru_cache(maxsize=32)
def _archive(path: Path) -> zipfile.ZipFile | None:
    try:
        return zipfile.ZipFile(path)
    except Exception:  # likewise
        return None


os.register_at_fork(after_in_child=_archive.cache_clear)  # a file's position is shared with the parent
