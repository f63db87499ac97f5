"""mma.sync, ldmatrix and stmatrix, element by element as the manual lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.emulator import Memory
from tilewave.errors import EmulationError, MemoryFault
from tilewave.precision.tensor_core import HOPPER_BF16, HOPPER_F16, HOPPER_TF32, multiply_accumulate

Generator = np.random.Generator
Array = np.ndarray[Any, Any]

START = """
    mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; ld.param.u64 %d0, [q0]; ld.param.u64 %d1, [q1];
    mov.u32 %r2, data;
"""
PARAMETERS = ".param .u64 q0, .param .u64 q1"
DECLARATIONS = ".shared .align 128 .b8 data[4096];"


def draw(rng: Generator, *shape: int) -> Array:
    """Numbers for a product."""
    values: Array = rng.standard_normal(shape)
    return values


def registers(count: int, first: int) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"detect_races": True}])
def test_matrices_are_loaded_and_stored(
    count: int, transposed: bool, options: dict[str, Any], rng: Generator
) -> None:
    """Rows lie at random places; they go to registers, and from there to the other half of shared memory."""
    values = rng.integers(0, 1 << 16, (128, 8), dtype=np.uint16)
    places = rng.permutation(128)[:32]
    trans = ".trans" if transposed else ""
    body = f"""
    {START}
    shl.b32 %r3, %r1, 2; cvt.u64.u32 %d2, %r3; add.s64 %d3, %d0, %d2; ld.global.u32 %r4, [%d3];
    mov.u32 %r5, 0; add.u32 %r6, %r2, %r3; add.s64 %d3, %d3, 128;
F:  ld.global.u32 %r7, [%d3]; st.shared.u32 [%r6], %r7; add.s64 %d3, %d3, 128; add.u32 %r6, %r6, 128;
    add.u32 %r5, %r5, 1; setp.lt.u32 %p0, %r5, 16; @%p0 bra F; bar.warp.sync -1;
    add.u32 %r4, %r4, %r2;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers(count, 10)}, [%r4];
    shl.b32 %r8, %r1, 4; add.u32 %r8, %r8, %r2; add.u32 %r8, %r8, 2048;
    stmatrix.sync.aligned.m8n8.x{count}.shared::cta.b16 [%r8], {registers(count, 10)};
    bar.warp.sync -1; add.s64 %d3, %d1, %d2;
    """
    body += "".join(
        f"ld.shared.u32 %r14, [%r6+{128 * n}]; st.global.u32 [%d3+{128 * n}], %r14;\n" for n in range(count)
    )
    memory = Memory()
    source = memory.put(np.concatenate([(places * 16).astype(np.uint32).view(np.uint16), values.reshape(-1)]))
    out = memory.empty((count, 8, 8), np.uint16)
    run(kernel(body, PARAMETERS, DECLARATIONS), [source, out], memory, **options)
    for number in range(count):
        rows = values[places[8 * number : 8 * number + 8]]
        # Thread t holds elements 2 (t % 4) and the next of row t / 4; stored plainly, they make the matrix.
        assert np.array_equal(memory.get(out)[number], rows.T if transposed else rows)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("m16n8k16", "f16"),
        ("m16n8k8", "f16"),
        ("m16n8k16", "bf16"),
        ("m16n8k8", "bf16"),
        ("m16n8k8", "tf32"),
        ("m16n8k4", "tf32"),
    ],
)
def test_products_of_warps(shape: str, kind: str, rng: Generator) -> None:
    depth, warps = int(shape[6:]), 3
    each = 1 if kind == "tf32" else 2
    numbers_a, numbers_b = (draw(rng, warps, depth, extent).astype(np.float32) for extent in (16, 8))
    core = {"f16": HOPPER_F16, "bf16": HOPPER_BF16, "tf32": HOPPER_TF32}[kind]

    def encode(x: Array) -> tuple[Array, Array]:
        if kind == "f16":
            bits = x.astype(np.float16).view(np.uint16)
            return bits.astype(np.uint32), bits.view(np.float16).astype(np.float64)
        kept = x.view(np.uint32) >> 16 if kind == "bf16" else x.view(np.uint32)
        seen = kept << 16 if kind == "bf16" else kept & np.uint32(0xFFFFE000)
        return kept, seen.view(np.float32).astype(np.float64)

    (bits_a, a), (bits_b, b) = encode(numbers_a), encode(numbers_b)
    of_a, of_b = depth // (2 * each), depth // (4 * each)
    c = draw(rng, warps, 16, 8).astype(np.float32)
    words = np.zeros((of_a + of_b + 4, warps, 32), np.uint32)
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        for register in range(of_a):
            for e in range(each):
                k = quad * each + e + 4 * each * (register // 2)
                words[register, :, lane] |= bits_a[:, k, group + 8 * (register % 2)] << np.uint32(16 * e)
        for register in range(of_b):
            for e in range(each):
                k = quad * each + e + 4 * each * register
                words[of_a + register, :, lane] |= bits_b[:, k, group] << np.uint32(16 * e)
        for register in range(4):
            value = c[:, group + 8 * (register // 2), 2 * quad + register % 2]
            words[of_a + of_b + register, :, lane] = np.ascontiguousarray(value).view(np.uint32)
    total = of_a + of_b + 4
    body = f"{START} shl.b32 %r3, %r0, 2; cvt.u64.u32 %d2, %r3; add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2;"
    body += "".join(f"ld.global.u32 %r{5 + n}, [%d3+{128 * warps * n}];\n" for n in range(total))
    last = registers(4, 5 + of_a + of_b)
    body += (
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {last}, "
        f"{registers(of_a, 5)}, {registers(of_b, 5 + of_a)}, {last};\n"
    )
    body += "".join(f"st.global.u32 [%d4+{128 * warps * n}], %r{5 + of_a + of_b + n};\n" for n in range(4))
    memory = Memory()
    out = memory.empty((4, warps, 32), np.float32)
    run(kernel(body, PARAMETERS, DECLARATIONS), [memory.put(words), out], memory, block=32 * warps)
    found = memory.get(out)
    for warp in range(warps):
        wanted = multiply_accumulate(a[warp].T, b[warp], c[warp], core)
        for lane in range(32):
            for register in range(4):
                row, column = lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2
                assert found[register, warp, lane] == wanted[row, column]


def test_faults() -> None:
    load = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];"
    arguments = [np.zeros(1, np.uint32)] * 2
    for body, error, message in (
        (f"setp.lt.u32 %p0, %r1, 8; @!%p0 bra E; {load} E:", EmulationError, "not all lanes of the warp"),
        (f"add.u32 %r2, %r2, 4096; {load}", MemoryFault, "outside"),
        (f"add.u32 %r2, %r2, 8; {load}", MemoryFault, "misaligned"),
    ):
        memory = Memory()
        buffers = [memory.put(argument) for argument in arguments]
        text = kernel(START + body, PARAMETERS, DECLARATIONS)
        with pytest.raises(error, match=message):
            run(text, buffers, memory)
