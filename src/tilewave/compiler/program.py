"""Compile a source for an architecture, once: the front of the compiler package."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Sequence

from tilewave.compiler import cache, shipped
from tilewave.compiler.records import Program, kernels_of
from tilewave.compiler.source import Source
from tilewave.compiler.toolchain import compile_with_nvrtc, compiler_version, library_path, stated_version
from tilewave.errors import CompileError, ToolchainError, UsageError

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "sm_121")
"""The architectures that tilewave is tested for; any other real architecture of NVRTC is accepted too."""

DEFAULT_OPTIONS = (
    "--std=c++17",
    "--ftz=false",  # subnormals are kept
    "--prec-div=true",
    "--prec-sqrt=true",
    "--fmad=true",  # a*b+c becomes one FMA, as everywhere in this field
    "--ptxas-options=-v",  # registers, spills and shared memory go to the log
    "--no-cache",  # with a driver NVRTC keeps a cache of its own, and a hit there leaves the log empty
    "--no-source-include",  # no header from the current directory sneaks in
)

# Options that read or write files, leave no cubin, or are arguments of compile_source.
_REFUSED = (
    "I", "include-path", "include", "pre-include", "gpu-architecture", "arch", "dlto", "dlink-time-opt",
    "gen-opt-lto", "rdc", "relocatable-device-code", "dc", "device-c", "optix-ir", "pch", "create-pch",
    "use-pch", "pch-dir", "auto-pch", "time", "fdevice-time-trace", "device-time-trace", "minimal",
)  # fmt: skip


_guard = threading.Lock()
_programs: dict[str, Program] = {}
_compiling: dict[str, threading.Lock] = {}


def compile_source(
    source: Source,
    entries: Sequence[str],
    arch: str,
    options: Sequence[str] = (),
    *,
    machine_code_only: bool = False,
) -> Program:
    """Compile ``source`` for ``arch`` (``sm_90``, ``sm_121``, ...) without a GPU or driver.

    ``entries`` are the name expressions of the kernels to instantiate, such as ``sgemm_01_naive`` or
    ``gemm<128, 256>``. ``options`` are further options of NVRTC; one that is among ``DEFAULT_OPTIONS``
    replaces that default. What was compiled before, by this process or an earlier one, is not compiled again.
    ``machine_code_only``: the program may be one that came with the package, whose ``ptx`` is empty.

    Raises ``CompileError`` with the compiler's log, ``ToolchainError`` without a usable NVRTC, ``UsageError``
    for an argument that makes no sense. Safe to call from any thread.
    """
    arch = _normalise_arch(arch)
    entries = _checked_strings("entries", entries)
    if not entries:
        raise UsageError("entries names no kernel to compile")
    options = _merge_options(_checked_strings("options", options))
    if machine_code_only:
        program = shipped.load(content_key(source, entries, arch, options), arch)
        if program is not None:
            return program
    key = _key(source, entries, arch, options)
    if (program := _programs.get(key)) is not None:
        return program
    with _guard:
        lock = _compiling.setdefault(key, threading.Lock())
    with lock:
        # Another thread may have compiled it while this one waited.
        if (program := _programs.get(key)) is None:
            program = cache.load(key)
            if program is None:
                program = _compile(source, entries, arch, options)
                cache.store(key, program)
            _programs[key] = program
    with _guard:
        _compiling.pop(key, None)
    return program


def _compile(source: Source, entries: tuple[str, ...], arch: str, options: tuple[str, ...]) -> Program:
    compilation = compile_with_nvrtc(source.name, source.text, source.headers, entries, arch, options)
    try:
        kernels = kernels_of(compilation.symbols, compilation.log)
    except KeyError as missing:
        message = f"{missing.args[0]} in {source.name} is not a __global__ function"
        raise CompileError(message, compilation.log) from None
    compiler = compiler_version()
    if (stated := stated_version(compilation.ptx)) != compiler:
        raise ToolchainError(
            f"the NVRTC at {library_path()} is {stated}, but it is installed as {compiler}: reinstall "
            "nvidia-cuda-nvrtc, or start this process anew if it was just upgraded"
        )
    return Program(arch, compiler, compilation.cubin, compilation.ptx, compilation.log, kernels)


def content_key(source: Source, entries: tuple[str, ...], arch: str, options: tuple[str, ...]) -> str:
    """A digest of what is compiled, whichever compiler does it: no path, no time, no version."""
    parts = [arch, options, entries, source.name, source.text, sorted(source.headers.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _key(source: Source, entries: tuple[str, ...], arch: str, options: tuple[str, ...]) -> str:
    """Everything that decides what comes out of the compiler, and nothing else."""
    parts = [cache.FORMAT_VERSION, compiler_version(), content_key(source, entries, arch, options)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _renew_locks() -> None:
    """In a forked child: locks that another thread of the parent held would never be released."""
    global _guard
    _guard = threading.Lock()
    _compiling.clear()


os.register_at_fork(after_in_child=_renew_locks)


def _normalise_arch(arch: str) -> str:
    match = re.fullmatch(r"(?:sm_)?(\d{2,3}[af]?)", arch.strip().lower()) if isinstance(arch, str) else None
    if match is None:
        raise UsageError(f"unknown architecture {arch!r}; it should be one like {', '.join(ARCHITECTURES)}")
    return f"sm_{match[1]}"


def _checked_strings(what: str, values: Sequence[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(value, str) and value.strip() for value in values):
        raise UsageError(f"{what} should be a list of non-empty strings, not {values!r}")
    return tuple(dict.fromkeys(values))


def _option_name(option: str) -> str:
    return option.lstrip("-").partition("=")[0]


def _merge_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """The default options, each replaced by the caller's of the same name, and the caller's others."""
    for option in options:
        name = _option_name(option)
        if name in _REFUSED or option.startswith("-I"):
            raise UsageError(
                f"option {option!r} is not accepted: headers belong to the Source, the architecture is an "
                "argument, and every compile makes one cubin"
            )
    given = {_option_name(option) for option in options}
    if "use_fast_math" in given:
        given |= {"ftz", "prec-div", "prec-sqrt", "fmad"}
    return tuple(option for option in DEFAULT_OPTIONS if _option_name(option) not in given) + options
