"""The long run and the profile of the library's products without a GPU: what turns and launches become."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from power_fakes import FLOPS, PretendGpu

from tilewave.lab.ncu import KernelCounters
from tilewave.lab.power.records import RANDOM, Repeat
from tilewave.lab.power.rounds import Load

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import product_power  # noqa: E402
import product_power_page  # noqa: E402
import product_profile  # noqa: E402

MS = {"cublas": 20.0, "ieee": 16.0, "fp16x3": 4.0}
WATTS = {"cublas": 600.0, "ieee": 690.0, "fp16x3": 700.0}


def test_a_long_run_ends_in_time_and_keeps_its_parts() -> None:
    gpu = PretendGpu(lambda contender, data, since: {"power_w": WATTS.get(contender), "sm_clock_mhz": 1980.0})
    loads = [Load(name, RANDOM, lambda ms=ms: ms, FLOPS) for name, ms in MS.items()]  # type: ignore[misc]
    kept: list[int] = []

    def keep(repeats: list[Repeat]) -> None:
        kept.append(len(repeats))

    gpu.seconds = 12.0
    repeats = product_power.run(loads, gpu, gpu, gpu.now, 75.0, keep)  # type: ignore[arg-type]
    assert 68 < gpu.seconds <= 75.01
    assert kept == sorted(set(kept))
    assert kept[-1] == len(repeats)
    assert kept[0] == 9  # three turns each
    assert len({(one.contender, one.round) for one in repeats}) == len(repeats)  # numbered on
    found = product_power.summary(repeats, "cublas")
    assert found["ieee"]["ratio"] == pytest.approx(1.25, rel=1e-3)
    assert found["ieee"]["joules"] == pytest.approx(690 * 0.016, rel=1e-3)
    assert found["ieee"]["joules_ratio"] == pytest.approx(690 * 16 / (600 * 20), rel=1e-3)
    assert found["fp16x3"]["joules_ratio"] == pytest.approx(700 * 4 / (600 * 20), rel=1e-3)
    assert found["ieee"]["seconds"] > 15
    assert "x1.250" in product_power.table(found)


def test_a_long_run_without_power_or_rival() -> None:
    gpu = PretendGpu()
    loads = [Load("ieee", RANDOM, lambda: 16.0, FLOPS)]  # type: ignore[list-item,return-value,arg-type]
    repeats = product_power.run(loads, gpu, gpu, gpu.now, 10.0, lambda repeats: None)  # type: ignore[arg-type]
    found = product_power.summary(repeats, "cublas")
    assert found["ieee"]["ratio"] is None
    assert found["ieee"]["joules"] is None
    assert "no power" in product_power.table(found)
    assert product_power.run(loads, gpu, gpu, gpu.now, gpu.seconds + 0.5, lambda repeats: None) == []  # type: ignore[arg-type]


OURS = "void tilewave::large_tile<256, 128>(tilewave::GemmArgs)"
THEIRS = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)"
MODE = ["void tilewave::fp16x3_columns(Args)", "void tilewave::fp16x3_main<2, 4, 2>(Map, Map)"]


def launched(kernel: str, **metrics: float) -> KernelCounters:
    return KernelCounters(kernel, {"gpu__time_duration.sum": 2.4e6, **metrics}, {})


def test_launches_find_their_products() -> None:
    """An edge of ours and a second kernel of cuBLAS's do not shift the layouts; the mode comes last."""
    kernels = [OURS, OURS, THEIRS, OURS, THEIRS, THEIRS, *MODE]
    found = product_profile.labelled([launched(kernel) for kernel in kernels], ["nn", "tt"])
    assert found == {
        "nn ours": [0, 1],
        "nn cublas": [2],
        "tt ours": [3],
        "tt cublas": [4, 5],
        "fp16x3": [6, 7],
    }


def test_a_reading_has_the_pipes_that_the_profiler_has() -> None:
    fma = "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active"
    cycles = product_profile.PIPES["fma_cycles_percent"]
    launches = [launched(OURS, **{fma: 88.5, cycles: 89.0}), launched(THEIRS, **{fma: 79.0})]
    found = product_profile.readings(launches, ["nn"], 4096)
    ours = found["nn ours"][0]
    assert ours["figures"]["fma_pipe_percent"] == 88.5
    assert ours["figures"]["fma_cycles_percent"] == 89.0
    assert ours["figures"]["tflops"] == pytest.approx(2 * 4096**3 / 2.4e-3 * 1e-12)
    assert "fma_cycles_percent" not in found["nn cublas"][0]["figures"]
    assert "fma_pipe_percent 88.5" in product_profile.table(found)


def pages(folder: Path) -> str:
    text = "".join(
        f"<!-- products {one} -->\nold\n<!-- end of products {one} -->\n" for one in ("sustained", "profiled")
    )
    return product_power_page.page(text, folder)


def test_the_page_shows_what_there_is(tmp_path: Path) -> None:
    assert pages(tmp_path).count("Not measured yet") == 2
    one = {
        "turns": 9, "seconds": 18.0, "tflops": 58.0, "ratio": 1.135, "watts": 697.0, "joules": 13.2,
        "joules_ratio": 0.95, "mhz": 1965.0, "celsius": None, "power_cap_share": 0.25,
    }  # fmt: skip
    run = {"size": 8192, "names": {}, "contenders": {"ieee": one}, "failed": {"fp16x3": "refused"}}
    (tmp_path / product_power_page.SUSTAINED).write_text(json.dumps(run))
    launches = [launched(OURS, **{"sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": 88.5})]
    products = product_profile.readings(launches, ["nn"], 4096)
    profile: dict[str, Any] = {"size": 4096, "wanted_fma_percent": 88.0, "products": products}
    (tmp_path / product_power_page.PROFILED).write_text(json.dumps(profile))
    text = pages(tmp_path)
    assert "| ieee | 9 | 58.00 | 1.135 | 697 | 13.20 | 0.950 | 1965 |  | 25% |" in text
    assert "fp16x3: refused" in text
    assert "| nn ours | `tilewave::large_tile<256, 128>` | 88.5 |" in text


def test_the_page_is_what_the_committed_records_make_of_it() -> None:
    text = product_power_page.PAGE.read_text(encoding="utf-8")
    assert product_power_page.page(text) == text


@pytest.mark.parametrize("name", ["product_power", "product_profile"])
def test_the_scripts_take_their_options(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "--budget" in done.stdout, done.stderr
