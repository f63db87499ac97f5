"""The wheel in an environment of its own: it computes, plans and finds its kernels without a compiler."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tilewave.compiler import shipped
from tilewave.compiler.register_pass import KNOWN_ARCHITECTURES
from tilewave.kernels.ship import every_kernel, write_archives

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # a cold cache compiles for minutes

ROOT = Path(__file__).parents[1]
ARCH = "sm_90"
COMPILER = "nvidia-cuda-nvrtc"


def requirements(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Collect a distribution and all that it requires without extras."""
    normal = re.sub(r"[-_.]+", "-", name).lower()
    if normal in found:
        return
    found[normal] = importlib.metadata.distribution(name)
    for line in found[normal].requires or ():
        if "extra ==" not in line:
            requirement = re.match(r"[\w.-]+", line)
            assert requirement is not None
            try:
                requirements(requirement[0], found)
            except importlib.metadata.PackageNotFoundError:
                assert ";" in line, f"{line} of {name} is not installed"  # for another Python or system


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel as `make wheel` builds it, with kernels for one architecture."""
    folder = tmp_path_factory.mktemp("wheel")
    write_archives(folder / "archives", [ARCH], jobs=1)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        env=os.environ | {"TILEWAVE_ARCHIVES": str(folder / "archives")},
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel and all it requires, but for the compiler.

    What it requires is linked from here, so that nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    needed: dict[str, importlib.metadata.Distribution] = {}
    requirements("tilewave", needed)
    for name in needed.keys() - {"tilewave", COMPILER}:
        files = needed[name].files
        assert files
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(needed[name].locate_file(top))))
    assert not (site / "nvidia").exists()
    installing = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    subprocess.run([*installing, str(wheel)], check=True, capture_output=True)
    return python


def run(python: Path, cache: Path, *arguments: str, **variables: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cache), "TILEWAVE_CACHE_DIR": str(cache / "programs")}
    done = subprocess.run(
        [str(python), *arguments], env=environment | variables, cwd=cache, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        with archive.open(f"tilewave/shipped/{ARCH}.zip") as file, zipfile.ZipFile(file) as kernels:
            new_loops = [name for name in kernels.namelist() if name.endswith(".loop")]
            assert len(kernels.namelist()) == len(every_kernel()) + len(new_loops)
            assert (len(new_loops) > 0) == (ARCH in KNOWN_ARCHITECTURES)
    package = ROOT / "src"
    for path in (package / "tilewave").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(package)) in names
    assert all(name.startswith(("tilewave/", "tilewave-")) for name in names)


def test_it_computes_on_the_host(python: Path, tmp_path: Path) -> None:
    code = (
        "import numpy as np, tilewave\n"
        "rng = np.random.default_rng()\n"
        "a, b = rng.standard_normal((37, 61), np.float32), rng.standard_normal((61, 29), np.float32)\n"
        "print(tilewave.__file__, tilewave.check(a, b, tilewave.matmul(a, b)).rounding)\n"
    )
    file, right = run(python, tmp_path, "-c", code).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert right == "True"


def test_it_plans_and_explains(python: Path, tmp_path: Path) -> None:
    said = run(python, tmp_path, "-m", "tilewave", "explain", "2049", "2049", "2049", "--device", "H200")
    assert "2049 x 2049 x 2049 on H200" in said
    assert "large_tile" in said
    code = "import tilewave; print(tilewave.plan(64, 64, 20_000, device='H200'))"
    assert "64 x 64 x 20000 on H200" in run(python, tmp_path, "-c", code)


FIND_ALL = f"""
from pathlib import Path
from tilewave.compiler import toolchain
def refuse(*_):
    raise AssertionError("NVRTC was called for")
toolchain.compile_with_nvrtc = toolchain._nvrtc = toolchain.library_path = refuse
from tilewave.kernels.build import compile_instance
from tilewave.kernels.ship import every_kernel
compilers = set()
for instance in every_kernel():
    program, kernel = compile_instance(instance, "{ARCH}", machine_code_only=True)
    assert program.cubin.startswith(b"\\x7fELF") and kernel.symbol.encode() in program.cubin
    assert kernel.resources.registers > 0
    compilers.add(program.compiler)
assert "nvrtc" not in Path("/proc/self/maps").read_text()
print(*compilers)
"""


def test_it_finds_its_kernels_without_a_compiler(python: Path, tmp_path: Path) -> None:
    from tilewave.compiler import compiler_version

    assert run(python, tmp_path, "-c", FIND_ALL).strip() == compiler_version()
    assert not (tmp_path / "programs").exists()  # read from the package, not from a cache


def test_a_launch_asks_for_machine_code_alone(python: Path, tmp_path: Path) -> None:
    """What the runtime loads on a GPU is what the wheel has; what is not in it needs the compiler."""
    code = (
        "from tilewave.errors import ToolchainError\n"
        "from tilewave.kernels.build import compile_instance\n"
        "from tilewave.kernels.ship import every_instance\n"
        "from tilewave.runtime import driver, kernels\n"
        "class State(kernels.GpuState):\n"
        "    def __init__(self):\n"
        "        self.spec = type('Spec', (), {'compute_capability': (9, 0)})\n"
        "        self._lock, self._kernels, self._libraries = __import__('threading').Lock(), {}, []\n"
        "        self._loops, self.primary, self.handle = {}, 7, None\n"
        "    def context(self):\n"
        "        return __import__('contextlib').nullcontext()\n"
        "loaded = []\n"
        "def call(name, *arguments):\n"
        "    loaded.append((name, arguments))\n"
        "    return 1\n"
        "driver._call, kernels.driver_cuda_version = call, lambda: (13, 0)\n"
        "instance = min(every_instance(), key=lambda one: one.shared_bytes)\n"
        "State()._load(instance)\n"
        "images = [arguments[0] for name, arguments in loaded if name == 'cuLibraryLoadData']\n"
        "assert images and all(image.startswith(b'\\x7fELF') for image in images)\n"
        "try:\n"
        "    compile_instance(instance, 'sm_90')\n"
        "except ToolchainError as error:\n"
        "    print('needs the compiler')\n"
    )
    assert run(python, tmp_path, "-c", code).strip() == "needs the compiler"


def test_an_editable_install_has_none(tmp_path: Path) -> None:
    """Even where archives lie ready; a wheel without them is none the worse."""
    assert not list(shipped.DIRECTORY.glob("*"))
    code = "import sys; from hatchling import build; print(build.build_editable(sys.argv[1]))"
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives" / "sm_90.zip").write_bytes(b"")
    name = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"TILEWAVE_ARCHIVES": str(tmp_path / "archives")},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()[-1]
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert not [entry for entry in archive.namelist() if entry.endswith(".zip")]


def test_archives_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        env=os.environ | {"TILEWAVE_ARCHIVES": str(tmp_path / "nowhere")},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "holds no archive" in done.stdout + done.stderr
