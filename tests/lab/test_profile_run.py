"""Columns of a profile: emulator, predictions, a pretend ncu, and what stands in where ncu may not read."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from profile_fakes import CUBLAS_KERNEL, metrics_like, pretend_csv, pretend_ncu

from tilewave.bench.environment import Environment, GpuState
from tilewave.compiler.toolchain import compiler_version
from tilewave.device import get_spec
from tilewave.errors import ToolchainError, UsageError
from tilewave.lab import ncu
from tilewave.lab.ladder import Gpu
from tilewave.lab.measure import Measured, MeasuredSize
from tilewave.lab.profile import run
from tilewave.lab.profile.records import (
    CUBLAS,
    EMULATED,
    EMULATOR,
    HARDWARE,
    NCU,
    PREDICTION,
    TIMING,
    Profile,
    Reading,
    load_profile,
    save_profile,
)
from tilewave.lab.profile.run import profile_rungs, recounted
from tilewave.lab.profile.table import columns_of, disagreements, markdown, rows_of
from tilewave.lab.records import Check, Speed
from tilewave.lab.registry import get_rung

__all__ = ["pretend_ncu"]
SPEC = get_spec("H200")
H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "profile_h200.json"


@pytest.fixture(scope="module")
def emulated() -> Profile:
    return profile_rungs([get_rung(6), get_rung(15)], 256, SPEC)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    baseline = types.SimpleNamespace(name="cuBLAS through torch 2.11.0")
    monkeypatch.setattr(Environment, "capture", lambda **_: types.SimpleNamespace(to_json=dict))
    return Gpu(types.SimpleNamespace(name="NVIDIA H200"), baseline)  # type: ignore[arg-type]


def test_without_a_gpu_there_are_two_columns(emulated: Profile) -> None:
    assert (emulated.how, emulated.library, emulated.profiler) == (EMULATED, (), "")
    for kernel in emulated.kernels:
        assert set(kernel.readings) <= {PREDICTION, EMULATOR}
        figures = kernel.readings[EMULATOR].figures
        assert figures["thread_fma"] == 256**3
        tile = get_rung(kernel.rung).tile
        assert figures["outputs_per_thread"] == tile.tm * tile.tn
        assert figures["passes_per_read"] == figures["shared_load_passes"] / figures["shared_loads"]
    assert emulated.environment["compiler"] == compiler_version()


def test_sectors_hold_those_of_copies_as_the_profilers_counter_does(emulated: Profile) -> None:
    plain, copying = (kernel.readings[EMULATOR].figures for kernel in emulated.kernels)
    assert plain["copies"] == 0
    assert plain["global_load_sectors"] > 0
    assert copying["copies"] > 0
    assert copying["global_load_sectors"] == copying["copy_sectors"] > 0
    measured = load_profile(H200)
    assert any(kernel.readings[EMULATOR].figures["copies"] for kernel in measured.kernels)
    for kernel in measured.kernels:
        mine, theirs = (kernel.readings[column].figures for column in (EMULATOR, HARDWARE))
        assert mine["global_load_sectors"] == theirs["global_load_sectors"]


def test_predictions_are_values_and_ratios_to_the_rung_before(rng: np.random.Generator) -> None:
    names = ("global_load_sectors", "global_loads", "shared_loads", "copies")
    counted = {
        number: Reading({name: float(rng.integers(1, 1e6)) for name in names}) for number in (1, 2, 4, 5)
    }
    for number in (2, 5):
        counted[number].figures["copies"] = 0.0  # type: ignore[index]
    coalesced = run.predicted_reading(get_rung(2), 2048, SPEC, counted).figures
    assert coalesced["global_load_sectors"] == pytest.approx(
        0.151515 * counted[1].figures["global_load_sectors"]
    )
    assert coalesced["global_loads"] == counted[1].figures["global_loads"]
    # The value, not the ratio that stands beside it.
    assert run.predicted_reading(get_rung(5), 2048, SPEC, counted).figures == {"shared_loads": 16_777_216}
    # A prediction about a counter belongs to its size.
    assert run.predicted_reading(get_rung(2), 256, SPEC, counted).figures == {}
    # With copies the profiler's counter is another than the registry's.
    counted[2].figures["copies"] = 7.0  # type: ignore[index]
    assert "global_load_sectors" not in run.predicted_reading(get_rung(2), 2048, SPEC, counted).figures


def test_ncu_is_run_and_its_launches_are_told_apart(
    emulated: Profile, gpu: Gpu, pretend_ncu: Callable[..., Path], tmp_path: Path
) -> None:
    six, fifteen = (kernel.readings[EMULATOR] for kernel in emulated.kernels)
    library = {"launch__block_size": 256.0, "launch__grid_size": 2.0, "gpu__time_duration.sum": 343_000.0}
    calls = pretend_ncu(
        pretend_csv(
            [
                ("sgemm_06_two_blocks", metrics_like(six)),
                (
                    "void sgemm_15_large_patch<(bool)1>(const float *)",
                    metrics_like(fifteen, shared_loads=1e6),
                ),
                (CUBLAS_KERNEL, library),
                ("void splitKreduce_kernel<(int)32>(T5 *)", {"gpu__time_duration.sum": 2_000.0}),
            ]
        )
    )
    made = profile_rungs([get_rung(6), get_rung(15)], 256, SPEC, gpu=gpu, budget_s=60)
    _, launched, _ = calls.read_text().splitlines()
    assert launched.endswith("-m tilewave.lab.profile.launch 256 6 15")
    assert "--clock-control none" in launched
    assert (made.how, made.profiler, made.notes) == (NCU, "Version 2025.3.1.0 (pretend)", ())
    assert [set(kernel.readings) >= {EMULATOR, HARDWARE} for kernel in made.kernels] == [True, True]
    assert made.kernels[0].readings[HARDWARE].figures["milliseconds"] == pytest.approx(0.4)
    assert [kernel.kernel for kernel in made.library] == [
        CUBLAS_KERNEL,
        "void splitKreduce_kernel<(int)32>(T5 *)",
    ]
    columns = columns_of(made, made.kernels[0])
    assert list(columns)[-1] == CUBLAS
    assert columns[CUBLAS].figures["milliseconds"] == pytest.approx(0.343)  # the longest of its kernels
    assert disagreements(made) == [
        "15 large patch: shared reads: "
        f"{fifteen.figures['shared_loads']:,.0f} in the emulator, 1,000,000 on the GPU "
        f"({1e6 / fifteen.figures['shared_loads'] - 1:+.2%})"
    ]
    path = tmp_path / "profile.json"
    save_profile(made, path)
    assert load_profile(path) == made
    assert "cuBLAS chose" in markdown(made)


def test_forbidden_counters_leave_times_and_a_note(
    gpu: Gpu, pretend_ncu: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU counters"
    pretend_ncu(said + "\n", 1)
    made = with_pretend_times(monkeypatch, gpu)
    assert made.how == TIMING
    assert "ERR_NVGPUCTRPERM" in made.notes[0]
    assert made.notes[0].startswith("times only, no counters: ncu may not read the GPU's counters")


def test_without_ncu_there_are_times_and_a_note(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ToolchainError("Nsight Compute's ncu was not found")

    monkeypatch.setattr(ncu, "find_ncu", missing)
    made = with_pretend_times(monkeypatch, gpu)
    assert made.notes == (
        "times only, no counters: Nsight Compute's ncu was not found",
        "06 two blocks is WRONG at N = 256 and was not timed",
    )
    figures = made.kernels[1].readings[HARDWARE].figures
    assert figures == {"milliseconds": 2.0, "tflops": 43.0}
    assert HARDWARE not in made.kernels[0].readings
    (library,) = made.library
    assert (library.kernel, library.reading.figures["tflops"]) == ("", 51.0)
    assert all(not reading.stalls for kernel in made.kernels for reading in kernel.readings.values())
    assert "cuBLAS chose" not in markdown(made)


def with_pretend_times(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> Profile:
    """Profile rungs 6 and 15 on a GPU where rung 6 is wrong and rung 15 takes 2 ms."""

    class PretendMeasurer:
        def __init__(self, *_: object) -> None:
            pass

        def measure(self, size: int, candidates: object, rng: object) -> MeasuredSize:
            wrong = Measured(Check("GPU", (size,) * 3, 9.0), None, None)
            right = Measured(Check("GPU", (size,) * 3, 0.1), None, Speed((2.0, 1.0, 3.0), 5, 43.0, 0.1))
            library = Speed((1.5,), 5, 51.0, 0.0)
            return MeasuredSize({6: wrong, 15: right}, library, 0.1, GpuState(), GpuState(), True)

    monkeypatch.setattr("tilewave.lab.measure.Measurer", PretendMeasurer)
    return profile_rungs([get_rung(6), get_rung(15)], 256, SPEC, gpu=gpu)


def test_a_rung_that_ncu_did_not_see_is_an_error(pretend_ncu: Callable[..., Path]) -> None:
    pretend_ncu(pretend_csv([("sgemm_06_two_blocks", {"smsp__inst_executed.sum": 1.0})]))
    with pytest.raises(ToolchainError, match="ncu saw no launch of 15 large patch"):
        run.profiled([get_rung(6), get_rung(15)], 256, 60)


def test_an_ncu_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "ncu"
    script.write_text(
        f"#!{sys.executable}\nimport sys, time\nprint('smsp__inst_executed')\n"
        "'--csv' in sys.argv and time.sleep(60)\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"ncu did not finish \(TimeoutExpired, limit 0 s\)"):
        run.profiled([get_rung(6)], 256, 0.3)


def test_what_the_profiler_lacks_is_told(
    pretend_ncu: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_ncu(pretend_csv([("sgemm_06_two_blocks", {"smsp__inst_executed.sum": 1.0})]))
    available = frozenset({"smsp__inst_executed", "gpu__time_duration"})
    monkeypatch.setattr(ncu, "available_metrics", lambda _: available)
    found = run.profiled([get_rung(6)], 256, 60)
    assert found.notes[0].startswith(
        "this GPU's profiler lacks smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
    )
    assert found.notes[1] == "no kernel of cuBLAS was seen"


def test_a_figure_that_is_not_as_predicted_is_marked() -> None:
    """With the emulator's and the predictions' columns of the H200's profile, and made-up hardware."""
    measured = {kernel.rung: kernel for kernel in load_profile(H200).kernels}

    def reads(rung: int, hardware: float) -> list[str]:
        columns = {**measured[rung].readings, HARDWARE: Reading({"shared_loads": hardware})}
        return dict(rows_of(columns))["shared reads"]

    assert reads(6, 16_777_216.0) == ["16,777,216"] * 3
    assert reads(6, 20_000_000.0) == ["16,777,216", "16,777,216", "20,000,000 (!)"]
    # In front of copies the assembler puts up to three shared reads of no lane each: known, and not marked.
    assert reads(15, 12_979_200.0)[2] == "12,979,200"
    assert reads(15, 18_000_000.0)[2] == "18,000,000 (!)"
    columns = {**measured[6].readings, EMULATOR: Reading({"shared_loads": 1.0})}
    assert dict(rows_of(columns))["shared reads"][1] == "1 (!)"


def test_columns_made_anew_keep_what_the_hardware_said(emulated: Profile) -> None:
    first = emulated.kernels[0]
    hardware = Reading({"milliseconds": 0.4})
    stale = replace(
        emulated,
        kernels=(
            replace(first, readings={EMULATOR: Reading({"registers": 1.0}), HARDWARE: hardware}),
            emulated.kernels[1],
        ),
    )
    anew = recounted(stale, SPEC, 1)
    assert anew.kernels[0].readings == {**first.readings, HARDWARE: hardware}
    assert anew.kernels[1] == emulated.kernels[1]
    other = replace(stale, environment={"compiler": "NVRTC 1.0.0"})
    with pytest.raises(UsageError, match=r"made with NVRTC 1\.0\.0, and here is"):
        recounted(other, SPEC, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ('{"format": 1, "kind": "power"}', "not a profile of format 1"),
        ('{"format": 1, "kind": "profile"}', "a damaged profile: KeyError"),
        (
            '{"format": 1, "kind": "profile", "kernels": [{}], "library": [], "notes": []}',
            "a damaged profile",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        load_profile(path)
