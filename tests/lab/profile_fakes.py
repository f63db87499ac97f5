"""A pretend ncu, and reports as the real one writes them."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tilewave.lab.profile.metrics import COUNTERS, wanted_metrics
from tilewave.lab.profile.records import Reading

CUBLAS_KERNEL = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)"


def pretend_csv(launches: Sequence[tuple[str, dict[str, float]]]) -> str:
    """A raw page of ncu."""
    names = sorted({name for _, metrics in launches for name in metrics})
    rows = [["ID", "Kernel Name", *names], ["", "", *("ns" if "duration" in name else "" for name in names)]]
    for index, (kernel, metrics) in enumerate(launches):
        rows.append(
            [str(index), kernel, *(f"{metrics[name]:,.2f}" if name in metrics else "n/a" for name in names)]
        )
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows) + "\n"


def metrics_like(reading: Reading, **changes: float) -> dict[str, float]:
    """The profiler's metrics of a launch that counts what a reading says."""
    figures = {**reading.figures, **changes}
    found = {names[0]: figures[figure] for figure, names in COUNTERS.items() if figure in figures}
    found["launch__registers_per_thread"] = figures["registers"]
    found["launch__occupancy_limit_registers"] = figures["blocks_per_sm"]
    found["gpu__time_duration.sum"] = 400_000.0
    return found


@pytest.fixture
def pretend_ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int], Path]:
    """Put an ncu on the PATH that writes a CSV and ends with a status; returns where it notes its calls."""

    def install(csv: str, status: int = 0) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        calls = tmp_path / "calls"
        (folder / "page.csv").write_text(csv)
        names = "\n".join(sorted({name.split(".")[0] for name in wanted_metrics()}))
        script = folder / "ncu"
        script.write_text(
            f"#!{sys.executable}\n"
            "import shutil, sys\n"
            "args = sys.argv[1:]\n"
            f"open({str(calls)!r}, 'a').write(' '.join(args) + '\\n')\n"
            "if '--query-metrics' in args:\n"
            f"    print({names!r})\n"
            "elif '--version' in args:\n"
            "    print('NVIDIA Nsight Compute\\nVersion 2025.3.1.0 (pretend)')\n"
            "elif '--import' in args:\n"
            f"    print(open({str(folder / 'page.csv')!r}).read())\n"
            f"    sys.exit({status})\n"
            "else:\n"
            f"    shutil.copy({str(folder / 'page.csv')!r}, args[args.index('--log-file') + 1])\n"
            f"    sys.exit({status})\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder))
        return calls

    return install
