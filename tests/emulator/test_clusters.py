"""Named barriers, elections, register counts, and blocks that work together in a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel

from tilewave.emulator import Memory
from tilewave.emulator import launch as emulate
from tilewave.emulator.tensor_maps import encode_for_emulator
from tilewave.errors import BarrierError, EmulationError, MemoryFault, RaceError, TilewaveError, UsageError
from tilewave.tensor_map import TensorMap

DECLARATIONS = ".shared .align 1024 .b8 data[4096]; .shared .align 8 .b8 bars[64];"
START = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, bars; mov.u32 %r2, data; setp.eq.u32 %p0, %r0, 0;
    and.b32 %r3, %r0, 31; shr.u32 %r4, %r0, 5; ld.param.u64 %d0, [q0]; mov.u32 %r5, %ctaid.x;
    mov.u32 %r6, %ntid.x; mad.lo.u32 %r7, %r5, %r6, %r0; mul.wide.u32 %d1, %r7, 4; add.s64 %d1, %d0, %d1;
    shl.b32 %r8, %r0, 2; add.u32 %r8, %r2, %r8;
"""


def launch(body: str, block: int = 128, grid: int = 1, **options: Any) -> np.ndarray[Any, Any]:
    """Run a kernel whose threads each own the word at %d1."""
    memory = Memory()
    out = memory.put(np.full(block * grid, 0xDEAD, np.uint32))
    text = kernel(START + body, ".param .u64 q0, .param .align 64 .b8 map[128]", DECLARATIONS)
    first = options.pop("tensor", None)
    encoded = bytes(128) if first is None else encode_for_emulator(first(memory))
    emulate(text, "k", (grid,), (block,), [out, encoded], memory, **options)
    return memory.get(out)


@pytest.mark.parametrize("options", [{}, {"order": 1}, {"order": 2, "detect_races": True}])
def test_named_barriers_hand_data_between_pairs_of_warps(options: dict[str, Any]) -> None:
    """Warps 0 and 1 write and only arrive; warps 2 and 3 wait for them, each pair at its own barrier."""
    body = """
    setp.ge.u32 %p1, %r4, 2; add.u32 %r9, %r4, 1; @%p1 bra TAKE;
    mul.lo.u32 %r10, %r0, 3; st.shared.u32 [%r8], %r10;
    barrier.cta.arrive.aligned %r9, 64; bra END;
TAKE: sub.u32 %r9, %r9, 2; bar.sync %r9, 64;
    ld.shared.u32 %r10, [%r8+-256]; st.global.u32 [%d1], %r10;
END:
    """
    found = launch(body, **options)
    assert found[64:].tolist() == [3 * i for i in range(64)]


BARRIERS: dict[str, tuple[str, type[TilewaveError], str]] = {
    "too many": ("bar.sync 1, 96;", BarrierError, "128 threads come|deadlock"),
    "never complete": (
        "setp.ge.u32 %p1, %r4, 2; @%p1 ret; mov.u32 %r9, 3; bar.sync %r9, 96;",
        BarrierError,
        "deadlock: 64 threads .*: 64 of 96 threads have come to barrier 3; 64 threads have ended",
    ),
    "no multiple of 32": ("mov.u32 %r9, 1; bar.sync %r9, 33;", BarrierError, "multiples of 32"),
    "no such barrier": ("mov.u32 %r9, 16; bar.sync %r9, 128;", BarrierError, "barriers 0 to 15"),
    "two opinions": (
        "mov.u32 %r9, 1; setp.ge.u32 %p1, %r4, 2; selp.u32 %r10, 64, 96, %p1; bar.sync %r9, %r10;",
        BarrierError,
        "threads before came with|for 64|for 96",
    ),
    "a part of a warp arrives": ("@%p0 bar.arrive 1, 64;", BarrierError, "not all threads of a warp arrive"),
    "some have ended": (
        "setp.ge.u32 %p1, %r4, 3; @%p1 ret; mov.u32 %r9, 1; bar.sync %r9;",
        BarrierError,
        "32 of 128 threads never come to this barrier",
    ),
}


@pytest.mark.parametrize("name", BARRIERS)
@pytest.mark.parametrize("order", [None, 1, 2])
def test_faults_at_barriers(name: str, order: int | None) -> None:
    body, error, message = BARRIERS[name]
    padding = "" if "%r9" in body or "arrive" in body else "mov.u32 %r9, 1; bar.arrive 2, 1024;"
    with pytest.raises(error, match=message):
        launch(padding + body, order=order)


def test_arriving_hands_on_what_came_before_and_nothing_else() -> None:
    body = """
    setp.ge.u32 %p1, %r4, 1; @%p1 bra TAKE;
    {before} bar.arrive 1, 64; {after} bra END;
TAKE: setp.ge.u32 %p1, %r4, 2; @%p1 bra END; bar.sync 1, 64; ld.shared.u32 %r10, [%r2];
END:
    """
    store = "st.shared.u32 [%r8], %r0;"
    for order in range(4):
        launch(body.format(before=store, after=""), order=order, detect_races=True)
        with pytest.raises(RaceError, match="with nothing to order the two"):
            launch(body.format(before="", after=store), order=order, detect_races=True)


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0xFFFF0000, 0x00000008])
def test_an_election_is_won_by_the_first_of_the_named(mask: int) -> None:
    body = f"""
    mov.u32 %r9, {mask}; shr.u32 %r10, %r9, %r3; and.b32 %r10, %r10, 1; setp.eq.u32 %p1, %r10, 0;
    @%p1 bra END;
    elect.sync %r11|%p2, %r9; selp.u32 %r12, 1000, 0, %p2; add.u32 %r12, %r12, %r11;
    st.global.u32 [%d1], %r12;
END:
    """
    first = (mask & -mask).bit_length() - 1
    lane = np.arange(128) % 32
    expected = np.where(mask >> lane & 1, np.where(lane == first, 1000, 0) + first, 0xDEAD)
    assert launch(body).tolist() == expected.tolist()
    assert launch(body, order=1).tolist() == expected.tolist()


SPECIALISED = """
    setp.ge.u32 %p1, %r0, 128; @%p1 bra CONSUMER;
    {producer} bra END;
CONSUMER: {consumer}
END:
"""


@pytest.mark.parametrize("order", [None, 1, 2, 3])
def test_registers_wander_between_warpgroups(order: int | None) -> None:
    """The consumer's inc waits until the producer has given its registers back."""
    body = SPECIALISED.format(
        producer="setmaxnreg.dec.sync.aligned.u32 24;", consumer="setmaxnreg.inc.sync.aligned.u32 168;"
    )
    launch(body, block=256, order=order, registers=96)
    late = SPECIALISED.format(
        producer="bar.sync 1, 256; setmaxnreg.dec.sync.aligned.u32 24;",
        consumer="setmaxnreg.inc.sync.aligned.u32 168; bar.sync 1, 256;",
    )
    with pytest.raises(
        BarrierError, match=r"deadlock.*setmaxnreg.inc.*: 0 registers are free, 24576 are held"
    ):
        launch(late, block=256, order=order, registers=96)


@pytest.mark.parametrize(
    ("producer", "consumer", "message"),
    [
        ("setmaxnreg.dec.sync.aligned.u32 24;", "setmaxnreg.inc.sync.aligned.u32 176;", "deadlock"),
        ("setmaxnreg.dec.sync.aligned.u32 104;", "", "has 96 registers a thread, fewer than 104"),
        ("setmaxnreg.inc.sync.aligned.u32 88;", "", "has 96 registers a thread, more than 88"),
        ("setmaxnreg.dec.sync.aligned.u32 20;", "", "multiples of 8 from 24 to 256"),
        (
            "setp.ge.u32 %p2, %r4, 2; @%p2 bra END; setmaxnreg.dec.sync.aligned.u32 24;",
            "",
            "whole warpgroups|deadlock",
        ),
    ],
)
def test_faults_of_register_counts(producer: str, consumer: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        launch(SPECIALISED.format(producer=producer, consumer=consumer), block=256, registers=96)


@pytest.mark.parametrize("order", [None, 1, 2])
def test_a_lane_may_poll_for_what_another_of_its_warp_does(order: int | None) -> None:
    """The polling loop comes first in the program; the other lanes must get on nevertheless."""
    body = """
    @%p0 st.shared.u32 [%r2], 0; mov.u32 %r9, 1; bar.sync %r9, 32; setp.ne.u32 %p1, %r0, 5; @%p1 bra SET;
POLL: ld.volatile.shared.u32 %r10, [%r2]; setp.ne.u32 %p2, %r10, 77; @%p2 bra POLL;
    st.global.u32 [%d1], %r10; ret;
SET: mov.u32 %r11, 77; setp.eq.u32 %p3, %r0, 9; @%p3 st.volatile.shared.u32 [%r2], %r11;
    """.replace("[%r2], 0;", "[%r2], %r0;")
    assert launch(body, block=32, order=order)[5] == 77


# -- clusters -----------------------------------------------------------------------------------------------

MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


@pytest.mark.parametrize("options", [{}, {"order": 1}, {"order": 2, "detect_races": True}])
@pytest.mark.parametrize("store", [True, False])
def test_blocks_of_a_cluster_reach_each_others_shared_memory(store: bool, options: dict[str, Any]) -> None:
    """Each block writes into, or reads from, the shared memory of the next of four."""
    to_next = "mov.u32 %r10, %cluster_ctarank; add.u32 %r10, %r10, 1; and.b32 %r10, %r10, 3;"
    address = "mapa.shared::cluster.u32 %r11, %r8, %r10; mad.lo.u32 %r12, %r5, 1000, %r0;"
    if store:
        body = f"{to_next} {address} st.shared::cluster.u32 [%r11], %r12; {MEET} ld.shared.u32 %r13, [%r8];"
    else:
        body = f"{to_next} {address} st.shared.u32 [%r8], %r12; {MEET}"
        body += f"ld.shared::cluster.u32 %r13, [%r11]; {MEET}"
    found = launch(f"{body} st.global.u32 [%d1], %r13;", block=32, grid=8, cluster=(4,), **options)
    block, thread = np.divmod(np.arange(256), 32)
    other = block // 4 * 4 + (block % 4 + (3 if store else 1)) % 4
    assert found.tolist() == (1000 * other + thread).tolist()


def test_where_a_block_is_in_its_cluster() -> None:
    names = ["clusterid.x", "nclusterid.x", "cluster_ctaid.x", "cluster_nctaid.x"]
    names += ["cluster_ctarank", "cluster_nctarank"]
    expected = [[b // 2, 3, b % 2, 2, b % 2, 2] for b in range(6)]
    body = "mov.u32 %r9, 0;" + "".join(
        f"mov.u32 %r10, %{name}; mad.lo.u32 %r9, %r9, 10, %r10;" for name in names
    )
    found = launch(f"{body} {MEET} st.global.u32 [%d1], %r9;", block=32, grid=6, cluster=(2, 1, 1))
    wanted = [int("".join(map(str, row))) for row in expected]
    assert found.reshape(6, 32)[:, 0].tolist() == wanted


@pytest.mark.parametrize("options", [{}, {"order": 1}, {"order": 2, "detect_races": True}])
def test_a_copy_for_several_blocks_and_arrivals_from_afar(
    options: dict[str, Any], rng: np.random.Generator
) -> None:
    """Block 0 loads a box into both blocks; both report to block 0's second mbarrier when they have read."""
    values = rng.integers(0, 1 << 32, (4, 32), dtype=np.uint32)

    def tensor(memory: Memory) -> TensorMap:
        return TensorMap("uint32", memory.put(values).address, (32, 4), (128,), (32, 4))

    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    body = f"""
    @%p0 mbarrier.init.shared.b64 [%r1], 1; @%p0 mbarrier.init.shared.b64 [%r1+8], 256;
    @%p0 fence.mbarrier_init.release.cluster; {MEET}
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    mov.u32 %r10, %cluster_ctarank; setp.ne.u32 %p1, %r10, 0; or.pred %p2, %p1, %p1; @!%p0 bra W;
    @%p1 bra W;
    mov.u32 %r11, 0; mov.b64 %d2, map; cvta.param.u64 %d3, %d2; mov.u16 %h0, 3;
    {copy} [%r2], [%d3, {{%r11, %r11}}], [%r1], %h0;
W:  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra W;
    ld.shared.u32 %r12, [%r8]; st.global.u32 [%d1], %r12;
    mov.u32 %r13, 0; add.u32 %r14, %r1, 8; mapa.shared::cluster.u32 %r15, %r14, %r13;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r15];
    @%p1 bra END;
V:  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1+8], 0; @!%p3 bra V;
END: {MEET}
    """
    found = launch(body, grid=2, cluster=(2,), tensor=tensor, **options)
    assert found.tolist() == [*values.reshape(-1).tolist(), *values.reshape(-1).tolist()]


CLUSTER_FAULTS: dict[str, tuple[str, type[TilewaveError], str]] = {
    "no such block": (
        f"mov.u32 %r9, 2; mapa.shared::cluster.u32 %r10, %r8, %r9; {MEET}",
        EmulationError,
        "no block 2 in a cluster of 2",
    ),
    "outside": (
        f"mov.u32 %r9, 1; mapa.shared::cluster.u32 %r10, %r8, %r9; add.u32 %r10, %r10, 8192;{MEET}"
        "st.shared::cluster.u32 [%r10], %r9;",
        MemoryFault,
        "outside",
    ),
    "a wait without an arrival": ("barrier.cluster.wait.aligned;", BarrierError, "has not arrived"),
    "two arrivals": (
        "barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;",
        BarrierError,
        "twice without waiting",
    ),
    "a block that does not come": (
        "mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r9, 1; @%p1 bra L;"
        f"{MEET} ret; L: barrier.cluster.arrive.aligned; mov.u32 %r10, 1; bar.sync %r10, 256;",
        BarrierError,
        "deadlock",
    ),
}


@pytest.mark.parametrize("name", CLUSTER_FAULTS)
@pytest.mark.parametrize("order", [None, 1])
def test_faults_of_clusters(name: str, order: int | None) -> None:
    body, error, message = CLUSTER_FAULTS[name]
    with pytest.raises(error, match=message):
        launch(body, grid=2, cluster=(2,), order=order)


def test_another_blocks_memory_is_raced_for() -> None:
    body = """
    mov.u32 %r9, 1; mapa.shared::cluster.u32 %r10, %r2, %r9;
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; st.shared::cluster.u32 [%r10], %r9;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    with pytest.raises(RaceError, match=r"which (warp 0|another warp) has written .* with nothing to order"):
        launch(body, block=32, grid=2, cluster=(2,), detect_races=True)


REMOTE = {
    "store": "st.shared::cluster.u32 [%r10], %r9;",
    "load": "ld.shared::cluster.u32 %r9, [%r10];",
    "arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];",
}


@pytest.mark.parametrize("access", REMOTE)
@pytest.mark.parametrize("order", [None, 1, 2])
@pytest.mark.parametrize("closed", [False, True])
def test_a_block_that_has_ended_has_no_memory(access: str, order: int | None, closed: bool) -> None:
    """Block 0 takes long before it reaches into block 1, which ends unless both meet once more."""
    body = f"""
    mov.u32 %r9, 1; mapa.shared::cluster.u32 %r10, %r8, %r9; mapa.shared::cluster.u32 %r11, %r1, %r9;
    @%p0 mbarrier.init.shared.b64 [%r1], 32; @%p0 fence.mbarrier_init.release.cluster; {MEET}
    setp.eq.u32 %p1, %r5, 1; mov.u32 %r12, 0; @%p1 bra END;
LONG: add.u32 %r12, %r12, 1; setp.lt.u32 %p2, %r12, 99; @%p2 bra LONG;
    {REMOTE[access]}
END: {MEET if closed else ""}
    """
    if closed:
        launch(body, block=32, grid=2, cluster=(2,), order=order)
        return
    with pytest.raises(MemoryFault, match="block 1 of its cluster, which has ended"):
        launch(body, block=32, grid=2, cluster=(2,), order=order)


def test_launches_that_make_no_cluster() -> None:
    with pytest.raises(UsageError, match=r"grid \(3, 1, 1\) is no multiple of the cluster \(2, 1, 1\)"):
        launch(MEET, grid=3, cluster=(2,))
    with pytest.raises(UsageError, match="uses nothing that needs a cluster"):
        launch("", grid=2, cluster=(2,))
    text = kernel(MEET).replace("k()", "k() .reqnctapercluster 2, 1, 1")
    emulate(text, "k", (4,), (32,), [], Memory())
    with pytest.raises(UsageError, match="is compiled for"):
        emulate(text, "k", (4,), (32,), [], Memory(), cluster=(4,))
