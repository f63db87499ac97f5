"""A CUDA C++ text together with every header that it includes."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from tilewave.errors import UsageError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A named text and its headers, complete: nothing else is read when it is compiled.

    ``name`` is what the compiler's messages call the file. ``headers`` maps the name in an ``#include "..."``
    to its text.
    """

    name: str
    text: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a source needs a name: the compiler's messages show it")
        for name, text in ((self.name, self.text), *self.headers.items()):
            if "\0" in name or "\0" in text:
                raise UsageError(f"{name!r} holds a NUL character, where the compiler would stop reading")

    @staticmethod
    def from_text(name: str, text: str, headers: Mapping[str, str] | None = None) -> Source:
        """A source from strings."""
        return Source(name, text, dict(headers or {}))

    @staticmethod
    def packaged(path: str) -> Source:
        """A source shipped with tilewave, by its path in the package, such as ``lab/rungs/01_naive.cu``.

        Headers are included by their path in the package or relative to the including file.
        """
        root = resources.files("tilewave")

        def read(name: str) -> str | None:
            target = root.joinpath(name)
            return target.read_text(encoding="utf-8") if target.is_file() else None

        return _collect(posixpath.normpath(path), read, f"the package tilewave ({root})")

    @staticmethod
    def from_file(path: str | Path) -> Source:
        """A source from a file of the user; its headers are found relative to the including file."""
        path = Path(path)

        def read(name: str) -> str | None:
            target = path.parent / name
            return target.read_text(encoding="utf-8") if target.is_file() else None

        return _collect(path.name, read, str(path.parent))


def _collect(name: str, read: Callable[[str], str | None], where: str) -> Source:
    """The file ``name`` and, through its quoted includes, every header that it needs."""
    text = read(name)
    if text is None:
        raise UsageError(f"there is no source {name!r} in {where}")
    headers: dict[str, str] = {}
    origin: dict[str, str] = {}
    pending = [(name, text)]
    while pending:
        includer, content = pending.pop()
        for included in _INCLUDE.findall(content):
            for candidate in (posixpath.join(posixpath.dirname(includer), included), included):
                found = posixpath.normpath(candidate)
                body = read(found)
                if body is not None:
                    break
            else:
                raise UsageError(f"{includer} includes {included!r}, which is not in {where}")
            if origin.setdefault(included, found) != found:
                raise UsageError(
                    f'#include "{included}" means {origin[included]} in one file of {name} and {found} in '
                    "another: include them by their full path"
                )
            if included not in headers:
                headers[included] = body
                pending.append((found, body))
    return Source(name, text, headers)
