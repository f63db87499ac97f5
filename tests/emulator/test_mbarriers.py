"""Mbarriers: phases, parities, tokens, byte counts; what is wrong with them is said, deadlocks included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.emulator import Memory
from tilewave.errors import BarrierError, EmulationError, MemoryFault, RaceError

DECLARATIONS = ".shared .align 8 .b8 bars[64]; .shared .align 16 .b8 data[4096];"
START = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, bars; mov.u32 %r2, data;
    setp.eq.u32 %p0, %r0, 0;
"""


def launch(body: str, block: int = 64, words: int = 64, **options: Any) -> np.ndarray[Any, Any]:
    """Run a kernel whose threads may store into the `words` words at %d0."""
    memory = Memory()
    out = memory.put(np.full(words, 0xDEAD, np.uint32))
    text = kernel(f"ld.param.u64 %d0, [q0];\n{START}{body}", ".param .u64 q0", DECLARATIONS)
    run(text, [out], memory, block=block, **options)
    return memory.get(out)


def test_phases_tokens_and_parities() -> None:
    """One thread counts an mbarrier of two arrivals down by hand and looks at it in between.

    A token tells whether its phase has ended in that phase and the next; later ones know nothing of it.
    """
    steps = [
        ("", (0, 1)),  # (parity 0 done, parity 1 done): the phase before the first counts as done
        ("mbarrier.arrive.shared.b64 %d1, [%r1];", (0, 1)),
        ("mbarrier.arrive.shared::cta.b64 %d2, [%r1];", (1, 0)),
        ("mbarrier.arrive.shared.b64 _, [%r1], 2;", (0, 1)),
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;", (0, 1)),
        ("mbarrier.arrive.shared.b64 _, [%r1];", (0, 1)),
        ("mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%r1], 8;", (0, 1)),
        ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 8;", (0, 1)),
        ("mbarrier.complete_tx.shared.b64 [%r1], 16;", (1, 0)),
        ("mbarrier.complete_tx.shared.b64 [%r1], 32;", (1, 0)),  # bytes may come before they are expected
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 32;", (1, 0)),
        ("mbarrier.arrive.shared.b64 _, [%r1];", (0, 1)),
        ("mbarrier.arrive_drop.shared.b64 _, [%r1];", (0, 1)),
        ("mbarrier.arrive.shared.b64 _, [%r1];", (1, 0)),
        ("mbarrier.arrive.shared.b64 _, [%r1];", (0, 1)),  # one arrival is enough now
    ]
    steps += [
        ("mbarrier.arrive.shared.b64 %d3, [%r1];", (1, 0)),
        ("mbarrier.arrive.shared.b64 %d4, [%r1];", (0, 1)),
    ]
    # After these steps: whether the phase of a token has ended.
    tokens = {1: [("%d1", 0)], 2: [("%d1", 1), ("%d2", 1)], len(steps) - 2: [("%d3", 1)]}
    tokens[len(steps) - 1] = [("%d4", 1)]
    body = "mbarrier.init.shared.b64 [%r1], 2;\n"
    expected: list[int] = []

    def look(state: str, of: str = "") -> None:
        nonlocal body
        body += f"mbarrier.test_wait{of}.shared.b64 %p1, [%r1], {state}; selp.u32 %r3, 1, 0, %p1;\n"
        body += f"st.global.u32 [%d0+{4 * len(expected)}], %r3;\n"

    for number, (instruction, parities) in enumerate(steps):
        body += f"{instruction}\n"
        for parity, done in enumerate(parities):
            look(str(parity), ".parity")
            expected.append(done)
        for token, done in tokens.get(number, []):
            look(token)
            expected.append(done)
    found = launch(f"@!%p0 ret;\n{body}", block=32)
    assert found[: len(expected)].tolist() == expected


WAIT = """
W{n}: mbarrier.try_wait.parity.shared::cta.b64 %p1, [{address}], {parity};
@!%p1 bra W{n};
"""


def wait(n: int, address: str, parity: str) -> str:
    """A loop that waits for a phase."""
    return WAIT.format(n=n, address=address, parity=parity)


MAKE = "@%p0 mbarrier.init.shared.b64 [%r1], {count};\nbar.sync 0;\n"


@pytest.mark.parametrize("options", [{}, {"order": 3}, {"order": 4, "detect_races": True}])
def test_one_warp_waits_for_the_other(options: dict[str, Any], rng: np.random.Generator) -> None:
    """Warp 0 makes values round after round, warp 1 takes them: two mbarriers hand the buffer to and fro."""
    rounds = int(rng.integers(2, 9))
    body = f"""
    @%p0 mbarrier.init.shared.b64 [%r1], 32; @%p0 mbarrier.init.shared.b64 [%r1+8], 32;
    bar.sync 0;
    and.b32 %r5, %r0, 31; shl.b32 %r6, %r5, 2; add.u32 %r7, %r2, %r6; mov.u32 %r8, 0; mov.u32 %r9, 0;
    setp.ge.u32 %p2, %r0, 32; @%p2 bra TAKE;
MAKE: and.b32 %r10, %r8, 1; xor.b32 %r10, %r10, 1;
    {wait(1, "%r1+8", "%r10")}
    mad.lo.u32 %r11, %r8, 1000, %r5; st.shared.u32 [%r7], %r11;
    mbarrier.arrive.shared.b64 _, [%r1];
    add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, {rounds}; @%p3 bra MAKE; ret;
TAKE: and.b32 %r10, %r8, 1;
    {wait(2, "%r1", "%r10")}
    xor.b32 %r12, %r7, 4; ld.shared.u32 %r11, [%r12]; add.u32 %r9, %r9, %r11;
    mbarrier.arrive.shared.b64 _, [%r1+8];
    add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, {rounds}; @%p3 bra TAKE;
    mul.wide.u32 %d1, %r5, 4; add.s64 %d1, %d0, %d1; st.global.u32 [%d1], %r9;
    """
    found = launch(body, **options)
    lanes = np.arange(32) ^ 1
    assert found[:32].tolist() == (rounds * (rounds - 1) // 2 * 1000 + rounds * lanes).tolist()


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("mbarrier.arrive.shared.b64 _, [%r1];", BarrierError, "there is no mbarrier at byte 1024"),
        ("@%p0 mbarrier.init.shared.b64 [%r1+4], 1;", MemoryFault, "misaligned"),
        ("@%p0 mbarrier.init.shared.b64 [%r1+65536], 1;", MemoryFault, "outside"),
        (
            "@%p0 mbarrier.init.shared.b64 [%r1+-1024], 1;",
            MemoryFault,
            "at byte 0 is .* outside the 4160",
        ),
        ("mbarrier.init.shared.b64 [%r1], 1;", BarrierError, "there is the mbarrier at byte 1024 .* already"),
        ("@%p0 mbarrier.init.shared.b64 [%r1], 0;", BarrierError, "an mbarrier of 0 arrivals"),
        (MAKE.format(count=63) + "mbarrier.arrive.shared.b64 _, [%r1], 2;", BarrierError, "2 more arrivals"),
        (
            MAKE.format(count=3)
            + "@%p0 mbarrier.inval.shared.b64 [%r1]; bar.sync 0; mbarrier.arrive.shared.b64 _, [%r1];",
            BarrierError,
            "there is no mbarrier",
        ),
        (
            MAKE.format(count=1) + "@%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 1048576;",
            BarrierError,
            "counts 1048576 bytes",
        ),
        (
            MAKE.format(count=1) + "mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 2;",
            BarrierError,
            "a parity other than 0 and 1",
        ),
        (
            MAKE.format(count=1)
            + "@%p0 mbarrier.arrive.shared.b64 %d1, [%r1]; @%p0 mbarrier.arrive.shared.b64 _, [%r1];"
            + "@%p0 mbarrier.test_wait.shared.b64 %p1, [%r1], %d1;",
            BarrierError,
            "which is in its phase 2, with the token of phase 0: accepted are tokens of the current",
        ),
        (
            MAKE.format(count=1) + "mov.u64 %d1, 1; @%p0 mbarrier.try_wait.shared.b64 %p1, [%r1], %d1;",
            BarrierError,
            "which is in its phase 0, with the token of phase 1",
        ),
    ],
)
@pytest.mark.parametrize("order", [None, 1])
def test_mistakes(body: str, error: type[EmulationError], message: str, order: int | None) -> None:
    with pytest.raises(error, match=rf"PTX line \d+: .*{message}"):
        launch(body, order=order)


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (
            MAKE.format(count=65) + "mbarrier.arrive.shared.b64 _, [%r1];" + wait(1, "%r1", "0"),
            ["64 threads .* wait at PTX line", "phase 0 .parity 0. lacks 1 of 65 arrivals"],
        ),
        (
            MAKE.format(count=1)
            + "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 48;"
            + wait(1, "%r1", "0"),
            ["lacks 48 bytes that were expected"],
        ),
        (
            MAKE.format(count=1)
            + "@%p0 mbarrier.complete_tx.shared.b64 [%r1], 48; @%p0 mbarrier.arrive.shared.b64 _, [%r1];"
            + wait(1, "%r1", "0"),
            ["lacks 48 bytes to be expected that have already come"],
        ),
        (
            MAKE.format(count=64) + "mbarrier.arrive.shared.b64 _, [%r1];" + wait(1, "%r1", "1"),
            ["phase 1 .parity 1. lacks 64 of 64 arrivals"],
        ),
        (
            MAKE.format(count=1) + "setp.ge.u32 %p2, %r0, 32; @%p2 ret;" + wait(1, "%r1", "0"),
            ["32 threads have ended"],
        ),
        (
            MAKE.format(count=1)
            + "setp.ge.u32 %p2, %r0, 32; @%p2 bra OTHER;"
            + wait(1, "%r1", "0")
            + "OTHER: bar.sync 1, 64;",
            ["barrier 1", "32 of 64 threads have come", "mbarrier.try_wait"],
        ),
    ],
)
@pytest.mark.parametrize("order", [None, 1])
def test_deadlocks_name_who_waits_for_what(body: str, messages: list[str], order: int | None) -> None:
    with pytest.raises(BarrierError, match="deadlock: ") as caught:
        launch(body, order=order)
    for message in messages:
        assert caught.match(message)


RACES = {
    "nothing orders the making": (
        "@%p0 mbarrier.init.shared.b64 [%r1], 64; mbarrier.arrive.shared.b64 _, [%r1];",
        "nothing orders its making before|there is no mbarrier",
    ),
    "a relaxed arrival hands nothing on": (
        MAKE.format(count=32)
        + "setp.ge.u32 %p2, %r0, 32; @%p2 bra TAKE; st.shared.u32 [%r2], %r0;"
        + "mbarrier.arrive.relaxed.cta.shared.b64 _, [%r1]; ret;\nTAKE:"
        + wait(1, "%r1", "0")
        + "ld.shared.u32 %r3, [%r2];",
        "reads byte .*, which warp 0 has written",
    ),
    "no wait": (
        MAKE.format(count=32)
        + "setp.ge.u32 %p2, %r0, 32; @%p2 bra TAKE; st.shared.u32 [%r2], %r0;"
        + "mbarrier.arrive.shared.b64 _, [%r1]; ret;\nTAKE: ld.shared.u32 %r3, [%r2];",
        "with nothing to order the two",
    ),
    "an ordinary store": (
        MAKE.format(count=32) + "@%p0 st.shared.u32 [%r1+4], %r0;",
        "belongs to an mbarrier",
    ),
}


@pytest.mark.parametrize("name", RACES)
@pytest.mark.parametrize("order", [None, 1, 2])
def test_races(name: str, order: int | None) -> None:
    body, message = RACES[name]
    with pytest.raises((RaceError, BarrierError), match=message):
        launch(body, order=order, detect_races=True)


def test_a_polling_thread_may_do_other_things() -> None:
    """test_wait does not block: the thread that polls is the one that completes the phase in the end."""
    body = f"""
    {MAKE.format(count=1)}
    @!%p0 bra END; mov.u32 %r8, 0;
POLL: mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;
    @%p1 bra DONE;
    add.u32 %r8, %r8, 1; setp.eq.u32 %p2, %r8, 3; @%p2 mbarrier.arrive.shared.b64 _, [%r1];
    bra POLL;
DONE: st.global.u32 [%d0], %r8;
END:
    """
    assert launch(body)[0] == 3


COPY = """
    {make} shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d1, %r3; add.s64 %d1, %d0, %d1;
    cp.async.ca.shared.global [%r4], [%d1], 4; {arrive}
    {wait}
    xor.b32 %r5, %r3, 128; add.u32 %r5, %r5, %r2;
    ld.shared.u32 %r6, [%r5]; add.u32 %r6, %r6, %r0; st.global.u32 [%d1], %r6;
"""
ARRIVALS = {
    "counted": ("64", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];"),
    "not counted": (
        "64",
        "cp.async.mbarrier.arrive.shared.b64 [%r1]; mbarrier.arrive.shared.b64 _, [%r1];",
    ),
}


@pytest.mark.parametrize("options", [{}, {"order": 1}, {"order": 2, "detect_races": True}])
@pytest.mark.parametrize("name", ARRIVALS)
def test_arrivals_when_copies_have_landed(name: str, options: dict[str, Any]) -> None:
    """Each warp waits for the copies of both and takes what the other's has brought."""
    count, arrive = ARRIVALS[name]
    body = COPY.format(make=MAKE.format(count=count), arrive=arrive, wait=wait(1, "%r1", "0"))
    assert launch(body, **options)[:64].tolist() == [0xDEAD + i for i in range(64)]


def test_faults_of_arrivals_after_copies() -> None:
    arrive = ARRIVALS["counted"][1]
    missing = COPY.format(make=MAKE.format(count=65), arrive=arrive, wait=wait(1, "%r1", "0"))
    with pytest.raises(BarrierError, match="lacks 1 of 65 arrivals"):
        launch(missing)
    unwaited = COPY.format(make=MAKE.format(count=64), arrive=arrive, wait="")
    with pytest.raises(RaceError, match="with nothing to order the two"):
        launch(unwaited, detect_races=True)
    assert launch(unwaited)[0] == 0x7FFF7FFF
