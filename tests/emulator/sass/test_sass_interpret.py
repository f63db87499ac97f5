"""Bits of the SASS interpreter against the PTX emulator: every rung, and kernels for single instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from sass_helpers import both, instruction_program, rung_program, same_bits, same_numbers

from tilewave.compiler import Source, compile_source
from tilewave.device import get_spec
from tilewave.emulator import Buffer, Memory
from tilewave.emulator.sass import Cubin, run_block
from tilewave.errors import BarrierError, MemoryFault, UsageError
from tilewave.lab.emulate import workspace_arguments
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import Rung, load_rungs

Args = Sequence[Buffer | int | float]
RUNGS = load_rungs()
FEW_SMS = replace(get_spec("GB10"), sms=3)
"""A GPU so small that stream-K cuts tiles of small products, too."""
RUNG_NAMES = [rung.name for rung in RUNGS]


def operands(rng: np.random.Generator, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A and B of all kinds of numbers: N(0,1), exact integers, subnormals, and rarely Inf and NaN."""
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    for x in (a, b):
        x[rng.random(x.shape) < 0.1] *= np.float32(2.0**-130)
        x[rng.random(x.shape) < 0.1] = np.float32(rng.integers(-8, 8))
        special = rng.random(x.shape) < 0.001
        special[0, :] = special[:, 0] = False  # So that something finite is left.
        x[special] = rng.choice(np.array([np.inf, -np.inf, np.nan, -0.0], np.float32), int(special.sum()))
    return a, b


def check_rung(rung: Rung, arch: str, rng: np.random.Generator, m: int, n: int, k: int) -> None:
    a, b = operands(rng, m, n, k)

    def args(memory: Memory) -> Args:
        return [
            memory.put(a, "A", read_only=True),
            memory.put(b, "B", read_only=True),
            memory.empty((m, n), name="C"),
            m,
            n,
            k,
            *workspace_arguments(planned, memory),
        ]

    program = rung_program(rung.number, arch)
    planned = launch_of(rung, m, n, k, FEW_SMS)
    sass, ptx, results = both(program, planned.entry, planned.grid, planned.block, args)
    hazards = [hazard for result in results for hazard in result.hazards]
    assert not hazards, str(hazards[0])
    same = same_bits if rung.schedule is None else same_numbers
    assert same(sass[2], ptx[2])
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) @ b.astype(np.float64)
        magnitude = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    bound = k * 2.0**-24 / (1 - k * 2.0**-24) * magnitude + k * 2.0**-150
    finite = np.isfinite(exact)
    assert finite.any()
    assert (np.abs(sass[2][finite] - exact[finite]) <= bound[finite]).all()


@pytest.mark.parametrize("rung", RUNGS, ids=RUNG_NAMES)
def test_one_whole_tile_has_the_bits_of_the_ptx_emulator(rung: Rung, rng: np.random.Generator) -> None:
    check_rung(rung, "sm_90a", rng, rung.tile.bm, rung.tile.bn, 48)


@pytest.mark.parametrize("rung", RUNGS, ids=RUNG_NAMES)
def test_ragged_sizes_have_the_bits_of_the_ptx_emulator(rung: Rung, rng: np.random.Generator) -> None:
    tile = rung.tile
    m, n = tile.bm - int(rng.integers(1, tile.bm)), tile.bn + int(rng.integers(1, 30))
    check_rung(rung, "sm_90a", rng, m, n, int(rng.integers(33, 64)))
    check_rung(rung, "sm_90a", rng, 1, 4 * int(rng.integers(1, 8)), 4 * int(rng.integers(1, 9)))


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90"])
@pytest.mark.parametrize("rung", RUNGS, ids=RUNG_NAMES)
def test_other_architectures_have_the_bits_of_the_ptx_emulator(
    rung: Rung, arch: str, rng: np.random.Generator
) -> None:
    tile = rung.tile
    check_rung(rung, arch, rng, tile.bm, tile.bn, 40)
    check_rung(rung, arch, rng, tile.bm + 1, tile.bn - 3, 37)


def check_kernel(kernel: str, arch: str, block: int, args: object, shared: int = 0, grid: int = 1) -> None:
    program = instruction_program(arch)
    sass, ptx, results = both(
        program,
        kernel,
        (grid, 1, 1),
        (block, 1, 1),
        args,  # type: ignore[arg-type]
        dynamic_shared_bytes=shared,
    )
    hazards = [hazard for result in results for hazard in result.hazards]
    assert not hazards, str(hazards[0])
    for mine, theirs in zip(sass, ptx, strict=True):
        different = np.argwhere(mine.view(np.uint8) != theirs.view(np.uint8))
        assert same_bits(mine, theirs), f"{len(different)} bytes differ, first at {different[0]}"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
class TestSingleInstructions:
    """Each test draws fresh inputs; edge values are mixed in."""

    def test_integers(self, arch: str, rng: np.random.Generator) -> None:
        values = rng.integers(-(2**31), 2**31, (250, 8), dtype=np.int64)
        edges = np.array([0, 1, -1, 2**31 - 1, -(2**31), 7, 1 << 16])
        where = rng.random(values.shape) < 0.3
        values[where] = rng.choice(edges, int(where.sum()))
        small = rng.random(250) < 0.3
        values[small] = values[small] % 50
        inputs = values.astype(np.int32)
        for shift in (0, 1, 7, 31):
            check_kernel(
                "integers",
                arch,
                96,
                lambda m, s=shift: [m.put(inputs), m.empty((250, 24), np.int32), 250, s],
                grid=3,
            )

    def test_quotients(self, arch: str, rng: np.random.Generator) -> None:
        values = rng.integers(-(2**63), 2**63 - 1, (250, 2), dtype=np.int64)
        values >>= rng.integers(0, 62, values.shape)
        for divisor in (1, 3, int(rng.integers(2, 2**31))):
            check_kernel(
                "quotients",
                arch,
                96,
                lambda m, d=divisor: [m.put(values), m.empty((250, 7), np.int64), 250, d],
                grid=3,
            )

    def test_floats(self, arch: str, rng: np.random.Generator) -> None:
        values = rng.standard_normal((200, 2)).astype(np.float32) * np.float32(100)
        edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2**-149, -(2**-127), 3e38], np.float32)
        where = rng.random(values.shape) < 0.3
        values[where] = rng.choice(edges, int(where.sum()))
        alpha = float(np.float32(rng.standard_normal()))
        sass, ptx, results = both(
            instruction_program(arch),
            "floats",
            (4, 1, 1),
            (64, 1, 1),
            lambda m: [m.put(values), m.empty((200, 16)), 200, alpha],
        )
        assert not any(result.hazards for result in results)
        assert same_numbers(sass[1], ptx[1])

    def test_diverging_threads_meet_again(self, arch: str, rng: np.random.Generator) -> None:
        steps = rng.integers(0, 12, 128).astype(np.int32)
        out = rng.standard_normal(300).astype(np.float32)
        check_kernel("diverging", arch, 128, lambda m: [m.put(steps), m.put(out), 100])

    def test_local_memory(self, arch: str, rng: np.random.Generator) -> None:
        data = rng.standard_normal((128, 40)).astype(np.float32)
        index = rng.integers(0, 40, 20).astype(np.int32)
        check_kernel("local_memory", arch, 128, lambda m: [m.put(data), m.put(index), m.empty((128, 40)), 15])

    def test_asynchronous_copies(self, arch: str, rng: np.random.Generator) -> None:
        for n in (1, 2, 5):
            data = rng.standard_normal(n * 1024).astype(np.float32)
            check_kernel(
                "copies",
                arch,
                128,
                lambda m, d=data, n=n: [m.put(d), m.empty(n * 896), n],
                shared=8192,
            )

    def test_votes_and_shuffles(self, arch: str, rng: np.random.Generator) -> None:
        data = rng.standard_normal(128).astype(np.float32)
        for shift in (0, 5, 40):
            check_kernel("lanes", arch, 128, lambda m, s=shift: [m.put(data), m.empty((128, 6)), s])

    def test_narrow_and_wide_accesses(self, arch: str, rng: np.random.Generator) -> None:
        bytes_ = rng.integers(0, 256, 128).astype(np.uint8)
        halves = rng.integers(-(2**15), 2**15, 128).astype(np.int16)
        check_kernel("widths", arch, 128, lambda m: [m.put(bytes_), m.put(halves), m.empty(256)])


def test_an_access_outside_every_buffer_names_instruction_and_thread(rng: np.random.Generator) -> None:
    program = instruction_program("sm_90a")
    memory = Memory()
    args = [memory.put(rng.standard_normal(64).astype(np.float32)), memory.empty((128, 6)), 0]
    with pytest.raises(MemoryFault, match=r"LDG\.E .* at 0x[0-9a-f]{4}, thread 64: global load of 4 bytes"):
        run_block(
            Cubin(program.cubin),
            "lanes",
            grid=(1, 1, 1),
            block=(128, 1, 1),
            block_index=(0, 0, 0),
            args=args,
            memory=memory,
        )


def test_arguments_and_blocks_are_checked() -> None:
    cubin = Cubin(instruction_program("sm_90a").cubin)
    common = {"grid": (1, 1, 1), "block_index": (0, 0, 0), "memory": Memory()}
    with pytest.raises(UsageError, match="takes 3 parameters; given were 1"):
        run_block(cubin, "lanes", block=(32, 1, 1), args=[1], **common)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"block is \(2048, 1, 1\)"):
        run_block(cubin, "lanes", block=(2048, 1, 1), args=[1, 2, 3], **common)  # type: ignore[arg-type]


def test_a_barrier_that_a_warp_waits_for_in_vain_is_an_error(rng: np.random.Generator) -> None:
    """One of two barriers is given another number: half the block waits at each."""
    source = Source.from_text(
        "stuck.cu",
        'extern "C" __global__ void stuck(float *out) {\n'
        '  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");\n'
        '  else asm volatile("bar.sync 2, 64;" ::: "memory");\n'
        "  out[threadIdx.x] = 1;\n}\n",
    )
    program = compile_source(source, ["stuck"], "sm_90a")
    memory = Memory()
    with pytest.raises(BarrierError, match=r"64 threads wait for ever, at @!P0 BAR\.SYNC"):
        run_block(
            Cubin(program.cubin),
            "stuck",
            grid=(1, 1, 1),
            block=(64, 1, 1),
            block_index=(0, 0, 0),
            args=[memory.empty(64)],
            memory=memory,
        )
