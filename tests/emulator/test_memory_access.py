"""Loads and stores of every space and width, asynchronous copies, atomics, and warp-wide instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import DTYPES, evaluate, kernel, run

from tilewave.emulator import Memory, launch, parse_ptx
from tilewave.errors import EmulationError, MemoryFault

ONE, TWO = ".param .u64 q0", ".param .u64 q0, .param .u64 q1"


def pointers(*sizes: int) -> str:
    """Code that puts the address of the thread's element into %d0, %d1, ..."""
    text = "mov.u32 %r0, %tid.x;\n"
    for position, size in enumerate(sizes):
        text += f"ld.param.u64 %d{position}, [q{position}]; mul.wide.u32 %d9, %r0, {size};"
        text += f"add.s64 %d{position}, %d{position}, %d9;\n"
    return text


@pytest.mark.parametrize(
    "space", ["global", "shared", "local", "generic global", "generic shared", "generic local"]
)
@pytest.mark.parametrize(
    ("kind", "count"),
    [("b8", 1), ("b8", 4), ("b16", 2), ("b32", 1), ("b32", 2), ("b32", 4), ("b64", 1), ("b64", 2)],
)
def test_every_width_in_every_space(space: str, kind: str, count: int, rng: np.random.Generator) -> None:
    """Copy through the space: global -> registers -> space -> registers -> global."""
    size = int(kind[1:]) // 8 * count
    threads = 48
    data = rng.integers(0, 256, (threads, size), dtype=np.uint8)
    vector = f".v{count}" if count > 1 else ""
    prefix = {"b8": "h", "b16": "h", "b32": "r", "b64": "d"}[kind]
    registers = ", ".join(f"%{prefix}{i + 4}" for i in range(count))
    registers = f"{{{registers}}}" if count > 1 else registers
    where = space.split()[-1]
    qualifier = "" if space.startswith("generic") else f".{where}"
    if where == "global":
        address = "ld.param.u64 %d2, [q2]; mul.wide.u32 %d9, %r0, 16; add.s64 %d2, %d2, %d9;"
    elif where == "shared":
        address = (
            ".shared .align 16 .b8 s[768]; mov.u64 %d2, s; mul.wide.u32 %d9, %r0, 16; add.s64 %d2, %d2, %d9;"
        )
    else:
        address = ".local .align 16 .b8 s[32]; mov.u64 %d2, s;"
    if qualifier == "" and where != "global":
        address += f"cvta.{where}.u64 %d2, %d2;"
    body = f"""
    {pointers(size, size)} {address}
    ld.global{vector}.{kind} {registers}, [%d0];
    st{qualifier}{vector}.{kind} [%d2], {registers};
    mov.b64 %d4, 0; mov.b64 %d5, 0; mov.b32 %r4, 0; mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0;
    mov.b16 %h4, 0; mov.b16 %h5, 0; mov.b16 %h6, 0; mov.b16 %h7, 0;
    ld{qualifier}{vector}.{kind} {registers}, [%d2];
    st.global{vector}.{kind} [%d1], {registers};
    """
    memory = Memory()
    out = memory.empty((threads, size), np.uint8)
    args = [memory.put(data), out, memory.empty(threads * 4)]
    run(kernel(body, TWO + ", .param .u64 q2"), args, memory, block=threads)
    assert (memory.get(out) == data).all()


@pytest.mark.parametrize("signed", [False, True])
def test_narrow_loads_extend(signed: bool, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 64, dtype=np.uint8)
    memory = Memory()
    out = memory.empty(64, np.int32)
    kind = "s8" if signed else "u8"
    run(
        kernel(pointers(1, 4) + f"ld.global.{kind} %r1, [%d0]; st.global.b32 [%d1], %r1;", TWO),
        [memory.put(data), out],
        memory,
        block=64,
    )
    assert memory.get(out).tolist() == (data.view(np.int8) if signed else data).astype(np.int32).tolist()


def test_guarded_accesses_touch_nothing() -> None:
    memory = Memory()
    data = memory.put(np.arange(16, dtype=np.float32), name="x")
    out = memory.empty(64, np.float32)
    body = (
        pointers(4, 4)
        + """
    setp.lt.u32 %p0, %r0, 16;
    mov.f32 %r1, 0fBF800000;
    @%p0 ld.global.f32 %r1, [%d0];
    st.global.f32 [%d1], %r1;
    """
    )
    run(kernel(body, TWO), [data, out], memory, block=64)
    assert memory.get(out).tolist() == [*range(16), *[-1] * 48]


def test_shared_memory_is_poisoned_and_bounded() -> None:
    memory = Memory()
    out = memory.empty(32, np.float32)
    body = (
        ".shared .align 4 .b8 s[128];"
        + pointers(4)
        + "shl.b32 %r1, %r0, 2; mov.u32 %r2, s; add.u32 %r1, %r1, %r2;"
    )
    run(kernel(body + "ld.shared.f32 %r3, [%r1]; st.global.f32 [%d0], %r3;", ONE), [out], memory)
    assert np.isnan(memory.get(out)).all()
    for instruction, what in (
        ("ld.shared.f32 %r3, [%r1+4];", r"at byte 128 is outside .*thread \(31, 0, 0\)"),
        ("st.shared.f32 [%r1+-4], %r3;", r"at byte -4 is outside .*thread \(0, 0, 0\)"),
        ("@%p0 ld.shared.v2.f32 {%r3, %r4}, [%r1];", r"misaligned .*thread \(1, 0, 0\)"),
        ("@%p0 ld.shared.f32 %r3, [%r1+4];", None),
        ("@!%p0 st.shared.f32 [%r1+4], %r3;", r"outside .*thread \(31, 0, 0\)"),
    ):
        text = kernel(body + "setp.lt.u32 %p0, %r0, 31;" + instruction, ONE)
        for options in ({}, {"detect_races": True}):
            if what is None:
                run(text, [out], memory, **options)
            else:
                with pytest.raises(MemoryFault, match=what):
                    run(text, [out], memory, **options)


def test_blocks_have_their_own_shared_and_local_memory(rng: np.random.Generator) -> None:
    a = rng.integers(0, 1 << 32, 64 * 7, dtype=np.uint32)
    body = """
    { .shared .align 4 .b8 s[256]; .local .align 4 .b8 stack[8];
    mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 2; mov.u32 %r2, s; add.u32 %r1, %r1, %r2;
    st.shared.u32 [%r1], %a; st.local.u32 [stack+4], %a;
    bar.sync 0;
    xor.b32 %r1, %r1, 4;
    ld.shared.u32 %x, [%r1]; ld.local.u32 %y, [stack+4]; ld.local.u32 %z, [stack]; }
    """
    found = evaluate(body, {"x": "u32", "y": "u32", "z": "f32"}, {"a": ("u32", a)}, block=64)
    assert found["x"].tolist() == a.reshape(-1, 2)[:, ::-1].reshape(-1).tolist()
    assert found["y"].tolist() == a.tolist()
    assert np.isnan(found["z"]).all()


def test_dynamic_shared_memory(rng: np.random.Generator) -> None:
    a = rng.random(32).astype(np.float32)
    body = (
        ".shared .align 4 .b8 fixed[20];"
        + pointers(4, 4)
        + """
    ld.global.f32 %r1, [%d0]; shl.b32 %r2, %r0, 2; mov.u32 %r3, dyn; add.u32 %r3, %r3, %r2;
    st.shared.f32 [%r3], %r1; st.shared.f32 [fixed+16], %r1; ld.shared.f32 %r4, [%r3];
    st.global.f32 [%d1], %r4;
    """
    )
    text = kernel(body, TWO).replace(".visible", ".extern .shared .align 16 .b8 dyn[];\n.visible")
    memory = Memory()
    out = memory.empty(32)
    run(text, [memory.put(a), out], memory, dynamic_shared_bytes=128)
    assert memory.get(out).tolist() == a.tolist()
    with pytest.raises(MemoryFault):
        run(text, [memory.put(a), out], memory, dynamic_shared_bytes=124)


def test_module_variables() -> None:
    body = (
        pointers(4)
        + """
    and.b32 %r1, %r0, 3; mul.wide.u32 %d1, %r1, 4; mov.u64 %d2, table; add.s64 %d2, %d2, %d1;
    ld.const.u32 %r2, [%d2]; atom.global.add.u32 %r3, [counter], 1; st.global.u32 [%d0], %r2;
    """
    )
    text = kernel(body, ONE).replace(
        ".visible",
        ".const .align 4 .u32 table[4] = {5, 0x10, 7, -1};\n.global .align 4 .u32 counter;\n.visible",
    )
    memory = Memory()
    out = memory.empty(32, np.int32)
    module = parse_ptx(text)
    for _ in range(2):
        launch(module, "k", (2,), (32,), [out], memory)
    assert memory.get(out).tolist() == [5, 16, 7, -1] * 8
    counter = next(buffer for buffer in memory.buffers if buffer.name == "counter")
    assert memory.get(counter).view(np.uint32).tolist() == [128]


COPY = """
    .shared .align 16 .b8 s[4096];
    mov.u32 %r1, s; mul.lo.u32 %r2, %r0, SIZE; add.u32 %r1, %r1, %r2;
    cp.async.CACHE.shared.global [%r1], [%d0], SIZEGIVEN;
    cp.async.commit_group;
    WAIT
    ld.shared.VEC %ITEMS, [%r1];
    st.global.VEC [%d1], %ITEMS;
"""


def copy_kernel(size: int, wait: str, given: str = "") -> str:
    vector, items = {4: ("f32", "%r4"), 8: ("v2.f32", "{%r4, %r5}"), 16: ("v4.f32", "{%r4, %r5, %r6, %r7}")}[
        size
    ]
    body = (
        pointers(size, size) + "and.b32 %r9, %r0, 15;\n" + COPY.replace("CACHE", "cg" if size == 16 else "ca")
    )
    body = body.replace("GIVEN", given).replace("SIZE", str(size)).replace("WAIT", wait)
    return kernel(body.replace("VEC", vector).replace("%ITEMS", items), TWO)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize(
    "wait", ["cp.async.wait_group 0;", "cp.async.wait_all;", "cp.async.wait_group 1;", ""]
)
def test_copies_arrive_when_waited_for(size: int, wait: str, rng: np.random.Generator) -> None:
    a = rng.random((64, size // 4)).astype(np.float32)
    memory = Memory()
    out = memory.empty(a.shape)
    run(copy_kernel(size, wait), [memory.put(a), out], memory, block=64)
    found = memory.get(out)
    if wait.endswith(("0;", "all;")):
        assert (found == a).all()
    else:
        assert np.isnan(found).all()


def test_copies_fill_up_with_zeros(rng: np.random.Generator) -> None:
    a = rng.random((16, 4)).astype(np.float32)
    memory = Memory()
    out = memory.empty((64, 4))
    # Lanes from 16 on copy nothing, and may point outside; the others copy as many bytes as their index says.
    text = copy_kernel(16, "cp.async.wait_all;", ", %r9").replace(
        "and.b32 %r9, %r0, 15;", "min.u32 %r9, %r0, 16; setp.lt.u32 %p0, %r0, 16; selp.b32 %r9, %r9, 0, %p0;"
    )
    run(text, [memory.put(a), out], memory, block=64)
    expected = np.zeros((64, 16), dtype=np.uint8)
    for lane in range(16):
        expected[lane, :lane] = a[lane].view(np.uint8)[:lane]
    assert (memory.get(out).view(np.uint8).reshape(64, 16) == expected).all()


def test_copies_of_older_groups_arrive_first(rng: np.random.Generator) -> None:
    a = rng.random((4, 32)).astype(np.float32)
    body = (
        ".shared .align 16 .b8 s[512];"
        + pointers(4, 4)
        + "shl.b32 %r1, %r0, 2; mov.u32 %r2, s; add.u32 %r1, %r1, %r2;"
    )
    for stage in range(3):
        body += (
            f"cp.async.ca.shared.global [%r1+{128 * stage}], [%d0+{128 * stage}], 4; cp.async.commit_group;\n"
        )
    body += "cp.async.ca.shared.global [%r1+384], [%d0+384], 4;\n cp.async.wait_group 1;\n"
    for stage in range(4):
        body += f"ld.shared.f32 %r4, [%r1+{128 * stage}]; st.global.f32 [%d1+{128 * stage}], %r4;\n"
    memory = Memory()
    out = memory.empty(a.shape)
    run(kernel(body, TWO), [memory.put(a), out], memory)
    found = memory.get(out)
    assert (found[:2] == a[:2]).all()
    assert np.isnan(found[2:]).all()


ATOMICS: list[tuple[str, str, Any]] = [
    ("add.u32", "u32", lambda old, v: old + v),
    ("add.u64", "u64", lambda old, v: old + v),
    ("min.s32", "s32", min),
    ("max.u32", "u32", max),
    ("and.b32", "b32", lambda old, v: old & v),
    ("or.b32", "b32", lambda old, v: old | v),
    ("xor.b32", "b32", lambda old, v: old ^ v),
    ("exch.b32", "b32", lambda old, v: v),
    ("inc.u32", "u32", lambda old, v: 0 if old >= v else old + 1),
    ("dec.u32", "u32", lambda old, v: v if old == 0 or old > v else old - 1),
    ("add.f32", "f32", lambda old, v: np.float32(old) + np.float32(v)),
]


@pytest.mark.parametrize(("operation", "kind", "reference"), ATOMICS, ids=[a[0] for a in ATOMICS])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_in_lane_order(
    operation: str, kind: str, reference: Any, space: str, rng: np.random.Generator
) -> None:
    dtype = np.dtype(DTYPES[kind])
    size = dtype.itemsize
    values = rng.integers(0, 50, 96).astype(dtype)
    targets = rng.integers(0, 5, 96).astype(np.uint32)
    start = rng.integers(0, 50, 5).astype(dtype)
    register = "%d4" if size == 8 else "%r4"
    old = "%d5" if size == 8 else "%r5"
    body = (
        pointers(size, 4, size)
        + f"""
    .shared .align 8 .b8 s[64];
    ld.global.b{8 * size} {register}, [%d0]; ld.global.u32 %r1, [%d1];
    ld.param.u64 %d3, [q3]; mul.wide.u32 %d9, %r1, {size}; add.s64 %d3, %d3, %d9;
    """
    )
    if space == "shared":
        body += f"""
        mov.u64 %d7, s; add.s64 %d7, %d7, %d9; ld.global.b{8 * size} {old}, [%d3];
        st.shared.b{8 * size} [%d7], {old};
        bar.sync 0;
        atom.shared.{operation} {old}, [%d7], {register};
        bar.sync 0;
        ld.shared.b{8 * size} %{register[1]}6, [%d7]; st.global.b{8 * size} [%d3], %{register[1]}6;
        """
    else:
        body += f"atom.global.{operation} {old}, [%d3], {register};\n"
    body += f"st.global.b{8 * size} [%d2], {old};"
    memory = Memory()
    out, state = memory.empty(96, dtype), memory.put(start)
    text = kernel(body, ", ".join(f".param .u64 q{i}" for i in range(4)))
    run(text, [memory.put(values), memory.put(targets), out, state], memory, block=96)
    expected_old, now = [], start.tolist()
    for target, value in zip(targets.tolist(), values.tolist(), strict=True):
        expected_old.append(now[target])
        now[target] = reference(now[target], value)
    used = np.unique(targets)
    assert memory.get(out).tolist() == expected_old
    assert memory.get(state)[used].tolist() == np.array(now, dtype=dtype)[used].tolist()


def test_compare_and_swap_elects_one_thread() -> None:
    body = (
        pointers(4)
        + """
    ld.param.u64 %d1, [q1]; add.u32 %r1, %r0, 1;
    atom.global.cas.b32 %r2, [%d1], 0, %r1; red.global.add.u32 [%d1+4], 2;
    st.global.u32 [%d0], %r2;
    """
    )
    memory = Memory()
    out, state = memory.empty(64, np.uint32), memory.put(np.zeros(2, dtype=np.uint32))
    run(kernel(body, TWO), [out, state], memory, block=64)
    assert memory.get(out).tolist() == [0] + [1] * 63
    assert memory.get(state).tolist() == [1, 128]


@pytest.mark.parametrize("resident", [1, 2, 7])
def test_tickets_of_resident_blocks(resident: int, rng: np.random.Generator) -> None:
    """The last block to arrive sums what all have written: the pattern of split-K and stream-K."""
    values = rng.integers(0, 1000, 13 * 32, dtype=np.uint32)
    body = """
    .shared .align 4 .b8 ticket[4];
    ld.param.u64 %d0, [q0]; ld.param.u64 %d1, [q1]; ld.param.u64 %d2, [q2]; ld.param.u64 %d3, [q3];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %r0;
    mul.wide.u32 %d4, %r2, 4; add.s64 %d5, %d0, %d4; add.s64 %d6, %d1, %d4;
    ld.global.u32 %r3, [%d5]; st.global.u32 [%d6], %r3;
    membar.gl;
    bar.sync 0;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra $wait;
    atom.global.add.u32 %r4, [%d2], 1;
    st.shared.u32 [ticket], %r4;
$wait:
    bar.sync 0;
    ld.shared.u32 %r4, [ticket];
    mov.u32 %r5, %nctaid.x; sub.u32 %r5, %r5, 1;
    setp.ne.u32 %p1, %r4, %r5;
    @%p1 bra $end;
    mov.u32 %r6, 0; mov.u32 %r7, 0;
    mul.wide.u32 %d4, %r0, 4; add.s64 %d6, %d1, %d4;
$sum:
    ld.global.u32 %r8, [%d6];
    add.u32 %r7, %r7, %r8; add.s64 %d6, %d6, 128; add.u32 %r6, %r6, 1;
    setp.le.u32 %p2, %r6, %r5;
    @%p2 bra $sum;
    add.s64 %d3, %d3, %d4; st.global.u32 [%d3], %r7;
$end:
    """
    memory = Memory()
    out = memory.empty(32, np.uint32)
    args = [
        memory.put(values),
        memory.empty(len(values), np.uint32),
        memory.put(np.zeros(1, dtype=np.uint32)),
        out,
    ]
    text = kernel(body, ", ".join(f".param .u64 q{i}" for i in range(4)))
    run(text, args, memory, grid=13, resident=resident, order=int(rng.integers(1 << 30)))
    assert memory.get(out).tolist() == values.reshape(13, 32).sum(axis=0).tolist()


SHUFFLES = {
    "down": lambda i, b: i + b if i + b <= 31 else i,
    "up": lambda i, b: i - b if i - b >= 0 else i,
    "bfly": lambda i, b: i ^ b,
    "idx": lambda i, b: b,
}


@pytest.mark.parametrize("mode", SHUFFLES)
def test_shuffle(mode: str, rng: np.random.Generator) -> None:
    a = rng.integers(0, 1 << 32, 96, dtype=np.uint32)
    b = int(rng.integers(0, 32))
    clamp = 0 if mode == "up" else 31
    found = evaluate(
        f"shfl.sync.{mode}.b32 %x|%q, %a, {b}, {clamp}, -1;",
        {"x": "u32", "q": "pred"},
        {"a": ("u32", a)},
        block=96,
    )
    for warp in range(3):
        for lane in range(32):
            source = SHUFFLES[mode](lane, b)
            assert found["x"][warp * 32 + lane] == a[warp * 32 + source]
    inside = {"down": lambda i: i + b <= 31, "up": lambda i: i >= b}.get(mode, lambda i: True)
    assert found["q"].tolist() == [int(inside(lane)) for lane in range(32)] * 3


def test_shuffle_reduction_in_a_short_segment(rng: np.random.Generator) -> None:
    a = rng.integers(0, 1000, 64, dtype=np.uint32)
    body = "mov.u32 %x, %a;"
    for step in (4, 2, 1):  # segments of 8 lanes: the mask is 0x18, the limit 0x1f -> 0x181f
        body += f"shfl.sync.down.b32 %r0, %x, {step}, 0x181f, -1; add.u32 %x, %x, %r0;"
    found = evaluate(body, {"x": "u32"}, {"a": ("u32", a)}, block=64)
    assert found["x"][::8].tolist() == a.reshape(-1, 8).sum(axis=1).tolist()


def test_a_shuffle_with_missing_lanes_is_an_error() -> None:
    body = "mov.u32 %r0, %laneid; setp.lt.u32 %p0, %r0, 16; @!%p0 bra $out;"
    body += "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\n$out:"
    with pytest.raises(EmulationError, match="lane 16 is named by the member mask but not here"):
        run(kernel(body), [], Memory())
    run(kernel(body.replace("-1;", "0xffff;")), [], Memory())


def test_votes(rng: np.random.Generator) -> None:
    p = rng.integers(0, 2, 64)
    p[:32] = 1
    found = evaluate(
        "vote.sync.ballot.b32 %b, %p, -1; vote.sync.any.pred %y, %p, -1;"
        "vote.sync.all.pred %z, %p, -1; activemask.b32 %m;",
        {"b": "u32", "y": "pred", "z": "pred", "m": "u32"},
        {"p": ("pred", p)},
        block=64,
    )
    ballots = [sum(int(v) << i for i, v in enumerate(p[w * 32 : w * 32 + 32])) for w in range(2)]
    assert found["b"].tolist() == [ballots[0]] * 32 + [ballots[1]] * 32
    assert found["y"].tolist() == [1] * 32 + [int(p[32:].any())] * 32
    assert found["z"].tolist() == [1] * 32 + [int(p[32:].all())] * 32
    assert (found["m"] == 0xFFFFFFFF).all()


# -- parameters ---------------------------------------------------------------------------------------------


def test_parameters_at_computed_addresses(rng: np.random.Generator) -> None:
    """Each lane picks its own element of a parameter that is a structure, wherever it lies in the block."""
    values = rng.integers(0, 1 << 32, 16, dtype=np.uint32)
    body = """
    mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 15; mul.wide.u32 %d1, %r1, 4;
    mov.b64 %d2, table; add.s64 %d2, %d2, %d1; ld.param.u32 %r2, [%d2];
    ld.param.u64 %d3, [q0]; mul.wide.u32 %d4, %r0, 4; add.s64 %d3, %d3, %d4; st.global.u32 [%d3], %r2;
    """
    parameters = ".param .u64 q0, .param .u32 other, .param .align 8 .b8 table[64]"
    memory = Memory()
    out = memory.empty((32,), np.uint32, name="out")
    run(kernel(body, parameters), [out, 7, values.tobytes()], memory)
    assert np.array_equal(memory.get(out), np.tile(values, 2))
    beyond = body.replace("ld.param.u32 %r2, [%d2]", "ld.param.u32 %r2, [%d2+16]")
    with pytest.raises(MemoryFault, match=r"outside the parameters.*thread \(12"):
        run(kernel(beyond, parameters), [out, 7, values.tobytes()], memory)
    guarded = "setp.lt.u32 %p1, %r1, 12; mov.b32 %r2, 5;" + "@%p1 ld.param.u32 %r2, [%d2+16]"
    run(
        kernel(body.replace("ld.param.u32 %r2, [%d2]", guarded), parameters),
        [out, 7, values.tobytes()],
        memory,
    )
    assert memory.get(out)[:16].tolist() == [*values[4:].tolist(), 5, 5, 5, 5]
