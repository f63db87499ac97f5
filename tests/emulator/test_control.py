"""Divergence, barriers, deadlocks, endless loops: who runs when."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import evaluate, kernel, run

from tilewave.emulator import Memory, launch
from tilewave.errors import BarrierError, EmulationError, MemoryFault, UsageError

COLLATZ = """
    mov.u32 %x, %a;
    mov.u32 %steps, 0;
$loop:
    setp.le.u32 %p0, %x, 1;
    @%p0 bra $out;
    add.u32 %steps, %steps, 1;
    and.b32 %r0, %x, 1;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 bra $even;
    mad.lo.u32 %x, %x, 3, 1;
    bra.uni $loop;
$even:
    shr.u32 %x, %x, 1;
    bra.uni $loop;
$out:
"""


def collatz(n: int) -> int:
    steps = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def test_loops_with_a_trip_count_of_their_own(rng: np.random.Generator) -> None:
    a = rng.integers(1, 300, 500)
    found = evaluate(COLLATZ, {"x": "u32", "steps": "u32"}, {"a": ("u32", a)}, block=96)
    assert found["steps"].tolist() == [collatz(int(n)) for n in a]


def test_threads_that_end_early(rng: np.random.Generator) -> None:
    # `evaluate` rounds the grid up, so threads behind the end leave at once; here a third leave in a loop.
    a = rng.integers(0, 1000, 333)
    memory = Memory()
    text = kernel(
        """
        ld.param.u64 %d0, [q0];
        ld.param.u64 %d1, [q1];
        mov.u32 %r0, %tid.x;
        mul.wide.u32 %d2, %r0, 4;
        add.s64 %d0, %d0, %d2;
        add.s64 %d1, %d1, %d2;
        ld.global.u32 %r1, [%d0];
        mov.u32 %r2, 0;
        mov.u32 %r3, 0;
$loop:
        add.u32 %r3, %r3, %r2;
        rem.u32 %r4, %r1, 3;
        setp.eq.u32 %p0, %r4, 0;
        setp.eq.u32 %p1, %r2, 4;
        and.pred %p0, %p0, %p1;
        @%p0 ret;
        add.u32 %r2, %r2, 1;
        setp.lt.u32 %p2, %r2, 10;
        @%p2 bra $loop;
        st.global.u32 [%d1], %r3;
        """,
        ".param .u64 q0, .param .u64 q1",
    )
    out = memory.put(np.full(len(a), 77, dtype=np.uint32))
    run(text, [memory.put(a.astype(np.uint32)), out], memory, block=333)
    assert memory.get(out).tolist() == [77 if n % 3 == 0 else 45 for n in a]


REVERSE = """
    .shared .align 4 .b8 tile[1024];
    ld.param.u64 %d0, [q0];
    ld.param.u64 %d1, [q1];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mad.lo.u32 %r3, %r1, %r2, %r0;
    mul.wide.u32 %d2, %r3, 4;
    add.s64 %d0, %d0, %d2;
    add.s64 %d1, %d1, %d2;
    ld.global.u32 %r4, [%d0];
    mov.u32 %r5, tile;
    shl.b32 %r6, %r0, 2;
    add.u32 %r7, %r5, %r6;
    st.shared.u32 [%r7], %r4;
    BARRIER
    sub.u32 %r8, %r2, %r0;
    sub.u32 %r8, %r8, 1;
    shl.b32 %r8, %r8, 2;
    add.u32 %r8, %r8, %r5;
    ld.shared.u32 %r9, [%r8];
    st.global.u32 [%d1], %r9;
"""
TWO_POINTERS = ".param .u64 q0, .param .u64 q1"


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync 1;", "barrier.sync.aligned 0, 96;"])
def test_exchange_through_shared_memory(barrier: str, rng: np.random.Generator) -> None:
    a = rng.integers(0, 1 << 32, 96 * 5, dtype=np.uint32)
    memory = Memory()
    out = memory.empty(len(a), np.uint32)
    text = kernel(REVERSE.replace("BARRIER", barrier), TWO_POINTERS)
    result = run(text, [memory.put(a), out], memory, block=96, grid=5)
    assert memory.get(out).tolist() == a.reshape(5, 96)[:, ::-1].reshape(-1).tolist()
    assert result.counters.barriers == 15  # warps


def barrier_kernel(body: str) -> str:
    return kernel("mov.u32 %r0, %tid.x;\n" + body)


def test_a_barrier_in_half_a_warp() -> None:
    text = barrier_kernel("setp.lt.u32 %p0, %r0, 16; @!%p0 bra $skip; bar.sync 0;\n$skip:")
    with pytest.raises(
        BarrierError, match=r"bar.sync 0: 16 of 32 threads .* thread \(16, 0, 0\) of block \(0, 0, 0\)"
    ):
        run(text, [], Memory())


def test_a_barrier_that_whole_warps_leave_out() -> None:
    text = barrier_kernel("setp.lt.u32 %p0, %r0, 32; @!%p0 bra $skip; bar.sync 0;\n$skip:")
    with pytest.raises(BarrierError, match=r"PTX line \d+: bar.sync 0: 64 of 96 threads"):
        run(text, [], Memory(), block=96)
    run(text, [], Memory(), block=96, allow_exited_at_barrier=True)


def test_halves_of_a_warp_at_different_barriers() -> None:
    body = """
    setp.lt.u32 %p0, %r0, 16;
    @%p0 bra $first;
    bar.sync 0;
    bra.uni $end;
$first:
    bar.sync 0;
$end:
    """
    with pytest.raises(BarrierError, match="others of the same warp wait"):
        run(barrier_kernel(body), [], Memory())


def test_warps_may_meet_at_different_instructions_of_one_barrier() -> None:
    body = (
        "setp.lt.u32 %p0, %r0, 32; @%p0 bra $first; bar.sync 0; bra.uni $end;\n$first:\n bar.sync 0;\n$end:"
    )
    run(barrier_kernel(body), [], Memory(), block=64)


def test_deadlock_between_two_barriers() -> None:
    body = (
        "setp.lt.u32 %p0, %r0, 32; @%p0 bra $first; bar.sync 1; bra.uni $end;\n$first:\n bar.sync 2;\n$end:"
    )
    with pytest.raises(
        BarrierError, match=r"deadlock: 32 of 64 threads of block \(0, 0, 0\).*waits at PTX line"
    ):
        run(barrier_kernel(body), [], Memory(), block=64)


def test_an_endless_loop_ends() -> None:
    with pytest.raises(EmulationError, match="still running after 1000 basic blocks"):
        run(kernel("$again:\n bra.uni $again;"), [], Memory(), step_limit=1000)


def test_trap_names_its_thread() -> None:
    text = barrier_kernel("setp.eq.u32 %p0, %r0, 7;\n @%p0 trap;")
    with pytest.raises(EmulationError, match=r"trap: thread \(7, 0, 0\) of block \(0, 0, 0\) trapped"):
        run(text, [], Memory())


def test_indices_in_three_dimensions() -> None:
    body = ""
    names = [f"%{kind}.{axis}" for kind in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"] + [
        "%laneid",
        "%warpid",
    ]
    block, grid = (5, 4, 3), (2, 3, 2)
    threads, blocks = 60, 12
    linear = """
        mov.u32 %r0, %ctaid.z; mov.u32 %r1, %nctaid.y; mad.lo.u32 %r0, %r0, %r1, 0;
        mov.u32 %r1, %ctaid.y; add.u32 %r0, %r0, %r1; mov.u32 %r1, %nctaid.x; mul.lo.u32 %r0, %r0, %r1;
        mov.u32 %r1, %ctaid.x; add.u32 %r0, %r0, %r1; mul.lo.u32 %r0, %r0, 60;
        mov.u32 %r1, %tid.z; mul.lo.u32 %r1, %r1, 20; add.u32 %r0, %r0, %r1;
        mov.u32 %r1, %tid.y; mul.lo.u32 %r1, %r1, 5; add.u32 %r0, %r0, %r1;
        mov.u32 %r1, %tid.x; add.u32 %r0, %r0, %r1;
        ld.param.u64 %d0, [q0]; mul.wide.u32 %d1, %r0, 56; add.s64 %d0, %d0, %d1;
    """
    for position, name in enumerate(names):
        body += f"mov.u32 %r2, {name}; st.global.u32 [%d0+{4 * position}], %r2;\n"
    memory = Memory()
    out = memory.empty((blocks * threads, 14), np.uint32)
    launch(kernel(linear + body, ".param .u64 q0"), "k", grid, block, [out], memory)
    found = memory.get(out)
    for b in range(blocks):
        for t in range(threads):
            tid = (t % 5, t // 5 % 4, t // 20)
            cta = (b % 2, b // 2 % 3, b // 6)
            assert found[b * threads + t].tolist() == [*tid, *block, *cta, *grid, t % 32, t // 32]


def test_bad_launches() -> None:
    text = kernel("", ".param .u64 q0, .param .u32 q1, .param .f32 q2")
    memory = Memory()
    buffer = memory.empty(4)
    for args, message in (
        ([buffer, 1], r"takes 3 arguments \(u64, u32, f32\); 2 were given"),
        ([buffer, buffer, 1.0], "argument 1 is a buffer"),
        ([buffer, 1.5, 1.0], "argument 1 is 1.5"),
        ([buffer, 1 << 40, 1.0], "parameter q1 is a .u32 of 4 bytes"),
        ([buffer, "one", 1.0], "argument 1 is 'one'"),
    ):
        with pytest.raises(UsageError, match=message):
            run(text, args, memory)
    with pytest.raises(UsageError, match="at most 1024"):
        run(text, [buffer, 1, 1.0], memory, block=1025)
    with pytest.raises(UsageError, match="sizes of at least 1"):
        run(text, [buffer, 1, 1.0], memory, grid=0)
    with pytest.raises(UsageError, match="its entries are: k"):
        launch(text, "other", (1,), (1,), [], memory)


def test_a_fault_names_instruction_thread_and_address() -> None:
    memory = Memory()
    buffer = memory.empty(40, name="x")
    body = """
    ld.param.u64 %d0, [q0]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;
    ld.global.f32 %r1, [%d0+32];
    """
    with pytest.raises(
        MemoryFault, match=r"PTX line \d+: ld.global.f32 %r1, \[%d0\+32\]: .*'x'.*thread \(32, 0, 0\)"
    ):
        run(kernel(body, ".param .u64 q0"), [buffer], memory, block=64)
