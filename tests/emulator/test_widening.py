"""The widening rule against the SASS that ptxas made of the same source: probes, and every rung."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.compiler import Program, Source, compile_source
from tilewave.emulator import Memory, launch, parse_ptx
from tilewave.emulator.alignment import KnownLowBits, LowBits
from tilewave.emulator.codegen import Options
from tilewave.emulator.layout import Layout
from tilewave.emulator.program import translate
from tilewave.lab.registry import Rung, load_rungs

ACCESS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?!@!PT)(?:@!?U?P\w+\s+)?((?:LDS|STS)[.\w]*)")


def shared_accesses(program: Program, symbol: str, directory: Path) -> Counter[str]:
    """Shared loads and stores in a kernel's SASS, by width: `LDS`, `LDS.64`, `STS.128`, ..."""
    try:
        wheel = metadata.distribution("nvidia-cuda-nvdisasm")
    except metadata.PackageNotFoundError:
        pytest.skip("the nvdisasm wheel is not installed")
    tool = next(wheel.locate_file(item) for item in wheel.files or () if item.name.startswith("nvdisasm"))
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(program.cubin)
    listing = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    _, marker, rest = listing.partition(f".text.{symbol}:")
    assert marker
    body = re.split(r"\n\s*\.section", rest)[0]
    return Counter(name.replace(".U", "") for name in ACCESS.findall(body))


def counted(program: Program, symbol: str) -> Counter[str]:
    """The same according to the widening rule."""
    accesses = translate(parse_ptx(program.ptx), symbol, Options()).accesses
    names = [
        ("STS" if access.store else "LDS") + {4: "", 8: ".64", 16: ".128"}[access.counted_width]
        for access in accesses
        if access.space == "shared" and access.counted_width
    ]
    return Counter(names)


KERNEL = """
extern "C" __global__ void NAME(const float* __restrict__ g, float* __restrict__ o, int n) {
  DECLARATION
  int t = threadIdx.x;
  #pragma unroll 1
  for (int i = t; i < 4096; i += 256) s[i] = g[i];
  __syncthreads();
  BODY
}
"""


def reads(*words: int, step: int = 4) -> str:
    return "float a = 0;" + "".join(f"a = a * 3 + s[{step} * t + {word}];" for word in words) + "o[t] = a;"


def writes(*words: int) -> str:
    stores = "".join(f"s[4 * t + {word}] = a + {word};" for word in words)
    return f"float a = g[t]; {stores} __syncthreads(); o[t] = s[n];"


PROBES = {
    "four words": reads(0, 1, 2, 3),
    "four words backwards": reads(3, 2, 1, 0),
    "four words on 8 bytes": reads(0, 1, 2, 3, step=2),
    "four words on 4 bytes": reads(0, 1, 2, 3, step=1),
    "three words": reads(0, 1, 2),
    "the last three": reads(1, 2, 3),
    "three with a gap": reads(0, 1, 3),
    "two with a gap": reads(0, 2),
    "the middle two": reads(1, 2),
    "the upper two": reads(2, 3),
    "across a window": reads(1, 2, 3, 4),
    "two halves of two windows": reads(2, 3, 4, 5),
    "six words": reads(0, 1, 2, 3, 4, 5),
    "pairs": "float2 a = *(float2*)&s[4 * t], b = *(float2*)&s[4 * t + 2]; o[t] = a.x + a.y * b.x - b.y;",
    "pair and word": "float2 a = *(float2*)&s[4 * t]; o[t] = a.x + a.y * s[4 * t + 2];",
    "a uniform address": "o[t] = s[4 * n] + s[4 * n + 1] * s[4 * n + 2] - s[4 * n + 3];",
    "an unknown address": "o[t] = s[n] + s[n + 1];",
    "a masked address": """const float* q = (float*)((char*)s + ((t * 4 + n) & ~15));
        o[t] = q[0] + q[1] * q[2] - q[3];""",
    "an address with unknown bits": """const float* q = (float*)((char*)s + ((t * 16) ^ n));
        o[t] = q[0] + q[1] * q[2];""",
    "a store between": """float a = s[4 * t]; a += s[4 * t + 1]; s[n] = a;
        a += s[4 * t + 2]; a += s[4 * t + 3]; o[t] = a;""",
    "a global store between": """float a = s[4 * t]; a += s[4 * t + 1]; o[n] = a;
        a += s[4 * t + 2]; a += s[4 * t + 3]; o[t] = a;""",
    "a barrier between": "float a = s[4 * t]; __syncthreads(); a += s[4 * t + 1]; o[t] = a;",
    "a copy between": """float a = s[4 * t];
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(t * 4 + 4096), "l"(g + t) : "memory");
        a += s[4 * t + 1]; o[t] = a;""",
    "a wait between": """float a = s[4 * t]; asm volatile("cp.async.wait_group 0;" ::: "memory");
        a += s[4 * t + 1]; o[t] = a;""",
    "volatile": "volatile float* q = s; o[t] = q[4 * t] + q[4 * t + 1] + q[4 * t + 2] + q[4 * t + 3];",
    "store four": writes(0, 1, 2, 3),
    "store four backwards": writes(3, 2, 1, 0),
    "store three": writes(0, 1, 2),
    "store the last three": writes(1, 2, 3),
    "store the middle two": writes(1, 2),
    "store the upper two": writes(2, 3),
    "store with a store between": """float a = g[t]; s[4 * t] = a; s[n] = a; s[4 * t + 1] = a + 1;
        __syncthreads(); o[t] = s[t];""",
    "store with a load between": """float a = g[t]; s[4 * t] = a; float z = s[n]; s[4 * t + 1] = a + 1;
        __syncthreads(); o[t] = s[t] + z;""",
    "stores to two places in turn": """float a = g[t]; s[4 * t] = a; s[2048 + 4 * t] = a;
        s[4 * t + 1] = a + 1; s[2048 + 4 * t + 1] = a + 1; __syncthreads(); o[t] = s[n];""",
    "rows and columns": """const float* p = s + t / 16 * 32; float a = 0;
        for (int k = 0; k < 8; k++) a += p[k] * s[1024 + k * 64 + t % 16]; o[t] = a;""",
}

DECLARATIONS = {
    "an array that is not first": "__shared__ float pad[3], s[4096]; pad[n] = n; o[n] = pad[0];",
    "a dynamic array": "extern __shared__ float s[];",
    "a dynamic array on 16 bytes": "extern __shared__ __align__(16) float s[];",
}
CASES = {name: ("__shared__ float s[4096];", body) for name, body in PROBES.items()}
CASES |= {name: (declaration, reads(0, 1, 2, 3)) for name, declaration in DECLARATIONS.items()}


@cache
def probes(arch: str) -> Program:
    """All probes in one program."""
    text = ""
    for number, (declaration, body) in enumerate(CASES.values()):
        kernel = KERNEL.replace("NAME", f"k{number}").replace("DECLARATION", declaration)
        text += kernel.replace("BODY", body)
    entries = tuple(f"k{number}" for number in range(len(CASES)))
    return compile_source(Source.from_text("probes.cu", text), entries, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", CASES)
def test_the_rule_case_by_case(case: str, arch: str, tmp_path: Path) -> None:
    symbol = f"k{list(CASES).index(case)}"
    program = probes(arch)
    assert counted(program, symbol) == shared_accesses(program, symbol, tmp_path)


@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(arch, marks=pytest.mark.long) for arch in ("sm_80", "sm_121"))]
)
@pytest.mark.parametrize("rung", [r for r in load_rungs() if r.number >= 3], ids=lambda r: r.name)
def test_every_rung_reads_as_its_sass_does(rung: Rung, arch: str, tmp_path: Path) -> None:
    program = compile_source(rung.source(), rung.entries, arch)
    for built in program.kernels.values():
        assert counted(program, built.symbol) == shared_accesses(program, built.symbol, tmp_path)


def test_counts_as_written_stand_beside_the_wide_ones() -> None:
    body = """
    .shared .align 16 .b8 s[1024];
    mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 4; mov.u32 %r2, s; add.u32 %r1, %r1, %r2;
    st.shared.f32 [%r1], 0f00000000; st.shared.f32 [%r1+4], 0f00000000;
    ld.shared.f32 %r3, [%r1]; ld.shared.f32 %r4, [%r1+4]; ld.shared.f32 %r5, [%r1+12];
    """
    for options in ({}, {"detect_races": True}):
        counters = run(kernel(body), [], Memory(), block=64, **options).counters
        assert (counters.shared_loads, counters.shared_loads_as_written) == (2, 6)
        assert (counters.shared_stores, counters.shared_stores_as_written) == (2, 4)
        assert counters.shared_loads_by_width == {16: 2}
        assert counters.shared_stores_by_width == {8: 2}
        # 32 lanes times 16 bytes are 4 passes; the 8-byte stores, 16 bytes apart, use half the banks.
        assert (counters.shared_load_passes, counters.shared_load_conflicts) == (8, 0)
        assert (counters.shared_store_passes, counters.shared_store_conflicts) == (8, 4)


def test_low_bits_are_sound(rng: np.random.Generator) -> None:
    """Whatever random code computes, the bits said to be known are those."""
    for _ in range(30):
        lines, registers = [], ["%r1", "%r2"]
        start = "mov.u32 %r1, %tid.x; mul.lo.u32 %r2, %r1, 40;"
        for n in range(3, 16):
            a, b = rng.choice(registers), rng.choice([*registers, str(int(rng.integers(0, 200)))])
            operation = rng.choice(
                ["add.u32", "sub.u32", "mul.lo.u32", "and.b32", "or.b32", "xor.b32", "shl.b32", "shr.u32"]
            )
            if operation.startswith("sh"):
                b = str(int(rng.integers(0, 9)))
            lines.append(f"{operation} %r{n}, {a}, {b};")
            registers.append(f"%r{n}")
        stores = "".join(f"st.global.u32 [%d0+{4 * n}], %r{n};" for n in range(16))
        address = "ld.param.u64 %d0, [q0]; mul.wide.u32 %d1, %r1, 64; add.s64 %d0, %d0, %d1; mov.u32 %r0, 0;"
        module = parse_ptx(kernel(start + "".join(lines) + address + stores, ".param .u64 q0"))
        entry = module.entries["k"]
        known = KnownLowBits(entry.instructions, Layout(entry))
        memory = Memory()
        out = memory.empty((32, 16), np.uint32)
        launch(module, "k", (1,), (32,), [out], memory)
        values = memory.get(out)
        for n in range(16):
            bits = known.of(entry.registers[f"%r{n}"])
            assert (values[:, n] & np.uint32((1 << min(bits.known, 32)) - 1) == bits.value & 0xFFFFFFFF).all()


def test_low_bits_through_a_loop() -> None:
    text = kernel(
        "mov.u32 %r1, 28;\n$again:\n add.u32 %r2, %r1, 4; add.u32 %r1, %r1, 16;"
        "setp.lt.u32 %p0, %r1, 99; @%p0 bra $again;"
    )
    entry = parse_ptx(text).entries["k"]
    known = KnownLowBits(entry.instructions, Layout(entry))
    assert known.of(entry.registers["%r1"]) == LowBits(4, 12)
    assert known.of(entry.registers["%r2"]) == LowBits(4, 0)
