"""wgmma: every layout of its operands in shared memory and registers, and registers touched too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.emulator import Memory
from tilewave.emulator.hopper.matrix import accumulator_matrix, accumulator_rows
from tilewave.errors import EmulationError, RaceError, TilewaveError, UnknownInstructionError
from tilewave.precision.tensor_core import (
    HOPPER_BF16,
    HOPPER_F16,
    HOPPER_TF32,
    TensorCore,
    multiply_accumulate,
)

Generator = np.random.Generator
Array = np.ndarray[Any, Any]
SHARED = 65536
MODE = {0: 0, 128: 1, 64: 2, 32: 3}
CORES = {"f16": HOPPER_F16, "bf16": HOPPER_BF16, "tf32": HOPPER_TF32}
DEPTH = {"f16": 16, "bf16": 16, "tf32": 8}
DECLARATIONS = f".shared .align 1024 .b8 data[{SHARED}];"
PARAMETERS = (
    ".param .u64 q0, .param .u64 q1, .param .u64 q2, .param .u64 da, .param .u64 db, .param .u32 adds"
)


def draw(rng: Generator, *shape: int) -> Array:
    """Numbers whose products lose bits when they are summed."""
    values: Array = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    return values


class Operand:
    """A matrix of `extent` rows and the depth of a product, laid out at random for a descriptor."""

    def __init__(self, rng: Generator, kind: str, extent: int, swizzle: int, transposed: bool) -> None:
        self.kind, self.extent, self.swizzle, self.transposed = kind, extent, swizzle, transposed
        self.size = 4 if kind == "tf32" else 2
        depth = DEPTH[kind]
        numbers = draw(rng, extent, depth)
        if kind == "f16":
            self.bits = numbers.astype(np.float16).view(np.uint16)
            self.values = self.bits.view(np.float16).astype(np.float64)
        elif kind == "bf16":
            self.bits = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            self.values = (self.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        else:
            # Its low 13 bits are not looked at.
            self.bits = numbers.astype(np.float32).view(np.uint32)
            self.values = (self.bits & 0xFFFFE000).view(np.float32).astype(np.float64)
        width = swizzle or 16
        atom = 8 * width  # eight rows (or eight k) of one pattern
        eights = extent // 8
        room = 16 * int(rng.integers(0, 3)) if not swizzle else 0
        if not transposed:
            # Eights of rows `stride` apart; without swizzle the two halves of k are `leading` apart.
            self.stride = (atom if swizzle else 2 * atom + 32) + room
            if swizzle:
                self.stride = -(-self.stride // atom) * atom
            self.leading = atom + 16 if not swizzle else int(rng.integers(0, 100)) * 16
            reach = self.stride * eights + 2 * atom + 64
        elif swizzle:
            # Patterns of width / 2 rows `leading` apart, eights of k `stride` apart.
            patterns = -(-extent // (width // 2))
            self.stride = atom
            self.leading = 2 * atom
            reach = self.leading * patterns
        else:
            self.stride = atom + room
            self.leading = self.stride * eights + 16
            reach = 2 * self.leading
        self.reach = -(-reach // 1024) * 1024

    def place(self, shared: Array, start: int) -> int:
        """Write the matrix into shared memory element by element; returns its descriptor."""
        width = self.swizzle or 16
        for row in range(self.extent):
            for k in range(self.bits.shape[1]):
                if not self.transposed:
                    byte = row // 8 * self.stride + row % 8 * width + k * self.size
                    if not self.swizzle:
                        byte = row // 8 * self.stride + row % 8 * 16
                        byte += k // (16 // self.size) * self.leading + k * self.size % 16
                elif self.swizzle:
                    each = width // 2
                    byte = row // each * self.leading + row % each * 2 + k // 8 * self.stride + k % 8 * width
                else:
                    byte = row // 8 * self.stride + row % 8 * 2 + k // 8 * self.leading + k % 8 * 16
                byte += start
                if self.swizzle:
                    # The 16-byte piece of a line of 128 bytes is exchanged by the line's number.
                    byte ^= (byte // 128 % (self.swizzle // 16)) * 16
                shared[byte : byte + self.size] = np.frombuffer(
                    int(self.bits[row, k]).to_bytes(self.size, "little"), np.uint8
                )
        return start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | MODE[self.swizzle] << 62


def product_text(kind: str, columns: int, a: str, immediates: str, scale: str = "%p5") -> str:
    """One product; accumulators are %f0 and up, B's descriptor is %db."""
    registers = ", ".join(f"%f{n}" for n in range(columns // 2))
    shape = f"m64n{columns}k{DEPTH[kind]}.f32.{kind}.{kind}"
    return f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, {a}, %db, {scale}, {immediates};"


def start(columns: int) -> str:
    """Shared memory from %d0, accumulators from %d1, a register fragment of A from %d2; descriptors as given,
    but from `data` on, which does not begin at address 0."""
    loads = "".join(f"ld.global.f32 %f{n}, [%d1+{512 * n}];\n" for n in range(columns // 2))
    fragment = "".join(f"ld.global.b32 %a{n}, [%d2+{512 * n}];\n" for n in range(4))
    return f"""
    .reg .f32 %f<{columns // 2}>; .reg .b32 %a<4>; .reg .b64 %da; .reg .b64 %db;
    mov.u32 %r0, %tid.x; mov.u32 %r1, data; shl.b32 %r2, %r0, 2; cvt.u64.u32 %d3, %r2;
    ld.param.u64 %d0, [q0]; ld.param.u64 %d1, [q1]; ld.param.u64 %d2, [q2];
    add.s64 %d0, %d0, %d3; add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
    ld.param.u64 %da, [da]; ld.param.u64 %db, [db]; ld.param.u32 %r5, [adds]; setp.ne.u32 %p5, %r5, 0;
    and.b32 %r3, %r1, 0x3ffff; shr.u32 %r3, %r3, 4; cvt.u64.u32 %d4, %r3;
    add.s64 %da, %da, %d4; add.s64 %db, %db, %d4;
    add.u32 %r3, %r1, %r2; mov.u32 %r4, 0;
C:  ld.global.u32 %r6, [%d0]; st.shared.u32 [%r3], %r6; add.s64 %d0, %d0, 512; add.u32 %r3, %r3, 512;
    add.u32 %r4, %r4, 512; setp.lt.u32 %p2, %r4, {SHARED}; @%p2 bra C;
    {loads} {fragment}
    fence.proxy.async; bar.sync 0;
    """


def finish(columns: int) -> str:
    """Accumulators back to global memory."""
    return "".join(f"st.global.f32 [%d1+{512 * n}], %f{n};\n" for n in range(columns // 2))


FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)


def launch(body: str, columns: int, args: tuple[Array, Array, Array, int, int, int], **options: Any) -> Array:
    """Run one warpgroup; returns its accumulators as (registers, 128)."""
    shared, accumulators, fragment, da, db, adds = args
    memory = Memory()
    out = memory.put(accumulators)
    first = [memory.put(shared), out, memory.put(fragment)]
    text = kernel(start(columns) + body + finish(columns), PARAMETERS, DECLARATIONS)
    run(text, [*first, da, db, adds], memory, block=128, **options)
    return memory.get(out)


def case(rng: Generator, kind: str, columns: int, layouts: tuple[tuple[int, bool], tuple[int, bool]]) -> Any:
    """Operands, memory and accumulators of a random product."""
    a = Operand(rng, kind, 64, *layouts[0])
    b = Operand(rng, kind, columns, *layouts[1])
    shared = rng.integers(0, 256, SHARED, dtype=np.uint8)
    da = a.place(shared, 0)
    db = b.place(shared, a.reach)
    c = draw(rng, 64, columns).astype(np.float32)
    return a, b, shared, da, db, c


def expected(a: Array, b: Array, c: Array | None, core: TensorCore) -> Array:
    """The tensor core's own sum."""
    return multiply_accumulate(a, b.T, c, core)


LAYOUTS = [(swizzle, transposed) for swizzle in (0, 32, 64, 128) for transposed in (False, True)]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("layout_b", LAYOUTS)
def test_all_layouts_in_shared_memory(
    layout_a: tuple[int, bool], layout_b: tuple[int, bool], rng: Generator
) -> None:
    kind = str(rng.choice(["f16", "bf16"]))
    columns = 8 * int(rng.integers(1, 9))
    a, b, shared, da, db, c = case(rng, kind, columns, (layout_a, layout_b))
    scales = [int(x) for x in rng.choice([-1, 1], 2)]
    adds = int(rng.integers(0, 2))
    text = product_text(
        kind, columns, "%da", f"{scales[0]}, {scales[1]}, {int(layout_a[1])}, {int(layout_b[1])}"
    )
    args = (shared, accumulator_rows(c), np.zeros((4, 128), np.uint32), da, db, adds)
    found = launch(FENCE + text + COMMIT + WAIT, columns, args, detect_races=True, order=1)
    wanted = expected(scales[0] * a.values, scales[1] * b.values, c if adds else None, CORES[kind])
    assert np.array_equal(accumulator_matrix(found), wanted)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32"])
@pytest.mark.parametrize("columns", [8, 64, 128, 256])
def test_a_from_registers(kind: str, columns: int, rng: Generator) -> None:
    swizzle = int(rng.choice([0, 32, 64, 128]))
    a, b, shared, _, db, c = case(rng, kind, columns, ((0, False), (swizzle, False)))
    fragment = np.zeros((4, 128), np.uint32)
    for thread in range(128):
        warp, row, quad = thread // 32, thread % 32 // 4, thread % 4
        for register in range(4):
            at = 16 * warp + row + 8 * (register % 2)
            if kind == "tf32":
                fragment[register, thread] = a.bits[at, quad + 4 * (register // 2)]
            else:
                low, high = a.bits[at, 2 * quad + 8 * (register // 2) :][:2].tolist()
                fragment[register, thread] = low | high << 16
    immediates = "1, 1" if kind == "tf32" else "1, 1, 0"
    text = product_text(kind, columns, "{%a0, %a1, %a2, %a3}", immediates)
    args = (shared, accumulator_rows(c), fragment, 0, db, 1)
    found = launch(FENCE + text + COMMIT + WAIT, columns, args)
    assert np.array_equal(accumulator_matrix(found), expected(a.values, b.values, c, CORES[kind]))


def test_accumulators_lie_as_the_manual_says(rng: Generator) -> None:
    matrix = rng.standard_normal((64, 24))
    rows = accumulator_rows(matrix)
    for thread in range(128):
        for i in range(12):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            assert rows[i, thread] == matrix[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2]
    assert np.array_equal(accumulator_matrix(rows), matrix)


@pytest.mark.parametrize("order", [None, 1, 2, 3])
def test_a_chain_of_products_in_several_groups(order: int | None, rng: Generator) -> None:
    columns, swizzle = 16, 128
    a, b, shared, da, db, c = case(rng, "f16", columns, ((swizzle, False), (swizzle, False)))
    one = product_text("f16", columns, "%da", "1, 1, 0, 0")
    other = product_text("f16", columns, "%da", "1, -1, 0, 0")
    body = (
        FENCE + one + one + COMMIT + other + COMMIT + "wgmma.wait_group.sync.aligned 1;" + one + COMMIT + WAIT
    )
    args = (shared, accumulator_rows(c), np.zeros((4, 128), np.uint32), da, db, 1)
    found = launch(body, columns, args, order=order, detect_races=True)
    wanted = c
    for sign in (1, 1, -1, 1):
        wanted = expected(a.values, sign * b.values, wanted, HOPPER_F16)
    assert np.array_equal(accumulator_matrix(found), wanted)


ONE = product_text("f16", 16, "%da", "1, 1, 0, 0")
FROM_REGISTERS = product_text("f16", 16, "{%a0, %a1, %a2, %a3}", "1, 1, 0")
PLANTED: dict[str, tuple[str, str]] = {
    "no wait": (FENCE + ONE + COMMIT, "touches %f0, which the product of PTX line"),
    "no commit": (FENCE + ONE + WAIT, "touches %f0"),
    "a wait for the group before": (
        FENCE + ONE + COMMIT + ONE + COMMIT + "wgmma.wait_group.sync.aligned 1;",
        "touches %f0",
    ),
    "an accumulator written meanwhile": (
        FENCE + ONE + COMMIT + "mov.b32 %f3, 0f00000000;" + WAIT,
        "touches %f3",
    ),
    "a register of A written meanwhile": (
        FENCE + FROM_REGISTERS + COMMIT + "add.u32 %a2, %a2, 1;" + WAIT,
        "touches %a2",
    ),
    "no fence": (ONE + COMMIT + WAIT, "no wgmma.fence lies between .* %f0"),
    "a register touched behind the fence": (
        FENCE + "add.f32 %f5, %f5, %f5;" + ONE + COMMIT + WAIT,
        "no wgmma.fence lies between .* %f5",
    ),
    "A touched behind the fence": (
        FENCE + "add.u32 %a1, %a1, 1;" + FROM_REGISTERS + COMMIT + WAIT,
        "no wgmma.fence lies between .* %a1",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("order", [None, 1])
def test_registers_touched_too_early(name: str, order: int | None, rng: Generator) -> None:
    body, message = PLANTED[name]
    _, _, shared, da, db, c = case(rng, "f16", 16, ((128, False), (128, False)))
    args = (shared, accumulator_rows(c), np.zeros((4, 128), np.uint32), da, db, 1)
    with pytest.raises(RaceError, match=message):
        launch(body, 16, args, order=order)


def test_a_loop_that_waits_one_round_late_is_right(rng: Generator) -> None:
    """Two sets of accumulators in turn: each is waited for after the other's product was issued."""
    a, b, shared, da, db, c = case(rng, "f16", 16, ((64, False), (32, False)))
    second = ONE
    for n in range(8):
        second = second.replace(f"%f{n},", f"%g{n},").replace(f"%f{n}}}", f"%g{n}}}")
    copies = "".join(f"mov.f32 %g{n}, %f{n};" for n in range(8))
    sums = "".join(f"add.f32 %f{n}, %f{n}, %g{n};" for n in range(8))
    body = f"""
    .reg .f32 %g<8>; {copies} {FENCE} {ONE} {COMMIT} mov.u32 %r9, 0;
L:  {FENCE} {second} {COMMIT} wgmma.wait_group.sync.aligned 1; add.u32 %r9, %r9, 1;
    setp.lt.u32 %p1, %r9, 3; @%p1 bra L;
    {WAIT} {sums}
    """
    args = (shared, accumulator_rows(c), np.zeros((4, 128), np.uint32), da, db, 1)
    found = launch(body, 16, args, detect_races=True)
    first = expected(a.values, b.values, c, HOPPER_F16)
    other = c
    for _ in range(3):
        other = expected(a.values, b.values, other, HOPPER_F16)
    assert np.array_equal(accumulator_matrix(found), first + other)


def test_operands_overwritten_before_the_wait_spoil_the_product(rng: Generator) -> None:
    a, b, shared, da, db, c = case(rng, "f16", 16, ((128, False), (128, False)))
    args = (shared, accumulator_rows(c), np.zeros((4, 128), np.uint32), da, db, 1)
    overwrite = "mov.u32 %r9, 0x7e007e00; st.shared.u32 [%r1], %r9;"
    body = FENCE + ONE + COMMIT + overwrite + WAIT
    assert np.isnan(accumulator_matrix(launch(body, 16, args))).any()
    with pytest.raises(RaceError, match="a product of the warpgroup of warp 0 has read"):
        launch(body, 16, args, detect_races=True)
    again = launch(FENCE + ONE + COMMIT + WAIT + "bar.sync 0;" + overwrite, 16, args)
    assert np.array_equal(accumulator_matrix(again), expected(a.values, b.values, c, HOPPER_F16))


def test_operands_without_a_proxy_fence(rng: Generator) -> None:
    _, _, shared, da, db, c = case(rng, "f16", 16, ((128, False), (128, False)))
    args = (shared, accumulator_rows(c), np.zeros((4, 128), np.uint32), da, db, 1)
    store = "setp.eq.u32 %p2, %r0, 0; @%p2 st.shared.u32 [%r1+8], %r0;"
    with pytest.raises(RaceError, match=r"has passed no fence.proxy.async"):
        launch(f"bar.sync 0; {store} bar.sync 0; {FENCE} {ONE} {COMMIT} {WAIT}", 16, args, detect_races=True)
    fenced = f"bar.sync 0; {store} fence.proxy.async; bar.sync 0; {FENCE} {ONE} {COMMIT} {WAIT}"
    launch(fenced, 16, args, detect_races=True)
    late = f"bar.sync 0; {store} bar.sync 0; fence.proxy.async; {FENCE} {ONE} {COMMIT} {WAIT}"
    launch(late, 16, args, detect_races=True)


MISTAKES: dict[str, tuple[str, type[TilewaveError], str]] = {
    "a part of a warpgroup": (
        "setp.lt.u32 %p1, %r0, 64; @%p1 bra P; bra Q; P:" + FENCE + "Q:",
        TilewaveError,
        "whole warpgroups|deadlock",
    ),
    "a scale that differs": (
        "setp.lt.u32 %p5, %r0, 64;" + FENCE + ONE,
        EmulationError,
        "scale-d differs between the threads",
    ),
    "a descriptor that differs": (
        "cvt.u64.u32 %d5, %r0; add.s64 %da, %da, %d5;" + FENCE + ONE,
        EmulationError,
        "descriptor differs",
    ),
    "a base offset": (
        "mov.u64 %d5, 0x2000000000000; or.b64 %db, %db, %d5;" + FENCE + ONE,
        EmulationError,
        "base offset, which is not emulated",
    ),
    "outside shared memory": (
        "mov.u64 %d5, 0x3fff; or.b64 %db, %db, %d5;" + FENCE + ONE,
        EmulationError,
        "is not in the 65536 bytes of shared memory from byte 1024 on",
    ),
    "a descriptor that counts from the first variable": (
        "and.b32 %r3, %r1, 0x3ffff; shr.u32 %r3, %r3, 4; cvt.u64.u32 %d4, %r3; sub.s64 %da, %da, %d4;"
        + FENCE
        + ONE,
        EmulationError,
        "from byte 0 on, .* is not in the 65536 bytes",
    ),
    "one accumulator too many": (
        FENCE + ONE.replace("n16", "n8"),
        UnknownInstructionError,
        "expected 4 accumulators",
    ),
    "no such shape": (FENCE + ONE.replace("n16", "n12"), UnknownInstructionError, "does not exist"),
    "integers": (FENCE + ONE.replace("f16.f16", "s8.s8"), UnknownInstructionError, "s8"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, rng: Generator) -> None:
    body, error, message = MISTAKES[name]
    _, _, shared, da, db, c = case(rng, "f16", 16, ((128, False), (128, False)))
    args = (shared, accumulator_rows(c), np.zeros((4, 128), np.uint32), da, db, 1)
    with pytest.raises(error, match=message):
        launch(body + COMMIT + WAIT, 16, args)
