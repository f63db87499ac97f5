"""The register-file pass: every large tile's loop is emitted anew, proved, and gives the compiler's bits."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reemitted_kernels import (
    ARCH,
    INSTANCES,
    MULTIPLY_ADDS,
    WIDE,
    Generator,
    compiled,
    operands,
    ragged_sizes,
    run,
    shared_instance,
    some,
)

from tilewave.compiler import Source, compile_source, register_pass, shipped
from tilewave.compiler.register_pass import OFF_SWITCH, PassOutcome, pass_outcome
from tilewave.compiler.sass import reemit
from tilewave.compiler.sass.flow import live_before, steady_loop
from tilewave.compiler.sass.mapping import UnsuitableLoop, map_loop
from tilewave.compiler.sass.patch import with_words
from tilewave.compiler.sass.register_file import score
from tilewave.compiler.sass.registers import register_operands
from tilewave.emulator.sass import Cubin, decode, decode_function
from tilewave.emulator.sass.instruction import RESERVED_REGISTERS
from tilewave.errors import EmulationError
from tilewave.kernels import ship
from tilewave.kernels.build import compile_instance
from tilewave.kernels.instances import Instance
from tilewave.kernels.new_loops import instance_refusal, outcome_for
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, split_k

KINDS = ("normal", "integers", "special")
SCHEDULES = (DATA_PARALLEL, split_k(2), STREAM_K_WALK)


def check_reemitted(instance: Instance) -> bytes:
    """The pass takes the instance, and what it says and leaves holds."""
    kernel = compiled(instance)
    outcome = reemit(kernel.program, kernel.symbol)
    assert outcome.reason is None
    assert outcome.report is not None
    assert outcome.cubin is not None
    old, new = Cubin(kernel.program.cubin), Cubin(outcome.cubin)
    function = new.function(kernel.symbol)
    # Rounded up to the next eight, a thread takes no more registers than before.
    assert -(-function.registers // 8) == -(-kernel.registers // 8)
    assert function.registers == outcome.report.registers
    code = decode_function(function, 90)
    used = max(i for one in code for kind, i in one.reads + one.writes if kind == "R")
    assert used < function.registers - RESERVED_REGISTERS
    assert [one.word for one in code[: kernel.first]] == [one.word for one in kernel.code[: kernel.first]]
    place = steady_loop(code, instance.tm * instance.tn * instance.bk)
    assert not isinstance(place, str)
    assert kernel.first <= place[0] <= place[1] <= kernel.last  # moves may stand beside it
    loop = code[place[0] : place[1] + 1]
    before, after = outcome.report.before, outcome.report.after
    assert (score(kernel.loop), score(loop)) == (before, after)
    assert after.cycles < 0.96 * before.cycles  # the compiler's order waits for registers, now less, now more
    assert after.cycles <= 1.005 * len(loop)  # next to nothing waits for the register file
    assert len(outcome.cubin) == len(kernel.program.cubin)
    assert old.functions.keys() == new.functions.keys()
    return outcome.cubin


def check_bits(rng: Generator, instance: Instance, image: bytes, kind: str) -> None:
    """Compiler's cubin, re-emitted one and PTX compute the same bits; no latency is broken on the way."""
    given = operands(rng, instance, kind, *ragged_sizes(rng, instance))
    schedule = SCHEDULES[rng.integers(len(SCHEDULES))]
    alpha = float(rng.choice([1.0, -1.5]))
    found, results = run(instance, image, given, schedule, alpha)
    assert [hazard for result in results for hazard in result.hazards] == []
    compilers, _ = run(instance, compiled(instance).program.cubin, given, schedule, alpha)
    assert np.array_equal(found, compilers)
    numbers, expected = (
        bits.view(np.float32) for bits in (found, run(instance, None, given, schedule, alpha)[0])
    )
    nan = np.isnan(expected)  # PTX leaves the payload of a NaN open
    assert np.array_equal(np.isnan(numbers), nan)
    assert np.array_equal(found[~nan], expected.view(np.uint32)[~nan])
    assert kind == "special" or not nan.any()


def test_some_instances(rng: Generator) -> None:
    """Other instances every time; the long test takes them all."""
    for instance, kind in zip([shared_instance(rng), *some(rng, 1)], rng.permutation(KINDS), strict=False):
        check_bits(rng, instance, check_reemitted(instance), str(kind))


def test_a_wide_tile(rng: Generator) -> None:
    instance = WIDE[rng.integers(len(WIDE))]
    check_bits(rng, instance, check_reemitted(instance), str(rng.choice(KINDS)))


@pytest.mark.long
@pytest.mark.parametrize("instance", WIDE, ids=str)
def test_every_wide_tile(instance: Instance, rng: Generator) -> None:
    image = check_reemitted(instance)
    for kind in KINDS:
        check_bits(rng, instance, image, kind)


@pytest.mark.long
@pytest.mark.sampled(12)
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_every_instance(instance: Instance, rng: Generator) -> None:
    image = check_reemitted(instance)
    for kind in KINDS:
        check_bits(rng, instance, image, kind)


@pytest.mark.long
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "instance", [one for one in (*INSTANCES, *WIDE) if instance_refusal(one) is None], ids=str
)
def test_every_default_kernel_has_a_new_loop(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library compiles them, for sm_90: the same code as for sm_90a, which the other tests run."""
    monkeypatch.delenv(OFF_SWITCH, raising=False)
    program, kernel = compile_instance(instance, "sm_90")
    outcome = pass_outcome(program, kernel.symbol)
    assert outcome.cubin is not None, outcome.reason
    other = reemit(compiled(instance).program, kernel.symbol).cubin
    assert other is not None
    codes = [Cubin(image).function(kernel.symbol).code for image in (outcome.cubin, other)]
    assert codes[0] == codes[1]


@pytest.mark.long
def test_a_wheel_brings_new_loops(rng: Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An archive that `tilewave.kernels.ship` wrote has them, and the pass need not be run."""
    narrow = next(one for one in INSTANCES if instance_refusal(one) is not None)
    wide = next(one for one in some(rng, len(INSTANCES)) if instance_refusal(one) is None)
    monkeypatch.delenv(OFF_SWITCH, raising=False)
    monkeypatch.delenv("TILEWAVE_NVRTC", raising=False)
    monkeypatch.setattr(ship, "every_kernel", lambda: (narrow, wide))
    (path,) = ship.write_archives(tmp_path / "archives", ["sm_90"], jobs=1)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 3
    monkeypatch.setenv("TILEWAVE_SHIPPED", str(path.parent))
    monkeypatch.setenv("TILEWAVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(register_pass, "made_outcome", None)
    _forget(monkeypatch)
    program, kernel = compile_instance(wide, "sm_90", machine_code_only=True)
    assert program.ptx == ""
    cubin = outcome_for(wide, program, kernel).cubin
    assert cubin is not None
    assert cubin != program.cubin
    assert not (tmp_path / "cache").exists()


def test_a_spoiled_loop_shows(rng: Generator) -> None:
    """One multiply-add with a factor of another row: the bits differ, so the comparison can fail."""
    instance = shared_instance(rng)
    kernel = compiled(instance)
    image = check_reemitted(instance)
    code = decode_function(Cubin(image).function(kernel.symbol), 90)
    multiply_adds = [i for i in range(kernel.first, kernel.last) if code[i].opcode == "FFMA"]
    at = int(rng.choice(multiply_adds))
    factors = {register for i in multiply_adds for _, register in register_operands(code[i])[1:2]}
    other = next(r.index for r in factors if r.index != register_operands(code[at])[1][1].index)
    spoiled = with_words(Cubin(image), kernel.symbol, at, [code[at].with_register(1, other)], 0).image
    given = operands(rng, instance, "normal", *ragged_sizes(rng, instance))
    assert not np.array_equal(
        run(instance, image, given, DATA_PARALLEL)[0], run(instance, spoiled, given, DATA_PARALLEL)[0]
    )


# Guards.


def test_the_switch(rng: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compiled(shared_instance(rng))
    for value in ("0", "off", "no"):
        monkeypatch.setenv(OFF_SWITCH, value)
        for outcome in (reemit, pass_outcome):
            found = outcome(kernel.program, kernel.symbol)
            assert found.cubin is None
            assert found.reason == f"the register-file pass is switched off by {OFF_SWITCH}={value}"
    for value in ("1", "", None):
        if value is None:
            monkeypatch.delenv(OFF_SWITCH)
        else:
            monkeypatch.setenv(OFF_SWITCH, value)
        made = reemit(kernel.program, kernel.symbol).cubin
        assert made is not None
        assert pass_outcome(kernel.program, kernel.symbol).cubin == made


def test_the_outcome_is_shipped_and_kept(
    rng: Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a wheel brings is taken before the cache, and the cache before the pass is run again."""
    instance = shared_instance(rng)
    program, kernel = compile_instance(instance, "sm_90")
    monkeypatch.delenv(OFF_SWITCH, raising=False)
    monkeypatch.delenv("TILEWAVE_NVRTC", raising=False)
    monkeypatch.setenv("TILEWAVE_CACHE_DIR", str(tmp_path / "cache"))
    key = register_pass.outcome_key(program.cubin, kernel.symbol)
    assert key is not None
    made = register_pass.made_outcome(program, kernel.symbol)
    assert ship._new_loop((program, kernel.symbol)) == (key, register_pass.encode(made))
    for outcome in (made, PassOutcome(None, "a reason", ""), PassOutcome(b"code", None, "words")):
        assert register_pass.decode(register_pass.encode(outcome)) == outcome
    _forget(monkeypatch)
    assert register_pass.pass_outcome(program, kernel.symbol) == made
    monkeypatch.setattr(register_pass, "made_outcome", None)  # it cannot be called any more
    _forget(monkeypatch)
    assert register_pass.pass_outcome(program, kernel.symbol) == made
    sent = PassOutcome(b"shipped", None, "from the wheel")
    shipped.write(tmp_path, "sm_90", [], [(key, register_pass.encode(sent))])
    monkeypatch.setattr(shipped, "DIRECTORY", tmp_path)
    _forget(monkeypatch)
    assert register_pass.pass_outcome(program, kernel.symbol) == sent
    monkeypatch.setenv("TILEWAVE_SHIPPED", "0")
    _forget(monkeypatch)
    assert register_pass.pass_outcome(program, kernel.symbol) == made


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register_pass, "_outcomes", {})


def test_what_was_not_tested_is_left_alone(rng: Generator) -> None:
    kernel = compiled(shared_instance(rng))
    for change, words in (
        ({"compiler": "NVRTC 13.9.1"}, "was not tested with NVRTC 13.9.1, only with NVRTC 13.0.88 and"),
        ({"arch": "sm_80"}, "the register file of sm_80 was not measured, only that of sm_90 and sm_90a"),
    ):
        outcome = reemit(replace(kernel.program, **change), kernel.symbol)
        assert outcome.cubin is None
        assert words in str(outcome.reason)


def test_other_kernels_are_left_alone() -> None:
    source = Source.from_text("k.cu", 'extern "C" __global__ void k(float* p) { p[threadIdx.x] += 1; }')
    outcome = reemit(compile_source(source, ["k"], ARCH), "k")
    assert outcome.reason == "the kernel is not written for the register-file pass"


def test_a_loop_of_another_form_is_left_alone(rng: Generator) -> None:
    """Whatever single instruction of the loop is lost, there is a reason, and no error."""
    kernel = compiled(shared_instance(rng))
    nothing = next(one for one in kernel.code if one.opcode == "NOP")
    for i in rng.integers(kernel.first, kernel.last, 3):
        cubin = with_words(Cubin(kernel.program.cubin), kernel.symbol, int(i), [nothing.word], 0)
        outcome = reemit(replace(kernel.program, cubin=cubin.image), kernel.symbol)
        assert outcome.cubin is None
        assert outcome.reason
    with pytest.raises(UnsuitableLoop):
        map_loop([one for one in kernel.loop if one.opcode != "LDS"])


def test_damaged_machine_code_is_left_alone(rng: Generator) -> None:
    kernel = compiled(shared_instance(rng))
    cubin = with_words(Cubin(kernel.program.cubin), kernel.symbol, kernel.first, [0xFFF], 0)
    outcome = reemit(replace(kernel.program, cubin=cubin.image), kernel.symbol)
    assert "the machine code is not understood" in str(outcome.reason)


# The parts.


def test_mapping(rng: Generator) -> None:
    """A 16 x 8 tile in eight slices; every sum and every load is in its place once."""
    kernel = compiled(shared_instance(rng))
    steady = kernel.steady
    assert steady.depth == 8
    assert sorted(steady.extent.values()) == [8, 16]
    assert len(set(steady.sums.values())) == 128
    loads = [load for loads in steady.loads.values() for load in loads]
    assert len(loads) == len(set(loads)) == 48
    multiply_adds = {i for i, one in enumerate(kernel.loop) if one.opcode == "FFMA"}
    assert multiply_adds | set(loads) | set(steady.others) == set(range(len(kernel.loop) - 1))


def test_register_count_is_raised_and_never_lowered(rng: Generator) -> None:
    kernel = compiled(shared_instance(rng))
    cubin = Cubin(kernel.program.cubin)
    words = [one.word for one in kernel.loop]
    same = with_words(cubin, kernel.symbol, kernel.first, words, 10)
    assert same.image == cubin.image
    raised = with_words(cubin, kernel.symbol, kernel.first, words, kernel.registers + 1)
    assert raised.function(kernel.symbol).registers == kernel.registers + 1
    differing = [i for i, (a, b) in enumerate(zip(raised.image, cubin.image, strict=True)) if a != b]
    assert 1 <= len(differing) <= 2
    with pytest.raises(EmulationError, match="holds no kernel"):
        with_words(cubin, "another", 0, words, 10)


LIVENESS = r"""
extern "C" __global__ void k(float* out, const float* in, int n, long long d) {
    float x = in[0], y = in[1], z = in[2];
    for (int i = 0; i < n; ++i) x = x * y + in[i];
    out[0] = x;
    out[1] = static_cast<float>(n / d);  // a call
    out[2] = z;
}
"""


def test_liveness() -> None:
    """What is read behind the loop is live in it, a call in between or not; what is not read is not."""
    program = compile_source(Source.from_text("k.cu", LIVENESS), ["k"], ARCH)
    code = decode_function(Cubin(program.cubin).function("k"), 90)
    live = live_before(code, *range(len(code)))
    assert any(one.opcode == "CALL.REL" for one in code)
    assert not {cell for cell in live[0] if cell[0] in ("R", "P")} - {("R", 1)}
    for i, one in enumerate(code):
        assert set(one.reads) <= live[i]
    stores = [i for i, one in enumerate(code) if one.opcode == "STG"]
    data = max(i for i, one in enumerate(code) if one.opcode == "LDG" and i < min(stores))
    assert set(code[data].writes) <= live[data + 1]
    ends = [i for i, one in enumerate(code) if one.opcode == "EXIT" and one.guard.is_true]
    assert all(not live[i] for i in ends)


def test_steady_loop_tells_why_there_is_none(rng: Generator) -> None:
    kernel = compiled(shared_instance(rng))
    assert steady_loop(kernel.code, 7) == "0 innermost loops hold 7 multiply-adds, not one"
    code = list(kernel.code)
    inside = next(i for i in range(kernel.first + 20, kernel.last) if code[i].opcode == "FFMA")
    exit_ = next(one for one in code if one.opcode == "EXIT")
    code[inside] = decode(exit_.word, code[inside].address, 90)
    assert "EXIT" in str(steady_loop(code, MULTIPLY_ADDS - 1))
