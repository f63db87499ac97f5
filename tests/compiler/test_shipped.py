"""Programs that come with the package are found by what was compiled, and used before anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewave.compiler import Program, Source, compile_source, shipped
from tilewave.compiler import program as compiler_program

KERNEL = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] = NUMBER; }'


def source(number: int) -> Source:
    return Source.from_text("k.cu", f"#define NUMBER {number}.0f\n{KERNEL}")


def compile_shipped(text: Source, arch: str = "sm_90") -> Program:
    return compile_source(text, ["k"], arch, machine_code_only=True)


def key_of(text: Source, arch: str) -> str:
    return compiler_program.content_key(text, ("k",), arch, compiler_program.DEFAULT_OPTIONS)


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive for sm_90 that holds source(1), compiled from source(2): what comes out tells where from."""
    monkeypatch.delenv("TILEWAVE_NVRTC", raising=False)
    other = compile_source(source(2), ["k"], "sm_90")
    shipped.write(tmp_path, "sm_90", [(key_of(source(1), "sm_90"), other)])
    monkeypatch.setattr(shipped, "DIRECTORY", tmp_path)
    return tmp_path / "sm_90.zip"


def test_a_shipped_program_is_used(archive: Path) -> None:
    program = compile_shipped(source(1))
    assert program.cubin == compile_source(source(2), ["k"], "sm_90").cubin
    assert program.kernels["k"].resources.registers > 0
    assert program.ptx == ""


def test_who_needs_ptx_gets_it(archive: Path) -> None:
    program = compile_source(source(1), ["k"], "sm_90")
    assert ".entry k" in program.ptx
    assert program.cubin != compile_shipped(source(1)).cubin


def test_another_directory_can_be_named(
    archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = compile_source(source(2), ["k"], "sm_90")
    shipped.write(tmp_path / "named", "sm_90", [(key_of(source(3), "sm_90"), other)])
    monkeypatch.setenv("TILEWAVE_SHIPPED", str(tmp_path / "named"))
    assert compile_shipped(source(3)).cubin == other.cubin
    assert compile_shipped(source(1)).cubin != other.cubin


def test_no_compiler_is_needed_for_it(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise AssertionError("the compiler was asked for")

    monkeypatch.setattr(compiler_program, "compiler_version", missing)
    assert compile_shipped(source(1)).arch == "sm_90"


@pytest.mark.parametrize("variable", ["TILEWAVE_SHIPPED", "TILEWAVE_NVRTC"])
def test_it_can_be_switched_off(archive: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    from tilewave.compiler.toolchain import library_path

    value = "0" if variable == "TILEWAVE_SHIPPED" else str(library_path())
    monkeypatch.setenv(variable, value)
    other = compile_source(source(2), ["k"], "sm_90")
    assert compile_shipped(source(1)).cubin != other.cubin


def test_other_sources_and_architectures_are_compiled(archive: Path) -> None:
    other = compile_source(source(2), ["k"], "sm_90").cubin
    assert compile_shipped(source(3)).cubin != other
    assert compile_shipped(source(1), "sm_80").arch == "sm_80"


@pytest.mark.parametrize("damage", ["truncated", "garbled", "empty"])
def test_a_damaged_archive_is_as_good_as_none(archive: Path, damage: str) -> None:
    data = bytearray(archive.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "garbled":
        data[len(data) // 4 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
    else:
        data = bytearray()
    archive.write_bytes(data)
    shipped._load.cache_clear()
    shipped._archive.cache_clear()
    other = compile_source(source(2), ["k"], "sm_90").cubin
    assert compile_shipped(source(1)).cubin != other


def test_the_same_programs_give_the_same_archive(archive: Path, tmp_path: Path) -> None:
    program = compile_source(source(2), ["k"], "sm_90")
    again = shipped.write(tmp_path / "again", "sm_90", [(key_of(source(1), "sm_90"), program)])
    assert again.read_bytes() == archive.read_bytes()
