"""Finding NVRTC, knowing its exact version without loading it, and saying clearly what is wrong with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from compiler_kernels import COPY

import tilewave
from tilewave.compiler import Source, compile_source, compiler_version, toolchain
from tilewave.compiler.toolchain import compile_with_nvrtc, library_path, stated_version

PACKAGE = str(Path(tilewave.__file__).parents[1])
OLD = Path(__file__).parents[2] / ".cache" / "nvrtc-13.0.88" / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
HINT = "pip install 'nvidia-cuda-nvrtc>=13.0,<14'"

COMPILE = f"""
from tilewave.compiler import Source, compile_source, compiler_version
from tilewave.errors import TilewaveError
try:
    print(compiler_version())
    print(compile_source(Source.from_text("copy.cu", {COPY!r}), ["copy"], "sm_90").compiler)
except TilewaveError as error:
    print(type(error).__name__, error)
"""
LOADED = "print('loaded' if 'libnvrtc' in open('/proc/self/maps').read() else 'not loaded')\n"


def python(code: str, *options: str, **environment: str) -> str:
    """What a fresh interpreter prints; an empty value takes a variable away."""
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value}
    done = subprocess.run(
        [sys.executable, *options, "-c", code], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that holds this process's NVRTC and its builtins, under another inode."""
    directory = tmp_path / "nvidia" / "cu13" / "lib"
    directory.mkdir(parents=True)
    source = library_path()
    shutil.copy(source, directory / "libnvrtc.so.13")
    for builtins in source.parent.glob("libnvrtc-builtins.so*"):
        shutil.copy(builtins, directory)
    return directory


@pytest.fixture
def without_wheel(tmp_path: Path) -> str:
    """Code that leaves an interpreter with cuda.bindings and platformdirs, but without the NVRTC wheel."""
    import cuda.bindings
    import platformdirs

    site = tmp_path / "site"
    site.mkdir()
    (site / "cuda").symlink_to(Path(cuda.bindings.__file__).parents[1])
    (site / "platformdirs").symlink_to(Path(platformdirs.__file__).parent)
    return f"import sys; sys.path[:0] = [{str(site)!r}, {PACKAGE!r}]\n"


def bare(tmp_path: Path) -> dict[str, str]:
    """An environment that points to no CUDA at all, with an empty program cache."""
    names = ("TILEWAVE_NVRTC", "LD_LIBRARY_PATH", "CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME")
    return dict.fromkeys(names, "") | {"TILEWAVE_CACHE_DIR": str(tmp_path / "programs")}


def version_number() -> str:
    return compiler_version().removeprefix("NVRTC ")


def test_the_version_is_the_one_that_the_compiler_states() -> None:
    compilation = compile_with_nvrtc("copy.cu", COPY, {}, ("copy",), "sm_90", ())
    assert stated_version(compilation.ptx) == compiler_version()


def test_the_version_is_known_without_loading_the_compiler() -> None:
    code = "from tilewave.compiler import compiler_version\nprint(compiler_version())\n" + LOADED
    assert python(code) == f"{compiler_version()}\nnot loaded\n"


def test_a_warm_start_does_not_load_the_compiler(tmp_path: Path) -> None:
    caches = {"TILEWAVE_CACHE_DIR": str(tmp_path)}
    assert python(COMPILE + LOADED, **caches).splitlines()[-1] == "loaded"
    assert python(COMPILE + LOADED, **caches).splitlines()[-1] == "not loaded"


def test_importing_loads_nothing() -> None:
    code = "import sys, tilewave.compiler, tilewave.device\n" + LOADED
    code += "print([name for name in sys.modules if name.split('.')[0] in ('cuda', 'torch', 'cupy')])\n"
    assert python(code) == "not loaded\n[]\n"


@pytest.mark.skipif(not OLD.is_file(), reason="NVRTC 13.0.88 is set up by `make test`")
@pytest.mark.parametrize("path", [OLD, OLD.parent])
def test_the_oldest_supported_compiler(path: Path, tmp_path: Path) -> None:
    answer = python(COMPILE, TILEWAVE_NVRTC=str(path), TILEWAVE_CACHE_DIR=str(tmp_path))
    assert answer == "NVRTC 13.0.88\nNVRTC 13.0.88\n"


def test_compilers_do_not_share_cache_entries(place: Path, tmp_path: Path) -> None:
    """The same kernel by two versions gives two entries (the second version is made up)."""
    caches = {"TILEWAVE_CACHE_DIR": str(tmp_path / "programs")}
    python(COMPILE, **caches)
    (place / "libnvrtc.so.13").rename(place / "libnvrtc.so.13.99.1")
    answer = python(COMPILE, TILEWAVE_NVRTC=str(place / "libnvrtc.so.13.99.1"), **caches)
    assert answer.startswith("NVRTC 13.99.1\nToolchainError")
    assert len(list((tmp_path / "programs").iterdir())) == 1


def test_a_library_whose_package_lies_about_its_version(place: Path, tmp_path: Path) -> None:
    """As after an upgrade under a running process: nothing is cached under the wrong version."""
    (place.parents[2] / "nvidia_cuda_nvrtc-13.4.1.dist-info").mkdir()
    answer = python(COMPILE, TILEWAVE_NVRTC=str(place), TILEWAVE_CACHE_DIR=str(tmp_path / "programs"))
    assert answer.startswith("NVRTC 13.4.1\nToolchainError")
    assert f"is {compiler_version()}, but it is installed as NVRTC 13.4.1" in answer
    assert not (tmp_path / "programs").exists()


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH"])
def test_a_toolkit_of_the_system_is_found_and_dated_without_loading_it(
    variable: str, place: Path, without_wheel: str, tmp_path: Path
) -> None:
    """A toolkit names the real file libnvrtc.so.13.x.y; the loader's name is a link to it."""
    toolkit = tmp_path / "toolkit" / ("lib" if variable == "CONDA_PREFIX" else "lib64")
    place.parents[2].joinpath("toolkit").mkdir()
    place.rename(toolkit)
    real = toolkit / f"libnvrtc.so.{version_number()}"
    (toolkit / "libnvrtc.so.13").rename(real)
    (toolkit / "libnvrtc.so.13").symlink_to(real.name)
    where = toolkit if variable == "LD_LIBRARY_PATH" else toolkit.parent
    environment = bare(tmp_path) | {variable: str(where)}
    version = "from tilewave.compiler import compiler_version\nprint(compiler_version())\n"
    assert python(without_wheel + version + LOADED, "-I", "-S", **environment) == (
        f"{compiler_version()}\nnot loaded\n"
    )
    assert python(without_wheel + COMPILE, "-I", "-S", **environment) == f"{compiler_version()}\n" * 2


def test_a_library_that_nothing_dates_is_asked(place: Path, tmp_path: Path) -> None:
    answer = python(COMPILE, TILEWAVE_NVRTC=str(place), TILEWAVE_CACHE_DIR=str(tmp_path / "programs"))
    assert answer == f"{compiler_version()}\n" * 2


def test_a_library_loaded_before_is_used(place: Path, tmp_path: Path) -> None:
    """PyTorch may have loaded an NVRTC: that one compiles, and gives its version."""
    load = f"import ctypes; ctypes.CDLL({str(place / 'libnvrtc.so.13')!r})\n"
    for builtins in place.glob("libnvrtc-builtins.so*"):
        load = f"import ctypes; ctypes.CDLL({str(builtins)!r})\n" + load
    where = "from tilewave.compiler.toolchain import library_path\nprint(library_path())\n"
    answer = python(load + COMPILE + where, **bare(tmp_path)).splitlines()
    assert answer == [compiler_version()] * 2 + [str(place / "libnvrtc.so.13")]


def test_asking_for_another_library_than_the_loaded_one(place: Path, tmp_path: Path) -> None:
    load = f"import ctypes; ctypes.CDLL({str(library_path())!r})\n"
    answer = python(load + COMPILE, **bare(tmp_path) | {"TILEWAVE_NVRTC": str(place)})
    assert answer.startswith("ToolchainError")
    assert "has already loaded" in answer
    assert str(library_path()) in answer


def test_no_compiler_says_what_to_install(without_wheel: str, tmp_path: Path) -> None:
    answer = python(without_wheel + COMPILE, "-I", "-S", **bare(tmp_path))
    assert answer.startswith("ToolchainError NVRTC, the CUDA runtime compiler, was not found")
    assert HINT in answer


def test_no_bindings_say_what_to_install(tmp_path: Path) -> None:
    """A cold compile without cuda.bindings; NVRTC itself is there."""
    code = "import sys; sys.modules['cuda.bindings'] = None\n" + COMPILE
    answer = python(code, TILEWAVE_CACHE_DIR=str(tmp_path))
    assert "ToolchainError cuda.bindings cannot be imported" in answer
    assert "pip install 'cuda-bindings>=13.0,<14'" in answer


@pytest.mark.parametrize("asked", ["{tmp}/none.so", "{tmp}", ""])
def test_a_path_that_leads_nowhere(asked: str, tmp_path: Path) -> None:
    asked = asked.format(tmp=tmp_path)
    answer = python(COMPILE, TILEWAVE_NVRTC=asked, TILEWAVE_CACHE_DIR=str(tmp_path / "programs"))
    if asked:
        assert answer.startswith(f"ToolchainError TILEWAVE_NVRTC={asked} names no file")
    else:
        assert answer.startswith("NVRTC 13.")


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libnvrtc.so.13.5.37"
    path.write_text("not an ELF file")
    answer = python(COMPILE, TILEWAVE_NVRTC=str(path), TILEWAVE_CACHE_DIR=str(tmp_path / "programs"))
    assert f"ToolchainError NVRTC at {path} cannot be loaded" in answer
    assert HINT in answer


def test_a_library_without_its_builtins(place: Path, tmp_path: Path) -> None:
    for builtins in place.glob("libnvrtc-builtins.so*"):
        builtins.unlink()
    answer = python(COMPILE, TILEWAVE_NVRTC=str(place), TILEWAVE_CACHE_DIR=str(tmp_path / "programs"))
    assert "ToolchainError" in answer
    assert "is incomplete" in answer
    assert HINT in answer


def test_another_major_version(place: Path, tmp_path: Path) -> None:
    (place / "libnvrtc.so.13").rename(place / "libnvrtc.so.12.9.86")
    answer = python(COMPILE, TILEWAVE_NVRTC=str(place / "libnvrtc.so.12.9.86"))
    assert answer.startswith("ToolchainError")
    assert "is NVRTC 12.9.86, but tilewave needs 13.x" in answer


def test_first_use_from_many_threads(tmp_path: Path) -> None:
    """Sixteen threads find, load and use the library at once, in a process that has done nothing before."""
    code = f"""
import threading
from tilewave.compiler import Source, compile_source
start, answers = threading.Barrier(16), []
def work(index):
    start.wait()
    text = {COPY!r} + f"// {{index}}"
    answers.append(compile_source(Source.from_text("copy.cu", text), ["copy"], "sm_90").compiler)
threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(answers), *set(answers))
"""
    assert python(code, TILEWAVE_CACHE_DIR=str(tmp_path)) == f"16 {compiler_version()}\n"


def test_a_forked_child_can_compile(tmp_path: Path) -> None:
    """Even when another thread held the locks at the time of the fork."""
    code = f"""
import os, signal, threading, time
from tilewave.compiler import Source, cache, compile_source, program, toolchain
held, done = threading.Event(), threading.Event()
def hold():
    with program._guard, toolchain._lock, cache._state_lock:
        held.set(); done.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    print(compile_source(Source.from_text("copy.cu", {COPY!r}), ["copy"], "sm_90").compiler, flush=True)
    os._exit(0)
for _ in range(600):
    finished, status = os.waitpid(child, os.WNOHANG)
    if finished:
        break
    time.sleep(0.1)
else:
    os.kill(child, signal.SIGKILL)
    status = "hangs"
done.set()
print(status)
"""
    options = ("-W", "ignore::DeprecationWarning")  # Python 3.12 warns of forking with threads, rightly
    assert python(code, *options, TILEWAVE_CACHE_DIR=str(tmp_path)) == f"{compiler_version()}\n0\n"


def test_calls_from_several_threads_do_not_mix() -> None:
    logs: dict[int, str] = {}

    def work(index: int) -> None:
        text = f"#warning number {index}\n" + COPY
        logs[index] = compile_with_nvrtc(f"file{index}.cu", text, {}, ("copy",), "sm_90", ()).log

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"file{index}.cu" in logs[index] and f"number {index}" in logs[index] for index in range(8))


def test_the_module_knows_what_it_uses() -> None:
    """Under TILEWAVE_NVRTC these tests really run with the library asked for."""
    if asked := os.environ.get("TILEWAVE_NVRTC"):
        assert library_path().is_relative_to(Path(asked).resolve())
    compile_source(Source.from_text("copy.cu", COPY), ["copy"], "sm_90")
    loaded = toolchain._loaded_path()
    assert loaded is None or loaded == library_path()
