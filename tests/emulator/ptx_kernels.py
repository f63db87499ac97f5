"""Builds small PTX kernels for the tests: threads load inputs, run some instructions, store results."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator import LaunchResult, Memory, launch

DTYPES = {
    f"{kind}{bits}": f"{'i' if kind == 's' else 'u'}{bits // 8}" for kind in "usb" for bits in (8, 16, 32, 64)
}
DTYPES |= {"f16": "f2", "f32": "f4", "f64": "f8", "pred": "u1"}

HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"
SCRATCH = """
    .reg .pred %p<10>;
    .reg .b16 %h<10>;
    .reg .b32 %r<20>;
    .reg .b64 %d<20>;
"""


def kernel(body: str, parameters: str = "", declarations: str = "") -> str:
    """A module with one kernel `k`."""
    return f"{HEADER}\n.visible .entry k({parameters})\n{{{SCRATCH}{declarations}{body}\n    ret;\n}}\n"


def run(
    text: str, args: list[Any], memory: Memory, block: int = 32, grid: int = 1, **options: Any
) -> LaunchResult:
    """Launch kernel `k` in one dimension."""
    return launch(text, "k", (grid, 1, 1), (block, 1, 1), args, memory, **options)


def evaluate(
    body: str,
    outputs: dict[str, str],
    inputs: dict[str, tuple[str, npt.NDArray[Any]]],
    block: int = 32,
    **options: Any,
) -> dict[str, npt.NDArray[Any]]:
    """Run instructions once per element; registers `%name` hold inputs (name: (type, values)) and results."""
    count = len(next(iter(inputs.values()))[1])
    memory = Memory()
    parameters, declarations, before, after = [], "", "", ""
    args: list[Any] = []
    registers = {name: kind for name, (kind, _) in inputs.items()} | outputs
    for name, kind in registers.items():
        width = {"pred": "pred"}.get(kind, f"b{max(16, int(kind[1:]))}" if kind != "pred" else "pred")
        declarations += f"    .reg .{width} %{name};\n"
    buffers = {}
    size = "mov.u32 %r10, %tid.x; mov.u32 %r11, %ctaid.x; mov.u32 %r12, %ntid.x;"
    size += "mad.lo.s32 %r10, %r11, %r12, %r10;"
    before = f"    {size}\n    setp.ge.u32 %p9, %r10, {count};\n    @%p9 bra $done;\n"
    for position, (name, kind) in enumerate([*((n, k) for n, (k, _) in inputs.items()), *outputs.items()]):
        is_input = name in inputs and position < len(inputs)
        parameters.append(f".param .u64 q{position}")
        bytes_each = np.dtype(DTYPES[kind]).itemsize
        address = (
            f"    ld.param.u64 %d10, [q{position}];\n    mul.wide.u32 %d11, %r10, {bytes_each};\n"
            f"    add.s64 %d10, %d10, %d11;\n"
        )
        memory_type = f"b{8 * bytes_each}"
        if is_input:
            values = np.asarray(inputs[name][1]).astype(DTYPES[kind])
            args.append(memory.put(values, name=name))
            if kind == "pred":
                before += f"{address}    ld.global.u8 %h9, [%d10];\n    setp.ne.u16 %{name}, %h9, 0;\n"
            else:
                before += (
                    f"{address}    ld.global.{kind if bytes_each < 2 else memory_type} %{name}, [%d10];\n"
                )
        else:
            buffers[name] = memory.empty(count, DTYPES[kind], name=name)
            args.append(buffers[name])
            if kind == "pred":
                after += f"{address}    selp.u16 %h9, 1, 0, %{name};\n    st.global.u8 [%d10], %h9;\n"
            else:
                after += f"{address}    st.global.{memory_type} [%d10], %{name};\n"
    text = kernel(f"{before}{body}\n{after}$done:\n", ", ".join(parameters), declarations)
    run(text, args, memory, block=block, grid=-(-count // block), **options)
    return {name: memory.get(buffer) for name, buffer in buffers.items()}
