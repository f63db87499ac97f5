"""The command `tilewave power`: with a pretend GPU, from files, and where there is no GPU."""

from __future__ import annotations

import json
import re
import time
import types
from pathlib import Path

import numpy as np
import pytest
from power_fakes import ALL_LOADS, FLOPS, NAMES, power_run
from typer.testing import CliRunner

from tilewave.bench.environment import GpuState
from tilewave.cli import app
from tilewave.compiler import Source, compile_source
from tilewave.device import get_spec
from tilewave.emulator import Memory, launch
from tilewave.emulator.sass import Cubin, decode
from tilewave.lab.power import command, gpu
from tilewave.lab.power.records import CUBLAS, FFMA, OURS, RANDOM, Sample, load_power_run, save_power_run
from tilewave.lab.power.rounds import Load
from tilewave.lab.power.verdict import judged
from tilewave.lab.registry import get_rung
from tilewave.runtime.driver import Probe

runner = CliRunner()
A, B = (OURS, RANDOM), (CUBLAS, RANDOM)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests never use a GPU, also on a machine that has one."""
    monkeypatch.setattr(command, "probe", lambda: Probe(0, None, "no NVIDIA driver on this machine"))
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(app, ["power", *map(str, arguments)], prog_name="tilewave")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class SleepingStopwatch:
    """Each call sleeps for a millisecond; what it tells is the load's own figure."""

    def elapsed_ms(self, work: object, repeats: int) -> float:
        time.sleep(repeats / 1e3)
        return repeats * work()  # type: ignore[operator]


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """A GPU whose loads take so many milliseconds a call; change them before the run."""
    milliseconds = dict.fromkeys(ALL_LOADS, 2.6)
    device = types.SimpleNamespace(name="NVIDIA H200", pci_bus_id="0000:01:00.0")
    machine = types.SimpleNamespace(device=device, baseline=types.SimpleNamespace(name=NAMES[CUBLAS]))
    loads = tuple(Load(*key, lambda key=key: milliseconds[key], FLOPS) for key in ALL_LOADS)  # type: ignore[misc]
    stage = gpu.Stage(loads, SleepingStopwatch(), ())  # type: ignore[arg-type]
    monkeypatch.setattr(command, "probe", lambda: Probe(1, (13, 0), None))
    monkeypatch.setattr(command, "open_gpu", lambda: (machine, get_spec("H200"), "a pretend H200"))
    monkeypatch.setattr(gpu, "set_stage", lambda *_: stage)
    monkeypatch.setattr(gpu, "fastest_rung", lambda *_: get_rung(17))
    state = GpuState(1980.0, 3201.0, 655.0, 700.0, 61.0, ["power cap"], "NVML")
    monkeypatch.setattr(command, "open_nvml", lambda _: (lambda: state, lambda: None, "NVML, present power"))
    monkeypatch.setattr(command.Environment, "capture", lambda **_: types.SimpleNamespace(to_json=dict))
    return milliseconds


def test_a_run_is_measured_shown_and_kept(pretend_gpu: dict[tuple[str, str], float], tmp_path: Path) -> None:
    pretend_gpu[A], pretend_gpu[B] = 3.0, 2.7
    path = tmp_path / "run.json"
    code, out, err = run("--seconds", 1.5, "--size", 4096, "--json", path)
    assert (code, err) == (0, "")
    assert "rung 17 plain a is behind cuBLAS through torch 2.11.0 on random data by 10.0 %" in out
    assert "throttled (power cap)" in out
    assert "(limit 700 W)" in out
    made = load_power_run(path)
    assert (made.device, made.size, made.rung, made.seconds) == ("H200", 4096, 17, 1.5)
    assert {(s.contender, s.data) for s in made.summaries} == set(ALL_LOADS)
    assert made.summary(*A).tflops == pytest.approx(FLOPS / 3.0 * 1e-9)
    assert made.power_limit_w == 700.0
    assert {sample.power_w for sample in made.samples} == {655.0}
    assert made.measured_peak_tflops == pytest.approx(FLOPS / 2.6 * 1e-9)
    # Shown again from the file, it says the same.
    code, again, _ = run("--from", path)
    assert code == 0
    assert again.strip() in out.replace(f"The run is in {path}.", "")


def test_a_rate_above_the_peak_is_refused(pretend_gpu: dict[tuple[str, str], float], tmp_path: Path) -> None:
    pretend_gpu[B] = 0.3
    path = tmp_path / "run.json"
    code, _, err = run("--seconds", 1.5, "--json", path)
    assert code == 1
    assert "cuBLAS through torch 2.11.0: 458.1 TFLOP/s is above the FP32 peak" in err
    assert not path.exists()


def test_without_nvml_there_is_throughput_and_it_says_so(
    pretend_gpu: dict[tuple[str, str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    del pretend_gpu
    why = "no NVML: the package nvidia-ml-py is not installed; throughput only"
    monkeypatch.setattr(command, "open_nvml", lambda _: (None, lambda: None, why))
    code, out, _ = run("--seconds", 1.5)
    assert code == 0
    assert f"Clocks and power are not known: {why}." in out
    assert re.search(r"rung 17 plain a +random +\d+\.\d\d +0\.00% +\S+ +- +- +- +- +-", out)


def test_an_earlier_run_of_another_rung_is_refused_before_anything_runs(
    pretend_gpu: dict[tuple[str, str], float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del pretend_gpu
    earlier = tmp_path / "earlier.json"
    save_power_run(judged(power_run({A: [50.0] * 3, B: [51.0] * 3})), earlier)
    monkeypatch.setattr(gpu, "set_stage", lambda *_: pytest.fail("it was measured"))
    code, _, err = run("--rung", 15, "--compare", earlier)
    assert code == 2
    assert "cannot be compared: rung is 15 here and 17 in the earlier one" in err


def test_comparing_takes_rung_and_size_from_the_earlier_run(
    pretend_gpu: dict[tuple[str, str], float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del pretend_gpu
    earlier = tmp_path / "earlier.json"
    rates = {A: [52.0] * 3, B: [53.0] * 3}
    save_power_run(judged(power_run(rates)), earlier)
    monkeypatch.setattr(gpu, "fastest_rung", lambda *_: pytest.fail("the rung is known"))
    path = tmp_path / "run.json"
    assert run("--seconds", 1.5, "--compare", earlier, "--json", path)[0] == 0
    made = load_power_run(path)
    assert (made.size, made.rung) == (4096, 17)
    median = FLOPS / 2.6 * 1e-9
    assert made.summary(*A).between_runs == pytest.approx((median - 52) / ((median + 52) / 2), rel=1e-6)
    assert made.summary(FFMA, "registers").between_runs is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 1, "a power run needs a GPU: no NVIDIA driver on this machine; --from FILE shows one"),
        (("--seconds", "0"), 2, "seconds 0: at least 1.5 are needed"),
        (("--seconds", "nan"), 2, "seconds nan: at least 1.5"),
        (("--rung", "99"), 2, "there is no rung '99'"),
        (("--size", "0"), 2, "size '0': whole numbers from 1"),
        (("--size", "1024,2048"), 2, "size '1024,2048': one size is accepted"),
        (("--json", "/no/such/place.json"), 2, "cannot write /no/such/place.json"),
        (("--compare", "/no/such/run.json"), 2, "cannot read /no/such/run.json"),
        (("--from", "/no/such/run.json"), 2, "cannot read /no/such/run.json"),
        (("--from", "run.json", "--rung", "3"), 2, "--seconds, --rung and --size go without it"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], code: int, said: str) -> None:
    found, out, err = run(*arguments)
    assert found == code
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_saved_run_is_judged_anew_against_another(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    sample = Sample(1.0, OURS, RANDOM, 1980.0, 3201.0, 650.0, 61.0)
    save_power_run(judged(power_run({A: [52.0] * 3, B: [50.0] * 3}, samples=(sample,))), first)
    save_power_run(judged(power_run({A: [49.0] * 3, B: [50.0] * 3})), second)
    assert "is ahead of" in run("--from", first)[1]
    code, out, _ = run("--from", first, "--compare", second)
    assert code == 0
    assert "between runs" in out.splitlines()[0]
    assert "Parity: rung 17 plain a" in out
    assert "This is one run" not in out


def test_the_loop_of_multiply_adds_does_as_many_as_it_says(rng: np.random.Generator) -> None:
    program = compile_source(Source.packaged(gpu.FFMA_SOURCE), [gpu.FFMA_ENTRY], "sm_90")
    kernel = program.kernels[gpu.FFMA_ENTRY]
    memory = Memory()
    sink = memory.empty((1,), np.float32, name="sink")
    counts = []
    loops = sorted({int(n) for n in rng.integers(1, 6, 2)} | {7})
    for passes in (loops[0], loops[-1]):
        arguments = [sink, gpu.FFMA_TURN, passes]
        block = (gpu.FFMA_THREADS, 1, 1)
        counters = launch(program.ptx, kernel.symbol, (2, 1, 1), block, arguments, memory).counters
        counts.append(counters.thread_fma)
    per_loop = (counts[1] - counts[0]) / (loops[-1] - loops[0])
    assert per_loop == 2 * gpu.FFMA_THREADS * gpu.FFMA_PER_LOOP
    assert np.isnan(memory.get(sink)).all()  # never written


def test_the_loop_of_multiply_adds_reads_registers_as_fast_as_they_come() -> None:
    """Two register reads in opposite banks for each multiply-add, and next to nothing else in the loop."""
    program = compile_source(Source.packaged(gpu.FFMA_SOURCE), [gpu.FFMA_ENTRY], "sm_90")
    code = Cubin(program.cubin).functions[gpu.FFMA_ENTRY].code
    instructions = [decode(int.from_bytes(code[i : i + 16], "little"), i) for i in range(0, len(code), 16)]
    fma = [i for i in instructions if i.opcode == "FFMA"]
    body = fma[-gpu.FFMA_PER_LOOP :]
    assert len(fma) >= gpu.FFMA_PER_LOOP
    registers = [sorted(set(map(int, re.findall(r"\bR(\d+)", i.text.partition(",")[2])))) for i in body]
    assert {len(pair) for pair in registers} == {2}
    assert all((one + other) % 2 == 1 for one, other in registers)
    inside = [i for i in instructions if body[0].address <= i.address <= body[-1].address]
    assert len(body) / len(inside) > 0.98


@pytest.mark.parametrize("size", [1, 700, 4096, 32768])
def test_the_loop_takes_about_as_long_as_a_product(size: int) -> None:
    loops = gpu.ffma_loops(size, 132)
    assert loops >= 1
    assert loops < 2**31
    if size >= 4096:
        done = loops * gpu.FFMA_PER_LOOP * gpu.FFMA_THREADS * gpu.FFMA_BLOCKS_PER_SM * 132
        assert done == pytest.approx(size**3, rel=0.01)


def test_every_part_of_a_run_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    save_power_run(judged(power_run({A: [52.0] * 3, B: [50.0] * 3})), path)
    data = json.loads(path.read_text())
    assert (data["format"], data["kind"]) == (1, "power")
    assert data["verdicts"][0]["outcome"] == "ahead"
