"""The probe of the register file: hand-written sequences of multiply-adds, timed beside what the rules say.

The rules of `compiler.sass.register_file` were measured on one H200. A *sequence* is a loop of 1,024
instructions whose registers and reuse flags are chosen by hand, which no compiler lets one do: it is written
over the multiply-adds of a carrier kernel that NVRTC made. The interpreter of machine code runs every one of
them first, so that none is timed whose latencies are not minded or whose encoding no compiler would give.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewave.compiler import Source, compile_source
from tilewave.compiler.sass.flow import live_before
from tilewave.compiler.sass.patch import with_words
from tilewave.compiler.sass.register_file import score
from tilewave.device import DeviceSpec
from tilewave.emulator import Memory
from tilewave.emulator.sass import Control, Cubin, Instruction, decode, decode_function, run_blocks
from tilewave.emulator.sass.instruction import RESERVED_REGISTERS
from tilewave.errors import DeviceError, EmulationError
from tilewave.runtime.driver import Device, DeviceArray, Module, Stream

NAME = "register-file"
QUESTION = "Does this GPU's register file keep the rules that the register-file pass goes by?"

MEASURED_ON = "H200"
"""The GPU that the rules were read on. Without a GPU, unless one is named, the kernels are made for it."""

STEPS = 1024
"""Instructions of a sequence: a multiple of every pattern's period, and few enough for the caches of code."""
WARPS_A_SCHEDULER = 2
THREADS = 256
"""Of a block, one on each SM: two warps for each of four schedulers."""
ROUNDS = 64
LAUNCHES = 5
CLOSE = 0.05
"""Cycles an instruction by which a reading may be off the rules: the model is within 0.02 on an H200."""
KNOWN_SM = (80, 90)
"""The oldest and the newest architecture whose machine code the decoder knows."""

_FIRST_FREE = 64
"""The carrier's loop leaves registers from here on alone; sums and B are taken from 128, A from 32 more."""
_FIRST_OF_A = 192
_FIRST_LOADED = 224
_REGISTERS = 240
_LEAST_DECLARED = _REGISTERS + RESERVED_REGISTERS
_LOADS_IN_FLIGHT = 4
_SHARED_BEGIN = 0x400
"""Of the carrier's own shared memory: from sm_90 on the system keeps what lies before."""
_LATENCY = 6
"""Cycles until an instruction of the carrier's loop (an addition, a comparison) may be read."""
_CLOCK, _NO_CLOCK = (0x50, 0xFF)  # special registers: SR_CLOCKLO, and SRZ, which reads as 0
_SPECIAL_SHIFT = 72

_CARRIER = """
extern "C" __global__ void __launch_bounds__(256, 1) carrier(long long* cycles, float* out, int rounds) {
  __shared__ float4 shared[256];
  // Never taken: it has the compiler declare the registers that the sequence will use.
  if (rounds < 0) {
    volatile float* const cells = out;
    float many[REGISTERS];
#pragma unroll
    for (int i = 0; i < REGISTERS; ++i) many[i] = cells[i];
#pragma unroll
    for (int i = 0; i < REGISTERS; ++i) cells[i] = many[REGISTERS - 1 - i];
    return;
  }
  const int thread = threadIdx.x;
  shared[thread] = make_float4(0, 0, 0, 0);
  float sum[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i] = thread + i;
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
      asm volatile("fma.rn.f32 %0, %0, %1, %2;"
                   : "+f"(sum[i % 16]) : "f"(sum[(i + 5) % 16]), "f"(sum[(i + 9) % 16]));
  }
  const long long end = clock64();
  float all = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) all += sum[i];
  const int at = blockIdx.x * blockDim.x + thread;
  out[at] = all + shared[255 - thread].x;
  cycles[2 * at] = begin;
  cycles[2 * at + 1] = end;
}
"""


@dataclass(frozen=True)
class FmaSequence:
    """A sequence and what an H200 made of it, in cycles an instruction; ``loose``: the reading's own sequence
    is not known exactly, so that nothing is concluded from it."""

    name: str
    h200: float
    make: Callable[[], list[Instruction]]
    loose: bool = False
    of_load: bool = False

    @property
    def rule(self) -> float:
        """Cycles an instruction by the rules."""
        return score(self.make()).cycles / STEPS

    @property
    def expected(self) -> float:
        """What a reading is compared with: the rules, which know nothing of loads, or then the H200."""
        return self.h200 if self.of_load else self.rule


def multiply_add(total: int, a: int, b: int, reuse: int = 0, yield_bit: int = 1) -> Instruction:
    """An FFMA of registers: total += a * b.

    Where the yield bit is 0, the bits of the reuse flags mean something else (`Control.fault`) and stay 0.
    """
    reuse *= yield_bit
    word = 0x223 | 7 << 12 | total << 16 | a << 24 | b << 32 | total << 64
    return decode(Control(reuse=reuse, yield_bit=yield_bit).into_word(word), 0, 90)


def shared_load(number: int) -> Instruction:
    """The number-th load of 16 bytes from shared memory; a few of them are in flight at once."""
    board = number % _LOADS_IN_FLIGHT
    word = 0x0C00_0000_0000_0000_7984 | (_FIRST_LOADED + 4 * board) << 16 | 0xFF << 24 | _SHARED_BEGIN << 40
    return decode(Control(write_barrier=board, wait_mask=1 << board).into_word(word), 0, 90)


def _of_bank(bank: int, number: int) -> int:
    """The number-th register of a bank, from 64 registers that are used in turn."""
    return _FIRST_FREE + 2 * (number % 64) + bank


def runs(
    length: int, *, of_b: tuple[int, ...], of_sum: tuple[int, ...], yields: tuple[int, ...] = (1,)
) -> list[Instruction]:
    """A (even) is held for runs of so many; B and sum lie in banks that follow a pattern."""
    found = []
    for i in range(STEPS):
        a = _FIRST_OF_A + 2 * (i // length % 16)
        last = i % length == length - 1
        b, total = (
            _of_bank(banks[i % len(banks)], i + offset) for banks, offset in ((of_b, 0), (of_sum, 31))
        )
        found.append(multiply_add(total, a, b, 0 if last else 1, yields[i % len(yields)]))
    return found


def pairs(second_bank: int) -> list[Instruction]:
    """Two rows' A are held, the second in the given bank; B is swept and held across the pair."""
    found = []
    for i in range(STEPS // 2):
        b = _of_bank(i % 2, i)
        for row, a in enumerate((_FIRST_OF_A, _FIRST_OF_A + 2 + second_bank)):
            found.append(multiply_add(_of_bank((i + row) % 2, i + 31), a, b, 1 | (2 if row == 0 else 0)))
    return found


def pairs_with_loads(every: int) -> list[Instruction]:
    """Two rows in opposite banks, and a load for each ``every``-th instruction."""

    def mixed() -> Iterator[Instruction]:
        multiply_adds = iter(pairs(1))
        for i in range(STEPS):
            yield shared_load(i // every) if i % every == every - 1 else next(multiply_adds)

    return list(mixed())


SEQUENCES = (
    FmaSequence("no reuse, operands in both banks", 1.505, lambda: runs(1, of_b=(1, 1), of_sum=(0, 1))),
    FmaSequence("no reuse, all operands in one bank", 3.00, lambda: runs(1, of_b=(0,), of_sum=(0,))),
    FmaSequence("A held for 2, B and sum in opposite banks", 1.50, lambda: runs(2, of_b=(1,), of_sum=(0,))),
    FmaSequence("A held for 4, B and sum in opposite banks", 1.26, lambda: runs(4, of_b=(1,), of_sum=(0,))),
    FmaSequence("A held for 8, B and sum in opposite banks", 1.13, lambda: runs(8, of_b=(1,), of_sum=(0,))),
    FmaSequence("A held for 16, B and sum in opposite banks", 1.07, lambda: runs(16, of_b=(1,), of_sum=(0,))),
    FmaSequence(
        "A held for 8, B and sum in one bank, the other each step",
        1.136,
        lambda: runs(8, of_b=(0, 1), of_sum=(0, 1)),
    ),
    FmaSequence(
        "the same, the other bank every second step",
        1.505,
        lambda: runs(8, of_b=(0, 0, 1, 1), of_sum=(0, 0, 1, 1)),
        loose=True,
    ),
    FmaSequence("the same, always one bank", 2.13, lambda: runs(8, of_b=(0,), of_sum=(0,))),
    FmaSequence("two rows, their A in opposite banks, both held", 1.011, lambda: pairs(1)),
    FmaSequence("two rows, both A in one bank", 1.75, lambda: pairs(0)),
    FmaSequence(
        "A held for 8, yield bit 0 everywhere", 2.0, lambda: runs(8, of_b=(1,), of_sum=(0,), yields=(0,))
    ),
    FmaSequence(
        "A held for 8, yield bit 0 on every second",
        1.63,
        lambda: runs(8, of_b=(1,), of_sum=(0,), yields=(1, 0)),
        loose=True,
    ),
    FmaSequence(
        "two rows in opposite banks, a load of 16 bytes in 21",
        1.081,
        lambda: pairs_with_loads(21),
        of_load=True,
    ),
)
"""What docs/register-file.md lists: banks, reuse, yield and loads."""


@dataclass(frozen=True)
class SequenceFindings:
    """A sequence on one GPU, in cycles an instruction; ``measured`` is None where nothing was timed.

    ``faults``: what the interpreter found wrong with the kernel, which then is not timed, or why a GPU did
    not time it.
    """

    name: str
    rule: float
    h200: float
    expected: float
    loose: bool
    measured: float | None
    faults: tuple[str, ...]

    @property
    def holds(self) -> bool | None:
        """Whether the reading is as expected; None where there is none, or none to conclude from."""
        if self.measured is None or self.loose:
            return None
        return abs(self.measured - self.expected) <= CLOSE


def kernel_of(sequence: Sequence[Instruction], arch: str) -> Cubin:
    """The carrier with a sequence in the place of its multiply-adds."""
    defined = f"#define STEPS {STEPS}\n#define REGISTERS {_REGISTERS}\n"
    source = Source.from_text("carrier.cu", defined + _CARRIER)
    cubin = Cubin(compile_source(source, ["carrier"], arch).cubin)
    function = cubin.function("carrier")
    code = decode_function(function, cubin.sm)
    places = [i for i, one in enumerate(code) if one.opcode == "FFMA"]
    used = _used_by_the_loop(code, places)
    if len(places) != STEPS or used >= _FIRST_FREE or function.registers < _LEAST_DECLARED:
        raise EmulationError(
            f"the carrier has {len(places)} multiply-adds and {function.registers} registers, of which its "
            f"loop uses R{used}; it needs {STEPS}, at least {_LEAST_DECLARED}, and a loop that stays below "
            f"R{_FIRST_FREE}"
        )
    words = [_unhurried(one).word for one in code[places[0] : places[-1] + 1]]
    for place, one in zip(places, sequence, strict=True):
        # What the compiler lets a multiply-add wait for, it lets what follows wait for too.
        mask = one.control.wait_mask | code[place].control.wait_mask
        words[place - places[0]] = replace(one.control, wait_mask=mask).into_word(one.word)
    return with_words(cubin, "carrier", places[0], words, function.registers)


def _used_by_the_loop(code: Sequence[Instruction], places: Sequence[int]) -> int:
    """The largest register that the carrier's loop uses beside its multiply-adds or keeps alive."""
    first, behind = places[0], places[-1] + 1
    others = [one for one in code[first:behind] if one.opcode != "FFMA"]
    cells = [cell for one in others for cell in one.reads + one.writes]
    cells += [cell for live in live_before(code, first, behind) for cell in live]
    return max(index for kind, index in cells if kind == "R")


def _unhurried(one: Instruction) -> Instruction:
    """An instruction of the carrier's own that lets its result be ready before the next one issues.

    The compiler may have counted on the stalls of multiply-adds that are gone.
    """
    control = replace(one.control, stall=max(one.control.stall, _LATENCY))
    return decode(control.into_word(one.word), one.address, 90)


def faults_of(cubin: Cubin, rounds: int = 2) -> tuple[str, ...]:
    """What the interpreter has against a kernel of `kernel_of`, run for a warp or two."""
    code = decode_function(cubin.function("carrier"), cubin.sm)
    still = cubin
    for i, one in enumerate(code):
        if (
            one.opcode == "CS2R" and one.word >> _SPECIAL_SHIFT & 0xFF == _CLOCK
        ):  # the interpreter has no clock
            word = one.word | _NO_CLOCK << _SPECIAL_SHIFT
            still = with_words(still, "carrier", i, [word], cubin.function("carrier").registers)
    memory, threads = Memory(), 2 * 32
    cycles = memory.put(np.ones(2 * threads, np.int64), name="cycles")
    out = memory.empty((threads,), np.float32, name="out")
    try:
        (result,) = run_blocks(
            still,
            "carrier",
            grid=(1, 1, 1),
            block=(threads, 1, 1),
            args=[cycles, out, rounds],
            memory=memory,
        )
    except EmulationError as error:
        return (str(error),)
    faults = [str(hazard) for hazard in result.hazards]
    if memory.get(cycles).any():
        faults.append("the cycles were not written")
    return tuple(faults)


def examine(spec: DeviceSpec, device: Device | None = None) -> list[SequenceFindings]:
    """Assemble and verify every sequence; on a GPU, time those that are in order.

    A sequence that the GPU stops at is a finding, and ends the timing: the process has lost the GPU with it.

    Raises ``EmulationError`` for an architecture whose machine code is not known.
    """
    major, minor = spec.compute_capability
    if not KNOWN_SM[0] <= 10 * major + minor <= KNOWN_SM[1]:
        raise EmulationError(
            f"machine code of {spec.arch} is not known here, only of sm_{KNOWN_SM[0]} to sm_{KNOWN_SM[1]}"
        )
    findings = []
    lost_in = ""
    for sequence in SEQUENCES:
        cubin = kernel_of(sequence.make(), f"sm_{major}{minor}")
        faults = faults_of(cubin)
        measured = None
        if device is not None and lost_in:
            faults += (f"not timed: this process lost the GPU in '{lost_in}'",)
        elif device is not None and not faults:
            try:
                measured = timed(cubin, device, spec)
            except DeviceError as error:
                faults, lost_in = (f"the GPU stopped at it: {error}",), sequence.name
        findings.append(
            SequenceFindings(
                sequence.name,
                sequence.rule,
                sequence.h200,
                sequence.expected,
                sequence.loose,
                measured,
                faults,
            )
        )
    return findings


def timed(cubin: Cubin, device: Device, spec: DeviceSpec) -> float:
    """Cycles of an SM's clock for an instruction of each warp, on a GPU; the median of several launches."""
    stream = Stream(device)
    cycles = DeviceArray.empty(device, (spec.sms, THREADS, 2), np.int64)
    out = DeviceArray.empty(device, (spec.sms, THREADS))
    function = Module(device, cubin.image).function("carrier")
    launch = function.prepare((spec.sms, 1, 1), (THREADS, 1, 1), [cycles, out, ROUNDS], stream)
    readings = []
    for _ in range(1 + LAUNCHES):  # the first one fetches the code
        launch()
        stream.synchronize()
        clocks = cycles.to_numpy()
        taken = clocks[:, :, 1].max(axis=1) - clocks[:, :, 0].min(axis=1)
        readings.append(float(np.median(taken)) / (ROUNDS * STEPS * WARPS_A_SCHEDULER))
    return statistics.median(readings[1:])


def conclusion(findings: Sequence[SequenceFindings], spec: DeviceSpec) -> list[str]:
    """What the findings mean, in words."""
    faulty = [one for one in findings if one.faults]
    if faulty:
        return [f"FAULT: {one.name}: {one.faults[0]}" for one in faulty]
    judged = [one for one in findings if one.holds is not None]
    if not judged:
        return [
            f"All {len(findings)} kernels are in order; nothing was timed. On a GPU each would run on every "
            f"SM, {WARPS_A_SCHEDULER} warps a scheduler, and its cycles be compared with the rules."
        ]
    off = [one for one in judged if not one.holds]
    if not off:
        return [
            f"All {len(judged)} sequences take what the rules say, within {CLOSE} cycles an instruction: the "
            f"register file of {spec.name} is as the register-file pass takes it to be."
        ]
    names = "; ".join(one.name for one in off)
    return [
        f"{len(off)} of {len(judged)} sequences are off the rules by more than {CLOSE} cycles an instruction "
        f"({names}): the register file of {spec.name} is not, or not in all, as the register-file pass takes "
        "it to be."
    ]
