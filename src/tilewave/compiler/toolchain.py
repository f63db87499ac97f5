"""Which NVRTC compiles, which exact version it is, and how it is called.

The version is needed before every look into the program cache, and loading NVRTC costs far more than reading
a cached program, so it is told from where the library lies: the wheel's metadata, or the file name of a
system-wide install. Only a library that neither dates is loaded and asked.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tilewave.errors import CompileError, ToolchainError, UsageError

_SONAME = "libnvrtc.so.13"
_WHEEL_LIBRARY = Path("nvidia", "cu13", "lib", _SONAME)
_INSTALL_HINT = "install it with: pip install 'nvidia-cuda-nvrtc>=13.0,<14'"
_PTX_VERSION = re.compile(r"Cuda compilation tools, release [\d.]+, V([\d.]+)")

_lock = threading.RLock()


def _renew_lock() -> None:
    """In a forked child: a lock that another thread of the parent held would never be released."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class Compilation:
    """What NVRTC returned for one source and architecture."""

    cubin: bytes
    ptx: str
    log: str
    symbols: dict[str, str]


@cache
def library_path() -> Path:
    """The NVRTC that this process uses or would load.

    In this order: the file (or its directory) named by ``TILEWAVE_NVRTC``, one that the process has loaded
    already (by PyTorch, say), the wheel ``nvidia-cuda-nvrtc``, a system-wide CUDA toolkit.
    """
    loaded = _loaded_path()
    if asked := os.environ.get("TILEWAVE_NVRTC"):
        path = Path(asked).expanduser()
        if path.is_dir():
            path = path / _SONAME
        if not path.is_file():
            raise ToolchainError(
                f"TILEWAVE_NVRTC={asked} names no file; it should be the path of a {_SONAME}"
            )
        if loaded is not None and not loaded.samefile(path):
            raise ToolchainError(
                f"TILEWAVE_NVRTC={asked}, but this process has already loaded {loaded}; "
                "compile something with tilewave before importing what loads it, or unset TILEWAVE_NVRTC"
            )
        return path.resolve()
    if loaded is not None:
        return loaded
    for directory in _library_directories():
        path = directory / _SONAME
        if path.is_file():
            return path.resolve()
    return _load_from_system()


def _library_directories() -> Iterator[Path]:
    """Where NVRTC may lie, best first; nothing is loaded to find out."""
    for directory in sys.path:
        yield Path(directory or ".", _WHEEL_LIBRARY).parent
    for directory in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if directory:
            yield Path(directory)
    for variable in ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME"):
        if root := os.environ.get(variable):
            yield from (Path(root, "lib64"), Path(root, "lib"))
    yield Path("/usr/local/cuda/lib64")


def _loaded_path() -> Path | None:
    """Where the NVRTC came from that this process has loaded, if it has."""
    try:
        library = ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    return _path_of(library)


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def _path_of(library: ctypes.CDLL) -> Path:
    """The file that a loaded NVRTC came from, by ``dladdr`` of one of its functions."""
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_DlInfo))
    info = _DlInfo()
    address = ctypes.cast(library.nvrtcVersion, ctypes.c_void_p)
    if not dladdr(address, ctypes.byref(info)) or not info.file_name:
        raise ToolchainError("cannot tell which file the loaded NVRTC came from")
    return Path(os.fsdecode(info.file_name)).resolve()


def _load_from_system() -> Path:
    """Load an NVRTC outside Python's packages where the loader finds it, and say where that is."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as error:
        raise ToolchainError(f"NVRTC, the CUDA runtime compiler, was not found: {_INSTALL_HINT}") from error
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except (DynamicLibNotFoundError, RuntimeError, OSError) as error:
        raise ToolchainError(f"NVRTC, the CUDA runtime compiler, was not found: {_INSTALL_HINT}") from error
    if path is None:
        raise ToolchainError("cannot tell which file the loaded NVRTC came from")
    return Path(path).resolve()


@cache
def compiler_version() -> str:
    """The compiler's exact name and version, such as ``NVRTC 13.5.37``."""
    path = library_path()
    version = _version_from_path(path) or _version_from_ptx()
    if not version.startswith("NVRTC 13."):
        raise ToolchainError(f"{path} is {version}, but tilewave needs 13.x: {_INSTALL_HINT}")
    return version


def _version_from_path(path: Path) -> str | None:
    """The version that a wheel's metadata or a versioned file name tells, if either does."""
    if match := re.fullmatch(re.escape("libnvrtc.so.") + r"(\d+\.\d+\.\d+)", path.name):
        return f"NVRTC {match[1]}"
    if path.parts[-len(_WHEEL_LIBRARY.parts) :] == _WHEEL_LIBRARY.parts:
        site = path.parents[len(_WHEEL_LIBRARY.parts) - 1]
        versions = {
            match[1]
            for name in os.listdir(site)
            if (match := re.fullmatch(r"nvidia_cuda_nvrtc-([\d.]+)\.dist-info", name))
        }
        if len(versions) == 1:
            return f"NVRTC {versions.pop()}"
    return None


def _version_from_ptx() -> str:
    """Compile an empty kernel and read the version out of its PTX."""
    ptx = compile_with_nvrtc("version.cu", 'extern "C" __global__ void k() {}', {}, ("k",), "sm_90", ()).ptx
    return stated_version(ptx)


def stated_version(ptx: str) -> str:
    """The compiler that PTX says it came from, in the spelling of :func:`compiler_version`."""
    match = _PTX_VERSION.search(ptx)
    if match is None:
        raise ToolchainError(f"NVRTC at {library_path()} does not say its version in its PTX")
    return f"NVRTC {match[1]}"


@cache
def _nvrtc() -> Any:
    """The module ``cuda.bindings.nvrtc``, bound to the library that :func:`library_path` names."""
    path = library_path()
    try:
        if _loaded_path() is None:
            # An absolute path does not help NVRTC 13.0 to find its builtins beside it: load them first.
            for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):
                ctypes.CDLL(str(builtins))
            ctypes.CDLL(str(path))
    except OSError as error:
        raise ToolchainError(f"NVRTC at {path} cannot be loaded ({error}); {_INSTALL_HINT}") from error
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(
            f"cuda.bindings cannot be imported ({error}): pip install 'cuda-bindings>=13.0,<14'"
        ) from error
    return nvrtc


def supported_architectures() -> tuple[tuple[int, int], ...]:
    """The compute capabilities that this NVRTC compiles for, ascending."""
    with _lock:
        nvrtc = _nvrtc()
    numbers = _check(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
    return tuple(sorted(divmod(number, 10) for number in numbers))


def compile_with_nvrtc(
    name: str,
    text: str,
    headers: Mapping[str, str],
    entries: Sequence[str],
    arch: str,
    options: Sequence[str],
) -> Compilation:
    """One call of NVRTC: cubin, PTX, log and the lowered name of each entry. Safe from any thread."""
    with _lock:
        nvrtc = _nvrtc()
    program = _check(
        nvrtc.nvrtcCreateProgram(
            text.encode(),
            name.encode(),
            len(headers),
            [body.encode() for body in headers.values()],
            [header.encode() for header in headers],
        ),
        "nvrtcCreateProgram",
    )
    try:
        for entry in entries:
            _check(nvrtc.nvrtcAddNameExpression(program, entry.encode()), "nvrtcAddNameExpression")
        arguments = [option.encode() for option in (f"--gpu-architecture={arch}", *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _raise_compile_failure(nvrtc, status, name, arch, log)
        symbols: dict[str, str] = {}
        for entry in entries:
            lowered = _check(nvrtc.nvrtcGetLoweredName(program, entry.encode()), "nvrtcGetLoweredName")
            symbols[entry] = lowered.decode()
        size = _check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        cubin = bytearray(size)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compilation(bytes(cubin), ptx, log, symbols)


def _raise_compile_failure(nvrtc: Any, status: Any, name: str, arch: str, log: str) -> NoReturn:
    if status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
        raise UsageError(f"NVRTC refuses an option or the architecture {arch}:\n{log}")
    if status == nvrtc.nvrtcResult.NVRTC_ERROR_BUILTIN_OPERATION_FAILURE:
        raise ToolchainError(f"NVRTC at {library_path()} is incomplete; {_INSTALL_HINT}\n{log}")
    raise CompileError(f"{name} does not compile for {arch} ({compiler_version()}):\n{log}", log)


def _text(size_of: Callable[..., Any], read: Callable[..., Any], program: Any) -> str:
    """A text result of NVRTC without its closing NUL."""
    buffer = bytearray(_check(size_of(program), size_of.__name__))
    _check(read(program, buffer), read.__name__)
    return buffer.rstrip(b"\0").decode(errors="replace").strip() + "\n"


def _check(result: tuple[Any, ...], call: str) -> Any:
    """The value of a call of NVRTC, or the error that it returned."""
    status, *values = result
    if status.value != 0:
        raise ToolchainError(f"{call} failed: {status.name}")
    return values[0] if values else None
