"""Sources and their headers: everything that decides the result is in the record, nothing else is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewave.compiler import Source, compile_source
from tilewave.errors import CompileError, UsageError

KERNEL = 'extern "C" __global__ void k(int* p) { p[0] = VALUE; }\n'


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_headers_are_collected_through_their_includes(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "k.cu": '#include "a.cuh"\n' + KERNEL,
            "a.cuh": '#pragma once\n  #  include "sub/b.cuh"\n#include "a.cuh"\n',
            "sub/b.cuh": '#include "c.cuh"\n',
            "sub/c.cuh": "#define VALUE 4711\n",
        },
    )
    source = Source.from_file(tmp_path / "k.cu")
    assert set(source.headers) == {"a.cuh", "sub/b.cuh", "c.cuh"}
    program = compile_source(source, ["k"], "sm_90")
    assert "4711" in program.ptx


def test_a_missing_header_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"k.cu": '#include "gone.cuh"\n'})
    with pytest.raises(UsageError, match=r"k\.cu includes 'gone\.cuh', which is not in"):
        Source.from_file(tmp_path / "k.cu")


def test_one_include_name_for_two_files_is_refused(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "k.cu": '#include "x/a.cuh"\n#include "y/a.cuh"\n',
            "x/a.cuh": '#include "common.cuh"\n',
            "y/a.cuh": '#include "common.cuh"\n',
            "x/common.cuh": "",
            "y/common.cuh": "",
        },
    )
    with pytest.raises(UsageError, match=r"common\.cuh.*full path"):
        Source.from_file(tmp_path / "k.cu")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no source 'lab/rungs/99_none\.cu' in the package tilewave"):
        Source.packaged("lab/rungs/99_none.cu")
    with pytest.raises(UsageError, match="nothing"):
        Source.from_file(tmp_path / "nothing.cu")
    with pytest.raises(UsageError, match="no source"):
        Source.from_file(tmp_path)


@pytest.mark.parametrize(("name", "text"), [("", KERNEL), ("k.cu", KERNEL + "\0"), ("k\0.cu", KERNEL)])
def test_text_that_the_compiler_would_cut_is_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        Source.from_text(name, text)


def test_nothing_outside_the_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header beside us in the current directory is not picked up: it would not be in the cache's key."""
    write(tmp_path, {"stray.cuh": "#define VALUE 1\n"})
    monkeypatch.chdir(tmp_path)
    source = Source.from_text("k.cu", '#include "stray.cuh"\n' + KERNEL)
    with pytest.raises(CompileError, match=r"stray\.cuh"):
        compile_source(source, ["k"], "sm_90")
    with pytest.raises(CompileError, match=r"stray\.cuh"):
        compile_source(
            Source.from_text(str(tmp_path / "k.cu"), '#include "stray.cuh"\n' + KERNEL), ["k"], "sm_90"
        )


def test_text_is_utf8() -> None:
    source = Source.from_text("k.cu", "// Überlauf, 行列\n#define VALUE 1\n" + KERNEL)
    assert compile_source(source, ["k"], "sm_90").cubin
