"""The pass rule against a plain reading of it with sets and against profiler readings; the memo too."""

from __future__ import annotations

import numpy as np
import pytest

from tilewave.emulator.passes import (
    LINE_BYTES,
    TAG_SET_BITS,
    Kind,
    PatternMemo,
    copy_figures,
    global_sectors,
    local_sectors,
    shared_passes,
)
from tilewave.errors import UsageError

Generator = np.random.Generator
LANES = np.arange(32)
WIDTHS = [1, 2, 4, 8, 16]


def plain_passes(addresses: list[int], active: list[bool], width: int, kind: Kind) -> tuple[int, int]:
    """The rule of the module's docstring for one warp, lane by lane."""
    size = {16: 8, 8: 16}.get(width, 32)
    groups = [list(range(start, start + size)) for start in range(0, 32, size)]
    on = [lane for lane in range(32) if active[lane]]

    def agree(bit: int) -> bool:
        return all(addresses[lane] == addresses[lane ^ bit] for lane in on if active[lane ^ bit])

    if kind == "load" and len(groups) > 1 and (agree(1) or agree(2)):
        groups = [first + second for first, second in zip(groups[::2], groups[1::2], strict=True)]
    passes = conflicts = 0
    for group in groups:
        banks: dict[int, set[int]] = {}
        for lane in group:
            if active[lane]:
                for word in range(addresses[lane] // 4, (addresses[lane] + width - 1) // 4 + 1):
                    banks.setdefault(word % 32, set()).add(word)
        if banks:
            cost = max(map(len, banks.values()))
            passes, conflicts = passes + cost, conflicts + cost - 1
    return passes, conflicts


def plain_set(line: int) -> int:
    """The tag set of a line: the exclusive or of what its address bits contribute, bit 7 first."""
    number = 0
    for bit, value in enumerate([1, 2, 1, 2, 3, 1, 2, 3, 2, 1, 2, 1, 3, 1]):
        number ^= value if line >> bit & 1 else 0
    return number


def plain_copy(
    targets: list[int],
    sources: list[int],
    active: list[bool],
    reads: list[bool],
    width: int,
    bypass: bool,
    hits: bool,
) -> tuple[int, int, int]:
    """The copies' rule of the module's docstring for one warp: passes, conflicts and sectors."""
    on = [lane for lane in range(32) if active[lane]]
    lanes_of: dict[int, list[int]] = {}
    for lane in on:
        if reads[lane]:
            lanes_of.setdefault(sources[lane] // 128, []).append(lane)
    if bypass:
        written: set[int] = set()
        sectors = 0
        for lanes in sorted(lanes_of.values(), key=len, reverse=True):
            fresh = {targets[lane] for lane in lanes} - written
            written |= fresh
            sectors += len({target // 32 for target in fresh})
        zeros = [active[lane] and not reads[lane] for lane in range(32)]
        return *plain_passes(targets, zeros, width, "store"), sectors
    waiting: list[list[int]] = [[], [], [], []]
    for line in lanes_of:
        waiting[plain_set(line)].append(line)
    lookup = {line: 0 if hits else number for queue in waiting for number, line in enumerate(queue)}
    banks = 128 // width
    groups: dict[tuple[int, int | str], list[int]] = {}
    for lane in on:
        number = lookup[sources[lane] // 128] if reads[lane] else "zeros"
        groups.setdefault((lane // banks, number), []).append(lane)
    passes = 0
    for group in groups.values():
        free: dict[tuple[str, int], int] = {}
        for lane in group:
            ports = [("to", targets[lane] // width % banks)]
            ports += [("from", sources[lane] // width % banks)] if reads[lane] else []
            turn = max(free.get(port, 0) for port in ports)
            free |= dict.fromkeys(ports, turn + 1)
        passes += max(free.values())
    return passes, passes - len(groups), len({sources[lane] // 32 for lane in on if reads[lane]})


def random_pattern(rng: Generator, width: int) -> np.ndarray:
    """One of many kinds of lane map: random, few rows, strided, paired, permuted, all the same."""
    span = int(rng.choice([2, 4, 8, 16, 32, 64, 512]))
    places = rng.integers(0, span, 32)
    choice = rng.integers(0, 8)
    if choice == 0:
        places = LANES * int(rng.integers(0, 40))
    elif choice == 1:
        places = rng.permutation(32)
    elif choice in (2, 3):
        # Lanes that differ only in some bits share an address: lane^1 and lane^2 agree, or nearly so.
        drop = int(rng.choice([1, 2, 3, 4, 8, 16, 17, 18, 12]))
        places = places[LANES & ~drop]
    elif choice == 4:
        places = places[LANES & ~int(rng.choice([1, 2]))]
        places[rng.integers(0, 32)] = rng.integers(0, span)
    elif choice == 5:
        places = (LANES // int(rng.choice([2, 4, 8, 16]))) * int(rng.integers(1, 34)) + places % 2
    elif choice == 6:
        # A different rule in each half.
        places = np.where(LANES < 16, places[LANES & ~1], places[LANES & ~2])
    return places * width


def random_mask(rng: Generator) -> np.ndarray:
    masks: list[np.ndarray] = [
        np.ones(32, bool),
        LANES % 2 == 1,
        rng.random(32) < 0.5,
        rng.random(32) < 0.9,
        rng.integers(0, 33) > LANES,
        LANES >= 16,
        rng.integers(0, 32) == LANES,
        np.zeros(32, bool),
    ]
    return masks[rng.integers(0, len(masks))]


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("width", WIDTHS)
def test_random_patterns_against_the_plain_rule(rng: Generator, width: int, kind: Kind) -> None:
    warps = 600
    addresses = np.stack([random_pattern(rng, width) for _ in range(warps)])
    active = np.stack([random_mask(rng) for _ in range(warps)])
    addresses[~active] = rng.integers(-(1 << 40), 1 << 40, int((~active).sum()))
    passes, conflicts = shared_passes(addresses, active, width, kind)
    memo = PatternMemo()
    summed = np.zeros(2, np.int64)
    for warp in range(warps):
        expected = plain_passes(addresses[warp].tolist(), active[warp].tolist(), width, kind)
        assert (passes[warp], conflicts[warp]) == expected, (addresses[warp], active[warp])
        summed += expected
    for _ in range(2):
        shift = 4 * rng.integers(0, 1000, (warps, 1)) * max(1, width // 4)
        order = rng.permutation(warps)
        assert memo.shared_passes((addresses + shift)[order], active[order], width, kind) == tuple(
            summed.tolist()
        )


def random_copies(rng: Generator, width: int) -> tuple[np.ndarray, ...]:
    """Targets, sources, active lanes and those that read, of 600 copies."""
    warps = 600
    targets = np.stack([random_pattern(rng, width) for _ in range(warps)])
    sources = np.stack([random_pattern(rng, width) * int(rng.choice([1, 1, 9, 33, 1024])) for _ in targets])
    active = np.stack([random_mask(rng) for _ in range(warps)])
    reads = np.where(rng.random((warps, 1)) < 0.5, True, rng.random((warps, 32)) < 0.7)
    sources[~(active & reads)] = rng.integers(-(1 << 40), 1 << 40, int((~(active & reads)).sum()))
    return targets, sources, active, reads


@pytest.mark.parametrize("hits", [False, True])
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_random_copies_against_the_plain_rule(rng: Generator, width: int, bypass: bool, hits: bool) -> None:
    targets, sources, active, reads = random_copies(rng, width)
    warps = len(targets)
    found = copy_figures(targets, sources, active, width, bypass=bypass, reads=reads, hits=hits)
    figures = np.stack(found, axis=1)
    for warp in range(warps):
        to, come, on, read = (part[warp].tolist() for part in (targets, sources, active, reads))
        assert tuple(figures[warp]) == plain_copy(to, come, on, read, width, bypass, hits), warp


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_the_memo_remembers_copies(rng: Generator, width: int, bypass: bool) -> None:
    targets, sources, active, reads = random_copies(rng, width)
    warps = len(targets)
    misses, hits = (
        copy_figures(targets, sources, active, width, bypass=bypass, reads=reads, hits=hits)
        for hits in (False, True)
    )
    figures = np.stack([*misses, *hits[:2]], axis=1)
    memo = PatternMemo()
    for _ in range(2):
        order = rng.permutation(warps)
        moved = (targets + 128 * rng.integers(0, 100, (warps, 1)))[order]
        # This moves no address bit that the tag sets depend on.
        far = (sources + (LINE_BYTES << len(TAG_SET_BITS)) * rng.integers(0, 100, (warps, 1)))[order]
        found = memo.copy_figures(moved, far, active[order], width, bypass=bypass, reads=reads[order])
        assert found == tuple(figures.sum(axis=0))
    one = memo.copy_figures(targets[:1], sources[:1], active[:1], width, bypass=bypass, reads=reads[:1])
    assert one == tuple(figures[0])
    assert memo.copy_figures(targets[:0], sources[:0], None, width, bypass=bypass) == (0, 0, 0, 0, 0)


def test_copies_without_masks_are_copies_of_all_lanes(rng: Generator) -> None:
    targets, sources = (np.stack([random_pattern(rng, 16) for _ in range(50)]) for _ in range(2))
    every = np.ones(targets.shape, dtype=bool)
    figures = np.stack(copy_figures(targets, sources, None, 16))
    assert np.array_equal(figures, np.stack(copy_figures(targets, sources, every, 16, reads=every)))
    assert PatternMemo().copy_figures(targets, sources, None, 16)[:3] == tuple(figures.sum(axis=1))


@pytest.mark.parametrize("width", WIDTHS)
def test_sectors_are_the_distinct_ones_of_the_active_lanes(rng: Generator, width: int) -> None:
    warps = 400
    base = 0x7F00_0000_0000
    addresses = base + np.stack([random_pattern(rng, width) for _ in range(warps)])
    active = np.stack([random_mask(rng) for _ in range(warps)])
    expected = [
        len({int(a) // 32 for a, on in zip(row, mask, strict=True) if on})
        for row, mask in zip(addresses, active, strict=True)
    ]
    assert global_sectors(addresses, active, width).tolist() == expected
    memo = PatternMemo()
    for _ in range(2):
        shift = 32 * rng.integers(0, 1000, (warps, 1))
        assert memo.global_sectors((addresses + shift).astype(np.uint64), active, width) == sum(expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_memo_without_a_mask_is_the_same(rng: Generator, width: int) -> None:
    addresses = np.stack([random_pattern(rng, width) for _ in range(100)])
    memo = PatternMemo()
    kinds: tuple[Kind, ...] = ("load", "store")
    for kind in kinds:
        passes, conflicts = shared_passes(addresses, None, width, kind)
        every = np.ones(addresses.shape, bool)
        assert np.array_equal(shared_passes(addresses, every, width, kind), (passes, conflicts))
        for dtype in (np.int64, np.uint32, np.uint64):
            got = memo.shared_passes(addresses.astype(dtype), None, width, kind)
            assert got == (passes.sum(), conflicts.sum())
        assert memo.shared_passes(addresses, every, width, kind) == (passes.sum(), conflicts.sum())
    assert memo.global_sectors(addresses, None, width) == global_sectors(addresses, None, width).sum()


def test_the_memo_tells_sector_alignment_apart() -> None:
    memo = PatternMemo()
    row = LANES[None] * 4
    assert memo.global_sectors(row, None, 4) == 4
    assert memo.global_sectors(row + 4, None, 4) == 5
    assert memo.global_sectors(row + 32, None, 4) == 4


def one(addresses: np.ndarray, width: int, kind: Kind = "load") -> int:
    return int(shared_passes(addresses[None], None, width, kind)[0][0])


@pytest.mark.parametrize(("width", "expected"), [(4, 1), (8, 2), (16, 4)])
def test_contiguous_accesses_need_one_pass_per_128_bytes(width: int, expected: int) -> None:
    assert one(LANES * width, width) == one(LANES * width, width, "store") == expected
    assert int(global_sectors(LANES[None] * width, None, width)[0]) == width


def test_broadcast_merges_loads_but_not_stores() -> None:
    same = np.zeros(32, np.int64)
    assert [one(same, width) for width in (4, 8, 16)] == [1, 1, 2]
    assert [one(same, width, "store") for width in (4, 8, 16)] == [1, 2, 4]


@pytest.mark.parametrize("stride", range(1, 65))
def test_strided_words_conflict_by_the_common_divisor_with_32(stride: int) -> None:
    assert one(LANES * 4 * stride, 4) == np.gcd(stride, 32)


# Lane maps of the kernels that were profiled on an H200 and a GB10: passes per warp and k, or per load.


def test_reading_16_passes_per_k() -> None:
    """128x256 block, 16x8 per thread, row lane = lane / 8, column lane = lane % 8: 4 loads of A, 2 of B."""
    a = [one(LANES // 8 * 16 + 64 * i, 16) for i in range(4)]
    b = [one(LANES % 8 * 16 + 128 * j, 16) for j in range(2)]
    assert a == [2] * 4
    assert b == [4] * 2
    assert sum(a + b) == 16


def test_reading_12_passes_per_k() -> None:
    """128x128 block, 8x8 per thread, the same lanes: 2 loads of each operand."""
    assert sum(one(LANES // 8 * 16 + 64 * i, 16) + one(LANES % 8 * 16 + 128 * i, 16) for i in range(2)) == 12


def test_a_lane_map_that_merges_by_lane_1_and_by_lane_2() -> None:
    """Row = bit 0 + 2 bit 3, column = bit 1 + 2 bit 2 + 4 bit 4 (8x16 per thread: 2 + 4 loads per k).

    Every load merges. (The kernel with this map read 12.75 passes per warp and k, 0.75 above this figure; its
    A tile came untransposed through TMA, whose placement decides the rest.)
    """
    bit = [(LANES >> i) & 1 for i in range(5)]
    row, column = bit[0] + 2 * bit[3], bit[1] + 2 * bit[2] + 4 * bit[4]
    assert [one(row * 16 + 64 * i, 16) for i in range(2)] == [2, 2]
    assert [one(column * 16 + 128 * j, 16) for j in range(4)] == [2] * 4


def course_kernel_reads(split: bool) -> list[int]:
    """Four k steps of a 128x128 block of 16x16 threads: A untransposed (slice depth 32), 8x8 per thread."""
    thread_row, thread_column = LANES // 16, LANES % 16
    a = [one((thread_row * 8 + i) * 32 * 4, 16) for i in range(8)]
    spacing, second = (16, 256) if split else (32, 16)
    b = [one(thread_column * spacing + second * j + 512 * k, 16) for j in range(2) for k in range(4)]
    return a + b


def test_reading_course_kernel_5_passes_per_read() -> None:
    assert np.mean(course_kernel_reads(split=False)) == 5.0


def test_reading_split_columns_3_passes_per_read() -> None:
    assert np.mean(course_kernel_reads(split=True)) == 3.0


@pytest.mark.parametrize(("depth", "expected"), [(32, 8), (16, 4), (8, 2)])
def test_reading_transposing_stores(depth: int, expected: int) -> None:
    """depth / 4 lanes load one row of A by 16 bytes; each stores its floats in column `row` of 128 floats."""
    row, k = LANES // (depth // 4), LANES % (depth // 4) * 4
    assert one((k * 128 + row) * 4, 4, "store") == expected


def test_local_memory_is_interleaved_by_words(rng: Generator) -> None:
    same = np.full((1, 32), 8)
    assert [int(local_sectors(same, None, width)[0]) for width in (4, 8, 16)] == [4, 8, 16]
    assert int(local_sectors(same, LANES[None] < 9, 4)[0]) == 2
    assert int(local_sectors(same, LANES[None] < 0, 4)[0]) == 0
    # Lanes at different offsets of their own memory meet no common word.
    offsets = 4 * rng.permutation(32)[None]
    assert int(local_sectors(offsets, None, 4)[0]) == 32
    # Word 1 of lane 0's 8 bytes and lane 1's word at byte 4 lie in one sector.
    mixed = np.where(LANES == 0, 0, 4)[None]
    active = LANES[None] < 2
    assert int(local_sectors(mixed, active, 8)[0]) == 3


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="12 bytes"):
        shared_passes(LANES[None] * 12, None, 12)
    with pytest.raises(UsageError, match="shape"):
        global_sectors(LANES, None, 4)
    assert PatternMemo().shared_passes(np.empty((0, 32), np.int64), None, 4) == (0, 0)
