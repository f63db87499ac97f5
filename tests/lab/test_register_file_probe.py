"""`tilewave probe register-file`: its kernels are in order, and what a GPU makes of them is judged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.device import get_spec
from tilewave.emulator.sass import Instruction, decode
from tilewave.errors import DeviceError, EmulationError
from tilewave.lab import register_file
from tilewave.lab.register_file import (
    SEQUENCES,
    STEPS,
    FmaSequence,
    SequenceFindings,
    conclusion,
    examine,
    faults_of,
    kernel_of,
    pairs,
    shared_load,
    timed,
)

SPEC = get_spec("H200")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence.name)
def test_kernels_are_in_order(sequence: FmaSequence) -> None:
    """On the oldest and the newest architecture that the decoder knows; just the multiply-adds changed."""
    assert len(sequence.make()) == STEPS
    for arch in ("sm_80", "sm_90"):
        cubin = kernel_of(sequence.make(), arch)
        assert cubin.function("carrier").registers >= 242
        assert faults_of(cubin) == ()


def test_every_sequence_is_one_that_a_compiler_could_have_encoded() -> None:
    """Registers within the carrier's count, and no reuse flag where the yield bit is 0."""
    for sequence in SEQUENCES:
        code = sequence.make()
        assert [one.text for one in code if one.fault(register_file._LEAST_DECLARED)] == [], sequence.name
        assert [one.text for one in code if one.control.reuse and not one.control.yield_bit] == []


def test_a_carrier_that_declares_too_few_registers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = register_file._CARRIER.replace("rounds < 0", "false")
    monkeypatch.setattr(register_file, "_CARRIER", text)
    with pytest.raises(EmulationError, match=r"and \d\d registers, .* needs 1024, at least 242"):
        kernel_of(pairs(1), "sm_90")


def test_kernels_that_are_not_in_order_are_found() -> None:
    def with_register(one: Instruction, operand: int, register: int) -> Instruction:
        return decode(one.with_register(operand, register), 0, 90)

    unwaited, hasty = pairs(1), pairs(1)
    unwaited[498], unwaited[500] = shared_load(0), with_register(unwaited[500], 1, 224)
    for i in (7, 8):  # a multiply-add adds to the sum right before it, which takes four cycles
        hasty[i] = with_register(with_register(hasty[i], 0, 100), 3, 100)
    for code in (unwaited, hasty):
        (fault, *_) = faults_of(kernel_of(code, "sm_90"))
        assert "read before" in fault


def test_a_carrier_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = register_file._CARRIER.replace("i < STEPS", "i < STEPS - 1")
    monkeypatch.setattr(register_file, "_CARRIER", text)
    with pytest.raises(EmulationError, match="the carrier has 1023 multiply-adds"):
        kernel_of(pairs(1), "sm_90")


@pytest.mark.parametrize("device", ["T4", "B200", "GB10"])
def test_unknown_machine_code_is_refused(device: str) -> None:
    with pytest.raises(EmulationError, match="is not known here, only of sm_80 to sm_90"):
        examine(get_spec(device))


def test_timing(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Cycles an instruction of a scheduler: from the first warp's begin to the last one's end on each SM."""
    wanted = 1.25
    cycles = np.zeros((SPEC.sms, register_file.THREADS, 2), np.int64)

    def launch() -> None:
        begin = rng.integers(0, 1000, (SPEC.sms, 1))
        cycles[:, :, 0] = begin + 5
        cycles[:, :, 1] = begin + 10
        cycles[:, 3, 0] = begin[:, 0]
        cycles[:, 9, 1] = begin[:, 0] + round(wanted * 2 * STEPS * register_file.ROUNDS)
        cycles[0, 9, 1] *= 3  # one SM that was held up does not count

    prepared = SimpleNamespace(prepare=lambda *_: launch)
    monkeypatch.setattr(register_file, "Stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(register_file, "Module", lambda *_: SimpleNamespace(function=lambda name: prepared))
    array = SimpleNamespace(to_numpy=cycles.copy)
    monkeypatch.setattr(register_file, "DeviceArray", SimpleNamespace(empty=lambda *_: array))
    gpu: Any = SimpleNamespace()
    assert timed(SimpleNamespace(image=b""), gpu, SPEC) == pytest.approx(wanted, rel=1e-4)  # type: ignore[arg-type]


def test_a_sequence_that_the_gpu_stops_at_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it keep their readings; those behind are not timed, for the process has lost the GPU."""
    readings: list[float | None] = [1.0, None]

    def stopping(*_: object) -> float:
        reading = readings.pop(0)
        if reading is None:
            raise DeviceError("CUDA_ERROR_ILLEGAL_INSTRUCTION")
        return reading

    monkeypatch.setattr(register_file, "SEQUENCES", SEQUENCES[8:12])
    monkeypatch.setattr(register_file, "timed", stopping)
    monkeypatch.setattr(register_file, "faults_of", lambda cubin: ())
    gpu: Any = SimpleNamespace()
    findings = examine(SPEC, gpu)
    assert [one.measured for one in findings] == [1.0, None, None, None]
    assert findings[0].faults == ()
    assert findings[1].faults == ("the GPU stopped at it: CUDA_ERROR_ILLEGAL_INSTRUCTION",)
    assert all(f"lost the GPU in '{SEQUENCES[9].name}'" in one.faults[0] for one in findings[2:])
    words = conclusion(findings, SPEC)
    assert words[0] == f"FAULT: {SEQUENCES[9].name}: the GPU stopped at it: CUDA_ERROR_ILLEGAL_INSTRUCTION"
    assert len(words) == 3


def found(measured: float | None, *, loose: bool = False, faults: tuple[str, ...] = ()) -> SequenceFindings:
    return SequenceFindings("two rows", 1.0, 1.011, 1.0, loose, measured, faults)


def test_conclusions() -> None:
    assert [found(value).holds for value in (None, 1.04, 0.96, 1.06, 0.94)] == [
        None,
        True,
        True,
        False,
        False,
    ]
    assert found(5.0, loose=True).holds is None
    assert "All 2 sequences take what the rules say" in conclusion([found(1.0), found(1.02)], SPEC)[0]
    (off,) = conclusion([found(1.0), found(1.1), found(3.0, loose=True)], SPEC)
    assert "1 of 2 sequences are off the rules" in off
    assert "two rows" in off
    assert "nothing was timed" in conclusion([found(None)], SPEC)[0]
    assert conclusion([found(1.0), found(None, faults=("read before",))], SPEC) == [
        "FAULT: two rows: read before"
    ]


def test_what_is_compared_with_what() -> None:
    """The rules; of a load, of which they say nothing, the H200's reading."""
    for sequence in SEQUENCES:
        assert sequence.expected == (sequence.h200 if sequence.of_load else sequence.rule)
        assert sequence.loose or abs(sequence.expected - sequence.h200) < 0.02


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["probe", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(register_file, "SEQUENCES", SEQUENCES[-1:])
    path = tmp_path / "probe.json"
    for name, device in (("register-file", ()), ("Register_File", ("--device", "A100"))):
        code, out = run(name, *device, "--json", str(path))
        assert code == 0
        assert f"Assembled for {device[1] if device else 'H200'}" in out
        assert "All 1 kernels are in order; nothing was timed" in out
        (sequence,) = json.loads(path.read_text())["register_file"]["sequences"]
        assert sequence["name"] == SEQUENCES[-1].name
        assert (sequence["measured"], sequence["holds"], sequence["faults"]) == (None, None, [])
    code, out = run("register-file", "--device", "GB10")
    assert code == 0
    assert "Not run: machine code of sm_121 is not known here" in out
    monkeypatch.setattr(register_file, "faults_of", lambda cubin: ("read before ready",))
    code, out = run("register-file")
    assert code == 1
    assert f"FAULT: {SEQUENCES[-1].name}: read before ready" in out


def test_its_place_among_the_probes() -> None:
    assert register_file.QUESTION in run()[1]
    code, out = run("register-file", "--size", "512")
    assert code == 2
    assert "computes none" in out
    assert "register-file" in run("no-such-probe")[1]
